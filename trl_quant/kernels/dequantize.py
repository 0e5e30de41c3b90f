"""
Dequantizes four-bit weights in Triton, bit-equal to `QuantizedTensor.dequantize`, and multiplies with them without
writing the dequantized values to memory.

| kernel                | one program handles                 | reads, writes                                       |
|-----------------------|-------------------------------------|-----------------------------------------------------|
| `dequantize_kernel`   | 16 rows of 256 values of a matrix   | codes and scales once; each value once              |
| `matmul_kernel`       | one tile of Y = X Q(W)^T or X Q(W)  | codes and scales once for each tile of tokens       |

Decoding takes a few instructions and no table. The three bits of an E2M1 magnitude are moved to the end of FP32's
exponent and the start of its mantissa. The result is the magnitude times 2^-126, even for the subnormal 0.5. E4M3
scales are decoded the same way. Code times scale is rounded to FP32, then to the weight's type, as in `formats`. Only
NF4's quantiles come from a table.
"""

from dataclasses import replace
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from trl_quant.formats import FORMATS, QuantizedTensor

from .arithmetic import INTERPRETED, on, rounded


INPUTS = (torch.bfloat16, torch.float16)  # types of the inputs of `matmul`
# `matmul` uses the fastest of these for each weight shape and number of tokens, rounded up to a power of two
TILINGS = [
    triton.Config({"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": 128}, num_warps=warps, num_stages=stages)
    for m, n, warps, stages in ((16, 32, 4, 4), (16, 64, 4, 4), (64, 64, 4, 3), (64, 128, 8, 3), (128, 128, 8, 3))
]


# A tile of values


