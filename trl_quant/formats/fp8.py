"""
FP8 in E4M3, in three granularities.

|                 | fp8                      | fp8_tensor | fp8_block                          |
|-----------------|--------------------------|------------|------------------------------------|
| bits            | 8                        | 8          | 8                                  |
| grid            | E4M3: +-448, no infinity | the same   | the same                           |
| block of weight | output channel           | matrix     | 128 x 128                          |
| block of input  | token                    | tensor     | 128 inputs of one token            |
| scale           | dtype of the tensor      | the same   | the same                           |
| paper           | arXiv:2209.05433         | the same   | DeepSeek-V3 3.3 (arXiv:2412.19437) |

    scale = max |x| / 448                             over the block
    code  = E4M3(clamp(x / scale, -448, 448))
    x^    = code * scale

Edge blocks of a matrix that is not a multiple of 128 are smaller; storage is not padded. `fp8_tensor` has one scale per
weight matrix, so each expert of a weight (experts, out, in) has its own, and one dynamic scale per input, so a token's
values depend on the other tokens in its batch.
"""

from functools import cache

import torch
from torch import Tensor

from .common import Format, Parts, Scheme, amax_scale, group, lookup, matrix_amax, per_matrix, product, scaled, ungroup


E4M3_MAX = 448.0
BLOCK = 128


def encode_e4m3(x: Tensor, scale: Tensor) -> Tensor:
    """Values to E4M3 codes under `scale`, saturating."""
    return scaled(x, scale).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def decode_e4m3(codes: Tensor) -> Tensor:
    """E4M3 codes to bfloat16, exactly; by table lookup on a CPU, where the conversion is slow."""
    if codes.device.type == "cpu":
        return lookup(_e4m3_table(), codes.view(torch.uint8))
    return codes.to(torch.bfloat16)


@cache
def _e4m3_table() -> Tensor:
    return torch.arange(256, dtype=torch.uint8, device="cpu").view(torch.float8_e4m3fn).to(torch.bfloat16)


class FP8(Format):
    """E4M3; weights `(..., out, in)` with scales `(..., out, 1)`, activations `(..., in)` with scales `(..., 1)`."""

    bits = 8.0
    max = E4M3_MAX
    activations = "token"
    least_amax = 2.0**-9
    per_row = True
    scheme = Scheme(
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "channel"},
        {"num_bits": 8, "type": "float", "strategy": "token"},
    )

    @staticmethod
    def quantize(x: Tensor) -> Parts:
        scale = amax_scale(x.abs().amax(-1, keepdim=True), E4M3_MAX)
        return Parts(encode_e4m3(x, scale), scale)

    @staticmethod
    def dequantize(parts: Parts, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        return product(decode_e4m3(parts.values), parts.scale, dtype)

    quantize_activation = quantize


class FP8Tensor(FP8):
    """
    E4M3; weights `(out, in)` with one scale `(1,)`, weights `(experts, out, in)` with scales `(experts, 1)`,
    activations `(..., in)` with one scale `(1,)`.
    """

    activations = "tensor"
    scheme = Scheme(
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "tensor"},
        {"num_bits": 8, "type": "float", "strategy": "tensor"},
    )

    @staticmethod
    def quantize(x: Tensor) -> Parts:
        scale = amax_scale(matrix_amax(x), E4M3_MAX)
        return Parts(encode_e4m3(x, per_matrix(scale)), scale)

    @staticmethod
    def dequantize(parts: Parts, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        return product(decode_e4m3(parts.values), per_matrix(parts.scale), dtype)

    @staticmethod
    def quantize_activation(x: Tensor) -> Parts:
        scale = amax_scale(x.abs().amax().reshape(1), E4M3_MAX)
        return Parts(encode_e4m3(x, scale), scale)


class FP8Block(Format):
    """
    E4M3; weights `(..., out, in)` with scales `(..., ceil(out / 128), ceil(in / 128))`, activations `(..., in)` with
    scales `(..., ceil(in / 128))`.
    """

    bits = 8.0
    max = E4M3_MAX
    activations = "group"
    grouped = True
    least_amax = 1e-10
    scheme = Scheme(
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [BLOCK, BLOCK]},
        {"num_bits": 8, "type": "float", "strategy": "group", "group_size": BLOCK},
    )

    @staticmethod
    def quantize(x: Tensor) -> Parts:
        if x.ndim < 2:
            raise ValueError(f"x: shape {tuple(x.shape)}, but 'fp8_block' needs at least 2 dimensions for its blocks.")
        amax = group(x.abs(), BLOCK).amax(-1)  # (..., out, ceil(in / 128))
        amax = group(amax.transpose(-1, -2), BLOCK).amax(-1).transpose(-1, -2)
        scale = amax_scale(amax.contiguous(), E4M3_MAX)
        return Parts(encode_e4m3(x, FP8Block._expand(scale, x.shape)), scale)

    @staticmethod
    def dequantize(parts: Parts, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        values, scale = decode_e4m3(parts.values), parts.scale
        if scale.shape[:-1] == shape[:-1]:  # scales per row: activations, or a one-row weight (same layout)
            return ungroup(product(group(values, BLOCK), scale.unsqueeze(-1), dtype), shape[-1])
        return product(values, FP8Block._expand(scale, shape), dtype)

    @staticmethod
    def quantize_activation(x: Tensor) -> Parts:
        groups = group(x, BLOCK)
        scale = amax_scale(groups.abs().amax(-1, keepdim=True), E4M3_MAX)
        return Parts(ungroup(encode_e4m3(groups, scale), x.shape[-1]), scale.squeeze(-1))

    @staticmethod
    def _expand(scale: Tensor, shape: torch.Size) -> Tensor:
        """Block scales to one scale per value."""
        scale = scale.repeat_interleave(BLOCK, -2)[..., : shape[-2], :]
        return scale.repeat_interleave(BLOCK, -1)[..., : shape[-1]]
