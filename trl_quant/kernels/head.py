"""
The gradient of a token's log-probability with respect to its logits, and the entropy, in one pass over the logits. The
twin in torch is [`trl_quant.policy.exact.head.slopes`], whose exponentials and sums differ in their last bits.
"""

import triton
import triton.language as tl
from torch import Tensor

from .arithmetic import on, rounded, wide


VOCABULARY_BLOCK = 4096  # logits that a program handles at once


@triton.jit
def slopes_kernel(z_ptr, ids_ptr, lse_ptr, d_ptr, entropy_ptr, vocabulary, BLOCK: tl.constexpr):
    """One program handles a row of (N, vocabulary). `d_ptr` may be `z_ptr`, or `None`."""
    row = tl.program_id(0).to(tl.int64)
    target, lse = tl.load(ids_ptr + row), tl.load(lse_ptr + row)
    mean = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        col = start + tl.arange(0, BLOCK)
        mask = col < vocabulary
        z = wide(tl.load(z_ptr + row * vocabulary + col, mask=mask, other=0.0))
        p = tl.where(mask, tl.exp(z - lse), 0.0)
        mean += p * (z - lse)
        if d_ptr is not None:
            d = (col == target).to(tl.float32) - p
            tl.store(d_ptr + row * vocabulary + col, rounded(d, d_ptr.dtype.element_ty), mask=mask)
    tl.store(entropy_ptr + row, -tl.sum(mean))


def slopes(z: Tensor, ids: Tensor, lse: Tensor, d: Tensor | None) -> Tensor:
    """The twin of [`trl_quant.policy.exact.head.slopes`]. All tensors are contiguous."""
    entropies = lse.new_empty(len(z))
    with on(z):
        slopes_kernel[(len(z),)](z, ids, lse, d, entropies, z.shape[1], BLOCK=VOCABULARY_BLOCK, num_warps=8)
    return entropies
