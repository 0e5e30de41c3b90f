"""Partial rollouts with vLLM in the process: what it leaves unfinished goes on, also in a run that was killed."""

import pytest
import torch
from tiny import save_tiny
from training import Killed, dataset, killing, metrics, parameters, trainer_for


pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm_engines import COLOCATED, keep

from trl_quant import QuantGRPOTrainer


pytestmark = pytest.mark.vllm
ENDS = [*range(0, 320, 13)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("model"), seed=3, dtype=torch.bfloat16)


def built(path, model, kill_at=None, **given):
    settings = COLOCATED | {
        "rollout_precision": "int8",
        "rollouts_in_flight": 2.0,
        "max_completion_length": 24,
        "max_steps": 4,
    }
    settings |= {"per_device_train_batch_size": 4, "num_generations": 2, "save_strategy": "steps", "save_steps": 1}
    settings |= {"generation_kwargs": {"stop_token_ids": ENDS}, "reward_funcs": killing(kill_at)}
    trainer = trainer_for(path, model, QuantGRPOTrainer, **settings | {"train_dataset": dataset(8)} | given)
    keep(trainer)
    return trainer


def test_a_killed_run_resumes_with_the_bits_of_an_unbroken_one(tmp_path, model):
    """Asleep between two generations, when it holds nothing."""
    whole = built(tmp_path / "whole", model, vllm_enable_sleep_mode=False)
    room = whole.vllm_generation.sampler.vllm.max_num_seqs
    whole.train()
    logs = [log for log in metrics(whole) if "loss" in log]
    assert room == 2 * 4 and sum(log["rollouts/carried"] for log in logs) > 0
    assert max(log["rollouts/age_max"] for log in logs) > 0 and not whole.pool.groups
    with pytest.raises(Killed):
        built(tmp_path / "broken", model, kill_at=3).train()
    resumed = built(tmp_path / "broken", model)
    resumed.train(resume_from_checkpoint=True)
    again = [log for log in metrics(resumed) if "loss" in log]
    # A resumed process checks its first sync too
    again = [{name: value for name, value in log.items() if name in before} for log, before in zip(again, logs)]
    assert again == logs
    mine, theirs = parameters(resumed), parameters(whole)
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_tokens_are_those_of_the_weights_that_sampled_them(tmp_path, model):
    """In BF16, new tokens differ from the policy by rounding alone. Older ones also differ by the updates since."""
    given = {"rollout_precision": "bf16", "learning_rate": 0.05, "optim": "sgd", "max_grad_norm": 0.0}
    trainer = built(tmp_path, model, save_strategy="no", max_steps=6, num_train_epochs=2, **given)
    trainer.train()
    logs = [log for log in metrics(trainer) if "loss" in log]
    young = [log["mismatch/by_age/0"] for log in logs if "mismatch/by_age/0" in log]
    old = [log["mismatch/by_age/1"] for log in logs if "mismatch/by_age/1" in log]
    assert young and old and max(young) < 1e-3 < max(old)
