"""An MLP whose activation is computed with the quantizer that follows: the same bits, and less to save."""

import copy

import pytest
import torch
from frozen_layers import gradients, saved_bytes
from tiny import tiny_model
from torch import nn

from trl_quant.layers import UnifiedLinear, gated, inputs
from trl_quant.layers.joint import Joint
from trl_quant.layers.quantizers import quantize_for_both, quantize_input
from trl_quant.policy.unified import unify
from trl_quant.precisions import unified_flows


every_precision = pytest.mark.parametrize("precision", unified_flows())


def mlp_of(precision: str, dtype: torch.dtype = torch.bfloat16):
    """transformers' MLP with unified layers, and the same after `unify`."""
    model = tiny_model(seed=3).to(dtype)
    mlp = model.model.layers[0].mlp
    plain = copy.deepcopy(mlp)
    for name, layer in list(plain.named_children()):
        if isinstance(layer, nn.Linear):
            setattr(plain, name, UnifiedLinear.from_linear(layer, precision))
    plain.gate_proj.joint = plain.up_proj.joint = Joint([plain.gate_proj, plain.up_proj])
    unify(model, precision)
    return mlp, plain


def tokens(mlp, dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(2, 24, mlp.hidden_size, generator=torch.Generator().manual_seed(1))
    return (3 * x).to(dtype)


@every_precision
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_same_bits_and_gradients(precision, dtype, monkeypatch):
    ours, theirs = mlp_of(precision, dtype)
    x, used = tokens(ours, dtype), []
    monkeypatch.setattr(
        "trl_quant.policy.unified.silu_mul", lambda *args: used.append(args[2:]) or gated.silu_mul(*args)
    )
    found = [gradients(mlp, x, *mlp.parameters()) for mlp in (ours, theirs)]
    assert used == [(precision, True)]
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    ours.requires_grad_(False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(ours(x), theirs(x))
    assert used[1:] == [(precision, False)]


def test_two_tensors_are_saved_for_three():
    ours, theirs = mlp_of("int8")
    x = tokens(ours, torch.bfloat16).requires_grad_()
    held = [
        t
        for mlp in (ours, theirs)
        for t in (
            *mlp.parameters(),
            *(
                t
                for layer in mlp.children()
                if isinstance(layer, UnifiedLinear)
                for t in (layer.codes().values, layer.codes().scale)
            ),
        )
    ]
    less = saved_bytes(lambda: theirs(x), x, *held) - saved_bytes(lambda: ours(x), x, *held)
    assert less == 2 * x.shape[:-1].numel() * ours.intermediate_size


@every_precision
def test_codes_that_are_handed_over_are_the_ones_used(precision, monkeypatch):
    """As the kernels do on a GPU: what they remember is what the next layer multiplies, and nothing is quantized."""
    ours, theirs = mlp_of(precision)
    x, forward = tokens(ours, torch.bfloat16), gated.silu_mul

    def with_codes(gate, up, precision, both):
        y = forward(gate, up, precision, both)
        flat, down = y.detach().flatten(0, 1), ours.down_proj
        rows = quantize_input(flat, down.format)
        columns = quantize_for_both(flat)[1] if precision == "fp8_block" else rows
        inputs.remember(y, y.dtype, rows, columns)
        made.clear()
        return y

    made = []
    monkeypatch.setattr("trl_quant.policy.unified.silu_mul", with_codes)
    for function in (quantize_input, quantize_for_both):
        counted = lambda *args, of=function: made.append(of) or of(*args)  # noqa: E731
        monkeypatch.setattr(inputs, function.__name__, counted)
    found = [gradients(mlp, x, *mlp.parameters()) for mlp in (theirs, ours)]
    assert not made
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_another_activation_or_forward_stays():
    for change in (lambda mlp: setattr(mlp, "act_fn", nn.GELU()), lambda mlp: setattr(mlp, "forward", mlp.forward)):
        model = tiny_model(seed=3)
        mlp = model.model.layers[0].mlp
        change(mlp)
        before = vars(mlp).get("forward")
        unify(model, "int8")
        assert vars(mlp).get("forward") is before
        assert "forward" in vars(model.model.layers[1].mlp)


def test_compiled_and_copied(tracing):
    """Compiled, gate and up are computed alone; a copy computes with its own weights."""
    model = tiny_model(seed=3)
    unify(model, "fp8")
    mlp = model.model.layers[0].mlp
    mlp.gate_proj.joint = mlp.up_proj.joint = None
    x = tokens(mlp, torch.float32)
    ours = gradients(torch.compile(nn.Sequential(mlp), backend="eager"), x, *mlp.parameters())
    assert all(torch.equal(*pair) for pair in zip(ours, gradients(mlp, x, *mlp.parameters()), strict=True))
    other = copy.deepcopy(mlp)
    with torch.no_grad():
        other.gate_proj.weight.mul_(2)
    assert torch.equal(mlp(x), ours[0]) and not torch.equal(other(x), ours[0])
