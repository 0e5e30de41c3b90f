"""
The parts that several formats share: the base class, grouping, zero scales, scales of a matrix, the E2M1 grid, nibble
packing.

Rounding rules in every file of this folder (compressed-tensors', bit for bit):

- A scale is computed in the tensor's own dtype: bfloat16 for a bfloat16 tensor, float32 for `x.float()`.
- `x / scale` is rounded to the dtype of that division, then clamped, then rounded to the grid. Both roundings matter in
  bfloat16: its 8 significant bits leave steps of 0.5 between 64 and 128.
- Round to nearest, ties to even.
- `-0.0` becomes `+0.0`, as if a zero point of 0 were added.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Parts(NamedTuple):
    """The stored form of a tensor: codes, their scales, and NVFP4's second scale."""

    values: Tensor
    scale: Tensor
    global_scale: Tensor | None = None


class Scheme(NamedTuple):
    """
    A format as compressed-tensors describes it in a checkpoint's `quantization_config`.

    Attributes:
        compressor (`str`): compressed-tensors' name for the tensor layout.
        weights (`dict`): `QuantizationArgs` fields that differ from their defaults.
        inputs (`dict` or `None`): The same for layer inputs, with dynamic scales; `None` if inputs are not quantized.
    """

    compressor: str
    weights: dict
    inputs: dict | None = None


