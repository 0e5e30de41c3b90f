"""Trainer and vLLM with one frozen base in one memory: vLLM's real Marlin layers but for stand-ins of two kernels."""

import copy
import logging

import pytest
import torch
from long_tests import rest_is_long
from peft import LoraConfig, get_peft_model
from torch.nn.functional import linear


pytest.importorskip("vllm", reason="vLLM is not installed")
from frozen_layers import frozen_lora_linear, layers, storages
from marlin_on_cpu import marlin_on_cpu, numbers, tiles
from tiny import FAMILIES, save_tiny
from training import config, lora, make
from vllm_engines import (
    NOISY_RUN,
    SMALL,
    assert_live_equals_fresh,
    engine,
    greedy,
    keep,
    policy,
    train_beside_the_base,
    update,
)

from trl_quant import QuantGRPOConfig, QuantGRPOTrainer
from trl_quant.formats import global_scale
from trl_quant.layers import FrozenLinear, marlin, weight_only
from trl_quant.policy.adapters import with_frozen_layers
from trl_quant.policy.frozen import freeze
from trl_quant.rollout.vllm import one_copy


every_precision = pytest.mark.parametrize("precision", ["nvfp4", "mxfp4"])
TILED = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
LORA = {"r": 4, "lora_alpha": 16, "target_modules": "all-linear", "init_lora_weights": False}


@pytest.fixture(autouse=True)
def cpu(monkeypatch):
    marlin_on_cpu(monkeypatch)


def adapted(path, precision: str, family: str = "qwen2", **shape):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = policy(path, family=family, tied=family.startswith("gemma"), **TILED | shape)
        freeze(model, precision)
        return get_peft_model(model, with_frozen_layers(LoraConfig(**LORA)))


def apart(model, precision, monkeypatch):
    """An engine with a base of its own, as it reads it from the checkpoint."""
    with monkeypatch.context() as patch:
        patch.setattr(one_copy, "lent_weights", lambda: None)
        return engine(model, precision, lora_sync="adapter")


# Each family and each precision: what differs between families are names, fused layers, biases and norms, and between
# precisions how the tiles are made, which knows no names
@pytest.mark.parametrize(
    ("family", "precision"),
    rest_is_long([*zip(FAMILIES, ["nvfp4", "mxfp4"] * len(FAMILIES)), ("qwen2", "mxfp4")], ("qwen2", "nvfp4")),
)
def test_one_memory(tmp_path, precision, family, monkeypatch, caplog):
    """The engine computes what one with a base of its own does, bit for bit, and the policy what it did before."""
    model = adapted(tmp_path / "policy", precision, family)
    update(model, seed=0)
    before = {name: layer.dequantize() for name, layer in layers(model).items()}
    bytes_before = sum(
        t.untyped_storage().nbytes() for layer in layers(model).values() for t in layer.stored()[:3] if t is not None
    )
    own = apart(model, precision, monkeypatch)
    with caplog.at_level(logging.INFO, "trl_quant"):
        shared = engine(model, precision, lora_sync="adapter", sync_check_steps=1)
    assert "hold one copy" in caplog.text and "each" not in caplog.text
    for sampler in (own, shared):
        sampler.sync()
    assert greedy(shared.llm) == greedy(own.llm)
    assert shared.check_sync()

    theirs = dict(shared.llm.apply_model(lambda model: dict(model.named_parameters()))[0])
    for name, layer in layers(model).items():
        assert torch.equal(layer.dequantize(), before[name]) and not torch.equal(
            layer.dequantize(), before[name].roll(1)
        )
        assert storages([layer.weight_packed, layer.weight_scale]) <= storages(theirs.values())
    assert not storages(t for layer in layers(model).values() for t in layer.stored()[:2]) & storages(
        own.llm.apply_model(lambda model: dict(model.named_parameters()))[0].values()
    )
    embedding = model.get_base_model().get_input_embeddings().weight
    assert storages([embedding]) <= storages(theirs.values())
    held = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for layer in layers(model).values()
        for t in layer.stored()[:2]
    }
    assert sum(held.values()) <= bytes_before

    # One memory: what is written by the one is read by the other
    seen = greedy(shared.llm)
    next(iter(layers(model).values())).weight_packed.data.bitwise_xor_(0x11111111)
    shared.llm.reset_prefix_cache()
    assert greedy(shared.llm) != seen


@every_precision
def test_products(precision, monkeypatch):
    """Forward, backward and adapter from the tiles equal those of the numbers, whole and in parts."""
    monkeypatch.setattr(weight_only, "BUFFER_BYTES", 1)
    torch.manual_seed(0)
    plain = torch.nn.Linear(256, 320, dtype=torch.float32)
    layer = FrozenLinear.from_linear(plain, precision)
    rows = copy.deepcopy(layer)
    layer.hold_tiles(*tiles(layer))
    assert layer.weight_packed.dtype == torch.int32 and torch.equal(layer.dequantize(), rows.dequantize())
    a, b = torch.randn(8, 256).requires_grad_(), torch.randn(320, 8).requires_grad_()
    x = torch.randn(3, 5, 256)
    for function, exact in (
        (lambda x: layer(x), lambda x: linear(x, rows.dequantize().double(), plain.bias.double())),
        (
            lambda x: frozen_lora_linear(x, layer, a, b, 0.5),
            lambda x: linear(x, rows.dequantize().double() + 0.5 * b.double() @ a.double(), plain.bias.double()),
        ),
    ):
        results = []
        for call, dtype in ((function, torch.float32), (exact, torch.float64)):
            given = x.to(dtype).requires_grad_()
            y = call(given)
            grads = torch.autograd.grad(y.square().sum(), [given, a, b], allow_unused=True)
            results.append([y.detach(), *(grad for grad in grads if grad is not None)])
        for ours, right in zip(*results, strict=True):
            assert ((ours - right).norm() / right.norm()).item() < 1e-6
    shifted = linear(x, rows.dequantize().roll(1, 0), plain.bias)
    assert ((layer(x) - shifted).norm() / shifted.norm()).item() > 0.1


