"""The earlier module of the trainers, which are now in `trainers/grpo.py`."""

from .trainers.grpo import AISGRPOTrainer, QuantGRPOTrainer


__all__ = ["AISGRPOTrainer", "QuantGRPOTrainer"]
