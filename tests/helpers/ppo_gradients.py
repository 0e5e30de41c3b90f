"""Policies and critics of PPO for the tests, and how far two tensors lie apart."""

import torch
from training import UnevenLengths, config, make

from trl_quant import QuantPPOConfig, QuantPPOTrainer


class Uneven(UnevenLengths, QuantPPOTrainer):
    """Completions of several lengths."""


def ppo(path, models, kind=QuantPPOTrainer, given=None, **settings):
    settings = {"rollout_precision": "int4", "max_steps": 2, "value_learning_rate": 1e-3} | settings
    args = config(QuantPPOConfig, path / "out", **{"num_generations": 1} | settings)
    return make(kind, args, model=models["policy"], **given or {})


def set_head(trainer) -> None:
    """Gives a value head on the policy's layers values that differ."""
    score = trainer.critic.model.score
    with torch.no_grad():
        score.weight.copy_(torch.randn(1, 128, generator=torch.Generator().manual_seed(1)) / 8)
        score.bias.fill_(0.25)


def distance(left, right) -> float:
    return ((left - right).norm() / right.norm()).item()
