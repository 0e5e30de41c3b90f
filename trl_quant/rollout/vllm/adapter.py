r"""
Runs the policy's LoRA adapter in vLLM, as two dense products beside the base's own, inside the captured graph:

    Y = base(X) + (X A^T) B^T

| symbol | here | shape |
|---|---|---|
| X | the layer's input, in the engine's 16 bits, before the base quantizes it | (tokens, in) |
| A | the A of each of the layer's parts (q, k, v or gate, up), stacked, so that X is read once | (R, in) |
| B | their B, times the adapters' scales, block-diagonal: each maps its own rows of A to its part of Y | (out, R) |

R is the sum of the parts' ranks. One product with a block-diagonal B needs one kernel, and a product for each part
would need three. The zeros cost little: with rank 32, gate and up of a 7B model read 4.8 MB instead of 2.4, which takes
an H200 half a microsecond, less than the start of another kernel. On a GPU the branch runs on a stream of its own
beside the base's product, which waits for memory and leaves most of the arithmetic units idle. vLLM's own adapters are
built for many adapters at a time and cost more.

A and B are buffers of vLLM's layers and are written in place, so CUDA graphs stay valid. A reload of the base touches
only the parameters that a layer was built with. Under tensor parallelism each rank holds the rows or columns that its
part of the layer needs; the sum over ranks after a row-parallel layer includes the adapter.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from itertools import takewhile

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.utils import get_packed_modules_mapping


# A layer of the policy that is several parts of vLLM's layer, where the layers fused with it are one each -> how many
PARTS = {"in_proj_qkv": 3}


@dataclass(frozen=True)
class Slot:
    """
    Where the adapter of one policy layer is held in vLLM's model.

    Attributes:
        layer (`LinearBase`): vLLM's layer, which may fuse several of the policy's.
        parts (`range`): The policy layer's outputs in `layer`, as indices of `layer.output_partition_sizes`.
        ranks (`slice`): The policy layer's rows of A, and its columns of B.
    """

    layer: LinearBase
    parts: range
    ranks: slice


def linear_layers(model: nn.Module) -> dict[str, LinearBase]:
    """Returns vLLM's linear layers by name. Their own `prefix` is another one in a few models, such as Falcon-H1."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LinearBase)}


def slots(model: nn.Module, ranks: dict[str, int]) -> dict[str, Slot]:
    """
    Returns the slots of an adapter.

    Args:
        model (`nn.Module`): vLLM's model.
        ranks (`dict[str, int]`): Rank of the adapter of each of the policy's layers, by the policy's names.

    Raises:
        `ValueError`: vLLM's model has no linear layer, or part of one, for some of the policy's layers.
    """
    found_places = places(model, ranks)
    unknown = [name for name, place in found_places.items() if place is None]
    if unknown:
        raise ValueError(
            f"`lora_sync`='adapter': vLLM's {type(model).__name__} calls no linear layers for the adapter of "
            f"{', '.join(sorted(unknown)[:4])}. Use `lora_sync='merge'`, or leave them out of `target_modules`."
        )
    found = {}
    used_ranks: dict[LinearBase, int] = defaultdict(int)
    for name, (layer, parts) in sorted(found_places.items(), key=lambda item: item[1][1].start):
        start = used_ranks[layer]
        used_ranks[layer] = start + ranks[name]
        found[name] = Slot(layer, parts, slice(start, used_ranks[layer]))
    return found


def places(model: nn.Module, names: Iterable[str]) -> dict[str, tuple[LinearBase, range] | None]:
    """
    Finds the policy's linear layers in vLLM's model.

    Returns:
        `dict`: policy's name -> (vLLM's layer, which may fuse several of the policy's; indices into its
        `output_partition_sizes`), or `None` if vLLM has no such layer.
    """
    layers, fused = linear_layers(model), get_packed_modules_mapping(model)
    return {name: _place(own, layers, fused) for name, own in names_in_vllm(model, names)}


