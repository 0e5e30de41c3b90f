"""
Times whole GRPO steps and their phases, through the trainers, with TRL's trainer and its control in the same run.

    python benchmarks/step.py                          # 7B shapes on a GPU, tiny ones on a CPU
    python benchmarks/step.py --trainers trl trl-control bf16 fp8/fp8 --completions 64x4096:lognormal 64x1024
    python benchmarks/step.py --show runs.json         # prints the table of a file, and measures nothing

| trainer | is |
|---|---|
| `trl` | TRL's `GRPOTrainer` as it comes |
| `trl-control` | the same with each free switch that helps it: no scoring pass, no text from vLLM |
| `trl-liger` | the control with Liger's kernels, which TRL deprecates and which must be installed |
| `bf16`, `fp8`, ... | ours with this `rollout_precision` |
| `fp8/fp8`, `nvfp4/nvfp4` | ours with a `train_precision` too; over a frozen base the adapter travels by itself |
| `fp8/fp8/adapter` | ours with the adapter beside an FP8 base that trainer and vLLM hold once |
| `fp8_block/fp8_block/exact` | ours with `exact_rollouts` too |
| `bf16+padded`, `fp8+packed` | ours with `pack_sequences` set to False or True |
| `fp8+replay` | ours with `router_replay`, for a mixture of experts |
| `fp8/fp8@2` | ours with `rollouts_in_flight=2` |
| `fp8/fp8+liger` | ours with Liger's kernels |
| `rloo:trl`, `rloo:fp8/fp8` | TRL's `RLOOTrainer` and ours; its reference model is TRL's default |
| `unsloth`, `unsloth-fp8` | unsloth's `GRPOTrainer`, over a base in BF16 or FP8: see `unsloth_step.py` |
| `ppo:fp8/fp8` | our PPO, with a critic of the 0.5B shape (on a CPU of the tiny one) whose weights are all trained |

Each trainer runs in its own process and trains a LoRA policy of random weights with gradient checkpointing, one update
per generation and TRL's other settings. Without a prefix the method is GRPO. With `--lora 0` all weights are trained in
BF16, with bitsandbytes' AdamW in 8 bits or, without that, plain SGD. Our self-check, one in 50 steps, is switched off.

The length of each completion is drawn before anything is measured, so all trainers do the same work: vLLM gets it as
the `max_tokens` of a request, and no token ends a completion earlier. In a step of `--completions` 64x4096 all lengths
are 4096; in one of 64x4096:lognormal they are log-normal, in one of 64x4096:geometric geometric, and cut there.

| phase | is |
|---|---|
| sampling | `generate` of the engine, text and log-probabilities included |
| sync | sending the policy's weights to the engine |
| scoring | passes without gradients: old log-probabilities, a reference's, a critic's values; 0 if there is none |
| update | everything after the generation: forward, backward, clipping, optimizer |
| rest | the generation without the phases above: tokenizing, decoding, rewards, metrics |

With `@2` a length belongs to a prompt and a member of its group, and what was sampled in an earlier step is subtracted.
The first steps return the short completions: compare means of the steps after the first ten.

One trainer runs all shapes, the largest first. The first step of a shape warms up. The table has the medians of the
others, so phases need not add up to the step. Memory is the peak in these steps: torch's allocations on a GPU, else the
memory of the process, whose peak only grows. `load` is the host's, just before a trainer starts. `--output` keeps every
step, and adds to a file that has runs of the same commit, versions and arguments. `--profile` watches the last step's
update with torch's profiler on a GPU and keeps each kernel's calls and seconds in that file; the step does not count.
"""

import argparse
import importlib.util
import math
import random
import re
import resource
import statistics
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import step_runs
import torch
from engines import (
    CUDA,
    PRECISIONS,
    START,
    Clock,
    adapter,
    commit,
    engine_options,
    load_tokenizer,
    longest_kernels,
    model_directory,
    report,
    save_start,
    speak,
    words_of,
)
from torch.profiler import ProfilerActivity, profile
from transformers import TrainerCallback

from trl_quant.precisions import exact_flows, frozen_bases, in_vllm, train_precisions


