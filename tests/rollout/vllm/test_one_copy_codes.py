"""Trainer and vLLM with one INT8 base in one memory: vLLM's real CUTLASS layers but for stand-ins of two kernels."""

import logging

import pytest
import torch
from long_tests import rest_is_long
from peft import LoraConfig, get_peft_model


pytest.importorskip("vllm", reason="vLLM is not installed")
from cutlass_on_cpu import cutlass_on_cpu
from frozen_layers import layers, storages
from tiny import FAMILIES, save_tiny
from training import config, lora, make, parameters
from vllm_engines import NOISY_RUN, engine, greedy, keep, policy, train_beside_the_base

from trl_quant import QuantGRPOConfig, QuantGRPOTrainer
from trl_quant.policy.adapters import with_frozen_layers
from trl_quant.policy.frozen import freeze
from trl_quant.policy.unified import unify
from trl_quant.rollout import RolloutNoise
from trl_quant.rollout.verify.self_check import EngineLayer
from trl_quant.rollout.vllm import one_copy


pytestmark = pytest.mark.vllm
LORA = {"r": 4, "lora_alpha": 16, "target_modules": "all-linear", "init_lora_weights": False}


@pytest.fixture(autouse=True)
def cpu(monkeypatch):
    cutlass_on_cpu(monkeypatch)


def adapted(path, family: str = "qwen2", **shape):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = policy(path, family=family, tied=family.startswith("gemma"), **shape)
        freeze(model, "int8")
        model = get_peft_model(model, with_frozen_layers(LoraConfig(**LORA)))
        unify(model, "int8")
        return model


def parameters_of(sampler) -> dict[str, torch.Tensor]:
    return dict(sampler.llm.apply_model(lambda model: dict(model.named_parameters()))[0])


@pytest.mark.parametrize("family", rest_is_long(FAMILIES, "qwen3"))
def test_one_memory(tmp_path, family, monkeypatch, caplog):
    """The engine computes what one with a base of its own does, bit for bit, and the policy what it did before."""
    model = adapted(tmp_path / "policy", family)
    tokens = torch.arange(24).view(1, 24) % 40 + 3
    with torch.no_grad():
        before, forward = {name: layer.dequantize() for name, layer in layers(model).items()}, model(tokens).logits
    with monkeypatch.context() as patch:
        patch.setattr(one_copy, "lent_weights", lambda: None)
        own = engine(model, "int8", lora_sync="adapter")
    with caplog.at_level(logging.INFO, "trl_quant"):
        shared = engine(model, "int8", lora_sync="adapter", sync_check_steps=1)
    assert "hold one copy" in caplog.text and "each" not in caplog.text
    for sampler in (own, shared):
        sampler.sync()
    assert greedy(shared.llm) == greedy(own.llm)
    assert shared.check_sync()

    theirs = storages(parameters_of(shared).values())
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, forward)  # q, k and v are rows of vLLM's matrix, and stay there
    for name, layer in layers(model).items():
        assert torch.equal(layer.dequantize(), before[name])
        assert storages([layer.weight_packed]) <= theirs
        if layer.joint is not None:
            codes = layer.joint.codes([one.operand() for one in layer.joint.layers])
            assert storages([codes.values]) <= theirs
    assert not storages(layer.weight_packed for layer in layers(model).values()) & storages(parameters_of(own).values())
    embedding = model.get_base_model().get_input_embeddings().weight
    assert storages([embedding]) <= theirs

    # One memory: what is written by the one is read by the other
    seen = greedy(shared.llm)
    for layer in layers(model).values():
        layer.weight_packed.data.neg_()
    shared.llm.reset_prefix_cache()
    assert greedy(shared.llm) != seen


def test_the_self_check_computes_as_the_engine(tmp_path):
    """Within two roundings of BF16: it quantizes inputs as vLLM does. Without that it would be further away."""
    model = adapted(tmp_path / "policy")
    sampler = engine(model, "int8", lora_sync="adapter")
    theirs = sampler.llm.apply_model(lambda m: dict(m.named_modules()))[0]["model.layers.0.mlp.down_proj"]
    ours = layers(model)["base_model.model.model.layers.0.mlp.down_proj.base_layer"]
    x = torch.randn(77, ours.in_features, generator=torch.Generator().manual_seed(0)).bfloat16()
    right = theirs.scheme.apply_weights(theirs, x, None).float()
    reference = EngineLayer(sampler, [ours], 0, None)(x).float()
    unquantized = x.float() @ ours.dequantize().float().t()
    errors = [((y - right).norm() / right.norm()).item() for y in (reference, unquantized)]
    assert errors[0] < 2**-8 < 0.6 * errors[1]


def test_what_does_not_fill_tiles_is_held_twice(tmp_path, caplog):
    model = adapted(tmp_path / "policy", intermediate_size=168)
    with caplog.at_level(logging.WARNING, "trl_quant"):
        sampler = engine(model, "int8", lora_sync="adapter", sync_check_steps=1)
    assert "GiB more" in caplog.text and "does not fill the tiles" in caplog.text
    sampler.sync()
    assert sampler.check_sync()
    assert not storages(x.weight_packed for x in layers(model).values()) & storages(parameters_of(sampler).values())


@pytest.mark.long
def test_a_run(tmp_path):
    """GRPO on a shared base, with noise: only the adapter moves, the engine follows it, and a resumed run has both."""
    path = save_tiny(tmp_path / "model", family="qwen2", tied=False, dtype=torch.bfloat16)
    settings = NOISY_RUN | {"train_precision": "int8", "lora_sync": "adapter", "beta": 0.1}
    settings |= {"save_strategy": "steps", "save_steps": 6}
    args = config(QuantGRPOConfig, tmp_path / "out", **settings)
    trainer = make(QuantGRPOTrainer, args, model=path, peft_config=lora())
    keep(trainer)
    held = storages(parameters_of(trainer.vllm_generation.engine).values())
    assert storages(layer.weight_packed for layer in layers(trainer.model).values()) <= held
    logged, moved = train_beside_the_base(trainer, mismatch=1e-2)
    assert all(entry["kl"] > 0 for entry in logged[2:])

    again = make(QuantGRPOTrainer, args, model=path, peft_config=lora())
    keep(again)
    fresh_adapter = parameters(again)
    again.train(resume_from_checkpoint=True)
    resumed, trained = parameters(again), parameters(trainer)
    assert all(torch.equal(resumed[name], trained[name]) for name in moved)
    assert not any(torch.equal(resumed[name], fresh_adapter[name]) for name in moved)
    for sampler in (trainer.vllm_generation.engine, again.vllm_generation.engine):
        sampler.sync()
        sampler.lay_noise(RolloutNoise())
        sampler.llm.reset_prefix_cache()
    assert greedy(again.vllm_generation.llm) == greedy(trainer.vllm_generation.llm)
