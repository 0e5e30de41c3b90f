"""Reinforcement learning for language models with quantized rollouts: drop-in subclasses of TRL's trainers."""

import importlib


__version__ = "0.1.0"

# name -> module. Loaded when asked for: TRL loads vLLM where it is installed, and `formats` needs torch alone.
_PUBLIC = {
    "AISGRPOConfig": ".config",
    "AISGRPOTrainer": ".trainer",
    "QuantGRPOConfig": ".config",
    "QuantGRPOTrainer": ".trainer",
}

__all__ = [*_PUBLIC, "__version__"]


def __getattr__(name: str):
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name], __name__), name)


def __dir__() -> list[str]:
    return __all__
