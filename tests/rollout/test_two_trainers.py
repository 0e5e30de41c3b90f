"""One trainer after another on one model: each samples from what it trains, in its own precision."""

import pytest
import torch
from changes import (
    move,
)
from long_tests import rest_is_long
from stale import OWN, adapted, both_engines, policy_of, sampled_from, trainer_of
from tiny import tiny_model
from training import assert_same_run
from transformers import set_seed


def policies(peft: bool):
    return adapted() if peft else tiny_model(seed=3)


@pytest.mark.parametrize("peft", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("second", [None, "fp8"])
def test_a_second_trainer_in_another_precision(tmp_path, peft, second):
    """It computes as on a fresh model, and trains so; the first one says that the model is not its own any more."""
    model, settings = policies(peft), {"train_precision": second, "rollout_precision": second}
    first = trainer_of(tmp_path / "first", model, train_precision="int8", rollout_precision=None)
    unified = policy_of(first)
    trainer = trainer_of(tmp_path / "second", model, **settings)
    fresh = trainer_of(tmp_path / "fresh", policies(peft), **settings)
    assert torch.equal(policy_of(trainer), policy_of(fresh)) and not torch.equal(policy_of(trainer), unified)
    if second is None:
        assert [type(module) for module in model.modules()] == [type(module) for module in policies(peft).modules()]
    else:
        assert torch.equal(sampled_from(trainer), policy_of(trainer))
    with pytest.raises(ValueError, match="`train_precision`='int8', but a trainer that was built later"):
        first.train()
    for each in (trainer, fresh):
        set_seed(7)
        each.train()
    assert_same_run(trainer, fresh)


def test_a_first_trainer_whose_model_was_unified_since(tmp_path):
    model = tiny_model(seed=3)
    first = trainer_of(tmp_path / "first", model)
    trainer_of(tmp_path / "second", model, train_precision="int8", rollout_precision=None)
    with pytest.raises(ValueError, match="`train_precision`=None, but a trainer that was built later"):
        first.evaluate(first.train_dataset)


@pytest.mark.parametrize("data", rest_is_long([True, False]), ids=["data", "counted"])
@both_engines
def test_two_trainers_in_turn(tmp_path, settings, data):
    """Each samples what the other one trained, and what was edited between them."""
    model = tiny_model(seed=3)
    trainers = [trainer_of(tmp_path / name, model, **settings) for name in ("a", "b")]
    seen = []
    for turn in range(4):
        trainer = trainers[turn % 2]
        move(model, 0.05, seed=turn, data=data)
        sampled = [sampled_from(each) for each in trainers]
        assert torch.equal(*sampled) and all(not torch.equal(sampled[0], before) for before in seen)
        if settings == OWN:
            assert torch.equal(sampled[0], policy_of(trainer))
        seen.append(sampled[0])
        trainer.train()


@pytest.mark.parametrize("settings", [{}, {"rollout_precision": "int8"}, {"train_precision": "int8"}])
def test_a_second_trainer_on_a_frozen_base(tmp_path, settings):
    """The 16-bit weights are gone."""
    model = adapted()
    trainer_of(tmp_path, model, rollout_precision=None, train_precision="nvfp4")
    with pytest.raises(ValueError, match="but the policy's base is held in 'nvfp4', and its 16-bit weights are gone"):
        trainer_of(tmp_path, model, **{"rollout_precision": None} | settings)
    again = trainer_of(tmp_path, model, rollout_precision=None, train_precision="nvfp4")
    assert torch.equal(sampled_from(again), policy_of(again))
