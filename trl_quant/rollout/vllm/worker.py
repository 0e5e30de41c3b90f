"""Functions that run inside vLLM's worker, on vLLM's model, through `LLM.collective_rpc` and `LLM.apply_model`.

The engine runs in the trainer's process, so these functions may take iterators and return tensors. The faults that they
work around were seen in vLLM 0.26 (CUDA) and 0.31 (CPU).
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from vllm import _custom_ops as ops
from vllm.config.load import LoadConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader import get_model_loader, register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.models.utils import extract_layer_index
from vllm.model_executor.utils import set_weight_attrs

from ...formats import FORMATS, quantize
from ...noise import noised_norms
from ...precisions import PRECISIONS
from ...storage.layout import checkpoint_stream, quantizers_on
from ..tensors import default_dtype
from ..verify.kv_cache import CACHE_FORMATS, UNQUANTIZED, KVCache
from . import one_copy
from .adapter import decoder_in_vllm, hold_adapter, linear_layers, names_in_vllm, places


@register_model_loader("trl_quant")
class QuantizingLoader(DefaultModelLoader):
    """
    Loads a model in compressed-tensors' layout: from a checkpoint in that layout, or from a 16- or 32-bit one, which it
    quantizes one tensor at a time while it reads. If the trainer lends its base, the model shares that instead; see
    [`one_copy`]. Then it prepares the model for noise, an adapter or exact rollouts.

    The keys of `model_loader_extra_config`, all optional:

    | key | meaning |
    |---|---|
    | the arguments of [`~storage.layout.checkpoint_stream`] | how to quantize |
    | `device` | the device to quantize on |
    | `wide_norms` | see [`widen_norms`] |
    | `adapter` | the adapter's ranks by the names of the policy's layers, see [`~adapter.hold_adapter`] |
    | `exact` | see [`exact`] |
    | `load_format` | vLLM's name of another loader, which reads the weights instead |
    """

    def __init__(self, load_config: LoadConfig):
        self.stream_arguments = dict(load_config.model_loader_extra_config)
        self.device = self.stream_arguments.pop("device", None)
        self.wide_norms = self.stream_arguments.pop("wide_norms", False)
        self.adapter = self.stream_arguments.pop("adapter", {})
        self.exact = self.stream_arguments.pop("exact", False)
        reader_format = self.stream_arguments.pop("load_format", None)
        plain = dataclasses.replace(load_config, load_format=reader_format or "auto", model_loader_extra_config={})
        self.reader = get_model_loader(plain) if reader_format else None
        super().__init__(dataclasses.replace(plain, load_format="auto"))

    def get_all_weights(self, model_config, model):
        weights = super().get_all_weights(model_config, model)
        if not self.stream_arguments:
            return weights
        on_device = ((name, tensor.to(self.device)) for name, tensor in weights)
        return checkpoint_stream(on_device, **quantizers_on(self.device), **self.stream_arguments)

    def load_weights(self, model, model_config):
        keep_onednn_scales(model)
        policy = one_copy.lent_weights()
        is_shared = policy is not None and one_copy.share(model, policy, self.target_device)
        if not is_shared and self.reader is not None:
            self.reader.load_weights(model, model_config)
        elif not is_shared:
            super().load_weights(model, model_config)
        if self.wide_norms:
            widen_norms(model, model_config.hf_text_config.model_type)

    def load_model(self, vllm_config, model_config, **kwargs):
        self.target_device = vllm_config.device_config.device
        with one_copy.without_memory() if one_copy.lent_weights() else nullcontext():
            model = super().load_model(vllm_config=vllm_config, model_config=model_config, **kwargs)
        keep_bias_loaders(model)
        if self.exact:
            from .exact import hold_exact_norms

            hold_exact_norms(model)
        if self.adapter:
            hold_adapter(model, self.adapter, model_config.dtype, self.target_device)
        return model


def widen_norms(model: nn.Module, model_type: str) -> None:
    """
    Casts the norms that get noise to FP32. Must be called before CUDA graphs are captured; a reload copies into these
    tensors. vLLM's kernel for norms needs inputs and weights of one type. For mixed types vLLM uses its version in
    PyTorch, which multiplies in FP32.
    """
    params = dict(model.named_parameters())
    for name in noised_norms(model_type, params):
        params[name].data = params[name].data.float()


def _method(layer: LinearBase) -> tuple[object, object]:
    """Returns a layer's quantization method and its kernel; `None` for a method without one."""
    method = getattr(layer, "scheme", None) or layer.quant_method
    for name in ("kernel", "fp8_linear"):
        if hasattr(method, name):
            return method, getattr(method, name)
    return method, None


