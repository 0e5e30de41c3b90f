"""
Engines at the shapes of Qwen2.5-7B, through the trainers, against engines that vLLM itself starts on the trained
weights.

    python3 -m pytest -m "gpu and large" -s tests/gpu/test_7b_gpu.py

Each test takes about two minutes and up to 70 GiB of a GPU. `-s` shows what each self-check found.
"""

import pytest
import torch
from tiny import FAMILIES, save_tiny, tiny_tokenizer
from training import config, dataset, lora, make
from transformers import AutoConfig, AutoModelForCausalLM


pytest.importorskip("vllm", reason="vLLM is not installed")
from vllm_engines import GPU_RUN, SMALL, fresh, greedy, keep

from trl_quant.trainers.launch import TRAINERS


pytestmark = [pytest.mark.gpu, pytest.mark.vllm, pytest.mark.large]
SHAPE = {
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
}
# The trainer, the precision in which its copy samples and it trains, its settings, whether it trains an adapter alone
RUNS = {
    "rloo": ("rloo", "fp8", {}, True),
    "ppo": ("ppo", "fp8", {"num_generations": 1, "value_learning_rate": 1e-3}, True),
    "qat": ("grpo", "nvfp4", {"optim": "adafactor"}, False),  # AdamW's states would not fit
}


def random_policy(path) -> torch.nn.Module:
    """Builds a BF16 policy of random weights, norms and biases among them, and saves its configuration at `path`."""
    shape = FAMILIES["qwen2"][0](**SHAPE, tie_word_embeddings=False, eos_token_id=257, pad_token_id=256)
    shape.architectures = ["Qwen2ForCausalLM"]
    shape.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def reward(completion_ids, **kwargs) -> list[float]:
    return [float(sum(ids) % 11) for ids in completion_ids]


@pytest.mark.parametrize("name", RUNS)
def test_live_equals_fresh(tmp_path, name):
    """Two generations, then the tokens and log-probabilities of a fresh engine, bit for bit."""
    method, precision, settings, adapted = RUNS[name]
    policy = random_policy(tmp_path / "model")
    settings = GPU_RUN | settings | {"rollout_precision": precision, "train_precision": precision}
    settings |= {"vllm_engine_kwargs": SMALL | {"load_format": "dummy"}, "max_steps": 2, "sync_check_steps": 1}
    if method == "ppo":
        settings["value_model_name_or_path"] = save_tiny(
            tmp_path / "critic", family="qwen2", dtype=torch.bfloat16, vocab_size=SHAPE["vocab_size"]
        )
    kind = TRAINERS[method]
    args = config(kind.config_class, tmp_path / "out", **settings)
    peft_config = lora(r=32, lora_alpha=64) if adapted else None
    trainer = make(kind, args, model=policy, train_dataset=dataset(16), reward_funcs=reward, peft_config=peft_config)
    keep(trainer)
    sampler = trainer.vllm_generation.engine
    sampler.sync()
    first = greedy(sampler.llm)
    trainer.train()

    checks = [log for log in trainer.state.log_history if "sync_check/bound" in log]
    for log in checks:
        difference, bound = log["sync_check/logp_difference"], log["sync_check/bound"]
        print(f"{name:>5} step {log['step']}: difference {difference:.5f}, bound {bound:.5f}")
    assert len(checks) == 2
    trainer.check_sync()
    last = greedy(sampler.llm)
    assert last == greedy(fresh(trainer.model, precision, tmp_path / "fresh", prepared=True, device="cuda"))
    assert last != first
