"""
Trains in FP8 or INT8, or trains all weights in 4 bits: makes the policy compute like the engine that samples from it
(Jet-RL, arXiv:2601.14243).

    policy = Q(W), or Q(W + s B A)         the decoder's linear layers, in trainer and engine alike

[`unify`] builds a [`~layers.UnifiedLinear`] around the weight of each layer, and [`~layers.UnifiedExperts`] around the
experts of a mixture. In FP8 and INT8 it also fuses norms and the MLPs' activations with the quantizers that follow
them. Norms, activations, routers, embeddings and the head keep their precision, and all trained and saved weights keep
their names and types. FSDP2 shards the weights of linear layers like any others; each rank quantizes the weights that
it gathers.
"""

from collections.abc import Iterator
from types import MethodType

import torch
from peft.tuners.lora import Linear
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.activations import SiLUActivation

from ..formats import FORMATS
from ..layers import QuantExperts, QuantLinear, UnifiedExperts, UnifiedLinear, share_scale
from ..layers.gated import silu_mul
from ..layers.joint import Joint
from ..layers.norm import FusedRMSNorm
from ..models.families import is_gated_mlp, is_rms_norm
from ..models.linears import LinearLayer, places_of_modules, sampled_linears
from ..models.names import clean_name
from ..precisions import PRECISIONS, qat_precisions, unified_flows
from ..reading import reading
from .adapters import NOT_PLAIN, UnifiedLoraLinear


def multiplies_codes(layer: nn.Module) -> bool:
    """Whether a layer multiplies the codes of a weight with those of its inputs."""
    return isinstance(layer, QuantLinear) and layer.quantizes_inputs


def unify(model: nn.Module, precision: str, merged: bool = False, rounds_to: torch.dtype | None = None) -> None:
    """
    Makes the decoder's linear layers compute as an engine in `precision` does, in place.

    Args:
        model (`nn.Module`): A model of transformers, with or without an adapter of PEFT.
        precision (`str`): Key of `PRECISIONS`: one of [`~precisions.unified_flows`] or [`~precisions.qat_precisions`].
        merged (`bool`, *optional*, defaults to `False`):
            Whether LoRA adapters are merged into their weights before these are quantized. Otherwise adapters stay
            beside the weights.
        rounds_to (`torch.dtype`, *optional*): As in [`~layers.UnifiedLinear`].

    Raises:
        `ValueError`: A layer has another quantized format, an adapter cannot be merged at each step, the weight into
            which it is merged is not frozen, or experts have an adapter or cannot be trained in `precision`.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    found = sampled_linears(base)
    layers = {place: layer for place, layer in found.items() if not layer.holds_experts}
    for name in places_of_modules({place: layer for place, layer in found.items() if layer.holds_experts}):
        _unify_experts(base, name, precision, rounds_to)
    for name in layers:
        linear = base.get_submodule(name)
        if isinstance(linear, UnifiedLinear) or multiplies_codes(linear):
            continue
        if type(linear) is not nn.Linear:
            raise ValueError(
                f"`train_precision`={precision!r} trains 16- or 32-bit weights, and `{name}` is a "
                f"{type(linear).__name__}. Load the model without a `quantization_config`."
            )
        layer = UnifiedLinear.from_linear(linear, precision)
        layer.rounds_to = rounds_to
        base.set_submodule(name, layer)
    for name, layer in base.named_modules():
        if isinstance(getattr(layer, "base_layer", None), UnifiedLinear) and not isinstance(layer, UnifiedLoraLinear):
            if precision in qat_precisions():
                raise ValueError(f"`train_precision`={precision!r} trains all weights, and `{name}` has an adapter.")
            _adapt_base(name, layer, merged)
    if precision in unified_flows():
        for group in _sharing_input(base, layers):
            joint = Joint(group)
            for layer in group:
                _base(layer).joint = joint
        fuse(base, layers)
    elif FORMATS[PRECISIONS[precision].format].shares_scale:
        named = {layer.name: base.get_submodule(place) for place, layer in layers.items()}
        for fused in dict.fromkeys(layer.fused for layer in layers.values()):
            share_scale([named[name] for name in fused])


def _unify_experts(model: nn.Module, name: str, precision: str, rounds_to: torch.dtype | None) -> None:
    """Replaces the experts of one layer, in place."""
    experts = model.get_submodule(name)
    if isinstance(experts, QuantExperts):
        return
    if name.endswith(".base_layer"):  # in PEFT's wrapper of a tensor
        raise ValueError(
            f"`train_precision`={precision!r} quantizes experts as they are, and `{clean_name(name)}` has an adapter "
            "(`target_parameters`, or `target_modules='all-linear'`). Adapt attention alone."
        )
    layer = UnifiedExperts(experts, precision, is_silu(experts.act_fn))
    layer.rounds_to = rounds_to
    model.set_submodule(name, layer)


def _sharing_input(model: nn.Module, layers: dict[str, LinearLayer]) -> Iterator[list[nn.Module]]:
    """Yields the layers that an engine computes as one matrix, with their adapters, if one product can compute them."""
    places = {layer.name: place.removesuffix(".base_layer") for place, layer in layers.items()}
    for names in dict.fromkeys(layer.fused for layer in layers.values()):
        group = [model.get_submodule(places[name]) for name in names]
        if len(group) > 1 and all(hasattr(layer, "operand") for layer in group) and Joint.can(group):
            yield group


def fuse(model: nn.Module, layers: dict[str, LinearLayer]) -> None:
    """
    Computes norms, and the activations of gated MLPs, in one pass with the quantizers of the layers that they feed, in
    place.

    Args:
        model (`nn.Module`): A model of transformers whose linear layers multiply codes: see [`multiplies_codes`].
        layers (`dict[str, LinearLayer]`): Of [`~models.linears.linears`], before layers were replaced.
    """
    for layer in model.modules():
        if _is_gated(layer):
            layer.forward = MethodType(Gated.forward, layer)  # torch.compile compiles equal methods once
    _fuse_norms(model, layers)


def restore(model: nn.Module) -> None:
    """Undoes [`unify`] in place: the model computes in the types of its weights again."""
    for name, module in list(model.named_modules()):
        if isinstance(module, UnifiedLoraLinear):
            module.__class__ = Linear
            del module.merges, module.number
        if getattr(vars(module).get("forward"), "__func__", None) is Gated.forward:
            del module.forward
        if isinstance(module, UnifiedLinear | UnifiedExperts | FusedRMSNorm):
            model.set_submodule(name, module.plain())


def flow(model: nn.Module) -> set[tuple]:
    """Returns the choices of [`unify`] for a model, for comparison; empty for a model that it did not change."""
    layers = {("layer", layer.precision, layer.rounds_to) for layer in unified_layers(model)}
    return layers | {("adapter", m.merges) for m in model.modules() if isinstance(m, UnifiedLoraLinear)}


def _fuse_norms(model: nn.Module, layers: dict[str, LinearLayer]) -> None:
    """Replaces each norm of Llama's kind by a [`~layers.norm.FusedRMSNorm`], which gets the layer that it feeds."""
    fed: dict[str, str] = {}  # norm -> the first of the layers that it feeds
    for place, layer in layers.items():
        if layer.norm is not None:
            fed.setdefault(layer.norm, place)
    for name, norm in list(model.named_modules()):
        if is_rms_norm(norm):
            first = fed.get(clean_name(name))
            model.set_submodule(name, FusedRMSNorm(norm, first and model.get_submodule(first)))