def kernel_name(layer: LinearBase) -> str:
    """Returns the name of a layer's kernel; "NoneType" for a method without one."""
    return type(_method(layer)[1]).__name__


def quantized_outside(model: nn.Module, layers: Iterable[str]) -> list[str]:
    """
    Describes the quantized linear layers outside of the decoder. `layers` are the policy's names of the decoder's
    linear layers.
    """
    decoder = decoder_in_vllm(model, layers)
    outside = {name: layer for name, layer in linear_layers(model).items() if not name.startswith(decoder)}
    return [f"{name}: {_describe(layer)}" for name, layer in outside.items() if not _runs_in("bf16", *_method(layer))]


def check_kernels(model: nn.Module, precision: str, layers: Iterable[str]) -> str:
    """
    Describes the kernels of linear layers, such as `112 x CompressedTensorsW8A8Int8 (CutlassInt8...)`.

    Args:
        model (`nn.Module`): vLLM's model.
        precision (`str`): Key of [`~precisions.PRECISIONS`].
        layers (`Iterable[str]`): The policy's names of its decoder's linear layers.

    Raises:
        `RuntimeError`: A linear layer of the decoder does not run in `precision`, or one outside of it is quantized.
    """
    linears, decoder = linear_layers(model), decoder_in_vllm(model, layers)
    inside = {name: layer for name, layer in linears.items() if name.startswith(decoder)}
    if not inside:
        raise RuntimeError(
            f"`rollout_precision`={precision!r}: vLLM's {type(model).__name__} has no linear layers in {decoder!r}, "
            "where its decoder should be. Use another model, or leave `rollout_precision` unset."
        )
    towers = quantized_outside(model, layers)
    if towers:
        raise RuntimeError(
            f"`rollout_precision`={precision!r} quantizes only the language model, and vLLM quantized "
            f"{len(towers)} linear layers outside of it, such as {'; '.join(towers[:3])}. Set `use_vllm=False` to "
            "sample from the embedded engine, or leave `rollout_precision` unset."
        )
    wrong = [f"{n}: {_describe(layer)}" for n, layer in inside.items() if not _runs_in(precision, *_method(layer))]
    if wrong:
        expected = " or ".join(PRECISIONS[precision].vllm.methods)
        raise RuntimeError(
            f"vLLM did not build the engine that `rollout_precision`={precision!r} asks for: {len(wrong)} linear "
            f"layers run otherwise, such as {'; '.join(wrong[:3])}. Expected: {expected}."
        )
    counts = Counter(map(_describe, linears.values()))
    return ", ".join(f"{count} x {description}" for description, count in counts.items())


def check_biases(model: nn.Module, layers: Iterable[str]) -> None:
    """Raises `ValueError` if vLLM's model lacks the bias of one of `layers`, the policy's layers with a bias."""
    lacking = [name for name, place in places(model, layers).items() if place and place[0].bias is None]
    if lacking:
        raise ValueError(
            f"vLLM's {type(model).__name__} has no bias in {len(lacking)} layers where the policy has one, such as "
            f"`{lacking[0]}`, and would sample without it. Set `use_vllm=False` to sample from the embedded engine."
        )


def _describe(layer: LinearBase) -> str:
    method, kernel = _method(layer)
    return f"{type(method).__name__} ({type(kernel).__name__})" if kernel else type(method).__name__


def _runs_in(precision: str, method: object, kernel: object) -> bool:
    """Whether a layer with this quantization method and kernel, from [`_method`], runs in `precision`."""
    entry, kernel_name = PRECISIONS[precision], type(kernel).__name__
    if type(method).__name__ not in entry.vllm.methods or kernel_name.startswith(entry.vllm.wrong_kernels):
        return False
    if entry.vllm.kernels and not kernel_name.startswith(entry.vllm.kernels):
        return False
    # A method of compressed-tensors may run several formats, which differ in the strategy of their weights
    strategy = getattr(method, "strategy", None)
    return strategy is None or strategy == FORMATS[entry.format].scheme.weights["strategy"]


