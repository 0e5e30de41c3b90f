"""
Loads the policy's base, frozen under a LoRA adapter, only as codes: in 4 bits (QeRL), or in FP8 or INT8:

    policy = Q(W) + B A                    in the decoder's linear layers; Q(W) is loaded once and never changes

[`FrozenBaseConfig`] is a `quantization_config` of transformers. With it, `from_pretrained` packs a 16-bit checkpoint
layer by layer while it reads it, or takes the packed tensors of a checkpoint that `trl-quant prepare` wrote. A vLLM
engine that quantizes the same checkpoint has the same codes and scales. `nf4` is bitsandbytes' format (QLoRA).
"""

import logging
from contextlib import suppress

import torch
from torch import Tensor, nn
from transformers import AutoConfig, BitsAndBytesConfig, PreTrainedModel
from transformers.core_model_loading import ConversionOps, WeightRenaming
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..formats import FORMATS, global_scale, quantize
from ..layers import FrozenExperts, FrozenLinear
from ..models.linears import FusedGroups, LinearLayer, is_quantizable, places_of_modules, sampled_linears
from ..precisions import PRECISIONS, bitsandbytes_bases, unified_flows
from ..reading import reading
from ..storage.quantization import check_prepared
from .adapters import adapt_frozen, check_lora, check_plain_lora, with_frozen_layers
from .unified import is_silu


logger = logging.getLogger(__name__)

METHOD = "trl_quant"


@register_quantization_config(METHOD)
class FrozenBaseConfig(QuantizationConfigMixin):
    """
    The `quantization_config` with which transformers loads a frozen base.

    Parameters:
        precision (`str`):
            Key of `PRECISIONS`: `"nvfp4"`, `"mxfp4"`, or one of [`~precisions.unified_flows`], whose inputs are
            quantized too.
        checkpoint_dtype (`str`, *optional*, defaults to `"bfloat16"`):
            Type of the checkpoint's weights. Scales are computed from weights in this type.
        prepared (`list[str]`, *optional*):
            For a checkpoint with packed weights: names of the linear layers that are not packed.
    """

    def __init__(self, precision: str, checkpoint_dtype: str = "bfloat16", prepared: list[str] | None = None, **kwargs):
        self.quant_method = METHOD
        self.precision, self.checkpoint_dtype, self.prepared = precision, checkpoint_dtype, prepared


@register_quantizer(METHOD)
class FrozenBaseQuantizer(HfQuantizer):
    """
    Replaces each linear layer of the decoder by a [`~layers.FrozenLinear`], and the experts of each layer by
    [`~layers.FrozenExperts`], when their weights are read.
    """

    def __init__(self, quantization_config: FrozenBaseConfig, **kwargs):
        super().__init__(quantization_config, **kwargs)
        config = quantization_config
        self.precision, self.dtype = config.precision, getattr(torch, config.checkpoint_dtype)
        self.packer: Packer | None = None
        self.renamed: list[str] = []  # layers whose codes are called `weight` in a checkpoint

    @property
    def is_trainable(self) -> bool:
        return True

    def is_serializable(self) -> bool:
        return False

    @property
    def is_compileable(self) -> bool:
        return True

    def update_device_map(self, device_map):
        """Puts the whole model on one device, as training needs it."""
        if device_map is None or isinstance(device_map, str):
            return {"": torch.cuda.current_device()} if torch.cuda.is_available() else None
        return device_map

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs):
        prepared = self.quantization_config.prepared
        layers = sampled_linears(model)
        if not layers:
            raise ValueError(
                f"{type(model).__name__} has no linear layers in its decoder to hold in {self.precision!r} (GPT-2's "
                "are convolutions). Leave that precision unset."
            )
        if prepared is None:
            self.packer = Packer(layers, self.precision, self.dtype)
            return
        if any(layer.is_expert for layer in layers.values()):
            raise ValueError(
                f"{type(model).__name__}: a base of experts is not read from a checkpoint that `trl-quant prepare` "
                "wrote. Start from the 16-bit checkpoint, which is packed while it is read."
            )
        for place, layer in layers.items():
            linear = model.get_submodule(place)
            if is_quantizable(f"{layer.name}.weight", linear.weight, prepared):
                outputs, inputs = layer.shape
                has_bias = linear.bias is not None
                packed = FrozenLinear(inputs, outputs, has_bias, self.precision, self.dtype, device="meta")
                model.set_submodule(place, packed)
                if self.precision in unified_flows():
                    self.renamed.append(place)

    def get_weight_conversions(self) -> list[WeightRenaming]:
        return [WeightRenaming(f"{place}.weight$", f"{place}.weight_packed") for place in self.renamed]

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **kwargs) -> bool:
        return self.packer is not None and param_name.removesuffix(".weight") in self.packer.layers

    def param_element_size(self, model: PreTrainedModel, param_name: str, param: Tensor) -> float:
        if self.param_needs_quantization(model, param_name):
            return FORMATS[PRECISIONS[self.precision].format].bits / 8
        return super().param_element_size(model, param_name, param)

    def get_quantize_ops(self) -> ConversionOps:
        return _Pack(self.packer)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs):
        if self.packer is not None:
            self.packer.finish(model)
        for module in model.modules():
            if isinstance(module, FrozenLinear | FrozenExperts):
                module.requires_grad_(False)
        keep_from_ddp(model)
        return model


