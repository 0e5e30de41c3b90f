"""The configurations, and all checks that run before a model is loaded.

The checks come in three stages. When a configuration is built, each value is checked by itself (`values`), then the
fields against each other by rules (`checks`). When a trainer is built, its arguments and this machine are checked
before a model is loaded (`before_loading`). Importing the configurations loads neither engines nor trainers. That of
the asynchronous trainer is imported by itself (`async_grpo`): TRL keeps it in one package with its trainer, and warns.
"""

from .diffusion import DiffusionGRPOConfig
from .distillation import QuantDistillationConfig
from .grpo import AISGRPOConfig, QuantGRPOConfig
from .ppo import QuantPPOConfig
from .rloo import QuantRLOOConfig


__all__ = [
    "AISGRPOConfig",
    "DiffusionGRPOConfig",
    "QuantDistillationConfig",
    "QuantGRPOConfig",
    "QuantPPOConfig",
    "QuantRLOOConfig",
]
