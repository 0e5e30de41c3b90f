"""A linear layer as a product sees it at one call: where its weight is, and its adapter."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..formats import QuantizedTensor
from .inputs import state_of


class Operand(NamedTuple):
    """
    One layer of a product, in its present state. A product has one operand, or several that share an input.

    Attributes:
        layer (`nn.Linear`): The layer, (out, in).
        codes (`Callable`): Returns the layer's quantized weight (out, in): the same object until the weight changes.
        weight (`torch.Tensor`, *optional*): The weight, if it may get a gradient.
        a, b (`torch.Tensor`, *optional*): The adapter, (rank, in) and (out, rank).
        scaling (`float`): The adapter's factor s.
        merged (`bool`): Whether the codes are those of the sum of weight and adapter.
        stored (`tuple`, *optional*): [`~layers.FrozenLinear.stored`] of a layer whose inputs stay in 16 bits.
    """

    layer: nn.Linear
    codes: Callable[[], QuantizedTensor]
    weight: Tensor | None = None
    a: Tensor | None = None
    b: Tensor | None = None
    scaling: float = 1.0
    merged: bool = True
    stored: tuple | None = None

    @property
    def adapter(self) -> tuple:
        """Identifies the adapter in its present state."""
        return *(state_of(matrix) for matrix in (self.a, self.b) if matrix is not None), self.scaling, self.merged

    @property
    def trains(self) -> bool:
        """Whether the weight gets a gradient."""
        return self.weight is not None and self.weight.requires_grad and torch.is_grad_enabled()
