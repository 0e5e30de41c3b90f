"""The policy's weights as engines take them: full, dense, with adapters merged, under clean names, one at a time.

They are read under DDP, FSDP2, ZeRO-3 and PEFT. Reading sharded weights gathers them, which is collective: every rank
must read the same weights in the same order. Nothing here writes to the policy.
"""

import copy
import re
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from accelerate import Accelerator
from accelerate.utils import is_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.integrations import dequantize_module_weight
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper, TrainableTokensWrapper
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights
from trl.distributed import DistributedBackend

from ..formats import QuantizedTensor
from ..layers import FrozenLinear, UnifiedLinear
from ..models.linears import LinearLayer, dense_linears
from ..models.names import clean_name
from ..policy.adapters import UnifiedLoraLinear, delta_weight, is_plain


SAVED_WHOLE = re.compile(r"\.modules_to_save\.([^.]+)\.")  # the adapter's name


class PolicyWeights:
    """
    Iterating over it yields all parameters of the policy in the model's order, as `(name, tensor)`.

    Adapters are merged as PEFT does it, but into stand-ins, one layer at a time, so that the trainer's base weights are
    never written: TRL merges and unmerges in place, which in BF16 moves the base a little at every sync.

    Parameters:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]): The policy.
        accelerator ([`~accelerate.Accelerator`]): The trainer's, which knows how the policy is sharded.

    Attributes:
        sharding ([`~trl.distributed.DistributedBackend`]): How it is sharded.
        gathered_dtype (`torch.dtype` or `None`): What FSDP2 rounds weights to when it gathers them for a forward pass.
        has_adapters (`bool`): Whether PEFT wraps it.
        unread (`set[str]`):
            Weights whose values nobody reads: they come without the adapters that wrap them, and as FSDP2 shards them.
    """

    def __init__(self, model: nn.Module, accelerator: Accelerator):
        self.model, self.device = model, accelerator.device
        self.sharding = DistributedBackend(accelerator)
        self.gathered_dtype = None
        if self.sharding.fsdp_version == 2 and (policy := accelerator.state.fsdp_plugin.mixed_precision_policy):
            self.gathered_dtype = policy.param_dtype
        self.unread: set[str] = set()
        self.has_adapters = is_peft_model(model)  # asked for every parameter, and accelerate takes 5 ms to tell

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        adapted, seen = None, set()
        for path, module in self.model.named_modules():
            if isinstance(module, ModulesToSaveWrapper) and module.disable_adapters:
                raise ValueError(
                    f"The adapters are disabled, and `{clean_name(path)}` is trained whole (`modules_to_save`): "
                    "engines sample from the trained module alone. Enable the adapters before you sample."
                )
            if adapted is not None and path.startswith(adapted):
                continue
            if isinstance(module, BaseTunerLayer):
                adapted = f"{path}."
                unread = clean_name(f"{path}.weight") in self.unread
                for leaf, tensor in (self._unmerged(module) if unread else self.merged(module)).items():
                    yield clean_name(f"{path}.{leaf}"), tensor
                continue
            if isinstance(module, FrozenLinear):
                for leaf, tensor in numbers(module).items():
                    yield clean_name(f"{path}.{leaf}"), tensor
                continue
            for leaf, param in module.named_parameters(recurse=False):
                name = f"{path}.{leaf}" if path else leaf
                if id(param) in seen or self._is_adapters(name):
                    continue
                seen.add(id(param))
                name = clean_name(name)
                with self.gathered([param]):
                    yield name, param.data if name in self.unread else self.dense(module, param)

    def _unmerged(self, layer: BaseTunerLayer) -> dict[str, Tensor]:
        """The parameters of an adapted layer's base, of which nobody reads the weight."""
        own = layer.get_base_layer().named_parameters()
        return {name: param.data if name == "weight" else self.full(param) for name, param in own}

    def _is_adapters(self, name: str) -> bool:
        """Whether a parameter is an adapter's: of LoRA, an original that one trains whole, or another adapter's own."""
        if not self.has_adapters:
            return False
        of_adapter = SAVED_WHOLE.search(name)
        is_used = of_adapter is None or of_adapter[1] in self.model.active_adapters
        return self.model.prefix in name or ".original_module." in name or not is_used

    def frozen(self) -> Iterator[tuple[str, FrozenLinear]]:
        """The layers of a frozen base, by the names of their own."""
        for path, module in self.model.named_modules():
            if isinstance(module, FrozenLinear):
                yield clean_name(path), module

    def unified(self, precision: str) -> dict[str, nn.Module]:
        """The layers that compute in `precision` as an engine does, by the names of their own; see [`codes`]."""
        found, adapted = {}, ""
        for path, module in self.model.named_modules():
            if ".modules_to_save." in path or ".original_module" in path:  # quantized as they come
                continue
            if isinstance(module, UnifiedLoraLinear) and module.merges:
                adapted = f"{path}."
            elif not isinstance(module, UnifiedLinear) or (adapted and path.startswith(adapted)):
                continue
            if base_layer(module).precision == precision:
                found[clean_name(path)] = module
        return found

    def codes(self, layer: nn.Module) -> QuantizedTensor:
        """
        The quantized weight that a layer of [`unified`] computes with, an adapter that is merged into it included. Of a
        sharded layer it is made anew, the same on each rank, and not kept.
        """
        with self.whole(layer):
            return layer.codes()

    def forget_codes(self) -> None:
        """Drops the codes that layers keep of their weights, which may have been written past PyTorch's counters."""
        for module in self.model.modules():
            if isinstance(module, UnifiedLinear):
                module.forget()

    def outside_base(self) -> Iterator[tuple[str, Tensor]]:
        """What is neither a frozen layer's weight nor an adapter's: embeddings, norms, the head, biases."""
        packed = {id(tensor) for _, module in self.frozen() for tensor in module.packed()[:3]}
        for name, param in self.parameters().items():
            if id(param) not in packed:
                yield name, param.data

    def first_non_finite(self) -> str | None:
        """Name of the first parameter that holds NaN or infinity, in what this rank has of it. Not collective."""
        for name, param in self.model.named_parameters():
            if not is_finite(local_part(param)):
                return clean_name(name)
        return None

    @property
    def base_model(self) -> PreTrainedModel:
        """The policy without PEFT's wrapper."""
        model = getattr(self.model, "_orig_mod", self.model)  # of `torch.compile`
        return model.get_base_model() if self.has_adapters else model

    @property
    def model_type(self) -> str:
        """Of the text model."""
        return self.model.config.get_text_config().model_type

    @property
    def is_sharded(self) -> bool:
        """Whether a parameter must be gathered to be read (FSDP2, ZeRO-3)."""
        return self.sharding.is_zero3 or self.sharding.fsdp_version == 2

    def parameters(self) -> dict[str, nn.Parameter]:
        """The model's own parameters by their clean names, in order, without those of adapters."""
        named = self.model.named_parameters()
        return {clean_name(name): param for name, param in named if not self._is_adapters(name)}

    def linears(self) -> dict[str, LinearLayer]:
        """
        The quantizable layers in use, by their places in the unwrapped policy. The place of an adapted layer is that of
        the adapter that wraps it.
        """
        layers = dense_linears(self.base_model)
        in_use = {place: layer for place, layer in layers.items() if not self._is_adapters(f"{place}.")}
        return {place.removesuffix(".base_layer"): layer for place, layer in in_use.items()}

    def trained(self) -> list[str]:
        """Names of the quantizable weights that training moves."""
        policy, found = self.base_model, []
        for place, layer in self.linears().items():
            module = policy.get_submodule(place)
            is_adapted = isinstance(module, BaseTunerLayer)
            if is_adapted or (not isinstance(module, FrozenLinear) and module.weight.requires_grad):
                found.append(f"{layer.name}.weight")
        return found

    def gathered(self, params: Iterable[nn.Parameter]) -> AbstractContextManager:
        """Context in which ZeRO-3's `params` are whole; FSDP2's are made so by [`~PolicyWeights.full`]."""
        return self.sharding.gather_params(list(params))

    def full(self, param: nn.Parameter) -> Tensor:
        """A parameter in full, in its own type."""
        if isinstance(param, DTensor):  # FSDP2; gathering needs the accelerator also where parameters are offloaded
            return (param.to(self.device) if param.is_cpu else param).full_tensor()
        return param.data

    @contextmanager
    def whole(self, layer: nn.Module) -> Iterator[None]:
        """Context in which a layer has what FSDP2 shards in full; one that quantizes it, as for its forward pass."""
        own = [(m, name, param) for m in layer.modules() for name, param in m.named_parameters(recurse=False)]
        sharded = [(m, name, param) for m, name, param in own if isinstance(param, DTensor)]
        dtype = self.gathered_dtype if isinstance(base_layer(layer), UnifiedLinear) else None
        try:
            for module, name, param in sharded:
                setattr(module, name, nn.Parameter(self.full(param).to(dtype or param.dtype), False))
            yield
        finally:
            for module, name, param in sharded:
                setattr(module, name, param)

    def dense(self, module: nn.Module, param: nn.Parameter) -> Tensor:
        """`param` of `module` in full; a 4- or 8-bit base of bitsandbytes is dequantized."""
        full = self.full(param)
        return full if full.is_floating_point() else dequantized(module)

    def of_linear(self, layer: nn.Module) -> Tensor:
        """The weight (out, in) of a linear layer, with the adapters that wrap it."""
        with torch.autocast(self.device.type, enabled=False):
            if isinstance(layer, BaseTunerLayer):
                return self.merged(layer)["weight"]
            if isinstance(layer, FrozenLinear):
                return layer.dequantize()
            with self.gathered([layer.weight]), self.whole(layer):
                return self.dense(layer, layer.weight)

    @torch.no_grad()
    def merged(self, layer: BaseTunerLayer) -> dict[str, Tensor]:
        """
        The parameters of an adapted layer's base with the adapters merged in that its forward pass adds, as new
        tensors by name.
        """
        base, adapters = layer.get_base_layer(), adapters_beside(layer)
        with self.gathered(layer.parameters()), self.whole(layer):
            if not adapters:
                return {name: tensor.clone() for name, tensor in numbers(base).items()}
            if is_sum(layer):  # what PEFT's merge computes, without its bookkeeping, which takes longer than the sum
                own = numbers(base)
                for adapter in adapters:
                    # In one pass: summed in the wider type, rounded to the base's
                    weight = own["weight"]
                    own["weight"] = torch.add(weight, delta_weight(layer, adapter), out=torch.empty_like(weight))
                return own
            own = [(m, name, param) for m in layer.modules() for name, param in m.named_parameters(recurse=False)]
            try:
                for module, name, param in own:
                    setattr(module, name, nn.Parameter(param.data.clone() if module is base else param.data, False))
                with default_dtype(torch.float32):  # vLLM's reload, which reads this, has another
                    layer.merge()
                merged = layer.get_base_layer()
                if merged is not base:  # LN tuning exchanges the two
                    layer.unmerge()
                return {name: param.data for name, param in merged.named_parameters()}
            finally:
                layer.merged_adapters.clear()
                for module, name, param in own:
                    setattr(module, name, param)

    def adapter(self) -> dict[str, Tensor]:
        """A and B of each adapted layer by PEFT's names; B times the adapter's scale, which may differ by layer."""
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


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Context in which torch makes tensors of `dtype`. vLLM's own, below 0.30, leaves it so after an error."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def adapters_beside(layer: BaseTunerLayer) -> list[str]:
    """
    The adapters that a layer's forward pass adds to its base: none where they are disabled, or merged into it.

    Raises:
        ValueError: Adapters that are merged and disabled, which the forward pass would first take out of the base.
    """
    if layer.merged and layer.disable_adapters:
        raise ValueError(
            "The policy's adapters are merged and disabled, so its next forward pass changes its weights. Call "
            "`unmerge_adapter()` before you disable them."
        )
    return [] if layer.merged or layer.disable_adapters else list(layer.active_adapters)


