"""
Computes checksums of many tensors in one pass over their memory. The twin is
[`trl_quant.rollout.fingerprint.checksum`].

| kernel            | one program handles                 | reads, writes                               |
|-------------------|-------------------------------------|---------------------------------------------|
| `checksum_kernel` | every n-th tile of all the tensors  | every word once; adds to a sum per tensor   |
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .arithmetic import on


TILE = 1024  # words that a program reads at a time
PROGRAMS = 1056  # programs that share the tiles: eight for each multiprocessor of a Hopper GPU
_GOLDEN = tl.constexpr(-7046029254386353131)  # of `fingerprint`
_LOW = tl.constexpr(0x1FFFFFFFF)


@triton.jit
def _folded(x):
    """XORs the upper 33 bits of each word into the lower ones."""
    return x ^ ((x >> 31) & _LOW)


@triton.jit
def checksum_kernel(table_ptr, sums_ptr, tensors, programs, TILE: tl.constexpr):
    """Adds up each tensor's checksum. The table has a row per tensor: address, words, and the tiles up to its end."""
    tile = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, TILE)
    first = tile * 0
    for tensor in range(tensors):
        end = tl.load(table_ptr + 3 * tensor + 2)
        if tile < end:
            address = tl.load(table_ptr + 3 * tensor).to(tl.pointer_type(tl.int64))
            words = tl.load(table_ptr + 3 * tensor + 1)
            total = tl.zeros((TILE,), tl.int64)
            while tile < end:
                place = (tile - first) * TILE + column
                word = tl.load(address + place, mask=place < words, other=0)
                total += _folded(word) * (_folded((place + 1) * _GOLDEN) | 1)
                tile += programs
            tl.atomic_add(sums_ptr + tensor, tl.sum(total, axis=0))
        first = end


def checksums(tensors: list[Tensor]) -> Tensor:
    """
    Computes [`~rollout.fingerprint.checksum`] of each tensor.

    Args:
        tensors (`list[Tensor]`):
            Contiguous tensors on one device, each of whole 8-byte words at an address that is a multiple of 8.

    Returns:
        `Tensor` of shape (tensors,), int64, on that device.
    """
    rows, end = [], 0
    for tensor in tensors:
        words = tensor.nbytes // 8
        end += -(-words // TILE)
        rows += [tensor.data_ptr(), words, end]
    device = tensors[0].device
    sums = torch.zeros(len(tensors), dtype=torch.int64, device=device)
    if end:
        programs = min(PROGRAMS, end)
        with on(tensors[0]):
            table = torch.tensor(rows, dtype=torch.int64, device=device)
            checksum_kernel[(programs,)](table, sums, len(tensors), programs, TILE)
    return sums
