"""
RMSNorm whose result for a token is bit for bit the same for any number of tokens. vLLM's kernel, in contrast, uses
other blocks of threads from 256 tokens on, and then sums in another order. The twin is
[`trl_quant.layers.norm.rms_norm`].

| kernel            | one program handles | reads, writes                                                           |
|-------------------|---------------------|-------------------------------------------------------------------------|
| `norm_kernel`     | some tokens         | input and residual once; output, sum and, on request, codes and scales  |
| `gradient_kernel` | every n-th of these | input and dY once; dX, and a row of the weight's gradient if it trains  |

Codes and scales are those of the rounded output by the quantizers of [`trl_quant.kernels.unified`].
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from trl_quant.formats import FORMATS, QuantizedTensor
from trl_quant.formats.fp8 import BLOCK

from .arithmetic import on, rounded, wide
from .unified import group_codes, row_codes


TILE = 1024  # smallest number of values that a program handles
PROGRAMS = 528  # programs that share the tokens if the weight trains: four for each multiprocessor of a Hopper GPU


@triton.jit
def _inverse(x, features, eps):
    """Computes `1 / rms(x)` of each row. It sums in FP64, so that the order of the sum does not change FP32 bits."""
    precise = x.to(tl.float64)
    return tl.rsqrt((tl.sum(precise * precise, axis=1) / features).to(tl.float32) + eps)


@triton.jit
def norm_kernel(
    x_ptr, residual_ptr, weight_ptr, y_ptr, sum_ptr, values_ptr, scale_ptr, rows, features, eps, least,
    CODE: tl.constexpr, GROUPED: tl.constexpr, INT8: tl.constexpr, INVERTS: tl.constexpr,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Normalizes rows of (tokens, features). With `values_ptr` it rounds the output to CODE and quantizes it."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, COLS)[None, :]
    mask = (row < rows)[:, None] & (col < features)
    at = row.to(tl.int64)[:, None] * features + col
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    x = wide(tl.load(x_ptr + at, mask=mask, other=0.0))
    if residual_ptr is not None:
        total = rounded(x + wide(tl.load(residual_ptr + at, mask=mask, other=0.0)), dtype)
        tl.store(sum_ptr + at, total, mask=mask)
        x = wide(total)
    inverse = _inverse(x, features, eps)
    weight = wide(tl.load(weight_ptr + col, mask=col < features, other=0.0))
    y = rounded(wide(rounded(x * inverse[:, None], dtype)) * weight, dtype)
    tl.store(y_ptr + at, y, mask=mask)
    if values_ptr is not None:
        y = wide(rounded(wide(y), CODE))
        if GROUPED:
            groups: tl.constexpr = COLS // 128
            codes, scale = group_codes(tl.reshape(y, (ROWS * groups, 128)), least, INVERTS)
            codes, scale = tl.reshape(codes, (ROWS, COLS)), tl.reshape(scale, (ROWS, groups))
            group = tl.arange(0, groups)[None, :]
            inside = (row < rows)[:, None] & (group < tl.cdiv(features, 128))
            tl.store(scale_ptr + group.to(tl.int64) * rows + row[:, None], scale, mask=inside)
        else:
            codes, scale = row_codes(y, least, INT8, True)
            tl.store(scale_ptr + row, scale, mask=row < rows)
        tl.store(values_ptr + at, codes, mask=mask)


@triton.jit
def gradient_kernel(
    dy_ptr, x_ptr, weight_ptr, dx_ptr, dw_ptr, rows, features, eps, ROWS: tl.constexpr, COLS: tl.constexpr
):
    """
    Computes the gradients of y = w x r, r = 1 / rms(x): dX = r (w dY - x r^2 mean(w dY x)). With `dw_ptr` each program
    writes its tokens' part of dW = sum(dY round(x r)) to its row of (programs, features).
    """
    col = tl.arange(0, COLS)[None, :]
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    weight = wide(tl.load(weight_ptr + col, mask=col < features, other=0.0))
    added = tl.zeros((ROWS, COLS), tl.float32)
    for first in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & (col < features)
        at = row.to(tl.int64)[:, None] * features + col
        x = wide(tl.load(x_ptr + at, mask=mask, other=0.0))
        dy = wide(tl.load(dy_ptr + at, mask=mask, other=0.0))
        inverse = _inverse(x, features, eps)[:, None]
        normed, d_normed = x * inverse, dy * weight
        along = (tl.sum(d_normed * normed, axis=1) / features)[:, None]
        tl.store(dx_ptr + at, rounded((d_normed - normed * along) * inverse, dtype), mask=mask)
        if dw_ptr is not None:
            added += dy * wide(rounded(normed, dtype))
    if dw_ptr is not None:
        at = tl.program_id(0).to(tl.int64) * features + tl.arange(0, COLS)
        tl.store(dw_ptr + at, tl.sum(added, axis=0), mask=tl.arange(0, COLS) < features)


def _tile(features: int) -> dict:
    cols = max(triton.next_power_of_2(features), BLOCK)
    rows = max(TILE // cols, 1)
    return {"ROWS": rows, "COLS": cols, "num_warps": min(max(rows * cols // 512, 1), 16)}


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    residual: Tensor | None = None,
    format: str | None = None,
    dtype: torch.dtype | None = None,
    inverts: bool = False,
) -> tuple[Tensor, Tensor, QuantizedTensor | None]:
    """
    Computes [`trl_quant.layers.norm.rms_norm`] and, with a `format`, the codes of its output.

    Args:
        x, weight, eps, residual: As in that function.
        format (`str`, *optional*): Key of `FORMATS`, in which [`trl_quant.layers.products`] quantizes the output.
        dtype (`torch.dtype`, *optional*): Type to which the output is rounded before it is quantized.
        inverts (`bool`, *optional*): As in [`trl_quant.layers.quantizers.quantize_groups`].

    Returns:
        `tuple`: output, sum, and codes (tokens, features) or `None`.
    """
    x = x.contiguous()
    y, features = torch.empty_like(x), x.shape[-1]
    rows = x.numel() // features
    total = x if residual is None else torch.empty_like(x)
    codes = values = scale = None
    least, grouped, int8 = 0.0, False, False
    if format is not None:
        fmt = FORMATS[format]
        least, grouped, int8 = fmt.least_amax, fmt.grouped, fmt.integers
        values = torch.empty(rows, features, dtype=torch.int8 if int8 else torch.float8_e4m3fn, device=x.device)
        scale = values.new_empty(triton.cdiv(features, BLOCK) if grouped else 1, rows, dtype=torch.float32)
        codes = QuantizedTensor(format, values, scale.t() if grouped else scale.view(rows, 1), values.shape, dtype)
    if x.numel():
        with on(x):
            tile = _tile(features)
            norm_kernel[(triton.cdiv(rows, tile["ROWS"]),)](
                x, None if residual is None else residual.contiguous(), weight, y, total, values, scale,
                rows, features, eps, least,
                CODE=getattr(tl, str(dtype or x.dtype).removeprefix("torch.")), GROUPED=grouped, INT8=int8,
                INVERTS=inverts, **tile,
            )  # fmt: skip
    return y, total, codes


def rms_norm_backward(dy: Tensor, x: Tensor, weight: Tensor, eps: float, trains: bool) -> tuple[Tensor, Tensor | None]:
    """Computes the gradients of [`rms_norm`] for x and, if the weight `trains`, for the weight."""
    dy, x = dy.contiguous(), x.contiguous()
    dx, features = torch.empty_like(x), x.shape[-1]
    if not x.numel():
        return dx, torch.zeros_like(weight) if trains else None
    rows, tile = x.numel() // features, _tile(features)
    programs = triton.cdiv(rows, tile["ROWS"])
    programs = min(programs, PROGRAMS) if trains else programs
    dw = torch.empty(programs, features, dtype=torch.float32, device=x.device) if trains else None
    with on(x):
        gradient_kernel[(programs,)](dy, x, weight, dx, dw, rows, features, eps, **tile)
    return dx, None if dw is None else dw.sum(0).to(weight.dtype)
