r"""
What an engine computes in a quantized linear layer.

    Y = Q(X) Q(W)^T + b

| symbol | here | shape |
|---|---|---|
| `Q(W)` | [`EngineWeight`], from [`engine_weight`] | (out, in) |
| `Q(X)` | quantized by [`quantized_linear`], scales computed from it | (..., in) |
| `Y`, `b` | | (..., out), (out,) |

Where scales are constant along the inner dimension (per channel, per token, per tensor) the product is taken over the
codes and scaled afterwards, as the INT8 and FP8 kernels do: every code is exact in BF16. Formats with groups along the
inner dimension are dequantized first: to the type of the product where only the weights are quantized (as Marlin does),
to FP32 where the inputs have groups too, whose kernels accumulate the groups in FP32.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..formats import FORMATS, quantize, quantize_activation
from ..precisions import PRECISIONS


class EngineWeight(NamedTuple):
    """
    A weight as the product takes it.

    Attributes:
        values (`torch.Tensor`): Codes or dequantized numbers (out, in), of the type that the product is computed in.
        scale (`torch.Tensor` or `None`): FP32 scales (out,) or (1,) where `values` holds codes.
    """

    values: Tensor
    scale: Tensor | None = None

    def rows(self, rows: slice) -> "EngineWeight":
        """Some of the outputs."""
        scale = self.scale
        return EngineWeight(self.values[rows], scale if scale is None or scale.numel() == 1 else scale[rows])


def engine_weight(weight: Tensor, format: str | None, dtype: torch.dtype) -> tuple[EngineWeight, Tensor]:
    """
    Quantizes a weight for the product.

    Args:
        weight (`torch.Tensor`): (out, in).
        format (`str` or `None`): Key of `FORMATS`; `None` rounds to BF16 and quantizes nothing.
        dtype (`torch.dtype`): The type that products are computed in, where the format does not ask for FP32.

    Returns:
        `(EngineWeight, torch.Tensor)`: the weight, and the numbers (out, in) that it stands for.
    """
    if format is None:
        numbers = weight.to(torch.bfloat16)
        return EngineWeight(numbers.to(dtype)), numbers
    kind = FORMATS[format]
    with torch.autocast(weight.device.type, enabled=False):  # on CUDA it computes BF16 reciprocals in FP32
        quantized = quantize(weight, format)
        numbers = quantized.dequantize()
    if kind.per_row:
        return EngineWeight(quantized.values.to(dtype), quantized.scale.flatten().float()), numbers
    return EngineWeight(numbers.to(dtype if kind.activations is None else torch.float32)), numbers


def quantized_linear(x: Tensor, weight: EngineWeight, inputs: str | None, bias: Tensor | None = None) -> Tensor:
    """
    The product, (..., in) to (..., out), of the type of `x`.

    Args:
        x (`torch.Tensor`): Inputs; their scales are computed in their own type.
        weight ([`EngineWeight`]): The weight.
        inputs (`str` or `None`): Format that the inputs are quantized to; `None`, or one for weights alone: none.
        bias (`torch.Tensor`, *optional*): (out,).
    """
    dtype = weight.values.dtype
    with torch.autocast(x.device.type, enabled=False):
        activation = None if inputs is None else quantize_activation(x, inputs, check=False)
        if activation is None:
            y = F.linear(x.to(dtype), weight.values)
        elif weight.scale is None:
            y = F.linear(activation.dequantize(dtype), weight.values)
        else:
            y = F.linear(activation.values.to(dtype), weight.values).float() * activation.scale.float()
        if weight.scale is not None:
            y = y.float() * weight.scale
        if bias is not None:
            y = y + bias
    return y.to(x.dtype)


class QuantizedLinear(nn.Module):
    """
    A linear layer of the embedded engine.

    Parameters:
        linear (`nn.Linear`): The layer to stand in for, (out, in).
        precision (`str`): Key of `PRECISIONS`.
        dtype (`torch.dtype`): The type that products are computed in.
    """

    def __init__(self, linear: nn.Linear, precision: str, dtype: torch.dtype):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.format, self.dtype = PRECISIONS[precision].format, dtype
        self.weight: EngineWeight | None = None
        self.bias = None if linear.bias is None else nn.Parameter(torch.empty_like(linear.bias), requires_grad=False)

    def load(self, weight: Tensor) -> Tensor:
        """Takes a new weight (out, in) and returns what it is after quantization, (out, in)."""
        self.weight, numbers = engine_weight(weight, self.format, self.dtype)
        return numbers

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) to (..., out), of the type of `x`."""
        return quantized_linear(x, self.weight, self.format, self.bias)


def vllm_linear(
    x: Tensor, weights: Sequence[Tensor], part: int, precision: str, bias: Tensor | None = None, wide: bool = False
) -> Tensor:
    """
    One part of a layer as vLLM computes it: inputs and outputs in BF16, scales of inputs in FP32.

    Args:
        x (`torch.Tensor`): Inputs (..., in).
        weights (`Sequence[torch.Tensor]`): Weights (out, in) that are quantized together, in vLLM's order.
        part (`int`): Which of them to multiply with.
        precision (`str`): Key of `PRECISIONS`, one that vLLM runs.
        bias (`torch.Tensor`, *optional*): Of that part, (out,).
        wide (`bool`, *optional*, defaults to `False`):
            Whether vLLM quantizes the weights itself: it rounds them to BF16 first, and computes their scales in FP32.

    Returns:
        `torch.Tensor`: (..., out) in BF16.
    """
    entry = PRECISIONS[precision]
    if wide:
        weights = [weight.to(torch.bfloat16).float() for weight in weights]
    whole, _ = engine_weight(torch.cat(weights) if len(weights) > 1 else weights[0], entry.format, torch.bfloat16)
    first = sum(len(weight) for weight in weights[:part])
    weight = whole.rows(slice(first, first + len(weights[part])))
    x = x.to(torch.bfloat16).float()
    return quantized_linear(x, weight, entry.vllm.inputs.get(x.device.type), bias).to(torch.bfloat16)
