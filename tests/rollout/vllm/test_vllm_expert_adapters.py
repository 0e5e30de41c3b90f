"""LoRA on experts and routers in vLLM, in BF16: an engine that merges it equals a fresh one after each sync."""

import pytest
import torch
from long_tests import rest_is_long
from peft import LoraConfig, get_peft_model
from tiny import MIXTURES
from training import config, make


pytest.importorskip("vllm", reason="vLLM is not installed")
from vllm_engines import COLOCATED, engine, fresh, greedy, keep, policy, update

from trl_quant import QuantGRPOConfig, QuantGRPOTrainer


pytestmark = pytest.mark.vllm
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.mark.parametrize("family", rest_is_long(MIXTURES, "qwen3_moe"))
def test_three_syncs_leave_the_bits_of_a_fresh_engine(family, tmp_path):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        given = {"target_modules": ["q_proj"], "target_parameters": EXPERTS}
        if family == "mixtral":
            given = {"target_modules": "all-linear"}  # routers too
        adapter = LoraConfig(r=4, init_lora_weights=False, **given)
        model = get_peft_model(policy(tmp_path / "model", family=family, tied=False), adapter)
    sampler = engine(model, "bf16")
    seen = []
    for seed in range(3):
        update(model, seed=seed)
        sampler.sync()
        seen.append(greedy(sampler.llm))
        assert seen[-1] == greedy(fresh(model, "bf16", tmp_path / f"checkpoint-{seed}"))
        sampler.check_sync()
    assert len({str(samples) for samples in seen}) == 3
    with torch.no_grad():  # an adapter of one expert that the engine does not have
        wrapper = next(m for name, m in model.named_modules() if name.endswith("layers.1.mlp.experts"))
        wrapper.lora_A["default"].weight.view(4, 4, -1)[2] *= 2
    assert sampler.differing_weight() == "model.layers.1.mlp.experts.down_proj[2]"


def test_grpo_trains_adapters_of_experts(tmp_path):
    args = config(
        QuantGRPOConfig,
        tmp_path / "out",
        **COLOCATED,
        rollout_precision="bf16",
        max_steps=3,
        max_completion_length=16,
        learning_rate=1e-3,
        sync_check_steps=1,
    )
    path = policy(tmp_path / "model", family="qwen3_moe").name_or_path
    adapter = LoraConfig(r=4, target_modules=["q_proj"], target_parameters=EXPERTS)
    trainer = make(QuantGRPOTrainer, args, model=path, peft_config=adapter)
    keep(trainer)
    before = {name: param.detach().clone() for name, param in trainer.model.named_parameters() if "lora_B" in name}
    trainer.train()
    logs = [log for log in trainer.state.log_history if "mismatch/kl_k3" in log]
    assert len(logs) == 3 and all(log["mismatch/kl_k3"] < 0.01 for log in logs)
    now = dict(trainer.model.named_parameters())
    assert all(not torch.equal(now[name], value) for name, value in before.items()) and len(before) == 6