@every_precision
def test_numbers_are_vllms(precision):
    """Code times scale as vLLM's own permutations have them, exactly in BF16, in any part; tiny scales are 0 there."""
    torch.manual_seed(0)
    weight = torch.randn(192, 256) * torch.logspace(-6, 0, 256)[None, :]
    plain = torch.nn.Linear(256, 192, bias=False)
    plain.weight.data = weight
    layer = FrozenLinear.from_linear(plain, precision)
    values, scale, factor = tiles(layer)
    theirs = numbers(values, scale, None)
    for dtype in (torch.bfloat16, torch.float32):
        ours = marlin.dequantized(values, scale, dtype)
        assert ours.dtype == dtype and torch.equal(ours.float(), theirs)
        part = marlin.dequantized(values[2:6, 128:], scale[32 * len(scale) // 256 : 96 * len(scale) // 256, 64:], dtype)
        assert torch.equal(part.float(), theirs[32:96, 64:])
    exact = layer.dequantize(torch.float32).t()
    flushed = (theirs == 0) & (exact != 0)
    assert flushed.any() == (precision == "nvfp4")
    assert exact[flushed].abs().max() < 1e-3 * exact.abs().max() if flushed.any() else True
    assert torch.allclose((theirs * factor)[~flushed], exact[~flushed], rtol=1e-6, atol=0)


@pytest.mark.parametrize("why", ["tiles", "merge", "checkpoint"])
def test_two_copies(tmp_path, why, monkeypatch, caplog):
    """Where one copy is impossible the log says why and what it costs, and the engine samples from the policy."""
    shape = {"intermediate_size": 160} if why == "tiles" else {}
    model = adapted(tmp_path / "policy", "nvfp4", **shape)
    options = {"lora_sync": "merge" if why == "merge" else "adapter", "sync_check_steps": 1}
    if why == "checkpoint":
        options["engine_kwargs"] = SMALL | {"model": str(tmp_path / "policy")}
    with caplog.at_level(logging.WARNING, "trl_quant"):
        sampler = engine(model, "nvfp4", **options)
    expected = {
        "tiles": "does not fill the tiles",
        "merge": "adapter is merged",
        "checkpoint": "a checkpoint of its own",
    }
    assert "GiB more" in caplog.text and expected[why] in caplog.text
    assert all(layer.weight_packed.dtype == torch.uint8 for layer in layers(model).values())
    sampler.sync()
    assert sampler.check_sync()


@pytest.mark.long
def test_a_second_engine(tmp_path, caplog):
    """Another engine on the same policy has a copy of its own, and neither disturbs the other."""
    model = adapted(tmp_path / "policy", "nvfp4")
    first = engine(model, "nvfp4", lora_sync="adapter")
    first.sync()
    seen = greedy(first.llm)
    with caplog.at_level(logging.WARNING, "trl_quant"):
        second = engine(model, "nvfp4", lora_sync="adapter", sync_check_steps=1)
    assert "shares its base with another engine already" in caplog.text
    second.sync()
    assert second.check_sync() and greedy(second.llm) == seen == greedy(first.llm)


def test_a_global_scale_that_leaves_room(tmp_path):
    """vLLM then makes the scales larger by a power of two, which the numbers must not show."""
    torch.manual_seed(0)
    plain = torch.nn.Linear(128, 64, bias=False)
    layer = FrozenLinear.from_linear(plain, "nvfp4", 0.1 * global_scale(plain.weight))
    before, x = layer.dequantize(), torch.randn(5, 128)
    values, scale, factor = tiles(layer)
    assert factor < 0.2 / layer.weight_global_scale.item()
    layer.hold_tiles(values, scale, factor)
    assert torch.equal(layer.dequantize(), before)
    assert torch.allclose(layer(x), linear(x, before), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("precision", rest_is_long(["mxfp4", "nvfp4"]))
def test_a_merged_adapter_in_layers_with_biases(tmp_path, precision):
    """Marlin reorders biases as well: after a reload the engine equals a fresh one of the same weights."""
    model = policy(tmp_path / "policy", with_lora=True, family="qwen2", tied=False, **TILED)
    for name, param in model.named_parameters():
        if name.endswith("bias"):
            param.data.uniform_(-1, 1)
    assert_live_equals_fresh(engine(model, precision), model, precision, tmp_path)


@pytest.mark.long
def test_a_run(tmp_path):
    """GRPO on a shared base, with noise and dynamic sampling: only the adapter moves, and the engine follows it."""
    path = save_tiny(tmp_path / "model", family="qwen2", tied=False, dtype=torch.bfloat16, **TILED)
    for precision in ("mxfp4", "nvfp4"):
        settings = NOISY_RUN | {"train_precision": precision, "dynamic_sampling_rounds": 1}
        args = config(QuantGRPOConfig, tmp_path / "out", **settings)
        assert (args.rollout_precision, args.lora_sync) == (precision, "adapter")
    trainer = make(QuantGRPOTrainer, args, model=path, peft_config=lora())
    keep(trainer)
    assert all(layer.weight_packed.dtype == torch.int32 for layer in layers(trainer.model).values())
    logged, _ = train_beside_the_base(trainer, mismatch=1e-3)
    assert [entry["noise/norms"] > 0 for entry in logged] == [entry["noise/sigma"] > 0 for entry in logged]
