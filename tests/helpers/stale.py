"""What an engine samples from, and what a fresh one would, for the tests that it is never stale."""

from functools import partial

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import tiny_model
from training import trainer_for


IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12]])


def adapted(seed: int = 3, **settings):
    """A policy with two adapters that do something."""
    torch.manual_seed(seed)
    lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False, **settings)
    model = get_peft_model(tiny_model(seed=seed), lora)
    model.add_adapter("other", lora)
    return model


trainer_of = partial(trainer_for, rollout_precision="int8", max_steps=1)


def sampled_from(trainer) -> torch.Tensor:
    """The log-probabilities of the engine that a generation would sample from."""
    with torch.no_grad(), trainer.generation():
        return trainer.vllm_generation.engine.copy(IDS).logits.log_softmax(-1)


def policy_of(trainer) -> torch.Tensor:
    with torch.no_grad():
        return trainer.model.eval()(IDS).logits.log_softmax(-1)


COPY = {"rollout_precision": "int8"}
OWN = {"rollout_precision": None, "train_precision": "int8"}
both_engines = pytest.mark.parametrize("settings", [COPY, OWN], ids=["copy", "own"])
