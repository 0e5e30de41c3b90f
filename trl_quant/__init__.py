"""Reinforcement learning for language models with quantized rollouts: drop-in subclasses of TRL's trainers."""

from .config import AISGRPOConfig, QuantGRPOConfig
from .trainer import AISGRPOTrainer, QuantGRPOTrainer


__version__ = "0.1.0"

__all__ = ["AISGRPOConfig", "AISGRPOTrainer", "QuantGRPOConfig", "QuantGRPOTrainer", "__version__"]
