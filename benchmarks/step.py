"""
Times whole GRPO steps and their phases, through the trainers, against TRL's trainer in the same run.

    python benchmarks/step.py                          # 7B shapes on a GPU, tiny ones on a CPU
    python benchmarks/step.py --kinds trl fp8 nvfp4 --corrections tis ais --completions 64x512 256x2048

`trl` is TRL's `GRPOTrainer` with BF16 vLLM. The other kinds are `QuantGRPOTrainer` with this `rollout_precision`. Each
runs in its own process. A LoRA policy of random weights is trained with gradient checkpointing, one update per
generation and TRL's other settings. With `--lora 0` all weights are trained in BF16, with bitsandbytes' AdamW in 8 bits
or, where that is not installed, with plain SGD: the states of a 16-bit AdamW do not fit beside a 7B policy and vLLM.
Our self-check, one in 50 steps, is switched off.

| phase | is |
|---|---|
| sampling | `generate` of the engine, text and log-probabilities included |
| sync | sending the policy's weights to the engine |
| scoring | the pass without gradients that computes old log-probabilities, if there is one |
| update | everything after the generation: forward, backward, clipping, optimizer |
| rest | the generation without the phases above: tokenizing, decoding, rewards, metrics |

`ratio` is how many times faster a trainer is than the first one. One trainer runs all `--completions`, the largest
first. Times are means over the steps of each but the first. Memory is the peak in these steps: torch's allocations on a
GPU, else the memory of the process, whose peak only grows.
"""

import importlib.util
import random
import resource
import sys

import torch
from engines import (
    BASELINE,
    CUDA,
    PRECISIONS,
    START,
    Clock,
    engine_options,
    in_own_process,
    load_tokenizer,
    machine,
    model_directory,
    report,
    save,
    save_start,
    speak,
    words_of,
)
from transformers import TrainerCallback

from trl_quant.precisions import frozen_bases, train_precisions


PHASES = ("sampling", "sync", "scoring", "update", "rest")


def make_trainer(args, tokenizer):
    """Builds TRL's trainer or ours, with vLLM in the same process."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoConfig, AutoModelForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    from trl_quant import QuantGRPOConfig, QuantGRPOTrainer
    from trl_quant.trl_seams import llm_with

    (size,), (correction,) = args.sizes, args.corrections
    completions, new = map(max, zip(*args.completions, strict=True))
    words, generator = words_of(tokenizer), random.Random(0)
    prompts = [tokenizer.decode(generator.choices(words, k=args.prompt)) for _ in range(completions)]
    directory = model_directory(size, tokenizer)
    config = AutoConfig.from_pretrained(directory)
    with torch.device("cuda" if CUDA else "cpu"):
        # BF16 is far slower on a CPU
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if CUDA else torch.float32)
    speak(model, words)
    save_start(model)

    settings = {
        "output_dir": f"{directory}/run",
        "use_cpu": not CUDA,
        "bf16": CUDA,
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": args.vllm_gpu_memory_utilization,
        "vllm_max_model_length": max(len(ids) for ids in tokenizer(prompts).input_ids) + new,
        "generation_kwargs": {"ignore_eos": True},
        "num_generations": args.generations,
        "max_completion_length": new,
        "per_device_train_batch_size": args.micro,
        "gradient_accumulation_steps": completions // args.micro,
        "gradient_checkpointing": True,
        "max_steps": args.steps,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    if not args.lora:
        settings["optim"] = "adamw_bnb_8bit" if importlib.util.find_spec("bitsandbytes") else "sgd"
    arguments = dict(START)
    if not CUDA:
        arguments |= {"enforce_eager": True, "kv_cache_memory_bytes": 64 << 20, "disable_log_stats": True}
    given = {
        "model": model,
        "reward_funcs": lambda completions, **_: [generator.random() for _ in completions],
        "train_dataset": Dataset.from_dict({"prompt": prompts}),
        "processing_class": tokenizer,
    }
    if args.lora:
        given["peft_config"] = LoraConfig(r=args.lora, lora_alpha=2 * args.lora, target_modules="all-linear")
    if args.one == "trl":
        with llm_with(**arguments | args.trl_engine_kwargs):
            return GRPOTrainer(args=GRPOConfig(**settings), **given)
    ours = {"rollout_precision": args.one, "is_correction": correction, "lora_sync": args.lora_sync}
    if args.train_precision:
        ours["train_precision"] = args.train_precision
    if args.exact_rollouts:
        ours["exact_rollouts"] = True
    if args.train_precision in frozen_bases():
        ours["lora_sync"] = "adapter"
    ours |= {"vllm_engine_kwargs": arguments | args.engine_kwargs, "sync_check_steps": 0}
    return QuantGRPOTrainer(args=QuantGRPOConfig(**settings, **ours), **given)


class Steps(TrainerCallback):
    """Times the steps after the first."""

    def __init__(self, clock: Clock):
        self.clock = clock

    def on_step_begin(self, args, state, control, **others):
        if state.global_step == 1:
            self.clock.seconds.clear()
            if CUDA:
                torch.cuda.reset_peak_memory_stats()
        self.start = self.clock.now()

    def on_step_end(self, args, state, control, **others):
        self.clock.seconds["step"] += self.clock.now() - self.start


def set_shape(trainer, completions: int, new: int) -> None:
    """Sets the number of completions and of their tokens for the trainer's next steps."""
    args = trainer.args
    args.gradient_accumulation_steps = args.steps_per_generation = completions // args.per_device_train_batch_size
    args.generation_batch_size = completions
    args.max_completion_length = trainer.max_completion_length = trainer.vllm_generation.max_completion_length = new


