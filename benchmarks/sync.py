"""
Measures time and peak extra memory of a weight sync, against TRL's BF16 push in the same run.

    python benchmarks/sync.py                          # 7B shapes on a GPU, tiny ones on a CPU
    python benchmarks/sync.py --size 32b --precisions fp8 nvfp4 --lora 32
    python benchmarks/sync.py --size 30b-a3b --precisions bf16 fp8 --lora 32 --lora_sync adapter --checks 0

Each engine runs in its own process. `sync` is the median of the rounds after the first, in which all weights are sent,
and `changed` that of rounds after a step, in which ours sends what the step has changed; `stream` is the time to
produce all tensors (gather, merge, quantize), without vLLM; `check` is the time of one self-check (every
`sync_check_steps` syncs); `print` is the time of one fingerprint of the policy's weights. A step takes one after its
sync, and one before each further generation. Extra memory is the peak above the memory allocated before.

With `--lora_sync adapter` our engines get the adapter alone. Their base stays as it was loaded, so there is no check
and no stream of weights.
"""

import argparse
import statistics
import sys
from functools import partial
from pathlib import Path

import torch
from engines import (
    CUDA,
    PRECISIONS,
    SHAPES,
    build,
    change_weights,
    in_own_process,
    machine,
    model_directory,
    model_title,
    policy,
    report,
    save,
    seconds,
)

from trl_quant.rollout.fingerprint import fingerprint


def median_of_syncs(engine, model, rounds: int, whole: bool = False) -> float:
    """Returns the median seconds of a sync after a step; `whole` has our engine send all weights."""
    times = []
    for _ in range(rounds):
        change_weights(model)
        if whole:
            engine.engine.is_current = False
        times.append(seconds(engine.sync_weights))
    return statistics.median(times)


def measure(kind: str, args) -> dict:
    model = policy(model_directory(args.size), args.lora)
    arguments = {"enforce_eager": True, "kv_cache_memory_bytes": 256 << 20}
    engine = build(kind, model, 4, 16, 512, args.lora_sync, **arguments)
    first = seconds(engine.sync_weights)
    ours = kind != "trl"
    result = {"first": first, "sync": median_of_syncs(engine, model, args.rounds, whole=ours), "extra_bytes": None}
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        median_of_syncs(engine, model, 1, whole=ours)
        result["extra_bytes"] = torch.cuda.max_memory_allocated() - before
    if not ours:
        return result
    result["changed"] = median_of_syncs(engine, model, args.rounds)
    result["fingerprint"] = min(seconds(partial(fingerprint, model)) for _ in range(3))
    if args.lora_sync == "merge":
        consume = lambda: [None for _ in engine.engine.stream()]  # noqa: E731
        result["stream"] = min(seconds(consume) for _ in range(3))
        if not CUDA:  # dummy weights bypass our loader, which INT8 needs on CPUs without AMX
            return result
        if args.checks:
            engine.check_sync()
            result["check"] = min(seconds(engine.check_sync) for _ in range(args.checks))
        engine.engine.drift.measures = lambda name: False
        result["sync_without_metrics"] = median_of_syncs(engine, model, args.rounds, whole=True)
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--size", choices=SHAPES, default="7b" if CUDA else "tiny")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=PRECISIONS)
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="an adapter of this rank")
    parser.add_argument("--lora_sync", choices=["merge", "adapter"], default="merge", help="for our engines")
    parser.add_argument("--checks", type=int, default=3, help="self-checks that are timed, after one that is not")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one engine")
    parser.add_argument("--output", type=Path, help="directory for a JSON file, compressed, named after the machine")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        return report(measure(args.one, args))

    how = {"merge": "merged", "adapter": "beside its base in ours, merged in TRL's"}[args.lora_sync]
    of_what = f"LoRA of rank {args.lora}, {how}" if args.lora else "all weights"
    print(f"{machine()}, {model_title(args.size)}, {of_what}", flush=True)
    print(
        f"{'engine':<12}{'sync s':>9}{'of TRL':>8}{'first':>8}{'changed':>9}{'stream':>8}{'no metrics':>12}"
        f"{'check':>8}{'print':>8}{'extra MiB':>11}",
        flush=True,
    )
    results, baseline = {}, None
    for kind in ("trl", *args.precisions):
        found = results[kind] = in_own_process([*sys.argv[1:], "--one", kind], args.timeout)
        save(f"sync-{args.size}", {"arguments": vars(args), "results": results}, args.output)
        if "error" in found:
            print(f"{kind:<12}{found['error'][:120]}", flush=True)
            continue
        baseline = found["sync"] if kind == "trl" else baseline
        ratio = f"{found['sync'] / baseline:.2f}" if baseline else "-"
        extra = "-" if found["extra_bytes"] is None else f"{found['extra_bytes'] / 2**20:.0f}"
        rest = "".join(f"{found[k]:>{w}.3f}" if k in found else "-".rjust(w) for k, w in COLUMNS)
        print(f"{kind:<12}{found['sync']:>9.4f}{ratio:>8}{found['first']:>8.3f}{rest}{extra:>11}", flush=True)


COLUMNS = (("changed", 9), ("stream", 8), ("sync_without_metrics", 12), ("check", 8), ("fingerprint", 8))


if __name__ == "__main__":
    main()
