"""Streams the policy's weights to an engine, one tensor at a time: gathered, dense, with adapters merged, and under the
names that they have without wrappers ("clean" names).

This works under DDP, FSDP2, ZeRO-3 and PEFT. Reading a sharded weight gathers it, which is collective: every rank must
read the same weights in the same order. Nothing here writes to the policy.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import accumulate

import torch
from accelerate import Accelerator
from accelerate.utils import is_peft_model
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ..formats import QuantizedTensor
from ..layers import FrozenExperts, FrozenLinear, UnifiedExperts, UnifiedLinear
from ..models.linears import LinearLayer, sampled_linears, sent_with
from ..models.names import clean_name
from ..policy.adapters import UnifiedLoraLinear, delta_weight
from .fingerprint import Fingerprint, changed_places
from .tensors import (
    adapters_beside,
    base_layer,
    default_dtype,
    dense_parameters,
    dequantized,
    is_finite,
    local_part,
    merges_by_adding,
    outer_modules,
)


SAVED_WHOLE = re.compile(r"\.modules_to_save\.([^.]+)\.")  # group 1: the adapter's name


class PolicyWeights:
    """
    The weights of the policy. Iterating over it yields all parameters in the model's order, as `(name, tensor)`.

    Adapters are merged as PEFT merges them, but into copies, one layer at a time, so that the trainer's base weights
    are never written. TRL merges and unmerges in place, which in BF16 changes the base slightly at every sync.

    Parameters:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]): The policy.
        accelerator ([`~accelerate.Accelerator`]): The trainer's accelerator, which knows how the policy is sharded.

    Attributes:
        is_zero3 (`bool`): Whether DeepSpeed's ZeRO-3 shards the policy.
        fsdp_version (`int` or `None`): The version of FSDP that shards the policy.
        gathered_dtype (`torch.dtype` or `None`): The type that FSDP2 rounds weights to when it gathers them.
        has_adapters (`bool`): Whether PEFT wraps the policy.
    """

    def __init__(self, model: nn.Module, accelerator: Accelerator):
        self.model, self.device = model, accelerator.device
        deepspeed = accelerator.state.deepspeed_plugin
        self.is_zero3 = deepspeed is not None and deepspeed.zero_stage == 3
        fsdp = getattr(accelerator.state, "fsdp_plugin", None)  # accelerate sets it only under FSDP
        self.fsdp_version = None if fsdp is None else fsdp.fsdp_version
        self.gathered_dtype = None
        if self.fsdp_version == 2:
            mixed_precision = fsdp.mixed_precision_policy
            self.gathered_dtype = mixed_precision.param_dtype if mixed_precision else None
        self.has_adapters = is_peft_model(model)  # stored, since this takes 5 ms and is needed for every parameter

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self.stream()

    def stream(
        self, placeholders: Collection[str] = (), groups: Collection[str] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """
        Yields all parameters, or those of some `groups` ([`~models.linears.sent_with`]). Those named in `placeholders`,
        whose values nobody reads, are stood in for by the base weight without its adapters, sharded under FSDP2.
        """
        seen = set()
        for path, module in outer_modules(self.model):
            if isinstance(module, ModulesToSaveWrapper) and module.disable_adapters:
                raise ValueError(
                    f"The adapters are disabled, and `{clean_name(path)}` is trained whole (`modules_to_save`): "
                    "engines sample only from the trained module. Enable the adapters before you sample."
                )
            if isinstance(module, BaseTunerLayer | FrozenLinear):
                weight = clean_name(f"{path}.weight")
                if groups is not None and sent_with(weight) not in groups:
                    continue
                if isinstance(module, FrozenLinear):
                    tensors = dense_parameters(module)
                else:
                    tensors = self._unmerged(module) if weight in placeholders else self.merged(module)
                for leaf, tensor in tensors.items():
                    yield clean_name(f"{path}.{leaf}"), tensor
                continue
            if isinstance(module, FrozenExperts):
                for leaf in module.leaves:
                    name = clean_name(f"{path}.{leaf}")
                    if groups is None or sent_with(name) in groups:
                        yield name, module.dequantize(leaf)
                continue
            for leaf, param in module.named_parameters(recurse=False):
                name = f"{path}.{leaf}" if path else leaf
                if id(param) in seen or self._is_adapters(name):
                    continue
                seen.add(id(param))
                name = clean_name(name)
                if groups is not None and sent_with(name) not in groups:
                    continue
                with self.gathered([param]):
                    yield name, param.data if name in placeholders else self.dense(module, param)

    def changed_groups(self, before: Fingerprint | None, now: Fingerprint) -> set[str] | None:
        """
        Returns the groups ([`~models.linears.sent_with`]) with tensors that may differ between two fingerprints of the
        policy, of which `now` is the current one; `None` if all may.
        """
        places = changed_places(self.model, before, now)
        if places is None:
            return None
        adapted = {path for path, module in outer_modules(self.model) if isinstance(module, BaseTunerLayer)}
        groups = set()
        for place in places:
            parents = accumulate(place.split("."), "{}.{}".format)
            outer = next((path for path in parents if path in adapted), None)
            groups.add(sent_with(clean_name(place if outer is None else f"{outer}.weight")))
        return groups

    def _unmerged(self, layer: BaseTunerLayer) -> dict[str, Tensor]:
        """As [`merged`], but the weight is the base's own, a placeholder, see [`stream`]."""
        own = dict(layer.get_base_layer().named_parameters())
        params = {name: param.data if name == "weight" else self.full(param) for name, param in own.items()}
        if "bias" in params:
            params["bias"] = self.bias_of_linear(layer)
        return params

    def _is_adapters(self, name: str) -> bool:
        """
        Whether a parameter does not belong to the policy's own model: an adapter's matrix, the original of a module
        that is trained whole (`modules_to_save`), or such a module of an adapter that is not active.
        """
        if not self.has_adapters:
            return False
        saved_whole = SAVED_WHOLE.search(name)
        is_active = saved_whole is None or saved_whole[1] in self.model.active_adapters
        return self.model.prefix in name or ".original_module." in name or not is_active

    def frozen(self) -> Iterator[tuple[str, FrozenLinear | FrozenExperts]]:
        """Yields the clean names and the layers of a frozen base, and the experts of each of its layers."""
        for path, module in self.model.named_modules():
            if isinstance(module, FrozenLinear | FrozenExperts):
                yield clean_name(path), module

    def multiplies_in(self, precision: str) -> bool:
        """Whether layers of the policy multiply codes in `precision`."""
        layers = (module for module in self.model.modules() if isinstance(module, UnifiedLinear | FrozenLinear))
        own = (layer for layer in layers if isinstance(layer, UnifiedLinear) or layer.quantizes_inputs)
        return any(layer.precision == precision for layer in own)

    def unified(self, precision: str) -> dict[str, nn.Module]:
        """
        Returns the layers that quantize their weights to `precision` in training too, by their clean names; see
        [`quantized_weight`].
        """
        found, adapted = {}, ""
        for path, module in self.model.named_modules():
            if ".modules_to_save." in path or ".original_module" in path:  # streamed unquantized
                continue
            if isinstance(module, UnifiedLoraLinear) and module.merges:
                adapted = f"{path}."
            elif not isinstance(module, UnifiedLinear | UnifiedExperts) or (adapted and path.startswith(adapted)):
                continue
            if base_layer(module).precision == precision:
                found[clean_name(path)] = module
        return found

    def quantized_weights(self, precision: str) -> dict[str, Callable[[], QuantizedTensor]]:
        """
        Returns, by the names of the weights that the layers of [`unified`] quantize, functions that return them
        quantized.
        """
        found = {}
        for name, layer in self.unified(precision).items():
            if isinstance(layer, UnifiedExperts):
                found |= {f"{name}.{leaf}": partial(self._quantized_experts, layer, leaf) for leaf in layer.leaves}
            else:
                found[f"{name}.weight"] = partial(self.quantized_weight, layer)
        return found

    def quantized_weight(self, layer: nn.Module) -> QuantizedTensor:
        """
        Returns the quantized weight that a linear layer of [`unified`] computes with, including an adapter that is
        merged into it. A sharded layer is gathered and quantized again at each call, with the same result on each rank.
        """
        with self.whole(layer):
            return layer.codes()

    def _quantized_experts(self, experts: UnifiedExperts, leaf: str) -> QuantizedTensor:
        """As [`quantized_weight`], of the tensor called `leaf` of a layer's experts."""
        with self.whole(experts, leaf):
            return experts.codes(leaf)

    def forget_quantized_weights(self) -> None:
        """
        Drops the quantized weights that layers cache. PyTorch's version counter misses writes through `.data`, so a
        cached weight may be stale.
        """
        for module in self.model.modules():
            if isinstance(module, UnifiedLinear | UnifiedExperts):
                module.forget()

    def outside_base(self) -> Iterator[tuple[str, Tensor]]:
        """
        Yields the parameters that belong neither to the packed weights of a frozen base nor to an adapter: embeddings,
        norms, the head, biases.
        """
        packed = {id(tensor) for _, module in self.frozen() for tensor in module.packed()}
        for name, param in self.parameters().items():
            if id(param) not in packed:
                yield name, param.data

    def first_non_finite(self) -> str | None:
        """
        Returns the name of the first parameter that holds NaN or infinity in this rank's shard; `None` if all are
        finite. Not collective.
        """
        for name, param in self.model.named_parameters():
            if not is_finite(local_part(param)):
                return clean_name(name)
        return None

    @property
    def base_model(self) -> PreTrainedModel:
        """The policy without the wrappers of PEFT and `torch.compile`."""
        model = getattr(self.model, "_orig_mod", self.model)
        return model.get_base_model() if self.has_adapters else model

    @property
    def model_type(self) -> str:
        """`model_type` of the text model's config."""
        return self.model.config.get_text_config().model_type

    @property
    def is_sharded(self) -> bool:
        """Whether a parameter must be gathered to be read (FSDP2, ZeRO-3)."""
        return self.is_zero3 or self.fsdp_version == 2

    def parameters(self) -> dict[str, nn.Parameter]:
        """Returns the model's own parameters by their clean names, in order, without those of adapters."""
        named = self.model.named_parameters()
        return {clean_name(name): param for name, param in named if not self._is_adapters(name)}

    def linears(self) -> dict[str, LinearLayer]:
        """
        Returns the quantizable layers in use, by their paths in the unwrapped policy. The path of an adapted layer is
        that of the adapter that wraps it. The path of a layer's experts is that of the tensor that holds them all.
        """
        layers = sampled_linears(self.base_model)
        in_use = {place: layer for place, layer in layers.items() if not self._is_adapters(f"{place}.")}
        return {place.removesuffix(".base_layer"): layer for place, layer in in_use.items()}

    def trained(self) -> list[str]:
        """Returns the names of the quantizable weights that are trained, directly or by an adapter."""
        policy, found = self.base_model, []
        wrappers = [module for module in policy.modules() if isinstance(module, ParamWrapper)]
        adapted = {(wrapper.get_base_layer(), wrapper.parameter_name) for wrapper in wrappers}
        for place, layer in self.linears().items():
            parent, _, leaf = place.rpartition(".")
            owner = policy.get_submodule(parent)
            held = getattr(owner, leaf)
            if isinstance(held, nn.Parameter):
                is_trained = held.requires_grad or (owner, leaf) in adapted
            else:
                is_trained = isinstance(held, BaseTunerLayer)
                is_trained = is_trained or (not isinstance(held, FrozenLinear) and held.weight.requires_grad)
            if is_trained:
                found.append(layer.weight)
        return found

    def gathered(self, params: Iterable[nn.Parameter]) -> AbstractContextManager:
        """Context in which ZeRO-3's `params` are gathered. FSDP2's are gathered by [`~PolicyWeights.full`]."""
        if not self.is_zero3:
            return nullcontext()
        import deepspeed

        return deepspeed.zero.GatheredParameters(list(params))

    def full(self, param: nn.Parameter) -> Tensor:
        """Returns a parameter in full, in its own type."""
        if isinstance(param, DTensor):  # FSDP2. Offloaded parameters must be on the accelerator to be gathered
            return (param.to(self.device) if param.is_cpu else param).full_tensor()
        return param.data

    @contextmanager
    def whole(self, layer: nn.Module, leaf: str | None = None) -> Iterator[None]:
        """
        Context in which the parameters of a layer that FSDP2 shards, or only the one called `leaf`, are gathered: in
        the type of the forward pass for a layer that quantizes its weight, and in their own type for any other.
        """
        owned = [item for item in _owned(layer) if leaf in (None, item[1])]
        sharded = [(owner, name, param) for owner, name, param in owned if isinstance(param, DTensor)]
        quantizes = isinstance(base_layer(layer), UnifiedLinear | UnifiedExperts)
        dtype = self.gathered_dtype if quantizes else None
        try:
            for module, name, param in sharded:
                setattr(module, name, nn.Parameter(self.full(param).to(dtype or param.dtype), False))
            yield
        finally:
            for module, name, param in sharded:
                setattr(module, name, param)

    def dense(self, module: nn.Module, param: nn.Parameter) -> Tensor:
        """Returns `param` of `module` in full; a 4- or 8-bit base of bitsandbytes is dequantized."""
        full = self.full(param)
        return full if full.is_floating_point() else dequantized(module)

    def of_linear(self, layer: nn.Module) -> Tensor:
        """Returns the weight of a linear layer, shape (out, in), with its adapters merged."""
        with torch.autocast(self.device.type, enabled=False):
            if isinstance(layer, BaseTunerLayer):
                return self.merged(layer)["weight"]
            if isinstance(layer, FrozenLinear):
                return layer.dequantize()
            with self.gathered([layer.weight]), self.whole(layer):
                return self.dense(layer, layer.weight)

    def bias_of_linear(self, layer: nn.Module) -> Tensor | None:
        """Returns the bias of a linear layer, shape (out,), with its adapters merged; `None` if it has none."""
        base = base_layer(layer)
        if base.bias is None:
            return None
        if isinstance(layer, BaseTunerLayer) and not merges_by_adding(layer):  # IA3, and LoRA with `lora_bias`
            with torch.autocast(self.device.type, enabled=False):
                return self.merged(layer)["bias"]
        with self.gathered([base.bias]):
            return self.full(base.bias).clone()

    @torch.no_grad()
    def merged(self, layer: BaseTunerLayer) -> dict[str, Tensor]:
        """
        Returns the parameters of an adapted layer's base, with the adapters of its forward pass merged in, as new
        tensors by name.
        """
        if isinstance(layer, ParamWrapper):
            return self._merged_parameters(layer)
        base, adapters = layer.get_base_layer(), adapters_beside(layer)
        with self.gathered(layer.parameters()), self.whole(layer):
            if not adapters:
                return {name: tensor.clone() for name, tensor in dense_parameters(base).items()}
            if merges_by_adding(layer):  # same result as PEFT's merge, whose bookkeeping takes longer than the sum
                params = dense_parameters(base)
                for adapter in adapters:
                    # One pass: `add` sums in the wider of the two types and rounds to the base's
                    weight = params["weight"]
                    params["weight"] = torch.add(weight, delta_weight(layer, adapter), out=torch.empty_like(weight))
                return params
            owned = _owned(layer)
            try:
                for module, name, param in owned:  # PEFT then merges into a copy of the base
                    setattr(module, name, nn.Parameter(param.data.clone() if module is base else param.data, False))
                with default_dtype(torch.float32):  # vLLM's reload, which reads this stream, sets another default
                    layer.merge()
                merged = layer.get_base_layer()
                if merged is not base:  # LN tuning replaces the base layer
                    layer.unmerge()
                return {name: param.data for name, param in merged.named_parameters()}
            finally:
                layer.merged_adapters.clear()
                for module, name, param in owned:
                    setattr(module, name, param)

    def _merged_parameters(self, layer: ParamWrapper) -> dict[str, Tensor]:
        """
        As [`merged`], for the tensors (experts, out, in) of a layer's experts, or for a router (`target_parameters`).
        Each product s B A is rounded to the tensor's type before it is added, as PEFT's merge does. One wrapper of PEFT
        adapts one tensor and holds the next wrapper.
        """
        with self.gathered(layer.parameters()), self.whole(layer):
            tensors = {name: param.data for name, param in layer.get_base_layer().named_parameters()}
            for wrapper in layer.modules():
                for adapter in adapters_beside(wrapper) if isinstance(wrapper, ParamWrapper) else ():
                    if adapter in wrapper.lora_A:
                        name = wrapper.parameter_name
                        tensors[name] = tensors[name] + wrapper.get_delta_weight(adapter)
            return tensors

    def adapter(self) -> dict[str, Tensor]:
        """
        Returns A (rank, in) and B (out, rank) of each adapted layer by PEFT's names. B is multiplied by the adapter's
        scale, which may differ from layer to layer. Raises `ValueError` if the adapter is merged.
        """
        tensors, (adapter,) = {}, self.model.active_adapters
        for name, layer in self.model.named_modules():
            if isinstance(layer, BaseTunerLayer) and adapter in layer.lora_A:
                if layer.merged:
                    raise ValueError("`lora_sync`='adapter' with a merged adapter: call `unmerge_adapter()` first.")
                a, b = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight
                name = f"base_model.model.{clean_name(name)}"
                with self.gathered([a, b]):
                    tensors[f"{name}.lora_A.weight"] = self.full(a).clone()
                    scaling = 0.0 if layer.disable_adapters else layer.scaling[adapter]
                    tensors[f"{name}.lora_B.weight"] = self.full(b) * scaling
        return tensors


def _owned(layer: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """Lists the parameters of a layer, each with the module that holds it and its name there."""
    return [(owner, name, param) for owner in layer.modules() for name, param in owner.named_parameters(recurse=False)]
