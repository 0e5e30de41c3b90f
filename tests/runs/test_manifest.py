"""
A checkpoint's files are tied: 200 flips and cuts of each file of each kind of run are found, so are files of another
step, and no resume from a damaged checkpoint ends in other weights than the unbroken run's.

    DAMAGED_RESUMES=5 python -m pytest tests/runs/test_manifest.py -k resume     # so many whole resumes of each kind
"""

import os
import random
import shutil
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import masked_policy
import pytest
import torch
from long_tests import rest_is_long
from peft import LoraConfig
from tiny import save_tiny, tiny_model
from training import Killed, config, dataset, killing, lora, make, metrics, parameters

from trl_quant import QuantGRPOConfig, QuantGRPOTrainer, QuantPPOConfig, QuantPPOTrainer
from trl_quant.runs import record
from trl_quant.runs.checkpoints import checkpoint_to_resume, damage_on_a_host
from trl_quant.storage.identity import MODEL_FILES
from trl_quant.storage.manifest import MANIFEST, damage, matches, names_in, read_manifest


RESUMES = int(os.environ.get("DAMAGED_RESUMES", "1"))
TRIALS = 200
SAVED = {"save_strategy": "steps", "save_steps": 1, "max_steps": 3}
# The first and the third checkpoint lie inside a generation
INSIDE = {"steps_per_generation": 2, "num_iterations": 1, "per_device_train_batch_size": 4, **SAVED}
BASE = {"num_hidden_layers": 1, "seed": 3}


def grpo(path, model=None, adapter: LoraConfig | None = None, **settings) -> QuantGRPOTrainer:
    args = config(QuantGRPOConfig, path, **INSIDE | settings)
    return make(QuantGRPOTrainer, args, model or tiny_model(**BASE), reward_funcs=killing(None), peft_config=adapter)


def ppo(path, base) -> QuantPPOTrainer:
    settings = INSIDE | {"rollout_precision": "int4", "num_generations": 1, "value_learning_rate": 3e-3}
    return make(QuantPPOTrainer, config(QuantPPOConfig, path, **settings), base, reward_funcs=killing(None))


def diffusion(path, base):
    return masked_policy.trainer(path, model=masked_policy.policy(num_hidden_layers=1), **INSIDE)


