"""
Measures sampled tokens per second, sync included, against TRL's merged BF16 path in the same run.

    python benchmarks/rollout.py                       # 7B shapes on a GPU, tiny ones on a CPU
    python benchmarks/rollout.py --sizes 7b 32b --precisions fp8 int8 nvfp4 --batches 1 8 64 256
    python benchmarks/rollout.py --precisions fp8 --batches 64 256 --profile

A LoRA policy of rank 32 is merged and synced. Then each prompt of 256 words gets completions of 512 tokens, with the 8
completions of a prompt in a row as in GRPO. They are sampled through TRL's class and ours, with the arguments of TRL's
trainer, a real tokenizer, and vLLM's defaults for torch.compile and CUDA graphs. Each engine runs in its own process.

`--profile` adds the time of a decode step by part, from further generations, in milliseconds. First the step, the
memory's limit (its time for reading the weights and the cached keys and values once) and the GPU's part. Then the parts
of the GPU's time: products and attention in the layers, the layers' other kernels, the head, and all that follows it
(sampling and log-probabilities). Then the host's parts: the scheduler (`schedule` includes `allocate`), the output
processor, the model runner (waiting included), `extract`, the conversion of the log-probabilities, and garbage
collection, which the others include. The file of `--output` also has each kernel.
"""

import gc
import random
import sys
import time
from contextlib import nullcontext, suppress
from functools import partial
from operator import attrgetter
from pathlib import Path

from decode import PARTS, decode_step
from engines import (
    BANDWIDTH,
    BASELINE,
    CUDA,
    PRECISIONS,
    Clock,
    build,
    change_weights,
    engine_options,
    in_own_process,
    load_tokenizer,
    machine,
    model_directory,
    model_title,
    of_card,
    policy,
    report,
    save,
    words_of,
)
from limits import pool_bytes, rarest_layers, step_bytes


CORE = "llm_engine.engine_core.engine_core"
RUNNER = "llm_engine.model_executor.driver_worker.model_runner"
HOST = {  # column of the profile -> object in vLLM's `LLM`, method
    "schedule": (f"{CORE}.scheduler", "schedule"),
    "allocate": (f"{CORE}.scheduler.kv_cache_manager", "allocate_slots"),
    "update": (f"{CORE}.scheduler", "update_from_output"),
    "outputs": ("llm_engine.output_processor", "process_outputs"),
    "forward": (RUNNER, "execute_model"),
    "sample": (RUNNER, "sample_tokens"),
}
COLUMNS = ("decode", "limit", "GPU", *PARTS, *HOST, "extract", "gc")


