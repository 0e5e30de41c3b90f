"""Reads what a checkpoint's config says about its quantization."""

import torch

from ..formats import FORMATS
from ..precisions import PRECISIONS


def prepared_precisions(config) -> set[str] | None:
    """Returns the precisions that a quantized checkpoint with this config can have; `None` if it is not quantized."""
    quantization = getattr(config, "quantization_config", None)
    if quantization is None:
        return None
    quantization = quantization if isinstance(quantization, dict) else quantization.to_dict()
    if quantization.get("quant_method") == "bitsandbytes":  # only the trainer's base is quantized, not the checkpoint
        return None
    groups = [group["weights"] for group in (quantization.get("config_groups") or {}).values()]
    keys = ("num_bits", "type", "strategy", "group_size")
    fitting = set()
    for name, entry in PRECISIONS.items():
        scheme = None if entry.format is None else FORMATS[entry.format].scheme
        if not groups or not scheme:
            continue
        if all(group.get(key) == scheme.weights.get(key) for key in keys for group in groups):
            fitting.add(name)
    return fitting


def check_prepared(config, precision: str, field: str = "rollout_precision") -> bool:
    """
    Returns whether a config describes a quantized checkpoint.

    Args:
        config: A config of transformers.
        precision (`str`): The precision that the checkpoint must have, if it is quantized.
        field (`str`, *optional*, defaults to `"rollout_precision"`): The field that has this precision, for the error.

    Raises:
        `ValueError`: The checkpoint is quantized to another precision.
    """
    precisions = prepared_precisions(config)
    if precisions is not None and precision not in precisions:
        found = ", ".join(map(repr, sorted(precisions))) or "another format"
        raise ValueError(
            f"`{field}`={precision!r}, but the model is a checkpoint quantized to {found}. Use that precision, or the "
            "16-bit checkpoint."
        )
    return precisions is not None


def record_gathered_dtype(config, dtype: torch.dtype | None) -> None:
    """
    Records in a policy's config that training rounded weights to `dtype` before it quantized them, as FSDP2 does when
    it gathers, so that `trl-quant prepare` does the same. `None` removes the record.
    """
    if dtype is not None:
        config.qat_gathered_dtype = str(dtype).removeprefix("torch.")
    elif hasattr(config, "qat_gathered_dtype"):
        del config.qat_gathered_dtype


def gathered_dtype(config: dict) -> torch.dtype | None:
    """Returns the type that [`record_gathered_dtype`] wrote into a config.json, or `None`."""
    name = config.get("qat_gathered_dtype")
    return None if name is None else getattr(torch, name)


def brings_cache_scales(config) -> bool:
    """Whether a checkpoint with this config stores scales for a KV cache."""
    quantization = getattr(config, "quantization_config", None)
    if quantization is None:
        return False
    quantization = quantization if isinstance(quantization, dict) else quantization.to_dict()
    return quantization.get("kv_cache_scheme") is not None
