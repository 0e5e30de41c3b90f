"""A layer that trains its weight for four bits: Q(W) in the forward pass, gradients straight through to W."""

import copy

import pytest
import torch
import torch.nn.functional as F
from frozen_layers import DTYPES, Decoder, close, gradients, inputs, linear, same_codes, saved_bytes
from peft import LoraConfig, get_peft_model
from reference_formats import slow_quantize
from tiny import FAMILIES, tiny_model
from torch import nn
from torch.utils.checkpoint import checkpoint

from trl_quant.formats import FORMATS, quantize
from trl_quant.layers import FrozenLinear, SampledLinear, UnifiedLinear, share_scale, unified, weight_only
from trl_quant.models.linears import linears
from trl_quant.policy.unified import unified_layers, unify
from trl_quant.precisions import PRECISIONS, qat_precisions, unified_flows
from trl_quant.storage.layout import checkpoint_stream, checkpoint_tensors


every_precision = pytest.mark.parametrize("precision", qat_precisions())


def layer_of(precision: str, **kwargs) -> UnifiedLinear:
    return UnifiedLinear.from_linear(linear(**kwargs), precision)


def slow_numbers(weight: torch.Tensor, precision: str) -> torch.Tensor:
    """Q(W) by loops, in FP64."""
    _, _, values, _ = slow_quantize(weight.detach(), PRECISIONS[precision].format)
    return torch.tensor(values, dtype=torch.float64)


def fused(precision: str = "nvfp4") -> list[UnifiedLinear]:
    """Three layers whose largest values differ, as those of q, k and v do."""
    layers = []
    for index, outputs in enumerate((48, 16, 32)):
        torch.manual_seed(index)
        plain = nn.Linear(64, outputs, bias=False)
        with torch.no_grad():
            plain.weight.mul_(1 + index)
        layers.append(UnifiedLinear.from_linear(plain, precision))
    share_scale(layers)
    return layers


# The layer


@every_precision
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
def test_forward_and_gradients_against_loops(precision, dtype, bias):
    """
    Y = X Q(W)^T + b, dX = dY Q(W), dW = dY^T X, with Q(W) by loops and products in FP64; Y and dX are far from those of
    W itself, and dW is not that of a rounding which the gradient sees, which would be 0.
    """
    layer, x = layer_of(precision, dtype=dtype, bias=bias), inputs(dtype=dtype)
    y, dx, dw, *db = gradients(layer, x, *layer.parameters())
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).bfloat16().flatten(0, 1).double()
    numbers, flat = slow_numbers(layer.weight, precision), x.flatten(0, 1).double()
    offset = layer.bias.double() if bias else 0
    expected = [flat @ numbers.t() + offset, dy @ numbers, dy.t() @ flat]
    found = [tensor.double().flatten(0, -2) for tensor in (y, dx, dw)]
    tolerance = 1e-5 if dtype == torch.float32 else 2**-8
    close(found, expected, tolerance)
    if bias:
        close([db[0].double()], [dy.sum(0)], tolerance)
    assert dx.dtype == dw.dtype == dtype
    plain = flat @ layer.weight.double().t() + offset, dy @ layer.weight.double()
    for ours, theirs in zip(found, plain, strict=False):
        assert 0.05 * theirs.norm() < (ours - theirs).norm() < 0.2 * theirs.norm()


@every_precision
def test_it_computes_as_a_frozen_layer_of_the_same_weight(precision):
    layer, x = layer_of(precision, dtype=torch.bfloat16), inputs(dtype=torch.bfloat16)
    frozen = FrozenLinear.from_linear(copy.deepcopy(layer.plain()), precision)
    y, dx = gradients(layer, x)
    theirs, their_dx = gradients(frozen, x)
    assert torch.equal(y, theirs) and torch.equal(dx, their_dx)
    sampling = SampledLinear(layer, precision)
    sampling.load(layer.codes())
    sampling.bias.data.copy_(layer.bias)
    assert torch.equal(sampling(x), y)


