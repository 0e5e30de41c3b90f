"""Layers that share an input and compute as one product: each the same as alone, with the gradients of one matrix."""

import copy
import gc
import weakref

import pytest
import torch
from frozen_layers import close
from peft import LoraConfig, get_peft_model
from tiny import tiny_model
from torch import nn

from trl_quant.layers import UnifiedLinear, eager, unified
from trl_quant.layers.eager import side_by_side
from trl_quant.layers.joint import Joint
from trl_quant.layers.quantizers import quantize_for_both, quantize_gradient, quantize_input
from trl_quant.policy.unified import unify
from trl_quant.precisions import unified_flows


every_precision = pytest.mark.parametrize("precision", unified_flows())
SIZES = (256, 128, 72)


def layers_of(precision: str, joined: bool = True, dtype: torch.dtype = torch.float32) -> list[UnifiedLinear]:
    """Layers of one input, the second without a bias and the third with far smaller weights."""
    torch.manual_seed(0)
    layers = [nn.Linear(384, size, bias=i != 1) for i, size in enumerate(SIZES)]
    with torch.no_grad():
        layers[2].weight.mul_(1e-2)
    layers = [UnifiedLinear.from_linear(layer.to(dtype), precision) for layer in layers]
    if joined:
        group = Joint(layers)
        for layer in layers:
            layer.joint = group
    return layers


