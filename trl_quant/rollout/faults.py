"""Says why no engine can sample from a policy: what is wrong with its weights, its adapter or its config."""

import copy
from collections.abc import Iterator

import torch
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import TrainableTokensWrapper
from torch import nn
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from ..layers import FrozenExperts, FrozenLinear
from ..models.linears import is_mixtures
from ..models.names import clean_name
from .tensors import base_layer, outer_modules
from .weights import PolicyWeights


NO_WEIGHTS = (
    "an adapter of the kind {} does not change the policy's weights, but an engine gets only weights. Use LoRA or "
    "another adapter that can be merged, or leave `rollout_precision` unset: TRL generates."
)


def fault_of(weights: PolicyWeights) -> str | None:
    """Returns the reason, as far as this rank can see, why no engine can sample from a policy, or `None`."""
    model = weights.model
    if weights.has_adapters and getattr(model.active_peft_config, "is_prompt_learning", False):
        return NO_WEIGHTS.format(model.active_peft_config.peft_type.value)
    fault = adapter_fault(model, weights.base_model)
    if fault is not None:
        return fault
    for name, param in model.named_parameters():
        if param.dtype == torch.float64:
            return f"`{clean_name(name)}` is in float64, which no format takes. Load it in float32 or bfloat16."
    broken = weights.first_non_finite()
    if broken is not None:
        return (
            f"its weight `{broken}` holds NaN or infinity, so results are meaningless. The policy itself is broken: "
            "load or save it again, or use an earlier checkpoint."
        )
    return _unlike_config(weights.base_model)


def adapter_fault(model: nn.Module, base: PreTrainedModel) -> str | None:
    """
    Returns the reason why no engine can take the adapter of a policy, or `None`. `base` is the policy without PEFT's
    wrappers. Values of weights do not matter.
    """
    if isinstance(base.get_output_embeddings(), TrainableTokensWrapper):
        return (
            "its head is tied to embeddings with `trainable_token_indices`, and TRL's loss cannot read a head that "
            "PEFT wraps. Untie the model first (`tie_word_embeddings=False`), or train the tokens without PEFT."
        )
    for path, module in model.named_modules():
        if isinstance(module, ParamWrapper) and not is_mixtures(clean_name(f"{path}.{module.parameter_name}")):
            return (
                f"the adapter's `target_parameters` has `{module.parameter_name}` of `{clean_name(path)}`, and syncs "
                "merge only those of experts and routers. Adapt the module (`target_modules`)."
            )
        added = [name for name, bias in getattr(module, "lora_bias", {}).items() if bias]
        if isinstance(module, BaseTunerLayer) and added and module.get_base_layer().bias is None:
            return f"the adapter's `lora_bias` adds a bias to `{clean_name(path)}`, which has none. Set it to False."
    return None


def _unlike_config(policy: PreTrainedModel) -> str | None:
    """
    Returns the first difference between a policy's parameters and those that its config describes; `None` if there is
    none. Engines are built from the config.
    """
    with torch.device("meta"), no_init_weights():
        described = type(policy)(copy.deepcopy(policy.config))
    expected = {name: tuple(param.shape) for name, param in described.named_parameters(remove_duplicate=False)}
    found = {clean_name(name): shape for name, shape in _shapes(policy)}
    instead = "Engines are built from the config: change `config` with the model, and save both together."
    for name in expected:
        if name not in found:
            return f"it has no `{name}`, but its config describes one. {instead}"
    for name in found:
        if name not in expected:
            return f"it has `{name}`, which its config does not describe. {instead}"
    for name, shape in found.items():
        if shape is not None and shape != expected[name]:
            return f"its `{name}` has the shape {shape}, but its config describes {expected[name]}. {instead}"
    return None


def _shapes(policy: PreTrainedModel) -> Iterator[tuple[str, tuple[int, ...] | None]]:
    """Yields the names of a policy's parameters, without adapters, and their shapes; `None` for a packed parameter."""
    for path, module in outer_modules(policy):
        if ".original_module" in path:
            continue
        layer = base_layer(module)
        if isinstance(layer, FrozenLinear):
            yield f"{path}.weight", None
            if layer.bias is not None:
                yield f"{path}.bias", None
            continue
        if isinstance(layer, FrozenExperts):
            yield from ((f"{path}.{leaf}", None) for leaf in layer.leaves)
            continue
        for name, param in layer.named_parameters(recurse=False):
            shape = tuple(getattr(param, "ds_shape", param.shape))
            yield (f"{path}.{name}" if path else name), shape if param.is_floating_point() else None
