"""
Names the tensors of a policy as a checkpoint on disk does: those of a mixture of experts, one expert at a time, and
those of a model that reads images.

In memory a layer's experts are two tensors, `experts.gate_up_proj` (E, 2 I, H) and `experts.down_proj` (E, H, I). On
disk each expert has matrices of its own, under names that differ from family to family (`experts.3.gate_proj.weight`,
`block_sparse_moe.experts.3.w1.weight`), and engines load those. transformers knows how to convert the tensors, but
copies them. Here it converts small tensors that number the matrices, which tells their names; what is streamed are
views of the policy's tensors.

A model that reads images is published under other names too (`visual.blocks.0`, `vision_tower.vision_model.encoder`),
and those are the names that engines are known to load. A policy that was loaded knows the names in its checkpoint. For
one that was built from a config alone they are read from the checkpoint, and renamed as transformers would load them.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key, revert_weight_conversion

from ..models.families import EXPERT_PARTS, ROUTER
from ..models.linears import is_mixtures, unquantized_linears
from ..models.names import clean_name


class NamesOnDisk:
    """
    Names the tensors of one policy; see the module's docstring.

    Parameters:
        policy ([`~transformers.PreTrainedModel`]): The policy, without wrappers.
        found (`Iterable[str]`, *optional*): Names in the checkpoint of a policy that was built from its config alone.
    """

    def __init__(self, policy: PreTrainedModel, found: Iterable[str] = ()):
        self.policy = policy
        self._reads_images = policy.config.get_text_config() is not policy.config
        # Name in memory -> name on disk, of what is no expert
        self._names = dict(self._loaded(found)) if self._reads_images else {}
        self._numbers: dict[str, dict[str, int]] = {}  # name in memory -> names on disk -> numbers of the matrices

    def stream(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """
        Yields `weights`, with those of [`with_buffers`], under their names on disk. A layer's experts, or their codes
        or scales of any number of dimensions (experts, ...), come expert by expert. The names of codes and scales are
        those of the experts with a suffix, such as `experts.down_proj_scale`.
        """
        for name, tensor in self.with_buffers(weights):
            if not is_mixtures(name):
                yield self.of(name), tensor
                continue
            place, _, leaf = name.rpartition(".")
            kind = next((kind for kind in EXPERT_PARTS if leaf.startswith(kind)), None)
            if kind is None:  # a router
                (on_disk,) = self._numbered(name)
                yield on_disk, tensor
                continue
            suffix, parts = leaf.removeprefix(kind), EXPERT_PARTS[kind]
            # A scale of a whole expert (1,) is that of each part
            rows = [part for own in tensor for part in (own.chunk(parts) if own.ndim > 1 else [own] * parts)]
            for on_disk, number in self._numbered(f"{place}.{kind}", len(tensor), parts).items():
                yield f"{on_disk}{suffix}", rows[number]

    def of(self, name: str) -> str:
        """Returns the name on disk of a tensor, or of its codes and scales, that belongs to no mixture of experts."""
        if not self._reads_images:
            return name
        if name not in self._names:
            (self._names[name],) = revert_weight_conversion(self.policy, {name: torch.empty(0)})
        return self._names[name]

    def kept(self, head: bool = True) -> list[str]:
        """Returns the names in memory and on disk of the policy's [`~models.linears.unquantized_linears`]."""
        found = unquantized_linears(self.policy, head)
        on_disk = (self.of(f"{name}.weight").removesuffix(".weight") for name in found)
        return list(dict.fromkeys([*found, *on_disk]))

    def with_buffers(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yields `weights`, and after a router's those of its [`buffers`]."""
        for name, tensor in weights:
            yield name, tensor
            yield from self.buffers(name).items()

    def buffers(self, name: str) -> dict[str, Tensor]:
        """Returns the buffers that belong to a router's weight `name`, such as GLM-4's `e_score_correction_bias`."""
        if not ROUTER.fullmatch(name):
            return {}
        place = name.removesuffix(".weight")
        named = self.policy.get_submodule(place).named_buffers()
        return {clean_name(f"{place}.{leaf}"): buffer for leaf, buffer in named}  # PEFT may wrap the router

    def _loaded(self, found: Iterable[str]) -> Iterator[tuple[str, str]]:
        """Yields the names that weights, packed or not, get in memory when they load, each with its name on disk."""
        renamings = [part for part in get_model_conversion_mapping(self.policy) if isinstance(part, WeightRenaming)]
        own = self.policy.state_dict()
        for name in sorted({name.removesuffix("_packed") for name in found}):
            in_memory, _ = rename_source_key(name, renamings, [], self.policy.base_model_prefix, own)
            yield in_memory, name

    def _numbered(self, name: str, experts: int = 0, parts: int = 1) -> dict[str, int]:
        """
        Returns the numbers of the matrices in a tensor by their names on disk: expert by expert, gate before up. A
        router, which has no `experts`, is one matrix.
        """
        if name not in self._numbers:
            numbers = torch.arange(max(experts, 1) * parts).view(-1, parts, 1)
            found = revert_weight_conversion(self.policy, {name: numbers if experts else numbers[0]})
            self._numbers[name] = dict(sorted(((n, x.item()) for n, x in found.items()), key=lambda item: item[1]))
        return self._numbers[name]
