"""
Times whole GRPO steps of a masked diffusion model and their phases, through the trainer, in several precisions.

    python benchmarks/diffusion.py                                    # LLaDA-8B's shape on a GPU, a tiny one on a CPU
    python benchmarks/diffusion.py --completions 4 16 --output runs.json
    python benchmarks/diffusion.py --show runs.json                   # prints the table of a file, and measures nothing

Each precision runs in its own process, one after the other. The policy has LLaDA-8B's shape, random weights and LoRA
on all linear layers, with gradient checkpointing; the copy samples in the `rollout_precision`. The settings are the
paper's: blocks of 32, two tokens a step, AIS, a reference. The model writes words of a tokenizer alone and ends no
text, so each completion takes all of its denoising steps.

| phase | is |
|---|---|
| sampling | denoising |
| estimate | the pass that scores the completions in the sampler's numbers |
| scoring | the pass without gradients that computes old log-probabilities |
| reference | the same without the adapter |
| sync | quantizing the policy's weights into the copy |
| update | everything after the generation: forward, backward, clipping, optimizer |
| rest | the generation without the phases above: tokenizing, decoding, rewards, metrics |

The paper adds up generation, scoring and reference: `paper` is sampling, estimate, scoring and reference together. In
`fp8`, `fp8_block` and `int8` the copy multiplies in low precision, and norms and activations are computed together with
the quantizers. In `fp8_tensor` the products alone are FP8's; in BF16 torch's operators run. The first step warms up,
the table has the medians of the others. Memory is the peak of these steps: of torch's allocations on a GPU, of the
process on a CPU. `--output` keeps every step, and adds to a file that has runs of the same commit, versions and
arguments.
"""

import argparse
import atexit
import random
import resource
import shutil
import statistics
import tempfile
from pathlib import Path

import step_runs
import torch
from engines import CUDA, commit, load_tokenizer, report, speak, words_of
from step import Steps, set_shape

from trl_quant.precisions import PRECISIONS
from trl_quant.rollout.embedded import diffusion


SHAPES = {
    "tiny": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4},
    "8b": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32, "num_attention_heads": 32},
}
LLADA_VOCABULARY = 126464
BASELINE = "bf16"  # the precision that the others are divided by
# Arguments that all runs of a file share
SHARED = (
    "size",
    "prompt",
    "new",
    "generations",
    "lora",
    "block",
    "tokens_per_step",
    "iterations",
    "correction",
    "beta",
)
PARTS = {"sampling": ("sampling",), "paper": ("sampling", "estimate", "scoring", "reference"), "step": ("step",)}


def make_policy(size: str, tokenizer):
    """Builds a policy of random weights, on the device itself; only words of the tokenizer are likely."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    vocabulary = -(-len(tokenizer) // 64) * 64
    config = LlamaConfig(
        vocab_size=vocabulary if size == "tiny" else max(vocabulary, LLADA_VOCABULARY),
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        rms_norm_eps=1e-5,
        eos_token_id=tokenizer.eos_token_id,
        is_causal=False,
        **SHAPES[size],
    )
    with torch.device("cuda" if CUDA else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if CUDA else torch.float32)
    speak(model, words_of(tokenizer))
    model.name_or_path = tempfile.mkdtemp(prefix="trl-quant-bench-diffusion-")
    atexit.register(shutil.rmtree, model.name_or_path, ignore_errors=True)
    tokenizer.save_pretrained(model.name_or_path)
    return model


def settings_of(args, precision: str, cuda: bool = CUDA) -> dict:
    """Returns the fields of the trainer's config that its figures depend on. `cuda` says whether a GPU trains."""
    return {
        "bf16": cuda,
        "rollout_precision": precision,
        "is_correction": args.correction,
        "use_bias_correction_kl": False,
        "block_length": args.block,
        "tokens_per_step": args.tokens_per_step,
        "cache_finished_blocks": args.cache_finished_blocks,
        "num_iterations": args.iterations,
        "num_generations": args.generations,
        "max_completion_length": args.new,
        "beta": args.beta,
        "per_device_train_batch_size": args.micro,
        "gradient_accumulation_steps": max(args.completions) // args.micro,
        "gradient_checkpointing": True,
        "learning_rate": 3e-6,
    }


