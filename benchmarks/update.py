"""
Times a policy update (forward, backward, optimizer) in a `train_precision`, against TRL's BF16 LoRA.

    python benchmarks/update.py                        # 7B shapes on a GPU, tiny ones on a CPU
    python benchmarks/update.py --sizes 3b 7b 14b 32b --kinds trl nvfp4 mxfp4 nf4 --tokens 2048 4096 8192 16384

`trl` is TRL's `GRPOTrainer` with a BF16 policy and PEFT, and `bf16` ours with packed rows, the control. The other kinds
are `QuantGRPOTrainer` with this `train_precision`. In `fp8` the adapter is merged at each step; in `fp8/adapter` it
stays beside a base that is held in codes alone (`lora_sync="adapter"`). Each runs in its own process, with gradient
checkpointing, TRL's other settings, and a made-up batch in place of a generation. `--tokens` counts a micro-batch's
prompts and completions, in sequences of at most `--length`; a step is `--accumulation` such micro-batches, and a
merged adapter is quantized with the weights once in it. `--liger` and `--compile` set `use_liger_kernel` and
`torch_compile` with its mode, for TRL's trainer too. With `--regional`, each decoder layer is compiled instead of
the whole model.
`ratio` is the time relative to the first trainer's: below 1 is faster. Times are medians over the steps after the first
two. Memory is the peak in these steps: of torch's allocations on a GPU, of the process on a CPU. `--output` keeps every
step, with the commit, the versions and the host's load. `--profile` watches one more step of each size with torch's
profiler, after all others, and adds the number of kernels that the host launched in it and the GPU's seconds in them.
"""

import argparse
import os
import resource
import sys
from pathlib import Path
from statistics import median

import torch
from datasets import Dataset
from engines import (
    CUDA,
    SHAPES,
    Clock,
    adapter,
    commit,
    in_own_process,
    longest_kernels,
    machine,
    model_directory,
    model_title,
    report,
    save,
    versions,
    wait,
)
from tokenizers import Tokenizer, models
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from trl_quant import QuantGRPOConfig, QuantGRPOTrainer
from trl_quant.precisions import bitsandbytes_bases, frozen_bases, unified_flows


WARM_UP = 2


