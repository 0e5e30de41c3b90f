"""
Lets trainer and engine share one copy of a frozen base: QeRL's policy, Q(W) + B A, in the memory of one Q(W).

While vLLM loads its model, each of its layers gets the codes and scales of the policy's layers (for example q, k and
v), and vLLM prepares them for its kernels. The policy's layers then use their parts of the result and free their own
memory, so at most one layer is held twice at any time. Marlin, for 4 bits, needs codes and scales in an order of its
own, which the policy then uses too. CUTLASS and DeepGEMM, for FP8 and INT8, read the rows of codes as they are; the
policy keeps its own scales, which are small. So do the kernels of a mixture's experts ([`experts.AS_LOADED`]), whose
tensors vLLM allocates before they are shared. Embeddings and head are shared unchanged. Norms and biases are not
shared: the engine's norms get noise, and Marlin reorders biases.

vLLM first builds its model, without memory for the decoder's layers. It then calls its loader
([`~loading.QuantizingLoader`]), which gets the policy's weights from [`lent_weights`].
"""

import logging
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsLinearMethod
from vllm.model_executor.layers.quantization.utils.marlin_utils import marlin_padded_nk
from vllm.model_executor.layers.quantization.utils.marlin_utils_fp4 import nvfp4_marlin_process_global_scale
from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor

from ...formats import FORMATS
from ...formats.fp8 import BLOCK
from ...layers import FrozenExperts, FrozenLinear
from ...layers.eager import below_each_other
from ...layers.marlin import TILE_OUT
from ...models.names import place_in_layer
from ...storage.experts import NamesOnDisk
from ...trl_seams import exchanged
from ..weights import PolicyWeights
from .adapter import names_in_vllm, places
from .experts import AS_LOADED, HELD_AS, backend_of, expert_layers
from .support import warn_of_two_copies


logger = logging.getLogger(__name__)

# vLLM's names of a layer's parameters -> those of a `FrozenLinear`
HELD_IN = {
    "weight": "weight_packed",
    "weight_packed": "weight_packed",
    "weight_scale": "weight_scale",
    "weight_global_scale": "weight_global_scale",
}
ROWS = ("Cutlass", "DeepGemm", "FlashInferFp8DeepGEMM")  # kernels that multiply rows of codes as they are given
CUTLASS_TILE = 16  # inputs and outputs of FP8 and INT8 weights that are not padded

_lent_weights: PolicyWeights | None = None


@contextmanager
def lending(weights: PolicyWeights | None) -> Iterator[None]:
    """Context in which an engine that starts in this process shares the base of `weights`; `None` for no sharing."""
    global _lent_weights
    _lent_weights = weights
    try:
        yield
    finally:
        _lent_weights = None


def lent_weights() -> PolicyWeights | None:
    """Returns the weights whose base an engine should share; `None` outside of [`lending`]."""
    return _lent_weights


@contextmanager
def without_memory() -> Iterator[None]:
    """Context in which vLLM builds quantized linear layers on the meta device."""
    original = CompressedTensorsLinearMethod.create_weights

    def create_weights(self, *args, **kwargs):
        with torch.device("meta"):
            original(self, *args, **kwargs)

    with exchanged(CompressedTensorsLinearMethod, create_weights=create_weights):
        yield


