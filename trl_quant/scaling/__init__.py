"""Update-aware quantization (UAQ, QuRL): one invariant scaling before training. Pure torch, or through llmcompressor.

[`UpdateAwareQuantizationModifier`] is imported on first use, because it needs llmcompressor; the rest does not.
"""

from .uaq import apply_uaq, scale_model, uaq_applied


__all__ = ["UpdateAwareQuantizationModifier", "apply_uaq", "scale_model", "uaq_applied"]


def __getattr__(name: str):
    if name == "UpdateAwareQuantizationModifier":
        from .modifier import UpdateAwareQuantizationModifier

        return UpdateAwareQuantizationModifier
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
