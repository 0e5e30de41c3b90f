r"""
Layers under torch.compile. The products of [`joint`] and [`qat`] become operators, so that the compiler can put a whole
decoder layer into one graph:

    Y  = Q(X) Q(W)^T + b
    dX = dY Q(W)
    dW = dY^T Q(X)

and with an adapter as in [`joint`].

The compiler traces a layer once for all later calls, but a weight must be checked for writes at each call, and
quantized again after them. So an operator does not get codes. It gets the layer's number, and asks that layer for its
codes when it runs. The number is the value of a tensor, which the compiler does not read: it compiles equal layers
once.

Each layer is computed alone. The compiler then quantizes an input once for the layers that share it, because their
operators have equal arguments. In `fp8`, a token of dY has one scale for each layer, not one for all of them.
"""

import itertools
from functools import partial
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from ..formats import FORMATS, QuantizedTensor
from ..formats.fp8 import BLOCK
from .frozen import autocast_dtype, frozen_product
from .products import dequantize, input_and_weight_gradient, input_gradient, product, quantize_for_both, quantize_input


_layers: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()  # number -> layer
_numbers = itertools.count()


class Numbered:
    """A layer with a number, by which an operator finds it. A copy of the layer gets a number of its own."""

    number: Tensor  # of shape (), int64, on the CPU

    def enroll(self) -> None:
        """Gives the layer its number."""
        number = next(_numbers)
        _layers[number] = self
        object.__setattr__(self, "number", torch.tensor(number, device="cpu"))

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self.enroll()


def _codes(number: Tensor) -> QuantizedTensor:
    """Returns the quantized weight (out, in) of the layer with this number."""
    return _layers[number.item()].part().codes()


# Operators. The tag keeps them out of CUDA graphs, whose replays would not ask the layer for its codes
operator = partial(torch.library.custom_op, mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))


@operator("trl_quant::quantize_input")
def _quantize(x: Tensor, format: str, both: bool) -> list[Tensor]:
    """
    Quantizes inputs (T, in). Returns codes and scales for the forward pass and, if `both` passes need the input in
    groups, those of its transpose for the backward pass.
    """
    x = x.contiguous()
    found = quantize_for_both(x) if both else [quantize_input(x, format)]
    return [tensor.contiguous() for q in found for tensor in (q.values, q.scale)]


@_quantize.register_fake
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


@operator("trl_quant::product")
def _product(
    values: Tensor, scale: Tensor, number: Tensor, bias: Tensor | None, outputs: int, dtype: torch.dtype
) -> Tensor:
    """Computes [`products.product`] of the codes (T, in) of inputs: (T, out)."""
    w = _codes(number)
    x = QuantizedTensor(w.format, values, scale, values.shape, dtype)
    return product(x, w, bias, dtype).contiguous()


@_product.register_fake
def _(values, scale, number, bias, outputs, dtype):
    return values.new_empty(values.shape[0], outputs, dtype=dtype)


@operator("trl_quant::input_gradient")
def _input_gradient(dy: Tensor, number: Tensor, inputs: int) -> Tensor:
    """Computes [`products.input_gradient`] of dY (T, out): (T, in)."""
    return input_gradient(dy.contiguous(), _codes(number)).contiguous()


@_input_gradient.register_fake
def _(dy, number, inputs):
    return dy.new_empty(dy.shape[0], inputs)


