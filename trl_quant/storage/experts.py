"""
Names the tensors of a mixture of experts as a checkpoint on disk does, one expert at a time.

In memory a layer's experts are two tensors, `experts.gate_up_proj` (E, 2 I, H) and `experts.down_proj` (E, H, I). On
disk each expert has matrices of its own, under names that differ from family to family (`experts.3.gate_proj.weight`,
`block_sparse_moe.experts.3.w1.weight`), and engines load those. transformers knows how to convert the tensors, but
copies them. Here it converts small tensors that number the matrices, which tells their names; what is streamed are
views of the policy's tensors.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from ..formats import QuantizedTensor
from ..models.families import EXPERT_PARTS, ROUTER
from ..models.linears import is_mixtures
from ..models.names import clean_name


class NamesOnDisk:
    """
    Names the tensors of one policy; see the module's docstring.

    Parameters:
        policy ([`~transformers.PreTrainedModel`]): The policy, without wrappers.
    """

    def __init__(self, policy: PreTrainedModel):
        self.policy = policy
        self._numbers: dict[str, dict[str, int]] = {}  # name in memory -> names on disk -> numbers of the matrices

    def stream(
        self, weights: Iterable[tuple[str, Tensor | QuantizedTensor]]
    ) -> Iterator[tuple[str, Tensor | QuantizedTensor]]:
        """Yields `weights`, with those of [`with_buffers`], under their names on disk."""
        for name, tensor in self.with_buffers(weights):
            if not is_mixtures(name):
                yield name, tensor
                continue
            parts = EXPERT_PARTS.get(name.rpartition(".")[2], 1)
            for on_disk, number in self._numbered(name, tensor, parts).items():
                if len(tensor.shape) < 3:
                    yield on_disk, tensor
                    continue
                expert, index = divmod(number, parts)
                size = tensor.shape[1] // parts
                yield on_disk, _matrix(tensor, expert, slice(index * size, (index + 1) * size))

    def with_buffers(
        self, weights: Iterable[tuple[str, Tensor | QuantizedTensor]]
    ) -> Iterator[tuple[str, Tensor | QuantizedTensor]]:
        """Yields `weights`, and after a router's its buffers, such as GLM-4's `e_score_correction_bias`."""
        for name, tensor in weights:
            yield name, tensor
            if ROUTER.fullmatch(name):
                place = name.removesuffix(".weight")
                for leaf, buffer in self.policy.get_submodule(place).named_buffers():
                    yield clean_name(f"{place}.{leaf}"), buffer  # PEFT may wrap the router

    def _numbered(self, name: str, tensor: Tensor | QuantizedTensor, parts: int) -> dict[str, int]:
        """Returns the numbers of the matrices in a tensor by their names on disk: expert by expert, gate before up."""
        if name not in self._numbers:
            is_of_experts = len(tensor.shape) == 3
            experts = tensor.shape[0] if is_of_experts else 1
            numbers = torch.arange(experts * parts).view(experts, parts, 1)
            found = revert_weight_conversion(self.policy, {name: numbers if is_of_experts else numbers[0]})
            self._numbers[name] = dict(sorted(((n, x.item()) for n, x in found.items()), key=lambda item: item[1]))
        return self._numbers[name]


def _matrix(tensor: Tensor | QuantizedTensor, expert: int, rows: slice) -> Tensor | QuantizedTensor:
    """Returns some rows of the matrix of an expert, of a tensor (experts, out, in)."""
    return tensor[expert][rows] if isinstance(tensor, Tensor) else tensor.expert(expert).rows(rows)
