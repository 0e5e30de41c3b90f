"""
Measures the peak memory of whole GRPO steps (generation, scoring, update) on a frozen low-bit base, under a cap.

    python benchmarks/memory.py                        # 32B and 70B shapes on a GPU, tiny ones on a CPU
    python benchmarks/memory.py --sizes 32b --kinds trl nvfp4 mxfp4 --cap 48

`trl` is TRL's `GRPOTrainer` with BF16 LoRA and BF16 vLLM. The other kinds are `QuantGRPOTrainer` with this
`train_precision` and `rollout_precision`, which sends the adapter alone. Each runs in its own process, together with
vLLM; on a CPU without vLLM. The 4-bit policy consists of random codes and scales, so that no weight of its linear
layers is ever held in 16 bits. Runs use gradient checkpointing, one update per generation, and a correction that scores
the whole batch.

torch's allocator, which trainer and vLLM share, is capped at 40 GB for 32B, 80 GB for 70B, or `--cap`. A trainer that
does not fit ends with the allocation that failed. vLLM's cache of keys and values holds the batch and a tenth more.

| column | is, in GB of 10^9 bytes |
|---|---|
| start | peak of torch until the first step, while the policy is built and vLLM starts: reserved, and allocated |
| steps | the same during the steps |
| beside | memory in use on the device that is not torch's, after a step: CUDA, libraries, other processes |
| card | reserved during the steps, plus beside: the memory that a card must have |

Seconds are the last step's, and those of its sampling and scoring. Without a GPU all peaks are the process's.
"""

import argparse
import json
import random
import re
import resource
import sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import torch
from datasets import Dataset
from engines import (
    CUDA,
    DENSE,
    START,
    Clock,
    in_own_process,
    load_tokenizer,
    machine,
    model_directory,
    report,
    save,
    speak,
    words_of,
)
from limits import cache_bytes
from peft import LoraConfig
from transformers import AutoConfig, AutoModelForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from trl_quant import QuantGRPOConfig, QuantGRPOTrainer
from trl_quant.layers import FrozenLinear
from trl_quant.models.linears import linears
from trl_quant.precisions import bitsandbytes_bases, frozen_bases
from trl_quant.trl_seams import llm_with


GB = 10**9
CAPS = {"32b": 40.0, "70b": 80.0}
DEVICE = "cuda" if CUDA else "cpu"
# Range of the scales' bytes (end excluded) that gives weights a standard deviation of about 0.02
SCALES = {
    "nvfp4": (0x60, 0x78),  # E4M3: 32 to 240
    "mxfp4": (117, 122),  # E8M0: 2^-10 to 2^-6
}
GLOBAL_SCALE = 18000.0  # NVFP4's global scale, by which they are divided


@torch.no_grad()
def packed_policy(directory: str, precision: str, words: list[int]):
    """Builds a random policy that samples `words` alone, and whose base was never held in more bits."""
    dtype = torch.bfloat16
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory), dtype=dtype)
        for place, layer in linears(model).items():
            outputs, inputs = layer.shape
            has_bias = model.get_submodule(place).bias is not None
            model.set_submodule(place, FrozenLinear(inputs, outputs, has_bias, precision, dtype))
    model.to_empty(device=DEVICE)
    with torch.device(DEVICE):
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)  # the only buffers
    for name, param in model.named_parameters():
        kind = name.rpartition(".")[2]
        if kind == "weight_packed":
            param.random_(0, 256)
        elif kind == "weight_scale":
            param.view(torch.uint8).random_(*SCALES[precision])
        elif kind != "weight_global_scale":
            param.normal_(std=0.02)
    speak(model, words)
    for module in model.modules():  # comes after `speak`, which writes zeros to scales too
        if getattr(module, "weight_global_scale", None) is not None:
            module.weight_global_scale.fill_(GLOBAL_SCALE)
    return model


def settings_of(args, kind: str, cuda: bool = CUDA) -> dict:
    """Returns the fields of a trainer's config that its figures depend on. `cuda` says whether a GPU trains."""
    settings = {
        "bf16": True,
        "num_generations": args.generations,
        "max_completion_length": args.new,
        "per_device_train_batch_size": args.micro,
        "gradient_accumulation_steps": args.batch // args.micro,
        "gradient_checkpointing": True,
        "use_liger_kernel": args.liger,
    }
    if cuda:
        settings |= {"use_vllm": True, "vllm_mode": "colocate"}
        # vLLM only checks at its start that so much is free, because the size of its cache is given
        settings["vllm_gpu_memory_utilization"] = 0.05
    if kind == "trl":
        return settings
    settings |= {"train_precision": kind, "rollout_precision": kind, "is_correction": args.correction}
    return settings | ({"lora_sync": "adapter"} if cuda else {})


