"""Adaptive quantization noise (AQN, QeRL): how much, when, and on which weights. Pure torch."""

from .gaussian import noised_norms, norm_noise
from .schedules import SCHEDULES, sigma, stage


__all__ = ["SCHEDULES", "noised_norms", "norm_noise", "sigma", "stage"]