def inputs(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    x = torch.randn(2, 20, 384, generator=torch.Generator().manual_seed(1))
    return (x * torch.logspace(-2, 2, 40).view(2, 20, 1)).to(dtype).requires_grad_()


def gradients_of(outputs: list[torch.Tensor], *parameters: torch.Tensor) -> tuple[list[torch.Tensor], tuple]:
    """dY of each output, BF16 numbers of different sizes, and the gradients of their products' sum."""
    generator = torch.Generator().manual_seed(2)
    dys = [10.0**-i * torch.randn(y.shape, generator=generator).bfloat16().to(y.dtype) for i, y in enumerate(outputs)]
    return dys, torch.autograd.grad(outputs, parameters, dys)


@every_precision
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_each_is_computed_as_alone(precision, dtype):
    x = inputs(dtype)
    together, alone = ([layer(x) for layer in layers_of(precision, joined, dtype)] for joined in (True, False))
    for ours, theirs in zip(together, alone, strict=True):
        assert ours.shape == theirs.shape and ours.dtype == dtype
        if precision == "fp8_block":  # on a CPU its sums, in FP32, depend on a matrix's shape
            torch.testing.assert_close(ours, theirs, rtol=1e-5 if dtype == torch.float32 else 2**-7, atol=1e-5)
        else:
            assert torch.equal(ours, theirs)


@every_precision
def test_gradients_are_of_one_matrix(precision):
    """Against products of the numbers in FP64. In FP8, dY has joint scales and not those of each layer."""
    layers, x = layers_of(precision), inputs()
    weights, biases = [layer.weight for layer in layers], [layers[0].bias, layers[2].bias]
    dys, (dx, *others) = gradients_of([layer(x) for layer in layers], x, *weights, *biases)
    flat, dys = x.detach().flatten(0, 1), [dy.flatten(0, 1) for dy in dys]
    dy, codes = torch.cat(dys, 1), [layer.codes() for layer in layers]
    numbers = torch.cat([q.dequantize(torch.float64) for q in codes])
    apart = None
    if precision == "int8":
        right = dy.double() @ numbers
    elif precision == "fp8":
        scales, values = torch.cat([q.scale for q in codes]), torch.cat([q.values.double() for q in codes])
        right = quantize_gradient(dy, scales).dequantize(torch.float64) @ values
        parts = zip(dys, codes, strict=True)
        apart = sum(quantize_gradient(d, q.scale).dequantize(torch.float64) @ q.values.double() for d, q in parts)
    else:
        right = quantize_for_both(dy)[0].dequantize(torch.float64) @ numbers
    dx = dx.flatten(0, 1).double()
    close([dx], [right], 1e-5)
    if apart is not None:
        assert (dx - apart).norm() > 1e-3 * apart.norm() > 0
    if precision == "fp8_block":
        columns, tokens = (quantize_for_both(t)[1].dequantize(torch.float64) for t in (dy, flat))
        dw = columns @ tokens.t()
    else:
        dw = dy.double().t() @ quantize_input(flat, precision).dequantize(torch.float64)
    expected = [*dw.split(SIZES), dys[0].double().sum(0), dys[2].double().sum(0)]
    close([d.double() for d in others], expected, 1e-5)


@every_precision
def test_adapters_of_some(precision):
    """q and v have one and k does not, as in `target_modules=["q_proj", "v_proj"]`."""

    def build(joined: bool):
        model = tiny_model(seed=3)
        config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        torch.manual_seed(5)
        model = get_peft_model(model, config)
        unify(model, precision, merged=True)
        attention = model.get_base_model().model.layers[0].self_attn
        if not joined:
            for name in ("q_proj", "k_proj", "v_proj"):
                layer = getattr(attention, name)
                getattr(layer, "base_layer", layer).joint = None
        return attention

    ours, theirs = build(True), build(False)
    x = torch.randn(2, 12, ours.q_proj.in_features, generator=torch.Generator().manual_seed(1)).requires_grad_()
    found = []
    for attention in (ours, theirs):
        layers = (attention.q_proj, attention.k_proj, attention.v_proj)
        trained = [p for layer in layers for name, p in layer.named_parameters() if "lora_" in name]
        assert len(trained) == 4
        outputs = [layer(x) for layer in layers]
        found.append([*outputs, *gradients_of(outputs, *trained, x)[1]])
    *exact, dx = found[0]
    for one, other in zip(exact, found[1], strict=False):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    difference = (dx - found[1][-1]).norm() / dx.norm()
    assert difference < (1e-5 if precision == "int8" else 0.05)


def test_one_product_for_q_k_v_and_one_for_gate_and_up(monkeypatch):
    made = []
    product = eager.product
    monkeypatch.setattr(eager, "product", lambda x, w, *others: made.append(tuple(w.shape)) or product(x, w, *others))
    for config in (None, LoraConfig(r=4, target_modules="all-linear")):
        model = tiny_model(seed=3)
        sizes = model.config
        heads = sizes.num_attention_heads + 2 * sizes.num_key_value_heads
        width = sizes.hidden_size // sizes.num_attention_heads * heads
        model = model if config is None else get_peft_model(model, config)
        unify(model, "fp8", merged=True)
        made.clear()
        model(torch.arange(8)[None])
        hidden, inner = sizes.hidden_size, sizes.intermediate_size
        per_layer = [(width, hidden), (hidden, hidden), (2 * inner, hidden), (hidden, inner)]
        assert made == per_layer * sizes.num_hidden_layers


def test_new_codes_are_seen_wherever_they_lie():
    """Even where they get the address of the old ones, as in 3 of 60 tries."""
    x = inputs()
    for _ in range(100):
        layers = layers_of("fp8")
        layers[0](x)
        waiting = layers[0].joint.waiting.outputs[layers[1]][-1].clone()
        with torch.no_grad():
            layers[1].weight.mul_(2)
        torch.testing.assert_close(layers[1](x), 2 * waiting)


def test_what_changes_in_between_is_seen():
    layers, x = layers_of("fp8"), inputs()
    for change in ("weight", "input", "type", "gradients"):
        first = layers[0](x)
        before = layers_of("fp8", joined=False)[1](x)
        if change == "weight":
            with torch.no_grad():
                layers[1].weight.mul_(2)
            torch.testing.assert_close(layers[1](x), 2 * before)
            layers = layers_of("fp8")
        elif change == "input":
            with torch.no_grad():
                x.mul_(3)
            torch.testing.assert_close(layers[1](x), layers_of("fp8", joined=False)[1](x))
            assert not torch.equal(layers[1](x), before)
        elif change == "type":
            with torch.autocast("cpu", dtype=torch.bfloat16):
                assert layers[1](x).dtype == torch.bfloat16 != first.dtype
        else:
            with torch.no_grad():
                assert not layers[1](x).requires_grad
            assert first.requires_grad


@every_precision
def test_a_merged_adapter_that_changes_is_converted_again(precision):
    """The gradients are those of a copy, which has no codes and no converted adapters yet."""
    torch.manual_seed(5)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "o_proj"], init_lora_weights=False)
    model = get_peft_model(tiny_model(seed=3), config)
    unify(model, precision, merged=True)
    attention = model.get_base_model().model.layers[0].self_attn
    x = torch.randn(2, 12, attention.q_proj.in_features, generator=torch.Generator().manual_seed(1)).requires_grad_()

    def gradients(attention) -> list[torch.Tensor]:
        layers = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
        trained = [p for name, p in attention.named_parameters() if "lora_" in name]
        found = []
        for autocast in (False, True, False):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                outputs = [layer(x) for layer in layers]
            found += gradients_of(outputs, x, *trained)[1]
        assert len(found) == 3 * 7
        return found

    def same(some, others) -> list[bool]:
        return [torch.equal(one, other) for one, other in zip(some, others, strict=True)]

    before = gradients(attention)
    assert all(same(before, gradients(attention)))
    for change in ("A", "B", "a new A", "s", "unseen"):
        for layer in (attention.q_proj, attention.o_proj):
            a, b = layer.lora_A.default, layer.lora_B.default
            with torch.no_grad():
                if change == "A":
                    a.weight.mul_(3)
                elif change == "B":
                    b.weight.mul_(3)
                elif change == "a new A":
                    a.weight = nn.Parameter(-a.weight)
                elif change == "s":
                    layer.scaling["default"] *= 1.3
                else:
                    b.weight.data.mul_(3)
                    layer.base_layer.forget()
        after = gradients(attention)
        assert all(same(after, gradients(copy.deepcopy(attention))))
        assert not all(same(after, before))
        before = after