@every_precision
def test_the_input_alone_is_saved(precision):
    """Neither Q(W) in 16 bits nor a copy of W; and without a gradient of W nothing."""
    layer, x = layer_of(precision, dtype=torch.bfloat16), inputs(256, dtype=torch.bfloat16).requires_grad_()
    codes = layer.codes()
    held = (layer.weight, codes.values, codes.scale)
    assert saved_bytes(lambda: layer(x), *held, x) == 0
    assert saved_bytes(lambda: layer(x * 1), *held) == 2 * x.numel()
    layer.weight.requires_grad_(False)
    assert saved_bytes(lambda: layer(x * 1), *held) == 0


@every_precision
def test_small_updates_add_up_in_the_master_weight(precision):
    """One step of the optimizer moves no code; a hundred of them do, as the same step a hundred times as large."""
    layer, target = layer_of(precision, bias=False), layer_of(precision, bias=False)
    step = 1e-4 * layer.weight.detach().abs().amax() * torch.ones_like(layer.weight)
    start = layer.codes()
    with torch.no_grad():
        layer.weight.add_(step)
        changed = (layer.codes().values != start.values).float().mean()
        for _ in range(99):
            layer.weight.add_(step)
        target.weight.copy_(target.weight + 100 * step)
    assert changed < 0.02
    assert (layer.codes().values != start.values).float().mean() > 0.03
    assert (layer.codes().values != target.codes().values).float().mean() < 1e-3


@every_precision
def test_the_weight_is_quantized_once_a_step(precision, monkeypatch):
    made = []
    monkeypatch.setattr(unified, "quantize", lambda *args: made.append(1) or quantize(*args))
    layer, x = layer_of(precision), inputs().requires_grad_()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for step in range(1, 4):
        expected = F.linear(x, quantize(layer.weight, layer.format).dequantize(), layer.bias)
        for _ in range(2):
            y = checkpoint(layer, x, use_reentrant=False)
            close([y], [expected], 1e-6)
            y.square().mean().backward()
        assert len(made) == step
        optimizer.step()


@every_precision
def test_autocast_and_rounding(precision):
    """A policy in FP32 computes in autocast's type. `rounds_to` quantizes the weight as a 16-bit checkpoint has it."""
    layer, x = layer_of(precision), inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, dx, dw = gradients(layer, x, layer.weight)
    assert (y.dtype, dx.dtype, dw.dtype) == (torch.bfloat16, torch.float32, torch.float32)
    numbers = slow_numbers(layer.weight, precision).bfloat16()
    close([y.double()], [F.linear(x.bfloat16().double(), numbers.double(), layer.bias.double())], 2**-7)
    layer.rounds_to = torch.bfloat16
    layer.forget()
    assert same_codes(layer.codes(), quantize(layer.weight.bfloat16(), layer.format))
    assert layer.codes().dtype == torch.bfloat16


def test_bad_input():
    assert not {*qat_precisions()} & {*unified_flows()}
    allowed = ", ".join([*unified_flows(), *qat_precisions()])
    with pytest.raises(ValueError, match=rf"precision: 'nf4' cannot be a UnifiedLinear's; allowed: {allowed}\."):
        UnifiedLinear.from_linear(linear(), "nf4")
    with pytest.raises(ValueError, match="the layer has 384 inputs"):
        layer_of("mxfp4")(torch.randn(3, 7))


@every_precision
def test_compiled(tracing, precision):
    """The rest is compiled; the weights of each step are those of the step."""
    layer, x = layer_of(precision), inputs()
    model = nn.Sequential(nn.ReLU(), layer, nn.Tanh())
    compiled = torch.compile(model, backend="eager")
    for _ in range(2):
        for ours, theirs in zip(gradients(compiled, x, layer.weight), gradients(model, x, layer.weight), strict=True):
            assert torch.equal(ours, theirs)
        before = compiled(x)
        with torch.no_grad():
            layer.weight.mul_(1.5).add_(0.01)
        assert not torch.equal(compiled(x), before)


