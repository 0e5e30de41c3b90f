"""
Kernels of the training flow in FP8 and INT8: what stands before and after its products. Each equals its twin in
`trl_quant.layers.products` bit for bit.

| kernel            | one program handles              | reads, writes                                             |
|-------------------|----------------------------------|-----------------------------------------------------------|
| `rows_kernel`     | some tokens                      | the input once; codes and a scale for each token          |
| `groups_kernel`   | 128 tokens x 128 features        | the input once; codes and scales, for both layouts if so  |
| `transpose_kernel`| 128 x 128 bytes                  | codes once                                                |
| `sums_kernel`     | 16 x 256 sums of an INT8 product | sums once; outputs                                        |
| `numbers_kernel`  | 16 x 256 codes                   | codes once; the numbers they stand for                    |

A division by a scale takes three instructions. With r = RN(1 / s) and q = RN(x r), within one step of x / s, the
remainder x - q s is exact in an FMA, and RN(q + r (x - q s)) is RN(x / s) (Markstein's theorem); x and s are far from
FP32's least numbers wherever a code is not 0.
"""

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from trl_quant.formats import QuantizedTensor
from trl_quant.formats.fp8 import BLOCK

from .arithmetic import INTERPRETED, rounded, to_e4m3, to_int8, wide


# Arithmetic


@triton.jit
def _divide(x, scale):
    """`x / scale`, rounded once; `scale` must broadcast to x."""
    if INTERPRETED:  # its FMA rounds twice
        return tl.div_rn(x, tl.broadcast_to(scale, x.shape))
    else:
        inverse = tl.broadcast_to(tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale), x.shape)
        scale = tl.broadcast_to(scale, x.shape)
        quotient = x * inverse
        return tl.fma(tl.fma(-quotient, scale, x), inverse, quotient)


@triton.jit
def _group_scale(amax, least):
    return tl.div_rn(tl.maximum(amax, least), tl.full(amax.shape, 448.0, tl.float32))


# Kernels


