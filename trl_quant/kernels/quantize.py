"""
Quantizers in Triton, bit-equal to `trl_quant.formats`. Most read the weight once and write codes and scales once.

| format         | one program handles              | reads of the weight                                     |
|----------------|----------------------------------|---------------------------------------------------------|
| fp8, int8      | some rows                        | 1 (2 for rows over 32768 values, the second cached)     |
| fp8_block      | one 128 x 128 block              | 1                                                       |
| mxfp4          | 256 blocks of 32 of a matrix     | 1                                                       |
| fp8_tensor     | 8192 values of a matrix          | 2: the maximum of the matrix comes first                |
| nvfp4          | 512 blocks of 16 of a matrix     | 2, or 1 when the global scale is given                  |

The bits are equal, although some of a GPU's instructions do not follow IEEE:

- Divisions are `div.rn`, with one shortcut, which is exact. For a bfloat16 x, `x * RN(1/s)` in float32 rounds to the
  same bfloat16 as `RN(x/s)`: with 8-bit x and s, the quotient is never midway between two bfloat16 numbers (x = m s
  with a 9-bit odd m has more than 8 bits). Its relative distance from any midpoint is at least 2^-17; the product's
  relative error is at most 2^-23.
- Maxima are taken over the bits of |x| as integers, which order as |x| does; NaN wins.
- Every rounding is explicit: no product feeds an addition, so no FMA can skip a rounding.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from trl_quant.formats import FORMATS, QuantizedTensor, check_global_scale, checked, not_finite
from trl_quant.formats import quantize as quantize_by_torch
from trl_quant.formats.nvfp4 import check_experts

from .arithmetic import INTERPRETED, on, to_e4m3, to_int8, wide


KERNELS = ("fp8", "fp8_tensor", "fp8_block", "int8", "nvfp4", "mxfp4")
E4M3_NAN = tl.constexpr(0x7F)
E8M0_NAN = tl.constexpr(0xFF)


# Arithmetic shared by the kernels. Values are computed in float32, and are representable in the weight's dtype.


@triton.jit
def _magnitude(x):
    """Returns the bits of |x| as int32. They have the order of |x|, with infinity and NaN on top."""
    if x.dtype == tl.float32:
        return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    else:
        return (x.to(tl.int16, bitcast=True) & 0x7FFF).to(tl.int32)


@triton.jit
def _number(magnitude, dtype: tl.constexpr):
    """Inverse of `_magnitude`, in float32."""
    if dtype == tl.float32:
        return magnitude.to(tl.float32, bitcast=True)
    elif dtype == tl.bfloat16:
        return (magnitude << 16).to(tl.float32, bitcast=True)
    else:
        return magnitude.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _narrow(x, dtype: tl.constexpr):
    """Converts float32 to `dtype`, for values that `dtype` holds exactly."""
    if dtype == tl.bfloat16:
        return (x.to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def _round(x, dtype: tl.constexpr):
    """Rounds float32 to `dtype`, and returns float32."""
    if dtype == tl.bfloat16 and INTERPRETED:  # the interpreter's conversion truncates
        bits = x.to(tl.int32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    else:
        return x.to(dtype).to(tl.float32)


@triton.jit
def _amax_scale(amax, largest: tl.constexpr, dtype: tl.constexpr):
    """`formats.common.amax_scale`."""
    scale = _round(tl.div_rn(amax, tl.full(amax.shape, largest, tl.float32)), dtype)
    if dtype == tl.bfloat16:
        return tl.where(scale == 0, 2.0**-7, scale)
    elif dtype == tl.float16:
        return tl.where(scale == 0, 2.0**-10, scale)
    else:
        return tl.where(scale == 0, 2.0**-23, scale)


@triton.jit
def _divide(x, scale, dtype: tl.constexpr):
    """`x / scale` rounded to `dtype`: `formats.common.scaled`, except for -0. `scale` must broadcast to x."""
    if dtype == tl.bfloat16:
        # keeps 1 / scale finite; every x is small if its scale is
        boost = tl.where(scale < 2.0**-100, 2.0**64, 1.0)
        reciprocal = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale * boost)
        return _round((x * boost) * reciprocal, dtype)
    else:
        return _round(tl.div_rn(x, tl.broadcast_to(scale, x.shape)), dtype)


@triton.jit
def _e4m3_to_float32(code):
    if INTERPRETED:
        bits = code.to(tl.uint8, bitcast=True).to(tl.int32)
        return (bits << 20).to(tl.float32, bitcast=True) * 2.0**120  # for non-negative codes only
    else:
        return code.to(tl.float32)


@triton.jit
def _e2m1(x):
    """Converts float32 to E2M1 codes 0..15 (int32), to nearest even, saturating, as `formats.common.encode_e2m1`."""
    magnitude = tl.minimum(tl.abs(x), 6.0)
    bits = magnitude.to(tl.int32, bitcast=True)
    normal = ((bits + 0x1FFFFF + ((bits >> 22) & 1)) >> 22) - (126 << 1)
    subnormal = (magnitude + 4194304.0).to(tl.int32, bitcast=True) & 3  # steps of 0.5
    return tl.where(magnitude < 1.0, subnormal, normal) | tl.where(x < 0, 8, 0)


@triton.jit
def _encode(x, scale, dtype: tl.constexpr, INT8: tl.constexpr):
    q = _divide(wide(x), scale, dtype)
    if INT8:
        return to_int8(q)
    else:
        return to_e4m3(q + 0.0)  # -0 to 0


# Kernels


@triton.jit
def _rows_kernel(
    x_ptr,
    values_ptr,
    scale_ptr,
    rows,
    cols,
    INT8: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    ONCE: tl.constexpr,
):
    """fp8, int8: one scale per row of `(rows, cols)`. A program handles ROWS rows; with ONCE it loads whole rows."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    largest: tl.constexpr = 127.5 if INT8 else 448.0
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = (row < rows)[:, None]
    start = row.to(tl.int64)[:, None] * cols
    col = tl.arange(0, COLS)[None, :]
    if ONCE:
        mask = inside & (col < cols)
        x = tl.load(x_ptr + start + col, mask=mask, other=0.0)
        scale = _amax_scale(_number(tl.max(_magnitude(x), axis=1), dtype), largest, dtype)
        tl.store(values_ptr + start + col, _encode(x, scale[:, None], dtype, INT8), mask=mask)
    else:
        amax = tl.zeros((ROWS,), tl.int32)
        for first in range(0, cols, COLS):
            x = tl.load(x_ptr + start + first + col, mask=inside & (first + col < cols), other=0.0)
            amax = tl.maximum(amax, tl.max(_magnitude(x), axis=1))
        scale = _amax_scale(_number(amax, dtype), largest, dtype)
        for first in range(0, cols, COLS):
            mask = inside & (first + col < cols)
            x = tl.load(x_ptr + start + first + col, mask=mask, other=0.0)
            tl.store(values_ptr + start + first + col, _encode(x, scale[:, None], dtype, INT8), mask=mask)
    tl.store(scale_ptr + row, _narrow(scale, dtype), mask=row < rows)