# Layers that share a global scale


def test_fused_layers_are_quantized_as_one_matrix():
    """Codes, scales and numbers are those of the layers in one matrix, by loops; alone a layer would have others."""
    layers = fused()
    _, _, values, g = slow_quantize(torch.cat([layer.weight.detach() for layer in layers]), "nvfp4")
    values = torch.tensor(values, dtype=torch.float32).split([48, 16, 32])
    for layer, numbers in zip(layers, values, strict=True):
        assert layer.codes().global_scale.item() == g
        assert torch.equal(layer.codes().dequantize(), numbers)
    alone = quantize(layers[0].weight, "nvfp4")
    assert alone.global_scale.item() != g and not torch.equal(alone.dequantize(), values[0])


@pytest.mark.parametrize("counted", [True, False], ids=["counted by torch", "past torch"])
def test_a_layer_follows_the_largest_value_of_another(counted):
    layers, x = fused(), torch.randn(5, 64)
    before = layers[0](x)
    with torch.no_grad():
        (layers[2].weight if counted else layers[2].weight.data)[3, 5] = 40.0
    if not counted:
        assert torch.equal(layers[0](x), before)
        layers[2].forget()
    whole = dict(checkpoint_stream([(f"{n}_proj.weight", x.weight) for n, x in zip("qkv", layers)], "nvfp4"))
    for name, layer in zip("qkv", layers, strict=True):
        stored = checkpoint_tensors(f"{name}_proj.weight", layer.codes())
        assert all(torch.equal(whole[key], tensor) for key, tensor in stored.items())
    assert not torch.equal(layers[0](x), before)


def test_copies_share_their_own_scale():
    layers = nn.ModuleList(fused())
    other = copy.deepcopy(layers)
    assert all({*layer.fused} < {*other} and len(layer.fused) == 2 for layer in other)
    with torch.no_grad():
        other[2].weight.mul_(8)
    assert same_codes(other[2].codes(), quantize(other[2].weight, "nvfp4"))
    assert other[0].codes().global_scale < layers[0].codes().global_scale


# In a model


@pytest.mark.parametrize("family", FAMILIES)
@every_precision
def test_a_model_has_the_codes_of_its_checkpoint(family, precision):
    model = tiny_model(family, tied=False, seed=3)
    expected = dict(
        checkpoint_stream([(n, p.clone()) for n, p in model.named_parameters()], PRECISIONS[precision].format)
    )
    unify(model, precision)
    layers = {place: model.get_submodule(place) for place in linears(model)}
    assert layers and all(type(layer) is UnifiedLinear for layer in layers.values())
    assert len(unified_layers(model)) == len(layers)
    for place, layer in layers.items():
        for name, tensor in checkpoint_tensors(f"{place}.weight", layer.codes()).items():
            assert torch.equal(expected[name], tensor), name
    shares = FORMATS[PRECISIONS[precision].format].shares_scale
    assert any(layer.fused for layer in layers.values()) == (shares and family != "phi3")  # whose layers are one matrix


def test_an_adapter_is_refused():
    model = get_peft_model(Decoder(linear()), LoraConfig(target_modules=["0"]))
    with pytest.raises(ValueError, match="`train_precision`='int4' trains all weights, and `0` has an adapter"):
        unify(model, "int4")


def test_only_one_gradient_is_computed_where_one_is_wanted(monkeypatch):
    layer, x = layer_of("nvfp4"), inputs()
    product, calls = weight_only.weight_only_product, []
    monkeypatch.setattr(weight_only, "weight_only_product", lambda *args: calls.append(args[-1]) or product(*args))
    layer(x).sum().backward()
    assert calls == [True]  # dX, which nobody asks for, is not
    assert layer.weight.grad is not None and isinstance(layer, UnifiedLinear)
