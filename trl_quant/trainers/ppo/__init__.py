"""
PPO: the policy's trainer, the critic, and the arithmetic between the two.

| file | idea |
|---|---|
| [`~trainers.ppo.trainer`] | GRPO's trainer, with the critic's advantages |
| [`~trainers.ppo.gae`] | advantages, their whitening, and the critic's loss |
| [`~trainers.ppo.critic`] | a value head on a trunk, its optimizer and its checkpoints |
| [`~trainers.ppo.value_head`] | the critic that shares the policy's trunk |
"""

from .trainer import QuantPPOTrainer


__all__ = ["QuantPPOTrainer"]
