r"""
Layers with a weight in codes and inputs in 16 bits: weight-only quantization. The weight is frozen (QeRL,
arXiv:2510.11696, section 3.1; QLoRA, arXiv:2305.14314), with or without a LoRA adapter (arXiv:2106.09685, section 4.1),
or is trained with the straight-through estimator (arXiv:1308.3432, section 3), as if Q were the identity.

    H  = X A^T                                   with an adapter
    Y  = X Q(W)^T + b + s H B^T
    dX = dY Q(W) + s (dY B) A
    dW = dY^T X                                  of a trained weight
    dA = s (dY B)^T X
    dB = s dY^T H

| symbol | here | shape |
|---|---|---|
| `Q(W)` | codes and scales, as a checkpoint stores them | (out, in) |
| `W`, `dW` | the master weight, whose codes are quantized again after each write | (out, in) |
| `X`, `dX` | | (..., in) |
| `Y`, `dY` | | (..., out) |
| `b` | | (out,) |
| `H`, `A`, `B` | the adapter | (tokens, rank), (rank, in), (out, rank) |
| `s` | alpha / rank, in rsLoRA alpha / sqrt(rank) | |

The products with Q(W) are computed from codes and scales, so the backward pass saves no other weight. On a GPU, few
tokens are multiplied by a kernel that decodes the weight while it reads it. For many tokens, the weight is decoded into
a buffer, part by part, and cuBLAS multiplies the parts; the multiplication then takes most of the time.

A weight that is shared with a vLLM engine in the same process is in the layout of vLLM's kernels; see [`marlin`].

All products are computed in the type of X, or in autocast's, whatever the type of A and B. PEFT's layer does the same
under autocast; without it, PEFT computes the branch in the type of A. The matrix multiplication itself (`addmm`) scales
the branch and adds it to Y and to dX, so that neither is read or written once more. Gradients of W, A and B are summed
over the tokens in FP32, rounded to the type of X, then converted to the type of the parameter.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ..formats import QuantizedTensor
from ..formats.nf4 import BLOCK as NF4_BLOCK
from . import marlin
from .inputs import autocast_dtype
from .operand import Operand
from .operators import UNSAFE, codes_of, operator, shapes_of


# Bounds within which the kernel that decodes while it reads is faster, on an H200 (`benchmarks/linear.py`)
FUSED_TOKENS = 64  # at most
FUSED_OUTPUTS = 16384  # at least: fewer do not fill the card
BUFFER_BYTES = 144 << 20  # for the dequantized part of a weight; the largest layers of 7B and 14B fit whole in 16 bits
ALIGNMENT = 128  # weights are cut at multiples of it, which are whole groups in every format


def as_arguments(q: QuantizedTensor) -> tuple:
    """Returns a quantized weight as [`weight_only_product`] takes it: codes, scales and global scale, then the rest."""
    return q.values, q.scale, q.global_scale, q.format, *q.shape, q.dtype, None


def _quantized(values, scale, global_scale, format, rows, cols, dtype) -> QuantizedTensor:
    return QuantizedTensor(format, values.view(torch.uint8), scale, torch.Size((rows, cols)), dtype, global_scale)


def _in_rows(q: QuantizedTensor) -> QuantizedTensor | None:
    """Returns the weight with one row of codes and scales per output; `None` if NF4's blocks cross rows."""
    if q.values.ndim == 2:
        return q
    if q.shape[1] % NF4_BLOCK:
        return None
    return replace(q, values=q.values.view(q.shape[0], -1), scale=q.scale.view(q.shape[0], -1))