class _Pack(ConversionOps):
    """Passes the weight of one layer from a checkpoint to the packer. Returns nothing for transformers to assign."""

    def __init__(self, packer: "Packer"):
        self.packer = packer

    def convert(self, input_dict, model=None, missing_keys=None, **kwargs):
        for name, tensors in input_dict.items():
            weight = tensors[0] if isinstance(tensors, list) else tensors
            self.packer.take(model, name.removesuffix(".weight"), weight)
            missing_keys.discard(name)
        return {}


class Packer:
    """
    Packs a model's linear layers one after the other. In a format whose fused layers share a scale (NVFP4), a layer
    waits until all layers of its group have arrived, as in [`~storage.layout.checkpoint_stream`].

    Parameters:
        layers (`dict[str, LinearLayer]`): The layers to pack, by their paths in the model.
        precision (`str`): Key of `PRECISIONS`.
        dtype (`torch.dtype`): Type to which weights are rounded before they are quantized.
    """

    def __init__(self, layers: dict[str, LinearLayer], precision: str, dtype: torch.dtype):
        self.layers, self.precision, self.dtype = layers, precision, dtype
        self.shares_scale = FORMATS[PRECISIONS[precision].format].shares_scale
        self.groups = FusedGroups(lambda place: layers[place].fused)

    def take(self, model: nn.Module, place: str, weight: Tensor) -> None:
        """
        Packs `weight`, (out, in) or (experts, out, in), of the layer or tensor at `place`, at once or with the last
        layer that shares its scale.
        """
        weight = weight.to(self.dtype)
        if self.layers[place].holds_experts:
            self._pack_experts(model, place, weight)
            return
        group = self.groups.add(place, weight) if self.shares_scale else {place: weight}
        if group:
            self._pack(model, group)

    def finish(self, model: nn.Module) -> None:
        """Packs the layers that still wait for others of their group."""
        for group in self.groups.rest():
            self._pack(model, group)

    def _pack_experts(self, model: nn.Module, place: str, weight: Tensor) -> None:
        path, _, leaf = place.rpartition(".")
        experts = model.get_submodule(path)
        if not isinstance(experts, FrozenExperts):
            experts = FrozenExperts(experts, self.precision, self.dtype, is_silu(experts.act_fn))
            model.set_submodule(path, experts)
        try:
            experts.fill(leaf, quantize(weight, experts.format))
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error

    def _pack(self, model: nn.Module, weights: dict[str, Tensor]) -> None:
        shared = {"global_scale": global_scale(*weights.values())} if self.shares_scale else {}
        for name, weight in weights.items():
            linear = model.get_submodule(name)
            linear.weight = nn.Parameter(weight, requires_grad=False)
            try:
                packed = FrozenLinear.from_linear(linear, self.precision, **shared)
            except ValueError as error:
                raise ValueError(f"{name}.weight: {error}") from error
            if linear.bias is not None:  # an adapter may train it
                packed.bias.requires_grad_(linear.bias.requires_grad)
            model.set_submodule(name, packed)


