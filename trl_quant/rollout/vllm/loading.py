"""Registers a loader with vLLM, which quantizes a model while it reads it, or lends it the trainer's base."""

import dataclasses
from contextlib import nullcontext

from torch import nn
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader import get_model_loader, register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from ...noise import noised_norms
from ...storage.layout import checkpoint_stream, quantizers_on
from . import one_copy
from .adapter import hold_adapter
from .repairs import keep_bias_loaders, keep_onednn_scales


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

    The model that drafts tokens for speculative decoding is loaded as it is, because none of this describes it.
    """

    def __init__(self, load_config: LoadConfig):
        self.stream_arguments = dict(load_config.model_loader_extra_config)
        self.device = self.stream_arguments.pop("device", None)
        self.wide_norms = self.stream_arguments.pop("wide_norms", False)
        self.adapter = self.stream_arguments.pop("adapter", {})
        self.exact = self.stream_arguments.pop("exact", False)
        reader_format = self.stream_arguments.pop("load_format", None)
        plain = dataclasses.replace(load_config, load_format=reader_format or "auto", model_loader_extra_config={})
        self.plain = get_model_loader(plain)
        self.reader = self.plain if reader_format else None
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
        speculative = vllm_config.speculative_config
        if speculative is not None and model_config is speculative.draft_model_config:
            return self.plain.load_model(vllm_config=vllm_config, model_config=model_config, **kwargs)
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


def loader_arguments(options: dict, given: dict) -> dict:
    """
    Returns the arguments of `LLM` that select our loader with its `options`. It wraps the loader that the `given`
    arguments select.
    """
    if not options:
        return {}
    extra = given.get("model_loader_extra_config", {}) | options
    wrapped = given.get("load_format", "trl_quant")
    if wrapped != "trl_quant":
        extra["load_format"] = wrapped
    return {
        "load_format": "trl_quant",
        "model_loader_extra_config": extra,
        # vLLM's cache of compiled models is keyed by its configuration, which includes this option but no loader's
        "additional_config": {**given.get("additional_config", {}), "trl_quant": options},
    }
