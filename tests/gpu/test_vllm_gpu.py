"""vLLM engines on a GPU, through each trainer, against engines that vLLM itself starts on the trained weights.

    python3 -m pytest -m gpu -s tests/gpu/test_vllm_gpu.py

About two minutes per precision, and one per precision and further trainer. `-s` shows what each self-check found.
"""

import math

import pytest
import torch
from peft import LoraConfig
from tiny import save_tiny
from training import config, dataset, make, trainer_for
from transformers import AutoModelForCausalLM, TrainerCallback


pytest.importorskip("vllm", reason="vLLM is not installed")
from vllm.lora.request import LoRARequest
from vllm_engines import GPU_MODEL, GPU_RUN, SLEEPING, SMALL, engine, fresh, greedy, keep, policy, score, update

from trl_quant import QuantDistillationTrainer, QuantGRPOConfig, QuantGRPOTrainer, QuantPPOTrainer, QuantRLOOTrainer
from trl_quant.precisions import in_vllm
from trl_quant.rollout.vllm.support import supported_precisions


pytestmark = [pytest.mark.gpu, pytest.mark.vllm]


@pytest.fixture(params=in_vllm())
def precision(request):
    if missing := supported_precisions()[request.param]:
        pytest.skip(missing)
    return request.param


class SleepLevel(TrainerCallback):
    """Sleeps at level 2 after the first steps and at level 1 after the others."""

    def on_step_end(self, args, state, control, **kwargs):
        self.trainer.vllm_generation.engine.sleep_level = 2 if state.global_step < 2 else 1


def trained(tmp_path, precision, sleeping, steps=4, **kwargs):
    path = save_tiny(
        tmp_path / "model", tied=kwargs.pop("tied", False), dtype=torch.bfloat16, family="qwen2", **GPU_MODEL
    )
    lora_sync = kwargs.pop("lora_sync", "merge")
    args = config(
        QuantGRPOConfig,
        tmp_path / "out",
        **GPU_RUN,
        rollout_precision=precision,
        lora_sync=lora_sync,
        vllm_enable_sleep_mode=sleeping,
        vllm_sleep_level=1 if lora_sync == "adapter" else 2,
        vllm_engine_kwargs=SLEEPING if sleeping else SMALL,
        max_steps=steps,
        learning_rate=1e-3,
        sync_check_steps=2,
    )
    trainer = make(QuantGRPOTrainer, args, model=path, train_dataset=dataset(16), **kwargs)
    if sleeping and lora_sync == "merge":
        callback = SleepLevel()
        callback.trainer = trainer
        trainer.add_callback(callback)
    trainer.train()
    keep(trainer)
    checks = [log for log in trainer.state.log_history if "sync_check/bound" in log]
    for log in checks:
        difference, bound = log["sync_check/logp_difference"], log["sync_check/bound"]
        print(f"{precision:>10} step {log['step']}: difference {difference:.5f}, bound {bound:.5f}")
    assert len(checks) >= (2 if not sleeping else steps)
    return trainer


def awake(trainer):
    """The engine with the policy's weights of now."""
    trainer.vllm_generation.sync_weights()
    trainer.vllm_generation.check_sync()  # the engine's own, after which it stays awake
    return trainer.vllm_generation.engine


@pytest.mark.parametrize("sleeping", [False, True], ids=["awake", "sleeping"])
def test_training_ends_with_a_fresh_engine(tmp_path, precision, sleeping):
    """Full fine-tuning; sleeping at level 2, then at level 1."""
    trainer = trained(tmp_path, precision, sleeping, tied=sleeping)
    sampler = awake(trainer)
    assert greedy(sampler.llm) == greedy(fresh(trainer.model, precision, tmp_path / "fresh"))


def test_merged_lora_ends_with_a_fresh_engine(tmp_path, precision):
    trainer = trained(tmp_path, precision, False, peft_config=adapter())
    assert greedy(awake(trainer).llm) == greedy(fresh(trainer.model, precision, tmp_path / "fresh"))


def adapter():
    return LoraConfig(r=16, lora_alpha=64, target_modules="all-linear", init_lora_weights=False)


