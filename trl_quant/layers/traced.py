r"""
Layers under torch.compile. The products of [`joint`] become operators, so that the compiler can put a whole
decoder layer into one graph:

    Y  = Q(X) Q(W)^T + b
    dX = dY Q(W)
    dW = dY^T Q(X)

and with an adapter as in [`joint`].

As without the compiler, the first of the layers that share an input computes the outputs of all. They wait for the
other layers in an attribute of the input: the compiler allows no writes to other objects under gradient checkpointing.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..formats import FORMATS, QuantizedTensor
from ..formats.fp8 import BLOCK
from .inputs import autocast_dtype
from .operand import Operand
from .operators import UNSAFE, codes_of, operator, shapes_of
from .products import (
    dequantize,
    input_and_weight_gradient,
    input_gradient,
    joint_bias,
    product,
    quantize_for_both,
    quantize_input,
)


# Operators. Each finds the layer by its number, see [`operators`]


@operator("quantize_input", UNSAFE)
def _quantize(x: Tensor, format: str, both: bool) -> list[Tensor]:
    """
    Quantizes inputs (T, in). Returns codes and scales for the forward pass and, if `both` passes need the input in
    groups, those of its transpose for the backward pass.
    """
    x = x.contiguous()
    found = quantize_for_both(x) if both else [quantize_input(x, format)]
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
    return product(x, w, bias, dtype).contiguous()


@shapes_of(_product)
def _(values, scale, number, joint, bias, outputs, dtype):
    return values.new_empty(values.shape[0], outputs, dtype=dtype)


@operator("input_gradient", UNSAFE)
def _input_gradient(dy: Tensor, number: Tensor, joint: bool, inputs: int) -> Tensor:
    """Computes [`products.input_gradient`] of dY (T, out): (T, in)."""
    return input_gradient(dy.contiguous(), codes_of(number, joint)).contiguous()


@shapes_of(_input_gradient)
def _(dy, number, joint, inputs):
    return dy.new_empty(dy.shape[0], inputs)


@operator("input_and_weight_gradient", UNSAFE)
def _both_gradients(dy: Tensor, number: Tensor, joint: bool, values: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Computes [`products.input_and_weight_gradient`] of dY (T, out) and codes (in, T'): dX (T, in), dW (out, in)."""
    w = codes_of(number, joint)
    x = QuantizedTensor(w.format, values, scale, values.shape, dy.dtype)
    dx, dw = input_and_weight_gradient(dy.contiguous(), w, x)
    return dx.contiguous(), dw.contiguous()


@shapes_of(_both_gradients)
def _(dy, number, joint, values, scale):
    features = values.shape[0]
    return dy.new_empty(dy.shape[0], features), dy.new_empty(dy.shape[1], features)


@operator("dequantize", UNSAFE)
def _dequantize(values: Tensor, scale: Tensor, format: str, dtype: torch.dtype) -> Tensor:
    """Computes [`products.dequantize`] of codes (T, in)."""
    return dequantize(QuantizedTensor(format, values, scale, values.shape, dtype), dtype).contiguous()


@shapes_of(_dequantize)
def _(values, scale, format, dtype):
    return torch.empty_like(values, dtype=dtype)


# Layers


