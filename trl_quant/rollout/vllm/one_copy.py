"""
One copy of a frozen four-bit base for trainer and engine: QeRL's policy, Q(W) + B A, in the memory of one Q(W).

vLLM's Marlin kernels want codes and scales in an order of their own. While vLLM loads its model, each of its layers
gets the codes and scales of the policy's layers (q, k and v, say), is repacked by vLLM itself, and the policy's layers
go on with their parts of the result; what they held is freed, so there is at no time more than one layer twice.
Embeddings and head are shared as they are. Norms and biases are not: noise is laid on the engine's, and Marlin reorders
biases.

The order of events is vLLM's: it builds its model, for which the memory of the decoder's layers is left out, and asks
its loader for the weights ([`~worker.QuantizingLoader`]), which asks here what was lent.
"""

import logging
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsLinearMethod
from vllm.model_executor.layers.quantization.utils.marlin_utils import marlin_padded_nk
from vllm.model_executor.layers.quantization.utils.marlin_utils_fp4 import nvfp4_marlin_process_global_scale
from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor

from ...layers import FrozenLinear
from ...layers.marlin import TILE_OUT
from ...trl_seams import exchanged
from ..stream import PolicyWeights
from .adapter import names_in_vllm, places
from .support import two_copies


logger = logging.getLogger(__name__)

_lent: PolicyWeights | None = None


@contextmanager
def lending(weights: PolicyWeights | None) -> Iterator[None]:
    """Context in which an engine that starts in this process takes over the policy's base; `None` for no policy."""
    global _lent
    _lent = weights
    try:
        yield
    finally:
        _lent = None


def lent() -> PolicyWeights | None:
    return _lent


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
    Fills a model that was built [`without_memory`], so that it holds its base together with the policy; all its other
    weights are loaded too.

    Returns:
        `bool`: `False` where that is impossible. Then the model got memory of its own, which is still to be loaded.
    """
    base = dict(weights.frozen())
    bare = {name: layer for name, layer in model.named_modules() if _is_bare(layer)}
    parts = _parts(model, base)
    reasons = (_reason(name, layer, parts.get(layer, []), device) for name, layer in bare.items())
    if reason := next(filter(None, reasons), None):
        size = sum(tensor.nbytes for layer in bare.values() for tensor in layer.parameters() if tensor.is_meta)
        two_copies(size, reason)
        for layer in bare.values():
            _allocate(layer, device)
        return False
    rest = dict(weights.outside_base())
    model.load_weights(iter(rest.items()))
    # In a thread of its own, since vLLM's sleep mode takes away what the loading thread allocates
    with ThreadPoolExecutor(1) as thread:
        for layer in bare.values():
            thread.submit(_merge, layer, parts[layer]).result()
    own, shared = dict(model.named_parameters()), 0
    matrices = {name.removesuffix(".weight"): tensor for name, tensor in rest.items() if tensor.ndim == 2}
    for name, theirs in names_in_vllm(model, matrices):
        param = own.get(f"{theirs}.weight")
        if param is not None and _alike(param, matrices[name]):
            param.data = matrices[name]
            shared += 1
    logger.info("Trainer and vLLM hold one copy of %d linear layers and %d embeddings.", len(base), shared)
    return True


def _is_bare(layer: nn.Module) -> bool:
    return isinstance(layer, LinearBase) and any(param.is_meta for param in layer.parameters())


def _alike(a: Tensor, b: Tensor) -> bool:
    return (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)


def _parts(model: nn.Module, base: dict[str, FrozenLinear]) -> dict[LinearBase, list[FrozenLinear]]:
    """The policy's layers that each of vLLM's is made of, in its order."""
    found = defaultdict(list)
    for name, place in places(model, base).items():
        if place is not None:
            layer, parts = place
            found[layer].append((parts.start, base[name]))
    return {layer: [module for _, module in sorted(parts, key=lambda part: part[0])] for layer, parts in found.items()}


def _reason(name: str, layer: LinearBase, parts: list[FrozenLinear], device: torch.device) -> str | None:
    """Why a layer of vLLM's cannot hold the policy's `parts`; `None` if it can."""
    kernel = type(layer.scheme.kernel).__name__
    if not kernel.startswith("Marlin"):
        return f"{name} runs {kernel}, and the trainer knows Marlin's layout alone"
    if layer.tp_size > 1:
        return "each rank of vLLM has a part of each layer (`vllm_tensor_parallel_size`)"
    shape = sum(module.out_features for module in parts), parts[0].in_features if parts else 0
    if shape != (layer.output_size_per_partition, layer.input_size_per_partition):
        return f"the policy's base has not all of {name}"
    if any(module.factor is not None for module in parts):
        return "the policy shares its base with another engine already"
    group = shape[1] // parts[0].weight_scale.shape[1]
    if marlin_padded_nk(*shape, group) != shape or any(module.out_features % TILE_OUT for module in parts):
        return f"{name} with {shape[1]} inputs and {shape[0]} outputs does not fill the tiles of Marlin's layout"
    if parts[0].weight_packed.device.type != torch.device(device).type:
        return f"the policy is on {parts[0].weight_packed.device}"
    if len({None if (g := module.weight_global_scale) is None else g.item() for module in parts}) > 1:
        return f"the parts of {name} have global scales of their own"
    return None


def _allocate(layer: LinearBase, device: torch.device) -> None:
    with torch.device(device):
        for name, param in list(layer.named_parameters(recurse=False)):
            if param.is_meta:
                layer.register_parameter(name, materialize_meta_tensor(param))


@torch.no_grad()
def _merge(layer: LinearBase, parts: list[FrozenLinear]) -> None:
    """Has `layer` hold the codes and scales of `parts`, repacked by vLLM, and the parts those of `layer`."""
    packed = parts[0].weight_packed
    with torch.device(packed.device), torch.cuda.device_of(packed):  # which a new thread does not know
        for name in ("weight_packed", "weight_scale", "weight_global_scale"):
            if hasattr(layer, name):
                whole = torch.cat([getattr(module, name) for module in parts])
                setattr(layer, name, nn.Parameter(whole, requires_grad=False))
        layer.quant_method.process_weights_after_loading(layer)
    layer.quant_method.process_weights_after_loading = lambda layer: None  # which vLLM calls once more
    factor = 1.0
    if (scale := getattr(layer, "weight_global_scale", None)) is not None:
        factor = scale.item() / nvfp4_marlin_process_global_scale(torch.ones(()), layer.params_dtype).item()
    start = 0
    for module in parts:
        end = start + module.out_features
        module.hold_tiles(layer.weight.data[:, 2 * start : 2 * end], layer.weight_scale.data[:, start:end], factor)
        start = end
