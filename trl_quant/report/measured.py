"""Measured times of a step against TRL's in BF16, on one H200 with vLLM in the training process.

A measured cost is told as a run's own only if the run is like the measured one in everything that decides its cost.

`tests/report/test_plan_costs.py` compares each entry with the raw files in `benchmarks/results`.
"""

from dataclasses import dataclass

import torch

from ..config import QuantGRPOConfig
from ..config.fields import QuantFields
from ..precisions import with_products
from .memory import Shape


SIZES = {"7b": 7.6e9, "32b": 32.8e9}  # parameters of the models that were measured
NEAR = 0.15  # largest relative difference of sizes that count as equal
AS_MANY = 1.25  # largest ratio of numbers of tokens or completions that count as equal


@dataclass(frozen=True)
class Step:
    """
    A measured step.

    Attributes:
        size (`str`): Key of [`SIZES`].
        adapted (`bool`): Whether LoRA was trained instead of all weights.
        lora_sync (`str`): How an adapter reaches vLLM.
        train (`str` or `None`): `train_precision`.
        rollout (`str`): `rollout_precision`.
        exact (`bool`): `exact_rollouts`.
        completions, new (`int`): Number of completions in a step, and of new tokens in each.
        micro (`int`): Number of completions in a micro-batch.
        trl (`float`): Seconds of TRL's step in BF16.
        scoring (`float`): Seconds of that step for scoring, which TRL's correction needs and most of ours do not.
        ours (`float`): Seconds of our step.
    """

    size: str
    adapted: bool
    lora_sync: str
    train: str | None
    rollout: str
    exact: bool
    completions: int
    new: int
    micro: int
    trl: float
    scoring: float
    ours: float


STEPS = (
    Step("7b", True, "merge", None, "bf16", False, 64, 1024, 8, 18.94, 3.00, 13.68),
    Step("7b", True, "merge", None, "bf16", False, 256, 512, 8, 37.03, 7.19, 21.98),
    Step("7b", True, "merge", None, "fp8", False, 64, 1024, 8, 19.89, 2.99, 12.99),
    Step("7b", True, "merge", None, "fp8", False, 256, 512, 8, 38.41, 7.16, 22.56),
    Step("7b", True, "merge", "fp8", "fp8", False, 64, 1024, 8, 18.94, 3.00, 9.16),
    Step("7b", True, "merge", "fp8", "fp8", False, 256, 512, 8, 37.03, 7.19, 15.00),
    Step("7b", True, "merge", "fp8_block", "fp8_block", True, 64, 1024, 8, 18.94, 3.00, 10.10),
    Step("7b", True, "merge", "fp8_block", "fp8_block", True, 256, 512, 8, 37.03, 7.19, 17.53),
    Step("7b", True, "merge", "int8", "int8", True, 64, 1024, 8, 19.89, 2.99, 10.10),
    Step("7b", True, "merge", "int8", "int8", True, 256, 512, 8, 38.41, 7.16, 19.55),
    Step("7b", False, "merge", None, "bf16", False, 64, 1024, 8, 18.28, 2.26, 13.99),
    Step("7b", False, "merge", "fp8_block", "fp8_block", False, 64, 1024, 8, 18.28, 2.26, 11.48),
    Step("7b", True, "adapter", "nvfp4", "nvfp4", False, 8, 512, 8, 3.62, 0.22, 3.19),
    Step("7b", True, "adapter", "nvfp4", "nvfp4", False, 64, 512, 8, 11.06, 1.78, 8.52),
    Step("32b", True, "adapter", "nvfp4", "nvfp4", False, 8, 512, 8, 13.95, 0.93, 9.37),
    Step("32b", True, "adapter", "nvfp4", "nvfp4", False, 64, 512, 16, 45.88, 7.43, 28.25),
    Step("32b", True, "adapter", "fp8", "fp8", False, 8, 512, 8, 13.95, 0.93, 8.89),
    Step("32b", True, "adapter", "fp8", "fp8", False, 64, 512, 16, 45.88, 7.43, 18.43),
)