def cache_of(args, length: int) -> int:
    """Returns the bytes of vLLM's cache for a whole generation of so many tokens a sequence, and a tenth more."""
    return int(1.1 * args.batch * length * cache_bytes(args.sizes[0]))


def make_trainer(args, tokenizer):
    """Builds TRL's trainer or ours, with its engine."""
    (size,), kind = args.sizes, args.one
    words, generator = words_of(tokenizer), random.Random(0)
    prompts = [tokenizer.decode(generator.choices(words, k=args.prompt)) for _ in range(args.batch)]
    length = max(len(ids) for ids in tokenizer(prompts).input_ids) + args.new
    directory = model_directory(size, tokenizer)
    config = AutoConfig.from_pretrained(directory)
    if kind == "trl":
        with torch.device(DEVICE):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        speak(model, words)
    else:
        model = packed_policy(directory, kind, words)
    model.name_or_path = directory

    settings = {
        "output_dir": f"{directory}/run",
        "use_cpu": not CUDA,
        "max_steps": args.steps,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    } | settings_of(args, kind)
    engine = {}
    if CUDA:
        engine = START | {
            "kv_cache_memory_bytes": cache_of(args, length),
            "compilation_config": {"cudagraph_capture_sizes": sorted({1, args.batch})},
        }
        settings |= {"vllm_max_model_length": length + 16, "generation_kwargs": {"ignore_eos": True}}
    given = {
        "model": model,
        "reward_funcs": lambda completions, **_: [generator.random() for _ in completions],
        "train_dataset": Dataset.from_dict({"prompt": prompts}),
        "processing_class": tokenizer,
        "peft_config": LoraConfig(r=args.lora, lora_alpha=2 * args.lora, target_modules="all-linear"),
    }
    if kind == "trl":
        with llm_with(**engine) if CUDA else nullcontext():
            return GRPOTrainer(args=GRPOConfig(**settings), **given)
    ours = {"sync_check_steps": 0, "vllm_engine_kwargs": engine | args.engine_kwargs} if CUDA else {}
    return QuantGRPOTrainer(args=QuantGRPOConfig(**settings, **ours), **given)


class Peaks:
    """Records peaks of torch's memory and of the memory beside it, although vLLM resets torch's counters."""

    def __init__(self):
        self.bytes: Counter[str] = Counter()
        if CUDA:
            self.reset, torch.cuda.reset_peak_memory_stats = torch.cuda.reset_peak_memory_stats, self.note

    def note(self, device=None) -> None:
        """Adds the counters to the peaks, and resets them."""
        if CUDA:
            free, total = torch.cuda.mem_get_info()
            now = {
                "reserved": torch.cuda.max_memory_reserved(),
                "allocated": torch.cuda.max_memory_allocated(),
                "beside": total - free - torch.cuda.memory_reserved(),
            }
            self.reset()
        else:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
            now = {"reserved": peak, "allocated": peak, "beside": 0}
        self.bytes |= now

    def take(self) -> dict[str, int]:
        """Returns the peaks since the last call."""
        self.note()
        taken, self.bytes = {name: self.bytes[name] for name in ("reserved", "allocated", "beside")}, Counter()
        return taken


class Steps(TrainerCallback):
    """Records the seconds of each step, and the memory in use after it."""

    def __init__(self, clock: Clock, peaks: Peaks):
        self.clock, self.peaks = clock, peaks
        self.seconds: list[dict[str, float]] = []

    def on_step_begin(self, args, state, control, **others):
        self.clock.seconds.clear()
        self.start = self.clock.now()

    def on_step_end(self, args, state, control, **others):
        self.seconds.append({"step": self.clock.now() - self.start, **self.clock.seconds})
        self.peaks.note()


def set_cap(cap: float) -> None:
    """Caps torch's allocator at so many GB; 0 for none."""
    if CUDA and cap:
        total = torch.cuda.mem_get_info()[1]
        if cap * GB > total:
            raise ValueError(f"`--cap`={cap:g} GB is more than the device has, {total / GB:.1f} GB.")
        torch.cuda.set_per_process_memory_fraction(cap * GB / total)