@pytest.mark.parametrize("sleeping", [False, True], ids=["awake", "sleeping"])
def test_adapter_sync(tmp_path, precision, sleeping):
    """As good as the adapter from files, which the adapter of a step before fails tenfold."""
    trainer = trained(tmp_path, precision, sleeping, lora_sync="adapter", peft_config=adapter())
    sampler = awake(trainer)
    before = score(sampler.llm)
    update(trainer.model, seed=0, size=0.05)
    sampler.sync()
    sampler.check_sync()
    ours = score(sampler.llm)
    trainer.model.save_pretrained(tmp_path / "adapter")
    base = fresh(
        AutoModelForCausalLM.from_pretrained(tmp_path / "model"),  # in BF16, as the engine loaded it
        precision,
        tmp_path / "base",
        enable_lora=True,
        max_lora_rank=16,
        lora_target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    )
    theirs = score(base, lora_request=LoRARequest("policy", 1, str(tmp_path / "adapter")))
    error, moved = (ours - theirs).abs().mean().item(), (ours - before).abs().mean().item()
    print(f"{precision:>10} adapter: error {error:.5f}, the one before {moved:.5f}")
    assert moved > 10 * error


PPO = {"num_generations": 1, "value_learning_rate": 1e-3}
SHARED = {"num_generations": 1, "vf_share_layers": True, "vf_coef": 0.5}  # a value head on the policy's layers
UPDATES = {"per_device_train_batch_size": 4, "steps_per_generation": 2, "num_iterations": 2}  # four a generation
# Beside GRPO: the trainer, its settings, and its updates on a generation
TRAINERS = {
    "ppo": (QuantPPOTrainer, PPO, 1),
    "ppo-updates": (QuantPPOTrainer, PPO | UPDATES, 4),
    "ppo-shared": (QuantPPOTrainer, SHARED, 1),
    "rloo": (QuantRLOOTrainer, {}, 1),
    "distillation": (QuantDistillationTrainer, {}, 1),
}


def critic_of(trainer) -> dict[str, torch.Tensor]:
    """The critic's weights; none of a trainer without a critic."""
    if not hasattr(trainer, "critic"):
        return {}
    return {name: param.detach().clone() for name, param in trainer.critic.model.named_parameters()}


@pytest.mark.parametrize("precision", ["fp8", "int8"])
@pytest.mark.parametrize("name", TRAINERS)
def test_each_trainer_ends_with_a_fresh_engine(tmp_path, precision, name):
    """Three generations with a correction and a self-check each. PPO's critic is trained with them."""
    if missing := supported_precisions()[precision]:
        pytest.skip(missing)
    kind, settings, updates = TRAINERS[name]
    model = save_tiny(tmp_path / "model", tied=False, dtype=torch.bfloat16, family="qwen2", **GPU_MODEL)
    settings = settings | GPU_RUN | {"rollout_precision": precision, "vllm_engine_kwargs": SMALL}
    settings |= {"is_correction": "tis", "sync_check_steps": 1, "max_steps": 3 * updates}
    settings |= {"learning_rate": 1e-3 / updates}
    trainer = trainer_for(tmp_path / "out", model, kind, train_dataset=dataset(32), **settings)
    keep(trainer)
    first = greedy(fresh(trainer.model, precision, tmp_path / "first"))
    critic = critic_of(trainer)
    trainer.train()

    logs = [log for log in trainer.state.log_history if "loss" in log]
    checks = [log for log in logs if "sync_check/bound" in log]
    for log in checks:
        difference, bound = log["sync_check/logp_difference"], log["sync_check/bound"]
        kl = log["mismatch/kl_k3"]
        print(f"{precision:>10} {name} step {log['step']}: difference {difference:.5f}, bound {bound:.5f}, KL {kl:.2e}")
    assert [log["step"] for log in checks] == [1, 1 + updates, 1 + 2 * updates]
    assert all(log["mismatch/kl_k3"] > 0 and log["mismatch/unscored_fraction"] == 0 for log in checks)
    assert all(math.isfinite(log["loss"]) for log in logs)
    assert greedy(awake(trainer).llm) == greedy(fresh(trainer.model, precision, tmp_path / "last")) != first

    assert bool(critic) == name.startswith("ppo")
    for parameter, value in critic_of(trainer).items():
        assert value.isfinite().all(), parameter
        assert value.ndim == 1 or not torch.equal(value, critic[parameter]), parameter
    if critic:
        assert all(math.isfinite(log["value/loss"]) and log["value/grad_norm"] > 0 for log in logs)


def test_faults_are_found(tmp_path, precision):
    model = policy(tmp_path / "policy", tied=False, family="qwen2", **GPU_MODEL).cuda()
    sampler = engine(model, precision, sync_check_steps=1)
    print(f"{precision:>10} first check: {sampler.check_sync()}")
    update(model, seed=0, size=1e-3)
    with pytest.raises(RuntimeError, match="stale"):
        sampler.check_sync()
    sampler.sync()
    sampler.check_sync()
    sampler.llm.apply_model(lambda m: m.model.layers[3].post_attention_layernorm.weight.data.zero_())
    sampler.llm.reset_prefix_cache()
    with pytest.raises(RuntimeError, match="corrupted"):
        sampler.check_sync()