def ties_embeddings(policy: PreTrainedModel) -> bool:
    """
    Whether the head of a policy multiplies with the weight of its embeddings, which its config may say of a policy that
    was untied since: by `modules_to_save` or LoRA on one of the two, or in memory.
    """
    embeddings, head = policy.get_input_embeddings(), policy.get_output_embeddings()
    wrapped = BaseTunerLayer | AuxiliaryTrainingWrapper
    if head is None or isinstance(head, wrapped) or isinstance(embeddings, wrapped):
        return False
    return head.weight is embeddings.weight


def base_layer(layer: nn.Module) -> nn.Module:
    """The layer that an adapter wraps, or the layer itself."""
    return layer.get_base_layer() if isinstance(layer, BaseTunerLayer) else layer


def numbers(linear: nn.Linear) -> dict[str, Tensor]:
    """The parameters of a linear layer that is held in full here, by name; a packed weight as what it stands for."""
    if isinstance(linear, FrozenLinear):
        return {"weight": linear.dequantize()} | ({} if linear.bias is None else {"bias": linear.bias.data})
    own = {name: param.data for name, param in linear.named_parameters()}
    return own if own["weight"].is_floating_point() else own | {"weight": dequantized(linear)}


def dequantized(linear: nn.Linear) -> Tensor:
    """The weight that a 4- or 8-bit layer of bitsandbytes stands for. On CPUs PEFT replaces 8-bit ones."""
    weight = linear.weight
    if getattr(getattr(weight, "quant_state", None), "packing_format_for_cpu", False):
        raise ValueError(
            "bitsandbytes has laid the 4-bit base out for AVX-512 in a forward pass of an evaluation, and it cannot be "
            "read exactly any more. Load the base in 8 or 16 bits on this CPU, or use a GPU."
        )
    try:
        return dequantize_module_weight(linear).data
    finally:
        linear.weight = weight


