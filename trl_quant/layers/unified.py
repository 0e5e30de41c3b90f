r"""
A linear layer that trains in the precision in which its copy samples: the unified flow of Jet-RL (arXiv:2601.14243),
for each precision whose inputs an engine quantizes too.

    Y  = Q(X) Q(W)^T + b             as the engine computes it
    dX = dY Q(W)                     straight through the roundings: as if Q were the identity
    dW = dY^T Q(X)

| symbol | here | shape |
|---|---|---|
| `W` | the master weight, `weight`, which the optimizer updates | (out, in) |
| `Q(W)` | its codes and scales, kept until W is written or freed | (out, in) |
| `X`, `dX` | | (..., in) |
| `Y`, `dY`, `b` | | (..., out), (..., out), (out,) |

If scales have groups along the inner dimension (`fp8_block`), all these products are in FP8: dY is quantized along its
outputs for dX, and dY and X along the tokens for dW. For dW, the forward pass quantizes the 16-bit X a second time,
while Jet-RL quantizes its FP8 activations again: see [`products.quantize_for_both`]. In `fp8`, dX is in FP8, with the
weight's scales folded into dY: see [`products.quantize_gradient`]. The other gradients are 16-bit products of
dequantized values.

With a LoRA adapter that the engine merges, the policy is Q(W + s B A), which is also quantized once a step. [`joint`]
has the products of such layers, and of layers that share X.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..formats import QuantizedTensor, quantize
from ..precisions import PRECISIONS, unified_flows
from .frozen import autocast_dtype
from .inputs import quantized, state_of
from .joint import Joint, Part, output
from .products import product
from .traced import Numbered


class UnifiedLinear(Numbered, nn.Linear):
    """
    A linear layer whose forward pass is the engine's. `weight` stays the master weight: its name, type and place in
    checkpoints are those of `nn.Linear`, and the optimizer updates it.

    After a write, the weight is quantized again when it is next needed. PyTorch's version counter misses writes through
    `.data` and by custom kernels; code that writes this way must call [`~UnifiedLinear.forget`]. Codes are freed with
    the tensor from which they were computed: under FSDP2, each pass gathers a weight, quantizes it, and frees it
    together with its codes.

    Parameters:
        in_features, out_features (`int`): Inputs and outputs.
        bias (`bool`): Whether the layer has one.
        precision (`str`): Key of `PRECISIONS`, one that also quantizes inputs.
        kwargs: `device` and `dtype` of the master weight, as in `nn.Linear`.

    Attributes:
        rounds_to (`torch.dtype` or `None`):
            Type to which the weight is rounded before its scales are computed, which is the type of the checkpoint that
            an engine quantizes. `None` for the weight's own type.
        moves_unseen (`bool`):
            Whether the weight is written without PyTorch's version counter and without a call of `forget`. It is then
            quantized at each call.
        joint ([`Joint`] or `None`): The layers that share its input, itself included.

    Raises:
        ValueError: Another precision.
    """

    rounds_to: torch.dtype | None = None
    moves_unseen = False
    joint: Joint | None = None

    def __init__(self, in_features: int, out_features: int, bias: bool, precision: str, **kwargs):
        allowed = self.precisions()
        if precision not in allowed:
            raise ValueError(f"precision: {precision!r} has no unified flow; allowed: {', '.join(allowed)}.")
        super().__init__(in_features, out_features, bias, **kwargs)
        self.precision, self.format = precision, PRECISIONS[precision].format
        self.enroll()
        self.forget()

    @staticmethod
    def precisions() -> list[str]:
        """Returns the precisions of such layers."""
        return unified_flows()

    @classmethod
    def from_linear(cls, linear: nn.Linear, precision: str) -> "UnifiedLinear":
        """
        Builds a layer around the weight and the bias of `linear`, which stay the same parameters.

        Raises:
            ValueError: Another precision.
        """
        bias, dtype = linear.bias is not None, linear.weight.dtype
        layer = cls(linear.in_features, linear.out_features, bias, precision, device="meta", dtype=dtype)
        layer.weight, layer.bias = linear.weight, linear.bias
        return layer.train(linear.training)

    def plain(self) -> nn.Linear:
        """Builds a layer around the same parameters that computes in the weight's own type."""
        bias, dtype = self.bias is not None, self.weight.dtype
        linear = nn.Linear(self.in_features, self.out_features, bias, device="meta", dtype=dtype)
        linear.weight, linear.bias = self.weight, self.bias
        return linear.train(self.training)

    def codes(self, delta: Callable[[], Tensor] | None = None, *sources) -> QuantizedTensor:
        """
        Returns the quantized weight. It is computed once, and again after a write to one of its sources.

        Args:
            delta (`Callable`, *optional*): Returns a tensor (out, in) that is added to the weight first.
            sources: The sources of `delta`: tensors and numbers.

        Raises:
            ValueError: As [`trl_quant.formats.quantize`].
        """
        made_of = tuple(state_of(x) if isinstance(x, Tensor) else x for x in (self.weight, *sources))
        if self._codes is None or made_of != self._made_of or self.moves_unseen:
            UnifiedLinear.forget(self)  # frees the old codes before the new ones take memory
            with torch.no_grad(), torch.autocast(self.weight.device.type, enabled=False):
                weight = self.weight.detach().to(self.rounds_to or self.weight.dtype)
                if delta is not None:
                    weight = torch.add(weight, delta(), out=torch.empty_like(weight))
                self._codes = _quantize(weight, self.format, self.shared_scale(weight))
                self._made_of = made_of
        return self._codes

    def shared_scale(self, weight: Tensor) -> Tensor | None:
        """Returns the global scale with which `weight` is quantized; `None` in formats without one."""
        return None

    def forget(self) -> None:
        """Drops the codes, so that the weight is quantized again when it is next needed."""
        self.hold(None)
        self._made_of: tuple = ()
        if self.joint is not None:
            self.joint.forget()

    def hold(self, codes: QuantizedTensor | None) -> None:
        """Keeps `codes` instead of the layer's own, which they must equal; `None` drops the codes."""
        self._codes = codes

    def part(self) -> Part:
        """Returns this layer as a part of a joint product, without an adapter."""
        return Part(self, self.codes, self.weight)

    def trains(self) -> bool:
        """Whether a backward pass needs the input too."""
        return self.part().trains

    def forward(self, x: Tensor) -> Tensor:
        """Maps (..., in) to (..., out), in the type of `x` or autocast's."""
        return output(x, self.part(), self.number)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, precision={self.precision!r}"

    def __setattr__(self, name: str, value) -> None:
        if name == "weight":
            self.forget()  # FSDP2 sets another tensor when it gathers a weight, and when it frees it
        super().__setattr__(name, value)

    def _apply(self, fn, recurse=True):
        self.forget()  # the version counter misses the writes of `.to()`
        return super()._apply(fn, recurse)


