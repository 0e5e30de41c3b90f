"""The embedded engine where sampler and policy compute the same: one set of weights, held once."""

import logging
from copy import deepcopy

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import PreTrainedModel

from ...models.linears import dense_linears
from ...noise import noised_norms
from ..trl_adapter import count_layers
from .transformers_engine import TransformersEngine


logger = logging.getLogger(__name__)


class SharedEngine(TransformersEngine):
    """
    [`TransformersEngine`] for a policy that is sampled in its own `train_precision`: Q(W) + BA (QeRL), or layers that
    are trained in the numbers that sample (Jet-RL).

    The copy has modules of its own, out of training mode, around the policy's own tensors: linear layers, adapters,
    embeddings and the head. Only the norms that noise is laid on are held twice, so a sync copies those and
    nothing else, and the mismatch is what differing sums leave.
    """

    def build_copy(self, policy: PreTrainedModel) -> PreTrainedModel:
        """The model that samples, around the policy's own tensors."""
        own = set(noised_norms(self.weights.model_type, dict(policy.named_parameters()))) if self.wide_norms else set()
        shared = [tensor for name, tensor in policy.named_parameters() if name not in own]
        policy_modules = set(policy.modules())
        linears = [policy.get_submodule(place) for place in dense_linears(policy)]
        shared += [*policy.buffers(), *linears]
        model = deepcopy(policy, {id(part): part for part in shared})
        for module in model.modules():
            if module not in policy_modules:
                vars(module).pop("forward", None)  # accelerate's and others' wrappers, which call the policy's
        for name in own:
            model.get_parameter(name).requires_grad_(False)
        self._own = own
        logger.info(
            "The embedded engine samples from the policy's own %d linear layers in %s.",
            count_layers(policy, self.precision),
            self.precision,
        )
        return model.eval()

    @torch.no_grad()
    def sync_weights(self):
        """Brings back the clean norms and the settings of adapters; all else is the policy's."""
        policy = self.weights.base_model
        self.weights.forget_codes()
        if not self._is_around(policy):
            self.copy = self.build_copy(policy)
        for name, module in policy.named_modules():
            if isinstance(module, BaseTunerLayer):
                follow_adapters(self.copy.get_submodule(name), module)
        for name in self._own:
            self.copy.get_parameter(name).copy_(policy.get_parameter(name))
        self.forget_noise()
        self.mark_current()

    def _is_around(self, policy: PreTrainedModel) -> bool:
        """Whether the copy still has the policy's tensors and linear layers, which someone may have exchanged."""
        modules, copies = dict(policy.named_modules()), dict(self.copy.named_modules())
        if modules.keys() != copies.keys():
            return False
        linears = dense_linears(policy)
        for path, module in modules.items():
            if ".lora_" in path:  # follows with the adapters
                continue
            copy = copies[path]
            if type(copy) is not type(module) or (path in linears and copy is not module):
                return False
            own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
            if any(getattr(copy, name) is not part for name, part in own if f"{path}.{name}" not in self._own):
                return False
        return True


def follow_adapters(copy: BaseTunerLayer, layer: BaseTunerLayer) -> None:
    """Gives a layer of the copy the adapters that the policy's layer has now, and their settings."""
    for name in layer.adapter_layer_names:
        setattr(copy, name, getattr(layer, name))
    for name in layer.lora_dropout.keys() - copy.lora_dropout.keys():
        copy.lora_dropout[name] = deepcopy(layer.lora_dropout[name]).eval()
    for name in ("r", "lora_alpha", "scaling", "merged_adapters", "_active_adapter", "_disable_adapters"):
        setattr(copy, name, deepcopy(getattr(layer, name)))