def is_sum(layer: BaseTunerLayer) -> bool:
    """Whether merging a layer's adapters adds a matrix each to its weight, held in full here, and nothing else."""
    if isinstance(layer.get_base_layer(), FrozenLinear):
        return True
    weight = layer.get_base_layer().weight
    if not is_plain(layer):
        return not weight.is_floating_point()  # PEFT cannot merge other adapters into a copy of a 4- or 8-bit base
    plain = isinstance(layer.get_base_layer(), nn.Linear) and not layer.lora_variant
    return plain and all(a in layer.lora_A and not layer.lora_bias.get(a, False) for a in layer.active_adapters)


def fault_of(weights: PolicyWeights) -> str | None:
    """Why no engine could sample from a policy as it is, seen from this rank; `None` where engines can."""
    model = weights.model
    if weights.has_adapters and getattr(model.active_peft_config, "is_prompt_learning", False):
        return NO_WEIGHTS.format(model.active_peft_config.peft_type.value)
    if isinstance(weights.base_model.get_output_embeddings(), TrainableTokensWrapper):
        return (
            "its head is tied to embeddings with `trainable_token_indices`, and TRL's loss cannot read a head that "
            "PEFT wraps. Untie the model first (`tie_word_embeddings=False`), or train the tokens without PEFT."
        )
    for path, module in model.named_modules():
        added = [name for name, bias in getattr(module, "lora_bias", {}).items() if bias]
        if isinstance(module, BaseTunerLayer) and added and module.get_base_layer().bias is None:
            return f"the adapter's `lora_bias` adds a bias to `{clean_name(path)}`, which has none. Set it to False."
    for name, param in model.named_parameters():
        if param.dtype == torch.float64:
            return f"`{clean_name(name)}` is in float64, which no format takes. Load it in float32 or bfloat16."
    if broken := weights.first_non_finite():
        return (
            f"its weight `{broken}` holds NaN or infinity, so that nothing it computes has a meaning. The fault is the "
            "policy's: load or save it again, or take an earlier checkpoint."
        )
    return _unlike_config(weights.base_model)


