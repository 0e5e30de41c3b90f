r"""
A quantized linear layer, computed as an engine computes it.

    Y = Q(X) Q(W)^T + b

| symbol | here | shape |
|---|---|---|
| `Q(W)` | [`EngineWeight`], from [`engine_weight`] | (out, in) |
| `Q(X)` | quantized by [`quantized_linear`], with scales computed from X | (..., in) |
| `Y`, `b` | | (..., out), (out,) |

If scales are constant along the inner dimension (per channel, per token, per tensor), the codes are multiplied first,
and the product is scaled afterwards, as in the INT8 and FP8 kernels; BF16 holds every code exactly. Formats with groups
along the inner dimension are dequantized first. If only the weights are quantized, they are dequantized to the type of
the product, as Marlin does. If the inputs have groups too, both are dequantized to FP32, because the kernels accumulate
such groups in FP32.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..formats import FORMATS, QuantizedTensor, quantize, quantize_activation
from ..precisions import PRECISIONS
from .quantizers import quantize_input


class EngineWeight(NamedTuple):
    """
    A weight, ready for the product.

    Attributes:
        values (`torch.Tensor`):
            Codes or dequantized values (out, in), in the type of the product; (experts, out, in) for all experts.
        scale (`torch.Tensor` or `None`):
            FP32 scales (out,) or (1,) if `values` holds codes; (experts, out) or (experts, 1) for all experts.
    """

    values: Tensor
    scale: Tensor | None = None

    def rows(self, rows: slice) -> "EngineWeight":
        """Returns the weight of some of the outputs."""
        scale = self.scale
        return EngineWeight(self.values[rows], scale if scale is None or scale.numel() == 1 else scale[rows])

    def expert(self, expert: int | Tensor) -> "EngineWeight":
        """Returns the weight of one expert."""
        return EngineWeight(self.values[expert], None if self.scale is None else self.scale[expert])


def engine_weight(weight: Tensor, format: str | None, dtype: torch.dtype) -> tuple[EngineWeight, Tensor]:
    """
    Quantizes a weight for the product.

    Args:
        weight (`torch.Tensor`): (out, in), or (experts, out, in).
        format (`str` or `None`): Key of `FORMATS`; `None` rounds to BF16 and quantizes nothing.
        dtype (`torch.dtype`): The type of the product, unless the format needs FP32.

    Returns:
        `(EngineWeight, torch.Tensor)`: The weight, and its dequantized values, of the same shape.
    """
    if format is None:
        rounded = weight.to(torch.bfloat16)
        return EngineWeight(rounded.to(dtype)), rounded
    with torch.autocast(weight.device.type, enabled=False):  # CUDA's autocast would compute BF16 reciprocals in FP32
        return held_weight(quantize(weight, format), dtype)


def held_weight(q: QuantizedTensor, dtype: torch.dtype) -> tuple[EngineWeight, Tensor]:
    """As [`engine_weight`], for a weight that is quantized already."""
    kind, dequantized = FORMATS[q.format], q.dequantize()
    if kind.per_row:
        return EngineWeight(q.values.to(dtype), q.scale.flatten(q.values.ndim - 2).float()), dequantized
    if kind.activations is None:
        return EngineWeight(dequantized.to(dtype)), dequantized
    return EngineWeight(q.dequantize(torch.float32)), dequantized


def quantized_linear(
    x: Tensor,
    weight: EngineWeight,
    inputs: str | None,
    bias: Tensor | None = None,
    quantizer: Callable[[Tensor, str], QuantizedTensor] | None = None,
) -> Tensor:
    """
    Multiplies inputs (..., in) with a weight, and returns (..., out) in the type of `x`.

    Args:
        x (`torch.Tensor`): The inputs. Their scales are computed in their own type.
        weight ([`EngineWeight`]): The weight.
        inputs (`str` or `None`): Format of the inputs. With `None` or a weight-only format they are not quantized.
        bias (`torch.Tensor`, *optional*): (out,).
        quantizer (`Callable`, *optional*):
            Quantizes the inputs to that format; by default [`trl_quant.formats.quantize_activation`] does.
    """
    dtype, quantizer = weight.values.dtype, quantizer or partial(quantize_activation, check=False)
    with torch.autocast(x.device.type, enabled=False):
        activation = None if inputs is None else quantizer(x, inputs)
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


def embedded_linear(x: Tensor, weight: EngineWeight, format: str | None, bias: Tensor | None = None) -> Tensor:
    """
    As [`quantized_linear`], with inputs in the weight's own format. Under autocast an `x` in FP16 is first converted to
    autocast's type, because autocast in BF16 refuses to join tensors of FP16.
    """
    if x.dtype == torch.float16 and torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    return quantized_linear(x, weight, format, bias)


class EngineLinear(nn.Module):
    """
    A linear layer of the embedded engine.

    Parameters:
        linear (`nn.Linear`): The layer that it replaces, (out, in).
        precision (`str`): Key of `PRECISIONS`.
        dtype (`torch.dtype`): The type of the products.
    """

    def __init__(self, linear: nn.Linear, precision: str, dtype: torch.dtype):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.format, self.dtype = PRECISIONS[precision].format, dtype
        self.weight: EngineWeight | None = None
        self.bias = None if linear.bias is None else nn.Parameter(torch.empty_like(linear.bias), requires_grad=False)

    def load(self, weight: Tensor) -> Tensor:
        """Quantizes a new weight (out, in), and returns its dequantized values (out, in)."""
        self.weight, dequantized = engine_weight(weight, self.format, self.dtype)
        return dequantized

    def forward(self, x: Tensor) -> Tensor:
        """Maps (..., in) to (..., out); see [`embedded_linear`]."""
        return embedded_linear(x, self.weight, self.format, self.bias)


def vllm_linear(
    x: Tensor, weights: Sequence[Tensor], index: int, precision: str, bias: Tensor | None = None, wide: bool = False
) -> Tensor:
    """
    Computes one part of a fused layer as vLLM does: inputs and outputs in BF16, scales of inputs in FP32.

    Args:
        x (`torch.Tensor`): Inputs (..., in).
        weights (`Sequence[torch.Tensor]`): Weights (out, in) that are quantized together, in vLLM's order.
        index (`int`): Index of the weight to multiply with.
        precision (`str`): Key of `PRECISIONS`, one that vLLM runs.
        bias (`torch.Tensor`, *optional*): The bias of that weight, (out,).
        wide (`bool`, *optional*, defaults to `False`):
            Whether vLLM quantizes the weights itself. It then rounds them to BF16 first, and computes scales in FP32.

    Returns:
        `torch.Tensor`: (..., out) in BF16.
    """
    entry = PRECISIONS[precision]
    if wide:
        weights = [weight.to(torch.bfloat16).float() for weight in weights]
    whole, _ = engine_weight(torch.cat(weights) if len(weights) > 1 else weights[0], entry.format, torch.bfloat16)
    first = sum(len(weight) for weight in weights[:index])
    weight = whole.rows(slice(first, first + len(weights[index])))
    return _as_vllm(x, weight, precision, bias)


def held_vllm_linear(x: Tensor, q: QuantizedTensor, precision: str, bias: Tensor | None = None) -> Tensor:
    """As [`vllm_linear`], for a weight (out, in) in codes that vLLM multiplies unchanged."""
    return _as_vllm(x, held_weight(q, torch.bfloat16)[0], precision, bias)


def _as_vllm(x: Tensor, weight: EngineWeight, precision: str, bias: Tensor | None) -> Tensor:
    inputs = PRECISIONS[precision].vllm.inputs.get(x.device.type)
    flat = x.to(torch.bfloat16).reshape(-1, x.shape[-1])
    return quantized_linear(flat, weight, inputs, bias, quantize_input).view(*x.shape[:-1], -1)
