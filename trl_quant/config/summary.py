"""Describes a run in one line: the source of its samples, their correction, and how an adapter reaches the sampler.

Sampling: INT8, embedded (numerics only, no speed-up); correction tis, cap 2; LoRA merged
Sampling: FP8, vLLM in the training process; correction tis, cap 2; lacks for README's speed: policy in FP32, no LoRA
"""

import torch

from ..precisions import with_products
from .fields import QuantFields
from .hyperparameters import setting_fields


# Completion tokens of a micro-batch from which on an update in 8 bits is the faster one, in `benchmarks/results`
MICRO_BATCH = 4096
NUMERICS = "(numerics only, no speed-up)"
MULTIPLIES = "(in low precision on a GPU)"
PLACES = {
    "embedded": f"embedded {NUMERICS}",
    "shared": f"embedded, from the policy's own layers {NUMERICS}",
    "beside": f"embedded, around the policy's own base {NUMERICS}",
    "colocate": "vLLM in the training process",
    "server": "vLLM server",
    "diffusion": f"embedded, by denoising {NUMERICS}",
    "shared_diffusion": f"embedded, by denoising with the policy's own layers {NUMERICS}",
}


def summary(args: QuantFields, adapted: bool, dtype: torch.dtype | None = None, on_cpu: bool | None = None) -> str:
    """
    Describes a run with these settings.

    Args:
        args ([`QuantFields`]): The run's settings.
        adapted (`bool`): Whether the policy has an adapter.
        dtype (`torch.dtype`, *optional*): Type in which the policy is loaded.
        on_cpu (`bool`, *optional*): Whether a CPU trains; by default whether `args` say so.

    Returns:
        `str`: One line.
    """
    parts = [f"Sampling: {_sampling(args)}", _correction(args)]
    if adapted:
        parts.append(_adapter(args))
    if args.train_precision is not None:
        parts.append(_training(args))
    if args.noise_schedule is not None:
        parts.append(f"noise {args.noise_schedule}, sigma {args.noise_sigma_start:g} to {args.noise_sigma_end:g}")
    if args.uaq_scale is not None:
        parts.append(f"UAQ, scale {args.uaq_scale:g}")
    if args.rollouts_in_flight > 1:
        parts.append(f"{args.rollouts_in_flight:g} times a generation's groups in flight")
    if args.dynamic_sampling_rounds:
        parts.append(f"dynamic sampling, at most {args.dynamic_sampling_rounds} further rounds")
    lacking = [] if on_cpu or (on_cpu is None and args.use_cpu) else lacks_for_speed(args, adapted, dtype)
    if lacking:
        parts.append(f"lacks for README's speed: {', '.join(lacking)}")
    return "; ".join(parts)


def lacks_for_speed(args: QuantFields, adapted: bool, dtype: torch.dtype | None) -> list[str]:
    """
    Returns what README's fastest step has and a run with these settings lacks; nothing for a run that no engine makes
    faster, which is one without vLLM. The arguments are those of [`summary`].
    """
    if args.rollout_precision is None or not args.use_vllm:
        return []
    lacking = []
    if dtype == torch.float32:
        lacking.append("policy in FP32 (`dtype`='bfloat16')")
    if not adapted:
        lacking.append("no LoRA")
    if args.train_precision is None:
        lacking.append("`train_precision` is not set")
    if args.max_completion_length is not None:
        tokens = args.per_device_train_batch_size * args.max_completion_length
        if tokens < MICRO_BATCH:
            lacking.append(
                f"micro-batches of at most {tokens} tokens (`per_device_train_batch_size`), not {MICRO_BATCH}"
            )
    return lacking


def title(precision: str) -> str:
    """Returns a precision's name in a heading: `fp8_block` is "FP8-block"."""
    format, _, scales = precision.partition("_")
    return f"{format.upper()}-{scales}" if scales else format.upper()


def _sampling(args) -> str:
    """Describes the sampler: its precision and its place."""
    engine = args.spec.source
    if args.rollout_precision is None:
        return f"not quantized, {'the policy itself' if engine is None else PLACES[engine]}, by TRL"
    place = PLACES[engine]
    if args.denoises and args.rollout_precision in with_products():
        place = place.replace(NUMERICS, MULTIPLIES)
    return f"{title(args.rollout_precision)}, {place}"


def _correction(args) -> str:
    """Describes the correction and its hyperparameters."""
    corrects = args.has_correction and not args.correction_class.applied_by_trl
    compares_sampler = getattr(args, "vllm_importance_sampling_correction", corrects)  # only GRPO's config has it
    if not args.spec.has_sampler or not compares_sampler or args.correction_class.ignores_sampler:
        return "no correction"
    correction = args.correction()  # `None` if TRL corrects for its own sampler
    parts = [f"correction {args.is_correction}"]
    for name, field in setting_fields(args.is_correction, type(args)).items():
        value = getattr(args, field) if correction is None else getattr(correction, name)
        if value is not None:
            parts.append(f"{name} {_short(value)}")
    return ", ".join(parts)


def _short(value) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _adapter(args) -> str:
    """Describes how the sampler holds the adapter."""
    if args.rollout_precision is None:
        return "LoRA merged" if args.use_vllm else "LoRA beside the base"
    is_held = args.spec.training.freezes_base and args.spec.samples_as_trained
    beside = args.lora_sync == "adapter" or is_held
    return "LoRA beside the base" if beside else "LoRA merged"


def _training(args) -> str:
    """Describes the precision that the policy is trained in."""
    training = args.spec.training
    if training.freezes_base:
        return f"training on a frozen {title(args.train_precision)} base"
    if training.is_qat:
        return f"training all weights in {title(args.train_precision)}"
    kernels = ", with the engine's own kernels" if args.exact_rollouts else ""
    return f"training in {title(args.train_precision)}{kernels}"
