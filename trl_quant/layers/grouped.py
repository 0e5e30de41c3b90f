r"""
The products of a mixture's experts, over tokens that are sorted by expert: those of a linear layer ([`products`]), for
each expert with its own weight and its own scales.

    Y_e  = Q(X_e) Q(W_e)^T
    dX_e = Q(dY_e S_e) C_e        with Q(W_e) = S_e C_e
    dW_e = dY_e^T Q(X_e)

| symbol | here | shape |
|---|---|---|
| `e` | an expert, one of E | |
| `X_e`, `dX_e` | rows of a matrix of all experts' tokens, one expert's below the other's | (T_e, K) of (T, K) |
| `Y_e`, `dY_e` | the same | (T_e, N) of (T, N) |
| the end of each expert's rows | `ends`, int32 | (E,) |
| `Q(W_e)`, `S_e`, `C_e` | a weight of all experts: its values, scales and codes | (E, N, K), (E, N, 1), (E, N, K) |

On Hopper, torch multiplies all experts in one call, in `fp8` and BF16, for N and K that are multiples of 16. Otherwise
the experts are multiplied one after the other, with the functions of a linear layer. A CPU has the same sums as a
linear layer of each expert. An expert without tokens gets no product, and its dW is 0.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ..formats import QuantizedTensor
from .products import FAST_ACCUMULATION, multiplies_groups, product, transposed
from .quantizers import quantize_gradient


MOST_EXPERTS = 1023  # that torch multiplies in one call


def grouped_product(x: QuantizedTensor, w: QuantizedTensor, ends: Tensor, dtype: torch.dtype) -> Tensor:
    """
    Computes `x_e w_e^T` for each expert.

    Args:
        x ([`trl_quant.formats.QuantizedTensor`]): (T, K), from [`quantizers.quantize_input`].
        w ([`trl_quant.formats.QuantizedTensor`]): (E, N, K), of the same format.
        ends (`torch.Tensor`): (E,).
        dtype (`torch.dtype`): Type of the result, BF16 or FP32.

    Returns:
        `torch.Tensor`: (T, N).
    """
    if _in_one_call(x.values, w.shape, dtype):
        # Y_e (T_e, N) = Q(X_e) (T_e, K) @ Q(W_e)^T (K, N)
        of_rows = F.ScalingType.RowWise
        return F.scaled_grouped_mm(
            x.values, w.values.mT, x.scale.flatten(), of_rows, w.wide_scale.squeeze(-1), of_rows,
            offs=ends, output_dtype=dtype, use_fast_accum=FAST_ACCUMULATION,
        )  # fmt: skip
    y = torch.empty(len(x.values), w.shape[1], dtype=dtype, device=x.device)
    for expert, rows in _reached(ends):
        y[rows] = product(x.rows(rows), w.expert(expert), None, dtype)
    return y


def grouped_input_gradient(dy: Tensor, w: QuantizedTensor, ends: Tensor) -> Tensor:
    """
    Computes `dy_e w_e` for each expert, of a weight in "fp8".

    Args:
        dy (`torch.Tensor`): (T, N), BF16 or FP32.
        w ([`trl_quant.formats.QuantizedTensor`]): (E, N, K).
        ends (`torch.Tensor`): (E,).

    Returns:
        `torch.Tensor`: (T, K), of the type of dy.
    """
    rows = torch.arange(len(dy), dtype=ends.dtype, device=dy.device)
    owner = torch.searchsorted(ends, rows, right=True, out_int32=True)
    # dX_e (T_e, K) = Q(dY_e S_e) (T_e, N) @ C_e (N, K)
    return grouped_product(quantize_gradient(dy, w.wide_scale, owner), transposed(w), ends, dy.dtype)


def grouped_weight_gradient(dy: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """
    Computes `dy_e^T x_e` for each expert.

    Args:
        dy (`torch.Tensor`): (T, N), BF16 or FP32.
        x (`torch.Tensor`): (T, K), of the type of dy: dequantized inputs.
        ends (`torch.Tensor`): (E,).

    Returns:
        `torch.Tensor`: (E, N, K), of the type of dy.
    """
    shape = len(ends), dy.shape[1], x.shape[1]
    if _in_one_call(dy, shape, dy.dtype):
        # dW_e (N, K) = dY_e^T (N, T_e) @ Q(X_e) (T_e, K)
        return F.grouped_mm(dy.t(), x, offs=ends)
    dw = dy.new_zeros(shape)
    for expert, rows in _reached(ends):
        dw[expert] = dy[rows].t() @ x[rows]
    return dw


def _in_one_call(x: Tensor, weight: tuple[int, ...], dtype: torch.dtype) -> bool:
    """Whether torch multiplies rows `x` with all experts of a weight of this shape (E, N, K) in one call."""
    experts, outputs, inputs = weight
    fits = len(x) > 0 and outputs % 16 == inputs % 16 == 0 and experts <= MOST_EXPERTS
    return fits and dtype == torch.bfloat16 and multiplies_groups(x) and hasattr(F, "scaled_grouped_mm")


def _reached(ends: Tensor) -> Iterator[tuple[int, slice]]:
    """Yields the experts that have rows, and these."""
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            yield expert, slice(start, end)
        start = end
