r"""
A linear layer that trains its whole weight for four bits: quantization-aware training with the straight-through
estimator (arXiv:1308.3432, section 3), for the precisions whose inputs stay in 16 bits.

    Y  = X Q(W)^T + b             as a frozen four-bit layer and the engine compute it
    dX = dY Q(W)
    dW = dY^T X                   straight through the rounding: as if Q were the identity

| symbol | here | shape |
|---|---|---|
| `W` | the master weight, `weight`, which the optimizer updates | (out, in) |
| `Q(W)` | its codes and scales, quantized once after each write to W | (out, in) |
| `X`, `dX` | | (..., in) |
| `Y`, `dY`, `b` | | (..., out), (..., out), (out,) |

The codes and scales of Q(W) are those of a checkpoint of W in this format, which an engine loads. In NVFP4 the layers
that an engine fuses (q, k, v; gate, up) share a global scale, so Q(W) depends on the largest value of each of them: see
[`share_scale`]. The backward pass needs X in the type of the product, and codes and scales, which the layer holds.

An update of W that is smaller than a step of the format changes no code, but W keeps it, so small updates accumulate.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial

from ..formats import QuantizedTensor, global_scale
from ..precisions import qat_precisions
from .frozen import autocast_dtype, frozen_product
from .traced import four_bit_product
from .unified import SampledLinear, UnifiedLinear


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, codes, number):
        ctx.codes, ctx.dtype, ctx.inputs = codes, weight.dtype, weight.shape[1]
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, number)
        if number is not None:
            return four_bit_product(x, number, bias, len(weight), True)
        return frozen_product(x, bias, *packed(codes()), True)

    @staticmethod
    def backward(ctx, dy):
        x, number = ctx.saved_tensors
        dx = dw = db = None
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        flat = dy.reshape(-1, dy.shape[-1])
        if wants_x and number is not None:
            dx = four_bit_product(dy, number, None, ctx.inputs, False)
        elif wants_x:
            dx = frozen_product(dy, None, *packed(ctx.codes()), False)
        if wants_weight:
            dw = (flat.t() @ x.reshape(-1, x.shape[-1])).to(ctx.dtype)
        if wants_bias:
            db = flat.sum(0)
        return dx, dw, db, None, None


def packed(q: QuantizedTensor) -> tuple:
    """Returns a quantized weight as [`frozen_product`] takes it: codes, scales and global scale, then the rest."""
    return q.values, q.scale, q.global_scale, q.format, *q.shape, q.dtype, None


class QATLinear(UnifiedLinear):
    """
    A linear layer that computes with its weight in four bits, and trains all of it. `weight` stays the master weight:
    its name, type and place in checkpoints are those of `nn.Linear`. It is quantized as a [`UnifiedLinear`] says.

    Parameters:
        in_features, out_features (`int`): Inputs and outputs.
        bias (`bool`): Whether the layer has one.
        precision (`str`): Key of `PRECISIONS`, one of [`~precisions.qat_precisions`].
        kwargs: `device` and `dtype` of the master weight, as in `nn.Linear`.

    Attributes:
        fused (`tuple[QATLinear, ...]`): The other layers that share its global scale; see [`share_scale`].

    Raises:
        ValueError: Another precision.
    """

    fused: tuple["QATLinear", ...] = ()

    @staticmethod
    def precisions() -> list[str]:
        """Returns the precisions of such layers."""
        return qat_precisions()

    def codes(self, delta: Callable[[], Tensor] | None = None, *sources) -> QuantizedTensor:
        """As [`UnifiedLinear.codes`]. The weights of the layers in `fused` are sources of the codes, too."""
        return super().codes(delta, *sources, *(layer.weight for layer in self.fused))

    def shared_scale(self, weight: Tensor) -> Tensor | None:
        """
        Returns the global scale with which `weight` is quantized; `None` if no other layer shares it. All ranks must
        call it if FSDP2 shards the weight of a layer in `fused`.
        """
        if not self.fused:
            return None
        others = (largest(layer.weight.detach()).to(weight.dtype) for layer in self.fused)
        return global_scale(largest(weight), *others)

    def forget(self) -> None:
        """Drops the codes of this layer, and those of the layers in `fused`, which depend on its weight."""
        super().forget()
        for layer in self.fused:
            UnifiedLinear.forget(layer)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (..., in) to (..., out), in the type of `x` or autocast's."""
        dtype = autocast_dtype(x, self.in_features)
        bias = None if self.bias is None else self.bias.to(dtype)
        number = self.number if torch.compiler.is_compiling() else None
        return _StraightThrough.apply(x.to(dtype), self.weight, bias, self.codes, number)


class SampledQATLinear(SampledLinear):
    """The forward pass of a [`QATLinear`], as [`SampledLinear`] is that of a [`UnifiedLinear`]."""

    def forward(self, x: Tensor) -> Tensor:
        """Maps (..., in) to (..., out), in the type of `x` or autocast's."""
        x = x.to(autocast_dtype(x, self.in_features))
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return frozen_product(x, bias, *packed(self.weight), True)


def trained_linear(linear: nn.Linear, precision: str) -> UnifiedLinear:
    """
    Builds the layer that trains the weight of `linear` in `precision`, around the same parameters.

    Raises:
        ValueError: A precision in which no weights are trained.
    """
    kind = QATLinear if precision in qat_precisions() else UnifiedLinear
    return kind.from_linear(linear, precision)


def sampled_linear(linear: nn.Linear, precision: str) -> SampledLinear:
    """Builds the layer that computes the forward pass of [`trained_linear`] from given codes."""
    return (SampledQATLinear if precision in qat_precisions() else SampledLinear)(linear, precision)


def share_scale(layers: Sequence[QATLinear]) -> None:
    """Makes layers that an engine computes as one matrix share a global scale, computed from their largest value."""
    for layer in layers:
        layer.fused = tuple(other for other in layers if other is not layer)
        layer.forget()


def largest(weight: Tensor) -> Tensor:
    """
    Computes the largest absolute value of a weight, of shape (), in its type. If FSDP2 holds the weight in parts, each
    rank reads its own and all of them get the largest: collective.
    """
    if not isinstance(weight, DTensor):
        return torch.stack(torch.aminmax(weight)).abs().amax()
    mesh, own = weight.device_mesh, weight.to_local()
    found = largest(own) if own.numel() else own.new_zeros(())
    return DTensor.from_local(found.to(mesh.device_type), mesh, [Partial("max")] * mesh.ndim).full_tensor()