@triton.jit
def _scales(scale_ptr, global_ptr, offset, mask):
    """Loads scales as float32. They are stored as BF16 (in int16), E4M3 (in uint8, with a global scale), E8M0 (uint8),
    FP16 or FP32."""
    stored = tl.load(scale_ptr + offset, mask=mask, other=0)
    if stored.dtype == tl.int16:
        scale = (stored.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif stored.dtype == tl.uint8 and global_ptr is not None:
        code = stored.to(tl.int32)
        scale = (code << 20).to(tl.float32, bitcast=True) * 2.0**120  # never negative
        scale = tl.where(code == 0x7F, float("nan"), scale)
    elif stored.dtype == tl.uint8:
        exponent = stored.to(tl.int32)
        scale = tl.where(exponent == 0, 1 << 22, exponent << 23).to(tl.float32, bitcast=True)
    else:
        scale = stored.to(tl.float32)
    if global_ptr is not None:
        scale = tl.div_rn(scale, tl.load(global_ptr + tl.zeros(scale.shape, tl.int32)))
    return scale


@triton.jit
def _numbers(
    values_ptr, scale_ptr, global_ptr, table_ptr, row, first, rows, groups, stride,
    CODES: tl.constexpr, GROUP: tl.constexpr, NUMBER: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """
    Dequantizes COLS values of the type NUMBER from column `first` on, in each of the given rows. A weight has `rows`
    rows of `groups` groups, `stride` groups apart. Values beyond them are finite. COLS and `first` are multiples of
    GROUP.
    """
    inside = (row < rows)[:, None]
    start = row.to(tl.int64)[:, None] * stride
    byte = (first // 2 + tl.arange(0, COLS // 2))[None, :]
    mask = inside & (byte < groups * (GROUP // 2))
    packed = tl.load(values_ptr + start * (GROUP // 2) + byte, mask=mask, other=0).to(tl.int32)
    if CODES == "table":  # the high four bits hold the first of two codes
        code = tl.reshape(tl.join(packed >> 4, packed & 0xF), (row.shape[0], COLS))
        number = tl.load(table_ptr + code)
    else:
        code = tl.reshape(tl.join(packed & 0xF, packed >> 4), (row.shape[0], COLS))
        if CODES == "integers":
            number = (code - 8).to(tl.float32)
        else:
            number = (((code & 7) << 22) | ((code & 8) << 28)).to(tl.float32, bitcast=True) * 2.0**126
    group = (first // GROUP + tl.arange(0, COLS // GROUP))[None, :]
    scale = _scales(scale_ptr, global_ptr, start + group, inside & (group < groups))
    number = tl.reshape(number, (row.shape[0], COLS // GROUP, GROUP)) * scale[:, :, None]
    return rounded(tl.reshape(number, (row.shape[0], COLS)), NUMBER)


# Kernels


@triton.jit
def dequantize_kernel(
    y_ptr, values_ptr, scale_ptr, global_ptr, table_ptr, rows, cols, groups, stride,
    CODES: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    number: tl.constexpr = y_ptr.dtype.element_ty
    matrix = tl.program_id(2).to(tl.int64)
    y_ptr += matrix * rows * cols
    values_ptr += matrix * rows * stride * (GROUP // 2)
    scale_ptr += matrix * rows * stride
    if global_ptr is not None:
        global_ptr += matrix
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(0) * COLS
    y = _numbers(
        values_ptr, scale_ptr, global_ptr, table_ptr, row, first, rows, groups, stride, CODES, GROUP, number, COLS
    )
    col = (first + tl.arange(0, COLS))[None, :]
    tl.store(y_ptr + row.to(tl.int64)[:, None] * cols + col, y, mask=(row < rows)[:, None] & (col < cols))


def _bench(call, quantiles):
    return triton.testing.do_bench(call, warmup=3, rep=12, quantiles=quantiles)


@triton.autotune(
    TILINGS[2:3] if INTERPRETED else TILINGS, key=["bucket", "rows", "cols", "FORWARD", "CODES"], do_bench=_bench
)
@triton.jit
def matmul_kernel(
    x_ptr, y_ptr, bias_ptr, values_ptr, scale_ptr, global_ptr, table_ptr, tokens, bucket, rows, cols, groups, stride,
    FORWARD: tl.constexpr, CODES: tl.constexpr, GROUP: tl.constexpr, NUMBER: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """FORWARD: (tokens, cols) to (tokens, rows), BLOCK_N of them a program. Else (tokens, rows) to (tokens, cols),
    BLOCK_K of them a program."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    token = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    some = (token < tokens)[:, None]
    token = token.to(tl.int64)[:, None]
    if FORWARD:
        row = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        y = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for first in range(0, cols, BLOCK_K):
            col = (first + tl.arange(0, BLOCK_K))[None, :]
            x = tl.load(x_ptr + token * cols + col, mask=some & (col < cols), other=0.0)
            w = _numbers(
                values_ptr, scale_ptr, global_ptr, table_ptr, row, first, rows, groups, stride,
                CODES, GROUP, NUMBER, BLOCK_K,
            )  # fmt: skip
            y = tl.dot(x, tl.trans(w.to(dtype)), y)
        out = row[None, :]
        outs = rows
    else:
        first = tl.program_id(1) * BLOCK_K
        y = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
        for start in range(0, rows, BLOCK_N):
            row = start + tl.arange(0, BLOCK_N)
            x = tl.load(x_ptr + token * rows + row[None, :], mask=some & (row < rows)[None, :], other=0.0)
            w = _numbers(
                values_ptr, scale_ptr, global_ptr, table_ptr, row, first, rows, groups, stride,
                CODES, GROUP, NUMBER, BLOCK_K,
            )  # fmt: skip
            y = tl.dot(x, w.to(dtype), y)
        out = (first + tl.arange(0, BLOCK_K))[None, :]
        outs = cols
    if bias_ptr is not None:
        y += tl.load(bias_ptr + out, mask=out < outs, other=0.0).to(tl.float32)
    tl.store(y_ptr + token * outs + out, rounded(y, dtype), mask=some & (out < outs))


# Launches


@cache
def _on_device(table: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(table, device=device)


def _weight(q: QuantizedTensor, most_dimensions: int) -> tuple[tuple, dict]:
    """Returns a weight as arguments of both kernels: `(values, scale, global scale, table), constants`."""
    fmt = FORMATS[q.format]
    if not 2 <= len(q.shape) == q.values.ndim == q.scale.ndim <= most_dimensions or not fmt.nibbles:
        raise ValueError(
            f"q: {q.format!r} with values of shape {tuple(q.values.shape)} has no kernel; allowed are matrices with "
            "two codes in a byte and scales of each row. Use `QuantizedTensor.dequantize`."
        )
    if not q.values.is_cuda and not INTERPRETED:
        raise ValueError(f"q: on {q.device}, but a kernel needs a CUDA device. Use `QuantizedTensor.dequantize`.")
    codes = "e2m1" if fmt.table is None else "table"
    if fmt.integers:
        codes = "integers"
    scale = q.scale
    # Some GPUs cannot read E4M3, and the interpreter cannot read BF16
    if scale.dtype in (torch.float8_e4m3fn, torch.bfloat16):
        scale = scale.view(torch.uint8 if scale.dtype.itemsize == 1 else torch.int16)
    table = None if fmt.table is None else _on_device(fmt.table, q.device)
    constants = {"CODES": codes, "GROUP": 2 * q.values.shape[-1] // q.scale.shape[-1]}
    shared = None if q.global_scale is None else q.global_scale.float()
    return (q.values, scale, shared, table), constants


def dequantize(q: QuantizedTensor, dtype: torch.dtype | None = None) -> Tensor:
    """
    Computes `q.dequantize(dtype)` on the GPU, with the same bits.

    Args:
        q (`QuantizedTensor`):
            A four-bit weight (experts, out, in), or a matrix (out, in), or a part of one. The rows of a matrix's values
            (out, bytes) and scales (out, groups) may be strided.
        dtype (`torch.dtype`, *optional*): Type of the result, by default the original type.

    Raises:
        ValueError: Another layout, or a tensor on a CPU.
    """
    if len(q.shape) == 3:  # the kernel expects each expert right behind the one before
        q = replace(q, values=q.values.contiguous(), scale=q.scale.contiguous())
    tensors, constants = _weight(q, most_dimensions=3)
    rows, cols = q.shape[-2:]
    y = q.values.new_empty(q.shape, dtype=dtype or q.dtype)
    grid = (triton.cdiv(cols, 256), triton.cdiv(rows, 16), q.shape[:-2].numel())
    with on(y):
        dequantize_kernel[grid](
            y, *tensors, rows, cols, q.scale.shape[-1], q.scale.stride(-2), ROWS=16, COLS=256, **constants
        )
    return y


def matmul(
    x: Tensor, q: QuantizedTensor, bias: Tensor | None = None, transposed: bool = True, out: Tensor | None = None
) -> Tensor:
    """
    Computes `x Q(W)^T + bias`, or `x Q(W)` if not `transposed`, accumulated in FP32. It is faster for few tokens, where
    reading the weight takes most of the time, because each tile of tokens decodes the weight again.

    Args:
        x (`torch.Tensor`): (tokens, in), or (tokens, out) if not `transposed`; BF16 or FP16.
        q (`QuantizedTensor`):
            A matrix, as in [`dequantize`]. Its values are rounded to `q.dtype`, then to the type of `x`.
        bias (`torch.Tensor`, *optional*): (out,), of the type of `x`.
        transposed (`bool`, *optional*, defaults to `True`): Whether to multiply with the weight's transpose.
        out (`torch.Tensor`, *optional*): A contiguous tensor for the result.

    Returns:
        `torch.Tensor`: (tokens, out), or (tokens, in) if not `transposed`, in the type of `x`.

    Raises:
        ValueError: As in [`dequantize`], or inputs of another type.
    """
    if x.dtype not in INPUTS:
        raise ValueError(f"x: dtype {x.dtype} has no kernel; allowed: {', '.join(map(str, INPUTS))}.")
    tensors, constants = _weight(q, most_dimensions=2)
    (rows, cols), tokens, x = q.shape, len(x), x.contiguous()
    y = out
    if y is None:
        y = x.new_empty(tokens, rows if transposed else cols)
    if tokens == 0:
        return y

    def grid(block):
        tiles = triton.cdiv(rows, block["BLOCK_N"]) if transposed else triton.cdiv(cols, block["BLOCK_K"])
        return triton.cdiv(tokens, block["BLOCK_M"]), tiles

    bucket = max(triton.next_power_of_2(tokens), 16)
    number = getattr(tl, str(q.dtype).removeprefix("torch."))
    with on(x):
        matmul_kernel[grid](
            x, y, bias, *tensors, tokens, bucket, rows, cols, q.scale.shape[1], q.scale.stride(0),
            FORWARD=transposed, NUMBER=number, **constants,
        )  # fmt: skip
    return y
