"""
Kernels for training in FP8 and INT8, which run before and after the products. Each gives the same bits as its twin in
`trl_quant.layers.products`.

| kernel            | one program handles              | reads, writes                                             |
|-------------------|----------------------------------|-----------------------------------------------------------|
| `rows_kernel`     | some tokens                      | the input once; codes and a scale for each token          |
| `long_rows_kernel`| a token with many features       | the input once, then from the cache; the same             |
| `groups_kernel`   | 128 tokens x 128 features        | the input once; codes and scales in one or both layouts   |
| `gradient_kernel` | 2048 values                      | dY, gate and up once; their gradients                     |
| `transpose_kernel`| 128 x 128 bytes of a matrix      | codes once                                                |
| `sums_kernel`     | 16 x 256 sums of an INT8 product | sums once; outputs                                        |
| `numbers_kernel`  | 16 x 256 codes of a matrix       | codes once; dequantized values                            |

The input of the first three may be silu(gate) up. They then read gate and up once, and write the input as well. Inputs
may be some columns of a wider matrix: their rows are `stride` values apart.

A division by a scale takes three instructions. With r = RN(1 / s) and q = RN(x r), within one step of x / s, the
remainder x - q s is exact in an FMA, and RN(q + r (x - q s)) is RN(x / s) (Markstein's theorem); x and s are far from
FP32's smallest values wherever a code is not 0. `INVERTS` leaves the last two out: the code is then that of q.
"""

from math import prod

import torch
import triton
import triton.language as tl
from torch import Tensor

from trl_quant.formats import FORMATS, QuantizedTensor
from trl_quant.formats.fp8 import BLOCK

from .arithmetic import INTERPRETED, e4m3_word, on, rounded, silu, to_e4m3, to_int8, wide


LONGEST_IN_ONE_PASS = 4096  # largest number of features of a token for `rows_kernel`
# Settings of `groups_kernel`, with `up` and without: the fastest on an H200 by benchmarks/unified.py
LAUNCH = {True: {"num_warps": 16, "maxnreg": 64}, False: {"num_warps": 4}}


# Arithmetic


@triton.jit
def _divide(x, scale):
    """Computes `x / scale`, rounded once. `scale` must broadcast to x."""
    if INTERPRETED:  # its FMA rounds twice
        return tl.div_rn(x, tl.broadcast_to(scale, x.shape))
    else:
        inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
        return _times_inverse(x, scale, inverse)


@triton.jit
def _scaled(x, scale, INVERTS: tl.constexpr):
    """Computes `x / scale` or, if it INVERTS, `x * (1 / scale)`, rounded twice. `scale` must broadcast to x."""
    if INVERTS:
        return x * tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    else:
        return _divide(x, scale)


@triton.jit
def _times_inverse(x, scale, inverse):
    """Computes `x / scale`, rounded once, from the rounded `1 / scale`. Both must broadcast to x."""
    scale, inverse = tl.broadcast_to(scale, x.shape), tl.broadcast_to(inverse, x.shape)
    quotient = x * inverse
    # A zero keeps its sign
    return tl.where(x == 0, x, tl.fma(tl.fma(-quotient, scale, x), inverse, quotient))


@triton.jit
def _group_scale(amax, least):
    limit = tl.full(amax.shape, 448.0, tl.float32)
    if INTERPRETED:
        return tl.div_rn(tl.maximum(amax, least), limit)
    else:
        return _times_inverse(tl.maximum(amax, least), limit, tl.full(amax.shape, 1 / 448.0, tl.float32))


@triton.jit
def _row_scale(amax, least, INT8: tl.constexpr, ON_CUDA: tl.constexpr):
    """Returns the scale of each row, from a maximum of at least `least`, and the number that [`_codes`] takes."""
    if INT8:
        limit = tl.full(amax.shape, 127.0, tl.float32)
        scale = tl.div_rn(amax, limit)
        some = tl.where(amax == 0, 1.0, amax)
        if ON_CUDA:
            inverse = tl.div_rn(limit, some)
        else:
            inverse = tl.div_rn(tl.full(amax.shape, 1.0, tl.float32), tl.where(amax == 0, 1.0, scale))
        return scale, tl.where(amax == 0, 0.0, inverse)
    else:
        scale = tl.div_rn(tl.maximum(amax, least), tl.full(amax.shape, 448.0, tl.float32))
        return scale, scale