IGNORE_EOS = {"ignore_eos": True}
CONTROL = {
    "vllm_importance_sampling_correction": False,
    "generation_kwargs": IGNORE_EOS | {"detokenize": False},
}
# Fields of TRL's config, by the name of the trainer
TRLS = {
    "trl": {},
    "trl-control": CONTROL,
    "trl-liger": CONTROL | {"use_liger_kernel": True},
    "rloo:trl": {},
}
OTHERS = (*TRLS, *step_runs.UNSLOTH)
METHODS = ("grpo", "rloo", "ppo")
SWITCHES = {"packed": {"pack_sequences": True}, "padded": {"pack_sequences": False}}
SWITCHES |= {"liger": {"use_liger_kernel": True}, "replay": {"router_replay": True}}
OURS = re.compile(
    r"(?P<rollout>\w+)(/(?P<train>\w+)(/(?P<how>exact|adapter))?)?"
    rf"(\+(?P<switch>{'|'.join(SWITCHES)}))?(@(?P<flight>[\d.]+))?"
)
# Arguments that all runs of a file share
SHARED = ("prompt", "generations", "lora", "median", "sigma", "seed", "correction", "lora_sync")
SHARED += ("engine_kwargs", "trl_engine_kwargs")


def fields_of(trainer: str, precisions: Sequence[str] = PRECISIONS) -> dict:
    """Returns the fields of our config that the name of a trainer of ours stands for, with one of these precisions."""
    method, _ = step_runs.parts_of(trainer)
    parts = OURS.fullmatch(trainer.removeprefix(f"{method}:"))
    if method not in METHODS or not parts or parts["rollout"] not in precisions:
        raise argparse.ArgumentTypeError(
            f"{trainer!r} is neither of {', '.join(OTHERS)} nor a precision of this machine, for one of "
            f"{', '.join(METHODS)}."
        )
    fields = {"rollout_precision": parts["rollout"]}
    if parts["train"]:
        if parts["train"] not in train_precisions():
            raise argparse.ArgumentTypeError(f"{trainer!r}: policies are trained in {', '.join(train_precisions())}.")
        fields["train_precision"] = parts["train"]
    if parts["train"] in frozen_bases() or parts["how"] == "adapter":
        fields["lora_sync"] = "adapter"
    if parts["how"] == "exact":
        if parts["train"] not in exact_flows():
            raise argparse.ArgumentTypeError(f"{trainer!r}: rollouts are exact in {', '.join(exact_flows())}.")
        fields["exact_rollouts"] = True
    if parts["flight"]:
        fields["rollouts_in_flight"] = float(parts["flight"])
    return fields | SWITCHES.get(parts["switch"], {})


def trainer_name(text: str, precisions: Sequence[str] = PRECISIONS) -> str:
    if text not in OTHERS:
        fields_of(text, precisions)
    return text


def shape_name(completions: int, new: int, lengths: str) -> str:
    return f"{completions}x{new} {lengths}"


def shape_of(text: str) -> tuple[int, int, str]:
    """Returns the completions of a step, most tokens of each, and how lengths are drawn."""
    parts = re.fullmatch(r"(\d+)x(\d+)(?::(equal|lognormal|geometric))?", text)
    if not parts:
        raise argparse.ArgumentTypeError(f"{text!r} is no shape such as 64x1024 or 64x4096:lognormal.")
    completions, new, lengths = parts.groups()
    return int(completions), int(new), lengths or "equal"


def draw_lengths(args, completions: int, new: int, lengths: str) -> list[list[int]]:
    """Draws the number of tokens of each completion of each step, the same in every process."""
    if lengths == "equal":
        return [[new] * completions] * args.steps
    generator = random.Random(args.seed)
    draw, given = {
        "lognormal": (generator.lognormvariate, (math.log(args.median), args.sigma)),
        "geometric": (generator.expovariate, (math.log(2) / args.median,)),
    }[lengths]
    return [[min(max(round(draw(*given)), 1), new) for _ in range(completions)] for _ in range(args.steps)]


def left_in_flight(trainer, drawn: list[list[int]]) -> Iterator[list[int]]:
    """
    Yields for each generation of a run with partial rollouts what is left of its completions. A length belongs to a
    group, in the order of their start, and a member of it.
    """
    each = trainer.num_generations
    groups = [step[i : i + each] for step in drawn for i in range(0, len(step), each)]
    while True:
        yield [
            groups[group.place][i] - len(completion.token_ids)
            for group in trainer.pool.groups
            for i, completion in enumerate(group.completions)
            if not completion.has_ended
        ]


