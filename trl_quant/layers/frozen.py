r"""
A linear layer whose weight is frozen in codes and scales: the base of a LoRA policy at four bits (QeRL,
arXiv:2510.11696; QLoRA, arXiv:2305.14314) or one byte per weight, which is what a checkpoint stores and a vLLM engine
in the same process can multiply with.

    Y  = Q(X) Q(W)^T + b [+ s X A^T B^T]         as the engine computes it; Q(X) = X in the precisions of four bits
    dX = dY Q(W) [+ s (dY B) A]

[`weight_only`] has the products of 16-bit inputs, and [`joint`] those of quantized inputs. A [`~layers.UnifiedLinear`]
computes the same, but also keeps the weight in 16 bits.
"""

import torch
from torch import Tensor, nn

from ..formats import DTYPES, FORMATS, QuantizedTensor, quantize
from ..formats.common import Parts
from ..precisions import four_bits, unified_flows
from . import marlin
from .inputs import state_of
from .linear import QuantLinear
from .operand import Operand
from .products import dequantize
from .weight_only import decoded


def _stored(q: QuantizedTensor) -> dict[str, Tensor]:
    """Returns the parameters that hold a quantized weight, by name."""
    stored = FORMATS[q.format].stored(Parts(q.values, q.scale, q.global_scale), q.shape)
    return {f"weight{suffix or '_packed'}": tensor for suffix, tensor in stored.items()}