def reload(worker, stream: Iterable[tuple[str, Tensor]]) -> None:
    """
    Replaces all weights by those of `stream`, through vLLM's own reload. Captured CUDA graphs stay valid.

    Raises:
        `RuntimeError`: The stream ended without weights for some module.
    """
    model = worker.get_model()
    load_weights, loaded = model.load_weights, set()

    def load_and_record(weights: Iterator[tuple[str, Tensor]]) -> set[str] | None:
        names = load_weights(weights)
        loaded.update(names or ())
        return names

    model.load_weights = load_and_record
    plain = plain_tensors(model)
    try:
        # The reload creates tensors of the default type, which vLLM itself sets only for the first load
        with default_dtype(worker.vllm_config.model_config.dtype):
            worker.reload_weights(weights_iterator=stream)
            refresh_tied_head(model)
    finally:
        del model.load_weights
    restore_plain_tensors(plain)
    # Compares modules, since a quantized layer's parameters have other names than the loaded tensors. Scalars, such as
    # the cache's scales, have defaults. `named_parameters` lists a tied head's weight only with the embeddings.
    filled = {name.rpartition(".")[0] for name in loaded}
    owners = {name.rpartition(".")[0] for name, p in model.named_parameters() if p.numel() > 1}
    missing = owners - filled
    if loaded and missing:
        raise RuntimeError(f"the policy streamed no weights for {', '.join(sorted(missing)[:4])}")


def plain_tensors(model: nn.Module) -> dict[tuple[nn.Module, str], Tensor]:
    """
    Returns the tensors that layers hold in addition to their parameters and buffers, such as the locks of Marlin's
    kernels. A reload replaces them and frees the old ones, which captured CUDA graphs still read. If the memory of a
    lock is then used for something else, the kernels wait forever.
    """
    found = {}
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                found[module, name] = value
    return found


def restore_plain_tensors(plain: dict[tuple[nn.Module, str], Tensor]) -> None:
    """Puts the tensors of [`plain_tensors`] back, with the values of those that replaced them in a reload."""
    for (module, name), tensor in plain.items():
        replacement = vars(module).get(name)
        if isinstance(replacement, Tensor) and replacement is not tensor and replacement.shape == tensor.shape:
            tensor.copy_(replacement)
            setattr(module, name, tensor)


def refresh_tied_head(model: nn.Module) -> None:
    """Packs the embedding for a tied head again. On a CPU the head keeps a packed copy that a reload misses."""
    for language_model in model.modules():  # it is `model` itself, or a part of a vision-language model
        head = getattr(language_model, "lm_head", None)
        head = getattr(head, "base_layer", head)
        if head is not None and head.weight.is_cpu and _is_tied(language_model):
            head.quant_method.process_weights_after_loading(head)


def _is_tied(model: nn.Module) -> bool:
    config = getattr(model, "config", None)
    return bool(getattr(config, "tie_word_embeddings", False))


def keep_onednn_scales(model: nn.Module) -> None:
    """
    Makes INT8 kernels on CPUs survive a reload.

    Without AMX a layer gives oneDNN a raw pointer to its scales. A reload frees the tensor behind it, which leads to
    wrong results or NaN; here the kernel holds a reference to it. The kernel also sets the layer's weight to `None`. A
    server's reload drops such an attribute, which the kernel needs; here the weight becomes an empty tensor.
    """
    for layer in linear_layers(model).values():
        kernel = _method(layer)[1]
        if hasattr(kernel, "process_weights_for_onednn"):
            kernel.process_weights_for_onednn = partial(_process_and_keep, kernel)


def keep_bias_loaders(model: nn.Module) -> None:
    """
    Gives the biases of Marlin's layers a weight loader. These layers create a new bias without a loader, and a reload
    in vLLM 0.31 needs one, because it loads the bias part by part.
    """
    for layer in linear_layers(model).values():
        if getattr(layer, "bias", None) is not None and not hasattr(layer.bias, "weight_loader"):
            set_weight_attrs(layer.bias, {"output_dim": 0, "weight_loader": layer.weight_loader})