@triton.jit
def _codes(x, by, INT8: tl.constexpr):
    """Quantizes float32 (rows, columns) with the second result of [`_row_scale`]."""
    if INT8:
        return to_int8(x * by[:, None])
    else:
        return to_e4m3(_divide(x, by[:, None]))


@triton.jit
def row_codes(x, least, INT8: tl.constexpr, ON_CUDA: tl.constexpr):
    """Quantizes float32 (rows, columns). Returns codes and a scale for each row, from a maximum of at least `least`."""
    scale, by = _row_scale(tl.max(tl.abs(x), axis=1), least, INT8, ON_CUDA)
    return _codes(x, by, INT8), scale


@triton.jit
def group_codes(x, least, INVERTS: tl.constexpr):
    """Quantizes float32 (groups, 128). Returns codes and the scale of each group."""
    scale = _group_scale(tl.max(tl.abs(x), axis=1), least)
    return to_e4m3(_scaled(x, scale[:, None], INVERTS)), scale


@triton.jit
def _factor(factor_ptr, owner_ptr, row, rows, col, cols):
    """Loads the factors of some columns: of all rows (columns,), or of the expert that owns each row."""
    if owner_ptr is None:
        return tl.load(factor_ptr + col, mask=col < cols, other=0.0)
    else:
        owner = tl.load(owner_ptr + row, mask=row < rows, other=0).to(tl.int64)[:, None]
        return tl.load(factor_ptr + owner * cols + col, mask=(row < rows)[:, None] & (col < cols), other=0.0)


# Kernels


