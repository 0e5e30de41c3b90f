"""Update-aware quantization (UAQ, QuRL): one invariant scaling before training. Pure torch, or through llmcompressor.

`UpdateAwareQuantizationModifier` is imported on first use, because it needs llmcompressor; the rest does not.
"""

from .uaq import apply_uaq, check_scale, scalings, uaq_applied


__all__ = ["apply_uaq", "check_scale", "scalings", "uaq_applied"]


def __getattr__(name: str):
    if name != "UpdateAwareQuantizationModifier":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from .modifier import UpdateAwareQuantizationModifier
    except ImportError as error:
        raise ImportError(f"{name} needs llmcompressor: install `trl_quant[compress]`, or use `apply_uaq`.") from error
    return UpdateAwareQuantizationModifier
