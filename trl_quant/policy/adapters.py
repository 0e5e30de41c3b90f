"""
PEFT's LoRA layers around the layers of this package.

- [`FrozenLoraLinear`] computes Q(X) Q(W)^T + s X A^T B^T on a frozen base, in 4 bits (QeRL), FP8 or INT8:

      config = with_frozen_layers(LoraConfig(r=32, target_modules="all-linear"))
      model = get_peft_model(model, config)

  It differs from PEFT's own layer in two ways: if one plain adapter is active, one function computes base and adapter
  together, in FP8 and INT8 as one product with the layers that share X; and no adapter can be merged into the base.
- [`UnifiedLoraLinear`] merges the adapter before the weight is quantized, Q(W + s B A), for training in FP8 or INT8.

PEFT creates, saves, loads and switches the adapters.
"""

import math
from copy import deepcopy
from dataclasses import fields
from functools import partial

import torch
from peft import LoraConfig, PeftConfig, PeftType
from peft.tuners.lora import Linear
from peft.tuners.lora.layer import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from ..formats import QuantizedTensor
from ..layers import FrozenLinear
from ..layers.joint import output
from ..layers.operand import Operand
from ..layers.operators import Numbered


# Initializations of PEFT that neither read nor change the base's weight
INITIALIZATIONS = (True, False, "gaussian")
# The end of the error message for an adapter that cannot be merged at each step
NOT_PLAIN = (
    "more than a product of B and A (dropout, a bias, DoRA or another method), and cannot be quantized with the weight "
    "at each step. Use plain LoRA with `lora_dropout=0`, or with vLLM in colocate mode `lora_sync='adapter'`."
)


class FrozenLoraLinear(Linear):
    """PEFT's LoRA layer around a [`FrozenLinear`]. PEFT creates it for a config from [`with_frozen_layers`]."""

    def forward(self, x: Tensor, *args, **kwargs) -> Tensor:
        """Maps `x` of shape (..., in) to (..., out), in the type of `x` or of autocast."""
        name = None if args or kwargs else self._fusible_adapter()
        if name is None:
            return super().forward(x, *args, **kwargs)
        return output(x, self.operand(), self.number)

    @property
    def number(self) -> Tensor:
        """The number of the base, whose codes do not depend on the adapter."""
        return self.base_layer.number

    def operand(self) -> Operand:
        """As [`~layers.QuantLinear.operand`], with the adapter beside the codes if one function can compute both."""
        name, base = self._fusible_adapter(), self.base_layer
        if name is None:
            return base.operand()
        return base.operand(self.lora_A[name].weight, self.lora_B[name].weight, self.scaling[name])

    def _fusible_adapter(self) -> str | None:
        """
        Returns the active adapter if it is the only one and a plain product B A, so that one function can compute it
        together with the base; else `None`.
        """
        names = [name for name in self.active_adapters if name in self.lora_A]
        if len(names) != 1 or self.disable_adapters or self.merged:
            return None
        (name,) = names
        dropout = self.lora_dropout[name]
        has_dropout = dropout.training and not _is(dropout, nn.Identity)
        if name in self.lora_variant or self.lora_bias[name] or has_dropout:
            return None
        is_plain = _is(self.lora_A[name], nn.Linear) and _is(self.lora_B[name], nn.Linear)
        return name if is_plain and _is(self.base_layer, FrozenLinear) else None

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Raises `ValueError`: the base's format cannot hold the sum of Q(W) and an adapter."""
        precision = self.get_base_layer().precision
        raise ValueError(
            f"merge: a base in {precision!r} cannot hold a merged adapter, because rounding would erase it. Keep base "
            "and adapter apart (`save_pretrained`), or write a merged checkpoint with `trl-quant export`."
        )

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        return module.in_features, module.out_features  # PEFT reads them from a sharded `module.weight`

    def _get_base_layer_device_and_dtype(self, base_layer: nn.Module) -> tuple[torch.device, torch.dtype]:
        return base_layer.weight_packed.device, base_layer.dtype  # PEFT reads them from `base_layer.weight`


class UnifiedLoraLinear(Numbered, Linear):
    """
    PEFT's LoRA layer around a [`~layers.UnifiedLinear`]. It computes Q(W + s B A), like an engine that merges the
    adapter, or keeps the adapter beside Q(W). Checkpoints have it as PEFT's own layer.

    Attributes:
        merges (`bool`): Whether the adapter is merged into the weight before that is quantized.
    """

    merges = True

    def forward(self, x: Tensor, *args, **kwargs) -> Tensor:
        """Maps `x` of shape (..., in) to (..., out), in the type of `x` or of autocast."""
        name = None if args or kwargs else self._merged_adapter()
        if name is None:
            return super().forward(x, *args, **kwargs)
        return output(x, self._merged_operand(name), self.number)

    def operand(self) -> Operand:
        """As [`~layers.QuantLinear.operand`], with the adapter that is merged at present."""
        name = self._merged_adapter()
        return self.base_layer.operand() if name is None else self._merged_operand(name)

    def codes(self) -> QuantizedTensor:
        """
        Returns the quantized weight that the layer multiplies with, as [`~layers.UnifiedLinear.codes`] does. Raises
        `ValueError` if several adapters are active.
        """
        return self.operand().codes()

    def _merged_operand(self, name: str) -> Operand:
        base, a, b, scaling = self.base_layer, self.lora_A[name].weight, self.lora_B[name].weight, self.scaling[name]
        return Operand(base, partial(base.codes, partial(delta_weight, self, name), a, b, scaling), None, a, b, scaling)

    def _merged_adapter(self) -> str | None:
        """Returns the adapter that is merged into the weight before it is quantized; `None` if there is none."""
        names = [name for name in self.active_adapters if name in self.lora_A]
        if not self.merges or self.disable_adapters or self.merged or not names:
            return None
        if len(names) > 1:
            raise ValueError(f"`train_precision` quantizes a weight with one adapter, and {names} are active.")
        return names[0]

    def merge(self, *args, **kwargs) -> None:
        """Calls PEFT's method. It writes through `.data`, which PyTorch's version counter misses."""
        super().merge(*args, **kwargs)
        self.base_layer.forget()

    def unmerge(self) -> None:
        """Calls PEFT's method; see [`~UnifiedLoraLinear.merge`]."""
        super().unmerge()
        self.base_layer.forget()


