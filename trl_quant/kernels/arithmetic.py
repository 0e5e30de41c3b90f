"""
Helpers of the kernels: they choose the device of a launch and convert a tile's values. They work in compiled kernels
and in Triton's interpreter.
"""

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice


INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


def on(x: Tensor):
    """Context in which the device of x is current, because Triton launches on the current device."""
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(x.device)


@triton.jit
def wide(x):
    """Converts any of the three dtypes to float32; bfloat16 by its bits, as the interpreter loses its subnormals."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """Converts float32 to `dtype`, to nearest even."""
    if dtype == tl.bfloat16 and INTERPRETED:  # the interpreter's conversion truncates
        bits = x.to(tl.int32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def to_e4m3(x):
    """Converts float32 to E4M3, to nearest even, saturating."""
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
    """Packs the E4M3 codes of four float32 into an int32, that of `a` in the lowest byte."""
    if INTERPRETED:
        return _byte(a) | _byte(b) << 8 | _byte(c) << 16 | _byte(d) << 24
    else:  # converts two values at once, which Triton does only for adjacent columns
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
    """Converts float32 to INT8, to nearest even, saturating: the low byte of a sum whose last bit stands for 1."""
    x = tl.minimum(tl.maximum(x, -128.0), 127.0)
    return (x + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)  # 1.5 * 2^23
