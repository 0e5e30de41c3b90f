"""vLLM samples with the codes that the policy is trained with: as a fresh engine on its weights, bit for bit."""

from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from slow_routing import mixture_of
from tiny import save_tiny, tiny_tokenizer
from training import config, lora, make
from transformers import AutoModelForCausalLM


pytest.importorskip("vllm", reason="vLLM is not installed")
from vllm_engines import COLOCATED, engine, fresh, greedy, keep, policy, update

from trl_quant import QuantGRPOConfig, QuantGRPOTrainer
from trl_quant.formats import quantize
from trl_quant.models.linears import unquantized_linears
from trl_quant.policy.adapters import delta_weight
from trl_quant.policy.unified import unify
from trl_quant.rollout import weights
from trl_quant.rollout.vllm import engine as room
from trl_quant.rollout.vllm import support
from trl_quant.rollout.vllm.base import VLLMBase
from trl_quant.storage.experts import NamesOnDisk
from trl_quant.storage.layout import checkpoint_stream


pytestmark = pytest.mark.vllm
LORA = {"r": 4, "lora_alpha": 16, "target_modules": "all-linear", "init_lora_weights": False}


@pytest.mark.parametrize("tuning", ["full", "merge", "adapter"])
def test_the_trainers_codes(tmp_path, tuning):
    model = policy(tmp_path / "policy")
    if tuning != "full":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            model = get_peft_model(model, LoraConfig(**LORA))
    unify(model, "int8", tuning == "merge")
    sampler = engine(model, "int8", lora_sync="adapter" if tuning == "adapter" else "merge", sync_check_steps=1)
    layers, seen = sampler.weights.unified("int8"), []
    assert len(layers) == 7 * model.config.num_hidden_layers
    for seed in range(2):
        update(model, seed=seed)
        sampler.sync()
        seen.append(greedy(sampler.llm))
        if tuning != "adapter":
            assert seen[-1] == greedy(fresh(model, "int8", tmp_path / f"checkpoint-{seed}"))
            sent = dict(sampler.stream())
            for name, layer in layers.items():
                assert sent[f"{name}.weight"] is layer.codes().values  # not quantized again
                assert sent[f"{name}.weight_scale"] is layer.codes().scale
                whole = sampler.weights.of_linear(layer)
                assert torch.equal(layer.codes().values, quantize(whole, "int8").values)
            assert not any(f"{name}.weight_scale" in sent for name in unquantized_linears(sampler.weights.base_model))
    assert seen[0] != seen[1]
    sampler.check_sync()


def test_nothing_is_merged_that_nobody_reads(tmp_path, monkeypatch):
    """Of an adapter that is in the codes the merged weight is computed for them, once, and for what is measured."""
    model = get_peft_model(policy(tmp_path / "policy"), LoraConfig(**LORA))
    unify(model, "int8", merged=True)
    sampler, merged = engine(model, "int8"), []
    monkeypatch.setattr(weights, "delta_weight", lambda *args: merged.append(1) or delta_weight(*args))
    whole = dict(sampler.stream())
    assert len(merged) == len(sampler.weights.unified("int8"))  # a model as small as this is measured whole
    merged.clear()
    monkeypatch.setattr(sampler.drift, "measures", lambda name: name.endswith("layers.1.mlp.up_proj.weight"))
    part = dict(sampler.stream())
    assert len(merged) == 1
    assert part.keys() == whole.keys() and all(torch.equal(part[name], tensor) for name, tensor in whole.items())
    merged.clear()
    dict(sampler.policy_stream())  # whose values are read again
    assert len(merged) == len(sampler.weights.unified("int8"))


@pytest.mark.parametrize("family", ["mixtral", "glm4_moe"])
def test_a_mixtures_codes(family, monkeypatch):
    """As vLLM on a GPU gets them: those of a checkpoint of the policy, with nothing quantized for the sync."""
    model = mixture_of(family)
    unify(model, "fp8")
    monkeypatch.setattr("trl_quant.rollout.vllm.base.check_experts_here", lambda precision: None)
    sampler = VLLMBase(model, Accelerator(cpu=True), tiny_tokenizer(), precision="fp8")
    sampler.plan_stream(prepared=False)
    made, right = [], sampler.quantizers["quantizer"]
    sampler.quantizers["quantizer"] = lambda *args, **given: made.append(1) or right(*args, **given)
    names = NamesOnDisk(model)
    for _ in range(2):
        expected = dict(checkpoint_stream(names.stream(sampler.weights.stream()), "fp8", sampler.ignore))
        for measured in (True, False):
            sent = dict(sampler.stream(measured=measured))
            assert sent.keys() == expected.keys() and not made
            for name, tensor in expected.items():
                assert sent[name].dtype == tensor.dtype and torch.equal(sent[name].float(), tensor.float()), name
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(1.25)


def test_an_adapter_beside_a_policy_in_fp32(tmp_path):
    """The engine quantizes the BF16 checkpoint: so does the trainer, whatever type it loads that to."""
    args = config(QuantGRPOConfig, tmp_path / "out", train_precision="int8", lora_sync="adapter", **COLOCATED)
    model = save_tiny(tmp_path / "model", dtype=torch.bfloat16)
    trainer = make(QuantGRPOTrainer, args, model=model, peft_config=lora())
    keep(trainer)
    checkpoint = dict(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).named_parameters())
    layers = dict(trainer.vllm_generation.engine.weights.frozen())
    assert len(layers) == 7 * trainer.model.config.num_hidden_layers
    for name, layer in layers.items():
        stored = quantize(checkpoint[f"{name}.weight"].bfloat16(), "int8")
        assert layer.codes().scale.dtype == torch.bfloat16
        assert torch.equal(layer.codes().values, stored.values) and torch.equal(layer.codes().scale, stored.scale)
    trainer.check_sync()


def test_fp8_by_blocks_is_multiplied_as_given(tmp_path, monkeypatch):
    class Asked(Exception):
        pass

    def ask(precision):
        raise Asked(precision)

    monkeypatch.setattr(room, "check_device", lambda *args: None)
    monkeypatch.setattr(room, "multiply_as_given", ask)
    model = policy(tmp_path / "policy")
    unify(model, "fp8_block")
    with pytest.raises(Asked, match="fp8_block"):
        engine(model, "fp8_block")


@pytest.mark.parametrize(
    ("precision", "capability", "follows"),
    [
        ("int8", (9, 0), True),
        ("int8", (8, 0), True),
        ("int8", (10, 0), False),
        ("int8", (6, 1), False),
        ("fp8", (9, 0), False),
    ],
)
def test_int8_codes_are_multiplied_by_vllm_where_it_can(precision, capability, follows, monkeypatch):
    """vLLM has no product of INT8 codes from Blackwell on."""
    theirs, followed = object(), []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.ops, "_C", SimpleNamespace(cutlass_scaled_mm=theirs), raising=False)
    monkeypatch.setattr(support, "follow_int8", followed.append)
    support.compute_as_vllm(precision, torch.device("cuda"))
    assert followed == [theirs] * follows
