"""A base frozen in four bits: its products, and what it saves for backward."""

import copy
import io
import weakref

import pytest
import torch
import torch.nn.functional as F
from frozen_layers import (
    DTYPES,
    adapted,
    adapter,
    close,
    every_precision,
    frozen_linear,
    frozen_lora_linear,
    gradients,
    linear,
    same,
    saved_bytes,
)
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from trl_quant.formats import FORMATS, global_scale, quantize
from trl_quant.layers import FrozenLinear, weight_only
from trl_quant.storage.layout import checkpoint_tensors


# The layer


@every_precision
def test_numbers_are_those_of_the_format(precision):
    for dtype in DTYPES:
        plain = linear(dtype=dtype)
        layer = FrozenLinear.from_linear(plain, precision)
        q = quantize(plain.weight, layer.format)
        assert torch.equal(layer.dequantize(), q.dequantize())
        assert torch.equal(layer.dequantize(torch.float32), q.dequantize(torch.float32))
        assert not torch.equal(layer.dequantize(), plain.weight)


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.count += operator.overloadpacket is torch.ops.aten.mm
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize(("hidden", "wide"), [(3584, 18944), (5120, 13824)], ids=["7B", "14B"])
def test_the_largest_layers_are_multiplied_whole(hidden, wide):
    """Forward and backward, in 16 bits; in 32 bits they take more than the buffer, and two parts."""
    for dtype, parts in ((torch.bfloat16, 1), (torch.float32, 2)):
        for shape in ((hidden, wide), (wide, hidden)):
            layer = FrozenLinear(*shape, False, "nvfp4", dtype, device="meta")
            for forward in (True, False):
                x = torch.empty(2, shape[not forward], dtype=dtype, device="meta")
                with Products() as products:
                    weight_only.weight_only_product(x, None, *layer.stored(), forward)
                assert products.count == parts


@every_precision
def test_parameters_are_those_of_a_checkpoint(precision):
    layer, other = frozen_linear(precision), FrozenLinear(384, 72, True, precision, torch.float32)
    state = layer.state_dict()
    if FORMATS[layer.format].scheme is not None:
        stored = checkpoint_tensors("x.weight", quantize(linear().weight, layer.format))
        assert {f"x.{name}": (t.dtype, t.shape) for name, t in state.items() if name != "bias"} == {
            name: (t.dtype, t.shape) for name, t in stored.items()
        }
        assert all(torch.equal(state[name.removeprefix("x.")], tensor) for name, tensor in stored.items())
    assert {name for name, _ in layer.named_parameters()} == set(state)
    assert not any(parameter.requires_grad for parameter in layer.parameters()) and not list(layer.buffers())
    other.load_state_dict(state)
    assert torch.equal(other.dequantize(), layer.dequantize())
    x = torch.randn(3, 384)
    assert torch.equal(other(x), layer(x))
    meta = FrozenLinear(384, 72, False, precision, torch.bfloat16, device="meta")
    assert all(parameter.is_meta for parameter in meta.parameters()) and meta.bias is None


def test_global_scale_is_taken():
    plain, q = linear(), linear(outputs=16)
    shared = global_scale(plain.weight, 3 * q.weight)
    layer = FrozenLinear.from_linear(plain, "nvfp4", shared)
    assert torch.equal(layer.weight_global_scale, shared)
    assert torch.equal(layer.dequantize(), quantize(plain.weight, "nvfp4", shared).dequantize())
    assert not torch.equal(layer.dequantize(), FrozenLinear.from_linear(plain, "nvfp4").dequantize())


@every_precision
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_equal_those_of_the_numbers(precision, dtype):
    """Forward, dX and the bias's gradient, bit for bit, for inputs of any shape and gradients that are views."""
    layer = frozen_linear(precision, dtype=dtype)
    layer.bias.requires_grad_()
    weight, bias = layer.dequantize(), layer.bias
    for shape in [(384,), (7, 384), (2, 3, 384), (0, 384), (2, 0, 384)]:
        x = torch.randn(shape, dtype=dtype)
        same(gradients(layer, x, bias), gradients(lambda x: F.linear(x, weight, bias), x, bias))
    x = torch.randn(6, 5, 384, dtype=dtype)

    def view(product):
        return lambda x: product(x.transpose(0, 1)).transpose(1, 2)

    same(gradients(view(layer), x), gradients(view(lambda x: F.linear(x.contiguous(), weight, bias)), x))
    layer(x).add_(1)  # nor is the output a view, which nothing could write to
    assert not torch.equal(layer(x), linear(dtype=dtype)(x))