@operator("trl_quant::input_and_weight_gradient")
def _both_gradients(dy: Tensor, number: Tensor, values: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Computes [`products.input_and_weight_gradient`] of dY (T, out) and codes (in, T'): dX (T, in), dW (out, in)."""
    w = _codes(number)
    x = QuantizedTensor(w.format, values, scale, values.shape, dy.dtype)
    dx, dw = input_and_weight_gradient(dy.contiguous(), w, x)
    return dx.contiguous(), dw.contiguous()


@_both_gradients.register_fake
def _(dy, number, values, scale):
    features = values.shape[0]
    return dy.new_empty(dy.shape[0], features), dy.new_empty(dy.shape[1], features)


@operator("trl_quant::dequantize")
def _dequantize(values: Tensor, scale: Tensor, format: str, dtype: torch.dtype) -> Tensor:
    """Computes [`products.dequantize`] of codes (T, in)."""
    return dequantize(QuantizedTensor(format, values, scale, values.shape, dtype), dtype).contiguous()


@_dequantize.register_fake
def _(values, scale, format, dtype):
    return torch.empty_like(values, dtype=dtype)


@operator("trl_quant::four_bit_product")
def four_bit_product(x: Tensor, number: Tensor, bias: Tensor | None, features: int, forward: bool) -> Tensor:
    """Computes [`frozen_product`] with the codes of the layer with this number: (..., features)."""
    q = _codes(number)
    return frozen_product(x, bias, q.values, q.scale, q.global_scale, q.format, *q.shape, q.dtype, None, forward)


@four_bit_product.register_fake
def _(x, number, bias, features, forward):
    return x.new_empty(*x.shape[:-1], features)


# A layer


class _Traced(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, a, b, number, format, dtype, outputs, scaling, merged):
        ctx.shape, ctx.format, ctx.scaling, ctx.merged = x.shape, format, scaling, merged
        grouped, trains = FORMATS[format].grouped, weight is not None and ctx.needs_input_grad[1]
        flat = x.reshape(-1, x.shape[-1]).to(dtype)
        values, scale, *columns = _quantize(flat, format, grouped and trains)
        y = _product(values, scale, number, bias, outputs, dtype)
        kept = columns if columns else [values, scale]
        if a is not None and not merged:
            kept = [flat, flat @ (a * scaling).to(a.dtype).to(dtype).t()]
            y = torch.addmm(y, kept[1], b.to(dtype).t())
        ctx.save_for_backward(*(kept if trains or a is not None else (None, None)), a, b, number)
        ctx.weight_dtype = weight.dtype if trains else None
        return y.view(*x.shape[:-1], outputs)

    @staticmethod
    def backward(ctx, dy):
        first, second, a, b, number = ctx.saved_tensors
        wants_x, wants_weight, wants_bias, wants_a, wants_b = ctx.needs_input_grad[:5]
        flat, inputs = dy.reshape(-1, dy.shape[-1]), ctx.shape[-1]
        dx = dw = dbias = da = db = None
        if wants_weight and FORMATS[ctx.format].grouped:
            dx, dw = _both_gradients(flat, number, first, second)
        elif wants_x:
            dx = _input_gradient(flat, number, inputs)
        if wants_weight:
            if dw is None:
                dw = flat.t() @ _dequantize(first, second, ctx.format, flat.dtype)
            dw = dw.to(ctx.weight_dtype)
        if a is not None:
            scaled = (a * ctx.scaling).to(a.dtype).to(flat.dtype)
            x = _dequantize(first, second, ctx.format, flat.dtype) if ctx.merged else first
            h = x @ scaled.t() if ctx.merged else second
            dh = flat @ b.to(flat.dtype)
            da = ((dh.t() @ x).float() * ctx.scaling).to(a.dtype) if wants_a else None
            db = (flat.t() @ h).to(b.dtype) if wants_b else None
            if dx is not None and not ctx.merged:
                dx = torch.addmm(dx, dh, scaled)
        if wants_bias:
            dbias = flat.sum(0)
        dx = dx.view(ctx.shape) if wants_x else None
        return dx, dw, dbias, da, db, None, None, None, None, None, None


def traced(x: Tensor, part, number: Tensor) -> Tensor:
    """
    Computes one layer as [`joint.compute`] does, with operators.

    Args:
        x (`torch.Tensor`): (..., in).
        part ([`joint.Part`]): The layer.
        number (`torch.Tensor`): The number of the layer that returned the part.

    Returns:
        `torch.Tensor`: (..., out), in the type of `x` or autocast's.

    Raises:
        ValueError: `x` has another number of features.
    """
    layer, dtype = part.layer, autocast_dtype(x, part.layer.in_features)
    bias = None if layer.bias is None else layer.bias.to(dtype)
    tensors = part.weight, bias, part.a, part.b, number
    return _Traced.apply(x, *tensors, layer.format, dtype, layer.out_features, part.scaling, part.merged)
