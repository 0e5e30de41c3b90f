"""
NF4, weight-only.

| bits            | 4 + 32 / 64 = 4.5                                                              |
| grid            | 16 quantiles of N(0, 1), scaled to -1 .. 1                                     |
| block of weight | 64 consecutive values                                                          |
| block of input  | none, 16-bit                                                                   |
| scale           | float32                                                                        |
| paper           | QLoRA (arXiv:2305.14314), eq. 4 and appendix E                                 |

    q_i   = (Q(i / 17) + Q((i + 1) / 17)) / 2         Q: quantiles of N(0, 1); one side shifted to have an exact 0
    scale = max |x|                                   over the block
    code  = argmin_i |q_i - x / scale|                ties to the lower code
    x^    = q_code * scale

bitsandbytes' layout without double quantization: blocks run over the flattened tensor, across rows; two codes per
byte, the first in the HIGH four bits; the last block may be shorter. So a block may also run across two experts of a
weight (experts, out, in), unless out * in is a multiple of 64. As in bitsandbytes, full blocks are multiplied by
1 / scale; a short last block is divided by scale.
"""

import torch
from torch import Tensor

from .common import Format, Parts, lookup


BLOCK = 64
NF4_GRID = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
TINY = 1e-38  # keeps the reciprocal of a zero block finite


class NF4(Format):
    """NF4; `n` values of any shape with float32 scales `(ceil(n / 64),)` and bytes `(ceil(n / 2),)`."""

    bits = 4 + 32 / BLOCK
    max = 1.0
    table = NF4_GRID
    bitsandbytes = True
    nibbles = True

    @staticmethod
    def quantize(x: Tensor) -> Parts:
        flat = x.reshape(-1).float()
        full = flat.numel() // BLOCK * BLOCK
        blocks, rest = flat[:full].view(-1, BLOCK), flat[full:]
        scale = blocks.abs().amax(-1)
        unit = (blocks * (1.0 / scale.clamp(min=TINY)).unsqueeze(-1)).view(-1)
        if rest.numel():
            last = rest.abs().amax().clamp(min=TINY).reshape(1)
            scale, unit = torch.cat((scale, last)), torch.cat((unit, rest / last))
        grid = torch.tensor(NF4_GRID, device=x.device)
        codes = torch.bucketize(unit, (grid[:-1] + grid[1:]) / 2, out_int32=True).to(torch.uint8)
        if codes.numel() % 2:
            codes = torch.cat((codes, codes.new_full((1,), NF4_GRID.index(0.0))))
        return Parts((codes[0::2] << 4) | codes[1::2], scale)

    @staticmethod
    def dequantize(parts: Parts, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        codes = torch.stack((parts.values >> 4, parts.values & 0xF), dim=-1).view(-1)[: shape.numel()]
        grid = torch.tensor(NF4_GRID, device=codes.device)
        scale = parts.scale.repeat_interleave(BLOCK)[: shape.numel()]
        return (lookup(grid, codes) * scale).view(shape).to(dtype)
