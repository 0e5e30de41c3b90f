"""The earlier path of the trainers, which live in `trainers/grpo.py`."""

from .trainers.grpo import AISGRPOTrainer, QuantGRPOTrainer


__all__ = ["AISGRPOTrainer", "QuantGRPOTrainer"]