def test_a_hook_runs_around_its_own_layer():
    layers, x, seen = layers_of("int8"), inputs(), []
    right = [layer(x) for layer in layers]
    layers[1].register_forward_pre_hook(lambda module, args: seen.append("before k"))
    for i in (0, 1, 2):
        y = layers[i](x)
        assert torch.equal(y, right[i])
        assert seen == ["before k"] * (i > 0)
        if i == 0:
            assert layers[0].joint.waiting is None


def test_weights_that_move_unseen_are_quantized_once_a_call(monkeypatch):
    layers, x, made = layers_of("fp8"), inputs(), []
    quantize = unified.quantize
    monkeypatch.setattr(unified, "quantize", lambda *args: made.append(1) or quantize(*args))
    for layer in layers:
        layer.moves_unseen = True
    for _ in range(2):
        right = [layer(x) for layer in layers_of("fp8", joined=False)]
        made.clear()
        assert all(torch.equal(layer(x), y) for layer, y in zip(layers, right, strict=True))
        assert len(made) == len(layers)


def test_a_replaced_layer_takes_no_part():
    model = get_peft_model(tiny_model(seed=3), LoraConfig(r=4, target_modules="all-linear"))
    unify(model, "fp8", merged=True)
    attention = model.get_base_model().model.layers[0].self_attn
    x = torch.randn(3, attention.q_proj.in_features)
    right = attention.q_proj(x)
    attention.k_proj.base_layer = nn.Identity()
    assert torch.equal(attention.q_proj(x.clone()), right)


def test_codes_are_held_once_and_freed():
    layers, x = layers_of("fp8"), inputs()
    layers[0](x)
    storages = {layer.codes().values.untyped_storage().data_ptr() for layer in layers}
    assert len(storages) == 1
    fresh = layers_of("fp8", joined=False)
    for ours, theirs in zip(layers, fresh, strict=True):
        assert torch.equal(ours.codes().dequantize(), theirs.codes().dequantize())
    codes = weakref.ref(layers[0].codes().values.untyped_storage())
    for layer in layers:
        layer.forget()
    gc.collect()
    assert codes() is None
    hidden = x * 2
    layers[0](hidden)
    waits = weakref.ref(layers[0].joint.waiting.outputs[layers[1]][-1])
    assert waits() is not None
    del hidden  # what waits does not outlive the input
    assert layers[0].joint.waiting is None and waits() is None


def test_a_copy_computes_with_its_own_weights():
    layers, x = nn.ModuleList(layers_of("fp8")), inputs()
    y = layers[0](x)  # two outputs wait
    other = copy.deepcopy(layers)
    with torch.no_grad():
        other[1].weight.mul_(2)
    assert torch.equal(other[0](x), y)
    torch.testing.assert_close(other[1](x), 2 * layers[1](x))
    assert other[0].joint is other[1].joint is not layers[0].joint


def test_blocks_do_not_reach_over_two_layers():
    layers = layers_of("fp8_block", joined=False)
    assert Joint.can(layers) and not Joint.can(layers[::-1])
    assert Joint.can(layers_of("int8", joined=False)[::-1])


def test_a_small_output_keeps_no_memory_of_the_others():
    layers, x = layers_of("int8"), inputs()
    q, k, v = (layer(x).untyped_storage() for layer in layers)
    assert len({part.data_ptr() for part in (q, k, v)}) == 3
    assert (k.nbytes(), v.nbytes()) == (40 * 128 * 4, 40 * 72 * 4)
    assert q.nbytes() == 40 * sum(SIZES) * 4  # more than half of the matrix: a column of it


def test_an_output_that_nobody_uses():
    layers, x = layers_of("int8"), inputs()
    y = layers[0](x)
    (dx,) = torch.autograd.grad(y.sum(), x)
    expected = torch.ones(40, SIZES[0]) @ layers[0].codes().dequantize(torch.float32)
    torch.testing.assert_close(dx.flatten(0, 1), expected, rtol=1e-4, atol=1e-5)


def test_columns_of_one_matrix_are_not_copied():
    whole = torch.randn(5, 12)
    parts = list(whole.split([3, 4, 5], 1))
    assert side_by_side(parts).data_ptr() == whole.data_ptr()
    assert torch.equal(side_by_side(parts), whole)
    for others in (parts[::-1], parts[:2], [part.clone() for part in parts], [parts[0], parts[2], parts[1]]):
        ours = side_by_side(others)
        assert torch.equal(ours, torch.cat(others, 1)) and ours.data_ptr() != whole.data_ptr()
