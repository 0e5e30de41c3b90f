"""
What [`joint`] computes with under torch.compile: the products as operators, so that the compiler can put a whole
decoder layer into one graph. The functions of [`eager`] have the same names and arguments; a [`Weight`] stands for the
codes.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..formats import FORMATS, QuantizedTensor
from ..formats.fp8 import BLOCK
from . import products, quantizers
from .operators import UNSAFE, codes_of, operator, shapes_of
from .products import joint_bias


__all__ = ["joint_bias"]


# Operators. Each finds the layer by its number, see [`operators`]


@operator("quantize_input", UNSAFE)
def _quantize(x: Tensor, format: str, both: bool) -> list[Tensor]:
    """
    Quantizes inputs (T, in). Returns codes and scales for the forward pass and, if `both` passes need the input in
    groups, those of its transpose for the backward pass.
    """
    x = x.contiguous()
    found = quantizers.quantize_for_both(x) if both else [quantizers.quantize_input(x, format)]
    return [tensor.contiguous() for q in found for tensor in (q.values, q.scale)]


@shapes_of(_quantize)
def _(x, format, both):
    tokens, features = x.shape
    rule = FORMATS[format]
    code = torch.int8 if rule.integers else torch.float8_e4m3fn
    if not rule.grouped:
        scale = x.new_empty((tokens, 1) if rule.per_row else (1,), dtype=torch.float32)
        return [x.new_empty(tokens, features, dtype=code), scale]
    filled = -(-tokens // BLOCK) * BLOCK
    shapes = [(tokens, features), (features, filled)] if both else [(tokens, features)]
    made = []
    for rows, columns in shapes:
        made.append(x.new_empty(rows, columns, dtype=code))
        made.append(x.new_empty(rows, -(-columns // BLOCK), dtype=torch.float32))
    return made


@operator("product", UNSAFE)
def _product(
    values: Tensor, scale: Tensor, number: Tensor, joint: bool, bias: Tensor | None, outputs: int, dtype: torch.dtype
) -> Tensor:
    """Computes [`products.product`] of the codes (T, in) of inputs: (T, out)."""
    w = codes_of(number, joint)
    x = QuantizedTensor(w.format, values, scale, values.shape, dtype)
    return products.product(x, w, bias, dtype).contiguous()


@shapes_of(_product)
def _(values, scale, number, joint, bias, outputs, dtype):
    return values.new_empty(values.shape[0], outputs, dtype=dtype)


@operator("input_gradient", UNSAFE)
def _input_gradient(dy: Tensor, number: Tensor, joint: bool, inputs: int) -> Tensor:
    """Computes [`products.input_gradient`] of dY (T, out): (T, in)."""
    return products.input_gradient(dy.contiguous(), codes_of(number, joint)).contiguous()


@shapes_of(_input_gradient)
def _(dy, number, joint, inputs):
    return dy.new_empty(dy.shape[0], inputs)


@operator("input_and_weight_gradient", UNSAFE)
def _both_gradients(dy: Tensor, number: Tensor, joint: bool, values: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Computes [`products.input_and_weight_gradient`] of dY (T, out) and codes (in, T'): dX (T, in), dW (out, in)."""
    w = codes_of(number, joint)
    x = QuantizedTensor(w.format, values, scale, values.shape, dy.dtype)
    dx, dw = products.input_and_weight_gradient(dy.contiguous(), w, x)
    return dx.contiguous(), dw.contiguous()


@shapes_of(_both_gradients)
def _(dy, number, joint, values, scale):
    features = values.shape[0]
    return dy.new_empty(dy.shape[0], features), dy.new_empty(dy.shape[1], features)


@operator("dequantize", UNSAFE)
def _dequantize(values: Tensor, scale: Tensor, format: str, dtype: torch.dtype) -> Tensor:
    """Computes [`products.dequantize`] of codes (T, in)."""
    return products.dequantize(QuantizedTensor(format, values, scale, values.shape, dtype), dtype).contiguous()


@shapes_of(_dequantize)
def _(values, scale, format, dtype):
    return torch.empty_like(values, dtype=dtype)


# What `joint` calls


class Weight(NamedTuple):
    """
    The weight of layers whose codes an operator asks for.

    Attributes:
        number (`torch.Tensor`): The number of one of the layers.
        joint (`bool`): Whether the weight is that of all layers that share their input.
        format (`str`): Key of `FORMATS`.
        shape (`tuple[int, int]`): (sum of out, in).
    """

    number: Tensor
    joint: bool
    format: str
    shape: tuple[int, int]


def quantized(x: Tensor, dtype: torch.dtype, format: str, both: bool) -> tuple[QuantizedTensor, QuantizedTensor]:
    """Computes [`inputs.quantized`]."""
    codes = _quantize(x.reshape(-1, x.shape[-1]).to(dtype), format, both and FORMATS[format].grouped)
    pairs = zip(codes[::2], codes[1::2], strict=True)
    found = [QuantizedTensor(format, values, scale, values.shape, dtype) for values, scale in pairs]
    return found[0], found[-1]


def product(q: QuantizedTensor, w: Weight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Computes [`products.product`]."""
    return _product(q.values, q.scale, w.number, w.joint, bias, w.shape[0], dtype)


def input_gradient(dy: Tensor, w: Weight) -> Tensor:
    """Computes [`products.input_gradient`]."""
    return _input_gradient(dy, w.number, w.joint, w.shape[1])


def input_and_weight_gradient(dy: Tensor, w: Weight, x: QuantizedTensor) -> tuple[Tensor, Tensor]:
    """Computes [`products.input_and_weight_gradient`]."""
    return _both_gradients(dy, w.number, w.joint, x.values, x.scale)


def dequantize(q: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """Computes [`products.dequantize`]."""
    return _dequantize(q.values, q.scale, q.format, dtype)


def add_product(y: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Returns `y + a b`. The compiler would copy a view that is written to."""
    return torch.addmm(y, a, b)


def side_by_side(matrices: Sequence[Tensor]) -> Tensor:
    """Concatenates matrices (T, n_i) to (T, sum of n_i)."""
    return matrices[0] if len(matrices) == 1 else torch.cat(matrices, 1)
