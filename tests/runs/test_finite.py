"""NaN and infinity: the run stops at that step, and the last good checkpoint stays, from which it can go on."""

import functools
import re
from functools import partial
from importlib.util import find_spec

import pytest
import torch
from broken import Broken
from long_tests import rest_is_long
from ranks import on_two_ranks, results
from safetensors.torch import load_file
from tiny import save_tiny
from training import assert_same_run, config, make, parameters, trainer_for
from trl import GRPOConfig, GRPOTrainer

from trl_quant import AISGRPOConfig, AISGRPOTrainer, QuantGRPOConfig, QuantGRPOTrainer


SETTINGS = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1, "max_steps": 4}
KINDS = {"embedded": {"rollout_precision": "int8"}, "plain": {}}


trainer_of = partial(trainer_for, **SETTINGS)


def holds(path, step: int) -> None:
    """One checkpoint is left, that of `step`, with finite numbers alone."""
    assert [checkpoint.name for checkpoint in path.glob("checkpoint-*")] == [f"checkpoint-{step}"]
    weights = load_file(path / f"checkpoint-{step}/model.safetensors")
    optimizer = torch.load(path / f"checkpoint-{step}/optimizer.pt", weights_only=True)
    tensors = [*weights.values(), *(v for state in optimizer["state"].values() for v in state.values())]
    assert all(tensor.isfinite().all() for tensor in tensors)


def as_unbroken(trainer, path, **options) -> None:
    """The trainer's weights are those of a run that nothing stopped."""
    whole = trainer_of(path, **options)
    whole.train()
    expected = parameters(whole)
    assert all(weight.equal(expected[name]) for name, weight in parameters(trainer).items())


@pytest.mark.parametrize("max_grad_norm", rest_is_long([1.0, 0.0]))
@pytest.mark.parametrize("value", rest_is_long([torch.inf, torch.nan]))
@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_that_is_not_finite(tmp_path, kind, value, max_grad_norm):
    """The optimizer does not take it: the weights are those before the step, and a resume goes on as if unbroken."""
    options = KINDS[kind] | {"max_grad_norm": max_grad_norm}
    broken = trainer_of(tmp_path / "run", callbacks=[Broken(3, value)], **options)
    with pytest.raises(RuntimeError, match=r"Step 3 is not finite.*checkpoint-2; continue with `train\(resume"):
        broken.train()
    holds(tmp_path / "run", 2)
    saved = load_file(tmp_path / "run/checkpoint-2/model.safetensors")
    assert all(weight.equal(saved[name]) for name, weight in parameters(broken).items())
    resumed = trainer_of(tmp_path / "run", **options)
    resumed.train(resume_from_checkpoint=True)
    as_unbroken(resumed, tmp_path / "whole", **options)


@pytest.mark.parametrize("place", ["gradient", "weight"])
@pytest.mark.parametrize("strategy", ["steps", "no"])
def test_at_the_last_step(tmp_path, place, strategy):
    broken = trainer_of(tmp_path, callbacks=[Broken(4, place=place)], save_strategy=strategy)
    with pytest.raises(RuntimeError, match="not finite"):
        broken.train()
    if strategy == "steps":
        holds(tmp_path, 3)


@pytest.mark.parametrize("place", ["weight", "optimizer"])
def test_what_comes_by_another_way_is_not_saved(tmp_path, place):
    named = {"weight": "`model.embed_tokens.weight` is", "optimizer": "the optimizer's 'exp_avg_sq' of parameter 0 is"}
    with pytest.raises(RuntimeError, match=rf"^{named[place]} not finite after step 3\. .*checkpoint-2; continue"):
        trainer_of(tmp_path, callbacks=[Broken(3, place=place)]).train()
    holds(tmp_path, 2)


def test_a_loss_that_the_log_would_hide(tmp_path, monkeypatch):
    """transformers logs the average of the losses before in its place (`logging_nan_inf_filter`)."""
    broken = trainer_of(tmp_path, gradient_accumulation_steps=2, per_device_train_batch_size=4)
    compute, calls = broken.compute_loss, []

    def overflows(*args, **kwargs):  # with a gradient of zero, and in the first of two micro-batches
        calls.append(1)
        loss = compute(*args, **kwargs)
        return loss + torch.inf if len(calls) == 5 else loss

    monkeypatch.setattr(broken, "compute_loss", overflows)
    assert broken.args.logging_nan_inf_filter
    with pytest.raises(RuntimeError, match=r"Step 3 is not finite: its loss is inf, the norm of its gradient [0-9]"):
        broken.train()
    holds(tmp_path, 2)


