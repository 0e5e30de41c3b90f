r"""
Fuses RMSNorm with the quantizer of the layers that follow:

    Y  = round(round(X r) w),    r = 1 / sqrt(mean(X^2) + eps)             and Q(Y), unless Q(Y^T) is needed too
    dX = r (w dY - X r^2 mean(w dY X))
    dw = sum over tokens of dY round(X r)

| symbol | here | shape |
|---|---|---|
| `X`, `Y` | | (..., features) |
| `w` | `weight` | (features,) |

The backward pass needs X; torch's operators would save a tensor in FP32 as well. On a CPU, torch's operators run.
"""

import torch
from torch import Tensor, nn

from ..formats import FORMATS
from . import quantizers
from .inputs import autocast_dtype, remember


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, eps, format, dtype):
        from ..kernels import norm as kernels

        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        inverts = format is not None and quantizers.inverts()
        y, _, codes = kernels.rms_norm(x, weight, eps, None, format, dtype, inverts)
        if codes is not None:
            remember(y, dtype, codes, None if FORMATS[format].grouped else codes)
        return y

    @staticmethod
    def backward(ctx, dy):
        from ..kernels import norm as kernels

        x, weight = ctx.saved_tensors
        return *kernels.rms_norm_backward(dy, x, weight, ctx.eps, ctx.needs_input_grad[1]), None, None, None


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """
    Adds each token to the residual stream, s = round(x + r), and normalizes it: round(round(s / rms(s)) w). A token's
    output does not depend on the number of tokens. On a GPU it has no gradients.

    Args:
        x (`torch.Tensor`): (..., features).
        weight (`torch.Tensor`): (features,), of the type of `x`.
        eps (`float`): Added to the mean square.
        residual (`torch.Tensor`, *optional*): r, like `x`.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: the norm's output, and s.
    """
    if x.is_cuda:
        from ..kernels import norm as kernels

        return kernels.rms_norm(x, weight, eps, residual)[:2]
    total = x if residual is None else x + residual
    return _by_torch(total, weight, eps), total


def fused_rms_norm(x: Tensor, weight: Tensor, eps: float, format: str | None, dtype: torch.dtype) -> Tensor:
    """
    Computes [`rms_norm`] of `x` (..., features) with kernels that have gradients. With a `format`, a key of `FORMATS`,
    the same pass quantizes the output, rounded to `dtype`, and [`inputs.quantized`] returns those codes unless the
    transpose is needed too.
    """
    return _Norm.apply(x, weight, eps, format, dtype)


def _by_torch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalizes `x` (..., features) with torch's operators, which have gradients."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


class FusedRMSNorm(nn.Module):
    """
    An RMSNorm that shares another norm's weight, as the same parameter.

    Parameters:
        norm (`nn.Module`): transformers' norm, whose weight is a factor.
        feeds (`nn.Module`, *optional*):
            The first [`~layers.UnifiedLinear`] that takes its output. If that layer trains and needs its input in two
            layouts, it quantizes the input itself.

    Attributes:
        rounds (`bool`): Whether the weight is rounded to the input's type, as an engine holds it.
    """

    rounds = False

    def __init__(self, norm: nn.Module, feeds: nn.Module | None = None):
        super().__init__()
        self.weight, self.variance_epsilon = norm.weight, norm.variance_epsilon
        self.train(norm.training)
        # Not as child modules: `feeds` belongs to another module, and the parameters of `norm` would count twice
        object.__setattr__(self, "feeds", feeds)
        object.__setattr__(self, "norm", norm)

    def plain(self) -> nn.Module:
        """Returns the norm that this one replaces, with the present weight."""
        self.norm.weight = self.weight
        return self.norm.train(self.training)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (..., features) to the same shape."""
        weight = self.weight.to(x.dtype) if self.rounds else self.weight
        if torch.compiler.is_compiling() or weight.dtype != x.dtype or not quantizers.has_kernels(x, "int8"):
            return _by_torch(x, weight, self.variance_epsilon)
        format, dtype = None, autocast_dtype(x, len(weight))
        if self.feeds is not None:
            format = self.feeds.format
            if not quantizers.has_kernels(x, format) or (FORMATS[format].grouped and self.feeds.trains()):
                format = None
        return fused_rms_norm(x, weight, self.variance_epsilon, format, dtype)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.variance_epsilon}"