class Format:
    """
    A number format: converts a tensor to codes and scales, and back. It has no state and is never instantiated.

    Attributes:
        bits (`float`): Stored bits per value, scales included, for a large bfloat16 weight.
        max (`float`): Largest magnitude on the grid.
        activations (`str` or `None`): The part of a layer input that shares a scale; `None` if inputs stay in 16 bits.
        grouped (`bool`): Whether a layer input has a scale for each group of values, not one for a token or tensor.
        least_amax (`float`):
            Smallest maximum of the values that share a scale, in a layer input that vLLM's kernels quantize.
        integers (`bool`): Whether codes are integers.
        table (`tuple[float, ...]` or `None`): The values of the codes 0, 1, ... where no formula gives them.
        bitsandbytes (`bool`):
            Whether bitsandbytes holds a frozen base in this format. It quantizes the base as the model loads.
        nibbles (`bool`): Whether each stored byte holds two codes of four bits.
        group (`int`): Inputs per scale if checkpoints store whole groups only; else 1.
        per_row (`bool`): Whether each row has one scale, so that codes can be multiplied first and scaled afterwards.
        shares_scale (`bool`): Whether `quantize` takes a global scale; layers that an engine fuses must share it.
        scheme ([`Scheme`] or `None`): Its layout in compressed-tensors; `None` if there is none.
    """

    bits: float
    max: float
    activations: str | None = None
    grouped: bool = False
    least_amax: float = 0.0
    integers: bool = False
    table: tuple[float, ...] | None = None
    bitsandbytes: bool = False
    nibbles: bool = False
    group: int = 1
    per_row: bool = False
    shares_scale: bool = False
    scheme: Scheme | None = None

    @staticmethod
    def quantize(x: Tensor) -> Parts:
        """Converts a weight of shape `(..., out, in)` to codes and scales."""
        raise NotImplementedError

    @staticmethod
    def dequantize(parts: Parts, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Converts codes and scales to values: code times scale, rounded once to `dtype`."""
        raise NotImplementedError

    @staticmethod
    def quantize_activation(x: Tensor) -> Parts:
        """Converts a layer input of shape `(..., in)` to codes and scales."""
        raise NotImplementedError

    @classmethod
    def codes(cls, values: Tensor) -> Tensor:
        """Converts stored values to codes, one in each byte. A format with another packing overrides this."""
        return unpack_nibbles(values) if cls.nibbles else values.view(torch.uint8)

    @staticmethod
    def stored(parts: Parts, shape: torch.Size) -> dict[str, Tensor]:
        """Returns suffix -> tensor, as compressed-tensors stores a weight of `shape` (out, in) below its name."""
        return {"": parts.values, "_scale": parts.scale}


def quotient(x: Tensor, divisor: float) -> Tensor:
    """`x / divisor`, rounded once on every device: on CUDA, torch multiplies by the reciprocal of a Python number."""
    return x / (torch.full((), divisor, dtype=x.dtype, device=x.device) if x.is_cuda else divisor)


def amax_scale(amax: Tensor, largest: float) -> Tensor:
    """`amax / largest` in amax's dtype; the dtype's eps where that is 0, to avoid division by 0."""
    scale = quotient(amax, largest)
    return scale.masked_fill_(scale == 0, torch.finfo(scale.dtype).eps)


def matrix_amax(x: Tensor) -> Tensor:
    """The largest magnitude of each matrix of a weight: (1,) for (out, in), (experts, 1) for (experts, out, in)."""
    return x.reshape(*x.shape[:-2], -1).abs().amax(-1, keepdim=True)


def per_matrix(scale: Tensor) -> Tensor:
    """One scale per matrix, (experts, 1), as (experts, 1, 1), which acts on (experts, out, in); (1,) as it is."""
    return scale.unsqueeze(-1) if scale.ndim > 1 else scale


def scaled(x: Tensor, scale: Tensor) -> Tensor:
    """`x / scale` with `-0.0` turned into `+0.0` (see the rounding rules above)."""
    return (x / scale).add_(0.0)


def group(x: Tensor, size: int) -> Tensor:
    """`(..., n)` to `(..., ceil(n / size), size)`; a partial last group is padded with zeros."""
    pad = -x.shape[-1] % size
    if pad:
        x = torch.nn.functional.pad(x, (0, pad))
    return x.unflatten(-1, (-1, size))


def ungroup(x: Tensor, n: int) -> Tensor:
    """Inverse of [`group`]: `(..., groups, size)` to `(..., n)`."""
    return x.flatten(-2)[..., :n]


def lookup(table: Tensor, codes: Tensor) -> Tensor:
    """`table[codes]`; several times faster than indexing on a CPU."""
    return table.index_select(0, codes.flatten().int()).view(codes.shape)


def product(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """
    `values * scale` rounded once to `dtype`. A code has at most 8 significant bits and a 16-bit scale at most 11, so
    their product is exact in float32; multiplying in 16 bits rounds that product once and gives the same bits at less
    cost.
    """
    wide = torch.promote_types(scale.dtype, dtype)
    return (values.to(wide) * scale.to(wide)).to(dtype)


# E2M1 (OCP MX specification v1.0, section 5.3.3): sign, two exponent bits, one mantissa bit. Code = sign * 8 + index.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def encode_e2m1(x: Tensor) -> Tensor:
    """
    float32 to E2M1 codes `0..15` (uint8), nearest, ties to the even code, saturating at 6. A negative number that
    rounds to 0 keeps its sign: code 8, which is -0.

    The grid has steps of 0.5 up to 2, of 1 up to 4, of 2 up to 6, so the index is the minimum of three lines.
    """
    v = x.abs().clamp_(max=E2M1[-1])
    index = torch.minimum((v * 2).round_(), v.round().add_(2))
    index = torch.minimum(index, v.div_(2).round_().add_(4)).to(torch.uint8)
    return index.bitwise_or_((x < 0).view(torch.uint8) << 3)


def decode_e2m1(codes: Tensor) -> Tensor:
    """E2M1 codes (uint8) to float32."""
    table = torch.tensor([*E2M1, *(-v for v in E2M1)], dtype=torch.float32, device=codes.device)
    return lookup(table, codes)


def pack_nibbles(codes: Tensor) -> Tensor:
    """Codes `0..15` of shape `(..., 2n)` to bytes `(..., n)`; the first of each pair goes to the low four bits."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Inverse of [`pack_nibbles`]."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)
