"""
MXFP4, weight-only.

| bits            | 4 + 8 / 32 = 4.25                                                              |
| grid            | E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives                           |
| block of weight | 32 inputs of one output channel                                                |
| block of input  | none, 16-bit                                                                   |
| scale           | E8M0: a power of two, stored as exponent + 127                                 |
| paper           | OCP Microscaling Formats (MX) specification v1.0 (2023), 5.2 and 6.3           |

    e    = floor(log2(8/7 max |x|)) - 2               over the block, at least -127
    code = E2M1(clamp(x / 2^e, -6, 6))
    x^   = code * 2^e

The specification leaves the rounding of the scale open and suggests `floor(log2(max |x|)) - 2`. Here, as in
compressed-tensors, a maximum of 1.75 * 2^k or more counts as 2^(k+1) (the `8/7`), since 7 would saturate to 6.
The block saturates only where 2^(k+1) overflows the dtype (there compressed-tensors' scale is infinite). A block
of zeros gets e = -127. A block that float16 holds only as subnormals (maximum below 0.75 * 2^-14) becomes zeros
with e = 0, since 2^-127 is 0 in float16: quantize the float32 tensor to keep it. A partial last block is padded
with zeros in storage.
"""

import torch
from torch import Tensor

from .common import (
    E2M1,
    Format,
    Parts,
    Scheme,
    decode_e2m1,
    encode_e2m1,
    group,
    pack_nibbles,
    product,
    scaled,
    ungroup,
    unpack_nibbles,
)


BLOCK = 32


def block_exponent(amax: Tensor) -> Tensor:
    """E8M0 bytes (`e + 127`) for the given block maxima."""
    bits = amax.float().view(torch.int32) + (1 << 21)  # adding a quarter carries from a mantissa of 1.75 on
    if amax.dtype == torch.float16:  # exponents -14 to 15
        exponent = ((bits >> 23) - 2).clamp_(127 - 14 - 2, 127 + 15 - 2)
        exponent.masked_fill_(amax.float() < 0.75 * 2.0**-14, 127)
    else:
        exponent = ((bits >> 23) - 2).clamp_(0, 127 + 127 - 2)
    return exponent.to(torch.uint8)


def power_of_two(exponent: Tensor) -> Tensor:
    """E8M0 bytes to float32, exactly: 2^(exponent - 127); 2^-127 is a float32 subnormal."""
    exponent = exponent.to(torch.int32)
    return (exponent << 23).masked_fill_(exponent == 0, 1 << 22).view(torch.float32)


class MXFP4(Format):
    """E2M1; weights `(..., in)` with uint8 scales `(..., ceil(in / 32))` and bytes `(..., ceil(in / 32) * 16)`."""

    bits = 4 + 8 / BLOCK
    max = E2M1[-1]
    nibbles = True
    group = BLOCK
    scheme = Scheme(
        "mxfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "strategy": "group", "group_size": BLOCK, "scale_dtype": "torch.uint8"},
    )

    @staticmethod
    def quantize(x: Tensor) -> Parts:
        blocks = group(x, BLOCK)
        scale = block_exponent(blocks.abs().amax(-1))
        codes = encode_e2m1(scaled(blocks, power_of_two(scale).unsqueeze(-1)).to(x.dtype).add_(0.0).float())
        return Parts(pack_nibbles(codes.flatten(-2)), scale)

    @staticmethod
    def dequantize(parts: Parts, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        codes = group(unpack_nibbles(parts.values), BLOCK)
        return ungroup(product(decode_e2m1(codes), power_of_two(parts.scale).unsqueeze(-1), dtype), shape[-1])

    @staticmethod
    def stored(parts: Parts, shape: torch.Size) -> dict[str, Tensor]:
        return {"_packed": parts.values, "_scale": parts.scale}
