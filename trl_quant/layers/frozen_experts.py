r"""
The experts of a mixture whose weights are frozen in codes and scales, under an adapter on other layers: the base of a
LoRA policy at one byte a weight. [`unified_experts`] has the products; there is no dW here.

| symbol | here | shape |
|---|---|---|
| codes of `Q(W_e)` for all experts | the two tensors' names | (E, 2 I, H), (E, H, I) |
| their scales, one a channel | the same, with `_scale` | (E, 2 I), (E, H) |
"""

import torch
from torch import Tensor, nn

from ..formats import QuantizedTensor
from .experts import HeldExperts
from .inputs import state_of
from .unified_experts import QuantExperts


class FrozenExperts(QuantExperts):
    """
    Experts that are held in codes. [`~FrozenExperts.fill`] brings them, one tensor after the other.

    Parameters:
        experts (`nn.Module`): transformers' experts, which give up their tensors.
        precision (`str`): As in [`QuantExperts`].
        dtype (`torch.dtype`): Type of the original weights, and of the scales.
        is_silu (`bool`, *optional*, defaults to `False`): As in [`QuantExperts`].
    """

    def __init__(self, experts: nn.Module, precision: str, dtype: torch.dtype, is_silu: bool = False):
        super().__init__(experts, precision, is_silu)
        self.dtype = dtype
        self.held: dict[str, tuple[QuantizedTensor, tuple]] = {}
        self._is_hf_initialized = True  # or transformers would initialize the tensors
        for leaf in self.leaves:
            shape = getattr(experts, leaf).shape
            setattr(experts, leaf, None)
            self._hold(leaf, torch.empty(shape, dtype=torch.float8_e4m3fn, device="meta"))
            self._hold(f"{leaf}_scale", torch.empty(shape[:2], dtype=dtype, device="meta"))

    def fill(self, leaf: str, q: QuantizedTensor) -> None:
        """
        Takes the quantized weight (experts, out, in) of the tensor called `leaf`, without a copy. Raises `ValueError`
        for another format or shape.
        """
        own = self.format, tuple(getattr(self, leaf).shape)
        if (q.format, tuple(q.shape)) != own:
            raise ValueError(f"q: a weight of {(q.format, tuple(q.shape))}, but `{leaf}` is one of {own}.")
        self._hold(leaf, q.values)
        self._hold(f"{leaf}_scale", q.scale.squeeze(-1))

    def _hold(self, name: str, tensor: Tensor) -> None:
        """Registers a tensor as a parameter, because DDP would broadcast a buffer before each forward pass."""
        self.register_parameter(name, nn.Parameter(tensor.detach(), requires_grad=False))

    def packed(self) -> list[Tensor]:
        """Returns the tensors that hold codes and scales."""
        return list(self.parameters(recurse=False))

    def codes(self, leaf: str) -> QuantizedTensor:
        values, scale = getattr(self, leaf), getattr(self, f"{leaf}_scale")
        made_of = state_of(values), state_of(scale)
        held, held_of = self.held.get(leaf, (None, None))
        if made_of != held_of:
            held = QuantizedTensor(self.format, values.detach(), scale.detach()[..., None], values.shape, self.dtype)
            self.held[leaf] = held, made_of
        return held

    def hold(self, leaf: str, values: Tensor) -> None:
        """Takes over the memory of `values`, which must equal the codes of `leaf`, and frees its own."""
        getattr(self, leaf).data = values

    def dequantize(self, leaf: str, dtype: torch.dtype | None = None) -> Tensor:
        """Dequantizes the weight of the tensor called `leaf` into a new tensor (experts, out, in)."""
        return self.codes(leaf).dequantize(dtype)

    def as_engine(self, leaf: str, dtype: torch.dtype) -> HeldExperts:
        """Returns what stands for the tensor called `leaf` in transformers' loop, with products in `dtype`."""
        return HeldExperts(self.codes(leaf), self.precision, dtype)

    def _apply(self, fn, recurse=True):
        """Moves the tensors like any other, but `.to(dtype)` does not convert them: that would change their values."""
        self.held = {}

        def moved(tensor: Tensor) -> Tensor:
            new = fn(tensor)
            return tensor.to(new.device) if new.dtype != tensor.dtype else new

        return super()._apply(moved, recurse)
