"""
NVFP4, weight-only.

| bits            | 4 + 8 / 16 = 4.5                                                               |
| grid            | E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives                           |
| block of weight | 16 inputs of one output channel                                                |
| block of input  | none, 16-bit                                                                   |
| scale           | E4M3, and one float32 for the matrix                                           |
| paper           | NVIDIA, "Pretraining LLMs with NVFP4" (arXiv:2509.25149); QeRL (arXiv:2510.11696), eq. 3 |

    g     = 448 * 6 * (1 / max |x|)                   over the matrix, in its dtype, stored in float32
    scale = E4M3(g * max |x| / 6)                     over the block
    code  = E2M1(clamp(x / (scale / g), -6, 6))
    x^    = code * (scale / g)

`g` multiplies (compressed-tensors' convention): a kernel scales the codes by `scale / g`. Layers that an engine fuses
(q, k, v; gate, up) must share one `g`: see [`global_scale`]. Each expert of a weight (experts, out, in) has its own
`g`. `g` is 1 where it would overflow the tensor's dtype (all zeros, or float16 with a maximum below 0.041). A block
scale that rounds to 0 becomes 0.125. A partial last block is padded with zeros in storage.
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
    matrix_amax,
    pack_nibbles,
    per_matrix,
    product,
    quotient,
    scaled,
    ungroup,
    unpack_nibbles,
)


BLOCK = 16
E4M3_MAX = 448.0
E2M1_MAX = E2M1[-1]


def global_scale(*tensors: Tensor) -> Tensor:
    """
    The float32 scale that the given weights share: `448 * 6 * (1 / max |x|)` over all of them. It has the shape `(1,)`
    for weights (out, in), and `(experts, 1)` for weights (experts, out, in), whose experts share with those of the same
    index.

    Raises:
        ValueError: The weights have different numbers of experts.
    """
    check_experts(*tensors)
    amax = torch.stack([matrix_amax(x) for x in tensors]).amax(0)
    # two roundings, as in compressed-tensors: torch computes `448 * 6 / amax` this way
    scale = amax.clamp(min=torch.finfo(amax.dtype).tiny).reciprocal() * (E4M3_MAX * E2M1_MAX)
    return scale.nan_to_num(posinf=1.0).to(torch.float32)


def check_experts(*tensors: Tensor) -> None:
    """Raises `ValueError` unless the given weights have the same leading dimensions."""
    if len({x.shape[:-2] for x in tensors}) > 1:
        shapes = ", ".join(str(tuple(x.shape)) for x in tensors)
        raise ValueError(f"tensors: shapes {shapes}; only weights with equally many experts can share a global scale.")


class NVFP4(Format):
    """
    E2M1; weights `(..., in)` with E4M3 scales `(..., ceil(in / 16))` and bytes `(..., ceil(in / 16) * 8)`; global
    scales `(1,)`, or `(experts, 1)` for weights `(experts, out, in)`.
    """

    bits = 4 + 8 / BLOCK
    max = E2M1_MAX
    nibbles = True
    group = BLOCK
    shares_scale = True
    scheme = Scheme(
        "nvfp4-pack-quantized",
        {
            "num_bits": 4,
            "type": "float",
            "strategy": "tensor_group",
            "group_size": BLOCK,
            "scale_dtype": "torch.float8_e4m3fn",
        },
    )

    @staticmethod
    def quantize(x: Tensor, g: Tensor | None = None) -> Parts:
        g = global_scale(x) if g is None else g
        blocks = group(x, BLOCK)
        scale = (per_matrix(g) * quotient(blocks.abs().amax(-1), E2M1_MAX)).clamp_(max=E4M3_MAX).to(torch.float8_e4m3fn)
        scale = torch.where(scale.float() == 0, 0.125, scale.float()).to(torch.float8_e4m3fn)
        codes = encode_e2m1(scaled(blocks, (scale.float() / per_matrix(g)).unsqueeze(-1)))
        return Parts(pack_nibbles(codes.flatten(-2)), scale, g)

    @staticmethod
    def dequantize(parts: Parts, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        scale = parts.scale.float() / per_matrix(parts.global_scale)
        codes = group(unpack_nibbles(parts.values), BLOCK)
        return ungroup(product(decode_e2m1(codes), scale.unsqueeze(-1), dtype), shape[-1])

    @staticmethod
    def stored(parts: Parts, shape: torch.Size) -> dict[str, Tensor]:
        own = parts.global_scale.clone()  # safetensors refuses memory shared between tensors
        return {"_packed": parts.values, "_scale": parts.scale, "_global_scale": own}
