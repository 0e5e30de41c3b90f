"""LoRA on a base frozen in four bits: as PEFT computes it, joined to the base where that is exact."""

import copy

import pytest
import torch
import torch.nn.functional as F
from frozen_layers import DTYPES, adapted, adapter, close, every_precision, frozen_linear, gradients, same, saved_bytes
from peft import AdaLoraConfig, IA3Config, LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import Linear as PeftLinear
from tiny import tiny_model
from torch import nn
from torch.overrides import TorchFunctionMode
from training import assert_same_run, config, lora, make

from trl_quant import QuantGRPOConfig, QuantGRPOTrainer
from trl_quant.layers import FrozenLinear
from trl_quant.layers.joint import output
from trl_quant.policy.adapters import FrozenLoraLinear, leave_casts_to_autocast, with_frozen_layers
from trl_quant.policy.frozen import freeze


def by_peft(layer: FrozenLoraLinear):
    return lambda x: PeftLinear.forward(layer, x)


@pytest.fixture
def joined(monkeypatch) -> list:
    """The calls of the joined branch."""
    calls = []

    def counted(*args):
        calls.append(args)
        return output(*args)

    monkeypatch.setattr("trl_quant.policy.adapters.output", counted)
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
        with pytest.raises(ValueError, match=r"merge: a base in 'nvfp4' cannot .*trl-quant export"):
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
        (lambda: AdaLoraConfig(total_step=10), "AdaLoraConfig cannot adapt a frozen base; allowed: LoraConfig"),
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
    with pytest.raises(ValueError, match="cannot hold a merged adapter"):
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


@pytest.mark.usefixtures("tracing")
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


class Conversions(TorchFunctionMode):
    """Counts the elements that calls of `Tensor.to` convert from BF16 to FP32. Autocast's conversions are no calls."""

    count = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        if function is torch.Tensor.to and (args[0].dtype, result.dtype) == (torch.bfloat16, torch.float32):
            self.count += result.numel()
        return result


def lora_in_bf16(**options) -> PeftModel:
    """A model in BF16, whose adapter PEFT holds in FP32, with B that is not zero."""
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, **options)
    return get_peft_model(tiny_model(dtype=torch.bfloat16), config)


def trained_bits(model: nn.Module, autocast: bool = True) -> tuple[list, int]:
    """The logits and the adapter's gradients, and how many elements were converted to FP32."""
    model.zero_grad()
    torch.manual_seed(1)
    with Conversions() as conversions, torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        logits = model(torch.arange(60).view(2, 30)).logits
        logits.square().mean().backward()
    gradients = [param.grad for param in model.parameters() if param.requires_grad]
    assert gradients and all(grad is not None for grad in gradients)
    return [logits.detach(), *gradients], conversions.count


def test_autocast_alone_converts_inputs():
    model = lora_in_bf16()
    theirs, many = trained_bits(model)
    outside, _ = trained_bits(model, autocast=False)
    leave_casts_to_autocast(model)
    ours, few = trained_bits(model)
    same(ours, theirs)
    inputs = 60 * sum(layer.in_features for layer in model.modules() if isinstance(layer, PeftLinear))
    assert many - few == inputs > 0
    same(trained_bits(model, autocast=False)[0], outside)
    same(trained_bits(copy.deepcopy(model))[0], theirs)
    with pytest.raises(AssertionError):
        same(outside, theirs)


@pytest.mark.parametrize("options", [{"lora_dropout": 0.1}, {"use_dora": True}], ids=str)
def test_other_branches_convert_as_before(options):
    model = lora_in_bf16(**options)
    theirs, many = trained_bits(model)
    leave_casts_to_autocast(model)
    ours, as_many = trained_bits(model)
    same(ours, theirs)
    assert as_many == many


@pytest.mark.long
def test_a_run_has_the_same_bits_with_fewer_conversions(tmp_path, monkeypatch):
    counts, runs = [], []
    for name in ("ours", "peft"):
        args = config(
            QuantGRPOConfig, tmp_path / name, bf16=True, gradient_checkpointing=True, rollout_precision="int8"
        )
        trainer = make(QuantGRPOTrainer, args, tiny_model(dtype=torch.bfloat16), peft_config=lora())
        with Conversions() as conversions:
            trainer.train()
        counts.append(conversions.count)
        runs.append(trainer)
        monkeypatch.setattr("trl_quant.trainers.sampling.leave_casts_to_autocast", lambda model: None)
    assert_same_run(*runs)
    assert counts[0] < counts[1]


@pytest.mark.parametrize("precision", ["nvfp4", "int8"])
def test_a_base_that_is_frozen_later(precision):
    """The adapter of a loaded PEFT model computes as one that was made on the frozen base, bit for bit."""
    model = tiny_model(family="qwen2").to(torch.bfloat16)
    early = copy.deepcopy(model)
    freeze(early, precision)
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    early, late = get_peft_model(early, with_frozen_layers(config)), get_peft_model(model, config)
    freeze(late, precision)
    kinds = {name: type(layer) for name, layer in early.named_modules()}
    assert {name: type(layer) for name, layer in late.named_modules()} == kinds
    late.load_state_dict(
        {name: tensor for name, tensor in early.state_dict().items() if ".lora_" in name}, strict=False
    )
    tokens = torch.arange(12).view(1, 12) + 3
    with torch.no_grad():
        assert torch.equal(late(tokens).logits, early(tokens).logits)
        with late.disable_adapter():
            assert not torch.equal(late(tokens).logits, early(tokens).logits)
