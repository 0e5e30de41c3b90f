"""The configurations, and all checks that run before a model is loaded.

The checks come in three stages. When a configuration is built, each value is checked by itself (`values`), then the
fields against each other by rules (`checks`). When a trainer is built, its arguments and this machine are checked
before a model is loaded (`before_loading`). Importing the configurations loads neither engines nor trainers; that of
the asynchronous trainer, which TRL keeps in one package with its trainer and warns of, is imported on first use.
"""

import importlib

from .diffusion import DiffusionGRPOConfig
from .distillation import QuantDistillationConfig
from .grpo import AISGRPOConfig, QuantGRPOConfig
from .ppo import QuantPPOConfig
from .rloo import QuantRLOOConfig


__all__ = [
    "AISGRPOConfig",
    "DiffusionGRPOConfig",
    "QuantAsyncGRPOConfig",
    "QuantDistillationConfig",
    "QuantGRPOConfig",
    "QuantPPOConfig",
    "QuantRLOOConfig",
]


def __getattr__(name: str):
    if name != "QuantAsyncGRPOConfig":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(".async_grpo", __name__).QuantAsyncGRPOConfig