class _Traced(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, number, format, dtype, sizes, scalings, merged, *tensors):
        weights, biases, a, b = (tensors[i::4] for i in range(4))
        ctx.shape, ctx.format, ctx.sizes, ctx.scalings, ctx.merged = x.shape, format, sizes, scalings, merged
        wants_weights, grouped, joint = ctx.needs_input_grad[7::4], FORMATS[format].grouped, len(sizes) > 1
        trains = any(wants and weight is not None for wants, weight in zip(wants_weights, weights, strict=True))
        ctx.adapted = [i for i, matrix in enumerate(a) if matrix is not None]
        flat = x.reshape(-1, x.shape[-1]).to(dtype)
        values, scale, *columns = _quantize(flat, format, grouped and trains)
        y = _product(values, scale, number, joint, joint_bias(biases, sizes), sum(sizes), dtype)
        ys, kept = list(y.split(sizes, 1)), columns if columns else [values, scale]
        if ctx.adapted and not merged:
            kept = [flat, flat @ _scaled(a, scalings, dtype).t()]
            ranks = [len(a[i]) for i in ctx.adapted]
            for i, h in zip(ctx.adapted, kept[1].split(ranks, 1), strict=True):
                ys[i] = torch.addmm(ys[i], h, b[i].to(dtype).t())
        ctx.save_for_backward(*(kept if trains or ctx.adapted else (None, None)), number, *a, *b)
        ctx.weight_dtypes = [None if weight is None else weight.dtype for weight in weights]
        # As in `joint`: a small column would keep the memory of the others
        ys = (column if 2 * column.shape[1] >= y.shape[1] else column.contiguous() for column in ys)
        return tuple(column.view(*x.shape[:-1], column.shape[1]) for column in ys)

    @staticmethod
    def backward(ctx, *dys):
        first, second, number, *adapters = ctx.saved_tensors
        a, b = adapters[: len(dys)], adapters[len(dys) :]
        wants_x, wants = ctx.needs_input_grad[0], ctx.needs_input_grad[7:]
        dys = [dy.reshape(-1, size) for dy, size in zip(dys, ctx.sizes, strict=True)]
        dy, joint, grouped = dys[0] if len(dys) == 1 else torch.cat(dys, 1), len(dys) > 1, FORMATS[ctx.format].grouped
        dx = dw = None
        if grouped and any(wants[::4]):
            dx, dw = _both_gradients(dy, number, joint, first, second)
        elif wants_x:
            dx = _input_gradient(dy, number, joint, ctx.shape[-1])
        if any(wants[::4]):
            dw = dy.t() @ _dequantize(first, second, ctx.format, dy.dtype) if dw is None else dw
            dw = dw.split(ctx.sizes)
        adapter_gradients = {}
        if ctx.adapted:
            scaled = _scaled(a, ctx.scalings, dy.dtype)
            x = _dequantize(first, second, ctx.format, dy.dtype) if ctx.merged else first
            h = x @ scaled.t() if ctx.merged else second
            dhs = [dys[i] @ b[i].to(dy.dtype) for i in ctx.adapted]
            dh = dhs[0] if len(dhs) == 1 else torch.cat(dhs, 1)
            ranks = [len(a[i]) for i in ctx.adapted]
            for i, da, h_i in zip(ctx.adapted, (dh.t() @ x).split(ranks), h.split(ranks, 1), strict=True):
                adapter_gradients[i] = (da.float() * ctx.scalings[i]).to(a[i].dtype), (dys[i].t() @ h_i).to(b[i].dtype)
            if dx is not None and not ctx.merged:
                dx = torch.addmm(dx, dh, scaled)
        gradients = [dx.view(ctx.shape) if wants_x else None, *[None] * 6]
        for i, column in enumerate(dys):
            wants_weight, wants_bias, wants_a, wants_b = wants[4 * i : 4 * i + 4]
            da, db = adapter_gradients.get(i, (None, None))
            gradients += (
                dw[i].to(ctx.weight_dtypes[i]) if wants_weight else None,
                column.sum(0) if wants_bias else None,
                da if wants_a else None,
                db if wants_b else None,
            )
        return tuple(gradients)


WAITING = "_waiting_outputs"  # attribute of an input: the outputs whose layers have not been called yet


def _scaled(a: Sequence[Tensor | None], scalings: Sequence[float], dtype: torch.dtype) -> Tensor:
    """Returns, in `dtype`, the concatenated s A of all adapters: (sum of ranks, in)."""
    scaled = [(matrix * s).to(matrix.dtype) for matrix, s in zip(a, scalings, strict=True) if matrix is not None]
    return (scaled[0] if len(scaled) == 1 else torch.cat(scaled)).to(dtype)


def _outputs(x: Tensor, operands: Sequence[Operand], number: Tensor) -> tuple[Tensor, ...]:
    """Computes what [`joint.compute`] does, with operators. `number` is of the layer of one of the operands."""
    first = operands[0].layer
    dtype, tensors = autocast_dtype(x, first.in_features), []
    for operand in operands:
        bias = operand.layer.bias
        tensors += operand.weight, None if bias is None else bias.to(dtype), operand.a, operand.b
    sizes, scalings = [operand.layer.out_features for operand in operands], [operand.scaling for operand in operands]
    merged = all(operand.merged for operand in operands)
    return _Traced.apply(x, number, first.format, dtype, sizes, scalings, merged, *tensors)


def traced(x: Tensor, operand: Operand, number: Tensor) -> Tensor:
    """
    Computes the output of one layer with operators, together with the layers that share its input.

    Args:
        x (`torch.Tensor`): (..., in).
        operand ([`~operand.Operand`]): The layer.
        number (`torch.Tensor`): The number of the layer that returned the operand.

    Returns:
        `torch.Tensor`: (..., out), in the type of `x` or autocast's.

    Raises:
        ValueError: `x` has another number of features.
    """
    joint = operand.layer.joint
    if joint is None:
        return _outputs(x, [operand], number)[0]
    waiting = getattr(x, WAITING, [])
    if all(layer is not operand.layer for layer, _ in waiting):
        operands = joint.together(operand)
        waiting = [(each.layer, y) for each, y in zip(operands, _outputs(x, operands, number), strict=True)]
    setattr(x, WAITING, [(layer, y) for layer, y in waiting if layer is not operand.layer])
    return next(y for layer, y in waiting if layer is operand.layer)