def fused_layers(model: nn.Module, names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """
    Returns, for each of the policy's linear layers, those that vLLM computes as one matrix with it, itself included, in
    the order of that matrix. This depends on vLLM's version: see `Family.fused` for what its own classes do.
    """
    groups: dict[LinearBase, list[tuple[int, str]]] = defaultdict(list)
    for name, place in places(model, names).items():
        if place is not None:
            layer, parts = place
            groups[layer].append((parts.start, name))
    joined = (tuple(name for _, name in sorted(group)) for group in groups.values())
    return {name: group for group in joined for name in group}


def names_in_vllm(model: nn.Module | type | None, names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """
    Yields pairs of the policy's name and vLLM's name of a module, before vLLM fuses q, k and v or gate and up.

    Args:
        model (`nn.Module`, `type` or `None`): vLLM's model or its class; `None` for one with the policy's own names.
        names (`Iterable[str]`): Names of modules in the policy.
    """
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is not None:
        # The part of vLLM's mapping that only renames. The method was renamed after vLLM 0.26.
        renaming = getattr(mapper, "get_rename_mapper", None) or mapper.get_unstacked_mapper
        mapper = renaming()
    for name in names:
        if mapper is None:
            yield name, name
        else:
            (vllm_name,) = mapper.apply_list([f"{name}.weight"])
            yield name, vllm_name.removesuffix(".weight")


def decoder_in_vllm(model: nn.Module | type | None, layers: Iterable[str]) -> str:
    """Returns the common prefix of vLLM's names for a decoder's linear layers, which have these names in the policy."""
    split_names = (vllm_name.split(".") for _, vllm_name in names_in_vllm(model, layers))
    common = takewhile(lambda parts: len(set(parts)) == 1, zip(*split_names))
    return "".join(f"{parts[0]}." for parts in common)


def _place(name: str, layers: dict[str, LinearBase], fused: dict[str, list[str]]) -> tuple[LinearBase, range] | None:
    """
    Returns vLLM's layer for its name of a policy's layer, before fusion, and the indices of the layer's outputs: one
    index, several ([`PARTS`]), or all (Phi-3's q, k and v are one layer in the policy too).
    """
    if name.endswith(".kv_b_proj"):  # latent attention reads its weights and never calls it
        return None
    if name in layers:
        return layers[name], range(len(layers[name].output_partition_sizes))
    parent, _, leaf = name.rpartition(".")
    for whole, leaves in fused.items():
        layer, parts = layers.get(f"{parent}.{whole}"), [PARTS.get(other, 1) for other in leaves]
        if layer is not None and leaf in leaves and sum(parts) == len(layer.output_partition_sizes):
            first = sum(parts[: leaves.index(leaf)])
            return layer, range(first, first + PARTS.get(leaf, 1))
    return None


def _total_ranks(found: dict[str, Slot]) -> dict[LinearBase, int]:
    """Returns R, the sum of its parts' ranks, for each of vLLM's layers."""
    totals: dict[LinearBase, int] = defaultdict(int)
    for slot in found.values():
        totals[slot.layer] = max(totals[slot.layer], slot.ranks.stop)
    return dict(totals)


def hold_adapter(model: nn.Module, ranks: dict[str, int], dtype: torch.dtype, device: torch.device | str) -> None:
    """
    Gives the layers of a loaded model buffers for an adapter with these `ranks`, filled with zeros, and makes them
    compute with it. Must be called before the model is compiled and CUDA graphs are captured. Layers without an adapter
    do not change.

    Raises:
        `ValueError`: As [`slots`].
    """
    for layer, rank in _total_ranks(slots(model, ranks)).items():
        shapes = {"lora_a": (rank, _inputs(layer)), "lora_b": (sum(layer.output_partition_sizes), rank)}
        for name, shape in shapes.items():
            layer.register_buffer(name, torch.zeros(shape, dtype=dtype, device=device), persistent=False)
        layer.requires_unquantized_input = True  # else vLLM may quantize X in the kernel before this layer
        # Only `apply` is replaced, because vLLM and this package also read other attributes of the method object
        layer.quant_method.apply = partial(_apply, layer.quant_method.apply)


def _apply(base: Callable, layer: LinearBase, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Replaces `base`, the `apply` of a layer's quantization method: adds the adapter's product to the base's."""
    branch = torch.ops.trl_quant.adapter_branch(x, layer.lora_a, layer.lora_b)
    return torch.ops.trl_quant.add_branch(base(layer, x, bias), branch, x)


@torch.library.custom_op("trl_quant::adapter_branch", mutates_args=())
def _branch(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """
    Computes (X A^T) B^T. On a GPU it runs on a side stream, beside the kernels that are launched next, so only
    `add_branch` may read the result.
    """
    y = x.new_empty(*x.shape[:-1], len(b))
    with _on_side_stream(x.device):
        torch.mm(linear(x, a).flatten(0, -2), b.t(), out=y.view(-1, len(b)))
    return y


@torch.library.custom_op("trl_quant::add_branch", mutates_args=())
def _add_branch(y: Tensor, branch: Tensor, x: Tensor) -> Tensor:
    """Waits for the branch and adds it. The argument `x` keeps the branch's input alive until then."""
    if y.is_cuda:
        torch.cuda.current_stream(y.device).wait_stream(_side_stream(y.device))
    return y + branch


@_branch.register_fake
def _(x, a, b):
    return x.new_empty(*x.shape[:-1], len(b))


@_add_branch.register_fake
def _(y, branch, x):
    return torch.empty_like(y)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@contextmanager
def _on_side_stream(device: torch.device) -> Iterator[None]:
    """Context whose kernels run on a side stream, beside those that are launched after it. CUDA graphs capture both."""
    if device.type != "cuda":
        yield
        return
    stream = _side_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield


@torch.no_grad()
def write_adapter(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """
    Writes an adapter into the buffers that [`hold_adapter`] made, over the previous one.

    Args:
        model (`nn.Module`): vLLM's model.
        tensors (`dict[str, torch.Tensor]`):
            By PEFT's names, A of shape (rank, in), and B times the adapter's scale, of shape (out, rank), for each of
            the policy's layers.

    Raises:
        `RuntimeError`: The adapter has other layers or other ranks than the buffers.
    """
    pairs = {}
    for name, a in tensors.items():
        if name.endswith(".lora_A.weight"):
            prefix = name.removesuffix(".lora_A.weight")
            pairs[prefix.removeprefix("base_model.model.")] = a, tensors[f"{prefix}.lora_B.weight"]
    slots_by_name = slots(model, {name: len(a) for name, (a, _) in pairs.items()})
    if _total_ranks(slots_by_name) != {
        layer: len(layer.lora_a) for layer in model.modules() if hasattr(layer, "lora_a")
    }:
        raise RuntimeError("the adapter has other layers or ranks than the engine was started for")
    for name, slot in slots_by_name.items():
        _write(slot, *pairs[name])


def _write(slot: Slot, a: Tensor, b: Tensor) -> None:
    """Writes this rank's part of one policy layer's A (rank, in) and B (out, rank) into the buffers of its slot."""
    layer, sizes = slot.layer, slot.layer.output_partition_sizes
    layer.lora_a[slot.ranks].copy_(_shard(a, 1, _inputs(layer), layer))
    rows_of_parts = [len(b)] if len(slot.parts) == 1 else _whole_sizes(layer)[slot.parts.start : slot.parts.stop]
    for part, rows in zip(slot.parts, b.split(rows_of_parts), strict=True):
        start = sum(sizes[:part])
        layer.lora_b[start : start + sizes[part], slot.ranks].copy_(_shard(rows, 0, sizes[part], layer))


def _shard(tensor: Tensor, dim: int, size: int, layer: LinearBase) -> Tensor:
    """
    Returns this rank's shard, of length `size` along `dim`, of a whole tensor. If there are fewer shards than ranks,
    neighbouring ranks share a shard.
    """
    shards = tensor.shape[dim] // size
    return tensor.narrow(dim, layer.tp_rank * shards // layer.tp_size * size, size)


def _inputs(layer: LinearBase) -> int:
    """Returns the number of inputs of this rank's part of a layer."""
    return getattr(layer, "input_size_per_partition", layer.input_size)


def _whole_sizes(layer: LinearBase) -> list[int]:
    """
    Returns the number of outputs of each part over all ranks. vLLM counts heads of keys and values once for each rank
    that holds them; here they count once.
    """
    copies = getattr(layer, "num_kv_head_replicas", 1)
    queries, *keys_and_values = layer.output_sizes
    return [queries, *(size // copies for size in keys_and_values)]
