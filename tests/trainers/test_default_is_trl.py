"""With defaults, our trainers are TRL's: every logged metric and every parameter, bit for bit."""

import random

import numpy as np
import pytest
import torch
from long_tests import rest_is_long
from tiny import save_tiny, tiny_model
from training import assert_same_run, config, dataset, lora, make, metrics, parameters, spread
from trl import GRPOConfig, GRPOTrainer

from trl_quant import AISGRPOConfig, AISGRPOTrainer, QuantGRPOConfig, QuantGRPOTrainer


LOSSES = ["grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo"]
OPTIONS = {
    "peft": {},
    "num_iterations": {"num_iterations": 2},
    "accumulation": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
    "several_steps_per_generation": {"per_device_train_batch_size": 4, "steps_per_generation": 2},
    "sequence_level": {"importance_sampling_level": "sequence", "loss_type": "grpo", "num_iterations": 2},
    "reference_model": {"beta": 0.1},
    "mixed_precision": {"bf16": True, "gradient_checkpointing": True},
    "evaluation": {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 8},
}


def run(trainer_class, args, peft=False, **kwargs):
    trainer = make(trainer_class, args, peft_config=lora() if peft else None, **kwargs)
    trainer.train()
    return trainer


@pytest.fixture
def model_dir(tmp_path):
    return save_tiny(tmp_path / "model", seed=3)


# The others differ in what they divide by
@pytest.mark.parametrize("loss_type", rest_is_long(LOSSES, "luspo", "cispo", "sapo", "vespo"))
def test_every_loss(tmp_path, loss_type):
    level = {"importance_sampling_level": "sequence"} if loss_type == "luspo" else {}
    theirs = run(GRPOTrainer, config(GRPOConfig, tmp_path / "trl", loss_type=loss_type, **level))
    ours = run(QuantGRPOTrainer, config(QuantGRPOConfig, tmp_path / "ours", loss_type=loss_type, **level))
    assert_same_run(ours, theirs)
    assert len(metrics(theirs)) == 6
    start = dict(tiny_model(seed=3).named_parameters())
    assert any(not torch.equal(start[name], value) for name, value in parameters(theirs).items())


@pytest.mark.parametrize(
    "option",
    rest_is_long(OPTIONS, "peft", "several_steps_per_generation", "sequence_level", "mixed_precision", "evaluation"),
)
def test_every_option(tmp_path, model_dir, option):
    kwargs = {
        "peft": option == "peft",
        "model": model_dir,
        "eval_dataset": dataset(2) if option == "evaluation" else None,
    }
    theirs = run(GRPOTrainer, config(GRPOConfig, tmp_path / "trl", **OPTIONS[option]), **kwargs)
    ours = run(QuantGRPOTrainer, config(QuantGRPOConfig, tmp_path / "ours", **OPTIONS[option]), **kwargs)
    assert_same_run(ours, theirs)


def test_plain_config_is_taken(tmp_path):
    theirs = run(GRPOTrainer, config(GRPOConfig, tmp_path / "trl"))
    args = config(GRPOConfig, tmp_path / "plain")
    ours = run(QuantGRPOTrainer, args)
    assert_same_run(ours, theirs)
    assert type(args) is GRPOConfig and not hasattr(args, "rollout_precision")  # the user's object is unchanged


def test_no_config_is_taken(tmp_path, model_dir, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # TRL's defaults ask for BF16, which transformers allows only on a GPU
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)
    trainers = [cls(model_dir, spread, train_dataset=dataset()) for cls in (GRPOTrainer, QuantGRPOTrainer)]
    theirs, ours = (trainer.args.to_dict() for trainer in trainers)
    assert {name: ours[name] for name in theirs if name != "logging_dir"} == {
        name: value for name, value in theirs.items() if name != "logging_dir"
    }
    assert ours["is_correction"] == "trl"
    ais = AISGRPOTrainer(model_dir, spread, train_dataset=dataset())
    assert (ais.args.is_correction, ais.args.scale_rewards, ais.scale_rewards) == ("ais", "none", "none")


def test_ais_without_a_quantized_rollout_is_unnormalised_grpo(tmp_path):
    theirs = run(GRPOTrainer, config(GRPOConfig, tmp_path / "trl", scale_rewards="none", loss_type="grpo"))
    ours = run(AISGRPOTrainer, config(AISGRPOConfig, tmp_path / "ours"))
    assert_same_run(ours, theirs)
    assert metrics(run(GRPOTrainer, config(GRPOConfig, tmp_path / "scaled"))) != metrics(ours)


def test_after_a_resume(tmp_path):
    saving = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    pairs = ((GRPOTrainer, GRPOConfig), (QuantGRPOTrainer, QuantGRPOConfig))
    for trainer_class, config_class in pairs:
        run(trainer_class, config(config_class, tmp_path / trainer_class.__name__, **saving))
    resumed = []
    for trainer_class, config_class in pairs:
        out = tmp_path / trainer_class.__name__
        trainer = make(trainer_class, config(config_class, out, **saving))
        trainer.train(resume_from_checkpoint=str(out / "checkpoint-2"))
        resumed.append(trainer)
    assert_same_run(*resumed)


def test_construction_draws_no_random_number(tmp_path):
    states = []
    for trainer_class, config_class in ((GRPOTrainer, GRPOConfig), (QuantGRPOTrainer, QuantGRPOConfig)):
        make(trainer_class, config(config_class, tmp_path))
        states.append((torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()))
    assert torch.equal(states[0][0], states[1][0])
    assert states[0][1:] == states[1][1:]
