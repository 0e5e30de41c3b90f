"""
RMSNorm with a residual sum, each token by itself: its bits do not depend on how many tokens there are, where vLLM's
kernel takes other blocks of threads from 256 tokens on and adds up in another order. Its twin is
[`trl_quant.layers.exact.rms_norm`].

| kernel        | one program handles | reads, writes                                |
|---------------|---------------------|----------------------------------------------|
| `norm_kernel` | one token           | input and residual once; output and the sum  |
"""

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from .arithmetic import rounded, wide


@triton.jit
def norm_kernel(x_ptr, residual_ptr, weight_ptr, y_ptr, sum_ptr, features, eps, ADD: tl.constexpr, BLOCK: tl.constexpr):
    """A row of (tokens, features)."""
    column = tl.arange(0, BLOCK)
    mask = column < features
    at = tl.program_id(0).to(tl.int64) * features + column
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    x = wide(tl.load(x_ptr + at, mask=mask, other=0.0))
    if ADD:
        total = rounded(x + wide(tl.load(residual_ptr + at, mask=mask, other=0.0)), dtype)
        tl.store(sum_ptr + at, total, mask=mask)
        x = wide(total)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / features + eps)
    weight = wide(tl.load(weight_ptr + column, mask=mask, other=0.0))
    y = wide(rounded(x * scale, dtype)) * weight
    tl.store(y_ptr + at, rounded(y, dtype), mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """[`trl_quant.layers.exact.rms_norm`]."""
    x = x.contiguous()
    y, features = torch.empty_like(x), x.shape[-1]
    total = x if residual is None else torch.empty_like(x)
    if x.numel():
        block = triton.next_power_of_2(features)
        with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
            norm_kernel[(x.numel() // features,)](
                x, x if residual is None else residual.contiguous(), weight, y, total, features, eps,
                ADD=residual is not None, BLOCK=block, num_warps=min(max(block // 512, 1), 16),
            )  # fmt: skip
    return y, total
