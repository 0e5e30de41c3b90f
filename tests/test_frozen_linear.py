"""A base frozen in four bits: its products, what it saves for backward, and LoRA on it as PEFT computes it."""

import copy
import io
import weakref

import pytest
import torch
import torch.nn.functional as F
from peft import AdaLoraConfig, IA3Config, LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import Linear as PeftLinear
from tiny import tiny_model
from torch import nn
from torch.utils.checkpoint import checkpoint

from trl_quant.adapters import FrozenLoraLinear, with_frozen_layers
from trl_quant.formats import FORMATS, global_scale, quantize
from trl_quant.formats.checkpoint import checkpoint_tensors
from trl_quant.layers import FrozenLinear, frozen, frozen_lora_linear, frozen_precisions


DTYPES = [torch.bfloat16, torch.float32]
every_precision = pytest.mark.parametrize("precision", frozen_precisions())


@pytest.fixture(autouse=True)
def tracing():
    """Other tests' engines switch the compiler off, in the process that all share."""
    with torch._dynamo.config.patch(disable=False):
        yield


def linear(inputs: int = 384, outputs: int = 72, dtype: torch.dtype = torch.float32, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs, bias=bias).to(dtype)


def frozen_linear(precision: str = "nvfp4", *args, **kwargs) -> FrozenLinear:
    return FrozenLinear.from_linear(linear(*args, **kwargs), precision)


def gradients(function, x: torch.Tensor, *parameters: torch.Tensor) -> list[torch.Tensor]:
    """The output, and the gradients of a fixed weighted sum of it: of the inputs, then of the parameters."""
    x = x.detach().clone().requires_grad_()
    y = function(x)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).bfloat16().to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, (x, *parameters), dy)]


def same(ours, theirs) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


def close(ours, theirs, tolerance: float) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert (a.double() - b.double()).norm() <= tolerance * b.double().norm()


def saved_bytes(function, *held: torch.Tensor) -> int:
    """Bytes that a forward pass saves for backward, but for the storage of the tensors that are held anyway."""
    own = {tensor.untyped_storage().data_ptr() for tensor in held}
    saved = {}

    def pack(tensor):
        if (storage := tensor.untyped_storage()).data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        keep = function()
        total = sum(saved.values())
        del keep
    return total


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
    original, shapes = frozen.QuantizedTensor.dequantize, []

    def dequantize(self, dtype=None):
        shapes.append(tuple(self.shape))
        return original(self, dtype)

    for inputs, outputs in [(384, 300), (300, 130)]:
        layer = frozen_linear(precision, inputs, outputs)
        x = torch.randn(9, inputs)
        expected = gradients(layer, x)
        shapes.clear()
        with monkeypatch.context() as patch:
            patch.setattr(frozen.QuantizedTensor, "dequantize", dequantize)
            patch.setattr(frozen, "BUFFER_BYTES", 1)
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
    original = frozen.QuantizedTensor.dequantize

    def dequantize(self, dtype=None):
        numbers = original(self, dtype)
        made.append(weakref.ref(numbers))
        return numbers

    monkeypatch.setattr(frozen.QuantizedTensor, "dequantize", dequantize)
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
    with pytest.raises(ValueError, match=r"precision: 'fp8' cannot .* allowed: nf4, nvfp4, int4, mxfp4\."):
        frozen_linear("fp8")
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


# LoRA


def adapted(precision: str = "nvfp4", dtype: torch.dtype = torch.float32, **settings) -> FrozenLoraLinear:
    """A layer as PEFT makes it, with an adapter that does something."""
    torch.manual_seed(1)
    settings = {"r": 8, "lora_alpha": 12, "target_modules": ["0"], "init_lora_weights": False} | settings
    model = nn.Sequential(frozen_linear(precision, dtype=dtype))
    layer = get_peft_model(model, with_frozen_layers(LoraConfig(**settings))).base_model.model[0]
    assert type(layer) is FrozenLoraLinear
    return layer


def by_peft(layer: FrozenLoraLinear):
    return lambda x: PeftLinear.forward(layer, x)


def adapter(layer: FrozenLoraLinear, name: str = "default") -> list[torch.Tensor]:
    return [layer.lora_A[name].weight, layer.lora_B[name].weight]


@pytest.fixture
def joined(monkeypatch) -> list:
    """The calls of the joined branch."""
    calls = []

    def counted(*args):
        calls.append(args)
        return frozen_lora_linear(*args)

    monkeypatch.setattr("trl_quant.adapters.frozen_lora_linear", counted)
    return calls