def measure(kind: str, args) -> dict:
    (size,), batches, tokenizer = args.sizes, sorted(args.batches), load_tokenizer(args.tokenizer)
    words, generator = words_of(tokenizer), random.Random(0)
    path, length = model_directory(size, tokenizer), args.prompt + args.new + 16
    arguments = {"kv_cache_memory_bytes": pool_bytes(size, max(batches), length)}
    if args.enforce_eager or not CUDA:
        arguments["enforce_eager"] = True
    else:
        arguments["compilation_config"] = {"cudagraph_capture_sizes": sorted({*batches, 1})}
    arguments |= args.trl_engine_kwargs if kind == "trl" else args.engine_kwargs
    model = policy(path, args.lora, words)
    engine = build(kind, model, max(batches), args.new, length, args.lora_sync, tokenizer, **arguments)
    if args.plain:
        engine.engine.sampling = partial(nullcontext, {})

    def sample(prompts: list[list[int]], new: int) -> list[list[int]]:
        engine.max_completion_length = new
        return engine.generate(prompts, None, min(args.generations, len(prompts)))[1]

    clock, result, prompts, ordinary = Clock(synchronize=True), {}, {}, set(words)
    for batch in batches:
        asked = [generator.choices(words, k=args.prompt) for _ in range(-(-batch // args.generations))]
        prompts[batch] = [ids for ids in asked for _ in range(args.generations)][:batch]
        engine.sync_weights()
        sample(prompts[batch], 8)  # warms up the kernels for this batch size
        clock.seconds.clear()
        change_weights(model)
        with clock.timing("sync"):
            engine.sync_weights()
        with clock.timing("sample"):
            completions = sample(prompts[batch], args.new)
        tokens = [token for completion in completions for token in completion]
        assert len(tokens) == batch * args.new, f"{len(tokens)} tokens instead of {batch * args.new}"
        share = sum(token in ordinary for token in tokens) / len(tokens)
        # A sync of an adapter alone does not bring the policy's base, so these samples are arbitrary tokens without
        # text
        assert args.lora_sync == "adapter" or share > 0.999, f"{share:.1%} of the tokens are ordinary words"
        sync, seconds = clock.seconds["sync"], clock.seconds["sample"]
        result[batch] = {"tokens_per_s": len(tokens) / (sync + seconds), "sync_s": sync, "sample_s": seconds}
    if args.profile:
        layers = rarest_layers(size)
        steps = {batch: decode_step(partial(sample, prompts[batch]), args.new, layers) for batch in batches}
        host = host_clock(engine, lean=kind != "trl" and not args.plain)
        for batch in batches:
            host.seconds.clear()
            sample(prompts[batch], args.new)
            per_step = {name: 1e3 * seconds / args.new for name, seconds in host.seconds.items()}
            moved = step_bytes(size, "bf16" if kind == BASELINE else kind, batch, args.prompt + args.new / 2)
            limit = {"limit": 1e3 * moved / of_card(BANDWIDTH)} if CUDA else {}
            result[batch]["profile"] = per_step | limit | steps[batch]
    return result


def host_clock(engine, lean: bool) -> Clock:
    """
    Builds a clock of the host's work in a generation. `lean` also watches our methods that replace vLLM's and TRL's.
    Methods that this vLLM or TRL lacks are left out.
    """
    from trl.generation import vllm_generation

    from trl_quant.rollout.vllm import engine as ours
    from trl_quant.rollout.vllm import sampling

    places = {name: (attrgetter(place)(engine.llm), method) for name, (place, method) in HOST.items()}
    places["extract"] = (ours, "read") if hasattr(engine, "sampler") else (vllm_generation, "extract_logprobs")
    if lean:
        places["allocate"] = sampling.BlocksWithRoom, "allocate"
        places["update"] = sampling, "update_with_float_logps"
        places["outputs"] = sampling.HeldOutputs, "__call__"
    clock = Clock()
    for name, (owner, method) in places.items():
        with suppress(AttributeError):
            clock.watch(owner, method, name)

    def collecting(phase: str, info: dict) -> None:
        clock.seconds["gc"] += time.perf_counter() * (1 if phase == "stop" else -1)

    gc.callbacks.append(collecting)
    return clock


def main():
    parser = engine_options(__doc__)
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=[p for p in PRECISIONS if p != BASELINE])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 64, 256] if CUDA else [1, 8])
    parser.add_argument("--new", type=int, default=512 if CUDA else 32, metavar="TOKENS")
    parser.add_argument("--enforce_eager", action="store_true")
    parser.add_argument("--profile", action="store_true", help="shows where the time goes")
    parser.add_argument("--plain", action="store_true", help="our engines sample as vLLM does by itself, text included")
    parser.add_argument("--output", type=Path, help="directory for a JSON file, compressed, named after the machine")
    args = parser.parse_args()
    if args.one:
        return report(measure(args.one, args))
    load_tokenizer(args.tokenizer)  # fails early if it is missing

    results = {}
    for size in args.sizes:
        print(f"{machine()}, {model_title(size)}, {args.prompt} tokens in, {args.new} out, LoRA of rank {args.lora}")
        heading = "".join(f"{f'batch {batch}':>13}{'ratio':>8}{'ms':>8}" for batch in args.batches)
        print(f"{'engine':<12}{heading}{'sync s':>9}", flush=True)
        found = results.setdefault(size, {})
        for kind in (BASELINE, *args.precisions):
            row = found[kind] = in_own_process([*sys.argv[1:], "--one", kind, "--sizes", size], args.timeout)
            save(f"rollout-{'-'.join(args.sizes)}", {"arguments": vars(args), "results": results}, args.output)
            if "error" in row:
                print(f"{kind:<12}{row['error'][:150]}", flush=True)
                continue
            cells = ""
            for batch in map(str, args.batches):
                rate, base = row[batch]["tokens_per_s"], found[BASELINE].get(batch)
                ratio = f"{rate / base['tokens_per_s']:.2f}" if base else "-"
                cells += f"{rate:>13.0f}{ratio:>8}{1e3 * row[batch]['sample_s'] / args.new:>8.2f}"
            print(f"{kind:<12}{cells}{row[str(args.batches[0])]['sync_s']:>9.3f}", flush=True)
        if args.profile:
            print_profile(found, args.batches)


def print_profile(found: dict, batches: list[int]) -> None:
    print(f"\n{'ms a step':<12}{'batch':>6}" + "".join(f"{name:>10}" for name in COLUMNS))
    for kind, row in found.items():
        for batch in batches if "error" not in row else ():
            profile = row[str(batch)]["profile"]
            cells = "".join(f"{profile[name]:>10.3f}" if name in profile else f"{'-':>10}" for name in COLUMNS)
            print(f"{kind:<12}{batch:>6}{cells}", flush=True)


if __name__ == "__main__":
    main()