def _part_length(across: int, itemsize: int) -> int:
    """
    Returns the length, a multiple of `ALIGNMENT`, of the parts of a matrix that fill `BUFFER_BYTES`. `across` is the
    size of the other dimension.
    """
    return max(BUFFER_BYTES // (across * itemsize) // ALIGNMENT, 1) * ALIGNMENT


def _parts(q: QuantizedTensor, dim: int, itemsize: int) -> Iterator[tuple[slice, QuantizedTensor]]:
    """Cuts a weight along `dim` into parts of at most `BUFFER_BYTES` when dequantized; yields place and part."""
    length, across = q.shape[dim], q.shape[1 - dim]
    size = _part_length(across, itemsize)
    width = q.values.shape[1] // q.scale.shape[1]  # bytes of a group
    for start in range(0, length, size):
        place = slice(start, min(start + size, length))
        shape = torch.Size((place.stop - start, across) if dim == 0 else (across, place.stop - start))
        if dim == 0:
            values, scale = q.values[place], q.scale[place]
        else:
            groups = slice(start // (2 * width), -(-place.stop // (2 * width)))
            values, scale = q.values[:, groups.start * width : groups.stop * width], q.scale[:, groups]
        yield place, replace(q, values=values, scale=scale, shape=shape)


def decoded(q: QuantizedTensor, dtype: torch.dtype | None = None) -> Tensor:
    """Computes `q.dequantize(dtype)`, with a kernel if there is one."""
    q = _in_rows(q) or q
    if q.values.is_cuda and q.values.ndim == 2:
        from ..kernels import dequantize as kernels

        return kernels.dequantize(q, dtype)
    return q.dequantize(dtype)


def _add_product(bias: Tensor, x: Tensor, weight: Tensor, y: Tensor, factor: float = 1.0) -> None:
    """
    Writes `bias + factor x weight` into `y`, rounded once.

    cuBLAS adds the bias before it rounds only if `y` is contiguous. If `y` is some columns of a larger matrix,
    `torch.addmm` writes the rounded product, adds the bias and rounds again, which makes the error 1.4 times as large.
    """
    if y.is_contiguous():
        torch.addmm(bias, x, weight, alpha=factor, out=y)
    else:
        y.copy_(torch.addmm(bias, x, weight, alpha=factor))


def _multiply(x: Tensor, q: QuantizedTensor, bias: Tensor | None, forward: bool, y: Tensor) -> None:
    """Writes `x Q(W)^T + bias` into `y` if `forward`, else `x Q(W)`, for matrices."""
    weight = _in_rows(q)
    if weight is None:
        parts = [(slice(None), q)]
    else:
        if x.is_cuda and len(x) <= FUSED_TOKENS and y.shape[1] >= FUSED_OUTPUTS:
            from ..kernels import dequantize as kernels

            if x.dtype in kernels.INPUTS:
                return kernels.matmul(x, weight, bias, forward, out=y)
        # Each part computes whole outputs, so that rounded sums are never added
        parts = _parts(weight, 0 if forward else 1, x.itemsize)
    for place, part in parts:
        dequantized = decoded(part).to(x.dtype)  # Y (T, out) = X (T, in) @ Q(W)^T (in, out) + b (out,)
        if not forward:  # dX (T, in) = dY (T, out) @ Q(W) (out, in)
            torch.mm(x, dequantized, out=y[:, place])
        elif bias is None:
            torch.mm(x, dequantized.t(), out=y[:, place])
        else:
            _add_product(bias[place], x, dequantized.t(), y[:, place])
        del dequantized  # frees its memory before the next part


def _multiply_tiles(
    x: Tensor, values: Tensor, scale: Tensor, factor: float, bias: Tensor | None, forward: bool, y: Tensor
) -> None:
    """As [`_multiply`], for a weight in Marlin's layout, whose values are `factor` times code times scale."""
    inputs, outputs = marlin.TILE_IN * len(values), scale.shape[1]
    length, across = (outputs, inputs) if forward else (inputs, outputs)
    size = _part_length(across, x.itemsize)
    for start in range(0, length, size):
        end = min(start + size, length)
        if forward:
            dequantized = marlin.dequantized(values[:, 2 * start : 2 * end], scale[:, start:end], x.dtype)
        else:
            groups = slice(start * len(scale) // inputs, end * len(scale) // inputs)
            dequantized = marlin.dequantized(
                values[start // marlin.TILE_IN : end // marlin.TILE_IN], scale[groups], x.dtype
            ).t()
        part = y[:, start:end]
        if bias is None:
            part.addmm_(x, dequantized, beta=0, alpha=factor)
        else:
            _add_product(bias[start:end], x, dequantized, part, factor)
        del dequantized  # frees its memory before the next part


def _product(
    x: Tensor,
    bias: Tensor | None,
    values: Tensor,
    scale: Tensor,
    global_scale: Tensor | None,
    format: str,
    rows: int,
    cols: int,
    dtype: torch.dtype,
    factor: float | None,
    forward: bool,
) -> Tensor:
    """
    Computes `x Q(W)^T + bias` if `forward`, else `x Q(W)`, without a gradient of its own.

    Args:
        x (`torch.Tensor`): (..., cols), or (..., rows) if not `forward`.
        bias (`torch.Tensor` or `None`): (rows,), of the type of `x`.
        values, scale, global_scale, format, rows, cols, dtype, factor: From [`as_arguments`] or
            [`~layers.FrozenLinear.stored`].
        forward (`bool`): Whether to multiply with the weight's transpose.

    Returns:
        `torch.Tensor`: (..., rows), or (..., cols) if not `forward`, in the type of `x`. The weight's values are
        rounded to `dtype`, then to the type of `x`. In Marlin's layout they are not rounded to `dtype`.
    """
    y = x.new_empty(*x.shape[:-1], rows if forward else cols)
    flat, out = x.reshape(-1, x.shape[-1]), y.view(-1, y.shape[-1])
    if factor is not None:
        _multiply_tiles(flat, values, scale, factor, bias, forward, out)
    else:
        _multiply(flat, _quantized(values, scale, global_scale, format, rows, cols, dtype), bias, forward, out)
    return y


_operator = operator("weight_only_product")(_product)


@shapes_of(_operator)
def _(x, bias, values, scale, global_scale, format, rows, cols, dtype, factor, forward):
    return x.new_empty(*x.shape[:-1], rows if forward else cols)


def weight_only_product(*args) -> Tensor:
    """
    Computes [`_product`]. Under torch.compile it is an opaque operator: otherwise the compiler would see that both
    passes dequantize the same weight, and would keep the values between them. Without torch.compile it is the plain
    function, because the call of an operator would cost the host more time than everything else.
    """
    return (_operator if torch.compiler.is_compiling() else _product)(*args)


@operator("product_by_number", UNSAFE)
def _product_by_number(x: Tensor, number: Tensor, bias: Tensor | None, features: int, forward: bool) -> Tensor:
    """Computes [`weight_only_product`] with the codes of the layer with this number: (..., features)."""
    return weight_only_product(x, bias, *as_arguments(codes_of(number)), forward)


@shapes_of(_product_by_number)
def _(x, number, bias, features, forward):
    return x.new_empty(*x.shape[:-1], features)


# Layers


def _product_with(
    x: Tensor,
    bias: Tensor | None,
    codes: Callable[[], QuantizedTensor] | None,
    shape: tuple[int, int],
    number: Tensor | None,
    stored: tuple,
    forward: bool,
) -> Tensor:
    """Computes [`weight_only_product`] with the codes that a layer returns now or, if `None`, with what it stores."""
    if codes is None:
        return weight_only_product(x, bias, *stored, forward)
    if number is not None:
        return _product_by_number(x, number, bias, shape[0 if forward else 1], forward)
    return weight_only_product(x, bias, *as_arguments(codes()), forward)


class _WeightOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bias, weight, a, b, scaling, codes, shape, number, *stored):
        ctx.scaling, ctx.codes, ctx.shape, ctx.constants = scaling, codes, shape, stored[3:]
        ctx.weight_dtype = None if weight is None else weight.dtype
        wants_weight, wants_a, wants_b = ctx.needs_input_grad[2:5]
        flat, h = x.reshape(-1, x.shape[-1]), None
        with torch.autocast(x.device.type, enabled=False):
            if a is not None:
                h = flat @ a.to(x.dtype).t()  # H (T, rank) = X (T, in) @ A^T (in, rank)
            y = _product_with(x, bias, codes, shape, number, stored, True)  # Y (T, out)
            if a is not None:  # Y (T, out) += s H (T, rank) @ B^T (rank, out)
                y.view(-1, y.shape[-1]).addmm_(h, b.to(x.dtype).t(), alpha=scaling)
        kept = flat if wants_weight or wants_a else None, h if wants_b else None
        ctx.save_for_backward(*kept, a, b, number, *stored[:3])
        return y

    @staticmethod
    def backward(ctx, dy):
        x, h, a, b, number, *tensors = ctx.saved_tensors  # activation checkpointing lets them be read once
        stored, scaling, flat = (*tensors, *ctx.constants), ctx.scaling, dy.reshape(-1, dy.shape[-1])
        wants_x, wants_bias, wants_weight, wants_a, wants_b = ctx.needs_input_grad[:5]
        dx = dbias = dw = da = db = None
        with torch.autocast(dy.device.type, enabled=False):
            if a is not None and (wants_x or wants_a):
                dh = flat @ b.to(dy.dtype)  # dH (T, rank) = dY (T, out) @ B (out, rank), and the factor s below
            if wants_x:
                dx = _product_with(dy, None, ctx.codes, ctx.shape, number, stored, False)  # dX (T, in)
                if a is not None:  # dX (T, in) += s dH (T, rank) @ A (rank, in)
                    dx.view(-1, dx.shape[-1]).addmm_(dh, a.to(dy.dtype), alpha=scaling)
            if wants_bias:
                dbias = flat.sum(0)
            if wants_weight:
                dw = (flat.t() @ x).to(ctx.weight_dtype)  # dW (out, in) = dY^T (out, T) @ X (T, in)
            if wants_a:
                da = (dh.t() @ x).to(a.dtype).mul_(scaling)  # dA (rank, in) = s dH^T (rank, T) @ X (T, in)
            if wants_b:
                db = (flat.t() @ h).to(b.dtype).mul_(scaling)  # dB (out, rank) = s dY^T (out, T) @ H (T, rank)
        return dx, dbias, dw, da, db, *[None] * (4 + len(stored))


def output(x: Tensor, operand: Operand, number: Tensor) -> Tensor:
    """
    Computes the output of a layer whose inputs stay in 16 bits.

    Args:
        x (`torch.Tensor`): (..., in).
        operand ([`~operand.Operand`]): The layer. Its adapter is not merged.
        number (`torch.Tensor`): The number of the layer that returned the operand.

    Returns:
        `torch.Tensor`: (..., out), in the type of `x` or autocast's.

    Raises:
        ValueError: `x` has another number of features.
    """
    layer = operand.layer
    x = x.to(autocast_dtype(x, layer.in_features))
    bias = None if layer.bias is None else layer.bias.to(x.dtype)
    weight, shape = (operand.weight, operand.a, operand.b, operand.scaling), (layer.out_features, layer.in_features)
    if operand.stored is not None:
        return _WeightOnly.apply(x, bias, *weight, None, shape, None, *operand.stored)
    return _WeightOnly.apply(x, bias, *weight, operand.codes, shape, number if torch.compiler.is_compiling() else None)
