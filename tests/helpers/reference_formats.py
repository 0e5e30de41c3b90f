"""
The number formats again, as slow scalar loops over Python floats: an independent reference for shapes and inputs that
compressed-tensors rejects, and a second opinion on those it accepts.

Every number here is a float64, and `to` rounds it to a 16- or 32-bit dtype. Rounding a quotient or product of two such
numbers to float64 and then to their dtype equals rounding once: float64 has more than twice their bits.

Also holds the inputs for all tests of formats and kernels.
"""

import math
from itertools import pairwise

import torch
from torch import Tensor


DTYPES = [torch.bfloat16, torch.float16, torch.float32]
EPS = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2.0**-23}
PRECISION = {torch.bfloat16: (8, -133), torch.float16: (11, -24), torch.float32: (24, -149)}  # bits, lowest exponent
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
# E4M3: exponent bias 7, subnormals at exponent field 0, S.1111.111 is NaN
E4M3 = [(m / 8 if e == 0 else 1 + m / 8) * 2.0 ** (max(e, 1) - 7) for e in range(16) for m in range(8)][:-1]
# Lowest and highest code. The scale takes the largest value of a block half a step beyond the highest code.
INTEGERS = {"int8": (-128, 127), "int4": (-8, 7)}
# Half the widest grid step over the largest grid value: the largest error in a block over the block's largest value.
# More for MXFP4, where the power of two may be 4/3 of the ideal or saturate 7 to 6, and integers, which clamp half a
# step.
ERROR = {
    "fp8": 16 / 448,
    "fp8_tensor": 16 / 448,
    "fp8_block": 16 / 448,
    "nvfp4": 1 / 6,
    "mxfp4": 1 / 4,
    "nf4": (1 - 0.6961928) / 2,
    **{name: 0.5 / (high + 0.5) for name, (_, high) in INTEGERS.items()},
}


def to(value: float, dtype: torch.dtype) -> float:
    """`value` rounded to `dtype`, nearest, ties to even; infinity beyond its range."""
    if value == 0 or not math.isfinite(value):
        return value
    digits, last = PRECISION[dtype]
    step = 2.0 ** max(math.frexp(value)[1] - digits, last)
    value = round(value / step) * step  # both exact; Python's round is to nearest even
    return value if abs(value) <= torch.finfo(dtype).max else math.copysign(math.inf, value)


def nearest(value: float, grid: list[float]) -> int:
    """Index of the grid point nearest to `value >= 0`; ties go to the even index."""
    return min(range(len(grid)), key=lambda i: (abs(grid[i] - value), i % 2))


def round_int(value: float, low: int, high: int) -> int:
    return round(min(max(value, low), high))


def blocks(matrix: list[list[float]], height: int, width: int):
    """Blocks of a matrix in row order, as lists of (row, column); edge blocks are smaller."""
    rows, cols = len(matrix), len(matrix[0])
    for top in range(0, rows, height):
        for left in range(0, cols, width):
            yield [(r, c) for r in range(top, min(top + height, rows)) for c in range(left, min(left + width, cols))]


def slow_quantize(x: torch.Tensor, name: str, activation: bool = False) -> tuple[list, list, list, float | None]:
    """
    Quantizes a matrix. Returns codes (one per value, row by row; E4M3 and E2M1 as index with the sign in the top bit),
    scales (one number per block), dequantized values, and the global scale.
    """
    dtype, matrix = x.dtype, x.double().tolist()
    rows, cols = x.shape
    largest = max(abs(v) for row in matrix for v in row)
    height, width = {
        "fp8": (1, cols),
        "fp8_tensor": (rows, cols),
        "fp8_block": (1, 128) if activation else (128, 128),
        "int8": (1, cols),
        "int4": (1, 128),
        "nvfp4": (1, 16),
        "mxfp4": (1, 32),
    }[name]
    g = None
    if name == "nvfp4":
        g = to(to(1 / max(largest, torch.finfo(dtype).tiny), dtype) * 2688, dtype)
        g = g if math.isfinite(g) else 1.0

    codes = [[0] * cols for _ in range(rows)]
    values = [[0.0] * cols for _ in range(rows)]
    scales = []
    for block in blocks(matrix, height, width):
        amax = max(abs(matrix[r][c]) for r, c in block)
        if name == "nvfp4":
            index = nearest(min(to(g * to(amax / 6, dtype), torch.float32), 448.0), E4M3)
            scale = E4M3[index] or 0.125
            step, work = to(scale / g, torch.float32), torch.float32
        elif name == "mxfp4":
            scale = step = mx_scale(amax, dtype)
            work = dtype
        else:
            widest = INTEGERS[name][1] + 0.5 if name in INTEGERS else 448.0
            scale = to(amax / widest, dtype) or EPS[dtype]
            step, work = scale, dtype
        scales.append(scale)
        for r, c in block:
            v = to(matrix[r][c] / step, work)
            if name in INTEGERS:
                code = number = round_int(v, *INTEGERS[name])
            else:
                grid, top = (E2M1, 8) if name in ("nvfp4", "mxfp4") else (E4M3, 128)
                index = nearest(min(abs(v), grid[-1]), grid)
                code, number = index + top * (v < 0), math.copysign(grid[index], v)
            codes[r][c], values[r][c] = code, to(to(number * step, torch.float32), dtype)
    return codes, scales, values, g


