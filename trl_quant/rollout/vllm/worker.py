"""What runs inside vLLM's worker, on the model itself: reached through `LLM.collective_rpc` and `LLM.apply_model`.

The engine runs in the trainer's process, so these functions may take iterators and return tensors. What each of them
works around was measured on vLLM 0.26 (CUDA) and 0.31 (CPU).
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
from ...storage.layout import checkpoint_stream
from ..stream import default_dtype
from ..verify.kv_cache import CACHE_FORMATS, UNQUANTIZED, KVCache
from . import one_copy
from .adapter import decoder_in_vllm, hold_adapter, linear_layers, names_in_vllm, places
from .support import quantizers_on


@register_model_loader("trl_quant")
class QuantizingLoader(DefaultModelLoader):
    """
    Loads a model in compressed-tensors' layout: from a checkpoint in that layout, or from a 16- or 32-bit one, which it
    quantizes while reading, one tensor at a time; then prepares it for what it is to hold besides its weights. A base
    that the trainer lends is taken over instead; see [`one_copy`].

    `model_loader_extra_config` may have the arguments of [`~storage.layout.checkpoint_stream`] and the `device` to
    quantize on; `wide_norms`, see [`widen_norms`]; `adapter`, ranks by the names of the policy's layers, see
    [`~adapter.hold_adapter`]; `exact`, see [`exact`]; and `load_format`, that of another loader of vLLM's which reads
    the weights instead.
    """

    def __init__(self, load_config: LoadConfig):
        self.arguments = dict(load_config.model_loader_extra_config)
        self.device = self.arguments.pop("device", None)
        self.wide_norms = self.arguments.pop("wide_norms", False)
        self.adapter = self.arguments.pop("adapter", {})
        self.exact = self.arguments.pop("exact", False)
        other = self.arguments.pop("load_format", None)
        plain = dataclasses.replace(load_config, load_format=other or "auto", model_loader_extra_config={})
        self.other = get_model_loader(plain) if other else None
        super().__init__(dataclasses.replace(plain, load_format="auto"))

    def get_all_weights(self, model_config, model):
        weights = super().get_all_weights(model_config, model)
        if not self.arguments:
            return weights
        on_device = ((name, tensor.to(self.device)) for name, tensor in weights)
        return checkpoint_stream(on_device, **quantizers_on(self.device), **self.arguments)

    def load_weights(self, model, model_config):
        keep_onednn_scales(model)
        policy = one_copy.lent()
        if policy is None or not one_copy.share(model, policy, self.target):
            read = super().load_weights if self.other is None else self.other.load_weights
            read(model, model_config)
        if self.wide_norms:
            widen_norms(model, model_config.hf_text_config.model_type)

    def load_model(self, vllm_config, model_config, **kwargs):
        self.target = vllm_config.device_config.device
        with one_copy.without_memory() if one_copy.lent() else nullcontext():
            model = super().load_model(vllm_config=vllm_config, model_config=model_config, **kwargs)
        keep_bias_loaders(model)
        if self.exact:
            from .exact import hold_exact_norms

            hold_exact_norms(model)
        if self.adapter:
            hold_adapter(model, self.adapter, model_config.dtype, self.target)
        return model


def widen_norms(model: nn.Module, model_type: str) -> None:
    """
    Holds the norms that are noised in FP32, before CUDA graphs are captured; a reload copies into them. vLLM's kernel
    for norms asks for one type of inputs and weights; for others it takes the one in torch, which multiplies in FP32.
    """
    params = dict(model.named_parameters())
    for name in noised_norms(model_type, params):
        params[name].data = params[name].data.float()


def _method(layer: LinearBase) -> tuple[object, object]:
    method = getattr(layer, "scheme", None) or layer.quant_method
    return method, next((getattr(method, n) for n in ("kernel", "fp8_linear") if hasattr(method, n)), None)


def quantized_outside(model: nn.Module, layers: Iterable[str]) -> list[str]:
    """Linear layers that are quantized and not in the decoder, by the policy's names of the decoder's `layers`."""
    decoder = decoder_in_vllm(model, layers)
    outside = {name: layer for name, layer in linear_layers(model).items() if not name.startswith(decoder)}
    return [f"{name}: {_describe(layer)}" for name, layer in outside.items() if not _runs_in("bf16", *_method(layer))]


def check_kernels(model: nn.Module, precision: str, layers: Iterable[str]) -> str:
    """
    Describes the kernels of linear layers, `112 x CompressedTensorsW8A8Int8 (CutlassInt8...)`. Those of the decoder
    have the names `layers` in the policy.

    Raises:
        `RuntimeError`: if any of the decoder's does not run in `precision`, or another one is quantized.
    """
    found, decoder = linear_layers(model), decoder_in_vllm(model, layers)
    inside = {name: layer for name, layer in found.items() if name.startswith(decoder)}
    if not inside:
        raise RuntimeError(
            f"`rollout_precision`={precision!r}: vLLM's {type(model).__name__} has no linear layers in {decoder!r}, "
            "where those of its decoder are looked for. Use another model, or leave `rollout_precision` unset."
        )
    if towers := quantized_outside(model, layers):
        raise RuntimeError(
            f"`rollout_precision`={precision!r} quantizes the language model alone, and vLLM quantized "
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
    counts = Counter(map(_describe, found.values()))
    return ", ".join(f"{count} x {description}" for description, count in counts.items())


def check_biases(model: nn.Module, layers: Iterable[str]) -> None:
    """Raises `ValueError` where vLLM's model has no bias for one of the policy's `layers`, which have one."""
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
    entry, kernel_name = PRECISIONS[precision], type(kernel).__name__
    if type(method).__name__ not in entry.vllm.methods or kernel_name.startswith(entry.vllm.wrong_kernels):
        return False
    if entry.vllm.kernels and not kernel_name.startswith(entry.vllm.kernels):
        return False
    # compressed-tensors' methods run several formats, which the strategy of the weights tells apart
    strategy = getattr(method, "strategy", None)
    return strategy is None or strategy == FORMATS[entry.format].scheme.weights["strategy"]


def reload(worker, stream: Iterable[tuple[str, Tensor]]) -> None:
    """
    Replaces all weights by those of `stream`, in vLLM's bracketed reload, under which captured CUDA graphs stay valid.

    Raises:
        `RuntimeError`: if the stream ends without weights for some module.
    """
    model = worker.get_model()
    load_weights, loaded = model.load_weights, set()

    def load(weights: Iterator[tuple[str, Tensor]]) -> set[str] | None:
        names = load_weights(weights)
        loaded.update(names or ())
        return names

    model.load_weights = load
    plain = plain_tensors(model)
    try:
        # The reload builds tensors of the default type, which vLLM only sets around the first load.
        with default_dtype(worker.vllm_config.model_config.dtype):
            worker.reload_weights(weights_iterator=stream)
            refresh_tied_head(model)
    finally:
        del model.load_weights
    restore_plain_tensors(plain)
    # By module, since what a quantized layer holds is not what was loaded into it; scalars (the cache's scales) have
    # defaults. Parameters are listed once, so a tied head, whose weight is the embedding's, misses nothing.
    filled = {name.rpartition(".")[0] for name in loaded}
    owners = {name.rpartition(".")[0] for name, p in model.named_parameters() if p.numel() > 1}
    if loaded and (missing := owners - filled):
        raise RuntimeError(f"the policy streamed no weights for {', '.join(sorted(missing)[:4])}")


def plain_tensors(model: nn.Module) -> dict[tuple[nn.Module, str], Tensor]:
    """
    Tensors that layers hold beside their parameters and buffers, such as the locks of Marlin's kernels. A reload makes
    new ones and frees those that captured CUDA graphs go on to read: where the memory of locks is given to something
    else, the kernels wait forever.
    """
    return {
        (module, name): value
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, Tensor)
    }


def restore_plain_tensors(plain: dict[tuple[nn.Module, str], Tensor]) -> None:
    """Puts the tensors of [`plain_tensors`] back in their places, with the values that a reload gave to new ones."""
    for (module, name), tensor in plain.items():
        now = vars(module).get(name)
        if isinstance(now, Tensor) and now is not tensor and now.shape == tensor.shape:
            tensor.copy_(now)
            setattr(module, name, tensor)


def refresh_tied_head(model: nn.Module) -> None:
    """On CPU a tied head keeps a packed copy of the embedding, which a reload leaves as it was."""
    for language_model in model.modules():  # which is `model` itself, or in a vision-language model a part of it
        head = getattr(language_model, "lm_head", None)
        head = getattr(head, "base_layer", head)
        if head is not None and head.weight.is_cpu and _is_tied(language_model):
            head.quant_method.process_weights_after_loading(head)


def _is_tied(model: nn.Module) -> bool:
    config = getattr(model, "config", None)
    return bool(getattr(config, "tie_word_embeddings", False))


def keep_onednn_scales(model: nn.Module) -> None:
    """
    On CPUs without AMX an INT8 layer gives oneDNN a raw pointer to its scales, and a reload frees the tensor behind
    it: wrong numbers or NaN afterwards. The kernel keeps it alive instead. It also sets the layer's weight to `None`,
    an attribute that a server's reload loses and the kernel then misses: an empty tensor stands in for it.
    """
    for layer in linear_layers(model).values():
        kernel = _method(layer)[1]
        if hasattr(kernel, "process_weights_for_onednn"):
            kernel.process_weights_for_onednn = partial(_process_and_keep, kernel)


def keep_bias_loaders(model: nn.Module) -> None:
    """Marlin's layers make a new bias, which a reload by vLLM 0.31 needs to know how to load: a part at a time."""
    for layer in linear_layers(model).values():
        if getattr(layer, "bias", None) is not None and not hasattr(layer.bias, "weight_loader"):
            set_weight_attrs(layer.bias, {"output_dim": 0, "weight_loader": layer.weight_loader})


