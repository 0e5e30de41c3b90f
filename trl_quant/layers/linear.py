r"""
What the linear layers that compute in a sampler's numbers have in common:

    Y = Q(X) Q(W)^T + b [+ s X A^T B^T]

A layer is three choices. Its class says where Q(W) comes from:

| class | Q(W) | what trains |
|---|---|---|
| [`~layers.FrozenLinear`] | codes and scales, which the layer holds | an adapter beside them |
| [`~layers.UnifiedLinear`] | quantized from a master weight W after each write | W, or an adapter merged into it |
| [`~layers.SampledLinear`] | codes that each sync of an engine brings | nothing |

Its precision says whether the inputs are quantized, too: [`joint`] then multiplies codes, and otherwise [`weight_only`]
multiplies inputs in 16 bits. The [`~operand.Operand`] that a product gets says which adapter there is.
"""

from torch import Tensor

from ..formats import FORMATS, QuantizedTensor
from ..precisions import PRECISIONS
from .joint import Joint, output
from .operand import Operand
from .operators import Numbered


class QuantLinear(Numbered):
    """
    Base of these layers, together with a class of torch.

    Attributes:
        precision (`str`): Key of `PRECISIONS`.
        format (`str`): Its number format, a key of `FORMATS`.
        quantizes_inputs (`bool`): Whether the products multiply codes of the inputs, too.
        joint ([`~joint.Joint`] or `None`): The layers that share its input, itself included.
        moves_unseen (`bool`):
            Whether the weight is written without PyTorch's version counter and without a call that drops the codes. It
            is then quantized at each call.
    """

    joint: Joint | None = None
    moves_unseen = False

    @staticmethod
    def precisions() -> list[str]:
        """Returns the precisions of such layers."""
        raise NotImplementedError

    def set_precision(self, precision: str) -> None:
        """Sets what depends on the precision. Raises `ValueError` unless it is one of [`precisions`]."""
        allowed = self.precisions()
        if precision not in allowed:
            kind = type(self).__name__
            raise ValueError(f"precision: {precision!r} cannot be a {kind}'s; allowed: {', '.join(allowed)}.")
        self.precision, self.format = precision, PRECISIONS[precision].format
        self.quantizes_inputs = FORMATS[self.format].activations is not None

    def codes(self) -> QuantizedTensor:
        """Returns the quantized weight (out, in): the same object until the weight changes."""
        raise NotImplementedError

    def operand(self) -> Operand:
        """Returns this layer as an operand of a product, without an adapter."""
        return Operand(self, self.codes)

    def trains(self) -> bool:
        """Whether a backward pass needs the input too."""
        return self.operand().trains

    def forward(self, x: Tensor) -> Tensor:
        """Maps (..., in) to (..., out), in the type of `x` or autocast's."""
        return output(x, self.operand(), self.number)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, precision={self.precision!r}"