@every_precision
@pytest.mark.parametrize("rslora", [False, True])
def test_lora_equals_peft(precision, rslora, joined):
    layer = adapted(precision, use_rslora=rslora)
    x = torch.randn(2, 5, 384)
    ours, theirs = gradients(layer, x, *adapter(layer)), gradients(by_peft(layer), x, *adapter(layer))
    assert len(joined) == 1
    close(ours, theirs, 1e-6)
    layer.scaling["default"] *= 1.01
    with pytest.raises(AssertionError):
        close(gradients(layer, x, *adapter(layer)), theirs, 1e-3)


@pytest.mark.parametrize("adapter_dtype", DTYPES)
def test_lora_in_bf16(adapter_dtype):
    """Against the exact gradients: no worse than PEFT's layer under autocast, whose adapter is of either type."""
    layer = adapted(dtype=torch.bfloat16)
    layer.lora_A.to(adapter_dtype), layer.lora_B.to(adapter_dtype)
    x = torch.randn(64, 384).bfloat16()
    exact = copy.deepcopy(layer).double()
    expected = gradients(by_peft(exact), x.double(), *adapter(exact))

    def peft(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return by_peft(layer)(x)

    for given, theirs, right in zip(
        gradients(layer, x, *adapter(layer)), gradients(peft, x, *adapter(layer)), expected, strict=True
    ):
        error = (given.double() - right).norm() / right.norm()
        assert given.dtype == theirs.dtype
        assert 0 < error < 1.05 * (theirs.double() - right).norm() / right.norm() < 0.01


def test_a_frozen_adapter_saves_less():
    layer = adapted()
    x = torch.randn(4, 384, requires_grad=True)
    held = (*layer.parameters(), x)
    assert saved_bytes(lambda: layer(x), *held) == 4 * 8 * 4
    for parameter in adapter(layer):
        parameter.requires_grad_(False)
    assert saved_bytes(lambda: layer(x), *layer.parameters()) == 0, "not even the inputs"
    same(gradients(layer, x)[1:], gradients(lambda x: layer(x) + 0, x)[1:])


def test_where_the_branch_is_joined(joined):
    """One plain adapter, active and not merged, with its dropout off; PEFT's own forward elsewhere."""
    layer, x = adapted(lora_dropout=0.5), torch.randn(4, 384)

    def is_joined(*args, **kwargs) -> bool:
        joined.clear()
        layer(x, *args, **kwargs)
        return bool(joined)

    assert not is_joined()
    layer.eval()
    assert is_joined()
    close([layer(x)], [by_peft(layer)(x)], 1e-6)
    assert not is_joined(adapter_names=["default"] * 4)
    layer.enable_adapters(False)
    assert not is_joined() and torch.equal(layer(x), layer.base_layer(x))
    layer.enable_adapters(True)
    handle = layer.lora_A["default"].register_forward_hook(lambda module, args, output: 2 * output)
    assert not is_joined()
    handle.remove()
    assert is_joined() and not torch.equal(layer(x), layer.base_layer(x))
    layer.set_adapter([])
    assert not is_joined() and torch.equal(layer(x), layer.base_layer(x))
    assert adapted(lora_bias=True)(x).shape == (4, 72) and len(joined) == 0


def test_nothing_is_merged():
    layer, x = adapted(), torch.randn(4, 384)
    before = layer(x)
    for merge in (layer.merge, lambda: layer.merge(safe_merge=True), lambda: layer.merge(adapter_names=["default"])):
        with pytest.raises(ValueError, match=r"merge: a base held in 'nvfp4' cannot .*trl-quant export"):
            merge()
    assert not layer.merged and torch.equal(layer(x), before)
    dense = F.linear(x, layer.base_layer.dequantize() + layer.get_delta_weight("default"), layer.base_layer.bias)
    close([before], [dense], 1e-5)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (lambda: LoraConfig(use_dora=True), "use_dora=True"),
        (lambda: LoraConfig(init_lora_weights="pissa"), "init_lora_weights='pissa' starts from the base's weight"),
        (lambda: LoraConfig(init_lora_weights="olora"), "'olora'.*allowed: True, False, 'gaussian'"),
        (lambda: LoraConfig(init_lora_weights="orthogonal"), "'orthogonal'"),
        (lambda: LoraConfig(init_lora_weights="lora_ga"), "'lora_ga'"),
        (lambda: AdaLoraConfig(total_step=10), "AdaLoraConfig cannot adapt a four-bit base; allowed: LoraConfig"),
        (lambda: IA3Config(), "IA3Config cannot"),
    ],
)
def test_what_needs_the_weight_is_refused(config, message):
    with pytest.raises(ValueError, match=message):
        with_frozen_layers(config())


