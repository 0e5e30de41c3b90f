"""vLLM samples with the codes that the policy is trained with: as a fresh engine on its weights, bit for bit."""

import pytest
import torch
from peft import LoraConfig, get_peft_model


pytest.importorskip("vllm", reason="vLLM is not installed")
from vllm_engines import engine, fresh, greedy, policy, update

from trl_quant.adapters import delta_weight
from trl_quant.formats import quantize
from trl_quant.rollout import weights
from trl_quant.rollout.vllm.support import unquantized_layers
from trl_quant.unified_flow import unify


pytestmark = pytest.mark.vllm
LORA = {"r": 4, "lora_alpha": 16, "target_modules": "all-linear", "init_lora_weights": False}


@pytest.mark.parametrize("lora", ["full", "merge", "adapter"])
def test_the_trainers_codes(tmp_path, lora):
    model = policy(tmp_path / "policy")
    if lora != "full":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            model = get_peft_model(model, LoraConfig(**LORA))
    unify(model, "int8", lora == "merge")
    sampler = engine(model, "int8", lora_sync="adapter" if lora == "adapter" else "merge", sync_check_steps=1)
    layers, seen = sampler.weights.unified("int8"), []
    assert len(layers) == 7 * model.config.num_hidden_layers
    for seed in range(2):
        update(model, seed=seed)
        sampler.sync_weights()
        seen.append(greedy(sampler.llm))
        if lora != "adapter":
            assert seen[-1] == greedy(fresh(model, "int8", tmp_path / f"checkpoint-{seed}"))
            sent = dict(sampler.stream())
            for name, layer in layers.items():
                assert sent[f"{name}.weight"] is layer.codes().values  # not quantized again
                assert sent[f"{name}.weight_scale"] is layer.codes().scale
                whole = sampler.weights.of_linear(layer)
                assert torch.equal(layer.codes().values, quantize(whole, "int8").values)
            assert not any(f"{name}.weight_scale" in sent for name in unquantized_layers(sampler.weights.base_model))
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
    assert len(merged) == 1 and not sampler.weights.unread
    assert part.keys() == whole.keys() and all(torch.equal(part[name], tensor) for name, tensor in whole.items())