NO_WEIGHTS = (
    "an adapter of the kind {} is no change of the policy's weights, and weights are all that engines are given. Use "
    "LoRA or another adapter that is merged into them, or leave `rollout_precision` unset: TRL generates."
)


def local_part(param: Tensor) -> Tensor:
    """What this rank holds of a parameter that FSDP2 or ZeRO-3 may have sharded; the parameter itself otherwise."""
    return param.to_local() if isinstance(param, DTensor) else getattr(param, "ds_tensor", param)


def is_finite(tensor: Tensor) -> bool:
    """Whether a tensor holds neither NaN nor infinity; true of codes, and of what has no values on this rank."""
    if not tensor.is_floating_point() or tensor.element_size() == 1 or tensor.is_meta or not tensor.numel():
        return True
    return bool(torch.stack(tensor.detach().aminmax()).isfinite().all())


def _unlike_config(policy: PreTrainedModel) -> str | None:
    """What tells a policy's modules from those that its config describes, by which engines are built."""
    with torch.device("meta"), no_init_weights():
        described = type(policy)(copy.deepcopy(policy.config))
    expected = {name: tuple(param.shape) for name, param in described.named_parameters(remove_duplicate=False)}
    found = {clean_name(name): shape for name, shape in _shapes(policy)}
    instead = "Engines are built by the config: change `config` with the model, and save both together."
    if missing := [name for name in expected if name not in found]:
        return f"it has no `{missing[0]}`, and its config describes one. {instead}"
    if added := [name for name in found if name not in expected]:
        return f"it has `{added[0]}`, which its config does not describe. {instead}"
    for name, shape in found.items():
        if shape is not None and shape != expected[name]:
            return f"its `{name}` has the shape {shape}, and its config describes {expected[name]}. {instead}"
    return None


def _shapes(policy: PreTrainedModel) -> Iterator[tuple[str, tuple[int, ...] | None]]:
    """A policy's parameters, without adapters; their shapes where they are not packed."""
    adapted = None
    for path, module in policy.named_modules():
        if ".original_module" in path or (adapted is not None and path.startswith(adapted)):
            continue
        if isinstance(module, BaseTunerLayer):
            adapted = f"{path}."
        layer = base_layer(module)
        if isinstance(layer, FrozenLinear):
            yield from ((f"{path}.{name}", None) for name in ("weight", *(() if layer.bias is None else ("bias",))))
            continue
        for name, param in layer.named_parameters(recurse=False):
            shape = tuple(getattr(param, "ds_shape", param.shape))
            yield (f"{path}.{name}" if path else name), shape if param.is_floating_point() else None