def test_the_same_trainer_goes_on(tmp_path):
    """In the process that failed, with nothing left of the step."""
    breaking = Broken(3)
    broken = trainer_of(tmp_path / "run", callbacks=[breaking])
    with pytest.raises(RuntimeError, match="Step 3 is not finite"):
        broken.train()
    breaking.handle.remove()
    broken.remove_callback(breaking)
    broken.train(resume_from_checkpoint=True)
    as_unbroken(broken, tmp_path / "whole")


def test_an_infinite_advantage_with_ais(tmp_path, monkeypatch):
    broken = make(AISGRPOTrainer, config(AISGRPOConfig, tmp_path, rollout_precision="int8", **SETTINGS))
    score, calls = broken._generate_and_score_completions, []

    def scored(inputs):
        output = score(inputs)
        calls.append(1)
        if len(calls) == 3:
            output["advantages"][0] = torch.inf
        return output

    monkeypatch.setattr(broken, "_generate_and_score_completions", scored)
    with pytest.raises(RuntimeError, match="Step 3 is not finite"):
        broken.train()
    holds(tmp_path, 2)


def test_a_loss_scaler_skips_by_itself(tmp_path):
    """The step is skipped, as in TRL, and the run goes on."""
    trainers = []
    for trainer_class, config_class in ((QuantGRPOTrainer, QuantGRPOConfig), (GRPOTrainer, GRPOConfig)):
        args = config(config_class, tmp_path, **SETTINGS | {"save_strategy": "no"})
        trainer = make(trainer_class, args, callbacks=[Broken(2)])
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
        trainer.train()
        assert trainer.state.global_step == 4 and trainer.accelerator.scaler.get_scale() == 1.0
        trainers.append(trainer)
    ours, theirs = map(parameters, trainers)
    assert all(weight.isfinite().all() and weight.equal(theirs[name]) for name, weight in ours.items())


def test_a_healthy_run_is_trl_s(tmp_path, monkeypatch):
    ours = trainer_of(tmp_path / "ours")
    ours.train()
    theirs = make(GRPOTrainer, config(GRPOConfig, tmp_path / "theirs", **SETTINGS))
    theirs.train()
    assert_same_run(ours, theirs)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What both ranks found, of one launch of each configuration."""

    @functools.cache
    def launched(configuration: str) -> list[dict]:
        path = tmp_path_factory.mktemp(configuration)
        save_tiny(path / "model", "qwen2", dtype=torch.bfloat16)
        return results(path, CASE, on_two_ranks(configuration, path, CASE))

    return launched


CASE = "broken-int8-full"


@pytest.mark.slow
@pytest.mark.parametrize("place", ["gradient", "loss", "weight"])
@pytest.mark.parametrize("configuration", rest_is_long(["ddp", "fsdp2", "zero3"]))
def test_all_ranks_stop_together(found, configuration, place):
    """Of what breaks on the second one alone; the first one's checkpoint is the one of the step before."""
    if configuration.startswith("zero") and not find_spec("deepspeed"):
        pytest.skip("deepspeed is not installed")
    for rank in found(configuration):
        said = rank[place]
        assert "not finite" in said["error"] and "checkpoint-1; continue with" in said["error"]
        assert said["steps"] == (2 if place == "weight" else 1)
        assert said["checkpoints"] == ["checkpoint-1"] and said["finite"]


@pytest.mark.parametrize("name", ["model.norm.weight", "model.embed_tokens.weight"])
def test_a_policy_that_is_broken_is_blamed_by_name(tmp_path, name):
    trainer = make(QuantGRPOTrainer, config(QuantGRPOConfig, tmp_path, rollout_precision="int8"))
    trainer.model.get_parameter(name).data.view(-1)[3] = float("nan")
    trainer.model.model.layers[1].input_layernorm.weight.data[0] = float("inf")  # not the first, if it is a norm's
    first = name if "embed" in name else "model.layers.1.input_layernorm.weight"
    with pytest.raises(
        RuntimeError, match=f"failed at step 0: the policy's `{re.escape(first)}` holds NaN or infinity"
    ):
        trainer._generate(["a"] * 4)