@torch.no_grad()
def freeze(model: nn.Module, precision: str, dtype: torch.dtype = torch.bfloat16) -> None:
    """
    Packs the base of a loaded model, in place and one layer after the other.

    Args:
        model (`nn.Module`): A model of transformers, with or without an adapter of PEFT.
        precision (`str`): Key of `PRECISIONS`.
        dtype (`torch.dtype`, *optional*, defaults to `torch.bfloat16`):
            Type of the checkpoint's weights, to which weights are rounded first.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    packer = Packer(sampled_linears(base), precision, dtype)
    for place in places_of_modules(packer.layers):
        module = base.get_submodule(place)
        if isinstance(module, FrozenLinear | FrozenExperts):
            continue
        weights = {place: module.weight} if isinstance(module, nn.Linear) else {}
        if not weights:  # a layer's experts
            weights = {f"{place}.{leaf}": tensor for leaf, tensor in module.named_parameters(recurse=False)}
        for name, weight in weights.items():
            packer.take(base, name, weight)
    packer.finish(base)
    adapt_frozen(model)
    keep_from_ddp(base)


def keep_from_ddp(model: nn.Module) -> None:
    """
    Excludes the packed weights from DDP's initial broadcast. Every rank has loaded the same weights, and gloo cannot
    send E4M3.
    """
    modules = dict(model.named_modules())
    layers = [name for name, module in modules.items() if isinstance(module, FrozenLinear)]
    kinds = {name for layer in layers for name, _ in modules[layer].named_parameters() if "weight" in name}
    experts = [name for name, module in modules.items() if isinstance(module, FrozenExperts)]
    places = [f"base_model.model.{layer.removesuffix('.base_layer')}" for layer in layers]  # below PEFT's wrapper
    model._ddp_params_and_buffers_to_ignore = [
        f"{place}{wrapped}.{kind}" for place in places for wrapped in ("", ".base_layer") for kind in kinds
    ]
    model._ddp_params_and_buffers_to_ignore += [
        f"base_model.model.{place}.{name}" for place in experts for name, _ in modules[place].named_parameters()
    ]


def on_frozen_base(args, model, quantization_config, peft_config, **others) -> dict:
    """
    Returns a trainer's arguments for a policy on a frozen base.

    Args:
        args ([`QuantGRPOConfig`]): The run's configuration.
        model (`str` or [`~transformers.PreTrainedModel`]): The policy; one that is loaded already is packed in place.
        quantization_config: The trainer's argument of that name.
        peft_config ([`~peft.LoraConfig`] or `None`): The trainer's argument of that name.
        others: Ignored.

    Returns:
        `dict`: New values of `quantization_config`, `peft_config`, and the `model_init_kwargs` of `args`.

    Raises:
        `ValueError`: The policy is quantized in another way, or adapted by another method than LoRA.
    """
    precision, init = args.train_precision, dict(args.model_init_kwargs or {})
    if quantization_config is not None or "quantization_config" in init:
        raise ValueError(
            f"`train_precision`={precision!r} and a `quantization_config` both set the base's format. Unset one of the "
            "two."
        )
    if precision in bitsandbytes_bases():
        if not isinstance(model, str) and not getattr(model, "is_loaded_in_4bit", False):
            raise ValueError(
                f"`train_precision`={precision!r} is bitsandbytes', which quantizes while it loads: pass the model's "
                "name, or a model that was loaded with a `BitsAndBytesConfig`."
            )
        for adapter in [peft_config] if peft_config is not None else model.peft_config.values():
            check_lora(adapter)
        quantization_config = in_bitsandbytes() if isinstance(model, str) else None
        new = {"quantization_config": quantization_config}
        return new | {"peft_config": peft_config, "model_init_kwargs": args.model_init_kwargs}
    if isinstance(model, str):
        quantization_config, config = packed_while_loading(
            model, precision, "train_precision", args.trust_remote_code, init.get("revision")
        )
        init |= config
    else:
        for adapter in getattr(model, "peft_config", {}).values():
            check_plain_lora(adapter)
        _freeze_loaded(model, precision, args.trust_remote_code)
    return {
        "quantization_config": quantization_config,
        "peft_config": peft_config and with_frozen_layers(peft_config),
        "model_init_kwargs": init or args.model_init_kwargs,
    }


def in_bitsandbytes() -> BitsAndBytesConfig:
    """Returns the `quantization_config` with which transformers loads a base in bitsandbytes' NF4."""
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)