@triton.jit
def rows_kernel(
    x_ptr, values_ptr, scale_ptr, rows, cols, least_scale,
    INT8: tl.constexpr, ON_CUDA: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """ "fp8", "int8": one scale for each row of (rows, cols)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, COLS)[None, :]
    offset = row.to(tl.int64)[:, None] * cols + col
    mask = (row < rows)[:, None] & (col < cols)
    x = wide(tl.load(x_ptr + offset, mask=mask, other=0.0))
    amax = tl.max(tl.abs(x), axis=1)
    if INT8:
        limit = tl.full((ROWS,), 127.0, tl.float32)
        scale = tl.div_rn(amax, limit)
        some = tl.where(amax == 0, 1.0, amax)
        if ON_CUDA:
            inverse = tl.div_rn(limit, some)
        else:
            inverse = tl.div_rn(tl.full((ROWS,), 1.0, tl.float32), tl.where(amax == 0, 1.0, scale))
        inverse = tl.where(amax == 0, 0.0, inverse)
        codes = to_int8(x * inverse[:, None])
    else:
        scale = tl.maximum(tl.div_rn(amax, tl.full((ROWS,), 448.0, tl.float32)), least_scale)
        codes = to_e4m3(_divide(x, scale[:, None]))
    tl.store(values_ptr + offset, codes, mask=mask)
    tl.store(scale_ptr + row, scale, mask=row < rows)


@triton.jit
def groups_kernel(
    x_ptr, values_ptr, scale_ptr, values_t_ptr, scale_t_ptr, rows, cols, filled, least, BOTH: tl.constexpr
):
    """
    "fp8_block": one scale for each 128 values of a row of (rows, cols), scale (g, row) at g * rows + row. BOTH: also
    (cols, filled), with a scale for each 128 rows of a column, scale (g, col) at g * cols + col.
    """
    row = tl.program_id(1) * 128 + tl.arange(0, 128)
    col = tl.program_id(0) * 128 + tl.arange(0, 128)
    offset = row.to(tl.int64)[:, None] * cols + col[None, :]
    mask = (row < rows)[:, None] & (col < cols)[None, :]
    x = wide(tl.load(x_ptr + offset, mask=mask, other=0.0))
    scale = _group_scale(tl.max(tl.abs(x), axis=1), least)
    tl.store(values_ptr + offset, to_e4m3(_divide(x, scale[:, None])), mask=mask)
    tl.store(scale_ptr + tl.program_id(0).to(tl.int64) * rows + row, scale, mask=row < rows)
    if BOTH:
        scale = _group_scale(tl.max(tl.abs(x), axis=0), least)
        codes = tl.trans(to_e4m3(_divide(x, scale[None, :])))
        offset = col.to(tl.int64)[:, None] * filled + row[None, :]
        tl.store(values_t_ptr + offset, codes, mask=(col < cols)[:, None] & (row < filled)[None, :])
        tl.store(scale_t_ptr + tl.program_id(1).to(tl.int64) * cols + col, scale, mask=col < cols)


@triton.jit
def transpose_kernel(x_ptr, y_ptr, rows, cols):
    """(rows, cols) bytes to (cols, rows)."""
    row = tl.program_id(1) * 128 + tl.arange(0, 128)
    col = tl.program_id(0) * 128 + tl.arange(0, 128)
    mask = (row < rows)[:, None] & (col < cols)[None, :]
    x = tl.load(x_ptr + row.to(tl.int64)[:, None] * cols + col[None, :], mask=mask, other=0)
    offset = col.to(tl.int64)[:, None] * rows + row[None, :]
    tl.store(y_ptr + offset, tl.trans(x), mask=(col < cols)[:, None] & (row < rows)[None, :])


@triton.jit
def _outputs(sums, x_scale_ptr, w_scale_ptr, bias_ptr, row, col, rows, cols):
    """`fma(s_x, s_w sum, b)` for sums of some rows and columns of (rows, cols)."""
    y = sums.to(tl.float32) * tl.load(w_scale_ptr + col, mask=col < cols, other=0.0)[None, :]
    x_scale = tl.load(x_scale_ptr + row, mask=row < rows, other=0.0)[:, None]
    if bias_ptr is None:
        return y * x_scale
    else:
        bias = wide(tl.load(bias_ptr + col, mask=col < cols, other=0.0))[None, :]
        if INTERPRETED:  # its FMA rounds twice
            return (y.to(tl.float64) * x_scale.to(tl.float64) + bias.to(tl.float64)).to(tl.float32)
        else:
            return tl.fma(y, tl.broadcast_to(x_scale, y.shape), tl.broadcast_to(bias, y.shape))


@triton.jit
def sums_kernel(
    sums_ptr, y_ptr, x_scale_ptr, w_scale_ptr, bias_ptr, rows, cols, ROWS: tl.constexpr, COLS: tl.constexpr
):
    """`fma(s_x, s_w sum, b)` for each sum of (rows, cols)."""
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    mask = (row < rows)[:, None] & (col < cols)[None, :]
    offset = row.to(tl.int64)[:, None] * cols + col[None, :]
    sums = tl.load(sums_ptr + offset, mask=mask, other=0)
    y = _outputs(sums, x_scale_ptr, w_scale_ptr, bias_ptr, row, col, rows, cols)
    tl.store(y_ptr + offset, rounded(y, y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def numbers_kernel(
    values_ptr, scale_ptr, y_ptr, rows, cols, INT8: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):
    """Codes (rows, cols), as bytes, times the scale of their row."""
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)[None, :]
    mask = (row < rows)[:, None] & (col < cols)
    offset = row.to(tl.int64)[:, None] * cols + col
    codes = tl.load(values_ptr + offset, mask=mask, other=0)
    if INT8:
        y = codes.to(tl.int8, bitcast=True).to(tl.float32)
    else:  # a magnitude's bits, where FP32 has the end of its exponent and its mantissa, are the number times 2^-120
        bits = codes.to(tl.int32)
        y = (((bits & 0x7F) << 20) | ((bits & 0x80) << 24)).to(tl.float32, bitcast=True) * 2.0**120
        y = tl.where((bits & 0x7F) == 0x7F, float("nan"), y)
    scale = tl.load(scale_ptr + row, mask=row < rows, other=0.0)[:, None]
    tl.store(y_ptr + offset, rounded(y * scale, y_ptr.dtype.element_ty), mask=mask)


# Launches


def _on(x: Tensor):
    """Makes the device of x current, since Triton launches there."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def quantize_rows(x: Tensor, format: str, least_scale: float, on_cuda: bool) -> QuantizedTensor:
    """`products.quantize_int8(x, on_cuda)`, or `products.quantize_fp8(x)` where `least_scale` is its least scale."""
    (rows, cols), int8 = x.shape, format == "int8"
    x = x.contiguous()
    values = torch.empty_like(x, dtype=torch.int8 if int8 else torch.float8_e4m3fn)
    scale = x.new_empty(rows, 1, dtype=torch.float32)
    width = max(triton.next_power_of_2(cols), 16)
    height = max(4096 // width, 1)
    with _on(x):
        rows_kernel[(triton.cdiv(rows, height),)](
            x, values, scale, rows, cols, least_scale,
            INT8=int8, ON_CUDA=on_cuda, ROWS=height, COLS=width, num_warps=4 if width <= 4096 else 8,
        )  # fmt: skip
    return QuantizedTensor(format, values, scale, x.shape, x.dtype)


def _groups(x: Tensor, least: float, both: bool) -> list[QuantizedTensor]:
    x = x.contiguous()
    rows, cols = x.shape
    filled = triton.cdiv(rows, BLOCK) * BLOCK
    values = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    scale = x.new_empty(triton.cdiv(cols, BLOCK), rows, dtype=torch.float32)
    result = [QuantizedTensor("fp8_block", values, scale.t(), x.shape, x.dtype)]
    values_t = scale_t = None
    if both:
        values_t = torch.empty(cols, filled, dtype=torch.float8_e4m3fn, device=x.device)
        scale_t = x.new_empty(filled // BLOCK, cols, dtype=torch.float32)
        result.append(QuantizedTensor("fp8_block", values_t, scale_t.t(), values_t.shape, x.dtype))
    with _on(x):
        groups_kernel[(triton.cdiv(cols, BLOCK), filled // BLOCK)](
            x, values, scale, values_t, scale_t, rows, cols, filled, least, BOTH=both, num_warps=8
        )
    return result


def quantize_groups(x: Tensor, least: float) -> QuantizedTensor:
    """`products.quantize_groups(x, least)`, with scales by column: those of a group next to each other."""
    return _groups(x, least, both=False)[0]


def quantize_groups_for_both(x: Tensor, least: float) -> tuple[QuantizedTensor, QuantizedTensor]:
    """`products.quantize_groups_for_both(x, least)`, with scales by column."""
    return tuple(_groups(x, least, both=True))


def transpose(codes: Tensor) -> Tensor:
    """`codes.t().contiguous()` of a matrix of bytes."""
    rows, cols = codes.shape
    y = codes.new_empty(cols, rows)
    with _on(codes):
        transpose_kernel[(triton.cdiv(cols, 128), triton.cdiv(rows, 128))](
            codes.contiguous().view(torch.uint8), y.view(torch.uint8), rows, cols, num_warps=8
        )
    return y


def scale_sums(sums: Tensor, x_scale: Tensor, w_scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`products.scale_sums`, of sums in INT32."""
    sums = sums.contiguous()
    rows, cols = sums.shape
    y = sums.new_empty(rows, cols, dtype=dtype)
    with _on(sums):
        sums_kernel[(triton.cdiv(cols, 256), triton.cdiv(rows, 16))](
            sums, y, x_scale, w_scale.float(), bias, rows, cols, ROWS=16, COLS=256
        )
    return y


def dequantize_rows(q: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """`q.dequantize(dtype)` of a matrix in "fp8" or "int8"."""
    rows, cols = q.shape
    y = q.values.new_empty(rows, cols, dtype=dtype)
    if y.numel():
        with _on(y):
            numbers_kernel[(triton.cdiv(cols, 256), triton.cdiv(rows, 16))](
                q.values.contiguous().view(torch.uint8), q.scale.float().contiguous(), y, rows, cols,
                INT8=q.format == "int8", ROWS=16, COLS=256,
            )  # fmt: skip
    return y