def share(model: nn.Module, weights: PolicyWeights, device: torch.device) -> bool:
    """
    Fills a model that was built [`without_memory`] so that it shares its base with the policy, and loads its other
    weights.

    Returns:
        `bool`: Whether the base is shared. If not, the model got memory of its own, and its weights must be loaded.
    """
    frozen = dict(weights.frozen())
    base = {name: layer for name, layer in frozen.items() if isinstance(layer, FrozenLinear)}
    experts = _pairs_of_experts(model, frozen)
    unallocated = {name: layer for name, layer in model.named_modules() if _lacks_memory(layer)}
    parts = _parts(model, base)
    for name, layer in unallocated.items():
        reason = _why_not_shared(name, layer, parts.get(layer, []), device)
        if reason is not None:
            _allocate_own(list(unallocated.values()), device, reason)
            return False
    for layer, own in experts:
        reason = _why_experts_are_not_shared(layer, own)
        if reason is not None:
            _allocate_own(list(unallocated.values()), device, reason)
            return False
    other_weights = dict(weights.outside_base())
    model.load_weights(NamesOnDisk(weights.base_model).stream(other_weights.items()))
    # In a thread of its own, because vLLM's sleep mode discards memory that the loading thread allocates
    with ThreadPoolExecutor(1) as thread:
        for layer in unallocated.values():
            thread.submit(_merge, layer, parts[layer]).result()
        for layer, own in experts:
            thread.submit(_merge_experts, layer, own).result()
    params, shared = dict(model.named_parameters()), 0
    matrices = {name.removesuffix(".weight"): tensor for name, tensor in other_weights.items() if tensor.ndim == 2}
    for name, vllm_name in names_in_vllm(model, matrices):
        param = params.get(f"{vllm_name}.weight")
        if param is not None and _are_interchangeable(param, matrices[name]):
            param.data = matrices[name]
            shared += 1
    logger.info("Trainer and vLLM hold one copy of %d linear layers and %d embeddings.", len(base), shared)
    return True


def _pairs_of_experts(model: nn.Module, frozen: dict[str, nn.Module]) -> list[tuple[nn.Module, FrozenExperts]]:
    """Returns vLLM's experts of each layer, with the policy's."""
    layers = expert_layers(model)
    own = {place_in_layer(f"{name}.")[1]: layer for name, layer in frozen.items() if isinstance(layer, FrozenExperts)}
    return [(layers[index], own[index]) for index in layers]


def _why_experts_are_not_shared(layer: nn.Module, own: FrozenExperts) -> str | None:
    """Returns the reason why a layer of vLLM's experts cannot share the policy's; `None` if it can."""
    backend = backend_of(layer)
    if backend not in AS_LOADED:
        return f"vLLM holds experts in the order of {backend}, which the trainer cannot read"
    shapes = [tuple(getattr(own, leaf).shape) for leaf in own.leaves]
    if shapes != [tuple(getattr(layer, HELD_AS[leaf]).shape) for leaf in own.leaves]:
        return "each rank of vLLM has a part of each layer's experts"
    return None


@torch.no_grad()
def _merge_experts(layer: nn.Module, own: FrozenExperts) -> None:
    """Gives vLLM's experts the policy's codes and scales, and makes the policy use what vLLM then holds."""
    device = getattr(own, own.leaves[0])
    with torch.device(device.device), torch.cuda.device_of(device):  # a new thread has no current device yet
        for leaf in own.leaves:
            codes, scale = own.codes(leaf), getattr(layer, f"{HELD_AS[leaf]}_scale")
            setattr(layer, HELD_AS[leaf], nn.Parameter(codes.values, requires_grad=False))
            scale = nn.Parameter(codes.scale.to(scale.dtype), requires_grad=False)
            setattr(layer, f"{HELD_AS[leaf]}_scale", scale)
        layer.quant_method.process_weights_after_loading(layer)
    layer.quant_method.process_weights_after_loading = lambda layer: None  # vLLM calls it once more after loading
    for leaf in own.leaves:
        own.hold(leaf, getattr(layer, HELD_AS[leaf]).data)


def _lacks_memory(layer: nn.Module) -> bool:
    return isinstance(layer, LinearBase) and any(param.is_meta for param in layer.parameters())


def _are_interchangeable(a: Tensor, b: Tensor) -> bool:
    return (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)


def _parts(model: nn.Module, base: dict[str, FrozenLinear]) -> dict[LinearBase, list[FrozenLinear]]:
    """Maps each of vLLM's layers to the policy's layers that it fuses, in its order."""
    found: dict[LinearBase, dict[int, FrozenLinear]] = defaultdict(dict)
    for name, place in places(model, base).items():
        if place is not None:
            layer, parts = place
            found[layer][parts.start] = base[name]
    return {layer: [modules[start] for start in sorted(modules)] for layer, modules in found.items()}