@every_precision
def test_parts_give_the_same(precision, monkeypatch):
    """A weight that is dequantized in several parts, and groups that are not full."""
    original, shapes = weight_only.QuantizedTensor.dequantize, []

    def dequantize(self, dtype=None):
        shapes.append(tuple(self.shape))
        return original(self, dtype)

    for inputs, outputs in [(384, 300), (300, 130)]:
        layer = frozen_linear(precision, inputs, outputs)
        x = torch.randn(9, inputs)
        expected = gradients(layer, x)
        shapes.clear()
        with monkeypatch.context() as patch:
            patch.setattr(weight_only.QuantizedTensor, "dequantize", dequantize)
            patch.setattr(weight_only, "BUFFER_BYTES", 1)
            close(gradients(layer, x), expected, 1e-6)
        whole = precision == "nf4" and inputs % 64 != 0  # whose blocks run across rows
        rows, cols = (
            [size] if whole else [128] * (size // 128) + [size % 128] * (size % 128 > 0) for size in (outputs, inputs)
        )
        assert shapes == [(size, inputs) for size in rows] + [(outputs, size) for size in cols]


def test_the_gradient_is_that_of_the_function():
    layer = frozen_linear("mxfp4", 64, 8)
    a, b = torch.randn(3, 64, dtype=torch.double), torch.randn(8, 3, dtype=torch.double)
    x = torch.randn(5, 64, dtype=torch.double)
    inputs = [tensor.requires_grad_() for tensor in (x, a, b)]
    assert torch.autograd.gradcheck(layer, x)
    assert torch.autograd.gradcheck(lambda x, a, b: frozen_lora_linear(x, layer, a, b, 1.7), inputs)


@every_precision
def test_nothing_is_saved_but_the_packed_weight(precision):
    layer = frozen_linear(precision, dtype=torch.bfloat16)
    x = torch.randn(4, 384, dtype=torch.bfloat16, requires_grad=True)
    assert saved_bytes(lambda: layer(x), *layer.parameters()) == 0
    shortcut = saved_bytes(lambda: F.linear(x, layer.dequantize(), layer.bias), *layer.parameters())
    assert shortcut == 72 * 384 * 2, "autograd keeps what a layer of dequantized numbers multiplies with"
    a, b = torch.randn(8, 384, requires_grad=True), torch.randn(72, 8, requires_grad=True)
    held = (*layer.parameters(), x, a, b)
    assert saved_bytes(lambda: frozen_lora_linear(x, layer, a, b, 2.0), *held) == 4 * 8 * 2, "H alone"


def test_the_numbers_are_freed(monkeypatch):
    layer, made = frozen_linear(), []
    original = weight_only.QuantizedTensor.dequantize

    def dequantize(self, dtype=None):
        numbers = original(self, dtype)
        made.append(weakref.ref(numbers))
        return numbers

    monkeypatch.setattr(weight_only.QuantizedTensor, "dequantize", dequantize)
    y = layer(torch.randn(4, 384, requires_grad=True))
    y.sum().backward()
    assert len(made) == 2 and not any(numbers() is not None for numbers in made)


def test_autocast_casts_inputs_as_torch_does():
    layer = frozen_linear(dtype=torch.float32)
    weight, bias, x = layer.dequantize(), layer.bias, torch.randn(5, 384)

    def cast(product):
        def run(x):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return product(x)

        return run

    ours, theirs = gradients(cast(layer), x), gradients(cast(lambda x: F.linear(x, weight, bias)), x)
    assert ours[0].dtype == torch.bfloat16
    same(ours, theirs)
    lora = adapted()
    y, inputs = lora(x := x.requires_grad_()), (x, *adapter(lora))
    expected = torch.autograd.grad(y.sum(), inputs, retain_graph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):  # a backward pass has the type of its forward pass
        same(torch.autograd.grad(y.sum(), inputs), expected)


def test_numbers_are_rounded_to_their_own_type_first():
    layer, x = frozen_linear(dtype=torch.bfloat16), torch.randn(5, 384)
    assert torch.equal(layer(x), F.linear(x, layer.dequantize().float(), layer.bias.float()))
    assert not torch.equal(layer(x), F.linear(x, layer.dequantize(torch.float32), layer.bias.float()))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing(reentrant):
    layer = frozen_linear()
    a, b = torch.randn(8, 384, requires_grad=True), torch.randn(72, 8, requires_grad=True)
    x = torch.randn(4, 384)

    def function(x):
        return frozen_lora_linear(x, layer, a, b, 2.0).relu()

    def recomputed(x):
        return checkpoint(function, x, use_reentrant=reentrant)

    def all_gradients(function):  # a reentrant checkpoint knows `backward` alone
        inputs = x.clone().requires_grad_()
        function(inputs).square().sum().backward()
        found = [inputs.grad, a.grad, b.grad]
        a.grad = b.grad = None
        return found

    same(all_gradients(recomputed), all_gradients(function))


@pytest.mark.usefixtures("tracing")
@pytest.mark.parametrize("autocast", [False, True])
def test_torch_compile_in_one_graph(autocast):
    layer = frozen_linear(dtype=torch.bfloat16)
    a, b = torch.randn(8, 384, requires_grad=True), torch.randn(72, 8, requires_grad=True)
    x = torch.randn(2, 4, 384, dtype=torch.bfloat16)

    def function(x):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            return frozen_lora_linear(layer(x)[..., :1] + x, layer, a, b, 2.0).sin()

    torch.compiler.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    same(gradients(compiled, x, a, b), gradients(function, x, a, b))
    same(gradients(torch.compile(layer, backend="aot_eager", fullgraph=True), x), gradients(layer, x))
    inputs = x.clone().requires_grad_()
    held = (*layer.parameters(), inputs)
    torch.compiler.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert saved_bytes(lambda: compiled(inputs), *held) == 0


@every_precision
def test_copies_and_files(precision):
    layer = frozen_linear(precision, dtype=torch.bfloat16)
    x = torch.randn(3, 384, dtype=torch.bfloat16)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for other in (copy.deepcopy(layer), torch.load(file, weights_only=False)):
        assert torch.equal(other(x), layer(x)) and other.weight_packed is not layer.weight_packed
        assert repr(other) == repr(layer) and f"precision={precision!r}" in repr(layer)


@every_precision
def test_another_type_leaves_the_weight_alone(precision):
    layer = frozen_linear(precision, dtype=torch.float32)
    numbers, x = layer.dequantize(), torch.randn(3, 384)
    layer.to(torch.bfloat16)
    assert layer.bias.dtype == torch.bfloat16 and torch.equal(layer.dequantize(), numbers)
    weight = numbers.to(torch.bfloat16)
    assert torch.equal(layer(x.bfloat16()), F.linear(x.bfloat16(), weight, layer.bias))
    assert layer.to("meta").weight_scale.is_meta


def test_there_is_no_weight():
    layer = frozen_linear()
    assert not hasattr(layer, "weight") and isinstance(layer, nn.Linear)
    with pytest.raises(AttributeError, match=r"no `weight`.*`dequantize\(\)`.*with_frozen_layers"):
        layer.weight.data += 1
    with pytest.raises(AttributeError, match="no attribute 'other'"):
        _ = layer.other
    with pytest.raises(AttributeError, match=r"no `weight`"):  # PEFT's own layer, which would merge into it
        get_peft_model(nn.Sequential(layer), LoraConfig(target_modules=["0"]))


def test_wrong_arguments_are_refused():
    with pytest.raises(
        ValueError, match=r"precision: 'fp8_tensor' cannot .* allowed: nf4, nvfp4, int4, mxfp4, int8, .*\."
    ):
        frozen_linear("fp8_tensor")
    with pytest.raises(ValueError, match="precision: 'bf16'"):
        FrozenLinear(64, 64, False, "bf16", torch.bfloat16)
    with pytest.raises(ValueError, match=r"dtype: torch\.float64 cannot"):
        FrozenLinear(64, 64, False, "nvfp4", torch.float64)
    with pytest.raises(ValueError, match="global_scale: given for 'mxfp4'"):
        FrozenLinear.from_linear(linear(), "mxfp4", torch.ones(1))
    layer = frozen_linear()
    with pytest.raises(ValueError, match=r"x: shape \(2, 768\), but the layer has 384 inputs"):
        layer(torch.zeros(2, 768))
    with pytest.raises(ValueError, match=r"q: a weight of .*'mxfp4'"):
        layer.fill(quantize(linear().weight, "mxfp4"), layer.bias)
    with pytest.raises(ValueError, match="bias: the layer has one"):
        layer.fill(quantize(linear().weight, "nvfp4"))


@every_precision
def test_codes_are_those_of_the_weight_that_is_held_now(precision):
    layer, other = frozen_linear(precision), linear(dtype=torch.float32)
    first = layer.codes()
    expected = quantize(linear().weight, layer.format)
    assert torch.equal(first.values, expected.values) and torch.equal(first.scale.float(), expected.scale.float())
    assert layer.codes() is first
    with torch.no_grad():
        other.weight.mul_(-3)
    layer.fill(quantize(other.weight, layer.format), layer.bias)
    old = weakref.ref(first.values)
    del first
    assert old() is None  # nothing keeps the memory of the weight that was replaced
    assert torch.equal(layer.dequantize(), quantize(other.weight, layer.format).dequantize())
    assert not torch.equal(layer.dequantize(), expected.dequantize())


def test_tiles_are_no_codes():
    layer = frozen_linear()
    layer.hold_tiles(torch.zeros(24, 144, dtype=torch.int32), torch.zeros(24, 72, dtype=torch.uint8), 1.0)
    with pytest.raises(ValueError, match="codes: the weight is in Marlin's layout"):
        layer.codes()
