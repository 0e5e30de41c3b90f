"""Functions that run inside vLLM's worker, on vLLM's model, through `LLM.collective_rpc` and `LLM.apply_model`.

The engine runs in the trainer's process, so these functions may take iterators and return tensors.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.utils import extract_layer_index

from ...models.linears import is_mixtures, keeps_type
from ..tensors import default_dtype
from ..verify.kv_cache import CACHE_FORMATS, UNQUANTIZED, KVCache
from .adapter import names_in_vllm, places
from .experts import ExpertsCheck, repack_experts
from .kernel_checks import CONVOLUTION, UNPACKED
from .repairs import kernel_state, refresh_convolutions, refresh_tied_head, restore_kernel_state


RELOAD = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")


@contextmanager
def without_warnings() -> Iterator[None]:
    """Context in which vLLM does not warn of layers that a reload leaves as they were."""
    level = RELOAD.level
    RELOAD.setLevel(logging.ERROR)
    try:
        yield
    finally:
        RELOAD.setLevel(level)


@contextmanager
def loading_with(model: nn.Module, load: Callable) -> Iterator[None]:
    """Context in which vLLM's functions call `load` with the weights that arrive, and not its model."""
    model.load_weights = load
    try:
        yield
    finally:
        del model.load_weights


def reload(worker, stream: Iterable[tuple[str, Tensor]], is_whole: bool = True) -> None:
    """
    Replaces weights by those of `stream`, through vLLM's own reload. Captured CUDA graphs stay valid.

    Args:
        worker: vLLM's worker.
        stream (`Iterable[tuple[str, torch.Tensor]]`): Names and tensors of a checkpoint.
        is_whole (`bool`, *optional*, defaults to `True`):
            Whether the stream has all weights. If not, it has all weights of some of vLLM's layers. vLLM puts the
            others back as they were, and its warnings about them are not shown.

    Raises:
        `RuntimeError`: A stream of all weights ended without weights for some module.
    """
    model = worker.get_model()
    load_weights, loaded, received = model.load_weights, set(), []

    def load_and_record(weights: Iterator[tuple[str, Tensor]]) -> set[str] | None:
        names = load_weights(weights)
        loaded.update(names or ())
        return names

    def noting_names() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in stream:
            received.append(name)
            yield name, tensor

    state, told = kernel_state(model), nullcontext() if is_whole else without_warnings()
    # The reload creates tensors of the default type, which vLLM itself sets only for the first load
    with loading_with(model, load_and_record), default_dtype(worker.vllm_config.model_config.dtype), told:
        worker.reload_weights(weights_iterator=noting_names())
        refresh_tied_head(model)
        refresh_convolutions(model)
        repack_experts(model, received)
    restore_kernel_state(state)
    if not is_whole:
        return
    # Compares modules, since a quantized layer's parameters have other names than the loaded tensors. Scalars, such as
    # the cache's scales, have defaults. `named_parameters` lists a tied head's weight only with the embeddings.
    # vLLM reports experts by the name of the module that holds them or, up to 0.31, of the one around it.
    owners, filled = (
        {name.rpartition(".")[0].removesuffix(".routed_experts") for name in names}
        for names in ((name for name, p in model.named_parameters() if p.numel() > 1), loaded)
    )
    missing = owners - filled
    if loaded and missing:
        raise RuntimeError(f"the policy streamed no weights for {', '.join(sorted(missing)[:4])}")


def kv_caches(model: nn.Module) -> dict[int, KVCache]:
    """
    Returns the quantized KV caches by the index of their layer; empty in most engines.

    Raises:
        `ValueError`: [`KVCache`] cannot describe the rounding of a cache.
    """
    caches = {}
    for layer in model.modules():
        format = getattr(layer, "kv_cache_dtype", UNQUANTIZED[0])
        if format in UNQUANTIZED:
            continue
        if not isinstance(layer, Attention) or format not in CACHE_FORMATS or layer._k_scale.numel() > 1:
            raise ValueError(
                f"The self-check cannot compute the KV cache of {layer.layer_name} ({type(layer).__name__}, "
                f"'kv_cache_dtype'={format!r}). Set 'kv_cache_dtype'='bfloat16' in `vllm_engine_kwargs`."
            )
        scales = {  # of the copies on device and host, because backends differ in which one they use
            "_q_scale": layer._q_scale.item(),
            "_k_scale": layer._k_scale.item(),
            "_v_scale": layer._v_scale.item(),
            "_q_scale_float": layer._q_scale_float,
            "_k_scale_float": layer._k_scale_float,
            "_v_scale_float": layer._v_scale_float,
        }
        in_fp8, truncates = layer.query_quant is not None, layer._k_scale.is_cpu
        caches[extract_layer_index(layer.layer_name)] = KVCache(format, scales, in_fp8, truncates)
    return caches


