"""
Keeps what libraries look up again and again, though no test changes it. It takes a tenth of the time of a tiny run.

Each trainer asks accelerate a dozen times whether PEFT and DeepSpeed are installed, and each time their metadata is
read and parsed. For each seed, torch records the caller's stack once for every kind of device that is absent.
"""

import functools
from importlib import metadata

import torch


def remember() -> None:
    """Keeps what was read of the packages that are installed, and seeds no device that is absent."""
    if not hasattr(metadata.metadata, "cache_info"):
        metadata.metadata = functools.cache(metadata.metadata)
    for device in (torch.cuda, torch.xpu, torch.mtia):
        if not device.is_available():
            device.manual_seed_all = lambda seed: None