def packed_while_loading(
    model: str, precision: str, field: str, trust_remote_code: bool, revision: str | None
) -> tuple[FrozenBaseConfig, dict]:
    """
    Returns the `quantization_config` with which transformers packs a checkpoint while it loads, and a dict of further
    arguments of `from_pretrained`.

    Args:
        model (`str`): The checkpoint's name or directory, in 16 bits or written by `trl-quant prepare`.
        precision (`str`): As in [`FrozenBaseConfig`].
        field (`str`): The config's field that requests the precision, for messages.
        trust_remote_code (`bool`): As in transformers.
        revision (`str` or `None`): The checkpoint's revision.

    Raises:
        `ValueError`: The checkpoint is quantized in another way.
    """
    options = {"revision": revision} if revision else {}
    with reading(model):
        config = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code, **options)
    prepared, further = None, {}
    if check_prepared(config, precision, field):
        prepared = list(dict(config.quantization_config)["ignore"])
        del config.quantization_config
        further["config"] = config
    dtype = str(config.dtype or torch.bfloat16).removeprefix("torch.")
    return FrozenBaseConfig(precision, dtype, prepared), further


def loading_teacher(args, teacher: str) -> dict:
    """
    Returns the arguments of `from_pretrained` that load a teacher in the `teacher_precision` of a
    [`QuantDistillationConfig`].
    """
    given = dict(args.teacher_model_init_kwargs or {})
    if args.teacher_precision in bitsandbytes_bases():
        return given | {"quantization_config": in_bitsandbytes()}
    revision = given.get("revision", args.teacher_model_revision)
    quantization_config, further = packed_while_loading(
        teacher, args.teacher_precision, "teacher_precision", args.trust_remote_code, revision
    )
    return given | {"quantization_config": quantization_config} | further


def _freeze_loaded(model: PreTrainedModel, precision: str, trust_remote_code: bool) -> None:
    """Packs the base of a loaded policy, unless it is held in `precision` already."""
    packed = {module.precision for module in model.modules() if isinstance(module, FrozenLinear | FrozenExperts)}
    if packed - {precision}:
        raise ValueError(
            f"`train_precision`={precision!r}, but the policy's base is held in {', '.join(map(repr, packed))}."
        )
    if not packed and getattr(model, "is_quantized", False):
        raise ValueError(
            f"`train_precision`={precision!r}, but the policy is quantized in another way. Pass the name of its 16-bit "
            "checkpoint."
        )
    if not packed:
        checkpoint = model.config
        if model.name_or_path:
            # If the checkpoint is gone, the policy's own type is the best guess
            with suppress(OSError, ValueError), reading(model.name_or_path):
                checkpoint = AutoConfig.from_pretrained(model.name_or_path, trust_remote_code=trust_remote_code)
        freeze(model, precision, checkpoint.dtype or torch.bfloat16)
        logger.info("The policy's base was packed to %s in place.", precision)