# Whole models


def frozen_model(precision: str = "nvfp4"):
    """A tiny model with frozen decoder layers, and the same with their numbers in ordinary ones."""
    dense = tiny_model()
    packed = copy.deepcopy(dense)
    for model in (dense, packed):
        for name, module in list(model.model.named_modules()):
            if isinstance(module, nn.Linear):
                layer = FrozenLinear.from_linear(module, precision)
                if model is packed:
                    model.model.set_submodule(name, layer)
                else:
                    module.weight.data = layer.dequantize()
    return packed, dense


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(40).view(2, 20)).logits


def perturb(model, seed: int) -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                parameter.normal_(std=0.05)


def lora_config(**settings) -> LoraConfig:
    return LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM", **settings)


def test_all_linear_trains_as_on_the_numbers():
    packed, dense = frozen_model()
    assert torch.equal(logits(packed), logits(dense))
    packed, dense = get_peft_model(packed, with_frozen_layers(lora_config())), get_peft_model(dense, lora_config())
    layers = [name for name, module in packed.named_modules() if isinstance(module, FrozenLoraLinear)]
    assert layers == [name for name, module in dense.named_modules() if type(module) is PeftLinear]
    assert len(layers) == 14
    trainable = [name for name, parameter in packed.named_parameters() if parameter.requires_grad]
    assert trainable == [name for name, parameter in dense.named_parameters() if parameter.requires_grad]
    for model in (packed, dense):
        perturb(model, seed=1)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        ids = torch.arange(40).view(2, 20)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(ids, labels=ids).loss.backward()
            optimizer.step()
        model.eval()
    close([p for p in packed.parameters() if p.requires_grad], [p for p in dense.parameters() if p.requires_grad], 1e-5)
    close([logits(packed)], [logits(dense)], 1e-5)
    with packed.disable_adapter(), dense.disable_adapter():
        close([logits(packed)], [logits(dense)], 1e-6)
    with pytest.raises(ValueError, match="cannot take an adapter in"):
        packed.merge_and_unload()


def test_two_adapters_and_files(tmp_path, joined):
    model = get_peft_model(frozen_model()[0], with_frozen_layers(lora_config())).eval()
    model.add_adapter("second", with_frozen_layers(lora_config(use_rslora=True)))
    perturb(model, seed=1)
    first = logits(model)
    assert len(joined) == 14
    model.set_adapter("second")
    second = logits(model)
    assert not torch.allclose(first, second, atol=1e-2)
    model.base_model.set_adapter(["default", "second"])
    joined.clear()
    both = logits(model)
    assert not joined and not torch.allclose(both, second, atol=1e-2)
    model.save_pretrained(tmp_path)

    config = with_frozen_layers(LoraConfig.from_pretrained(tmp_path))
    loaded = PeftModel.from_pretrained(frozen_model()[0], tmp_path, config=config).eval()
    assert torch.equal(logits(loaded), first)
    loaded.load_adapter(tmp_path / "second", "other")
    loaded.set_adapter("other")
    assert torch.equal(logits(loaded), second)
    with pytest.raises(AttributeError, match="with_frozen_layers"):
        PeftModel.from_pretrained(frozen_model()[0], tmp_path)


def test_adapters_take_type_and_device_of_the_base():
    for dtype in DTYPES:
        model = nn.Sequential(frozen_linear(dtype=dtype))
        config = with_frozen_layers(LoraConfig(target_modules=["0"]))
        model = get_peft_model(model, config, autocast_adapter_dtype=False)
        assert {parameter.dtype for name, parameter in model.named_parameters() if ".lora_" in name} == {dtype}


def test_peft_compiles():
    layer = adapted()
    x = torch.randn(3, 384)
    torch.compiler.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    same(gradients(compiled, x, *adapter(layer)), gradients(layer, x, *adapter(layer)))


def test_the_configuration_is_copied():
    config = LoraConfig(target_modules=["0"])
    known = with_frozen_layers(with_frozen_layers(config))
    assert known.to_dict() == config.to_dict() and "FrozenL" not in str(known.to_dict())
    model = nn.Sequential(frozen_linear())
    with pytest.raises(AttributeError, match="with_frozen_layers"):
        get_peft_model(model, config)
    assert type(get_peft_model(model, known).base_model.model[0]) is FrozenLoraLinear
