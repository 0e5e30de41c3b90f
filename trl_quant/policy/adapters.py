"""
PEFT's LoRA on a frozen four-bit base, QeRL's policy, Q(W) + s B A:

    config = with_frozen_layers(LoraConfig(r=32, target_modules="all-linear"))
    model = get_peft_model(model, config)

and merged into what is quantized, Q(W + s B A), where it is trained so ([`UnifiedLoraLinear`]).

[`FrozenLoraLinear`] is PEFT's own layer but for two things: where one plain adapter is active, base and adapter are one
function, and nothing can be merged into the base. Adapters are made, saved, loaded and switched by PEFT.
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
from ..layers import FrozenLinear, frozen_lora_linear


# The other ones start from the base's weight, most of them by changing it
INITIALIZATIONS = (True, False, "gaussian")


class FrozenLoraLinear(Linear):
    """PEFT's LoRA layer around a [`FrozenLinear`]; made by PEFT, with [`with_frozen_layers`]."""

    def forward(self, x: Tensor, *args, **kwargs) -> Tensor:
        """(..., in) to (..., out), of the type of `x` or autocast's."""
        name = None if args or kwargs else self._joined()
        if name is None:
            return super().forward(x, *args, **kwargs)
        a, b = self.lora_A[name].weight, self.lora_B[name].weight
        return frozen_lora_linear(x, self.base_layer, a, b, self.scaling[name])

    def _joined(self) -> str | None:
        """The adapter that can be computed with the base: the one active adapter, where it is B A and nothing else."""
        names = [name for name in self.active_adapters if name in self.lora_A]
        if len(names) != 1 or self.disable_adapters or self.merged:
            return None
        (name,) = names
        dropout = self.lora_dropout[name]
        if name in self.lora_variant or self.lora_bias[name] or (dropout.training and not _is(dropout, nn.Identity)):
            return None
        plain = _is(self.lora_A[name], nn.Linear) and _is(self.lora_B[name], nn.Linear)
        return name if plain and _is(self.base_layer, FrozenLinear) else None

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Raises `ValueError`: a sum of Q(W) and an adapter is not on the grid of the base's format."""
        precision = self.get_base_layer().precision
        raise ValueError(
            f"merge: a base held in {precision!r} cannot take an adapter in, which its rounding would bury. Keep base "
            "and adapter apart (`save_pretrained`), or write a merged checkpoint with `trl-quant export`."
        )

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        return module.in_features, module.out_features  # PEFT looks for a sharded `module.weight`

    def _get_base_layer_device_and_dtype(self, base_layer: nn.Module) -> tuple[torch.device, torch.dtype]:
        return base_layer.weight_packed.device, base_layer.dtype  # those of `base_layer.weight`


class UnifiedLoraLinear(Linear):
    """
    PEFT's LoRA layer around a [`~layers.UnifiedLinear`]: it computes Q(W + s B A), as an engine does that merges the
    adapter, or leaves the branch beside Q(W). Nothing but PEFT's own layer is saved of it.

    Attributes:
        in_codes (`bool`): Whether the adapter is quantized with the weight.
    """

    in_codes = True

    @torch.compiler.disable  # as its base
    def forward(self, x: Tensor, *args, **kwargs) -> Tensor:
        """(..., in) to (..., out), of the type of `x` or autocast's."""
        name = None if args or kwargs else self._adapter()
        if name is None:
            return super().forward(x, *args, **kwargs)
        a, b = self.lora_A[name].weight, self.lora_B[name].weight
        return self.base_layer.adapted(x, partial(self._codes, name), a, b, self.scaling[name])

    def codes(self) -> QuantizedTensor:
        """As [`~layers.UnifiedLinear.codes`], of what the layer multiplies with. `ValueError` for several adapters."""
        return self.base_layer.codes() if (name := self._adapter()) is None else self._codes(name)

    def _codes(self, name: str) -> QuantizedTensor:
        of = self.lora_A[name].weight, self.lora_B[name].weight, self.scaling[name]
        return self.base_layer.codes(partial(delta_weight, self, name), *of)

    def _adapter(self) -> str | None:
        """The adapter that is quantized with the weight."""
        names = [name for name in self.active_adapters if name in self.lora_A]
        if not self.in_codes or self.disable_adapters or self.merged or not names:
            return None
        if len(names) > 1:
            raise ValueError(f"`train_precision` quantizes a weight with one adapter, and {names} are active.")
        return names[0]

    def merge(self, *args, **kwargs) -> None:
        """PEFT's, which writes the weight past torch's count."""
        super().merge(*args, **kwargs)
        self.base_layer.forget()

    def unmerge(self) -> None:
        """PEFT's, as [`~UnifiedLoraLinear.merge`]."""
        super().unmerge()
        self.base_layer.forget()


def delta_weight(layer: BaseTunerLayer, adapter: str) -> Tensor:
    """PEFT's `get_delta_weight`, less its pass over the product of B and A where scaling B is the same bit for bit."""
    if is_plain(layer) and layer.lora_B[adapter].weight.dtype == torch.float32:
        scaling = layer.scaling[adapter]
        if math.frexp(scaling)[0] == 0.5:  # a power of two
            return (layer.lora_B[adapter].weight * scaling) @ layer.lora_A[adapter].weight
    return layer.get_delta_weight(adapter)


def is_plain(layer: BaseTunerLayer) -> bool:
    """Whether a layer's adapters are products of two layers, B and A: AdaLoRA's are parameters, with a diagonal."""
    return isinstance(layer, LoraLayer) and isinstance(layer.lora_B, nn.ModuleDict)


def _is(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a module does what its class does: FSDP changes the class, DeepSpeed and others hang hooks on it."""
    return type(module) is kind and not module._forward_pre_hooks and not module._forward_hooks


def with_frozen_layers(peft_config: PeftConfig) -> PeftConfig:
    """
    A LoRA configuration whose adapters can be laid on [`FrozenLinear`] layers; others are adapted as PEFT does.

    Args:
        peft_config (`peft.LoraConfig`): The configuration, which stays as it is. Also needed for loading:
            `PeftModel.from_pretrained(model, path, config=with_frozen_layers(LoraConfig.from_pretrained(path)))`.

    Returns:
        `peft.LoraConfig`: A copy of it that knows the layers.

    Raises:
        ValueError: Another method than LoRA, or a variant or an initialization of it that needs the base's weight.
    """
    if peft_config.peft_type != PeftType.LORA or not isinstance(peft_config, LoraConfig):
        raise ValueError(
            f"peft_config: {type(peft_config).__name__} cannot adapt a four-bit base; allowed: LoraConfig."
        )
    variants = [field.name for field in fields(peft_config) if field.metadata.get("is_lora_variant")]
    if given := [name for name in variants if getattr(peft_config, name)]:
        raise ValueError(
            f"peft_config: {given[0]}={getattr(peft_config, given[0])!r} cannot adapt a four-bit base; allowed is LoRA "
            "without variants, with or without `use_rslora`."
        )
    if (initialization := peft_config.init_lora_weights) not in INITIALIZATIONS:
        raise ValueError(
            f"peft_config: init_lora_weights={initialization!r} starts from the base's weight, which a four-bit base "
            f"does not have; allowed: {', '.join(map(repr, INITIALIZATIONS))}."
        )
    known = deepcopy(peft_config)
    known._register_custom_module({FrozenLinear: FrozenLoraLinear})
    return known
