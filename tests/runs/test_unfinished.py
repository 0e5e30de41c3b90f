"""A run that resumes inside a generation goes on with what is left of it, or samples a new one and says so."""

import pytest
import torch
from long_tests import rest_is_long
from resumes import SETTINGS, metrics, trainer_of
from tiny import save_tiny
from training import Killed, config, dataset, make, parameters

from trl_quant import QuantGRPOConfig, QuantGRPOTrainer
from trl_quant.storage.manifest import MANIFEST


def same_run(one, other) -> bool:
    mine, theirs = parameters(one), parameters(other)
    return metrics(one) == metrics(other) and all(torch.equal(mine[name], theirs[name]) for name in theirs)


INSIDE = {"save_steps": 1, "save_total_limit": None}


@pytest.mark.parametrize(
    ("options", "steps"),
    rest_is_long(
        [
            ({"num_iterations": 3}, (1, 2, 4)),
            ({"num_iterations": 3, "is_correction": "trm"}, (2,)),
            ({"steps_per_generation": 2, "per_device_train_batch_size": 4}, (1, 2)),
            ({"steps_per_generation": 2, "per_device_train_batch_size": 4, "is_correction": "dppo"}, (1,)),
            ({"steps_per_generation": 4, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}, (1,)),
            ({"num_iterations": 3, "train_precision": "int8", "rollout_precision": None, "peft": True}, (2,)),
        ]
    ),
    ids=["updates", "updates scored in the loss", "parts", "parts scored in the loss", "accumulated", "unified"],
)
def test_a_resume_inside_a_generation(tmp_path, options, steps):
    """Trains on the samples that the checkpoint holds, and samples the next ones when an unbroken run does."""
    whole = trainer_of(tmp_path, prompts=16, **INSIDE, **options)
    whole.train()
    generated = [entry["step"] for entry in metrics(whole) if "num_tokens" in entry]
    assert 1 < len(generated) < 6
    for step in steps:
        is_inside = step + 1 not in generated
        assert (tmp_path / f"checkpoint-{step}/unfinished_generation_0.pt").is_file() == is_inside
        resumed = trainer_of(tmp_path, prompts=16, **INSIDE, **options)
        resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert same_run(resumed, whole)


def warned(caplog) -> bool:
    return "lies inside a generation that this run cannot continue" in caplog.text


@pytest.mark.parametrize("damage", rest_is_long(["cut", "gone"]))
def test_a_generation_that_is_lost(tmp_path, caplog, damage):
    """The run samples anew where the checkpoint ends, for as many updates as always, and says so."""
    options = {"num_iterations": 3, "prompts": 16, **INSIDE}
    whole = trainer_of(tmp_path, **options)
    whole.train()
    path = tmp_path / "checkpoint-1/unfinished_generation_0.pt"
    (path.parent / MANIFEST).unlink()  # as of an older version
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:500])
    resumed = trainer_of(tmp_path, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert warned(caplog) and not same_run(resumed, whole)
    assert [entry["step"] for entry in metrics(resumed) if "num_tokens" in entry] == [1, 2, 5]


@pytest.mark.parametrize(
    ("changed", "generates"),
    [
        ({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}, [3, 6]),
        pytest.param({"num_iterations": 2}, [3, 5], marks=pytest.mark.long),
        ({"beta": 0.1, "peft": True}, [3, 6]),  # its batches need a column that the samples do not have
        ({"is_correction": "trm", "resume_with_changes": True}, [3, 6]),
    ],
)
def test_a_generation_of_another_run(tmp_path, caplog, changed, generates):
    options = {"num_iterations": 3, "prompts": 16, "is_correction": "tis", **INSIDE, "peft": "peft" in changed}
    trainer_of(tmp_path, max_steps=2, **options).train()
    resumed = trainer_of(tmp_path, **options | changed)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert warned(caplog)
    assert [entry["step"] for entry in metrics(resumed) if "num_tokens" in entry][1:] == generates


def test_a_checkpoint_between_two_generations_of_another_schedule(tmp_path, caplog):
    """Nothing is lost, whatever the number of updates is now."""
    trainer_of(tmp_path, prompts=16, max_steps=3, **INSIDE).train()
    resumed = trainer_of(tmp_path, prompts=16, num_iterations=2, **INSIDE)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert not warned(caplog)
    assert [entry["step"] for entry in metrics(resumed) if "num_tokens" in entry] == [1, 2, 3, 4, 6]


@pytest.mark.parametrize("updates", rest_is_long([3, 1]))
def test_a_resume_from_a_step_that_was_evaluated(tmp_path, updates):
    """The evaluation has synced already; what that sync measured belongs to the generation that comes next."""
    options = {"prompts": 16, "num_iterations": updates, "eval_strategy": "steps", "eval_steps": 1, **INSIDE}

    def evaluated():
        args = config(QuantGRPOConfig, tmp_path, **SETTINGS | {k: v for k, v in options.items() if k != "prompts"})
        return make(QuantGRPOTrainer, args, train_dataset=dataset(16), eval_dataset=dataset(8))

    def trained(trainer):
        return [{k: v for k, v in e.items() if not k.startswith("eval_")} for e in metrics(trainer) if "loss" in e]

    whole = evaluated()
    whole.train()
    resumed = evaluated()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert trained(resumed) == trained(whole)
    assert all(entry["weights/codes_changed"] > 0 for entry in trained(whole)[1:] if "num_tokens" in entry)


def test_a_trainer_that_resumes_after_an_error(tmp_path):
    """Its engine holds other weights than the checkpoint, and its metrics those of the broken step."""
    whole = trainer_of(tmp_path / "whole", save_steps=1)
    whole.train()
    broken = trainer_of(tmp_path / "broken", kill_at=5, save_steps=1)
    with pytest.raises(Killed):
        broken.train()
    broken.reward_funcs = whole.reward_funcs
    broken.train(resume_from_checkpoint=str(tmp_path / "broken/checkpoint-2"))
    assert same_run(broken, whole)


def test_a_synced_reference_is_not_in_a_checkpoint(tmp_path, caplog):
    options = {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 2, "model": save_tiny(tmp_path / "model")}
    trainer_of(tmp_path, max_steps=3, **options).train()
    assert "hold no reference model" not in caplog.text
    trainer_of(tmp_path, **options).train(resume_from_checkpoint=True)
    assert "checkpoints hold no reference model" in caplog.text


def test_what_an_older_run_left_of_a_generation(tmp_path):
    """Is deleted where the checkpoint of a newer one lies between two generations."""
    (left := tmp_path / "checkpoint-3").mkdir()
    (left / "unfinished_generation_0.pt").write_bytes(b"left")
    trainer_of(tmp_path, max_steps=3).train()
    assert (left / "trainer_state.json").is_file() and not (left / "unfinished_generation_0.pt").exists()
