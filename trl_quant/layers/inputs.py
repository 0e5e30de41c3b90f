"""
An input that several layers share, as q, k and v do, is quantized once: [`quantized`] keeps the last input's codes for
as long as that tensor lives, is not written to and no other is quantized. What is saved for backward is then shared as
well. Who computes an input and its codes in one pass hands them over with [`remember`].

torch counts what writes to a tensor, but not what goes past it, as `.data` and CUDA graphs do. In a graph nothing is
found again, nor under `torch.inference_mode`, where torch does not count.
"""

import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from ..formats import FORMATS, QuantizedTensor
from .products import quantize_for_both, quantize_input


class _Input(NamedTuple):
    tensor: weakref.ref
    version: int
    dtype: torch.dtype
    rows: QuantizedTensor
    columns: QuantizedTensor | None


_last: _Input | None = None


def quantized(x: Tensor, dtype: torch.dtype, format: str, both: bool) -> tuple[QuantizedTensor, QuantizedTensor | None]:
    """
    [`products.quantize_input`] and, of an input that is needed for `both` passes, what the backward pass multiplies
    with.

    Args:
        x (`torch.Tensor`): (..., in).
        dtype (`torch.dtype`): What it is rounded to first.
        format (`str`): As in [`products.quantize_input`].
        both (`bool`): Whether the second is needed.

    Returns:
        `tuple`: Q(X) (T, in); and Q(X^T) (in, T') in "fp8_block", else Q(X) again, or `None`.
    """
    last = _last
    if last is not None and last.tensor() is x and _counted(x):
        found = (last.version, last.dtype, last.rows.format) == (x._version, dtype, format)
        if found and not (both and last.columns is None):
            return last.rows, last.columns if both else None
    flat = x.detach().reshape(-1, x.shape[-1]).to(dtype)
    if both and not FORMATS[format].per_row:
        rows, columns = quantize_for_both(flat)
    else:
        rows = quantize_input(flat, format)
        columns = rows if FORMATS[format].per_row else None
    remember(x, dtype, rows, columns)
    return rows, columns if both else None


def remember(x: Tensor, dtype: torch.dtype, rows: QuantizedTensor, columns: QuantizedTensor | None) -> None:
    """Has [`quantized`] find what it would return for x, as long as x is its last input."""
    global _last
    _last = _Input(weakref.ref(x, _forget), x._version, dtype, rows, columns) if _counted(x) else None


def _forget(tensor: weakref.ref) -> None:
    global _last
    if _last is not None and _last.tensor is tensor:
        _last = None


def _counted(x: Tensor) -> bool:
    """Whether a change of x would be seen."""
    return not (x.is_inference() or (x.is_cuda and torch.cuda.is_current_stream_capturing()))
