"""`benchmarks/update.py`: each kind of update trains a policy whose layers compute as its name says."""

import sys

import pytest
from places import BENCHMARKS

from trl_quant.layers import FrozenExperts, FrozenLinear, UnifiedExperts, UnifiedLinear


LAYERS = (UnifiedLinear, FrozenLinear, UnifiedExperts, FrozenExperts)


@pytest.fixture
def update(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import update

    return update


@pytest.mark.parametrize(
    "kind, size, layers",
    [
        ("bf16", "tiny", set()),
        ("fp8", "tiny-moe", {UnifiedLinear, UnifiedExperts}),
        ("fp8/adapter", "tiny-moe", {FrozenLinear, FrozenExperts}),
    ],
)
def test_a_kind_is_what_it_says(update, monkeypatch, kind, size, layers):
    trained = []

    def train(trainer):
        trained.append(trainer)
        (steps,) = (each for each in trainer.callback_handler.callbacks if isinstance(each, update.Steps))
        steps.seconds = [1.0]

    monkeypatch.setattr(update.QuantUpdates, "train", train)
    monkeypatch.setattr(sys, "argv", ["update.py", "--one", kind, "--sizes", size, "--tokens", "128"])
    update.main()
    (trainer,) = trained
    assert {type(module) for module in trainer.model.modules() if isinstance(module, LAYERS)} == layers
    trains = {name for name, param in trainer.model.named_parameters() if param.requires_grad}
    assert trains and all("lora_" in name for name in trains)
