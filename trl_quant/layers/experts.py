r"""
The experts of a mixture, computed as an engine computes linear layers.

A router sends each token to k of E experts, with weights g. Each expert is a gated MLP with matrices of its own, and a
tensor of three dimensions holds those of all experts of a layer:

    y_t = sum over the k experts e of t:  g_te  down_e(act(gate_e(x_t)) * up_e(x_t))

| symbol | here | shape |
|---|---|---|
| gate and up, one matrix for each expert | `gate_up_proj` | (E, 2 I, H) |
| down | `down_proj` | (E, H, I) |
| the tokens of one expert | the inputs of a product | (T_e, H), then (T_e, I) |

transformers' loop over the experts stays as it is (`experts_implementation="eager"`). It multiplies by
`torch.nn.functional.linear(x, self.gate_up_proj[e])`, so an [`EngineExperts`] takes the tensor's place, whose items
answer this call with the product of [`quantized`]. Each expert has its own scales, and gate and up of an expert share
what scale a whole matrix has. An expert that no token reaches is never multiplied.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..formats import QuantizedTensor
from ..precisions import PRECISIONS
from .quantized import EngineWeight, embedded_linear, engine_weight, held_weight


class _Expert(NamedTuple):
    """
    The matrix (out, in) of one expert, which stands for a tensor in a call of `torch.nn.functional.linear`. ZeRO-3 puts
    a function in that one's place, which multiplies with the transpose, (in, out).
    """

    weight: EngineWeight
    format: str | None
    is_transposed: bool = False

    def t(self) -> "_Expert":
        """Returns the transpose, for a product `x.matmul(expert.t())`."""
        return _Expert(self.weight, self.format, not self.is_transposed)

    @classmethod
    def __torch_function__(cls, function: Callable, types: tuple, args: tuple = (), kwargs: dict | None = None):
        if kwargs or len(args) != 2 or not isinstance(args[1], cls):
            return NotImplemented  # torch then raises `TypeError` with the function's name
        x, expert = args
        if function is not (Tensor.matmul if expert.is_transposed else F.linear):
            return NotImplemented
        return embedded_linear(x, expert.weight, expert.format)


class EngineExperts(nn.Module):
    """
    One matrix of each expert of a layer, quantized. It stands where the module of the experts has its tensor.

    Parameters:
        shape (`tuple[int, ...]`): (experts, out, in).
        precision (`str`): Key of `PRECISIONS`.
        dtype (`torch.dtype`): The type of the products.
    """

    def __init__(self, shape: tuple[int, ...], precision: str, dtype: torch.dtype):
        super().__init__()
        self.shape, self.format, self.dtype = tuple(shape), PRECISIONS[precision].format, dtype
        self.weight: EngineWeight | None = None

    def load(self, weight: Tensor) -> Tensor:
        """Quantizes new weights (experts, out, in), and returns their dequantized values."""
        self.weight, dequantized = engine_weight(weight, self.format, self.dtype)
        return dequantized

    def __getitem__(self, expert: int | Tensor) -> _Expert:
        """Returns the matrix of one expert, for `torch.nn.functional.linear`."""
        return _Expert(self.weight.expert(expert), self.format)

    def extra_repr(self) -> str:
        return f"{self.shape}, format={self.format!r}"


class UnheldExperts(EngineExperts):
    """
    As [`EngineExperts`], for a tensor that lives elsewhere: each expert is quantized when it is multiplied, so that no
    second copy of the experts is held.

    Parameters:
        read (`Callable`): Returns the tensor, (experts, out, in).
        shape, precision, dtype: As in [`EngineExperts`].
    """

    def __init__(self, read: Callable[[], Tensor], shape: tuple[int, ...], precision: str, dtype: torch.dtype):
        super().__init__(shape, precision, dtype)
        self.read = read

    def __getitem__(self, expert: int | Tensor) -> _Expert:
        weight, _ = engine_weight(self.read()[expert].detach(), self.format, self.dtype)
        return _Expert(weight, self.format)


class HeldExperts(EngineExperts):
    """
    As [`EngineExperts`], for codes that another module holds.

    Parameters:
        codes ([`~formats.QuantizedTensor`]): The weights, (experts, out, in).
        precision, dtype: As in [`EngineExperts`].
    """

    def __init__(self, codes: QuantizedTensor, precision: str, dtype: torch.dtype):
        super().__init__(codes.shape, precision, dtype)
        self.codes = codes

    def __getitem__(self, expert: int | Tensor) -> _Expert:
        return _Expert(held_weight(self.codes.expert(expert), self.dtype)[0], self.format)