def _process_and_keep(kernel, layer: nn.Module) -> None:
    type(kernel).process_weights_for_onednn(kernel, layer)
    weight, scale = kernel.layer_param_names[:2]
    kernel.kept_scale = getattr(layer, scale).data  # not a parameter, which a reload would replace
    setattr(layer, weight, nn.Parameter(torch.empty(0), requires_grad=False))


@torch.no_grad()
def int8_errors(model: nn.Module) -> dict[int, float]:
    """
    Relative error of the INT8 product itself, by the number of inputs of a layer, on normal weights and inputs: zero
    on a GPU and on CPUs with VNNI or AMX. On others oneDNN adds pairs of products in 16 bits, which saturate.
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
    The KV caches that are quantized, by the index of their layer; none in most engines.

    Raises:
        `ValueError`: for one whose rounding [`KVCache`] does not describe.
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
        scales = {  # on the device and on the host: which of them acts is up to the backend
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
def held_otherwise(model: nn.Module, weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> str | None:
    """
    One of the policy's `weights`, by its name there, that the model, whose type is `dtype`, does not hold; `None` if
    there is none. Compared are what both hold in the same shape under one name (norms, embeddings, the head) and the
    biases of linear layers.
    """
    own, modules, biases, different = dict(model.named_parameters()), dict(model.named_modules()), {}, []
    for name, tensor in weights:  # all of them in any case: gathering is collective
        module, _, kind = name.rpartition(".")
        ((_, theirs),) = names_in_vllm(model, [module])
        held, layer = own.get(f"{theirs}.{kind}"), modules.get(theirs)
        if layer is None or isinstance(layer, LinearBase):
            if kind == "bias":
                biases[module] = tensor
            continue
        if isinstance(layer, VocabParallelEmbedding) and held is not None:  # padded, and a part on each rank
            rows = layer.shard_indices
            tensor = tensor[rows.org_vocab_start_index : rows.org_vocab_end_index]
            held = held[: len(tensor)]
        if held is not None and held.shape == tensor.shape and not _are_same(held, tensor, dtype):
            different.append(name)
    return next(iter(different + _other_biases(model, biases)), None)


def _are_same(held: Tensor, tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether the model's `held` is the policy's `tensor` rounded, or each was loaded from the same checkpoint."""
    if torch.equal(tensor.to(held), held) or torch.equal(tensor.to(dtype).to(held), held):  # norms in FP32 hold BF16
        return True
    return held.element_size() <= tensor.element_size() and torch.equal(held.to(tensor), tensor)  # as a policy in FP16