def measure(args) -> dict:
    set_cap(args.cap)
    peaks, stage = Peaks(), "at the start"
    try:
        trainer = make_trainer(args, load_tokenizer(args.tokenizer))
        start, stage = peaks.take(), "in a step"
        clock = Clock(synchronize=True)
        if CUDA:
            clock.watch(trainer.vllm_generation, "generate", "sampling")
        else:
            clock.watch(trainer, "_generate_single_turn", "sampling")
        without_gradient = lambda: not torch.is_grad_enabled()  # noqa: E731
        clock.watch(trainer, "_get_per_token_logps_and_entropies", "scoring", without_gradient)
        steps = Steps(clock, peaks)
        trainer.add_callback(steps)
        trainer.train()
    except Exception as error:  # libraries word this error differently
        if "out of memory" not in str(error).lower():
            raise
        asked = re.search(r"Tried to allocate ([\d.]+ \w+)", str(error))
        return {"error": f"out of memory {stage}{f': there was no room for {asked[1]} more' if asked else ''}"}
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    lengths = {entry["completions/mean_length"] for entry in entries}
    assert lengths == {args.new} and len(entries) == args.steps, f"{len(entries)} steps of {lengths} tokens"
    result = {"start": start, "steps": peaks.take(), "seconds": steps.seconds}
    if CUDA and args.cap:
        most = max(start["reserved"], result["steps"]["reserved"])
        assert most <= args.cap * GB, f"torch reserved {most} bytes, past its cap of {args.cap:g} GB"
    return result


def options(cuda: bool = CUDA) -> argparse.ArgumentParser:
    kinds = [name for name in frozen_bases() if name not in bitsandbytes_bases()]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--sizes", nargs="+", choices=DENSE, default=["32b", "70b"] if cuda else ["tiny"])
    parser.add_argument("--kinds", nargs="+", choices=["trl", *kinds], default=["trl", "nvfp4"])
    parser.add_argument("--cap", type=float, metavar="GB", help="of 10^9 bytes; 0 for none")
    parser.add_argument("--batch", type=int, default=8, help="completions of a step")
    parser.add_argument("--generations", type=int, default=8, help="completions of a prompt")
    parser.add_argument("--micro", type=int, default=1 if cuda else 4, help="completions of a micro-batch")
    parser.add_argument("--prompt", type=int, default=256 if cuda else 16, metavar="TOKENS")
    parser.add_argument("--new", type=int, default=2048 if cuda else 16, metavar="TOKENS")
    parser.add_argument("--lora", type=int, default=32, metavar="RANK")
    parser.add_argument("--correction", default="ais", help="`is_correction` of ours")
    parser.add_argument("--liger", action="store_true", help="with `use_liger_kernel`")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--engine_kwargs", type=json.loads, default={}, metavar="JSON", help="for vLLM in our trainer")
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json; by default litellm's, if it is installed")
    parser.add_argument("--timeout", type=float, default=540, help="seconds for one trainer")
    parser.add_argument("--output", type=Path, help="directory for a JSON file, compressed, named after the machine")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return parser


def main():
    args = options().parse_args()
    if args.one:
        args.cap = CAPS.get(args.sizes[0], 0.0) if args.cap is None else args.cap
        return report(measure(args))
    load_tokenizer(args.tokenizer)  # fails early if it is missing

    results = {}
    for size in args.sizes:
        cap = CAPS.get(size, 0.0) if args.cap is None else args.cap
        limit = f"torch capped at {cap:g} GB" if CUDA and cap else "no cap"
        shape = f"{args.batch} completions of {args.prompt} + {args.new} tokens"
        print(f"{machine()}, {size}, LoRA of rank {args.lora}, {shape}, {limit}")
        print(f"{'':<8}{'start, GB':>22}{'steps, GB':>22}")
        columns = f"{'reserved':>11}{'allocated':>11}" * 2 + f"{'beside':>9}{'card':>9}"
        print(f"{'trainer':<8}{columns}{'step s':>9}{'sampling':>10}{'scoring':>9}", flush=True)
        found = results.setdefault(size, {"cap_bytes": cap * GB})
        for kind in args.kinds:
            row = found[kind] = in_own_process([*sys.argv[1:], "--one", kind, "--sizes", size], args.timeout)
            save(f"memory-{'-'.join(args.sizes)}", {"arguments": vars(args), "results": results}, args.output)
            if "error" in row:
                print(f"{kind:<8}{row['error'][:150]}", flush=True)
                continue
            steps, last = row["steps"], row["seconds"][-1]
            peaks = [row[stage][name] for stage in ("start", "steps") for name in ("reserved", "allocated")]
            cells = "".join(f"{peak / GB:>11.2f}" for peak in peaks)
            cells += f"{steps['beside'] / GB:>9.2f}{(steps['reserved'] + steps['beside']) / GB:>9.2f}"
            phases = f"{last['step']:>9.2f}{last['sampling']:>10.2f}{last.get('scoring', 0.0):>9.2f}"
            print(f"{kind:<8}{cells}{phases}", flush=True)


if __name__ == "__main__":
    main()
