"""
Times what each part of `trl_quant/rollout/vllm/sampling.py` saves of a decode step, for many completions in flight.

    python benchmarks/host.py                          # 7B shapes on a GPU, tiny ones on a CPU
    python benchmarks/host.py --batches 128 192 --rounds 9

One engine samples generations of equal lengths: with all parts, and without each of them in turn, in that order in each
round. A row has the median over the rounds, in milliseconds of a decode step, and how much longer a step is without the
part. All prompts are in the prefix cache.

| part | is |
|---|---|
| text | vLLM converts no token to text |
| outputs | floats instead of vLLM's objects of log-probabilities, and one update of a completion, at its end |
| blocks | blocks of the cache are searched only when the last one is full |
| gc | no garbage collection during the generation |
"""

import os
import random
import statistics
import sys
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from unittest.mock import patch

from engines import (
    CUDA,
    PRECISIONS,
    build,
    engine_options,
    in_own_process,
    load_tokenizer,
    machine,
    model_directory,
    model_title,
    policy,
    report,
    save,
    seconds,
    words_of,
)
from limits import pool_bytes

from trl_quant.rollout.vllm import sampling


class VllmsBlocks:
    """Stands for `BlocksWithRoom`, and leaves vLLM's methods as they are."""

    def __init__(self, manager, block_size: int):
        self.allocate, self.cache = manager.allocate_slots, manager.cache_blocks


@contextmanager
def without_outputs():
    with ExitStack() as stack:
        stack.enter_context(patch.object(sampling, "HeldOutputs", lambda processor: processor.process_outputs))
        stack.enter_context(patch.object(sampling, "update_with_float_logps", lambda update, *given: update(*given)))
        yield


@contextmanager
def without_text_skipped(engine):
    lean = engine.engine.sampling

    @contextmanager
    def with_text():
        with lean():
            yield {}

    with patch.object(engine.engine, "sampling", with_text):
        yield


def without(part: str, engine) -> AbstractContextManager:
    """Context in which vLLM does what the part skips."""
    if part == "text":
        return without_text_skipped(engine)
    if part == "outputs":
        return without_outputs()
    if part == "blocks":
        return patch.object(sampling, "BlocksWithRoom", VllmsBlocks)
    if part == "gc":
        return patch.object(sampling.gc, "isenabled", lambda: False)
    return ExitStack()


PARTS = ("all", "text", "outputs", "blocks", "gc")


def measure(args) -> dict:
    """Returns the seconds of each generation, by number of completions and part."""
    (size,), (precision,) = args.sizes, args.precisions
    tokenizer = load_tokenizer(args.tokenizer)
    words, generator = words_of(tokenizer), random.Random(0)
    path, length = model_directory(size, tokenizer), args.prompt + args.new + 16
    arguments = {"kv_cache_memory_bytes": pool_bytes(size, max(args.batches), length)}
    if CUDA:
        arguments["compilation_config"] = {"cudagraph_capture_sizes": sorted({*args.batches, 1})}
    else:
        arguments["enforce_eager"] = True
    model = policy(path, args.lora, words)
    engine = build(
        precision,
        model,
        max(args.batches),
        args.new,
        length,
        args.lora_sync,
        tokenizer,
        **arguments | args.engine_kwargs,
    )
    found = {}
    for batch in args.batches:
        asked = [generator.choices(words, k=args.prompt) for _ in range(-(-batch // args.generations))]
        prompts = [ids for ids in asked for _ in range(args.generations)][:batch]
        engine.sync_weights()

        def sample(prompts=prompts) -> None:
            engine.generate(prompts, None, min(args.generations, len(prompts)))

        for _ in range(2):  # warms up kernels and caches
            sample()
        rows = found[batch] = {part: [] for part in PARTS}
        for _ in range(args.rounds):
            for part in PARTS:
                with without(part, engine):
                    rows[part].append(seconds(sample))
    return found


def main():
    parser = engine_options(__doc__)
    parser.add_argument("--precisions", nargs=1, choices=PRECISIONS, default=["fp8"] if CUDA else ["int8"])
    parser.add_argument("--batches", nargs="+", type=int, default=[64, 128, 192] if CUDA else [8])
    parser.add_argument("--new", type=int, default=256 if CUDA else 16, metavar="TOKENS")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, help="directory for a JSON file, compressed, named after the machine")
    args = parser.parse_args()
    if args.one:
        return report(measure(args))
    load = os.getloadavg()
    found = in_own_process([*sys.argv[1:], "--one", *args.precisions], args.timeout)
    if "error" in found:
        raise SystemExit(found["error"])
    save(f"host-{args.sizes[0]}", {"arguments": vars(args), "load": load, "results": found}, args.output)
    print(f"{machine()}, {model_title(args.sizes[0])}, {args.precisions[0]}, milliseconds of a decode step")
    print(f"{'without':<10}" + "".join(f"{f'{batch} in flight':>16}{'longer':>8}" for batch in args.batches))
    for part in PARTS:
        row = f"{part if part != 'all' else '-':<10}"
        for batch in args.batches:
            took, whole = (statistics.median(found[str(batch)][name]) for name in (part, "all"))
            row += f"{1e3 * took / args.new:>16.3f}{took / whole - 1:>8.1%}"
        print(row)


if __name__ == "__main__":
    main()