def _process_and_keep(kernel, layer: nn.Module) -> None:
    type(kernel).process_weights_for_onednn(kernel, layer)
    weight, scale = kernel.layer_param_names[:2]
    kernel.kept_scale = getattr(layer, scale).data  # a plain tensor, since a reload would replace a parameter
    setattr(layer, weight, nn.Parameter(torch.empty(0), requires_grad=False))


@torch.no_grad()
def int8_errors(model: nn.Module) -> dict[int, float]:
    """
    Measures the relative error of the device's INT8 product, on normally distributed weights and inputs. It is zero on
    a GPU, and on CPUs with VNNI or AMX. On other CPUs oneDNN adds pairs of products in 16 bits, which saturate.

    Returns:
        `dict[int, float]`: number of a layer's inputs -> error; empty on a GPU.
    """
    if not any(hasattr(_method(layer)[1], "dnnl_handler") for layer in linear_layers(model).values()):
        return {}
    generator, errors = torch.Generator().manual_seed(0), {}
    for inputs in {layer.input_size for layer in linear_layers(model).values()}:
        draws = [torch.randn(64, inputs, generator=generator) for _ in range(2)]
        x, w = (quantize(draw, "int8") for draw in draws)
        out = torch.empty(64, 64, dtype=torch.bfloat16)
        handle = ops.create_onednn_scaled_mm(w.values.t(), w.scale, torch.bfloat16, True, False, 32)
        ops.onednn_scaled_mm(handle, x.values, out, x.scale, None, None, None)
        exact = x.dequantize() @ w.dequantize().t()
        errors[inputs] = ((out - exact).norm() / exact.norm()).item()
    return errors


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


@torch.no_grad()
def differing_weight(model: nn.Module, weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> str | None:
    """
    Compares the policy's weights with vLLM's: those that both have under one name and in one shape (norms, embeddings,
    the head), and the biases of linear layers.

    Args:
        model (`nn.Module`): vLLM's model.
        weights (`Iterable[tuple[str, Tensor]]`): The policy's weights by its names.
        dtype (`torch.dtype`): The type of vLLM's model.

    Returns:
        `str` or `None`: The policy's name of the first weight that differs; `None` if there is none.
    """
    params, modules = dict(model.named_parameters()), dict(model.named_modules())
    biases: dict[str, Tensor] = {}
    different: list[str] = []
    for name, tensor in weights:  # reads all of them in any case, because gathering is collective
        module, _, kind = name.rpartition(".")
        ((_, vllm_name),) = names_in_vllm(model, [module])
        held, layer = params.get(f"{vllm_name}.{kind}"), modules.get(vllm_name)
        if layer is None or isinstance(layer, LinearBase):
            if kind == "bias":
                biases[module] = tensor
            continue
        if isinstance(layer, VocabParallelEmbedding) and held is not None:  # padded, and split among ranks
            rows = layer.shard_indices
            tensor = tensor[rows.org_vocab_start_index : rows.org_vocab_end_index]
            held = held[: len(tensor)]
        if held is not None and held.shape == tensor.shape and not _are_same(held, tensor, dtype):
            different.append(name)
    different += _differing_biases(model, biases)
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
    Returns the names of the policy's biases that differ from those of vLLM's linear layers, for each layer the first.
    `biases` maps the policy's names of layers to their biases.
    """
    fused: dict[LinearBase, dict[int, str]] = {}
    for name, place in places(model, biases).items():
        if place is not None and place[0].bias is not None:
            layer, parts = place
            fused.setdefault(layer, {})[parts.start] = name
    different = []
    for layer, name_by_part in fused.items():
        names = [name_by_part[part] for part in sorted(name_by_part)]
        whole = torch.cat([biases[name].to(layer.bias) for name in names])
        # Compared in sorted order, since Marlin's layers reorder biases. A rank's part of a bias is not compared.
        if whole.shape == layer.bias.shape and not torch.equal(whole.sort()[0], layer.bias.sort()[0]):
            different.append(f"{names[0]}.bias")
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
