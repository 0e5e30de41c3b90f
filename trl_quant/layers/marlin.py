r"""
Reads a frozen weight in the layout of vLLM's Marlin kernels, so that trainer and engine can share one copy in memory.

Marlin (arXiv:2408.11743, section 3.4) transposes W, cuts it into tiles of 16 inputs by 64 outputs, and reorders the
codes so that one 32-bit word holds all codes that a thread needs for its part of a tensor core's tile.

| tensor | shape | holds |
|---|---|---|
| codes | (in / 16, 2 out) int32 | 128 words of a tile, 8 codes a word |
| scales | (in / group, out) | 64 scales of a tile's outputs, reordered |

With the bits of an input's index in its tile, `k = h l_1 l_0 z`, and of an output's, `n = j_1 j_0 b c_2 c_1 c_0`:

    code  (k, n)    word c_2 c_1 c_0 l_1 l_0 j_1 j_0, bits 4 p to 4 p + 3 with p = z b h
    scale (group, n)     place c_2 c_1 c_0 j_1 b j_0

MXFP4's scales are the format's own bytes. An E4M3 scale of NVFP4 is stored as 128 times the scale, with five bits of
exponent and three of mantissa. A scale below 2^-6 becomes 0, for vLLM and, once the memory is shared, for the trainer.

The values computed here are code times scale, which BF16 holds exactly. NVFP4's global scale is left out: as in vLLM's
kernels, it multiplies the sum of a product and not each weight.
"""

import torch
from torch import Tensor

from ..formats.common import decode_e2m1
from ..formats.mxfp4 import power_of_two


TILE_IN, TILE_OUT = 16, 64


def scales(scale: Tensor) -> Tensor:
    """Converts stored scales (groups, out), E5M3 or E8M0, to float32 in the order of the outputs."""
    ordered = scale.view(torch.uint8).unflatten(1, (-1, 8, 2, 2, 2)).permute(0, 1, 3, 5, 4, 2)  # tile, j1, j0, b, c
    ordered = ordered.flatten(1)
    if scale.dtype == torch.float8_e8m0fnu:
        return power_of_two(ordered)
    return (ordered.to(torch.int16) << 7).view(torch.float16).float() / 128


def codes(values: Tensor) -> Tensor:
    """Unpacks words (in / 16, 2 out) into codes (in, out), E2M1 in uint8."""
    shifts = 4 * torch.arange(8, dtype=torch.int32, device=values.device)
    out = ((values.unsqueeze(-1) >> shifts) & 0xF).to(torch.uint8)
    # rows, tile, c, l, j, z, b, h  ->  rows, h, l, z, tile, j, b, c
    out = out.flatten(1).unflatten(1, (-1, 8, 4, 4, 2, 2, 2)).permute(0, 7, 3, 5, 1, 4, 6, 2)
    return out.reshape(TILE_IN * len(values), -1)


def product(values: Tensor, scale: Tensor) -> Tensor:
    """Multiplies the codes (in, out) of words with scales (groups, out), in float32."""
    decoded = decode_e2m1(codes(values))
    return (decoded.view(len(scale), -1, decoded.shape[1]) * scale.unsqueeze(1)).view_as(decoded)


def dequantized(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """
    Dequantizes a weight: code times scale.

    Args:
        values (`torch.Tensor`): Words (in / 16, 2 out) int32 of codes, or some whole tiles of them.
        scale (`torch.Tensor`): Their scales (in / group, out).
        dtype (`torch.dtype`): BF16 and wider types hold the values exactly; FP16 rounds some.

    Returns:
        `torch.Tensor`: (in, out), the transposed weight, contiguous.
    """
    if values.is_cuda:
        from ..kernels.marlin import dequantized as kernel

        return kernel(values, scale, dtype)
    return product(values, scales(scale)).to(dtype)