def _is_gated(module: nn.Module) -> bool:
    """Whether a module computes `down_proj(silu(gate_proj(x)) * up_proj(x))`, with a `down_proj` that is quantized."""
    if not is_gated_mlp(module) or not is_silu(module.act_fn):
        return False
    return multiplies_codes(_base(module.down_proj))


def is_silu(activation: nn.Module) -> bool:
    """Whether an activation is SiLU, which our kernels compute."""
    return isinstance(activation, (nn.SiLU, SiLUActivation))


class Gated:
    """The forward pass that [`fuse`] gives to a gated MLP."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        """Maps (..., features) to the same, with the activation and its quantizer in one pass."""
        down = _base(self.down_proj)
        if not multiplies_codes(down):  # the layer was replaced after `fuse`
            return type(self).forward(self, x)
        return self.down_proj(silu_mul(self.gate_proj(x), self.up_proj(x), down.precision, down.trains()))


def _base(layer: nn.Module) -> nn.Module:
    """Returns the layer that PEFT's layer wraps, or the layer itself."""
    return getattr(layer, "base_layer", layer)


def _adapt_base(name: str, layer: nn.Module, merged: bool) -> None:
    """Turns PEFT's LoRA layer around a [`~layers.UnifiedLinear`] into a [`UnifiedLoraLinear`]."""
    is_plain = type(layer) is Linear and not layer.lora_variant and not any(layer.lora_bias.values())
    if is_plain:
        is_plain = all(type(dropout) is nn.Identity for dropout in layer.lora_dropout.values())
    if merged and not is_plain:
        raise ValueError(f"`train_precision`: the adapter of `{name}` is {NOT_PLAIN}")
    if merged and layer.base_layer.weight.requires_grad:
        raise ValueError(
            f"`train_precision`: the weight of `{name}` is not frozen, and would get no gradient beside the adapter "
            "that is merged into it. Freeze it (`requires_grad_(False)`), or train all weights without an adapter."
        )
    if type(layer) is Linear:
        layer.__class__ = UnifiedLoraLinear
        layer.merges = merged
        layer.enroll()


def unified_layers(model: nn.Module) -> list[UnifiedLinear | UnifiedExperts]:
    """Returns the layers of a model, experts included, that compute like an engine's."""
    return [module for module in model.modules() if isinstance(module, UnifiedLinear | UnifiedExperts)]


def checkpoint_dtype(name: str, trust_remote_code: bool = False) -> torch.dtype:
    """Returns the type of a checkpoint's weights, which an engine quantizes even if the trainer loads another type."""
    with reading(name):
        return AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code).dtype or torch.bfloat16
