"""Adaptive quantization noise (AQN, QeRL): its size, its schedule and its weights. Pure torch."""

from .gaussian import noised_norms, norm_noise
from .schedules import SCHEDULES, sigma, stage


__all__ = ["SCHEDULES", "noised_norms", "norm_noise", "sigma", "stage"]
