r"""
A linear layer that trains its whole weight in the precision in which its copy samples: the unified flow of Jet-RL
(arXiv:2601.14243) where an engine quantizes inputs too, and quantization-aware training with the straight-through
estimator (arXiv:1308.3432, section 3) where it quantizes weights alone, to four bits.

    Y  = Q(X) Q(W)^T + b             as the engine computes it; Q(X) = X in the precisions of four bits
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
while Jet-RL quantizes its FP8 activations again: see [`quantizers.quantize_for_both`]. In `fp8`, dX is in FP8, with the
weight's scales folded into dY: see [`quantizers.quantize_gradient`]. The other gradients are 16-bit products of
dequantized values.

With a LoRA adapter that the engine merges, the policy is Q(W + s B A), which is also quantized once a step. [`joint`]
has the products of such layers, and of layers that share X.

The codes and scales of Q(W) are those of a checkpoint of W in this format, which an engine loads. In NVFP4 the layers
that an engine fuses (q, k, v; gate, up) share a global scale, so Q(W) depends on the largest value of each of them: see
[`share_scale`]. An update of W that is smaller than a step of the format changes no code, but W keeps it, so small
updates accumulate.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial

from ..formats import QuantizedTensor, global_scale, quantize
from ..precisions import qat_precisions, unified_flows, with_products
from .inputs import state_of
from .linear import QuantLinear
from .operand import Operand


class UnifiedLinear(QuantLinear, nn.Linear):
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
        precision (`str`): Key of `PRECISIONS`, one of [`~UnifiedLinear.precisions`].
        kwargs: `device` and `dtype` of the master weight, as in `nn.Linear`.

    Attributes:
        rounds_to (`torch.dtype` or `None`):
            Type to which the weight is rounded before its scales are computed, which is the type of the checkpoint that
            an engine quantizes. `None` for the weight's own type.
        fused (`tuple[UnifiedLinear, ...]`):
            The other layers that share its global scale; see [`share_scale`].

    Raises:
        ValueError: Another precision.
    """

    rounds_to: torch.dtype | None = None
    fused: tuple["UnifiedLinear", ...] = ()

    def __init__(self, in_features: int, out_features: int, bias: bool, precision: str, **kwargs):
        super().__init__(in_features, out_features, bias, **kwargs)
        self.set_precision(precision)
        self.enroll()
        self.forget()

    @staticmethod
    def precisions() -> list[str]:
        """Returns the precisions of such layers: those of a unified flow, and those of four bits that train weights."""
        return [*unified_flows(), *qat_precisions()]

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
        sources = (self.weight, *sources, *(layer.weight for layer in self.fused))
        made_of = tuple(state_of(x) if isinstance(x, Tensor) else x for x in sources)
        if self._codes is None or made_of != self._made_of or self.moves_unseen:
            self._drop_codes()  # frees the old codes before the new ones take memory
            with torch.no_grad(), torch.autocast(self.weight.device.type, enabled=False):
                weight = self.weight.detach().to(self.rounds_to or self.weight.dtype)
                if delta is not None:
                    weight = torch.add(weight, delta(), out=torch.empty_like(weight))
                self._codes = quantize_weight(weight, self.format, self.shared_scale(weight))
                self._made_of = made_of
        return self._codes

    def shared_scale(self, weight: Tensor) -> Tensor | None:
        """
        Returns the global scale with which `weight` is quantized; `None` if no other layer shares it. All ranks must
        call it if FSDP2 shards the weight of a layer in `fused`.
        """
        if not self.fused:
            return None
        others = (largest(layer.weight.detach()).to(weight.dtype) for layer in self.fused)
        return global_scale(largest(weight), *others)

    def forget(self) -> None:
        """
        Drops the codes, so that the weight is quantized again when it is next needed, and those of the layers in
        `fused`, which depend on this weight.
        """
        for layer in (self, *self.fused):
            layer._drop_codes()

    def _drop_codes(self) -> None:
        self.hold(None)
        self._made_of: tuple = ()
        if self.joint is not None:
            self.joint.forget()

    def hold(self, codes: QuantizedTensor | None) -> None:
        """Keeps `codes` instead of the layer's own, which they must equal; `None` drops the codes."""
        self._codes = codes

    def operand(self) -> Operand:
        """Returns this layer as an operand of a joint product, without an adapter."""
        return Operand(self, self.codes, self.weight)

    def __setattr__(self, name: str, value) -> None:
        if name == "weight":
            self.forget()  # FSDP2 sets another tensor when it gathers a weight, and when it frees it
        super().__setattr__(name, value)

    def _apply(self, fn, recurse=True):
        self.forget()  # the version counter misses the writes of `.to()`
        return super()._apply(fn, recurse)


class SampledLinear(QuantLinear, nn.Module):
    """
    The forward pass of a [`UnifiedLinear`], without a backward pass. It holds the codes, and not the weight.

    Parameters:
        linear (`nn.Linear`): The layer that it replaces, (out, in).
        precision (`str`): Key of `PRECISIONS`, one of [`~SampledLinear.precisions`].
    """

    def __init__(self, linear: nn.Linear, precision: str):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.set_precision(precision)
        self.enroll()
        self.weight: QuantizedTensor | None = None
        self.bias = None if linear.bias is None else nn.Parameter(torch.empty_like(linear.bias), requires_grad=False)

    @staticmethod
    def precisions() -> list[str]:
        """Returns the precisions of such layers: those of a [`UnifiedLinear`], and others that quantize inputs."""
        return [*with_products(), *qat_precisions()]

    def load(self, weight: Tensor | QuantizedTensor) -> None:
        """Takes a new weight (out, in): codes from [`UnifiedLinear.codes`], or values that it quantizes."""
        if isinstance(weight, Tensor):
            self.weight = None  # frees the old codes first
            with torch.autocast(weight.device.type, enabled=False):
                weight = quantize_weight(weight, self.format)
        self.weight = weight

    def codes(self) -> QuantizedTensor:
        """Returns the weight (out, in) of the last [`load`]."""
        return self.weight


def quantize_weight(weight: Tensor, format: str, global_scale: Tensor | None = None) -> QuantizedTensor:
    """Calls `formats.quantize`, or on a GPU its kernel, without the check for NaN, which would wait for the GPU."""
    if weight.is_cuda:
        from ..kernels.quantize import quantize_any

        return quantize_any(weight, format, global_scale, check=False)
    return quantize(weight, format, global_scale)


def share_scale(layers: Sequence[UnifiedLinear]) -> None:
    """Makes layers that an engine computes as one matrix share a global scale, computed from their largest value."""
    for layer in layers:
        layer.fused = tuple(other for other in layers if other is not layer)
        layer.forget()


def largest(weight: Tensor) -> Tensor:
    """
    Computes the largest absolute value of a weight, of shape (), in its type. If FSDP2 holds the weight in parts, each
    rank reads its own and all of them get the largest: collective.
    """
    if not isinstance(weight, DTensor):
        return torch.stack(torch.aminmax(weight)).abs().amax()
    mesh, own = weight.device_mesh, weight.to_local()
    found = largest(own) if own.numel() else own.new_zeros(())
    return DTensor.from_local(found.to(mesh.device_type), mesh, [Partial("max")] * mesh.ndim).full_tensor()
