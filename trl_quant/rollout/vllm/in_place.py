"""
Writes a sync's tensors straight into vLLM's parameters, where vLLM's layers hold them as a checkpoint does.

vLLM's own reload builds each layer again, loads it part by part, prepares it for its kernel and copies the result to
where captured CUDA graphs read it. For a 7B model, this takes longer on the host than quantization takes on the GPU.
CUTLASS kernels for FP8 and INT8 read codes and scales as they are stored, so it suffices to copy each tensor into the
rows of its part. The experts of a layer are copied in one piece.
"""

from collections.abc import Collection, Iterable

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from ...models.families import EXPERT
from ...models.linears import sent_with
from .adapter import names_in_vllm, places
from .experts import expert_layers, held_experts
from .kernel_checks import kernel_name


AS_STORED = ("Cutlass",)  # beginnings of the names of kernels that read rows of codes and scales as they are stored


@torch.no_grad()
def destinations(model: nn.Module, stream: Iterable[tuple[str, Tensor]], names: Iterable[str]) -> dict[str, Tensor]:
    """
    Finds the parts of vLLM's memory that hold the tensors of a sync, so that writing there has the effect of a reload.
    Always reads the stream to its end, because gathering is collective.

    Args:
        model (`nn.Module`): vLLM's model, which has just loaded the tensors.
        stream (`Iterable[tuple[str, torch.Tensor]]`): The tensors, with the experts of a layer in one piece.
        names (`Iterable[str]`): Names of the policy's parameters.

    Returns:
        `dict[str, torch.Tensor]`: name -> view of a parameter, of the tensor's shape. Empty if no parameter holds a
        tensor's values as they are sent, or if one gets its values in another way.
    """
    paths = {name.rpartition(".")[0] for name in names}
    layers, vllm_names = places(model, paths), dict(names_in_vllm(model, paths))
    modules, params, experts = dict(model.named_modules()), dict(model.named_parameters()), expert_layers(model)
    found: dict[str, Tensor | None] = {}
    for name, tensor in stream:
        path, _, kind = name.rpartition(".")
        module = modules.get(vllm_names[path])
        if EXPERT.fullmatch(name):
            rows = held_experts(experts, name)
        elif layers[path] is not None:
            rows = _rows(*layers[path], kind, quantized=tensor.itemsize == 1 or kind == "weight_scale")
        elif module is None or isinstance(module, LinearBase):  # latent attention uses precomputed products
            rows = None
        else:
            held = getattr(module, kind, None)
            rows = held.data if isinstance(held, Tensor) else None
            if rows is not None and isinstance(module, VocabParallelEmbedding):  # which is padded
                rows = rows[: len(tensor)]
        found[name] = rows if rows is not None and holds(rows, tensor) else None
    written = {rows.untyped_storage().data_ptr() for rows in found.values() if rows is not None}
    # Scalars, such as the scales of a cache, are not weights
    others = (p for p in params.values() if p.numel() > 1 and p.untyped_storage().data_ptr() not in written)
    return {} if None in found.values() or any(True for _ in others) else found


def _rows(layer: LinearBase, parts: range, kind: str, quantized: bool) -> Tensor | None:
    """
    Returns the rows of a parameter of vLLM's that belong to `parts` of its outputs, (out, ...); `None` if its kernel
    stores them in another way, or as one scalar of all parts.
    """
    held = getattr(layer, kind, None)
    if not isinstance(held, Tensor) or held.ndim == 0 or (quantized and not kernel_name(layer).startswith(AS_STORED)):
        return None
    held = held.data.t() if quantized and kind == "weight" else held.data  # CUTLASS takes (in, out), column by column
    sizes = layer.output_partition_sizes
    start = sum(sizes[: parts.start])
    return held[start : start + sum(sizes[part] for part in parts)]


def holds(held: Tensor, tensor: Tensor) -> bool:
    """Whether a tensor, converted to the type of `held`, equals it; codes bit for bit."""
    if held.shape != tensor.shape:
        return False
    tensor = tensor.to(held)
    return torch.equal(*(t.view(torch.uint8) if t.itemsize == 1 else t for t in (held, tensor)))


@torch.no_grad()
def write(
    places_of: dict[str, Tensor], stream: Iterable[tuple[str, Tensor]], groups: Collection[str] | None = None
) -> None:
    """
    Copies the tensors of a sync to their [`destinations`], in the types that vLLM holds: all, or those of some `groups`
    ([`~models.linears.sent_with`]).

    Raises:
        `RuntimeError`: The stream has other tensors than the sync for which the destinations were found.
    """
    missing = {name for name in places_of if groups is None or sent_with(name) in groups}
    for name, tensor in stream:
        if name not in missing:
            raise RuntimeError(f"the policy streamed `{name}`, which it did not stream before")
        places_of[name].copy_(tensor)
        missing.discard(name)
    if missing:
        raise RuntimeError(f"the policy streamed no {', '.join(sorted(missing)[:4])}")