def _other_biases(model: nn.Module, biases: dict[str, Tensor]) -> list[str]:
    """Those of the policy's biases, by the names of their layers there, that are not in the model's linear layers."""
    joined, different = {}, []
    for name, place in places(model, biases).items():
        if place is not None and place[0].bias is not None:
            layer, parts = place
            joined.setdefault(layer, {})[parts.start] = name
    for layer, names in joined.items():
        names = [name for _, name in sorted(names.items())]
        whole = torch.cat([biases[name].to(layer.bias) for name in names])
        # Sorted, since Marlin's layers reorder theirs; a rank of several, which has a part, is not compared
        if whole.shape == layer.bias.shape and not torch.equal(whole.sort()[0], layer.bias.sort()[0]):
            different.append(f"{names[0]}.bias")
    return different


def parameters(model: nn.Module, names: Iterable[str]) -> dict[str, Tensor]:
    """Copies of the named parameters."""
    own = dict(model.named_parameters())
    return {name: own[name].detach().clone() for name in names}


def parameter_names(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters()]


@torch.no_grad()
def write_parameters(model: nn.Module, values: dict[str, Tensor]) -> None:
    """Writes parameters in place, where captured CUDA graphs read them."""
    own = dict(model.named_parameters())
    for name, value in values.items():
        own[name].copy_(value)


def forget_step(worker) -> list[str]:
    """
    Forgets a step that broke off between the model and the sampling, which vLLM would insist on finishing. Returns the
    requests that the worker holds: some may have ended long ago, since the step that would have told it broke off.
    """
    runner = worker.model_runner
    runner.execute_model_state = None
    states = getattr(runner, "req_states", None)  # of vLLM's second model runner
    return list(runner.requests if states is None else states.req_id_to_index)
