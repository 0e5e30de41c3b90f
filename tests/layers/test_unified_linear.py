"""A layer trained in the numbers that sample from it: the engine's forward, and gradients that go straight through."""

import copy

import pytest
import torch
import torch.nn.functional as F
from frozen_layers import DTYPES, Decoder, close, gradients, inputs, linear, saved_bytes
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.checkpoint import checkpoint

from trl_quant.formats import FORMATS, quantize
from trl_quant.layers import SampledLinear, UnifiedLinear, unified
from trl_quant.layers.products import product
from trl_quant.layers.quantizers import quantize_for_both, quantize_gradient, quantize_input
from trl_quant.policy.adapters import UnifiedLoraLinear
from trl_quant.policy.unified import unify
from trl_quant.precisions import unified_flows


every_precision = pytest.mark.parametrize("precision", unified_flows())


def layer_of(precision: str, **kwargs) -> UnifiedLinear:
    return UnifiedLinear.from_linear(linear(**kwargs), precision)


def engine(layer: UnifiedLinear, x: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
    """What an engine computes that gets the weight as it is."""
    w = quantize(layer.weight if weight is None else weight, layer.format)
    bias = None if layer.bias is None else layer.bias.to(x.dtype)
    y = product(quantize_input(x.flatten(0, 1), layer.format), w, bias, x.dtype)
    return y.view(*x.shape[:2], -1)


def input_gradient(dy: torch.Tensor, w) -> torch.Tensor:
    """dX of the numbers in FP64: dY is quantized in groups, or with the weight's scales folded in, or not at all."""
    numbers = w.dequantize(torch.float64)
    if w.format == "fp8_block":
        return quantize_for_both(dy.float())[0].dequantize(torch.float64) @ numbers
    if w.format == "fp8":
        return quantize_gradient(dy.float(), w.scale).dequantize(torch.float64) @ w.values.double()
    return dy @ numbers


def adapted(precision: str, merged: bool = True, dtype: torch.dtype = torch.float32, **settings):
    torch.manual_seed(1)
    settings = {"r": 8, "lora_alpha": 12, "target_modules": ["0"], "init_lora_weights": False} | settings
    model = get_peft_model(Decoder(linear(dtype=dtype)), LoraConfig(**settings))
    unify(model, precision, merged)
    return model.base_model.model[0]


# The layer


@every_precision
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
def test_forward_is_the_engines(precision, dtype, bias):
    layer, x = layer_of(precision, dtype=dtype, bias=bias), inputs(dtype=dtype)
    y = layer(x)
    assert torch.equal(y, engine(layer, x))
    plain = F.linear(x, layer.weight, layer.bias)
    noise = ((y - plain).double().norm() / plain.double().norm()).item()
    assert 1e-3 < noise < 10 ** (-25 / 20)  # quantized, and at least 25 dB above its noise


@every_precision
@pytest.mark.parametrize(
    ("dtype", "rounds_to"), [*((dtype, None) for dtype in DTYPES), (torch.float32, torch.bfloat16)]
)
def test_gradients_go_straight_through(precision, dtype, rounds_to):
    """dX = dY Q(W) and dW = dY^T Q(X), against products of the numbers in FP64; not those of the weight itself."""
    layer, x = layer_of(precision, dtype=dtype), inputs(dtype=dtype)
    layer.rounds_to = rounds_to
    y, dx, dw, db = gradients(layer, x, layer.weight, layer.bias)
    flat = x.flatten(0, 1)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).bfloat16().flatten(0, 1).double()
    q = quantize_input(flat, layer.format).dequantize(torch.float64)
    if FORMATS[layer.format].grouped:  # dY and X are quantized along the tokens
        columns, of_tokens = (quantize_for_both(x.float())[1].dequantize(torch.float64) for x in (dy, flat))
        dw_expected, shortcut = columns @ of_tokens.t(), dy.t() @ q
    else:
        dw_expected, shortcut = dy.t() @ q, dy.t() @ flat.double()
    expected = input_gradient(dy, layer.codes()), dw_expected
    tolerance = 1e-5 if dtype == torch.float32 else 2**-8
    close([dx.flatten(0, 1).double(), dw.double(), db.double()], [*expected, dy.sum(0)], tolerance)
    assert (dw.double() - shortcut).norm() > 4 * (dw.double() - expected[1]).norm()
    assert dx.dtype == dw.dtype == dtype
    plain = gradients(lambda x: F.linear(x, layer.weight, layer.bias), x, layer.weight)
    for ours, theirs in zip((dx, dw), plain[1:], strict=True):
        assert (ours - theirs).double().norm() < 10 ** (-22 / 20) * theirs.double().norm()