def make_trainer(args, precision: str, tokenizer):
    """Builds the trainer, for the largest batch."""
    from datasets import Dataset
    from peft import LoraConfig

    from trl_quant import DiffusionGRPOConfig, DiffusionGRPOTrainer

    tokenizer.add_special_tokens({"mask_token": "<|mask|>"})
    words, generator, completions = words_of(tokenizer), random.Random(0), max(args.completions)
    prompts = [tokenizer.decode(generator.choices(words, k=args.prompt)) for _ in range(completions)]
    model = make_policy(args.size, tokenizer)
    settings = {
        "output_dir": f"{model.name_or_path}/run",
        "use_cpu": not CUDA,
        "max_steps": args.steps * args.iterations,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    } | settings_of(args, precision)
    return DiffusionGRPOTrainer(
        model=model,
        args=DiffusionGRPOConfig(**settings),
        reward_funcs=lambda completions, **_: [generator.random() for _ in completions],
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=args.lora, lora_alpha=2 * args.lora, target_modules="all-linear"),
    )


class DenoisingSteps(Steps):
    """Times each step of a training and its phases. A further update of a generation has no phase but the update."""

    phases = ("sampling", "estimate", "sync", "scoring", "reference")

    def watch(self, trainer):
        from peft.tuners.tuners_utils import BaseTunerLayer

        adapted = next(module for module in trainer.model.modules() if isinstance(module, BaseTunerLayer))
        policy = lambda: not (torch.is_grad_enabled() or adapted.disable_adapters)  # noqa: E731
        reference = lambda: not torch.is_grad_enabled() and adapted.disable_adapters  # noqa: E731
        self.clock.watch(diffusion, "denoise", "sampling")
        self.clock.watch(trainer.vllm_generation.engine, "estimate", "estimate")
        self.clock.watch(trainer.vllm_generation, "sync_weights", "sync")
        self.clock.watch(trainer, "_get_per_token_logps_and_entropies", "scoring", policy)
        self.clock.watch(trainer, "_get_per_token_logps_and_entropies", "reference", reference)


def shape_name(args, completions: int) -> str:
    return f"{completions}x{args.new}"


def measure(args) -> dict:
    """Trains in one precision at each number of completions, and returns the seconds of each step."""
    trainer = make_trainer(args, args.one, load_tokenizer(args.tokenizer))
    steps, result = DenoisingSteps(trainer), {}
    trainer.add_callback(steps)
    # TRL generates at each multiple of the micro-batches of a generation. The larger goes first
    for completions in sorted(args.completions, reverse=True):
        set_shape(trainer, completions, args.new, args.micro)
        trainer.train()
        logged = [entry for entry in trainer.state.log_history if "loss" in entry]
        for entry in logged:
            assert entry["completions/mean_length"] == args.new, "a completion ended before its last denoising step"
        warm_up, *measured = steps.seconds
        peak = torch.cuda.max_memory_allocated() if CUDA else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        result[shape_name(args, completions)] = {
            "warm_up": warm_up,
            "steps": measured,
            "peak_bytes": peak,
            "logp_difference": max(entry.get("sampling/sampling_logp_difference/max", 0.0) for entry in logged),
        }
    return result