def cost(args: QuantFields, shape: Shape, dtype: torch.dtype, prompts_once: bool) -> str:
    """
    Describes a run's cost against TRL's in BF16, by a measured step that is like its own, or says in what the most
    similar one differs. `dtype` is the type in which the policy is loaded, and `prompts_once` says whether a prompt is
    computed once for its completions in a micro-batch.
    """
    engine = args.spec.source
    if args.spec.sampled_in is None and not args.has_critic:  # TRL has no such PPO
        return "as TRL's, which this run is"
    if not isinstance(args, QuantGRPOConfig) or args.has_critic:
        return "not measured with this trainer"
    if args.max_completion_length is None:
        return "not measured without a `max_completion_length`"
    if engine in ("embedded", "shared") or (args.denoises and args.spec.sampled_in not in with_products()):
        return "not measured; the embedded engine computes in low precision and is not made to be fast"
    found = [step for step in STEPS if _is_like(step, args, shape)] if engine == "colocate" else []
    if not found:
        return "not measured for this model, these precisions and this engine"
    step = min(found, key=lambda step: (len(differences(step, args, dtype, prompts_once)), *_distance(step, args)))
    place = f"on one H200 at {step.size.upper()} with {step.completions} completions of {step.new} new tokens"
    others = differences(step, args, dtype, prompts_once)
    if others:
        return f"not measured for such a run. The nearest was measured {place}; this run has {', '.join(others)}"
    return (
        f"{step.ours:.2f} s a step against TRL's {step.trl:.2f} s, {step.trl / step.ours:.2f}x "
        f"({(step.trl - step.scoring) / step.ours:.2f}x where TRL's does not score), measured {place}"
    )


def differences(step: Step, args, dtype: torch.dtype, prompts_once: bool) -> list[str]:
    """Describes in what a run that [`cost`] compares with a step would take another time than that step."""
    found = []
    if dtype != torch.bfloat16:
        found.append(f"a policy in {str(dtype).removeprefix('torch.')} (measured: bfloat16)")
    sizes = {
        "completions a generation": (args.generation_batch_size, step.completions),
        "tokens a completion": (args.max_completion_length, step.new),
        "tokens a micro-batch": (
            args.per_device_train_batch_size * args.max_completion_length,
            step.micro * step.new,
        ),
    }
    for name, (own, measured) in sizes.items():
        if not 1 / AS_MANY <= own / measured <= AS_MANY:
            found.append(f"{own} {name} (measured: {measured})")
    updates = args.steps_per_generation * args.num_iterations / args.gradient_accumulation_steps
    if updates != 1:
        found.append(f"{updates:g} updates a generation (measured: 1)")
    switches = {
        "no `gradient_checkpointing`": not args.gradient_checkpointing,
        "`use_liger_kernel`": args.use_liger_kernel,
        "prompts that are computed for each completion": not prompts_once,
        "a reference model": args.needs_reference,
        f"`is_correction`={args.is_correction!r}, which scores a generation first": _scores_first(args),
        f"{args.world_size} GPUs": args.world_size > 1,
    }
    return found + [f"{words} (measured: the opposite)" for words, is_so in switches.items() if is_so]


def _scores_first(args) -> bool:
    return args.correction_class.whole_batch or args.correction_class.applied_by_trl


def _is_like(step: Step, args, shape: Shape) -> bool:
    near = not (shape.experts or shape.state) and abs(shape.parameters / SIZES[step.size] - 1) <= NEAR
    adapted = shape.adapter > 0
    planned = args.train_precision, args.spec.sampled_in, args.exact_rollouts
    alike = adapted == step.adapted and (not adapted or args.lora_sync == step.lora_sync)
    return near and alike and planned == (step.train, step.rollout, step.exact)


def _distance(step: Step, args) -> tuple[int, int]:
    lengths = abs(step.new - args.max_completion_length)
    return lengths, abs(step.completions - args.generation_batch_size)
