r"""
Fuses the activation between a gated MLP's layers with the quantizer of the layer that follows:

    Y   = round(silu(G)) U                        and Q(Y), in one pass
    dU  = dY round(silu(G))
    dG  = round(dY U) s (1 + G (1 - s))           s = sigmoid(G)

| symbol | here | shape |
|---|---|---|
| `G`, `U`, `Y` | outputs of the gate and up projections, input of the down projection | (..., features) |

The backward pass needs G and U; torch's two operators would save three tensors.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..formats import FORMATS
from ..precisions import PRECISIONS
from . import quantizers
from .inputs import remember


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up, format, both):
        ctx.save_for_backward(gate, up)
        if not quantizers.has_kernels(gate, format):
            return F.silu(gate) * up
        from ..kernels import unified as kernels

        flat = [x.reshape(-1, x.shape[-1]) for x in (gate, up)]
        if FORMATS[format].grouped:
            rows, columns, y = kernels.groups(flat[0], FORMATS[format].least_amax, quantizers.inverts(), both, flat[1])
        else:
            rows, y = kernels.rows(flat[0], format, True, flat[1])
            columns = rows
        y = y.view(gate.shape)
        remember(y, y.dtype, rows, columns)
        return y

    @staticmethod
    def backward(ctx, dy):
        gate, up = ctx.saved_tensors
        if dy.is_cuda:
            from ..kernels import unified as kernels

            return *kernels.silu_mul_backward(dy, gate, up), None, None
        return torch.ops.aten.silu_backward(dy * up, gate), dy * F.silu(gate), None, None


def silu_mul(gate: Tensor, up: Tensor, precision: str, both: bool) -> Tensor:
    """
    Computes `silu(gate) * up`. On a GPU the same pass quantizes the result, and [`inputs.quantized`] returns those
    codes.

    Args:
        gate, up (`torch.Tensor`): (..., features), BF16 or FP32.
        precision (`str`): Key of `PRECISIONS`, the precision of the layer that follows.
        both (`bool`): As in [`inputs.quantized`].

    Returns:
        `torch.Tensor`: (..., features).
    """
    if torch.compiler.is_compiling():
        return F.silu(gate) * up
    return _SiluMul.apply(gate, up, PRECISIONS[precision].format, both)