def print_table(found: dict) -> None:
    """Prints, for each number of completions, medians in seconds and ratios to BF16."""
    told = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    print(f"\n{found['machine']}, commit {found['commit']}, {told}")
    print(", ".join(f"{name} {value}" for name, value in found["arguments"].items()))
    columns = (*DenoisingSteps.phases, "update", "rest", "paper", "step")
    for shape in found["lengths"]:
        runs: dict[str, list[dict]] = {}
        for run in found["runs"]:
            if shape in run["results"]:
                runs.setdefault(run["trainer"], []).append(run)
        medians = {
            name: {column: statistics.median(seconds_of(own, shape, column)) for column in columns}
            for name, own in runs.items()
        }
        print(f"\n{shape}")
        print(f"{'':12}{''.join(f'{column:>11}' for column in columns)}{'GiB':>8}  x {BASELINE}: {', '.join(PARTS)}")
        for name, own in runs.items():
            cells = "".join(f"{medians[name][column]:>11.3f}" for column in columns)
            peak = max(run["results"][shape]["peak_bytes"] for run in own) / 2**30
            ratios = ""
            if BASELINE in medians:
                ratios = "  ".join(f"{medians[BASELINE][part] / medians[name][part]:.2f}" for part in PARTS)
            print(f"{name:12}{cells}{peak:>8.1f}  {ratios}")


def seconds_of(runs: list[dict], shape: str, column: str) -> list[float]:
    """Returns the seconds of a phase, or of the phases of `PARTS`, in each measured step that generated."""
    steps = [step for run in runs for step in run["results"][shape]["steps"] if step["sampling"]]
    return [sum(step[phase] for phase in PARTS.get(column, (column,))) for step in steps]


def options(cuda: bool = CUDA) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--size", choices=SHAPES, default="8b" if cuda else "tiny")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=["bf16", "fp8"])
    parser.add_argument("--completions", nargs="+", type=int, default=[4, 16] if cuda else [4], help="of a step")
    parser.add_argument("--generations", type=int, default=4, help="completions of a prompt")
    parser.add_argument("--prompt", type=int, default=256 if cuda else 16, metavar="TOKENS")
    parser.add_argument("--new", type=int, default=256 if cuda else 16, metavar="TOKENS", help="of each completion")
    parser.add_argument("--block", type=int, default=32 if cuda else 8, help="`block_length`")
    parser.add_argument("--tokens_per_step", type=int, default=2)
    parser.add_argument("--cache_finished_blocks", action="store_true")
    parser.add_argument("--iterations", type=int, default=1, help="`num_iterations`, each under its own mask")
    parser.add_argument("--lora", type=int, default=128 if cuda else 8, metavar="RANK")
    parser.add_argument("--correction", default="ais", help="`is_correction`")
    parser.add_argument("--beta", type=float, default=0.04, help="0 for no reference")
    parser.add_argument("--micro", type=int, default=4, help="completions of a micro-batch")
    parser.add_argument("--steps", type=int, default=3, help="generations, of which the first warms up")
    parser.add_argument("--rounds", type=int, default=1, help="each second one takes the precisions in reverse")
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json; by default litellm's, if it is installed")
    parser.add_argument("--timeout", type=float, default=540, help="seconds for one precision")
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON file, or .json.xz, to which runs are added")
    parser.add_argument("--commit", default=commit(), help="for a copy of the tree without git")
    parser.add_argument("--show", nargs="+", type=Path, metavar="FILE", help="prints the runs of these files")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return parser


def start(args) -> dict:
    """Checks the arguments, and returns the runs that `--output` has so far, if it has any."""
    load_tokenizer(args.tokenizer)  # fails early if it is missing
    for completions in args.completions:
        if completions % args.micro or completions % args.generations:
            raise ValueError(
                f"--completions {completions} is no multiple of both --micro {args.micro} and --generations "
                f"{args.generations}."
            )
    lengths = {shape_name(args, count): [[args.new] * count] * args.steps for count in args.completions}
    return step_runs.start(args, SHARED, lengths)


def main():
    parser = options()
    args = parser.parse_args()
    if args.one:
        return report(measure(args))
    try:
        found = step_runs.read(*args.show) if args.show else start(args)
    except ValueError as error:
        parser.error(str(error))
    failed = [] if args.show else step_runs.run_all(args, args.precisions, args.size, found)
    step_runs.write(found, args.output)
    if found["runs"]:
        print_table(found)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