def measure(args) -> dict:
    trainer = make_trainer(args, load_tokenizer(args.tokenizer))
    clock = Clock(synchronize=True)
    clock.watch(trainer.vllm_generation, "generate", "sampling")
    clock.watch(trainer.vllm_generation, "sync_weights", "sync")
    without_gradient = lambda: not torch.is_grad_enabled()  # noqa: E731
    clock.watch(trainer, "_get_per_token_logps_and_entropies", "scoring", without_gradient)
    clock.watch(trainer, "_generate_and_score_completions", "generation")
    trainer.add_callback(Steps(clock))
    result = {}
    # TRL generates at each multiple of the micro-batches of a generation. The larger goes first, as the smaller divides
    # it
    for completions, new in sorted(args.completions, reverse=True):
        set_shape(trainer, completions, new)
        trainer.train()
        entries = [entry for entry in trainer.state.log_history if "loss" in entry]
        lengths = {entry["completions/mean_length"] for entry in entries}
        assert lengths == {new} and len(entries) == args.steps, f"{len(entries)} steps of {lengths} tokens"

        seconds = {name: clock.seconds[name] / (args.steps - 1) for name in ("step", "generation", *PHASES)}
        seconds["update"] = seconds["step"] - seconds["generation"]
        seconds["rest"] = seconds["generation"] - sum(seconds[name] for name in ("sampling", "sync", "scoring"))
        peak = torch.cuda.max_memory_allocated() if CUDA else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        row = {"tokens_per_s": completions * new / seconds["sampling"], "peak_bytes": peak}
        row |= {"logp_difference": max(entry.get("sampling/sampling_logp_difference/max", 0) for entry in entries)}
        result[f"{completions}x{new}"] = seconds | row
        print(completions, new, result[f"{completions}x{new}"], file=sys.stderr, flush=True)
    return result


def main():
    parser = engine_options(__doc__)
    parser.add_argument(
        "--kinds", nargs="+", choices=["trl", *PRECISIONS], default=[BASELINE, "fp8" if CUDA else "int8"]
    )
    parser.add_argument("--corrections", nargs="+", default=["tis"], help="`is_correction` of ours")
    parser.add_argument(
        "--completions",
        nargs="+",
        type=lambda text: tuple(map(int, text.split("x"))),
        default=[(64, 1024) if CUDA else (8, 16)],
        metavar="NxTOKENS",
        help="of a step, and new tokens of each",
    )
    parser.add_argument(
        "--train_precision",
        choices=train_precisions(),
        help="of ours; over a frozen base the adapter travels by itself",
    )
    parser.add_argument("--exact_rollouts", action="store_true", help="of ours")
    parser.add_argument("--micro", type=int, default=16 if CUDA else 4, help="completions of a micro-batch")
    parser.add_argument("--steps", type=int, default=3, help="of which the first warms up")
    parser.add_argument("--vllm_gpu_memory_utilization", type=float, default=0.3)
    args = parser.parse_args()
    if args.one:
        return report(measure(args))
    load_tokenizer(args.tokenizer)  # fails early if it is missing

    results = {}
    for size in args.sizes:
        policy = f"LoRA of rank {args.lora}" if args.lora else "all weights"
        print(f"{machine()}, Qwen2.5 {size}, {policy}, {args.prompt} tokens in")
        columns = "".join(f"{name:>10}" for name in PHASES)
        heading = f"{'trainer':<16}{'completions':>12}{'step s':>9}{'ratio':>8}{columns}{'tok/s':>9}{'peak GiB':>10}"
        print(heading, flush=True)
        found = results.setdefault(size, {})
        runs = [(kind, c) for kind in args.kinds for c in (["trl"] if kind == "trl" else args.corrections)]
        for kind, correction in runs:
            name = kind if kind == "trl" else f"{kind} {correction}"
            one = ["--one", kind, "--sizes", size, "--corrections", correction]
            rows = found[name] = in_own_process([*sys.argv[1:], *one], args.timeout)
            if "error" in rows:
                print(f"{name:<16}{rows['error'][:150]}", flush=True)
                continue
            for shape, row in rows.items():
                first = next(iter(found.values())).get(shape)
                ratio = f"{first['step'] / row['step']:.2f}" if first else "-"
                phases = "".join(f"{row[phase]:>10.2f}" for phase in PHASES)
                peak = row["peak_bytes"] / 2**30
                cells = f"{row['step']:>9.2f}{ratio:>8}{phases}{row['tokens_per_s']:>9.0f}{peak:>10.1f}"
                print(f"{name:<16}{shape:>12}{cells}", flush=True)
    save(f"step-{'-'.join(args.sizes)}", {"arguments": vars(args), "results": results}, args.output)


if __name__ == "__main__":
    main()
