"""
What [`joint`] computes with, without a compiler: the products, called at once with codes that the layers hold. The
functions of [`traced`] have the same names and arguments.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .inputs import quantized
from .products import dequantize, input_and_weight_gradient, input_gradient, joint_bias, product


__all__ = ["dequantize", "input_and_weight_gradient", "input_gradient", "joint_bias", "product", "quantized"]


def add_product(y: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Adds `a b` to `y` in place, and returns `y`."""
    return y.addmm_(a, b)


def side_by_side(matrices: list[Tensor]) -> Tensor:
    """
    Concatenates matrices (T, n_i) to (T, sum of n_i). Nothing is copied if they already are adjacent columns of one
    matrix, in this order.
    """
    first, width, at = matrices[0], sum(matrix.shape[1] for matrix in matrices), matrices[0].storage_offset()
    for matrix in matrices:
        is_next = matrix.storage_offset() == at and matrix.stride() == (width, 1)
        if not is_next or matrix.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return matrices[0] if len(matrices) == 1 else torch.cat(matrices, 1)
        at += matrix.shape[1]
    return first.as_strided((len(first), width), (width, 1))


def below_each_other(matrices: Sequence[Tensor]) -> Tensor:
    """
    Concatenates matrices (n_i, in) to (sum of n_i, in). Nothing is copied if they already are adjacent rows of one
    contiguous matrix, in this order.
    """
    first, at, rows = matrices[0], matrices[0].storage_offset(), sum(map(len, matrices))
    for matrix in matrices:
        is_next = matrix.storage_offset() == at and matrix.is_contiguous()
        if not is_next or matrix.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            bits = torch.uint8 if first.itemsize == 1 else first.dtype  # `cat` does not take FP8 everywhere
            return torch.cat([matrix.view(bits) for matrix in matrices]).view(first.dtype)
        at += matrix.numel()
    return first.as_strided((rows, first.shape[1]), (first.shape[1], 1))
