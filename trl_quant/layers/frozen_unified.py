r"""
A frozen linear layer held in the codes that its sampler multiplies: the base of a LoRA policy at one byte per weight.

    Y  = Q(X) Q(W)^T + b + X (s A)^T B^T         as the engine computes it, with its adapter beside the base
    dX = dY Q(W) + dY B (s A)

[`joint`] has these products, their symbols, and which of them are in FP8 in the backward pass. A
[`~layers.UnifiedLinear`] computes the same, but also keeps the weight in 16 bits. This layer holds only the codes, and
a vLLM engine in the same process can multiply with the same memory.
"""

import torch
from torch import Tensor

from ..formats import QuantizedTensor
from ..precisions import unified_flows
from .frozen import FrozenLinear
from .inputs import state_of
from .joint import Joint, Part, output
from .products import dequantize
from .traced import Numbered


class FrozenUnifiedLinear(Numbered, FrozenLinear):
    """
    A linear layer that holds its weight in codes and multiplies them with the codes of its inputs. The weight gets no
    gradient; the inputs and the bias get theirs.

    Its parameters are those of a [`FrozenLinear`], except that `weight_packed` has one code for each weight.

    Parameters:
        in_features, out_features, bias, dtype, device: As in [`FrozenLinear`].
        precision (`str`): Key of `PRECISIONS`, one of [`~precisions.unified_flows`].

    Attributes:
        joint ([`Joint`] or `None`): The layers that share its input, itself included.

    Raises:
        ValueError: Another precision or type.
    """

    joint: Joint | None = None
    moves_unseen = False
    _codes: QuantizedTensor | None = None
    _made_of: tuple = ()

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.enroll()

    @staticmethod
    def precisions() -> list[str]:
        """Returns the precisions of such layers."""
        return unified_flows()

    def codes(self) -> QuantizedTensor:
        """Returns the quantized weight (out, in): the same object until its parameters are replaced or written to."""
        made_of = self._identity()
        if self._codes is None or made_of != self._made_of:
            shape = torch.Size((self.out_features, self.in_features))
            values, scale = self.weight_packed.detach(), self.weight_scale.detach()
            self._codes, self._made_of = QuantizedTensor(self.format, values, scale, shape, self.dtype), made_of
        return self._codes

    def _identity(self) -> tuple:
        """Identifies the values of the codes and scales."""
        return state_of(self.weight_packed), state_of(self.weight_scale)

    def hold(self, codes: QuantizedTensor) -> None:
        """Takes over the memory of `codes`, which must equal the layer's own, and frees its own memory."""
        self.weight_packed.data, self.weight_scale.data = codes.values, codes.scale
        self._codes, self._made_of = codes, self._identity()

    def part(self) -> Part:
        """Returns this layer as a part of a joint product, without an adapter."""
        return Part(self, self.codes)

    def trains(self) -> bool:
        """As [`~layers.UnifiedLinear.trains`]: always `False`."""
        return False

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """As [`FrozenLinear.dequantize`]."""
        return dequantize(self.codes(), dtype or self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (..., in) to (..., out), in the type of `x` or autocast's."""
        return output(x, self.part(), self.number)


def frozen_layer(precision: str) -> type[FrozenLinear]:
    """Returns the class of layers that hold a frozen base in `precision`."""
    return FrozenUnifiedLinear if precision in unified_flows() else FrozenLinear
