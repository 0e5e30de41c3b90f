"""
What the kernels share: where they are launched, and conversions of a tile's numbers, for compiled kernels and Triton's
interpreter alike.
"""

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice


INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


def on(x: Tensor):
    """Makes the device of x current, since Triton launches there."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


@triton.jit
def wide(x):
    """Any of the three dtypes to float32; bfloat16 by its bits, since the interpreter would lose its subnormals."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """float32 to `dtype`, nearest even."""
    if dtype == tl.bfloat16 and INTERPRETED:  # the interpreter's conversion truncates
        bits = x.to(tl.int32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def to_e4m3(x):
    """float32 to E4M3, nearest even, saturating."""
    if INTERPRETED:  # the interpreter's conversion rounds small numbers wrongly
        x = tl.minimum(tl.maximum(x, -448.0), 448.0)
        bits = x.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
        subnormal = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) & 0xF  # steps of 2^-9
        code = tl.where(magnitude < 0x3C800000, subnormal, normal) | ((bits >> 24) & 0x80)  # 2^-6
        return code.to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    else:
        return x.to(tl.float8e4nv)  # cvt.rn.satfinite


@triton.jit
def silu(x):
    """`x / (1 + exp(-x))` of float32, with CUDA's own exponential, as torch and vLLM compute it."""
    if INTERPRETED:
        return x / (1.0 + tl.exp(-x))
    else:
        return tl.div_rn(x, 1.0 + libdevice.exp(-x))


@triton.jit
def _byte(x):
    return to_e4m3(x).to(tl.uint8, bitcast=True).to(tl.int32)


@triton.jit
def e4m3_word(a, b, c, d):
    """The codes of four float32 as the bytes of an int32, `a`'s the lowest."""
    if INTERPRETED:
        return _byte(a) | _byte(b) << 8 | _byte(c) << 16 | _byte(d) << 24
    else:  # two bytes at once, which Triton would make of two columns
        return tl.inline_asm_elementwise(
            """
            {
                .reg .b16 low, high;
                cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
                cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
                mov.b32 $0, {low, high};
            }
            """,
            "=r,f,f,f,f",
            [a, b, c, d],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def to_int8(x):
    """float32 to INT8 codes, nearest even, saturating: the low byte of a sum whose last bit is 1."""
    x = tl.minimum(tl.maximum(x, -128.0), 127.0)
    return (x + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)  # 1.5 * 2^23
