"""The configurations, and every check that runs before a model is loaded. Importing them loads no engine or trainer."""

from .grpo import AISGRPOConfig, QuantGRPOConfig


__all__ = ["AISGRPOConfig", "QuantGRPOConfig"]