@triton.jit
def _block_kernel(x_ptr, values_ptr, scale_ptr, rows, cols):
    """fp8_block: one scale per 128 x 128 block of each matrix of `(matrices, rows, cols)`."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    row = tl.program_id(1) * 128 + tl.arange(0, 128)[:, None]
    col = tl.program_id(0) * 128 + tl.arange(0, 128)[None, :]
    offset = (tl.program_id(2).to(tl.int64) * rows + row) * cols + col
    mask = (row < rows) & (col < cols)
    x = tl.load(x_ptr + offset, mask=mask, other=0.0)
    amax = tl.max(tl.max(_magnitude(x), axis=1), axis=0)
    scale = _amax_scale(_number(tl.full((1, 1), 0, tl.int32) + amax, dtype), 448.0, dtype)
    tl.store(values_ptr + offset, _encode(x, scale, dtype, False), mask=mask)
    block = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(0) + tl.program_id(0)
    tl.store(scale_ptr + block + tl.zeros((1, 1), tl.int32), _narrow(scale, dtype))


@triton.jit
def _amax_kernel(x_ptr, amax_ptr, n, SIZE: tl.constexpr):
    """Largest magnitude of each matrix of n values, as bits, into an int32 that starts at 0."""
    matrix = tl.program_id(1).to(tl.int64)
    offset = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    x = tl.load(x_ptr + matrix * n + offset, mask=offset < n, other=0.0)
    tl.atomic_max(amax_ptr + matrix, tl.max(_magnitude(x), axis=0))


@triton.jit
def _tensor_kernel(x_ptr, values_ptr, scale_ptr, amax_ptr, n, SIZE: tl.constexpr):
    """fp8_tensor, second read: codes of a matrix of n values under the scale of its maximum."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    matrix = tl.program_id(1).to(tl.int64)
    one = tl.zeros((1,), tl.int32) + matrix
    scale = _amax_scale(_number(tl.load(amax_ptr + one), dtype), 448.0, dtype)
    offset = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    x = tl.load(x_ptr + matrix * n + offset, mask=offset < n, other=0.0)
    tl.store(values_ptr + matrix * n + offset, _encode(x, scale, dtype, False), mask=offset < n)
    if tl.program_id(0) == 0:
        tl.store(scale_ptr + one, _narrow(scale, dtype))


