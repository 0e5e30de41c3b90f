r"""
A linear layer trained in the numbers that sample from it: the unified flow of Jet-RL (arXiv:2601.14243), for each
precision whose inputs an engine quantizes too.

    Y  = Q(X) Q(W)^T + b             what the engine computes
    dX = dY Q(W)                     straight through the roundings: as if Q were the identity
    dW = dY^T Q(X)

| symbol | here | shape |
|---|---|---|
| `W` | the master weight, `weight`, which the optimizer moves | (out, in) |
| `Q(W)` | its codes and scales, kept until W moves or is let go | (out, in) |
| `X`, `dX` | | (..., in) |
| `Y`, `dY`, `b` | | (..., out), (..., out), (out,) |

Where scales have groups along the inner dimension (`fp8_block`) all these products are in FP8: dY is quantized along
its outputs for dX, and dY and X along the tokens for dW. For dW, X is quantized from its 16-bit numbers in the forward
pass, where Jet-RL quantizes its FP8 activations again: see [`products.quantize_for_both`]. In the other precisions dX
and dW are 16-bit products of what the codes stand for. Saved for the backward pass are the codes of X, a byte each,
once for the layers that share X.

With a LoRA adapter that the engine merges, the policy is Q(W + s B A), quantized once a step as well:

    Y  = Q(X) Q(W + s B A)^T + b
    dA = s (dY B)^T Q(X)
    dB = s dY^T (Q(X) A^T)
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..formats import FORMATS, QuantizedTensor, quantize
from ..precisions import PRECISIONS, unified_flows
from .frozen import autocast_dtype
from .inputs import quantized
from .products import dequantize, input_and_weight_gradient, input_gradient, product


class _Unified(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, codes, trains, dtype):
        w = codes()
        q, kept = quantized(x, dtype, w.format, both=trains)
        _keep(ctx, codes, kept)
        return product(q, w, bias, dtype).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, dy):
        (x,), w, flat = _kept(ctx), ctx.codes(), dy.reshape(-1, dy.shape[-1])
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        dx = dw = None
        if wants_weight and in_groups(w):
            dx, dw = input_and_weight_gradient(flat, w, x, flat.dtype)
        else:
            dx = input_gradient(flat, w) if wants_x else None
            dw = flat.t() @ dequantize(x, flat.dtype) if wants_weight else None
        dx = dx.view(*dy.shape[:-1], -1) if wants_x else None
        return dx, None if dw is None else dw.to(w.dtype), flat.sum(0) if wants_bias else None, None, None, None


class _UnifiedLora(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, a, b, bias, scaling, codes, dtype):
        w = codes()
        q, _ = quantized(x, dtype, w.format, both=False)
        _keep(ctx, codes, q if any(ctx.needs_input_grad[1:3]) else None, a, b)
        ctx.scaling = scaling
        return product(q, w, bias, dtype).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, dy):
        (x, a, b), flat = _kept(ctx), dy.reshape(-1, dy.shape[-1])
        dx = da = db = None
        wants_x, wants_a, wants_b, wants_bias = ctx.needs_input_grad[:4]
        if wants_x:
            dx = input_gradient(flat, ctx.codes()).view(*dy.shape[:-1], -1)
        numbers = dequantize(x, flat.dtype) if wants_a or wants_b else None
        if wants_a:
            da = ((flat @ b.to(flat.dtype)).t() @ numbers).to(a.dtype).mul_(ctx.scaling)
        if wants_b:
            db = (flat.t() @ (numbers @ a.to(flat.dtype).t())).to(b.dtype).mul_(ctx.scaling)
        return dx, da, db, flat.sum(0) if wants_bias else None, None, None, None


def in_groups(w: QuantizedTensor) -> bool:
    """Whether scales have groups along the inner dimension."""
    return not FORMATS[w.format].per_row


def _keep(ctx, codes: Callable[[], QuantizedTensor], x: QuantizedTensor | None, *tensors: Tensor) -> None:
    """Saves the input's codes and scales, and `tensors`; the weight's are its layer's, which may let them go."""
    ctx.codes, ctx.x = codes, x and (x.format, x.shape, x.dtype)
    ctx.save_for_backward(*(() if x is None else (x.values, x.scale)), *tensors)


def _kept(ctx) -> tuple:
    if ctx.x is None:
        return None, *ctx.saved_tensors
    values, scale, *tensors = ctx.saved_tensors
    format, shape, dtype = ctx.x
    return QuantizedTensor(format, values, scale, shape, dtype), *tensors