def made_up(
    tokens: int, length: int, vocabulary: int, accumulation: int, device: torch.device
) -> dict[str, torch.Tensor]:
    """
    Returns a micro-batch, one of `accumulation`, as a generation gives it to the loss. An eighth of each sequence is
    the prompt.
    """
    rows, length = max(1, tokens // length), min(tokens, length)
    ids = torch.randint(10, min(1000, vocabulary), (rows, length), device=device)
    prompt = length // 8
    return {
        "prompt_ids": ids[:, :prompt],
        "prompt_mask": torch.ones_like(ids[:, :prompt]),
        "completion_ids": ids[:, prompt:],
        "completion_mask": torch.ones_like(ids[:, prompt:]),
        "advantages": torch.linspace(-1, 1, rows, device=device) if rows > 1 else torch.ones(1, device=device),
        "num_items_in_batch": torch.tensor(accumulation * rows * (length - prompt), device=device),
    }


class Updates:
    """A trainer whose batches are made up."""

    def _prepare_inputs(self, inputs):
        return self.batch


class TRLUpdates(Updates, GRPOTrainer):
    """TRL's trainer with made-up batches."""


class QuantUpdates(Updates, QuantGRPOTrainer):
    """Our trainer with made-up batches."""


class Steps(TrainerCallback):
    """Times the steps after the first ones."""

    def __init__(self, clock: Clock):
        self.clock, self.seconds = clock, []

    def on_step_begin(self, args, state, control, **others):
        if state.global_step == WARM_UP:
            self.seconds = []
            if CUDA:
                torch.cuda.reset_peak_memory_stats()
        self.start = self.clock.now()

    def on_step_end(self, args, state, control, **others):
        self.seconds.append(self.clock.now() - self.start)


class LastKernels(TrainerCallback):
    """Watches the last step of a training with torch's profiler."""

    def on_step_begin(self, args, state, control, **others):
        if state.global_step == state.max_steps - 1:
            wait()
            self.profiler = profile(activities=[ProfilerActivity.CUDA])
            self.profiler.start()

    def on_step_end(self, args, state, control, **others):
        if state.global_step == state.max_steps:
            wait()
            self.profiler.stop()


def measure(kind: str, args) -> dict:
    (size,) = args.sizes
    directory = model_directory(size)
    model_config = AutoConfig.from_pretrained(directory)
    with torch.device("cuda" if CUDA else "cpu"):
        model = AutoModelForCausalLM.from_config(model_config, dtype=torch.bfloat16)
    model.name_or_path = directory
    if args.regional:
        for layer in model.model.layers:
            layer.compile(mode=args.compile)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "<|pad|>": 1, "<|eos|>": 2}, "a")),
        pad_token="<|pad|>",
        eos_token="<|eos|>",
    )
    settings = {
        "output_dir": f"{directory}/run",
        "use_cpu": not CUDA,
        "bf16": True,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": args.accumulation,
        "use_liger_kernel": args.liger,
        "torch_compile": args.compile is not None and not args.regional,
        "torch_compile_mode": None if args.regional else args.compile,  # a mode alone switches it on
        "num_generations": 2,
        "gradient_checkpointing": True,
        "max_steps": args.steps + WARM_UP,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    given = {
        "model": model,
        "reward_funcs": lambda completions, **_: [0.0] * len(completions),
        "train_dataset": Dataset.from_dict({"prompt": ["a"] * 64}),
        "processing_class": tokenizer,
        "peft_config": adapter(model, args.lora),
    }
    if kind == "trl":
        trainer = TRLUpdates(args=GRPOConfig(**settings), **given)
    else:
        ours = {"is_correction": "trl", "vllm_importance_sampling_correction": False}
        precision, _, lora_sync = kind.partition("/")
        ours |= {"pack_sequences": True} if kind == "bf16" else {"train_precision": precision}
        if kind in bitsandbytes_bases():  # bitsandbytes quantizes while it loads
            model.save_pretrained(directory)
            given["model"] = directory
            del model
        config = QuantGRPOConfig(**settings, **ours)
        if lora_sync:
            # Nothing is sampled here, and without vLLM the trainer's checks refuse it
            config.lora_sync, config.check_assigned = lora_sync, lambda: None
        trainer = QuantUpdates(args=config, **given)
    steps = Steps(Clock(synchronize=True))
    trainer.add_callback(steps)
    result, device = {}, trainer.accelerator.device
    batches = {n: made_up(n, args.length, model_config.vocab_size, args.accumulation, device) for n in args.tokens}
    for tokens, trainer.batch in batches.items():
        trainer.train()
        peak = torch.cuda.max_memory_allocated() if CUDA else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        result[tokens] = {"update": median(steps.seconds), "steps": [*steps.seconds], "peak_bytes": peak}
    if args.profile:
        last = LastKernels()
        trainer.add_callback(last)
        trainer.args.max_steps = WARM_UP + 1
        for tokens, trainer.batch in batches.items():
            trainer.train()
            kernels = longest_kernels(last.profiler)
            result[tokens]["launched"] = sum(calls for _, calls, _ in kernels)
            result[tokens]["gpu_seconds"] = sum(took for _, _, took in kernels)
            result[tokens]["kernels"] = [(name[:100], calls, took) for name, calls, took in kernels[:60]]
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--sizes", nargs="+", choices=SHAPES, default=["7b"] if CUDA else ["tiny"])
    kinds = ["trl", "bf16", *frozen_bases(), *unified_flows(), *(f"{name}/adapter" for name in unified_flows())]
    parser.add_argument("--kinds", nargs="+", choices=kinds, default=["trl", "nvfp4"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[2048, 4096, 8192, 16384] if CUDA else [128, 256])
    parser.add_argument("--length", type=int, default=2048 if CUDA else 128, help="tokens of a sequence at most")
    parser.add_argument("--accumulation", type=int, default=1, metavar="N", help="micro-batches of a step")
    parser.add_argument("--liger", action="store_true", help="with Liger's kernels, which must be installed")
    parser.add_argument(
        "--compile", nargs="?", const="default", metavar="MODE", help="with torch.compile; reduce-overhead: CUDA graphs"
    )
    parser.add_argument("--regional", action="store_true", help="with --compile: each decoder layer by itself")
    parser.add_argument("--profile", action="store_true", help="counts and times the kernels of one more step")
    parser.add_argument("--lora", type=int, default=32, metavar="RANK")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--commit", default=commit(), help="for a copy of the tree without git")
    parser.add_argument("--timeout", type=float, default=540, help="seconds for one trainer")
    parser.add_argument("--output", type=Path, help="directory for a JSON file, compressed, named after the machine")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.regional and args.compile is None:
        parser.error("--regional acts only with --compile")
    if args.regional and any(kind in bitsandbytes_bases() for kind in args.kinds):
        parser.error("--regional compiles the layers of a model in memory, which bitsandbytes' kinds load from a file")
    if args.profile and not CUDA:
        parser.error("--profile needs a GPU")
    if args.one:
        return report(measure(args.one, args))

    results, loads = {}, {}
    of = {"commit": args.commit, "versions": versions(), "cores": len(os.sched_getaffinity(0)), "loads": loads}
    of |= {"arguments": vars(args)}
    for size in args.sizes:
        print(f"{machine()}, {model_title(size)}, LoRA of rank {args.lora}, {args.length} tokens a sequence", end=", ")
        compiled = "" if args.compile is None else f", compiled: {args.compile}{', by layer' * args.regional}"
        print(f"micro-batches of a step: {args.accumulation}{', Liger' * args.liger}{compiled}")
        columns = "".join(f"{f'{tokens} tokens':>16}{'ratio':>8}{'GiB':>8}" for tokens in args.tokens)
        print(f"{'trains in':<18}{columns}", flush=True)
        found = results.setdefault(size, {})
        for kind in args.kinds:
            loads[f"{size} {kind}"] = os.getloadavg()
            row = found[kind] = in_own_process([*sys.argv[1:], "--one", kind, "--sizes", size], args.timeout)
            save(f"update-{'-'.join(args.sizes)}", of | {"results": results}, args.output)
            if "error" in row:
                print(f"{kind:<18}{row['error'][:150]}", flush=True)
                continue
            cells = ""
            for tokens in map(str, args.tokens):
                first = next(iter(found.values())).get(tokens)
                ratio = f"{row[tokens]['update'] / first['update']:.2f}" if first else "-"
                cells += f"{row[tokens]['update']:>14.3f} s{ratio:>8}{row[tokens]['peak_bytes'] / 2**30:>8.1f}"
            print(f"{kind:<18}{cells}", flush=True)
            if args.profile:
                rows = [row[str(tokens)] for tokens in args.tokens]
                cells = "".join(f"{each['gpu_seconds']:>14.3f} s{each['launched']:>8}{'':>8}" for each in rows)
                print(f"{'  GPU, kernels':<18}{cells}", flush=True)


if __name__ == "__main__":
    main()