@triton.jit
def rows_kernel(
    x_ptr, up_ptr, y_ptr, factor_ptr, owner_ptr, values_ptr, scale_ptr, rows, cols, stride, least,
    INT8: tl.constexpr, ON_CUDA: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """
    "fp8", "int8": one scale for each row of (rows, cols), whose columns are multiplied by `factor` first. With `owner`,
    the number of an expert for each row, `factor` has a row for each expert.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, COLS)[None, :]
    mask = (row < rows)[:, None] & (col < cols)
    x = _input(x_ptr, up_ptr, y_ptr, row.to(tl.int64)[:, None], col, cols, stride, mask)
    if factor_ptr is not None:
        x = x * _factor(factor_ptr, owner_ptr, row, rows, col, cols)
    codes, scale = row_codes(x, least, INT8, ON_CUDA)
    tl.store(values_ptr + row.to(tl.int64)[:, None] * cols + col, codes, mask=mask)
    tl.store(scale_ptr + row, scale, mask=row < rows)


@triton.jit
def long_rows_kernel(
    x_ptr, up_ptr, y_ptr, factor_ptr, owner_ptr, values_ptr, scale_ptr, rows, cols, stride, least,
    INT8: tl.constexpr, ON_CUDA: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """As `rows_kernel`, for one row, in parts of COLS columns: first its maximum, then its codes."""
    row = tl.program_id(0).to(tl.int64) + tl.zeros((1, 1), tl.int64)
    largest = tl.zeros((1, COLS), tl.float32)
    for start in range(0, cols, COLS):
        col = start + tl.arange(0, COLS)[None, :]
        x = _input(x_ptr, up_ptr, y_ptr, row, col, cols, stride, col < cols)
        if factor_ptr is not None:
            x = x * _factor(factor_ptr, owner_ptr, tl.program_id(0) + tl.arange(0, 1), rows, col, cols)
        largest = tl.maximum(largest, tl.abs(x))
    scale, by = _row_scale(tl.max(largest, axis=1), least, INT8, ON_CUDA)
    tl.store(scale_ptr + tl.program_id(0) + tl.arange(0, 1), scale)
    if up_ptr is not None:
        tl.debug_barrier()  # other threads may have written the part of y that a thread reads
    for start in range(0, cols, COLS):
        col = start + tl.arange(0, COLS)[None, :]
        if up_ptr is None:
            x = wide(tl.load(x_ptr + row * stride + col, mask=col < cols, other=0.0))
        else:
            x = wide(tl.load(y_ptr + row * cols + col, mask=col < cols, other=0.0))
        if factor_ptr is not None:
            x = x * _factor(factor_ptr, owner_ptr, tl.program_id(0) + tl.arange(0, 1), rows, col, cols)
        tl.store(values_ptr + row * cols + col, _codes(x, by, INT8), mask=col < cols)


@triton.jit
def _input(x_ptr, up_ptr, y_ptr, row, col, cols, stride, mask):
    """Loads the input as float32: x or, if there is `up`, y = round(round(silu(x)) up), which it also stores."""
    x = tl.load(x_ptr + row * stride + col, mask=mask, other=0.0)
    if up_ptr is None:
        return wide(x)
    else:
        dtype: tl.constexpr = x_ptr.dtype.element_ty
        up = wide(tl.load(up_ptr + row * stride + col, mask=mask, other=0.0))
        y = rounded(wide(rounded(silu(wide(x)), dtype)) * up, dtype)
        tl.store(y_ptr + row * cols + col, y, mask=mask)
        return wide(y)


@triton.jit
def _quantized_part(
    x_ptr, up_ptr, y_ptr, values_ptr, scale_ptr, row, rows, col, cols, stride, least, INVERTS: tl.constexpr
):
    """Quantizes rows of 128 columns and returns them. `scale_ptr` points to the scale of the first row."""
    mask = (row < rows)[:, None] & (col < cols)[None, :]
    x = _input(x_ptr, up_ptr, y_ptr, row.to(tl.int64)[:, None], col[None, :], cols, stride, mask)
    codes, scale = group_codes(x, least, INVERTS)
    tl.store(values_ptr + row.to(tl.int64)[:, None] * cols + col[None, :], codes, mask=mask)
    tl.store(scale_ptr + row, scale, mask=row < rows)
    return x


@triton.jit(do_not_specialize=["rows"])  # codes of a single row, compiled as such, were wrong on an H200
def groups_kernel(
    x_ptr, up_ptr, y_ptr, values_ptr, scale_ptr, words_t_ptr, scale_t_ptr, rows, cols, stride, filled, least,
    BOTH: tl.constexpr, INVERTS: tl.constexpr,
):  # fmt: skip
    """
    "fp8_block": one scale for each 128 values of a row of (rows, cols), scale (g, row) at g * rows + row. BOTH: also
    (cols, filled), with a scale for each 128 rows of a column, scale (g, col) at g * cols + col.

    For each k, rows 4 i + k are loaded as one part. One thread thus has the codes of four rows, and transposes them as
    words.
    """
    col = tl.program_id(0) * 128 + tl.arange(0, 128)
    quad = tl.program_id(1) * 32 + tl.arange(0, 32)
    row = quad * 4
    scale_ptr += tl.program_id(0).to(tl.int64) * rows
    a = _quantized_part(x_ptr, up_ptr, y_ptr, values_ptr, scale_ptr, row, rows, col, cols, stride, least, INVERTS)
    b = _quantized_part(x_ptr, up_ptr, y_ptr, values_ptr, scale_ptr, row + 1, rows, col, cols, stride, least, INVERTS)
    c = _quantized_part(x_ptr, up_ptr, y_ptr, values_ptr, scale_ptr, row + 2, rows, col, cols, stride, least, INVERTS)
    d = _quantized_part(x_ptr, up_ptr, y_ptr, values_ptr, scale_ptr, row + 3, rows, col, cols, stride, least, INVERTS)
    if BOTH:
        largest = tl.maximum(tl.maximum(tl.abs(a), tl.abs(b)), tl.maximum(tl.abs(c), tl.abs(d)))
        scale = _group_scale(tl.max(largest, axis=0), least)
        by = scale[None, :]
        words = e4m3_word(
            _scaled(a, by, INVERTS), _scaled(b, by, INVERTS), _scaled(c, by, INVERTS), _scaled(d, by, INVERTS)
        )
        offset = col.to(tl.int64)[:, None] * (filled // 4) + quad[None, :]
        tl.store(words_t_ptr + offset, tl.trans(words), mask=(col < cols)[:, None])
        tl.store(scale_t_ptr + tl.program_id(1).to(tl.int64) * cols + col, scale, mask=col < cols)


@triton.jit
def gradient_kernel(dy_ptr, gate_ptr, up_ptr, d_gate_ptr, d_up_ptr, count, cols, stride, BLOCK: tl.constexpr):
    """
    Computes the gradients of y = round(round(silu(gate)) up), for `count` values dY in rows of `cols`. The rows of gate
    and up are `stride` apart, those of their gradients 2 * cols.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    row = at // cols
    given, made = at + row * (stride - cols), at + row * cols
    dtype: tl.constexpr = dy_ptr.dtype.element_ty
    dy = wide(tl.load(dy_ptr + at, mask=mask, other=0.0))
    gate = wide(tl.load(gate_ptr + given, mask=mask, other=0.0))
    up = wide(tl.load(up_ptr + given, mask=mask, other=0.0))
    d_silu = wide(rounded(dy * up, dtype))
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    d_gate = d_silu * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    tl.store(d_gate_ptr + made, rounded(d_gate, dtype), mask=mask)
    tl.store(d_up_ptr + made, rounded(dy * wide(rounded(silu(gate), dtype)), dtype), mask=mask)


@triton.jit
def transpose_kernel(x_ptr, words_t_ptr, rows, cols):
    """Transposes each matrix (rows, cols) of bytes as words of four, in parts as in `groups_kernel`."""
    matrix = tl.program_id(2).to(tl.int64)
    x_ptr += matrix * rows * cols
    words_t_ptr += matrix * (rows // 4) * cols
    col = tl.program_id(0) * 128 + tl.arange(0, 128)
    quad = tl.program_id(1) * 32 + tl.arange(0, 32)
    offset = (quad * 4).to(tl.int64)[:, None] * cols + col[None, :]
    mask = (quad < rows // 4)[:, None] & (col < cols)[None, :]
    words = tl.zeros((32, 128), tl.int32)
    for k in tl.static_range(4):
        words |= tl.load(x_ptr + offset + k * cols, mask=mask, other=0).to(tl.int32) << 8 * k
    offset = col.to(tl.int64)[:, None] * (rows // 4) + quad[None, :]
    tl.store(words_t_ptr + offset, tl.trans(words), mask=(col < cols)[:, None] & (quad < rows // 4)[None, :])


@triton.jit
def _tile(cols, ROWS: tl.constexpr, COLS: tl.constexpr):
    """
    Returns the rows and columns of this program's tile. The grid's first axis counts the tiles, row by row: on its
    other axes CUDA allows 65535 programs, too few for the tokens of a mixture.
    """
    across = tl.cdiv(cols, COLS)
    row = tl.program_id(0) // across * ROWS + tl.arange(0, ROWS)
    return row, tl.program_id(0) % across * COLS + tl.arange(0, COLS)


@triton.jit
def _outputs(sums, x_scale_ptr, w_scale_ptr, bias_ptr, row, col, rows, cols):
    """Computes `fma(s_x, s_w sum, b)` for the sums of some rows and columns of (rows, cols)."""
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
    """Computes `fma(s_x, s_w sum, b)` for each sum of (rows, cols)."""
    row, col = _tile(cols, ROWS, COLS)
    mask = (row < rows)[:, None] & (col < cols)[None, :]
    offset = row.to(tl.int64)[:, None] * cols + col[None, :]
    sums = tl.load(sums_ptr + offset, mask=mask, other=0)
    y = _outputs(sums, x_scale_ptr, w_scale_ptr, bias_ptr, row, col, rows, cols)
    tl.store(y_ptr + offset, rounded(y, y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def numbers_kernel(
    values_ptr, scale_ptr, y_ptr, rows, cols, INT8: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):
    """Multiplies the codes (rows, cols) of each matrix, as bytes, with the scale of their row."""
    matrix = tl.program_id(1).to(tl.int64)
    values_ptr += matrix * rows * cols
    scale_ptr += matrix * rows
    y_ptr += matrix * rows * cols
    row, col = _tile(cols, ROWS, COLS)
    mask = (row < rows)[:, None] & (col < cols)[None, :]
    offset = row.to(tl.int64)[:, None] * cols + col[None, :]
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


def _strided(x: Tensor, up: Tensor | None = None) -> tuple[Tensor, Tensor | None, int]:
    """Returns x and, if given, `up` as matrices with one row stride, copied if necessary, and that stride."""
    if x.stride(1) != 1 or (up is not None and up.stride() != x.stride()):
        x, up = x.contiguous(), None if up is None else up.contiguous()
    return x, up, x.stride(0) if len(x) > 1 else x.shape[1]


def rows(
    x: Tensor,
    format: str,
    on_cuda: bool,
    up: Tensor | None = None,
    factor: Tensor | None = None,
    least: float | None = None,
    owner: Tensor | None = None,
) -> tuple[QuantizedTensor, Tensor | None]:
    """
    Applies [`quantize_rows`] to x or, with `up`, to y = silu(x) up, and returns y as well. The columns are multiplied
    by `factor` (columns,), or by its row (experts, columns) of each row's `owner`. `least` replaces the format's
    smallest maximum.
    """
    (rows, cols), fmt = x.shape, FORMATS[format]
    least = fmt.least_amax if least is None else least
    x, up, stride = _strided(x, up)
    y = None if up is None else x.new_empty(rows, cols)
    values = x.new_empty(rows, cols, dtype=torch.int8 if fmt.integers else torch.float8_e4m3fn)
    scale = x.new_empty(rows, 1, dtype=torch.float32)
    given = x, up, y, factor, owner, values, scale, rows, cols, stride, least
    width = max(triton.next_power_of_2(cols), 16)
    height = max(LONGEST_IN_ONE_PASS // width, 1)
    with on(x):
        if cols > LONGEST_IN_ONE_PASS:
            long_rows_kernel[(rows,)](*given, INT8=fmt.integers, ON_CUDA=on_cuda, COLS=2048, num_warps=8)
        else:
            rows_kernel[(triton.cdiv(rows, height),)](
                *given, INT8=fmt.integers, ON_CUDA=on_cuda, ROWS=height, COLS=width
            )
    return QuantizedTensor(format, values, scale, x.shape, x.dtype), y


def groups(
    x: Tensor, least: float, inverts: bool, both: bool, up: Tensor | None = None
) -> tuple[QuantizedTensor, QuantizedTensor | None, Tensor | None]:
    """Applies [`quantize_groups`], for one or both layouts, to x or, with `up`, to y = silu(x) up. Returns y too."""
    rows, cols = x.shape
    x, up, stride = _strided(x, up)
    y = None if up is None else x.new_empty(rows, cols)
    filled = triton.cdiv(rows, BLOCK) * BLOCK
    values = x.new_empty(rows, cols, dtype=torch.float8_e4m3fn)
    scale = x.new_empty(triton.cdiv(cols, BLOCK), rows, dtype=torch.float32)
    columns = words = scale_t = None
    if both:
        values_t = torch.empty(cols, filled, dtype=torch.float8_e4m3fn, device=x.device)
        words, scale_t = values_t.view(torch.int32), x.new_empty(filled // BLOCK, cols, dtype=torch.float32)
        columns = QuantizedTensor("fp8_block", values_t, scale_t.t(), values_t.shape, x.dtype)
    with on(x):
        groups_kernel[(triton.cdiv(cols, BLOCK), filled // BLOCK)](
            x, up, y, values, scale, words, scale_t, rows, cols, stride, filled, least,
            BOTH=both, INVERTS=inverts, **LAUNCH[up is not None],
        )  # fmt: skip
    return QuantizedTensor("fp8_block", values, scale.t(), x.shape, x.dtype), columns, y


def quantize_rows(x: Tensor, format: str, on_cuda: bool) -> QuantizedTensor:
    """Computes `quantizers.quantize_int8(x, on_cuda)` or `quantizers.quantize_fp8(x)`."""
    return rows(x, format, on_cuda)[0]


def quantize_gradient(dy: Tensor, factor: Tensor, least: float, owner: Tensor | None = None) -> QuantizedTensor:
    """Computes `quantizers.quantize_gradient` with scales `factor`, (N,) or (E, N), of the weight's rows."""
    return rows(dy, "fp8", True, factor=factor, least=least, owner=owner)[0]


def quantize_groups(x: Tensor, least: float, inverts: bool = False) -> QuantizedTensor:
    """Computes `quantizers.quantize_groups`, with the scales stored column by column."""
    return groups(x, least, inverts, both=False)[0]


def quantize_groups_for_both(x: Tensor, least: float, inverts: bool = False) -> tuple[QuantizedTensor, QuantizedTensor]:
    """Computes `quantizers.quantize_groups_for_both`, with the scales stored column by column."""
    return groups(x, least, inverts, both=True)[:2]


def silu_mul_backward(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """
    Computes the gradients of `silu(gate) up`, rounded where torch rounds. They are the two halves of one matrix's
    columns, as the joint product of the two layers needs them.
    """
    shape, cols = dy.shape, dy.shape[-1]
    dy, gate, up = (x.reshape(-1, cols) for x in (dy.contiguous(), gate, up))
    gate, up, stride = _strided(gate, up)
    both = dy.new_empty(len(dy), 2 * cols)
    d_gate, d_up = both[:, :cols], both[:, cols:]
    if dy.numel():
        with on(dy):
            gradient_kernel[(triton.cdiv(dy.numel(), 2048),)](
                dy, gate, up, d_gate, d_up, dy.numel(), cols, stride, BLOCK=2048
            )
    return d_gate.view(shape), d_up.view(shape)


def transpose(codes: Tensor) -> Tensor:
    """Computes `codes.mT.contiguous()` of bytes (out, in) or (experts, out, in)."""
    *experts, rows, cols = codes.shape
    if rows % 4:
        return codes.mT.contiguous()
    y = codes.new_empty(*experts, cols, rows)
    with on(codes):
        transpose_kernel[(triton.cdiv(cols, 128), triton.cdiv(rows, 128), prod(experts))](
            codes.contiguous().view(torch.uint8), y.view(torch.int32), rows, cols, num_warps=8
        )
    return y


def scale_sums(sums: Tensor, x_scale: Tensor, w_scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Computes `products.scale_sums` for sums in INT32."""
    sums = sums.contiguous()
    rows, cols = sums.shape
    y = sums.new_empty(rows, cols, dtype=dtype)
    with on(sums):
        sums_kernel[(triton.cdiv(rows, 16) * triton.cdiv(cols, 256),)](
            sums, y, x_scale, w_scale.float(), bias, rows, cols, ROWS=16, COLS=256
        )
    return y


def dequantize_rows(q: QuantizedTensor, dtype: torch.dtype) -> Tensor:
    """Computes `q.dequantize(dtype)` of a weight (out, in) or (experts, out, in) in "fp8" or "int8"."""
    *experts, rows, cols = q.shape
    y = q.values.new_empty(q.shape, dtype=dtype)
    if y.numel():
        with on(y):
            numbers_kernel[(triton.cdiv(rows, 16) * triton.cdiv(cols, 256), prod(experts))](
                q.values.contiguous().view(torch.uint8), q.wide_scale.contiguous(), y, rows, cols,
                INT8=FORMATS[q.format].integers, ROWS=16, COLS=256,
            )  # fmt: skip
    return y
