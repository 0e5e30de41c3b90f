"""Short runs that train in a precision, for the tests: in 8 bits (unified), or all weights in 4 bits (QAT)."""

import torch
from training import lora, trainer_for

from trl_quant.layers import UnifiedLinear


def trainer_of(path, precision: str | None = "nvfp4", model=None, peft=False, **given):
    torch.manual_seed(0)  # of adapters
    settings = {"train_precision": precision, "max_steps": 3, "peft_config": lora() if peft else None}
    return trainer_for(path, model, **settings | given)


def layers_of(model) -> dict[str, UnifiedLinear]:
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, UnifiedLinear)}


def mismatches(trainer) -> list[float]:
    """The KL divergence of policy and sampler, at each step."""
    found = [entry["mismatch/kl_k3"] for entry in trainer.state.log_history if "mismatch/kl_k3" in entry]
    assert len(found) == trainer.args.max_steps
    return found