@triton.jit
def _global_scale_kernel(amax_ptr, scale_ptr, dtype: tl.constexpr):
    """nvfp4: `formats.nvfp4.global_scale` from a matrix's maximum in bits; NaN if that is NaN or infinity."""
    one = tl.zeros((1,), tl.int32) + tl.program_id(0)
    amax = _number(tl.load(amax_ptr + one), dtype)
    reciprocal = tl.div_rn(tl.full((1,), 1.0, tl.float32), tl.maximum(amax, 2.0**-126))
    scale = _round(_round(reciprocal, dtype) * 2688.0, dtype)
    scale = tl.where(scale == float("inf"), 1.0, scale)
    tl.store(scale_ptr + one, tl.where(amax < float("inf"), scale, float("nan")))


@triton.jit
def _fp4_kernel(
    x_ptr,
    values_ptr,
    scale_ptr,
    global_ptr,
    blocks,
    cols,
    NVFP4: tl.constexpr,
    BLOCK: tl.constexpr,
    COUNT: tl.constexpr,
):
    """
    nvfp4, mxfp4: one scale per BLOCK columns; a program handles COUNT of the `blocks` of a matrix. A row's last block
    may be short.
    """
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    per_row = tl.cdiv(cols, BLOCK)
    matrix = tl.program_id(1).to(tl.int64)
    x_ptr += matrix * (blocks // per_row) * cols
    values_ptr += matrix * blocks * (BLOCK // 2)
    scale_ptr += matrix * blocks
    block = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    row = block // per_row
    col = ((block - row * per_row) * BLOCK)[:, None] + tl.arange(0, BLOCK)[None, :]
    mask = (block < blocks)[:, None] & (col < cols)
    x = tl.load(x_ptr + row.to(tl.int64)[:, None] * cols + col, mask=mask, other=0.0)
    amax = _number(tl.max(_magnitude(x), axis=1), dtype)
    x = wide(x)
    if NVFP4:
        g = tl.load(global_ptr + matrix + tl.zeros((COUNT,), tl.int32))
        local = g * _round(tl.div_rn(amax, tl.full((COUNT,), 6.0, tl.float32)), dtype)
        number = _e4m3_to_float32(to_e4m3(local))
        number = tl.where(number == 0, 0.125, number)
        code = tl.where(amax < float("inf"), to_e4m3(number).to(tl.uint8, bitcast=True), E4M3_NAN)
        tl.store(scale_ptr + block, code.to(tl.uint8), mask=block < blocks)
        q = tl.div_rn(x, tl.broadcast_to(tl.div_rn(number, g)[:, None], (COUNT, BLOCK)))
    else:
        exponent = ((amax.to(tl.int32, bitcast=True) + 0x200000) >> 23) - 2  # a mantissa of 1.75 carries
        if dtype == tl.float16:
            exponent = tl.minimum(tl.maximum(exponent, 127 - 14 - 2), 127 + 15 - 2)
            exponent = tl.where(amax < 0.75 * 2.0**-14, 127, exponent)
        else:
            exponent = tl.minimum(tl.maximum(exponent, 0), 127 + 127 - 2)
        tl.store(scale_ptr + block, tl.where(amax < float("inf"), exponent, E8M0_NAN).to(tl.uint8), mask=block < blocks)
        inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        q = _round(x * inverse[:, None], dtype)
    low, high = tl.split(tl.reshape(_e2m1(q), (COUNT, BLOCK // 2, 2)))
    byte = tl.arange(0, BLOCK // 2)[None, :]
    packed = (low | (high << 4)).to(tl.uint8)
    tl.store(values_ptr + block.to(tl.int64)[:, None] * (BLOCK // 2) + byte, packed, mask=(block < blocks)[:, None])


# Launches


def _rows(x: Tensor, name: str) -> tuple[Tensor, Tensor]:
    cols, int8 = x.shape[-1], FORMATS[name].integers
    rows = x.numel() // cols
    values = torch.empty_like(x, dtype=torch.int8 if int8 else torch.float8_e4m3fn)
    scale = x.new_empty(*x.shape[:-1], 1)
    once = cols <= 32768
    width = max(triton.next_power_of_2(cols), 16) if once else 16384
    height = max(8192 // width, 1)
    _rows_kernel[(triton.cdiv(rows, height),)](
        x,
        values,
        scale,
        rows,
        cols,
        INT8=int8,
        ROWS=height,
        COLS=width,
        ONCE=once,
        num_warps=16 if width > 8192 else 8,
    )
    return values, scale


def _block(x: Tensor, name: str) -> tuple[Tensor, Tensor]:
    rows, cols = x.shape[-2:]
    down, across = triton.cdiv(rows, 128), triton.cdiv(cols, 128)
    values = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    scale = x.new_empty(*x.shape[:-2], down, across)
    _block_kernel[(across, down, _matrices(x))](x, values, scale, rows, cols, num_warps=8)
    return values, scale


def _matrices(x: Tensor) -> int:
    """Returns the number of matrices of a weight: its experts, or 1."""
    return x.shape[:-2].numel()


def _amax(*tensors: Tensor) -> Tensor:
    """Returns the bits of the largest magnitude of each matrix of all tensors, int32 `(1,)` or `(experts, 1)`."""
    matrices = _matrices(tensors[0])
    amax = torch.zeros(*tensors[0].shape[:-2], 1, dtype=torch.int32, device=tensors[0].device)
    for x in tensors:
        n = x.numel() // matrices
        _amax_kernel[(triton.cdiv(n, 16384), matrices)](x, amax, n, SIZE=16384, num_warps=8)
    return amax


def _tensor(x: Tensor, name: str) -> tuple[Tensor, Tensor]:
    values = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    scale = x.new_empty(*x.shape[:-2], 1)
    n = x.numel() // _matrices(x)
    _tensor_kernel[(triton.cdiv(n, 8192), _matrices(x))](x, values, scale, _amax(x), n, SIZE=8192, num_warps=8)
    return values, scale


def _fp4(x: Tensor, g: Tensor | None) -> tuple[Tensor, Tensor]:
    size = 32 if g is None else 16
    cols = x.shape[-1]
    per_row = triton.cdiv(cols, size)
    blocks = x.numel() // cols // _matrices(x) * per_row
    values = torch.empty(*x.shape[:-1], per_row * size // 2, dtype=torch.uint8, device=x.device)
    scale_dtype = torch.uint8 if g is None else torch.float8_e4m3fn
    scale = torch.empty(*x.shape[:-1], per_row, dtype=scale_dtype, device=x.device)
    count = 8192 // size
    _fp4_kernel[(triton.cdiv(blocks, count), _matrices(x))](
        x, values, scale.view(torch.uint8), g, blocks, cols, NVFP4=g is not None, BLOCK=size, COUNT=count, num_warps=8
    )
    return values, scale


def _global_scale(*tensors: Tensor) -> Tensor:
    amax = _amax(*tensors)
    scale = torch.empty_like(amax, dtype=torch.float32)
    dtype = getattr(tl, str(tensors[0].dtype).removeprefix("torch."))
    _global_scale_kernel[(amax.numel(),)](amax, scale, dtype=dtype)
    return scale


def _input(x: Tensor, name: str) -> Tensor:
    checked(x, name, check=False)
    if name not in KERNELS:
        raise ValueError(
            f"name: {name!r} has no kernel; allowed: {', '.join(KERNELS)}. Use trl_quant.formats.quantize."
        )
    if not x.is_cuda and not INTERPRETED:
        raise ValueError(f"x: on {x.device}, but a kernel needs a CUDA device. Use trl_quant.formats.quantize.")
    if FORMATS[name].grouped and x.ndim < 2:
        raise ValueError(f"x: shape {tuple(x.shape)}, but {name!r} needs at least 2 dimensions for its blocks.")
    return x.detach().contiguous()


def global_scale(*tensors: Tensor) -> Tensor:
    """Computes [`trl_quant.formats.global_scale`] without waiting for the GPU; NaN if a tensor is not finite."""
    tensors = tuple(_input(x, "nvfp4") for x in tensors)
    check_experts(*tensors)
    with on(tensors[0]):
        return _global_scale(*tensors)


def quantize(x: Tensor, name: str, global_scale: Tensor | None = None, check: bool = True) -> QuantizedTensor:
    """
    Does the same as [`trl_quant.formats.quantize`] on a GPU: same arguments, bits and errors.

    Args:
        x (`torch.Tensor`):
            Weight of shape `(out, in)` or `(experts, out, in)` on a CUDA device, bfloat16, float16 or float32.
        name (`str`): One of [`KERNELS`].
        global_scale (`torch.Tensor`, *optional*): NVFP4 only, from [`global_scale`].
        check (`bool`, *optional*, defaults to `True`):
            Whether to reject NaN and infinity. The check reads only the scales, which reveal them, but waits for the
            GPU.

    Raises:
        ValueError: As in [`trl_quant.formats.quantize`], for a tensor on a CPU, or a format without a kernel.
    """
    x = _input(x, name)
    if global_scale is not None:
        check_global_scale(global_scale, x, name)
    with on(x):
        match name:
            case "nvfp4":
                global_scale = _global_scale(x) if global_scale is None else global_scale
                values, scale = _fp4(x, global_scale)
            case "mxfp4":
                values, scale = _fp4(x, None)
            case _:
                values, scale = {"fp8_tensor": _tensor, "fp8_block": _block, "fp8": _rows, "int8": _rows}[name](x, name)
    quantized = QuantizedTensor(name, values, scale, x.shape, x.dtype, global_scale)
    if check and shows_non_finite(scale, name):
        raise not_finite(x)
    return quantized


def quantize_any(x: Tensor, name: str, *args, **kwargs) -> QuantizedTensor:
    """Calls [`quantize`] or, for a format without a kernel, [`trl_quant.formats.quantize`] on the GPU."""
    return (quantize if name in KERNELS else quantize_by_torch)(x, name, *args, **kwargs)


def shows_non_finite(scale: Tensor, name: str) -> Tensor:
    """Returns whether a weight's scales reveal NaN or infinity, as a bool tensor of shape () on their device."""
    match name:
        case "nvfp4":
            return (scale.view(torch.uint8) == E4M3_NAN.value).any()
        case "mxfp4":
            return (scale == E8M0_NAN.value).any()
        case _:
            return scale.isfinite().all().logical_not_()
