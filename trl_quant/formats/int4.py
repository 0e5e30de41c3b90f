"""
INT4, symmetric, weight-only.

| bits            | 4 + 16 / 128 = 4.125                                                           |
| grid            | -8 .. 7                                                                        |
| block of weight | 128 inputs of one output channel                                               |
| block of input  | none, 16-bit                                                                   |
| scale           | dtype of the tensor                                                            |
| paper           | grouped W4A16 of GPTQ (arXiv:2210.17323) and AWQ (arXiv:2306.00978), here rounded to nearest |

    scale = max |x| / 7.5                             over the block
    code  = round(clamp(x / scale, -8, 7))
    x^    = code * scale

Stored as `code + 8`, two per byte, the first in the low four bits. A partial last group is padded with zeros in
storage.
"""

import torch
from torch import Tensor

from .common import Format, Parts, Scheme, amax_scale, group, pack_nibbles, product, scaled, ungroup, unpack_nibbles


GROUP = 128


class INT4(Format):
    """INT4; weights `(..., in)` with scales `(..., ceil(in / 128))` and bytes `(..., ceil(in / 128) * 64)`."""

    bits = 4 + 16 / GROUP
    max = 7.5
    integers = True
    nibbles = True
    group = GROUP
    scheme = Scheme("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP})

    @staticmethod
    def quantize(x: Tensor) -> Parts:
        groups = group(x, GROUP)
        scale = amax_scale(groups.abs().amax(-1), INT4.max)
        codes = scaled(groups, scale.unsqueeze(-1)).clamp_(-8, 7).round_().add_(8).to(torch.uint8)
        return Parts(pack_nibbles(codes.flatten(-2)), scale)

    @staticmethod
    def dequantize(parts: Parts, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        codes = unpack_nibbles(parts.values).to(torch.int8) - 8
        return ungroup(product(group(codes, GROUP), parts.scale.unsqueeze(-1), dtype), shape[-1])

    @staticmethod
    def stored(parts: Parts, shape: torch.Size) -> dict[str, Tensor]:
        packed = parts.values.view(torch.int32)
        return {"_packed": packed, "_scale": parts.scale, "_shape": torch.tensor(shape, device=packed.device)}
