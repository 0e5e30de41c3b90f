"""
Times the GPU's part of a decode step in vLLM alone, by format of the weights and by option of vLLM.

    python benchmarks/decode.py --kinds fp8 w4a8 --batches 8 64

Each kind runs in its own process, with dummy weights in the shapes of Qwen2.5, Qwen3-MoE or Qwen3.5, prompts of 256
tokens, log-probabilities of the sampled tokens, and no text. All start at the same time. Once all have started, they
are measured one after the other, while the others wait.

| part | is |
|---|---|
| products | of the linear layers and experts in the decoder layers |
| attention | attention, and writing keys and values |
| other | the layers' other kernels: norms, rotary embedding, activations, and quantizing inputs |
| head | the product of the head |
| after | what follows it: sampling, log-probabilities, copies to the host |

A kernel belongs to a part by its name and by its number of calls in a step.
"""

import argparse
import gc
import json
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
from engines import (
    CUDA,
    SHAPES,
    Clock,
    by_kernel,
    commit,
    kernels_in,
    machine,
    model_directory,
    model_title,
    report,
    save,
    versions,
)
from limits import rarest_layers


PARTS = ("products", "attention", "other", "head", "after")  # of the GPU's time
# Words in the names of kernels; FlashAttention 3 has "cutlass" in its names, too
ATTENTION = ("flash", "fmha", "attention", "reshape_and_cache")
PRODUCTS = ("gemm", "gemv", "nvjet", "cutlass", "marlin", "splitk", "sm90_xmma", "fused_moe_kernel")

FP8 = {"quantization": "fp8_per_channel"}
FUSED_KERNELS = ["+rms_norm", "+quant_fp8", "+silu_and_mul"]
PASSES = {"fuse_norm_quant": True, "fuse_act_quant": True}
KINDS = {  # name -> arguments of vLLM's `LLM`
    "bf16": {},
    "fp8": FP8,
    "fp8 vllm's kernels": FP8 | {"compilation_config": {"custom_ops": FUSED_KERNELS}},
    "fp8 vllm's kernels, fused": FP8 | {"compilation_config": {"custom_ops": FUSED_KERNELS, "pass_config": PASSES}},
    "fp8 cublas": FP8 | {"linear_backend": "torch"},
    "fp8 triton's experts": FP8 | {"moe_backend": "triton"},
    "fp8_block": {"quantization": "fp8_per_block"},
    "fp8 8 splits": FP8 | {"attention_config": {"flash_attn_max_num_splits_for_cuda_graph": 8}},
    "w4a16": {},
    "w4a8": {},
}
# INT4 weights in groups of 128, as compressed-tensors has them; w4a8 quantizes inputs to FP8 for each token
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True, "dynamic": False}
FP8_INPUTS = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
GROUPS = {
    "w4a16": {"targets": ["Linear"], "weights": INT4},
    "w4a8": {"targets": ["Linear"], "weights": INT4, "input_activations": FP8_INPUTS},
}


