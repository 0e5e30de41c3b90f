"""
INT8, symmetric.

| bits | grid        | weight scale           | activations         | scale dtype       | paper                                        |
|------|-------------|------------------------|---------------------|-------------------|----------------------------------------------|
| 8    | -128 .. 127 | one per output channel | one scale per token | that of the input | Jacob et al. 2018 (arXiv:1712.05877), W8A8 of SmoothQuant (arXiv:2211.10438) |

    scale = max |x| / 127.5
    code  = round(clamp(x / scale, -128, 127))
    x^    = code * scale

Half a step more than 127, so that the 256 codes cover `[-amax, amax]` evenly; a value of exactly `+amax` is clamped to 127 steps.
"""

import torch
from torch import Tensor

from .common import Format, Parts, amax_scale, product, scaled


class INT8(Format):
    """Symmetric INT8; weights `(..., out, in)` with scales `(..., out, 1)`, activations `(..., in)` with scales `(..., 1)`."""

    bits = 8.0
    max = 127.5
    activations = "token"

    @staticmethod
    def quantize(x: Tensor) -> Parts:
        scale = amax_scale(x.abs().amax(-1, keepdim=True), INT8.max)
        return Parts(scaled(x, scale).clamp_(-128, 127).round_().to(torch.int8), scale)

    @staticmethod
    def dequantize(parts: Parts, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        return product(parts.values, parts.scale, dtype)

    quantize_activation = quantize