def prescribe_lengths(llm, drawn: Iterator[list[int]]) -> None:
    """Gives each request of vLLM's `llm` its own length; each generation takes the next list."""
    generate = llm.generate

    def generate_as_drawn(prompts, *, sampling_params, **options):
        requests = []
        each = sampling_params if isinstance(sampling_params, list) else [sampling_params] * len(prompts)
        for given, length in zip(each, next(drawn), strict=True):
            request = given.clone()
            request.max_tokens = length
            requests.append(request)
        return generate(prompts, sampling_params=requests, **options)

    llm.generate = generate_as_drawn


def settings_of(args, trainer: str, cuda: bool = CUDA) -> dict:
    """
    Returns the fields of a trainer's config that its figures depend on, for the largest of `args.completions`. `cuda`
    says whether a GPU trains.
    """
    completions, new, _ = map(max, zip(*args.completions, strict=True))
    settings = {
        "bf16": cuda,
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": args.vllm_gpu_memory_utilization,
        "num_generations": args.generations,
        "max_completion_length": new,
        "per_device_train_batch_size": min(args.micro, completions),
        "gradient_accumulation_steps": max(completions // args.micro, 1),
        "gradient_checkpointing": True,
    }
    if not args.lora:
        settings["optim"] = "adamw_bnb_8bit" if importlib.util.find_spec("bitsandbytes") else "sgd"
    if trainer in OTHERS:
        return settings
    settings |= {"is_correction": args.correction, "lora_sync": args.lora_sync}
    settings |= fields_of(trainer, tuple(in_vllm()) if cuda else PRECISIONS)
    if not args.lora:
        del settings["lora_sync"]
    return settings


def draw_prompts(args, tokenizer, generator: random.Random) -> list[str]:
    """Draws as many prompts as the largest step has completions."""
    words, completions = words_of(tokenizer), max(completions for completions, *_ in args.completions)
    return [tokenizer.decode(generator.choices(words, k=args.prompt)) for _ in range(completions)]


def run_settings(args, directory: str, longest: int) -> dict:
    """Returns the fields of a trainer's config for runs in `directory`, whose prompts have at most `longest` tokens."""
    return {
        "output_dir": f"{directory}/run",
        "use_cpu": not CUDA,
        "vllm_max_model_length": longest + max(new for _, new, _ in args.completions),
        "generation_kwargs": IGNORE_EOS,
        "max_steps": args.steps,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    } | settings_of(args, args.one)


def make_trainer(args, tokenizer):
    """Builds TRL's trainer or ours, with vLLM in the same process."""
    from datasets import Dataset
    from transformers import AutoConfig, AutoModelForCausalLM
    from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

    from trl_quant.trainers.launch import TRAINERS
    from trl_quant.trl_seams import llm_with

    trls = {"grpo": (GRPOTrainer, GRPOConfig), "rloo": (RLOOTrainer, RLOOConfig)}
    method, _ = step_runs.parts_of(args.one)
    (size,) = args.sizes
    generator = random.Random(0)
    prompts, directory = draw_prompts(args, tokenizer, generator), model_directory(size, tokenizer)
    config = AutoConfig.from_pretrained(directory)
    with torch.device("cuda" if CUDA else "cpu"):
        # BF16 is far slower on a CPU
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if CUDA else torch.float32)
    speak(model, words_of(tokenizer))
    save_start(model)

    settings = run_settings(args, directory, max(map(len, tokenizer(prompts).input_ids)))
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
        given["peft_config"] = adapter(model, args.lora)
    if args.one in TRLS:
        trainer, config = trls[method]
        with llm_with(**arguments | args.trl_engine_kwargs):
            return trainer(args=config(**settings | TRLS[args.one]), **given)
    ours = {"sync_check_steps": 0, "vllm_engine_kwargs": arguments | args.engine_kwargs}
    if method == "ppo":
        ours["value_model_name_or_path"] = critic_directory(tokenizer)
    trainer = TRAINERS[method]
    return trainer(args=trainer.config_class(**settings, **ours), **given)


def critic_directory(tokenizer) -> str:
    """Writes a checkpoint of random weights from which a critic starts."""
    from transformers import AutoConfig, AutoModelForCausalLM

    directory = model_directory("0.5b" if CUDA else "tiny", tokenizer)
    config = AutoConfig.from_pretrained(directory)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(directory)
    return directory