def _why_not_shared(name: str, layer: LinearBase, parts: list[FrozenLinear], device: torch.device) -> str | None:
    """Returns the reason why a layer of vLLM's cannot share the policy's `parts`; `None` if it can."""
    kernel = type(getattr(layer.scheme, "kernel", None) or layer.scheme.fp8_linear).__name__
    known = ROWS if parts and parts[0].quantizes_inputs else ("Marlin",)
    if not kernel.startswith(known):
        return f"{name} runs {kernel}, and the trainer shares only the memory of {' and '.join(known)}"
    if layer.tp_size > 1:
        return "each rank of vLLM has a part of each layer (`vllm_tensor_parallel_size`)"
    shape = sum(module.out_features for module in parts), parts[0].in_features if parts else 0
    if shape != (layer.output_size_per_partition, layer.input_size_per_partition):
        return f"the policy's base lacks parts of {name}"
    if any(module.factor is not None for module in parts):
        return "the policy shares its base with another engine already"
    if not _fills_tiles(parts, shape):
        return f"{name} with {shape[1]} inputs and {shape[0]} outputs does not fill the tiles of {kernel}"
    if parts[0].weight_packed.device.type != torch.device(device).type:
        return f"the policy is on {parts[0].weight_packed.device}"
    scales = [module.weight_global_scale for module in parts]
    if len({None if scale is None else scale.item() for scale in scales}) > 1:
        return f"the parts of {name} have global scales of their own"
    return None


def _fills_tiles(parts: list[FrozenLinear], shape: tuple[int, int]) -> bool:
    """Whether vLLM's kernel takes the weights of `parts`, together of `shape` (out, in), without padding."""
    if parts[0].quantizes_inputs:
        block = BLOCK if FORMATS[parts[0].format].grouped else CUTLASS_TILE
        return not any(size % block for module in parts for size in (module.out_features, module.in_features))
    group = shape[1] // parts[0].weight_scale.shape[1]
    return marlin_padded_nk(*shape, group) == shape and not any(module.out_features % TILE_OUT for module in parts)


def _allocate_own(layers: list[LinearBase], device: torch.device, reason: str) -> None:
    """Gives layers that cannot be shared memory of their own, and warns of the second copy with the `reason`."""
    size = sum(tensor.nbytes for layer in layers for tensor in layer.parameters() if tensor.is_meta)
    warn_of_two_copies(size, reason)
    for layer in layers:
        _allocate(layer, device)


def _allocate(layer: LinearBase, device: torch.device) -> None:
    with torch.device(device):
        for name, param in list(layer.named_parameters(recurse=False)):
            if param.is_meta:
                layer.register_parameter(name, materialize_meta_tensor(param))


@torch.no_grad()
def _merge(layer: LinearBase, parts: list[FrozenLinear]) -> None:
    """Gives `layer` the codes and scales of `parts`, lets vLLM repack them, and makes `parts` use the result."""
    packed, is_unified = parts[0].weight_packed, parts[0].quantizes_inputs
    join = below_each_other if is_unified else torch.cat
    with torch.device(packed.device), torch.cuda.device_of(packed):  # a new thread has no current device yet
        for name, ours in HELD_IN.items():
            if hasattr(layer, name):
                whole = join([getattr(module, ours).data for module in parts])
                setattr(layer, name, nn.Parameter(whole.to(getattr(layer, name).dtype), requires_grad=False))
        layer.quant_method.process_weights_after_loading(layer)
    layer.quant_method.process_weights_after_loading = lambda layer: None  # vLLM calls it once more after loading
    if is_unified:
        weight = layer.weight.data if layer.weight.is_contiguous() else layer.weight.data.t()
        for module, rows in zip(parts, weight.split([module.out_features for module in parts]), strict=True):
            module.hold(replace(module.codes(), values=rows))
        return
    factor = 1.0
    scale = getattr(layer, "weight_global_scale", None)
    if scale is not None:
        factor = scale.item() / nvfp4_marlin_process_global_scale(torch.ones(()), layer.params_dtype).item()
    start = 0
    for module in parts:
        end = start + module.out_features
        module.hold_tiles(layer.weight.data[:, 2 * start : 2 * end], layer.weight_scale.data[:, start:end], factor)
        start = end