@every_precision
def test_a_byte_is_saved_for_each_input(precision):
    layer, x = layer_of(precision, dtype=torch.bfloat16), inputs(256, dtype=torch.bfloat16).requires_grad_()
    codes = layer.codes()
    held = (x, layer.weight, codes.values, codes.scale)
    saved = saved_bytes(lambda: layer(x), *held)
    plain = saved_bytes(lambda: F.linear(x * 1, layer.weight), layer.weight)
    assert x.numel() <= saved < 1.05 * x.numel()
    assert plain == 2 * x.numel()
    layer.weight.requires_grad_(False)
    assert saved_bytes(lambda: layer(x), *held) == 0


def test_the_weight_is_quantized_once_a_step(monkeypatch):
    made = []
    monkeypatch.setattr(unified, "quantize", lambda *args: made.append(1) or quantize(*args))
    layer, x = layer_of("int8"), inputs().requires_grad_()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for step in range(1, 4):
        for _ in range(2):
            y = checkpoint(layer, x, use_reentrant=False)
            assert torch.equal(y, engine(layer, x))
            y.square().mean().backward()
        assert len(made) == step
        optimizer.step()


def test_what_writes_past_torch_must_say_so():
    layer, x = layer_of("int8"), inputs()
    before = layer(x)
    layer.weight.data.mul_(2)
    assert torch.equal(layer(x), before)
    layer.forget()
    assert torch.equal(layer(x), engine(layer, x)) and not torch.equal(layer(x), before)
    half = layer.to(torch.bfloat16)
    assert half.codes().dtype == torch.bfloat16


def test_it_is_saved_as_a_linear_layer():
    plain = linear()
    layer = UnifiedLinear.from_linear(plain, "fp8")
    assert layer.weight is plain.weight and layer.bias is plain.bias
    assert layer.state_dict().keys() == plain.state_dict().keys()
    other = copy.deepcopy(layer)
    layer(inputs())
    other.load_state_dict({name: 2 * tensor for name, tensor in plain.state_dict().items()})
    assert torch.equal(other(inputs()), engine(other, inputs()))


@every_precision
def test_autocast_and_rounding(precision):
    """A policy in FP32 computes in autocast's type; its scales are those of the type that an engine starts from."""
    layer, x = layer_of(precision), inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, engine(layer, x.bfloat16()))
    layer.rounds_to = torch.bfloat16
    layer.forget()
    assert torch.equal(layer(x), engine(layer, x, layer.weight.bfloat16()))
    assert not torch.equal(layer.codes().scale.float(), quantize(layer.weight, layer.format).scale)


def test_bad_input():
    with pytest.raises(
        ValueError, match="precision: 'fp8_tensor' cannot be a UnifiedLinear's; allowed: int8, fp8_block"
    ):
        UnifiedLinear.from_linear(linear(), "fp8_tensor")
    with pytest.raises(ValueError, match="the layer has 384 inputs"):
        layer_of("fp8")(torch.randn(3, 7))
    with pytest.raises(ValueError, match=r"precision: 'nf4' cannot be a SampledLinear's; allowed: .*fp8_tensor"):
        SampledLinear(linear(), "nf4")


@every_precision
def test_no_tokens(precision):
    for layer in (layer_of(precision), adapted(precision), adapted(precision, merged=False)):
        y, dx, *of_parameters = gradients(
            layer, torch.randn(2, 0, 384), *(p for p in layer.parameters() if p.requires_grad)
        )
        assert y.shape == (2, 0, 72) and dx.shape == (2, 0, 384)
        assert of_parameters and not any(gradient.any() for gradient in of_parameters)
    sampled = SampledLinear(linear(), precision)
    sampled.load(linear().weight)
    assert sampled(torch.randn(2, 0, 384)).shape == (2, 0, 72)


@pytest.mark.parametrize("lora", [False, True])
def test_compiled(tracing, lora):
    """The rest is compiled; the weights of each step are those of the step."""
    layer = adapted("fp8") if lora else layer_of("fp8")
    model, x = nn.Sequential(nn.ReLU(), layer, nn.Tanh()), inputs()
    compiled = torch.compile(model, backend="eager")
    moves = layer.lora_B["default"].weight if lora else layer.weight
    for _ in range(2):
        for ours, theirs in zip(gradients(compiled, x, moves), gradients(model, x, moves), strict=True):
            assert torch.equal(ours, theirs)
        before = compiled(x)
        with torch.no_grad():
            moves.mul_(1.5)
        assert not torch.equal(compiled(x), before)


# With an adapter