def delta_weight(layer: BaseTunerLayer, adapter: str) -> Tensor:
    """
    Computes an adapter's change of the weight, s B A, of shape (out, in), as PEFT's `get_delta_weight` does. Scales B
    instead of the product if that gives the same bits.
    """
    if is_plain(layer) and layer.lora_B[adapter].weight.dtype == torch.float32:
        scaling = layer.scaling[adapter]
        if math.frexp(scaling)[0] == 0.5:  # a power of two
            return (layer.lora_B[adapter].weight * scaling) @ layer.lora_A[adapter].weight
    return layer.get_delta_weight(adapter)


def is_plain(layer: BaseTunerLayer) -> bool:
    """Whether a layer's adapters are products of two layers, B and A, unlike AdaLoRA's."""
    return isinstance(layer, LoraLayer) and isinstance(layer.lora_B, nn.ModuleDict)


def name_revision(model: nn.Module, revision: str | None) -> None:
    """Records the revision of the base in the adapters that a model has, so that PEFT and `trl-quant` load that one."""
    for config in model.peft_config.values():
        config.revision = config.revision or revision


def leave_casts_to_autocast(model: nn.Module) -> None:
    """
    Stops PEFT's plain LoRA layers, in place, from converting inputs that autocast would convert back.

    PEFT converts an input to the type of A, FP32. Under autocast the product then converts it to 16 bits again. Both
    conversions pass over all activations, forward and backward, and change no bit. Outside of autocast PEFT converts as
    before. Layers with dropout are left alone, because dropout draws other numbers in another type, and so are variants
    of LoRA.
    """
    for layer in model.modules():
        if not isinstance(layer, LoraLayer) or not is_plain(layer) or layer.lora_variant:
            continue
        if all(_is(dropout, nn.Identity) for dropout in layer.lora_dropout.values()):
            layer._cast_input_dtype = _cast_unless_autocast_does


def _cast_unless_autocast_does(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Replaces a method of PEFT's layer. Returns `x` in `dtype`, or unchanged if it already has autocast's type."""
    if x is None:
        return None
    device = x.device.type
    if torch.is_autocast_enabled(device) and x.dtype == torch.get_autocast_dtype(device):
        return x
    return x.to(dtype)


def _is(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a module is exactly of a class and has no hooks. FSDP changes the class; DeepSpeed adds hooks."""
    return type(module) is kind and not module._forward_pre_hooks and not module._forward_hooks


def check_lora(peft_config: PeftConfig) -> None:
    """Raises `ValueError` for an adapter of another method than LoRA."""
    if not isinstance(peft_config, LoraConfig) or peft_config.peft_type != PeftType.LORA:
        raise ValueError(f"peft_config: {type(peft_config).__name__} cannot adapt a frozen base; allowed: LoraConfig.")


def check_plain_lora(peft_config: PeftConfig) -> None:
    """Raises `ValueError` for an adapter of another method than LoRA, or for a variant of LoRA."""
    check_lora(peft_config)
    variants = [field.name for field in fields(peft_config) if field.metadata.get("is_lora_variant")]
    given = [name for name in variants if getattr(peft_config, name)]
    if given:
        raise ValueError(
            f"peft_config: {given[0]}={getattr(peft_config, given[0])!r} cannot adapt a frozen base; allowed is LoRA "
            "without variants, with or without `use_rslora`."
        )


def with_frozen_layers(peft_config: PeftConfig) -> PeftConfig:
    """
    Returns a copy of a LoRA configuration with which PEFT can also adapt [`FrozenLinear`] layers.

    Args:
        peft_config (`peft.LoraConfig`): The configuration. Loading needs such a copy as well:
            `PeftModel.from_pretrained(model, path, config=with_frozen_layers(LoraConfig.from_pretrained(path)))`.

    Raises:
        `ValueError`: The method is not LoRA, or its variant or initialization needs the base's weight.
    """
    check_plain_lora(peft_config)
    initialization = peft_config.init_lora_weights
    if initialization not in INITIALIZATIONS:
        raise ValueError(
            f"peft_config: init_lora_weights={initialization!r} starts from the base's weight, which a frozen base "
            f"does not have; allowed: {', '.join(map(repr, INITIALIZATIONS))}."
        )
    known = deepcopy(peft_config)
    known._register_custom_module({FrozenLinear: FrozenLoraLinear})
    return known


def adapt_frozen(model: nn.Module) -> None:
    """Changes the class of PEFT's LoRA layers whose base was frozen afterwards to those of this module, in place."""
    for layer in model.modules():
        is_plain = isinstance(layer, LoraLayer) and not isinstance(layer, FrozenLoraLinear)
        if is_plain and isinstance(layer.base_layer, FrozenLinear):
            layer.__class__ = FrozenLoraLinear