class Steps(TrainerCallback):
    """
    Times each step of a training and its phases.

    Parameters:
        profiled (`int` or `None`): Number of the step whose update the profiler watches, from 0.

    Attributes:
        seconds (`list[dict[str, float]]`): Of each step so far, by phase; `step` is the whole.
        kernels (`list`): Of the profiled update: name, calls and seconds of each kernel, the longest first.
        phases (`tuple[str, ...]`): The phases of a generation.
    """

    phases = ("sampling", "sync", "scoring")

    def __init__(self, trainer, profiled: int | None = None):
        self.seconds: list[dict[str, float]] = []
        self.profiled, self.kernels = profiled, []
        self.profiler = None
        self.clock = Clock(synchronize=True)
        self.clock.watch(trainer, "_generate_and_score_completions", "generation")
        self.watch(trainer)
        generate = trainer._generate_and_score_completions

        def generate_then_profile(inputs):
            batch = generate(inputs)
            if len(self.seconds) == self.profiled:
                self.profiler = profile(activities=[ProfilerActivity.CUDA])
                self.profiler.start()
            return batch

        trainer._generate_and_score_completions = generate_then_profile

    def watch(self, trainer):
        """Times the phases."""
        if getattr(trainer, "pool", None) is not None:
            self.clock.watch(trainer.vllm_generation.sampler, "draw", "sampling")
        else:
            self.clock.watch(trainer.vllm_generation, "generate", "sampling")
        self.clock.watch(trainer.vllm_generation, "sync_weights", "sync")
        without_gradient = lambda: not torch.is_grad_enabled()  # noqa: E731
        self.clock.watch(trainer, "_get_per_token_logps_and_entropies", "scoring", without_gradient)
        if hasattr(trainer, "critic"):
            self.clock.watch(trainer.critic, "old_values", "scoring")

    def on_train_begin(self, args, state, control, **others):
        self.seconds = []

    def on_step_begin(self, args, state, control, **others):
        if CUDA and len(self.seconds) == 1:  # the warm-up has ended
            torch.cuda.reset_peak_memory_stats()
        self.clock.seconds.clear()
        self.start = self.clock.now()

    def on_step_end(self, args, state, control, **others):
        if self.profiler is not None:
            torch.cuda.synchronize()
            self.profiler.stop()
            self.kernels, self.profiler = longest_kernels(self.profiler), None
        step, found = self.clock.now() - self.start, self.clock.seconds
        phases = {name: found[name] for name in self.phases}
        rest = found["generation"] - sum(phases.values())
        self.seconds.append({"step": step} | phases | {"update": step - found["generation"], "rest": rest})


def set_shape(trainer, completions: int, new: int, micro: int) -> None:
    """Sets the number of completions, of their tokens and of a micro-batch for the trainer's next steps."""
    args = trainer.args
    args.per_device_train_batch_size = trainer._train_batch_size = min(micro, completions)
    args.gradient_accumulation_steps = args.steps_per_generation = completions // args.per_device_train_batch_size
    args.generation_batch_size = completions
    args.max_completion_length = trainer.max_completion_length = trainer.vllm_generation.max_completion_length = new


def check_lengths(logged: list[dict], drawn: list[list[int]]) -> None:
    """Asserts that the completions of each step had the lengths that were drawn, by TRL's own metrics."""
    assert len(logged) == len(drawn), f"{len(logged)} steps, not {len(drawn)}"
    for entry, step in zip(logged, drawn):
        for name, expected in (("min", min(step)), ("mean", statistics.mean(step)), ("max", max(step))):
            length = entry[f"completions/{name}_length"]
            assert math.isclose(length, expected, rel_tol=1e-6), f"{name} length {length}, but {expected} was drawn"


def measure(args, trainer) -> dict:
    steps = Steps(trainer, profiled=args.steps - 1 if args.profile else None)
    trainer.add_callback(steps)
    generate, result = trainer.vllm_generation.llm.generate, {}
    # TRL generates at each multiple of the micro-batches of a generation. The larger goes first, as the smaller divides
    # it
    for completions, new, lengths in sorted(args.completions, reverse=True):
        set_shape(trainer, completions, new, args.micro)
        drawn = draw_lengths(args, completions, new, lengths)
        trainer.vllm_generation.llm.generate = generate
        is_partial = getattr(trainer, "pool", None) is not None
        of_generations = left_in_flight(trainer, drawn) if is_partial else iter(drawn)
        prescribe_lengths(trainer.vllm_generation.llm, of_generations)
        trainer.train()
        logged = [entry for entry in trainer.state.log_history if "loss" in entry]
        if not is_partial:
            check_lengths(logged, drawn)

        warm_up, *measured = steps.seconds[: steps.profiled]
        peak = torch.cuda.max_memory_allocated() if CUDA else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        # Not measured without a correction
        differences = [entry.get("sampling/sampling_logp_difference/max") for entry in logged]
        result[shape_name(completions, new, lengths)] = {
            "warm_up": warm_up,
            "steps": measured,
            "peak_bytes": peak,
            "alloc_retries": torch.cuda.memory_stats()["num_alloc_retries"] if CUDA else None,
            "logp_difference": None if None in differences else max(differences),
        }
        if is_partial:  # whose steps differ: lengths returned, ages, tokens computed again
            names = ("completions/mean_length", *(name for name in logged[-1] if name.startswith("rollouts/")))
            result[shape_name(completions, new, lengths)]["in_flight"] = [
                {name: entry[name] for name in names if name in entry} for entry in logged
            ]
        if args.profile:
            result[shape_name(completions, new, lengths)]["update_kernels"] = steps.kernels[:80]
    return result