class SampledLinear(nn.Module):
    """
    The forward pass of a [`UnifiedLinear`], without a backward pass. It holds the codes, and not the weight.

    Parameters:
        linear (`nn.Linear`): The layer that it replaces, (out, in).
        precision (`str`): Key of `PRECISIONS`, one that also quantizes inputs.
    """

    def __init__(self, linear: nn.Linear, precision: str):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.precision, self.format = precision, PRECISIONS[precision].format
        self.weight: QuantizedTensor | None = None
        self.bias = None if linear.bias is None else nn.Parameter(torch.empty_like(linear.bias), requires_grad=False)

    def load(self, weight: Tensor | QuantizedTensor) -> None:
        """Takes a new weight (out, in): codes from [`UnifiedLinear.codes`], or values that it quantizes."""
        if isinstance(weight, Tensor):
            self.weight = None  # frees the old codes first
            with torch.autocast(weight.device.type, enabled=False):
                weight = _quantize(weight, self.format)
        self.weight = weight

    def trains(self) -> bool:
        """As [`UnifiedLinear.trains`]: always `False`."""
        return False

    def forward(self, x: Tensor) -> Tensor:
        """Maps (..., in) to (..., out), in the type of `x` or autocast's."""
        dtype = autocast_dtype(x, self.in_features)
        bias = None if self.bias is None else self.bias.to(dtype)
        q, _ = quantized(x, dtype, self.format, both=False)
        return product(q, self.weight, bias, dtype).view(*x.shape[:-1], self.out_features)


def _quantize(weight: Tensor, format: str, global_scale: Tensor | None = None) -> QuantizedTensor:
    """Calls `formats.quantize`, or on a GPU its kernel, without the check for NaN, which would wait for the GPU."""
    if weight.is_cuda:
        from ..kernels.quantize import quantize_any

        return quantize_any(weight, format, global_scale, check=False)
    return quantize(weight, format, global_scale)