@every_precision
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_merged_adapter_is_quantized_with_the_weight(precision, dtype):
    layer, x = adapted(precision, dtype=dtype), inputs(dtype=dtype)
    base = layer.base_layer
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    merged = (base.weight + layer.get_delta_weight("default")).to(dtype)
    y, dx, da, db = gradients(layer, x, a, b)
    assert torch.equal(y, engine(base, x, merged))
    beside = adapted(precision, merged=False, dtype=dtype)
    assert type(layer) is type(beside) is UnifiedLoraLinear
    assert not torch.equal(beside(x), y)

    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).bfloat16().flatten(0, 1).double()
    q = quantize_input(x.flatten(0, 1), base.format).dequantize(torch.float64)
    s, whole = layer.scaling["default"], dy.t() @ q  # the gradient of the merged weight
    expected = s * b.double().t() @ whole, s * whole @ a.double().t()
    close([da.double(), db.double()], expected, 1e-5 if dtype == torch.float32 else 2**-6)
    right = input_gradient(dy, quantize(merged, base.format))
    close([dx.flatten(0, 1).double()], [right], 1e-5 if dtype == torch.float32 else 2**-8)


@every_precision
def test_a_merged_adapter_saves_a_byte_for_each_input(precision):
    layer, x = adapted(precision, dtype=torch.bfloat16), inputs(256, dtype=torch.bfloat16)
    held = (x, *layer.parameters(), layer.codes().values, layer.codes().scale)
    assert x.numel() <= saved_bytes(lambda: layer(x.requires_grad_()), *held) < 1.05 * x.numel()


def test_an_adapter_that_moves_is_merged_again():
    layer, x = adapted("fp8"), inputs()
    before = layer(x)
    with torch.no_grad():
        layer.lora_B["default"].weight.mul_(3)
    after = layer(x)
    assert not torch.equal(before, after)
    layer.enable_adapters(False)
    assert torch.equal(layer(x), engine(layer.base_layer, x))
    layer.enable_adapters(True)
    assert torch.equal(layer(x), after)


@pytest.mark.parametrize("settings", [{"lora_dropout": 0.1}, {"use_dora": True}, {"lora_bias": True}])
def test_adapters_that_cannot_be_merged_each_step(settings):
    with pytest.raises(ValueError, match="adapter of `0` is more than a product of B and A"):
        adapted("fp8", **settings)
    if "use_dora" not in settings:
        adapted("fp8", merged=False, **settings)


def test_a_weight_that_would_get_no_gradient_beside_its_adapter():
    for merged in (True, False):
        model = get_peft_model(Decoder(linear()), LoraConfig(target_modules=["0"], init_lora_weights=False))
        weight = model.base_model.model[0].base_layer.weight.requires_grad_()
        if merged:
            with pytest.raises(ValueError, match="weight of `0` is not frozen"):
                unify(model, "fp8", merged)
        else:
            unify(model, "fp8", merged)
            model(inputs()).sum().backward()
            assert weight.grad.any()


def by_data(weight: nn.Parameter, new: torch.Tensor) -> None:
    weight.data = new


def by_swap(weight: nn.Parameter, new: torch.Tensor) -> None:
    torch.utils.swap_tensors(weight, nn.Parameter(new))


@pytest.mark.parametrize("replaced", [by_data, by_swap])
def test_other_memory_under_the_same_parameter(replaced):
    """PyTorch's version counter does not show it. PEFT's `hotswap_adapter` swaps tensors."""
    layer, x = adapted("fp8"), inputs()
    base, b = layer.base_layer, layer.lora_B["default"].weight
    for weight in (b, base.weight):
        before = layer(x).detach()  # a graph would hold the adapter, which torch then does not swap
        replaced(weight, weight.detach() * -0.5)
        expected = engine(base, x, (base.weight + layer.get_delta_weight("default")).detach())
        assert torch.equal(layer(x), expected) and not torch.equal(expected, before)


def test_merging_for_good_and_several_adapters():
    """PEFT merges past torch's count; of two active adapters none is left out in silence."""
    for merged in (True, False):
        layer, x = adapted("fp8", merged), inputs()
        whole = layer.base_layer.weight + layer.get_delta_weight("default")
        beside = layer(x)
        layer.merge()
        assert torch.equal(layer(x), engine(layer.base_layer, x, whole))
        layer.unmerge()
        assert (layer(x) - beside).norm() < 1e-2 * beside.norm()
        layer.update_layer("b", r=4, lora_alpha=8, lora_dropout=0.0, init_lora_weights=False, config=LoraConfig())
        layer.set_adapter(["default", "b"])
        if merged:
            with pytest.raises(ValueError, match="quantizes a weight with one adapter"):
                layer(x)
        else:
            layer(x)


def test_without_gradients_nothing_is_quantized_for_them(monkeypatch):
    layer, x = layer_of("fp8_block"), inputs()
    y = layer(x)
    monkeypatch.setattr("trl_quant.layers.inputs.quantize_for_both", None)
    with torch.no_grad():
        assert torch.equal(layer(x.clone()), y)
    with pytest.raises(TypeError):
        layer(x.clone())
