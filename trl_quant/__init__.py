"""Reinforcement learning for language models with quantized rollouts: drop-in subclasses of TRL's trainers."""

import importlib


__version__ = "0.2.0"

# name -> module. Loaded on first use: TRL loads vLLM where it is installed, and `formats` needs only torch
_PUBLIC = {
    "AISGRPOConfig": ".config",
    "AISGRPOTrainer": ".trainers.grpo",
    "DiffusionGRPOConfig": ".config",
    "DiffusionGRPOTrainer": ".trainers.diffusion",
    "QuantAsyncGRPOConfig": ".config.async_grpo",
    "QuantAsyncGRPOTrainer": ".trainers.async_grpo",
    "QuantDistillationConfig": ".config",
    "QuantDistillationTrainer": ".trainers.distillation",
    "QuantGRPOConfig": ".config",
    "QuantGRPOTrainer": ".trainers.grpo",
    "QuantPPOConfig": ".config",
    "QuantPPOTrainer": ".trainers.ppo",
    "QuantRLOOConfig": ".config",
    "QuantRLOOTrainer": ".trainers.rloo",
    "choose_precision": ".trainers.choice",
}

__all__ = [*_PUBLIC, "__version__"]


def __getattr__(name: str):
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_PUBLIC[name], __name__), name)
    except (ImportError, RuntimeError) as error:  # TRL raises a RuntimeError where it cannot import a trainer
        raise blamed(error) from error


def blamed(error: Exception) -> Exception:
    """Returns the error, or one that names torchvision if that is the cause. transformers' message does not."""
    cause = error
    while cause is not None:
        if "torchvision" in str(cause):
            return ImportError(
                f"torchvision cannot be imported, and transformers needs it wherever it is installed: {cause}. It is "
                "of another build than torch (such as one for CUDA beside torch for CPUs): install the build that "
                "matches torch, or uninstall it."
            )
        cause = cause.__cause__ or cause.__context__
    return error


def __dir__() -> list[str]:
    return __all__
