"""
INT8, symmetric.

| bits            | 8                                                                              |
| grid            | -128 .. 127                                                                    |
| block of weight | output channel                                                                 |
| block of input  | token                                                                          |
| scale           | dtype of the tensor                                                            |
| paper           | arXiv:1712.05877, eq. 1 with Z = 0; W8A8 of SmoothQuant (arXiv:2211.10438)     |

    scale = max |x| / 127.5                           over the block
    code  = round(clamp(x / scale, -128, 127))
    x^    = code * scale

The divisor is 127 plus half a step, so that the 256 codes cover `[-amax, amax]` evenly; `+amax` itself is clamped.
"""

import torch
from torch import Tensor

from .common import Format, Parts, Scheme, amax_scale, product, scaled


class INT8(Format):
    """INT8; weights `(..., out, in)` with scales `(..., out, 1)`, activations `(..., in)` with scales `(..., 1)`."""

    bits = 8.0
    max = 127.5
    activations = "token"
    integers = True
    per_row = True
    scheme = Scheme(
        "int-quantized",
        {"num_bits": 8, "type": "int", "strategy": "channel"},
        {"num_bits": 8, "type": "int", "strategy": "token"},
    )

    @staticmethod
    def quantize(x: Tensor) -> Parts:
        scale = amax_scale(x.abs().amax(-1, keepdim=True), INT8.max)
        return Parts(scaled(x, scale).clamp_(-128, 127).round_().to(torch.int8), scale)

    @staticmethod
    def dequantize(parts: Parts, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        return product(parts.values, parts.scale, dtype)

    quantize_activation = quantize