class FrozenLinear(QuantLinear, nn.Linear):
    """
    A linear layer whose weight is held in codes and gets no gradient; its inputs and its bias get theirs.

    Its parameters are those that compressed-tensors stores: `weight_packed`, `weight_scale` and, for NVFP4,
    `weight_global_scale`. Other formats use the same names. `weight_packed` has two codes of four bits in a byte, or a
    code of 8 bits. [`~FrozenLinear.hold_tiles`] replaces them by another layout. The layer has no `weight`, so that
    code which would write to one fails.

    The products are computed in the type of the inputs, or in autocast's.

    Parameters:
        in_features, out_features (`int`): Inputs and outputs.
        bias (`bool`): Whether the layer has one.
        precision (`str`): Key of `PRECISIONS`, one of [`~FrozenLinear.precisions`].
        dtype (`torch.dtype`): Type of the bias and of the original weight, to which dequantized values are rounded.
        device (`torch.device`, *optional*): Where the parameters are created; they are filled later, by their names.

    Raises:
        ValueError: Another precision or type.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        precision: str,
        dtype: torch.dtype,
        device: torch.device | str | None = None,
    ):
        nn.Module.__init__(self)  # `nn.Linear` would allocate a weight
        self.set_precision(precision)
        if dtype not in DTYPES:
            raise ValueError(f"dtype: {dtype} cannot be a frozen layer's; allowed: {', '.join(map(str, DTYPES))}.")
        self.in_features, self.out_features = in_features, out_features
        self.dtype = dtype
        self.factor: float | None = None  # in Marlin's layout, a value is this factor times code times scale
        self._made_of: tuple = ()
        self._is_hf_initialized = True  # or transformers would initialize a weight for it
        like = quantize(torch.empty(out_features, in_features, dtype=dtype, device="meta"), self.format, check=False)
        tensors = {"weight_global_scale": None, **_stored(like)}
        tensors["bias"] = torch.empty(out_features, dtype=dtype, device="meta") if bias else None
        device = torch.get_default_device() if device is None else device
        for name, tensor in tensors.items():
            self._hold(name, None if tensor is None else torch.empty_like(tensor, device=device))
        self.enroll()

    @staticmethod
    def precisions() -> list[str]:
        """Returns the precisions of such layers: those of four bits, and those of a unified flow."""
        return [*four_bits(), *unified_flows()]

    @classmethod
    def from_linear(cls, linear: nn.Linear, precision: str, global_scale: Tensor | None = None) -> "FrozenLinear":
        """
        Quantizes a layer's weight. The bias stays as it is, and both stay on their device.

        Args:
            linear (`nn.Linear`): The layer, with a weight of BF16, FP16 or FP32.
            precision (`str`): As in the class.
            global_scale (`torch.Tensor`, *optional*): As in [`trl_quant.formats.quantize`].

        Raises:
            ValueError: Another precision, or as in [`trl_quant.formats.quantize`].
        """
        bias, dtype = linear.bias is not None, linear.weight.dtype
        layer = cls(linear.in_features, linear.out_features, bias, precision, dtype, device="meta")
        layer.fill(quantize(linear.weight, layer.format, global_scale), linear.bias)
        return layer

    def fill(self, q: QuantizedTensor, bias: Tensor | None = None) -> None:
        """
        Takes a quantized weight and a bias, without a copy.

        Raises:
            ValueError: Another format, shape or type than the layer's, or a missing or surplus bias.
        """
        given = q.format, tuple(q.shape), q.dtype
        own = self.format, (self.out_features, self.in_features), self.dtype
        if given != own:
            raise ValueError(f"q: a weight of {given}, but the layer is one of {own}.")
        if (bias is None) != (self.bias is None):
            raise ValueError(f"bias: the layer has {'none' if self.bias is None else 'one'}.")
        for name, tensor in {**_stored(q), "bias": bias}.items():
            self._hold(name, tensor)

    def hold_tiles(self, values: Tensor, scale: Tensor, factor: float) -> None:
        """
        Makes the layer read its weight from another owner's memory, in Marlin's layout; see [`marlin`].

        Args:
            values (`torch.Tensor`): Codes (in / 16, 2 out) int32.
            scale (`torch.Tensor`): Scales (in / group, out), E5M3 of NVFP4 or E8M0 of MXFP4.
            factor (`float`): Factor of code times scale.
        """
        if self.weight_global_scale is not None:  # the scales may differ from the format's by a power of two
            global_scale = self.weight_global_scale
            self._hold("weight_global_scale", global_scale * (1 / (global_scale * factor)).log2().round().exp2())
        self._hold("weight_packed", values)
        self._hold("weight_scale", scale)
        self.factor = factor

    def _hold(self, name: str, tensor: Tensor | None) -> None:
        """Registers a tensor as a parameter, because DDP would broadcast a buffer before each forward pass."""
        self._codes = None
        parameter = None if tensor is None else nn.Parameter(tensor.detach(), requires_grad=False)
        self.register_parameter(name, parameter)

    def stored(self) -> tuple:
        """Returns the weight as arguments of [`~weight_only.weight_only_product`]: three tensors, then the rest."""
        tensors = (self.weight_packed, self.weight_scale, self.weight_global_scale)
        return *tensors, self.format, self.out_features, self.in_features, self.dtype, self.factor

    def packed(self) -> list[Tensor]:
        """Returns the tensors that hold codes and scales."""
        return [tensor for tensor in self.stored()[:3] if tensor is not None]

    def codes(self) -> QuantizedTensor:
        """
        Returns the quantized weight (out, in): the same object until its parameters are replaced or written to. Raises
        `ValueError` if the layer reads another owner's memory in Marlin's layout.
        """
        if self.factor is not None:
            raise ValueError("codes: the weight is in Marlin's layout, which is not that of a quantized tensor.")
        made_of = self._identity()
        if self._codes is None or made_of != self._made_of:
            values, scale, global_scale = (None if x is None else x.detach() for x in self.stored()[:3])
            values = values.view(torch.uint8) if FORMATS[self.format].nibbles else values
            shape = torch.Size((self.out_features, self.in_features))
            self._codes = QuantizedTensor(self.format, values, scale, shape, self.dtype, global_scale)
            self._made_of = made_of
        return self._codes

    def _identity(self) -> tuple:
        """Identifies the values of the codes and scales."""
        return tuple(state_of(tensor) for tensor in self.stored()[:3] if tensor is not None)

    def hold(self, codes: QuantizedTensor) -> None:
        """Takes over the memory of `codes`, which must equal the layer's own, and frees its own memory."""
        self.weight_packed.data, self.weight_scale.data = codes.values, codes.scale
        self._codes, self._made_of = codes, self._identity()

    def operand(self, a: Tensor | None = None, b: Tensor | None = None, scaling: float = 1.0) -> Operand:
        """Returns this layer as an operand of a product, with the adapter (rank, in), (out, rank) beside its weight."""
        stored = None if self.quantizes_inputs else self.stored()
        return Operand(self, self.codes, None, a, b, scaling, merged=a is None, stored=stored)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """
        Dequantizes the weight into a new tensor (out, in).

        Args:
            dtype (`torch.dtype`, *optional*): Type of the result, by default that of the weight that was quantized.
        """
        if self.factor is not None:
            scale = marlin.scales(self.weight_scale)
            scale = scale if self.weight_global_scale is None else scale / self.weight_global_scale
            return marlin.product(self.weight_packed, scale).t().to(dtype or self.dtype).contiguous()
        return (dequantize if self.quantizes_inputs else decoded)(self.codes(), dtype or self.dtype)

    def __getattr__(self, name: str):
        if name == "weight":
            raise AttributeError(
                f"{type(self).__name__} has no `weight`, but codes and scales: `dequantize()` returns the values in a "
                "new tensor. PEFT takes the layer with "
                "`trl_quant.policy.adapters.with_frozen_layers(peft_config)`."
            )
        return super().__getattr__(name)

    def _apply(self, fn, recurse=True):
        """Moves the weight like any other, but `.to(dtype)` does not convert it: that would change its values."""

        self._codes = None
        stored = [id(tensor) for tensor in self.stored()[:3]]

        def moved(tensor: Tensor) -> Tensor:
            new = fn(tensor)
            return tensor.to(new.device) if id(tensor) in stored and new.dtype != tensor.dtype else new

        return super()._apply(moved, recurse)