class WeightComparison:
    """
    Compares the policy's weights with vLLM's: those that both have under one name and in one shape (norms, embeddings,
    the head), the biases of linear layers, the gates and convolutions of hybrids, and experts and routers.

    Parameters:
        model (`nn.Module`): vLLM's model.
        config (`VllmConfig`): vLLM's configuration.
        format, quantizers: How the engine quantizes experts; see [`~experts.ExpertsCheck`].
    """

    def __init__(self, model: nn.Module, config: VllmConfig, format: str | None, quantizers: dict[str, Callable]):
        self.model, self.dtype = model, config.model_config.dtype
        self._experts = ExpertsCheck(model, config, format, **quantizers)
        self._params, self._layers = dict(model.named_parameters()), dict(model.named_modules())
        self._biases: dict[str, Tensor] = {}
        self._kept: dict[str, Tensor] = {}
        self._different: list[str] = []

    @torch.no_grad()
    def add(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Compares some of the policy's weights by its names. Reads all, because gathering is collective."""
        for name, tensor in weights:
            module, _, kind = name.rpartition(".")
            if is_mixtures(name) or is_mixtures(f"{module}.weight"):
                self._different += filter(None, [self._experts.differing(name, tensor)])
                continue
            ((_, vllm_name),) = names_in_vllm(self.model, [module])
            held, layer = self._params.get(f"{vllm_name}.{kind}"), self._layers.get(vllm_name)
            if kind == "A_log" and held is None:  # of Mamba, in whose layers vLLM holds A itself
                held, tensor = self._params.get(f"{vllm_name}.A"), -tensor.float().exp()
            if layer is None or isinstance(layer, LinearBase):
                if kind == "bias":
                    self._biases[module] = tensor.clone()  # it may be part of a buffer that is received
                elif keeps_type(name) or name.endswith(f"{CONVOLUTION}.weight"):
                    self._kept[module] = tensor.clone()
                continue
            if isinstance(layer, VocabParallelEmbedding) and held is not None:  # padded, and split among ranks
                rows = layer.shard_indices
                tensor = tensor[rows.org_vocab_start_index : rows.org_vocab_end_index]
                held = held[: len(tensor)]
            if held is not None and held.shape == tensor.shape and not _are_same(held, tensor, self.dtype):
                self._different.append(name)

    def differing(self) -> str | None:
        """Returns the policy's name of the first weight that differs; `None` if there is none."""
        different = [*self._different, *_differing_biases(self.model, self._biases)]
        different += _differing_rows(self.model, self._kept, self.dtype)
        return different[0] if different else None


def _are_same(held: Tensor, tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether vLLM's tensor `held` equals the policy's `tensor`, up to rounding to the narrower of the two types."""
    if torch.equal(tensor.to(held), held):
        return True
    if torch.equal(tensor.to(dtype).to(held), held):  # a norm in FP32 that was loaded in BF16
        return True
    is_narrower = held.element_size() <= tensor.element_size()
    return is_narrower and torch.equal(held.to(tensor), tensor)  # a policy in FP16 and an engine in BF16


def _differing_biases(model: nn.Module, biases: dict[str, Tensor]) -> list[str]:
    """
    Returns the names of the policy's biases that differ from those of vLLM's linear layers, for each layer the first,
    and of those that vLLM's layers lack. `biases` maps the policy's names of layers to their biases.
    """
    fused: dict[LinearBase, dict[int, str]] = {}
    different = []
    for name, place in places(model, biases).items():
        if place is None:
            continue
        layer, parts = place
        if layer.bias is None:
            different.append(f"{name}.bias")
        else:
            fused.setdefault(layer, {})[parts.start] = name
    for layer, name_by_part in fused.items():
        names = [name_by_part[part] for part in sorted(name_by_part)]
        whole = torch.cat([biases[name].to(layer.bias) for name in names])
        # Compared in sorted order, since Marlin's layers reorder biases. A rank's part of a bias is not compared.
        if whole.shape == layer.bias.shape and not torch.equal(whole.sort()[0], layer.bias.sort()[0]):
            different.append(f"{names[0]}.bias")
    return different


def _differing_rows(model: nn.Module, weights: dict[str, Tensor], dtype: torch.dtype) -> list[str]:
    """
    Returns the names of the `weights`, of the policy's layers that keep their type, that differ from their rows in
    vLLM's layers. Those of linear layers that a CPU packs, that ranks divide or that have an adapter beside them are
    not compared.
    """
    different = []
    for name, place in places(model, weights).items():
        if place is None or place[0].tp_size > 1 or hasattr(place[0], "lora_a"):
            continue
        (layer, parts), tensor = place, weights[name]
        sizes = layer.output_partition_sizes
        unpacked = getattr(layer, UNPACKED, None)
        held = layer.weight if unpacked is None else unpacked.unsqueeze(1)
        rows = held[sum(sizes[: parts.start]) : sum(sizes[: parts.stop])]
        if rows.shape == tensor.shape and not _are_same(rows, tensor, dtype):
            different.append(f"{name}.weight")
    return different


def parameters(model: nn.Module, names: Iterable[str]) -> dict[str, Tensor]:
    """Returns copies of the named parameters."""
    params = dict(model.named_parameters())
    return {name: params[name].detach().clone() for name in names}


def parameter_names(model: nn.Module) -> list[str]:
    """Returns the names of the parameters of vLLM's model, in order."""
    return [name for name, _ in model.named_parameters()]


@torch.no_grad()
def write_parameters(model: nn.Module, values: dict[str, Tensor]) -> None:
    """Writes parameters in place, so that captured CUDA graphs read the new values."""
    params = dict(model.named_parameters())
    for name, value in values.items():
        params[name].copy_(value)


def forget_step(worker) -> list[str]:
    """
    Drops a step that was interrupted between the model and the sampling, which vLLM would otherwise require to finish.

    Returns:
        `list[str]`: The requests that the worker holds. Some may have ended already: the interrupted step would have
        told the worker.
    """
    runner = worker.model_runner
    runner.execute_model_state = None
    states = getattr(runner, "req_states", None)  # vLLM's second model runner has these
    return list(runner.requests if states is None else states.req_id_to_index)
