r"""
A LoRA branch (arXiv:2106.09685, section 4.1) joined to the product of a frozen four-bit layer.

    H  = X A^T                                   (tokens, rank)
    Y  = X Q(W)^T + b + s H B^T
    dX = dY Q(W) + s (dY B) A
    dA = s (dY B)^T X
    dB = s dY^T H

| symbol | here | shape |
|---|---|---|
| `A`, `B` | the adapter | (rank, in), (out, rank) |
| `s` | `scaling`: alpha / rank, in rsLoRA alpha / sqrt(rank) | |

The matrix multiplication itself (`addmm`) scales the branch and adds it to Y and to dX, so that neither is read or
written once more. The backward pass needs X, H, A, B, codes and scales.

All products are computed in the type of X, or in autocast's, whatever the type of A and B. PEFT's layer does the same
under autocast; without it, PEFT computes the branch in the type of A. The gradients of A and B are summed over the
tokens in FP32, rounded to the type of X, then converted to the type of A and B.
"""

import torch
from torch import Tensor

from .frozen import FrozenLinear, frozen_product


class _FrozenLora(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bias, a, b, scaling, *packed):
        flat = x.reshape(-1, x.shape[-1])
        with torch.autocast(x.device.type, enabled=False):
            h = flat @ a.to(x.dtype).t()
            y = frozen_product(x, bias, *packed, True)
            y.view(-1, y.shape[-1]).addmm_(h, b.to(x.dtype).t(), alpha=scaling)
        wants_a, wants_b = ctx.needs_input_grad[2:4]
        ctx.save_for_backward(flat if wants_a else None, h if wants_b else None, a, b, *packed[:3])
        ctx.constants, ctx.scaling = packed[3:], scaling
        return y

    @staticmethod
    def backward(ctx, dy):
        x, h, a, b, *packed = ctx.saved_tensors
        dx = dbias = da = db = None
        wants_x, wants_bias, wants_a, wants_b = ctx.needs_input_grad[:4]
        flat = dy.reshape(-1, dy.shape[-1])
        with torch.autocast(dy.device.type, enabled=False):
            if wants_x or wants_a:
                dh = flat @ b.to(dy.dtype)
            if wants_x:
                dx = frozen_product(dy, None, *packed, *ctx.constants, False)
                dx.view(-1, dx.shape[-1]).addmm_(dh, a.to(dy.dtype), alpha=ctx.scaling)
            if wants_bias:
                dbias = flat.sum(0)
            if wants_a:
                da = (dh.t() @ x).to(a.dtype).mul_(ctx.scaling)
            if wants_b:
                db = (flat.t() @ h).to(b.dtype).mul_(ctx.scaling)
        return dx, dbias, da, db, None, *[None] * (len(packed) + len(ctx.constants))


def frozen_lora_linear(x: Tensor, layer: FrozenLinear, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """
    Computes a frozen layer and its adapter in one function.

    Args:
        x (`torch.Tensor`): Inputs (..., in).
        layer ([`FrozenLinear`]): The layer.
        a (`torch.Tensor`): (rank, in).
        b (`torch.Tensor`): (out, rank).
        scaling (`float`): Factor of the branch.

    Returns:
        `torch.Tensor`: (..., out), of the type of `x` or autocast's.

    Raises:
        ValueError: `x` has another number of features than the layer.
    """
    x = layer.inputs(x)
    bias = None if layer.bias is None else layer.bias.to(x.dtype)
    return _FrozenLora.apply(x, bias, a, b, scaling, *layer.packed())