def decode_step(sample, new: int, layers: int) -> dict:
    """
    Returns the milliseconds of a decode step in the middle of a generation, those in which the GPU runs a kernel, those
    of each part of its time, and the `kernels`: name, calls and milliseconds in a step, the longest first. All are
    differences of two generations, which excludes the prompts, each timed with and without the profiler.
    """
    from torch.profiler import ProfilerActivity, profile

    lengths, seconds, busy, kernels = (new // 2 - new // 16, new // 2 + new // 16), [], [], []
    sample(lengths[1])  # warms up
    for length in lengths:
        clock = Clock(synchronize=True)
        with clock.timing("all"):
            sample(length)
        seconds.append(clock.seconds["all"])
        if CUDA:
            with profile(activities=[ProfilerActivity.CUDA]) as profiler:
                sample(length)
                torch.cuda.synchronize()
            events = kernels_in(profiler)
            busy.append(covered(sorted((event.time_range.start, event.time_range.end) for event in events)) / 1e6)
            kernels.append(by_kernel(events))
    steps = lengths[1] - lengths[0]
    per_step = {"decode": seconds} | ({"GPU": busy} if CUDA else {})
    result = {name: 1e3 * (long - short) / steps for name, (short, long) in per_step.items()}
    if not CUDA:
        return result
    table = []
    for name, (calls, took) in kernels[1].items():
        calls_before, took_before = kernels[0].get(name, (0, 0.0))
        table.append((name, (calls - calls_before) / steps, (took - took_before) / 1e3 / steps))
    result |= dict.fromkeys(PARTS, 0.0)
    for name, calls, took in table:
        result[part_of(name, calls, layers)] += took
    return result | {"kernels": sorted(table, key=lambda row: -row[2])[:40]}


def part_of(kernel: str, calls: float, layers: int) -> str:
    """
    Returns the part of a decode step that a kernel belongs to, by its name and its calls in a step. A kernel that runs
    less than once in two of `layers`, those of the rarest kind, is outside the layers; so is a copy to the host.
    """
    name = kernel.lower()
    in_layers = calls > layers / 2 and "dtoh" not in name
    fused = name.startswith("triton_")  # by torch.compile, which names the product that takes the result
    if any(word in name for word in ATTENTION) and not fused:
        return "attention"
    if any(word in name for word in PRODUCTS) and not fused:
        return "products" if in_layers else "head"
    return "other" if in_layers else "after"


def covered(spans: list[tuple[float, float]]) -> float:
    """Returns the length that sorted spans cover together."""
    total, until = 0.0, 0.0
    for start, end in spans:
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def declare_int4(directory: str, group: dict) -> None:
    """Says in a model's config that its weights are in INT4."""
    path = Path(directory) / "config.json"
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": quantization}))


def measure(kind: str, args) -> dict:
    """Starts a kind's engine, waits for its turn on the GPU, and returns [`decode_step`] for each batch."""
    from vllm import LLM, SamplingParams

    directory = model_directory(args.size)
    if kind in GROUPS:
        declare_int4(directory, GROUPS[kind])
    arguments = dict(KINDS[kind])
    arguments["compilation_config"] = {"cudagraph_capture_sizes": args.batches} | arguments.get(
        "compilation_config", {}
    )
    llm = LLM(
        directory,
        dtype="bfloat16",
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=args.prompt + args.new,
        max_num_seqs=max(args.batches),
        max_num_batched_tokens=2048,
        gpu_memory_utilization=0.05,
        kv_cache_memory_bytes=args.cache_bytes,
        disable_log_stats=True,
        enforce_eager=not CUDA,
        logprobs_mode="processed_logprobs",
        **arguments,
    )
    gc.collect()
    gc.freeze()  # a collection of the engine's own objects takes a second, and would fall into a measured generation
    print("READY", flush=True)
    if not sys.stdin.readline():  # its turn
        raise SystemExit("The benchmark was stopped before this engine's turn.")
    found = {}
    for batch in args.batches:
        prompts = [{"prompt_token_ids": random.Random(i).choices(range(1000), k=args.prompt)} for i in range(batch)]

        def sample(length: int, prompts=prompts) -> None:
            asked = SamplingParams(max_tokens=length, ignore_eos=True, logprobs=0, detokenize=False)
            llm.generate(prompts, asked, use_tqdm=False)

        found[batch] = decode_step(sample, args.new, rarest_layers(args.size))
    return found


def next_line(process: subprocess.Popen, wanted: str, until: float) -> str | None:
    """Returns the rest of the next line that starts with `wanted`; `None` if the process ends before, or is killed."""
    timer = threading.Timer(max(0.0, until - time.monotonic()), process.kill)
    timer.start()
    try:
        return next((line.removeprefix(wanted) for line in process.stdout if line.startswith(wanted)), None)
    finally:
        timer.cancel()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--size", choices=SHAPES, default="7b" if CUDA else "tiny")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS) if CUDA else ["bf16"])
    parser.add_argument("--batches", nargs="+", type=int, default=[8, 64] if CUDA else [2])
    parser.add_argument("--prompt", type=int, default=256 if CUDA else 16, metavar="TOKENS")
    parser.add_argument("--new", type=int, default=256 if CUDA else 16, metavar="TOKENS")
    parser.add_argument("--cache_bytes", type=int, default=2 << 30 if CUDA else 64 << 20)
    parser.add_argument("--timeout", type=float, default=540, help="seconds for all kinds together")
    parser.add_argument("--commit", default=commit(), help="for a copy of the tree without git")
    parser.add_argument("--output", type=Path, help="directory for a JSON file, compressed, named after the machine")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        return report(measure(args.one, args))

    until, started, results = time.monotonic() + args.timeout, {}, {}
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"} | os.environ
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    for kind in args.kinds:
        started[kind] = subprocess.Popen([sys.executable, *sys.argv, "--one", kind], env=environment, **pipes)
    ready = {kind: next_line(process, "READY", until) is not None for kind, process in started.items()}
    given = {"commit": args.commit, "versions": versions(), "arguments": vars(args), "results": results}
    for kind, process in started.items():
        if ready[kind]:
            process.stdin.write("\n")
            process.stdin.flush()
        found = next_line(process, "RESULT ", until) if ready[kind] else None
        results[kind] = json.loads(found) if found else {"error": "it failed, or took too long"}
        save(f"decode-{args.size}", given, args.output)
    print(f"{machine()}, {model_title(args.size)}, milliseconds of a decode step")
    columns = ("decode", "GPU", *PARTS)
    print(f"{'kind':<28}{'batch':>6}" + "".join(f"{name:>11}" for name in columns))
    for kind, rows in results.items():
        if "error" in rows:
            print(f"{kind:<28}{rows['error']}")
            continue
        for batch, row in rows.items():
            cells = "".join(f"{row[name]:>11.3f}" if name in row else f"{'-':>11}" for name in columns)
            print(f"{kind:<28}{batch:>6}{cells}")


if __name__ == "__main__":
    main()