RUNS = {
    "grpo": lambda path, base: grpo(path, rollout_precision="int8", noise_schedule="linear"),
    "ppo": ppo,
    "lora": lambda path, base: grpo(path, base, lora(), rollout_precision="int4"),
    "qat": lambda path, base: grpo(path, train_precision="nvfp4"),
    "diffusion": diffusion,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> str:
    return save_tiny(tmp_path_factory.mktemp("base") / "model", **BASE)


@pytest.fixture(scope="module", params=rest_is_long(RUNS, "grpo", "ppo"))
def run(request, tmp_path_factory, base):
    """A function that builds the run's trainer, its directory, and its weights and log at the end."""
    path = tmp_path_factory.mktemp(request.param) / "run"
    trainer = RUNS[request.param](path, base)
    trainer.train()
    return partial(RUNS[request.param], base=base), path, weights(trainer), logged(trainer)


def weights(trainer) -> dict[str, torch.Tensor]:
    critic = getattr(trainer, "critic", None)
    of_critic = {} if critic is None else {f"critic {k}": v for k, v in critic.model.state_dict().items()}
    return parameters(trainer) | {name: value.clone() for name, value in of_critic.items()}


def logged(trainer) -> list[dict]:
    return [entry for entry in metrics(trainer) if "loss" in entry]


@contextmanager
def spoiled(file: Path, chance: random.Random):
    """Context in which a bit of a file is flipped, or its end is cut off."""
    place, bit = chance.randrange(file.stat().st_size), 1 << chance.randrange(8)
    is_cut = chance.random() < 0.25
    with file.open("r+b", buffering=0) as opened:
        opened.seek(place)
        end = opened.read() if is_cut else opened.read(1)
        opened.seek(place)
        opened.truncate() if is_cut else opened.write(bytes([end[0] ^ bit]))
        yield
        opened.seek(place)
        opened.write(end)


@pytest.mark.parametrize("run", rest_is_long(RUNS, "grpo"), indirect=True)
def test_each_flip_and_cut_of_each_file_is_found(run, tmp_path):
    _, path, *_ = run
    checkpoint = shutil.copytree(path / "checkpoint-1", tmp_path / "checkpoint-1")
    names, chance = [*names_in(checkpoint), MANIFEST], random.Random(0)
    assert {"trainer_state.json", "rollout_state.json", "scheduler.pt", "unfinished_generation_0.pt"} < set(names)
    assert read_manifest(checkpoint)["files"].keys() == {*names} - {MANIFEST}
    assert damage(checkpoint) is None
    for name in names:
        file = checkpoint / name
        whole, missed = file.read_bytes(), 0
        for _ in range(TRIALS):
            with spoiled(file, chance):
                missed += name not in str(damage(checkpoint, [name]))
        assert missed == 0 and file.read_bytes() == whole, name
        with spoiled(file, chance):
            assert name in damage(checkpoint)
        file.unlink()
        assert name == MANIFEST or f"{file} is missing" in damage(checkpoint)
        file.write_bytes(whole)
    assert damage(checkpoint) is None


def test_a_file_of_another_step_is_found(run, tmp_path):
    """Each file that differs between two checkpoints, and weights that a resume would read instead of the own ones."""
    _, path, *_ = run
    checkpoint, other = shutil.copytree(path / "checkpoint-3", tmp_path / "checkpoint-3"), path / "checkpoint-2"
    differing = [n for n in names_in(other) if (other / n).read_bytes() != _bytes(checkpoint / n)]
    assert any(matches(name, MODEL_FILES) for name in differing) and "optimizer.pt" in differing
    for name in differing:
        own = _bytes(checkpoint / name)
        shutil.copyfile(other / name, checkpoint / name)
        if own is not None or not name.startswith("unfinished"):  # which nothing reads where none was saved
            assert name in damage(checkpoint)
        (checkpoint / name).unlink() if own is None else (checkpoint / name).write_bytes(own)
    for name in ("model-00001-of-00002.safetensors", "sft/adapter_model.safetensors", "optimizer.bin"):
        (checkpoint / name).parent.mkdir(exist_ok=True)
        (checkpoint / name).touch()
        assert name in damage(checkpoint)
        (checkpoint / name).unlink()
    (checkpoint / "notes.txt").write_text("a user's")
    assert damage(checkpoint) is None


def _bytes(file: Path) -> bytes | None:
    return file.read_bytes() if file.is_file() else None


def test_a_resume_from_a_damaged_checkpoint(run, tmp_path, caplog):
    """By its path it is refused; `True` takes the one before and says so, and ends where the unbroken run did."""
    build, path, final, log = run
    chance = random.Random(0)
    names = names_in(path / "checkpoint-2")
    for trial, name in enumerate(chance.sample(names, min(RESUMES, len(names)))):
        mine = tmp_path / str(trial)
        for step in (1, 2):
            shutil.copytree(path / f"checkpoint-{step}", mine / f"checkpoint-{step}")
        file = mine / "checkpoint-2" / name
        spoil(file, chance)
        trainer = build(mine)
        with pytest.raises(ValueError, match=f"checkpoint-2.*{name}"):
            trainer.train(resume_from_checkpoint=str(mine / "checkpoint-2"))
        caplog.clear()
        trainer.train(resume_from_checkpoint=True)
        assert f"{file} " in caplog.text and "The run resumes from" in caplog.text
        assert logged(trainer) == log
        ended = weights(trainer)
        assert ended.keys() == final.keys() and all(torch.equal(ended[key], final[key]) for key in final), name


def spoil(file: Path, chance: random.Random) -> None:
    """Flips a bit of a file."""
    data = bytearray(file.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    file.write_bytes(data)


# One kind of run


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "run"
    grpo(path, max_steps=2).train()
    return path


@pytest.fixture
def copied(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "run")


def test_no_checkpoint_is_left(copied, caplog):
    """All are damaged: the refusal names a file of each."""
    for step in (1, 2):
        spoil(copied / f"checkpoint-{step}" / "training_args.bin", random.Random(1))
    with pytest.raises(ValueError, match=r"checkpoint-2/training_args\.bin.*checkpoint-1/training_args\.bin"):
        checkpoint_to_resume(str(copied))
    assert "checkpoint-2/training_args.bin" in damage_on_a_host(str(copied / "checkpoint-2"))


def test_a_checkpoint_of_an_older_version_resumes_with_a_line(copied, caplog):
    (copied / "checkpoint-2" / MANIFEST).unlink()
    spoil(copied / "checkpoint-1" / "optimizer.pt", random.Random(0))
    trainer = grpo(copied)
    trainer.save_model()  # with a manifest of its own, beside the checkpoints
    assert (copied / MANIFEST).is_file()
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 3
    assert "checkpoint-2 has no manifest.json, because an older version saved it" in caplog.text


def test_a_run_that_is_killed_between_manifest_and_trainer_state(tmp_path, monkeypatch):
    """The trainer state counts in the manifest, which is there first; without it the checkpoint is not whole."""
    trainer = grpo(tmp_path)
    replace = record.os.replace

    def killed(begun, path):
        if trainer.state.global_step == 2 and Path(path).name == "trainer_state.json":
            assert "trainer_state.json" in read_manifest(Path(path).parent)["files"]
            raise Killed
        replace(begun, path)

    monkeypatch.setattr(record.os, "replace", killed)
    with pytest.raises(Killed):
        trainer.train()
    assert (tmp_path / "checkpoint-2" / MANIFEST).is_file()
    assert checkpoint_to_resume(str(tmp_path)) == str(tmp_path / "checkpoint-1")


def test_the_best_model_is_read_as_it_was_saved(tmp_path):
    trainer = grpo(tmp_path)
    trainer.train()
    trainer.state.best_model_checkpoint = str(tmp_path / "checkpoint-2")
    spoil(tmp_path / "checkpoint-2" / "model.safetensors", random.Random(0))
    with pytest.raises(ValueError, match=r"`load_best_model_at_end`: .*checkpoint-2/model\.safetensors is"):
        trainer._load_best_model()


def test_a_manifest_is_of_the_run(saved):
    """What it names: all that decides what a resumed run computes, beside its settings."""
    found = read_manifest(saved / "checkpoint-2")["run"]
    assert found["adapters"] == [] and found["data"]["rows"] == len(dataset())
    assert found["ranks"] == {"processes": 1, "elsewhere": []}
    assert {"tokens", "chat_template"} == found["tokenizer"].keys()
