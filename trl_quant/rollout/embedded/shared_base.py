"""The embedded engines for a policy that already computes in the engine's precision: both share one set of weights."""

import logging
from collections.abc import Collection
from copy import deepcopy
from functools import partial

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn
from transformers import PreTrainedModel

from ...models.linears import places_of_modules, sampled_linears
from ...noise import noised_norms
from ...policy.positions import fixed_context, keep_cache
from ..base import count_layers
from ..fingerprint import ADAPTED
from .transformers_engine import TransformersEngine


logger = logging.getLogger(__name__)


class SharedEngine(TransformersEngine):
    """
    [`TransformersEngine`] for a policy that is sampled in its own `train_precision`: Q(W) + BA (QeRL), layers that
    compute in FP8 or INT8 in training too (Jet-RL), or all weights in 4 bits.

    The copy has its own modules, in evaluation mode, around the policy's tensors: linear layers, adapters, embeddings
    and the head. Only the norms that get noise are held twice, and a sync copies nothing but them and the settings of
    adapters. The remaining mismatch comes from sums in another order.

    Attributes:
        shares_adapters (`bool`): Whether the copy computes with the policy's own adapters.
    """

    shares_adapters = True

    def build_copy(self, policy: PreTrainedModel) -> PreTrainedModel:
        """Builds the model that samples, around the policy's own tensors."""
        params, own = dict(policy.named_parameters()), self.own_parameters(policy)
        shared = [tensor for name, tensor in params.items() if name not in own]
        policy_modules = set(policy.modules())
        linears = [policy.get_submodule(place) for place in places_of_modules(sampled_linears(policy))]
        shared += [*policy.buffers(), *linears]
        model = deepcopy(policy, {id(part): part for part in shared})
        for module in model.modules():
            if module not in policy_modules:
                vars(module).pop("forward", None)  # a wrapper such as accelerate's would call the policy's module
        for name in own:
            model.get_parameter(name).requires_grad_(False)
        self._copied_context = fixed_context(policy)
        keep_cache(model)
        self._own_params = own
        logger.info(
            "The embedded engine samples from the policy's own %d linear layers in %s.",
            count_layers(policy, self.precision),
            self.precision,
        )
        return model.eval()

    def own_parameters(self, policy: PreTrainedModel) -> set[str]:
        """Returns the names of the policy's parameters that the copy does not share: the norms that get noise."""
        return set(noised_norms(self.weights.model_type, dict(policy.named_parameters()))) if self.wide_norms else set()

    @torch.no_grad()
    def sync(self) -> None:
        """Copies the copy's own parameters and the settings of adapters. The rest is shared with the policy."""
        policy = self.weights.base_model
        self.weights.forget_quantized_weights()
        is_copied = (fixed_context(policy), self.own_parameters(policy)) == (self._copied_context, self._own_params)
        if not is_copied or not self._shares_with(policy):
            self.copy = self.build_copy(policy)
        for name, module in policy.named_modules():
            if isinstance(module, ADAPTED):
                follow_adapters(self.copy.get_submodule(name), module, self.shares_adapters)
        for name in self._own_params:
            self.copy.get_parameter(name).copy_(policy.get_parameter(name))
        self.forget_noise()
        self.mark_current()

    def copied_layers(self) -> dict[str, nn.Module]:
        return {place: self.copy.get_submodule(place) for place in places_of_modules(self.weights.linears())}

    def replaced_layers(self) -> Collection[str]:
        return ()  # they are the policy's own

    def _shares_with(self, policy: PreTrainedModel) -> bool:
        """Whether the copy still shares the policy's tensors and linear layers, which other code may have replaced."""
        modules, copies = dict(policy.named_modules()), dict(self.copy.named_modules())
        if modules.keys() != copies.keys():
            return False
        linears = places_of_modules(sampled_linears(policy))
        for path, module in modules.items():
            if ".lora_" in path:  # `follow_adapters` copies these
                continue
            copy = copies[path]
            if type(copy) is not type(module) or (path in linears and copy is not module):
                return False
            for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
                if f"{path}.{name}" not in self._own_params and getattr(copy, name) is not tensor:
                    return False
        return True


class FrozenBaseEngine(SharedEngine):
    """
    [`SharedEngine`] for a policy that trains while the engine samples: both share the codes of the policy's frozen
    base, and a sync copies what trains, such as the adapter:

        policy = Q(W) + B A        copy = Q(W) + B' A', with A' and B' those of the last sync
    """

    shares_adapters = False

    def own_parameters(self, policy: PreTrainedModel) -> set[str]:
        """Returns the names of the parameters that train or get noise, which the copy has as they were at a sync."""
        trained = {name for name, param in policy.named_parameters() if param.requires_grad}
        return super().own_parameters(policy) | trained


def follow_adapters(
    copy: nn.Module, layer: BaseTunerLayer | AuxiliaryTrainingWrapper, shares_adapters: bool = True
) -> None:
    """
    Gives a layer of the copy the settings of the policy's layer and, if it shares them, its adapters. Dropout is the
    copy's own, in evaluation mode. A module that is trained whole (`modules_to_save`) has settings alone: its
    parameters are shared, or the copy's own.
    """
    if isinstance(layer, BaseTunerLayer):
        layers = layer.adapter_layer_names if shares_adapters else ()
        for name in filter(partial(hasattr, layer), (*layers, *layer.other_param_names)):
            value = getattr(layer, name)
            if name.endswith("_dropout") and isinstance(value, nn.ModuleDict):
                own = getattr(copy, name)
                for adapter in value.keys() - own.keys():
                    own[adapter] = deepcopy(value[adapter]).eval()
            else:
                setattr(copy, name, value)
    for name in ("merged_adapters", "_active_adapter", "_disable_adapters"):
        if name in vars(layer):
            setattr(copy, name, deepcopy(vars(layer)[name]))
