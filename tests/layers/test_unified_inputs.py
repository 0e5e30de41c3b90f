"""Layers that share an input: it is quantized once and saved once, and nothing else changes."""

import weakref

import pytest
import torch
from frozen_layers import linear, saved_bytes
from torch import nn
from torch.utils.checkpoint import checkpoint

from trl_quant.formats import quantize
from trl_quant.layers import UnifiedLinear, inputs
from trl_quant.layers.products import product
from trl_quant.layers.quantizers import quantize_for_both, quantize_input
from trl_quant.precisions import unified_flows


every_precision = pytest.mark.parametrize("precision", unified_flows())


@pytest.fixture
def made(monkeypatch):
    """What is quantized, in order."""
    calls = []
    for function in (quantize_input, quantize_for_both):
        counted = lambda *args, of=function: calls.append(of.__name__) or of(*args)  # noqa: E731
        monkeypatch.setattr(inputs, function.__name__, counted)
    return calls


def three(precision: str, dtype: torch.dtype = torch.bfloat16) -> list[UnifiedLinear]:
    layers = [linear(dtype=dtype, outputs=outputs) for outputs in (128, 48, 72)]
    return [UnifiedLinear.from_linear(layer, precision) for layer in layers]


def tokens(dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(2, 128, 384, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()


def engine(layer: UnifiedLinear, x: torch.Tensor) -> torch.Tensor:
    w = quantize(layer.weight, layer.format)
    bias = layer.bias.to(x.dtype)
    return product(quantize_input(x.flatten(0, 1), layer.format), w, bias, x.dtype).view(*x.shape[:2], -1)


def gradients(layers, x, *args) -> list[torch.Tensor]:
    """Of a sum over layers, each of which gets what `args` make of x."""
    outputs = [layer(*(make(x) for make in args or (lambda x: x,))) for layer in layers]
    loss = sum((y.float() * torch.linspace(-1, 1, y.shape[-1])).sum() for y in outputs)
    return [*outputs, *torch.autograd.grad(loss, [x, *(layer.weight for layer in layers)])]


@every_precision
def test_a_shared_input_is_quantized_and_saved_once(precision, made):
    layers, x = three(precision), tokens()
    shared = gradients(layers, x)
    assert len(made) == 1
    apart = gradients(layers, x, lambda x: x.clone())
    assert len(made) == 4
    assert all(torch.equal(*pair) for pair in zip(shared, apart, strict=True))
    held = [x, *(t for layer in layers for t in (layer.weight, layer.codes().values, layer.codes().scale))]
    assert x.numel() <= saved_bytes(lambda: [layer(x) for layer in layers], *held) < 1.05 * x.numel()
    copies = [x.detach().clone().requires_grad_() for _ in layers]
    together = saved_bytes(lambda: [layer(each) for layer, each in zip(layers, copies, strict=True)], *held, *copies)
    assert together >= 3 * x.numel()


@every_precision
def test_nothing_is_kept_beyond_the_input(precision):
    def codes_of(x: torch.Tensor) -> weakref.ref:
        return weakref.ref(inputs.quantized(x, x.dtype, precision, both=False)[0].values)

    x, other = tokens().detach(), tokens().detach()
    first = codes_of(x)
    assert first() is inputs.quantized(x, x.dtype, precision, both=False)[0].values
    second = codes_of(other)
    assert first() is None and second() is not None
    del other
    assert second() is None


@every_precision
def test_an_input_that_was_written_to_is_another(precision):
    layers, x = three(precision), tokens().detach()
    before = layers[0](x)
    x[0] *= -3
    after = layers[0](x)
    assert torch.equal(after, engine(layers[0], x)) and not torch.equal(after[0], before[0])
    view = x[:]
    view.add_(1)  # counted with its base
    assert torch.equal(layers[1](x), engine(layers[1], x))
    with torch.inference_mode():
        x = tokens().detach().clone()
        layers[0](x)
        x.mul_(2)  # not counted at all
        assert torch.equal(layers[0](x), engine(layers[0], x))


def test_it_is_known_by_what_was_made_of_it(made):
    """Another format, another type, or more than was needed before."""
    x = tokens(torch.float32).detach()
    block, int8 = three("fp8_block", torch.float32)[0], three("int8", torch.float32)[0]
    for layer in (block, int8, block):
        with torch.no_grad():
            assert torch.equal(layer(x), engine(layer, x))
    assert made == ["quantize_input"] * 3
    block(x)
    assert made[3:] == ["quantize_for_both"]
    with torch.no_grad():
        assert torch.equal(block(x), engine(block, x))  # one of both
    assert len(made) == 4
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(block(x), engine(block, x.bfloat16()))
    assert len(made) == 5


@every_precision
@pytest.mark.parametrize("reentrant", [False, True])
def test_under_checkpointing_and_autocast(precision, reentrant, made):
    """FP32 inputs are rounded once for all layers; what is computed again is quantized again."""
    layers, x = three(precision, torch.float32), tokens(torch.float32)

    class Block(nn.Module):
        def forward(self, x):
            x = nn.functional.silu(x)
            return torch.cat([layer(x) for layer in layers], -1)

    def run(function) -> list[torch.Tensor]:
        for layer in layers:
            layer.zero_grad()
        x.grad = None
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = function(x)
        assert y.dtype == torch.bfloat16
        (y.float() * torch.linspace(-1, 1, y.shape[-1])).sum().backward()
        assert x.grad.dtype == layers[0].weight.grad.dtype == torch.float32
        return [y, x.grad.clone(), *(layer.weight.grad.clone() for layer in layers)]

    block = Block()
    plain = run(block)
    assert len(made) == 1
    again = run(lambda x: checkpoint(block, x, use_reentrant=reentrant))
    assert len(made) == 3
    assert all(torch.equal(*pair) for pair in zip(plain, again, strict=True))
