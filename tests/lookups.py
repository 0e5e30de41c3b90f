"""
What libraries look up again and again, though no process of the tests can change it: a tenth of a run of a tiny model.

Each trainer asks accelerate a dozen times whether PEFT and DeepSpeed are installed, which reads and parses their
metadata, and each seed is put down, with the stack of its caller, for each kind of device that there might be later.
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