class UnifiedLinear(nn.Linear):
    """
    A linear layer whose forward pass is the engine's. `weight` stays the master weight: its name, type and place in
    checkpoints are those of `nn.Linear`, and the optimizer moves it.

    The weight is quantized when it is needed after it was written. torch counts what writes to a tensor, but not what
    goes past it, through `.data` or a kernel of its own: who moves weights so must call [`~UnifiedLinear.forget`].
    Codes last as long as the tensor that they were made of is the layer's: where FSDP2 gathers a weight for a forward
    or a backward pass they are made of what it gathered, and go with it.

    Parameters:
        in_features, out_features (`int`): Inputs and outputs.
        bias (`bool`): Whether the layer has one.
        precision (`str`): Key of `PRECISIONS`: one in whose products the inputs are quantized too.
        kwargs: `device` and `dtype` of the master weight, as in `nn.Linear`.

    Attributes:
        rounds_to (`torch.dtype` or `None`):
            Type that the weight is rounded to before its scales are computed: that of the checkpoint which an engine
            quantizes. `None` for the weight's own.
        moves_unseen (`bool`):
            Whether something writes the weight past torch's count and tells nobody: it is then quantized at each call.

    Raises:
        ValueError: Another precision.
    """

    rounds_to: torch.dtype | None = None
    moves_unseen = False

    def __init__(self, in_features: int, out_features: int, bias: bool, precision: str, **kwargs):
        if precision not in (allowed := unified_flows()):
            raise ValueError(f"precision: {precision!r} has no unified flow; allowed: {', '.join(allowed)}.")
        super().__init__(in_features, out_features, bias, **kwargs)
        self.precision, self.format = precision, PRECISIONS[precision].format
        self.forget()

    @classmethod
    def from_linear(cls, linear: nn.Linear, precision: str) -> "UnifiedLinear":
        """
        A layer around the weight and the bias of `linear`, which stay the same parameters.

        Raises:
            ValueError: Another precision.
        """
        bias, dtype = linear.bias is not None, linear.weight.dtype
        layer = cls(linear.in_features, linear.out_features, bias, precision, device="meta", dtype=dtype)
        layer.weight, layer.bias = linear.weight, linear.bias
        return layer.train(linear.training)

    def plain(self) -> nn.Linear:
        """The layer that computes in the weight's own type, around the same parameters."""
        bias, dtype = self.bias is not None, self.weight.dtype
        linear = nn.Linear(self.in_features, self.out_features, bias, device="meta", dtype=dtype)
        linear.weight, linear.bias = self.weight, self.bias
        return linear.train(self.training)

    def codes(self, delta: Callable[[], Tensor] | None = None, *of) -> QuantizedTensor:
        """
        The quantized weight: made once, and again after something wrote to what it is made of.

        Args:
            delta (`Callable`, *optional*): Returns what is added to the weight first, (out, in).
            of: What that is made of, tensors and numbers.

        Raises:
            ValueError: As [`trl_quant.formats.quantize`].
        """
        made_of = tuple((id(x), x._version) if isinstance(x, Tensor) else x for x in (self.weight, *of))
        if self._codes is None or made_of != self._made_of or self.moves_unseen:
            self._codes = None  # before the next ones take memory
            with torch.no_grad(), torch.autocast(self.weight.device.type, enabled=False):
                weight = self.weight.detach().to(self.rounds_to or self.weight.dtype)
                if delta is not None:
                    weight = torch.add(weight, delta(), out=torch.empty_like(weight))
                self._codes, self._made_of = _quantize(weight, self.format), made_of
        return self._codes

    def forget(self) -> None:
        """Has the weight quantized again when it is next needed."""
        self._codes: QuantizedTensor | None = None
        self._made_of: tuple = ()

    def trains(self) -> bool:
        """Whether a backward pass would want the input too."""
        return self.weight.requires_grad and torch.is_grad_enabled()

    @torch.compiler.disable  # which weights are new is asked at each call
    def forward(self, x: Tensor) -> Tensor:
        """(..., in) to (..., out), of the type of `x` or autocast's."""
        dtype = autocast_dtype(x, self.in_features)
        return _Unified.apply(x, self.weight, self._bias(dtype), self.codes, self.trains(), dtype)

    def adapted(self, x: Tensor, codes: Callable[[], QuantizedTensor], a: Tensor, b: Tensor, scaling: float) -> Tensor:
        """
        The layer with an adapter merged in.

        Args:
            x (`torch.Tensor`): Inputs (..., in).
            codes (`Callable`): Returns Q(W + s B A), from [`~UnifiedLinear.codes`].
            a, b (`torch.Tensor`): A (rank, in) and B (out, rank), which get the gradients.
            scaling (`float`): s.

        Returns:
            `torch.Tensor`: (..., out), of the type of `x` or autocast's.
        """
        dtype = autocast_dtype(x, self.in_features)
        return _UnifiedLora.apply(x, a, b, self._bias(dtype), scaling, codes, dtype)

    def _bias(self, dtype: torch.dtype) -> Tensor | None:
        return None if self.bias is None else self.bias.to(dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, precision={self.precision!r}"

    def __setattr__(self, name: str, value) -> None:
        if name == "weight":
            self.forget()  # FSDP2 puts another tensor here when it gathers a weight, and when it lets it go
        super().__setattr__(name, value)

    def _apply(self, fn, recurse=True):
        self.forget()  # `.to()` writes past torch's count
        return super()._apply(fn, recurse)


class SampledLinear(nn.Module):
    """
    The forward pass of a [`UnifiedLinear`] alone: it holds codes, and no weight that they are made of.

    Parameters:
        linear (`nn.Linear`): The layer to stand in for, (out, in).
    """

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight: QuantizedTensor | None = None
        self.bias = None if linear.bias is None else nn.Parameter(torch.empty_like(linear.bias), requires_grad=False)

    def load(self, weight: QuantizedTensor) -> None:
        """Takes new codes (out, in), from [`UnifiedLinear.codes`]."""
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) to (..., out), of the type of `x` or autocast's."""
        dtype = autocast_dtype(x, self.in_features)
        bias = None if self.bias is None else self.bias.to(dtype)
        q, _ = quantized(x, dtype, self.weight.format, both=False)
        return product(q, self.weight, bias, dtype).view(*x.shape[:-1], -1)


def _quantize(weight: Tensor, format: str) -> QuantizedTensor:
    """`formats.quantize`, on a GPU by kernels, where to look for NaN would wait for every layer."""
    if weight.is_cuda:
        from ..kernels.quantize import quantize as kernel

        return kernel(weight, format, check=False)
    return quantize(weight, format)
