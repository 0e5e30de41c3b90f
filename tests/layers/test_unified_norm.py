"""Norms that are computed with the quantizer that follows: which ones, in the same bits, and for whom."""

import copy
from types import SimpleNamespace

import pytest
import torch
from frozen_layers import gradients
from peft import LoraConfig, get_peft_model
from tiny import FAMILIES as TINY
from tiny import norms_of, tiny_model
from torch import nn

from trl_quant.layers import UnifiedLinear, inputs, quantizers
from trl_quant.layers import norm as norms
from trl_quant.layers.norm import FusedRMSNorm
from trl_quant.models.families import FAMILIES
from trl_quant.policy.unified import unify
from trl_quant.precisions import unified_flows


def fused_norms(model) -> dict[str, FusedRMSNorm]:
    return {name: module for name, module in model.named_modules() if isinstance(module, FusedRMSNorm)}


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("family", TINY)
def test_each_knows_whom_it_feeds(family, lora):
    """The norms of a family whose weight is a factor; those of heads and the last one feed no such layer."""
    model = tiny_model(family)
    if lora:
        model = get_peft_model(model, LoraConfig(target_modules="all-linear"))
    parameters = dict(model.named_parameters())
    unify(model, "int8", merged=True)
    assert all(param is parameters[name] for name, param in model.named_parameters())
    found = fused_norms(model)
    if FAMILIES[family].offset:
        assert not found
        return
    assert len(found) == sum("norm" in name for name in parameters)
    for name, module in found.items():
        layer, _, path = name.rpartition(".")
        fed = FAMILIES[family].feeds.get(path)
        linear = fed and model.get_submodule(f"{layer}.{fed[0]}")
        assert module.feeds is (getattr(linear, "base_layer", linear) or None)
        assert (module.feeds is not None) is (path in norms_of(family)), name
    assert not any("feeds" in name for name, _ in model.named_modules())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_same_bits_and_gradients(dtype):
    model = tiny_model("qwen3").to(dtype)
    theirs = copy.deepcopy(model.model.layers[0].input_layernorm)
    unify(model, "int8")
    ours = model.model.layers[0].input_layernorm
    x = torch.randn(2, 24, len(ours.weight), generator=torch.Generator().manual_seed(1)).to(dtype)
    for norm in (ours, theirs):
        norm.weight.data = torch.linspace(0.5, 2, len(norm.weight)).to(dtype)
    found = [gradients(norm, x, norm.weight) for norm in (ours, theirs)]
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_a_wider_weight_acts_as_it_is():
    """As noise lays it on; an engine that has no FP32 rounds it (`rounds`)."""
    model = tiny_model("qwen3").bfloat16()
    theirs = copy.deepcopy(model.model.norm).float()
    unify(model, "int8")
    ours = model.model.norm.float()
    theirs.weight.data += 1e-3
    ours.weight.data += 1e-3
    x = torch.randn(2, 24, len(ours.weight), generator=torch.Generator().manual_seed(1)).bfloat16()
    wide = ours(x)
    assert torch.equal(wide, theirs(x)) and wide.dtype == torch.float32
    ours.rounds = True
    assert ours(x).dtype == torch.bfloat16 and not torch.equal(ours(x), wide.bfloat16())


@pytest.mark.parametrize("precision", unified_flows())
@pytest.mark.parametrize("trains", [True, False])
def test_codes_that_are_handed_over_are_the_ones_used(precision, trains, monkeypatch):
    """As the kernels do on a GPU: nothing that a norm feeds is quantized again, but a trained layer's two layouts."""
    model = tiny_model("qwen3").bfloat16().requires_grad_(trains)
    unify(model, precision)
    ids = torch.arange(24).view(2, 12)
    expected, asked, quantized = model(ids).logits, [], []

    def fused(x, weight, eps, format, dtype):
        y = norms.rms_norm(x, weight, eps)[0]
        asked.append(format)
        if format is not None:
            rows = quantizers.quantize_input(y.detach().flatten(0, -2).to(dtype), format)
            inputs.remember(y, dtype, rows, rows if format != "fp8_block" else None)
        return y

    here = SimpleNamespace(has_kernels=lambda x, format: True)
    monkeypatch.setattr(norms, "quantizers", here)
    monkeypatch.setattr(norms, "fused_rms_norm", fused)
    for name in ("quantize_input", "quantize_for_both"):
        of = getattr(quantizers, name)
        monkeypatch.setattr(inputs, name, lambda *args, of=of: quantized.append(args[0].shape) or of(*args))
    assert torch.equal(model(ids).logits, expected)
    layers, apart = model.config.num_hidden_layers, precision == "fp8_block" and trains
    fed = 2 * layers * [None if apart else precision]
    assert sorted(map(str, asked)) == sorted(map(str, [*fed, *(2 * layers + 1) * [None]]))
    assert len(quantized) == (4 if apart else 2) * layers  # o and down, and what norms feed


def test_without_kernels_or_feeding_layers():
    """A layer exchanged since, a model of an unknown family, and a norm with a forward of its own."""
    model = tiny_model("qwen3")
    model.config.model_type = "unheard_of"
    first, second = (layer.input_layernorm for layer in model.model.layers)
    second.forward = second.forward
    unify(model, "int8")
    assert model.model.layers[1].input_layernorm is second
    assert all(norm.feeds is None for norm in fused_norms(model).values()) and len(fused_norms(model)) > 4
    other = copy.deepcopy(model)
    assert isinstance(other.model.layers[0].self_attn.q_proj, UnifiedLinear)
    with torch.no_grad():
        first.weight.mul_(2)
    ids = torch.arange(12)[None]
    assert not torch.equal(model(ids).logits, other(ids).logits)


def test_compiled(tracing):
    model = tiny_model("qwen3")
    unify(model, "fp8")
    norm = model.model.layers[0].input_layernorm
    x = torch.randn(2, 24, len(norm.weight), generator=torch.Generator().manual_seed(1))
    ours = gradients(torch.compile(nn.Sequential(norm), backend="eager"), x, norm.weight)
    assert all(torch.equal(*pair) for pair in zip(ours, gradients(norm, x, norm.weight), strict=True))
