"""Measured times of a step against TRL's in BF16, on one H200 with vLLM in the training process.

`tests/test_plan_figures.py` compares each entry with the raw files in `benchmarks/results`.
"""

from dataclasses import dataclass

from ..config import QuantGRPOConfig
from ..config.fields import QuantFields
from ..config.summary import engine_name
from ..precisions import with_products
from .memory import Shape


SIZES = {"7b": 7.6e9, "32b": 32.8e9}  # parameters of the models that were measured
NEAR = 0.15  # largest relative difference of sizes that count as equal


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
    trl: float
    scoring: float
    ours: float


STEPS = (
    Step("7b", True, "merge", None, "bf16", False, 64, 1024, 18.94, 3.00, 13.68),
    Step("7b", True, "merge", None, "bf16", False, 256, 512, 37.03, 7.19, 21.98),
    Step("7b", True, "merge", None, "fp8", False, 64, 1024, 19.89, 2.99, 12.99),
    Step("7b", True, "merge", None, "fp8", False, 256, 512, 38.41, 7.16, 22.56),
    Step("7b", True, "merge", "fp8", "fp8", False, 64, 1024, 18.94, 3.00, 9.16),
    Step("7b", True, "merge", "fp8", "fp8", False, 256, 512, 37.03, 7.19, 15.00),
    Step("7b", True, "merge", "fp8_block", "fp8_block", True, 64, 1024, 18.94, 3.00, 10.10),
    Step("7b", True, "merge", "fp8_block", "fp8_block", True, 256, 512, 37.03, 7.19, 17.53),
    Step("7b", True, "merge", "int8", "int8", True, 64, 1024, 19.89, 2.99, 10.10),
    Step("7b", True, "merge", "int8", "int8", True, 256, 512, 38.41, 7.16, 19.55),
    Step("7b", False, "merge", None, "bf16", False, 64, 1024, 18.28, 2.26, 13.99),
    Step("7b", False, "merge", "fp8_block", "fp8_block", False, 64, 1024, 18.28, 2.26, 11.48),
    Step("7b", True, "adapter", "nvfp4", "nvfp4", False, 8, 512, 3.62, 0.22, 3.19),
    Step("7b", True, "adapter", "nvfp4", "nvfp4", False, 64, 512, 11.06, 1.78, 8.52),
    Step("32b", True, "adapter", "nvfp4", "nvfp4", False, 8, 512, 13.95, 0.93, 9.37),
    Step("32b", True, "adapter", "nvfp4", "nvfp4", False, 64, 512, 45.88, 7.43, 28.25),
    Step("32b", True, "adapter", "fp8", "fp8", False, 8, 512, 13.95, 0.93, 8.89),
    Step("32b", True, "adapter", "fp8", "fp8", False, 64, 512, 45.88, 7.43, 18.43),
)


def cost(args: QuantFields, shape: Shape) -> str:
    """Describes a run's cost against TRL's in BF16, by the measured step that is most like its own."""
    engine = engine_name(args)
    if args.rollout_precision is None and not args.has_critic:  # TRL has no such PPO
        return "as TRL's, which this run is"
    if not isinstance(args, QuantGRPOConfig) or args.has_critic:
        return "not measured with this trainer"
    if args.max_completion_length is None:
        return "not measured without a `max_completion_length`"
    if engine in ("embedded", "shared") or (args.denoises and args.rollout_precision not in with_products()):
        return "not measured; the embedded engine computes in low precision and is not made to be fast"
    found = [step for step in STEPS if _is_like(step, args, shape)] if engine == "colocate" else []
    if not found:
        return "not measured for this model, these precisions and this engine"
    step = min(found, key=lambda step: _distance(step, args))
    return (
        f"{step.ours:.2f} s a step against TRL's {step.trl:.2f} s, {step.trl / step.ours:.2f}x "
        f"({(step.trl - step.scoring) / step.ours:.2f}x where TRL's does not score), measured on one H200 at "
        f"{step.size.upper()} with {step.completions} completions of {step.new} new tokens"
    )


def _is_like(step: Step, args, shape: Shape) -> bool:
    near = abs(shape.parameters / SIZES[step.size] - 1) <= NEAR
    adapted = shape.adapter > 0
    planned = args.train_precision, args.rollout_precision, args.exact_rollouts
    alike = adapted == step.adapted and (not adapted or args.lora_sync == step.lora_sync)
    return near and alike and planned == (step.train, step.rollout, step.exact)


def _distance(step: Step, args) -> tuple[int, int]:
    lengths = abs(step.new - args.max_completion_length)
    return lengths, abs(step.completions - args.generation_batch_size)
