"""
Dequantizes a weight in Marlin's layout, in Triton, bit-equal to `layers.marlin.dequantized`.

A program reads tiles of 16 inputs by 64 outputs. It loads all words of a tile at once, shifts eight codes out of each,
and writes the tile with its 64 outputs in adjacent columns. One permutation of axes turns the bits of a word's index,
and of a code's index in the word, into those of input and output.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .arithmetic import INTERPRETED, on, rounded


TILES = 4  # tiles of a program, one below the other


@triton.jit
def dequantize_tiles_kernel(
    y_ptr, values_ptr, scale_ptr, rows, outputs, value_stride, scale_stride,
    GROUP: tl.constexpr, E8M0: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0)  # of tiles
    tile = tl.program_id(1) * TILES + tl.arange(0, TILES)
    inside = (tile < rows)[:, None]
    row = tile.to(tl.int64)[:, None]
    word = tl.load(values_ptr + row * value_stride + column * 128 + tl.arange(0, 128)[None, :], mask=inside, other=0)
    code = (word[:, :, None] >> (4 * tl.arange(0, 8))[None, None, :]) & 0xF
    code = tl.reshape(code, (TILES, 8, 4, 4, 2, 2, 2))  # tile, c, l, j, z, b, h
    code = tl.reshape(tl.permute(code, (0, 6, 2, 4, 3, 5, 1)), (TILES, 16, 64))  # tile, h, l, z, j, b, c
    number = (((code & 7) << 22) | ((code & 8) << 28)).to(tl.float32, bitcast=True) * 2.0**126

    n = tl.arange(0, 64)
    place = (n & 7) * 8 + (n >> 5) * 4 + ((n >> 3) & 1) * 2 + ((n >> 4) & 1)
    scale_row = row * 16 // GROUP
    stored = tl.load(scale_ptr + scale_row * scale_stride + column * 64 + place[None, :], mask=inside, other=0)
    bits = stored.to(tl.int32)
    if E8M0:
        scale = tl.where(bits == 0, 1 << 22, bits << 23).to(tl.float32, bitcast=True)
    else:  # 128 scale, with five bits of exponent (bias 15) and three of mantissa
        scale = (bits << 20).to(tl.float32, bitcast=True) * 2.0**112 * 2.0**-7
    number = tl.reshape(number * scale[:, None, :], (TILES * 16, 64))

    k = (tl.program_id(1) * TILES * 16 + tl.arange(0, TILES * 16)).to(tl.int64)[:, None]
    y = rounded(number, y_ptr.dtype.element_ty)
    tl.store(y_ptr + k * outputs + column * 64 + n[None, :], y, mask=k < rows * 16)


def dequantized(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """
    Returns code times scale, (in, out); see `layers.marlin.dequantized`.

    Args:
        values (`torch.Tensor`): (in / 16, 2 out) int32; rows may be strided.
        scale (`torch.Tensor`): (in / group, out), likewise.
        dtype (`torch.dtype`): Type of the result.

    Raises:
        ValueError: On a CPU.
    """
    if not values.is_cuda and not INTERPRETED:
        raise ValueError(
            f"values: on {values.device}, but a kernel needs a CUDA device. Use `layers.marlin.dequantized`."
        )
    (rows, words), e8m0 = values.shape, scale.dtype == torch.float8_e8m0fnu
    outputs = words // 2
    y = torch.empty(rows * 16, outputs, dtype=dtype, device=values.device)
    grid = (outputs // 64, triton.cdiv(rows, TILES))
    with on(values):
        dequantize_tiles_kernel[grid](
            y, values, scale.view(torch.uint8), rows, outputs, values.stride(0), scale.stride(0),
            GROUP=rows * 16 // len(scale), E8M0=e8m0, TILES=TILES,
        )  # fmt: skip
    return y
