"""
Sampled tokens per second, sync included, against TRL's own merged BF16 path in the same run.

    python benchmarks/rollout.py                       # 7B shapes on a GPU, tiny ones on a CPU
    python benchmarks/rollout.py --sizes 7b 32b --precisions fp8 int8 nvfp4 --batches 1 8 64 256

A LoRA policy of rank 32 is merged and synced, then 512 tokens are sampled for each prompt of 256 random tokens, with
vLLM's defaults for torch.compile and CUDA graphs. Each engine runs in its own process, with dummy weights.
"""

import argparse
import time
from pathlib import Path

import torch
from engines import CUDA, PRECISIONS, SHAPES, build, in_own_process, machine, model_directory, policy, report, save


def measure(kind: str, size: str, batches: list[int], prompt: int, new: int, lora: int, sync: str, eager: bool) -> dict:
    shape = SHAPES[size]
    path, length = model_directory(size), prompt + new + 16
    per_token = 2 * 2 * shape["num_hidden_layers"] * shape["kv_heads"] * shape["hidden_size"] // shape["heads"]
    arguments = {"kv_cache_memory_bytes": int(1.1 * max(batches) * length * per_token) + (64 << 20)}
    if eager or not CUDA:
        arguments["enforce_eager"] = True
    else:
        arguments["compilation_config"] = {"cudagraph_capture_sizes": sorted({*batches, 1})}
    engine = build(kind, policy(path, lora), max(batches), new, length, lora_sync=sync, **arguments)

    generator = torch.Generator().manual_seed(0)
    result = {}
    for batch in batches:
        prompts = torch.randint(10, 1000, (batch, prompt), generator=generator).tolist()
        engine.max_completion_length = 8
        engine.sync_weights()
        engine.generate(prompts, None, 1)  # warms up the kernels for this batch size
        engine.max_completion_length = new
        if CUDA:
            torch.cuda.synchronize()
        start = time.perf_counter()
        engine.sync_weights()
        if CUDA:
            torch.cuda.synchronize()
        synced = time.perf_counter()
        _, completions, _, _ = engine.generate(prompts, None, 1)
        end = time.perf_counter()
        tokens = sum(map(len, completions))
        assert tokens == batch * new, f"{tokens} tokens instead of {batch * new}"
        result[batch] = {"tokens_per_s": tokens / (end - start), "sync_s": synced - start, "sample_s": end - synced}
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--sizes", nargs="+", choices=SHAPES, default=["7b"] if CUDA else ["tiny"])
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=PRECISIONS)
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 64, 256] if CUDA else [1, 8])
    parser.add_argument("--prompt", type=int, default=256 if CUDA else 32)
    parser.add_argument("--new", type=int, default=512 if CUDA else 32)
    parser.add_argument("--lora", type=int, default=32, metavar="RANK", help="0 for full fine-tuning")
    parser.add_argument("--lora_sync", choices=["merge", "adapter"], default="merge", help="for our engines")
    parser.add_argument("--enforce_eager", action="store_true")
    parser.add_argument("--timeout", type=float, default=540, help="seconds for one engine")
    parser.add_argument("--output", type=Path, help="directory for a JSON file named after the machine")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        (size,) = args.sizes
        batches = sorted(args.batches)
        options = (args.prompt, args.new, args.lora, args.lora_sync, args.enforce_eager)
        return report(measure(args.one, size, batches, *options))

    passed = ["--prompt", args.prompt, "--new", args.new, "--lora", args.lora, "--lora_sync", args.lora_sync]
    passed += ["--enforce_eager"] if args.enforce_eager else []
    results = {}
    for size in args.sizes:
        print(f"{machine()}, Qwen2.5 {size}, {args.prompt} tokens in, {args.new} out, LoRA of rank {args.lora}")
        print(
            f"{'engine':<12}" + "".join(f"{f'batch {b}':>13}{'of TRL':>8}" for b in args.batches) + f"{'sync s':>9}",
            flush=True,
        )
        for kind in ("trl", *args.precisions):
            command = ["--one", kind, "--sizes", size, "--batches", *args.batches, *passed]
            found = in_own_process([*map(str, command)], args.timeout)
            results.setdefault(size, {})[kind] = found
            if "error" in found:
                print(f"{kind:<12}{found['error'][:150]}", flush=True)
                continue
            base = results[size]["trl"]
            cells = ""
            for batch in map(str, args.batches):
                rate = found[batch]["tokens_per_s"]
                cells += f"{rate:>13.0f}" + (
                    f"{rate / base[batch]['tokens_per_s']:>8.2f}" if batch in base else f"{'-':>8}"
                )
            print(f"{kind:<12}{cells}{found[str(args.batches[0])]['sync_s']:>9.3f}", flush=True)
    save(
        f"rollout-{'-'.join(args.sizes)}",
        {"arguments": vars(args) | {"output": str(args.output)}, "results": results},
        args.output,
    )


if __name__ == "__main__":
    main()
