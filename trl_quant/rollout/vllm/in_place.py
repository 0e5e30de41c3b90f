"""
Writes a sync's tensors straight into vLLM's parameters, where vLLM's layers hold them as a checkpoint does.

vLLM's own reload builds each layer again, loads it part by part, prepares it for its kernel and copies the result to
where captured CUDA graphs read it. For a 7B model, this takes longer on the host than quantization takes on the GPU.
CUTLASS kernels for FP8 and INT8 read codes and scales as they are stored, so it suffices to copy each tensor into the
rows of its part.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from .adapter import names_in_vllm, places
from .experts import rows_of_experts
from .kernel_checks import kernel_name


AS_STORED = ("Cutlass",)  # beginnings of the names of kernels that read rows of codes and scales as they are stored


def destinations(model: nn.Module, shapes: dict[str, torch.Size]) -> dict[str, Tensor]:
    """
    Returns the parts of vLLM's memory that hold the tensors of a sync.

    Args:
        model (`nn.Module`): vLLM's model, loaded.
        shapes (`dict[str, torch.Size]`): Shapes of the tensors by their names in the policy's checkpoint.

    Returns:
        `dict[str, torch.Tensor]`: name -> view of a parameter, of the tensor's shape. Empty if a tensor has no such
        view, or if a parameter gets its values in another way.
    """
    names = {name.rpartition(".")[0] for name in shapes}
    layers, vllm_names = places(model, names), dict(names_in_vllm(model, names))
    modules, params = dict(model.named_modules()), dict(model.named_parameters())
    experts = rows_of_experts(model, shapes)
    found: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        path, _, kind = name.rpartition(".")
        module = modules.get(vllm_names[path])
        if name in experts:
            rows = experts[name]
        elif layers[path] is not None:
            rows = _rows(*layers[path], kind, quantized=f"{path}.weight_scale" in shapes)
        elif module is None or isinstance(module, LinearBase):  # latent attention uses precomputed products
            rows = None
        else:
            held = getattr(module, kind, None)
            rows = held.data if isinstance(held, Tensor) else None
            if rows is not None and isinstance(module, VocabParallelEmbedding):  # which is padded
                rows = rows[: shape[0]]
        if rows is None or rows.shape != shape:
            return {}
        found[name] = rows
    written = {rows.untyped_storage().data_ptr() for rows in found.values()}
    # Scalars, such as the scales of a cache, are not weights
    others = (p for p in params.values() if p.numel() > 1 and p.untyped_storage().data_ptr() not in written)
    return {} if any(True for _ in others) else found


def _rows(layer: LinearBase, parts: range, kind: str, quantized: bool) -> Tensor | None:
    """
    Returns the rows of a parameter of vLLM's that belong to `parts` of its outputs, (out, ...); `None` if its kernel
    stores them in another way.
    """
    held = getattr(layer, kind, None)
    if not isinstance(held, Tensor) or (quantized and not kernel_name(layer).startswith(AS_STORED)):
        return None
    held = held.data.t() if quantized and kind == "weight" else held.data  # CUTLASS takes (in, out), column by column
    sizes = layer.output_partition_sizes
    start = sum(sizes[: parts.start])
    return held[start : start + sum(sizes[part] for part in parts)]


@torch.no_grad()
def holds(places_of: dict[str, Tensor], stream: Iterable[tuple[str, Tensor]]) -> bool:
    """
    Whether the [`destinations`] hold the tensors that a reload has just loaded, so that writing there has the same
    effect. Always reads the stream to its end, because gathering is collective.
    """
    same = [name in places_of and _are_equal(places_of[name], tensor) for name, tensor in stream]
    return len(same) == len(places_of) and all(same)


def _are_equal(held: Tensor, tensor: Tensor) -> bool:
    """Whether a tensor, converted to the type of `held`, equals it; codes bit for bit."""
    tensor = tensor.to(held)
    return torch.equal(*(t.view(torch.uint8) if t.itemsize == 1 else t for t in (held, tensor)))


@torch.no_grad()
def write(places_of: dict[str, Tensor], stream: Iterable[tuple[str, Tensor]]) -> None:
    """
    Copies the tensors of a sync to their [`destinations`], in the types that vLLM holds.

    Raises:
        `RuntimeError`: The stream has other tensors than the sync for which the destinations were found.
    """
    missing = set(places_of)
    for name, tensor in stream:
        if name not in places_of:
            raise RuntimeError(f"the policy streamed `{name}`, which it did not stream before")
        places_of[name].copy_(tensor)
        missing.discard(name)
    if missing:
        raise RuntimeError(f"the policy streamed no {', '.join(sorted(missing)[:4])}")