def mx_scale(amax: float, dtype: torch.dtype) -> float:
    """OCP MX, with a maximum of 1.75 * 2^k or more counted as 2^(k+1)."""
    if dtype == torch.float16 and amax < 0.75 * 2.0**-14:
        return 1.0
    if amax == 0:
        return 2.0**-127
    fraction, exponent = math.frexp(amax)  # amax = fraction * 2^exponent with 0.5 <= fraction < 1
    k = exponent - 1 + (fraction >= 0.875)
    k = min(max(k, -14), 15) if dtype == torch.float16 else min(k, 127)
    return 2.0 ** max(k - 2, -127)


def slow_nf4(x: torch.Tensor, grid: list[float]) -> tuple[list, list, list, None]:
    """QLoRA appendix E. bitsandbytes multiplies full blocks by a float32 reciprocal and divides a short last block."""
    flat = x.double().flatten().tolist()
    f32 = torch.float32
    middles = [to((a + b) / 2, f32) for a, b in pairwise(grid)]
    codes, scales, values = [], [], []
    for start in range(0, len(flat), 64):
        block = flat[start : start + 64]
        scale = max(abs(v) for v in block)
        safe = max(scale, to(1e-38, f32))
        if len(block) < 64:
            scale = safe
        for v in block:
            unit = to(v * to(1 / safe, f32), f32) if len(block) == 64 else to(v / safe, f32)
            code = sum(m < min(max(unit, -1.0), 1.0) for m in middles)
            codes.append(code)
            values.append(to(to(grid[code] * scale, f32), x.dtype))
        scales.append(scale)
    return codes, scales, values, None


def nf4_grid() -> list[float]:
    """
    QLoRA eq. 4: quantiles of N(0, 1) at 8 evenly spaced probabilities on the positive side and 7 on the negative side,
    from the offset 0.9677083 of their released code to 1/2, plus 0; divided by the largest.
    """
    offset = 0.9677083

    def quantile(p: float) -> float:
        return math.sqrt(2) * torch.special.erfinv(torch.tensor(2 * p - 1, dtype=torch.float64)).item()

    positive = [quantile(offset + (0.5 - offset) * i / 8) for i in range(8)]
    negative = [-quantile(offset + (0.5 - offset) * i / 7) for i in range(7)]
    top = max(positive)
    return [v / top for v in sorted([*positive, 0.0, *negative])]


def make(kind: str, dtype: torch.dtype, shape: tuple[int, ...] = (256, 256), seed: int = 0) -> Tensor:
    """Inputs that break careless quantizers."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    tiny = torch.finfo(dtype).tiny
    match kind:
        case "random":
            pass
        case "large":  # up to a quarter of the largest finite number
            x *= torch.finfo(dtype).max / 4 / x.abs().max()
        case "small":  # normal numbers whose scales are subnormal
            x *= tiny * 100
        case "subnormal":
            x *= tiny / 8
        case "zero":
            x *= 0
        case "zero rows":
            x[..., ::3, :] = 0
            x[..., : shape[-1] // 2] *= torch.arange(shape[-2]).remainder(2)[:, None]
        case "negative zero":
            x = torch.where(x > 0, -0.0, x)
        case "outlier":
            x *= 1e-3
            x.view(-1)[x.numel() // 3] = 1000.0
        case "ties":  # multiples of a quarter hit midpoints of the grid if the scale is a power of two
            x = (x * 8).round() / 4
            x[..., 0] = 8
        case "near ties":  # an ulp or two off the midpoints, where a division shortcut shows
            row = 1 + torch.rand((*shape[:-1], 1), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            x = make("ties", torch.float32, shape, seed).double() * row
            x *= 1 + torch.finfo(dtype).eps * torch.arange(x.numel()).view(shape).remainder(5).sub(2)
        case "border":  # around the smallest normal number
            x *= tiny / 3
        case "underflow":  # next to a large number these underflow when divided by the scale
            x = torch.where(torch.arange(shape[-1]) % 16 == 5, 1000.0, x * tiny / 8)
        case "wide":  # magnitudes over the whole range of the format
            x *= 2.0 ** torch.linspace(-12, 4, x.numel(), dtype=torch.float64).view(shape)
        case _:
            raise KeyError(kind)
    return x.to(dtype)


KINDS = ["random", "ties", "near ties", "wide", "outlier", "zero", "zero rows", "negative zero"]
KINDS += ["large", "small", "border", "subnormal", "underflow"]  # the ends of the dtype's range


def bits(x: Tensor) -> Tensor:
    """Bytes of a tensor, so that 0 and -0 differ and NaN equals NaN."""
    return x.contiguous().view(torch.uint8)