def options(cuda: bool = CUDA) -> argparse.ArgumentParser:
    parser = engine_options(__doc__, cuda)
    parser.add_argument(
        "--trainers",
        nargs="+",
        type=partial(trainer_name, precisions=tuple(in_vllm()) if cuda else PRECISIONS),
        default=["trl", "trl-control", "bf16", "fp8"] if cuda else ["bf16", "int8"],
        metavar="TRAINER",
        help=f"{', '.join(OTHERS)}, or ours: "
        "[METHOD:]ROLLOUT[/TRAIN[/exact|/adapter]][+packed|+padded|+liger|+replay][@IN_FLIGHT]",
    )
    parser.add_argument("--correction", default="tis", help="`is_correction` of ours")
    parser.add_argument(
        "--completions",
        nargs="+",
        type=shape_of,
        default=[shape_of("64x1024" if cuda else "8x16")],
        metavar="NxTOKENS[:lognormal|:geometric]",
        help="of a step, new tokens of each at most, and how their lengths are drawn",
    )
    parser.add_argument("--median", type=float, default=900 if cuda else 12, help="of lengths that differ")
    parser.add_argument("--sigma", type=float, default=0.8, help="of the logarithm of lognormal lengths")
    parser.add_argument("--seed", type=int, default=0, help="of lengths that differ")
    parser.add_argument("--micro", type=int, default=16 if cuda else 4, help="completions of a micro-batch at most")
    parser.add_argument("--steps", type=int, default=6, help="of which the first warms up")
    parser.add_argument("--profile", action="store_true", help="keeps the kernels of the last step's update")
    parser.add_argument("--rounds", type=int, default=1, help="each second one takes the trainers in reverse")
    parser.add_argument("--vllm_gpu_memory_utilization", type=float, default=0.3)
    parser.add_argument("--unsloth_site", type=Path, metavar="DIR", help="folder of packages with unsloth and its pins")
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON file, or .json.xz, to which runs are added")
    parser.add_argument("--commit", default=commit(), help="for a copy of the tree without git")
    parser.add_argument("--show", nargs="+", type=Path, metavar="FILE", help="prints the runs of these files")
    return parser


def main():
    parser = options()
    args = parser.parse_args()
    if args.one:
        return report(measure(args, make_trainer(args, load_tokenizer(args.tokenizer))))
    if args.steps < 2:
        parser.error("`--steps` must be at least 2, because the first one warms up")
    if args.profile and (not CUDA or args.steps < 3):
        parser.error("`--profile` needs a GPU and at least 3 `--steps`")
    try:
        if args.show:
            found = step_runs.read(*args.show)
        else:
            found = start(args)
    except ValueError as error:
        parser.error(str(error))
    failed = [] if args.show else run_all(args, found)
    step_runs.write(found, args.output)
    if found["runs"]:
        step_runs.print_tables(found)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def start(args) -> dict:
    """Draws the lengths and returns the runs that `--output` has so far, if it has any."""
    load_tokenizer(args.tokenizer)  # fails early if it is missing
    drawn = {shape_name(*shape): draw_lengths(args, *shape) for shape in args.completions}
    return step_runs.start(args, SHARED, drawn)


def run_all(args, found: dict) -> list[str]:
    """Runs each trainer with each size of the policy. Returns the names of trainers that failed."""
    constants = {"vllm_gpu_memory_utilization": args.vllm_gpu_memory_utilization}
    failed = []
    for size in args.sizes:
        failed += step_runs.run_all(args, args.trainers, size, found, "--sizes", size, **constants)
    return failed


if __name__ == "__main__":
    main()
