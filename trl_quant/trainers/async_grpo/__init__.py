"""The asynchronous trainer, which samples while it trains: its sampler, its micro-batches, its correction."""

from .trainer import QuantAsyncGRPOTrainer


__all__ = ["QuantAsyncGRPOTrainer"]
