"""A killed run resumes as if unbroken: six steps equal three, a kill and three; only whole checkpoints count."""

import json
import os
import shutil
import time
from functools import partial

import numpy as np
import pytest
import torch
from peft import LoraConfig
from resumes import SETTINGS, metrics, trainer_of
from safetensors.torch import load_file, save_file
from training import Killed, config, killed_and_resumed, make, parameters
from transformers import TrainerCallback

from trl_quant import QuantGRPOConfig, QuantGRPOTrainer, QuantPPOConfig, QuantRLOOConfig
from trl_quant.runs import checkpoints, own_directory
from trl_quant.runs.checkpoints import checkpoint_to_resume, tell_changes, write_rollout_state
from trl_quant.storage import run_checkpoints
from trl_quant.storage.manifest import MANIFEST
from trl_quant.storage.run_checkpoints import last_complete_checkpoint, read_rollout_state


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"uaq_scale": 1.5}, marks=pytest.mark.long),
        pytest.param({"peft": True}, marks=pytest.mark.long),
        pytest.param(
            {"peft": True, "train_precision": "nvfp4", "rollout_precision": None, "dynamic_sampling_rounds": 1},
            marks=pytest.mark.long,
        ),
        {"train_precision": "fp8_block", "rollout_precision": None},
        pytest.param({"peft": True, "train_precision": "int8", "rollout_precision": None}, marks=pytest.mark.long),
        pytest.param(
            {"train_precision": "nvfp4", "rollout_precision": None}, marks=[pytest.mark.isa, pytest.mark.long]
        ),
        pytest.param({"num_iterations": 2, "max_steps": 8, "save_steps": 4}, marks=pytest.mark.long),
        pytest.param({"prompts": 4}, marks=pytest.mark.long),
        pytest.param({"prompts": 2}, marks=pytest.mark.long),
    ],
    ids=[
        "plain",
        "uaq",
        "lora",
        "frozen base",
        "unified",
        "unified lora",
        "qat",
        "iterations",
        "second epoch",
        "fourth epoch",
    ],
)
def test_killed_and_resumed_equals_unbroken(tmp_path, options):
    kill_at = 3 if "num_iterations" in options else 5  # a generation in the second half
    whole, resumed = killed_and_resumed(partial(trainer_of, **options), tmp_path, kill_at)
    assert metrics(resumed) == metrics(whole)
    mine, theirs = parameters(resumed), parameters(whole)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    assert len({entry["noise/sigma"] for entry in metrics(whole) if "noise/sigma" in entry}) == 3
    start = parameters(trainer_of(tmp_path / "start", **options))
    assert any(not torch.equal(theirs[name], value) for name, value in start.items())


def test_a_resume_with_another_scaling_is_refused(tmp_path):
    trainer_of(tmp_path, uaq_scale=1.5, max_steps=3).train()
    with pytest.raises(ValueError, match=r"uaq_scale.*1\.5.*None"):
        trainer_of(tmp_path).train(resume_from_checkpoint=True)


def test_a_checkpoint_from_before_a_field_existed(tmp_path):
    """It was trained with the field's default, and resumes; another value is refused."""
    trainer_of(tmp_path, max_steps=3).train()
    path = tmp_path / "checkpoint-3" / "rollout_state.json"
    state = json.loads(path.read_text())
    del state["settings"]["dynamic_sampling_rounds"], state["settings"]["train_precision"]
    path.write_text(json.dumps(state))
    (path.parent / MANIFEST).unlink()
    with pytest.raises(ValueError, match="`dynamic_sampling_rounds`: 0 -> 1"):
        trainer_of(tmp_path, dynamic_sampling_rounds=1).train(resume_from_checkpoint=True)
    resumed = trainer_of(tmp_path)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 6


class Snapshots(TrainerCallback):
    """The weights of the linear layers as each step begins, which are those of its sync."""

    def __init__(self):
        self.taken: list[torch.Tensor] = []

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        own = [param.detach().flatten().double() for name, param in model.named_parameters() if "_proj.weight" in name]
        self.taken.append(torch.cat(own))


def test_the_total_update_goes_on_from_the_start_of_the_run(tmp_path, caplog):
    """Against copies of all weights, and after a resume bit for bit; an older checkpoint says what is missing."""
    name, seen = "weights/normalized_total_update", Snapshots()
    whole = trainer_of(tmp_path)
    whole.add_callback(seen)
    whole.train()
    totals = [entry.get(name) for entry in metrics(whole)]
    start = seen.taken[0]
    assert totals[0] is None
    assert totals[1:] == pytest.approx([((w - start).norm() / start.norm()).item() for w in seen.taken[1:]], rel=1e-5)
    resumed = trainer_of(tmp_path)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert [entry.get(name) for entry in metrics(resumed)] == totals and "not known" not in caplog.text
    since_resume = ((seen.taken[5] - seen.taken[3]).norm() / seen.taken[3].norm()).item()
    assert totals[5] > 1.1 * since_resume > 0

    for file in ("initial_weights.pt", MANIFEST):
        (tmp_path / "checkpoint-3" / file).unlink()
    older = trainer_of(tmp_path)
    older.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert [entry.get(name) for entry in metrics(older)] == [*totals[:3], None, None, None]
    assert "initial_weights.pt" in caplog.text and f"`{name}` is not logged" in caplog.text


@pytest.mark.parametrize("name", checkpoints.SAMPLED_WEIGHTS)
def test_sampled_weights_that_are_not_whole_are_refused(tmp_path, name):
    trainer_of(tmp_path, max_steps=3).train()
    path = tmp_path / "checkpoint-3" / f"{name}.pt"
    (path.parent / MANIFEST).unlink()
    for damaged in (path.read_bytes()[:100], b"x"):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=rf"{name}\.pt is damaged or incomplete"):
            trainer_of(tmp_path).train(resume_from_checkpoint=True)


def test_only_whole_checkpoints_count(tmp_path):
    whole = trainer_of(tmp_path, save_steps=2)
    whole.train()
    assert last_complete_checkpoint(tmp_path).endswith("checkpoint-6")
    (tmp_path / "checkpoint-6" / "trainer_state.json").write_text('{"log_history": [')  # the disk was full
    assert last_complete_checkpoint(tmp_path).endswith("checkpoint-4")
    (tmp_path / "checkpoint-4" / "trainer_state.json").unlink()  # killed while saving
    assert last_complete_checkpoint(tmp_path).endswith("checkpoint-2")
    resumed = trainer_of(tmp_path, save_steps=2)
    resumed.train(resume_from_checkpoint=True)
    assert metrics(resumed) == metrics(whole)
    assert json.loads((tmp_path / "checkpoint-6" / "trainer_state.json").read_text())["global_step"] == 6
    assert last_complete_checkpoint(tmp_path / "nothing") is None


def test_a_full_disk_leaves_the_last_checkpoint(tmp_path, monkeypatch):
    trainer = trainer_of(tmp_path, save_steps=2, save_total_limit=1)
    save = trainer._save_optimizer_and_scheduler

    def full_disk(output_dir):
        if trainer.state.global_step == 4:
            raise OSError(28, "No space left on device")
        save(output_dir)

    monkeypatch.setattr(trainer, "_save_optimizer_and_scheduler", full_disk)
    with pytest.raises(OSError, match="No space"):
        trainer.train()
    assert last_complete_checkpoint(tmp_path).endswith("checkpoint-2")
    resumed = trainer_of(tmp_path, save_steps=2, save_total_limit=1)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 6


def test_a_crash_of_the_engine_leaves_the_last_checkpoint_and_names_the_step(tmp_path, monkeypatch):
    trainer = trainer_of(tmp_path, save_steps=2)
    generate = trainer.vllm_generation.engine.copy.generate

    def crash(*args, **kwargs):
        if trainer.state.global_step == 3:
            raise RuntimeError("device lost")
        return generate(*args, **kwargs)

    monkeypatch.setattr(trainer.vllm_generation.engine.copy, "generate", crash)
    with pytest.raises(RuntimeError, match=r"step 3.*checkpoint-2.*device lost"):
        trainer.train()
    resumed = trainer_of(tmp_path, save_steps=2)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 6


def test_a_checkpoint_that_was_written_over_in_part_does_not_count(tmp_path, monkeypatch):
    """A run that resumed from an earlier one is killed after it wrote new weights beside the old optimizer."""
    trainer_of(tmp_path, save_steps=2, max_steps=4).train()
    again = trainer_of(tmp_path, save_steps=2, max_steps=4, max_grad_norm=0.1)
    old = load_file(tmp_path / "checkpoint-4" / "model.safetensors")

    def killed(output_dir):
        raise Killed

    monkeypatch.setattr(again, "_save_optimizer_and_scheduler", killed)
    with pytest.raises(Killed):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    new = load_file(tmp_path / "checkpoint-4" / "model.safetensors")
    assert any(not torch.equal(new[name], old[name]) for name in old)
    assert checkpoint_to_resume(tmp_path) == str(tmp_path / "checkpoint-2")


def test_a_setting_of_numpy_is_recorded(tmp_path):
    """As a sweep gives it. It is the same setting as Python's number."""
    given = {"noise_stages": np.int64(3), "noise_sigma_start": np.float32(0.01), "learning_rate": np.float32(1e-3)}
    trainer_of(tmp_path, max_steps=3, **given).train()
    settings = read_rollout_state(tmp_path / "checkpoint-3")["settings"]
    assert settings["noise_stages"] == 3 and settings["noise_sigma_start"] == float(np.float32(0.01))
    resumed = trainer_of(tmp_path, max_steps=4, **given)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 4


# Which checkpoints a run goes on from


PARTS = {"optimizer.pt": "optimizer", "scheduler.pt": "scheduler", "rng_state.pth": "random state"}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of two steps."""
    path = tmp_path_factory.mktemp("run") / "run"
    trainer_of(path, max_steps=2, save_steps=1).train()
    return path


@pytest.fixture
def copied(run, tmp_path):
    """The run, for a test to change: without manifests, as of an older version."""
    return shutil.copytree(run, tmp_path / "run", ignore=lambda *_: [MANIFEST])


@pytest.mark.parametrize("damage", ["missing", "empty", "half"])
@pytest.mark.parametrize("name", PARTS)
def test_a_checkpoint_without_its_state_is_not_resumed(copied, name, damage):
    """It falls back to the one before, and says what lacks; its weights can still be served."""
    file = copied / "checkpoint-2" / name
    whole = file.read_bytes()
    file.unlink() if damage == "missing" else file.write_bytes(whole[: len(whole) // 2 if damage == "half" else 0])
    assert run_checkpoints.last_to_resume(copied) == str(copied / "checkpoint-1")
    assert checkpoint_to_resume(copied) == str(copied / "checkpoint-1")
    assert last_complete_checkpoint(copied) == str(copied / "checkpoint-2")
    said = rf"checkpoint-2' lacks its {PARTS[name]}\. The last whole checkpoint is .*checkpoint-1"
    with pytest.raises(ValueError, match=said):
        checkpoints.check_whole(str(copied / "checkpoint-2"))
    (copied / "checkpoint-1" / name).unlink()
    assert "checkpoint-2 holds a model, but lacks its " + PARTS[name] in run_checkpoints.how_to_go_on(str(copied))
    file.write_bytes(whole)
    assert checkpoint_to_resume(copied) == str(copied / "checkpoint-2")


def test_one_ranks_broken_state_is_seen_beside_the_others(copied):
    """As a host that was killed while it saved leaves it, when the other host's files are copied beside its own."""
    newest = copied / "checkpoint-2"
    (newest / "rng_state_0.pth").write_bytes((newest / "rng_state.pth").read_bytes())
    assert checkpoint_to_resume(copied) == str(newest)
    (newest / "rng_state_1.pth").touch()
    assert checkpoint_to_resume(copied) == str(copied / "checkpoint-1")
    with pytest.raises(ValueError, match="checkpoint-2' lacks its random state"):
        checkpoints.check_whole(str(newest))


def test_a_checkpoint_of_another_trainer_is_not_resumed(copied):
    """RLOO's loss and PPO's critic are not GRPO's; a subclass of a config is the same trainer's."""

    class OwnConfig(QuantGRPOConfig):
        """A user's."""

    def check(kind, **changes):
        args = config(kind, copied, **SETTINGS | changes)
        return checkpoints.check_resume(str(copied / "checkpoint-2"), args, None)

    assert check(OwnConfig)["settings"]["config"] == "QuantGRPOConfig"
    for kind in (QuantRLOOConfig, QuantPPOConfig):
        with pytest.raises(ValueError, match=f"`config`: 'QuantGRPOConfig' -> '{kind.__name__}'"):
            check(kind)
    assert check(QuantRLOOConfig, resume_with_changes=True)


@pytest.mark.parametrize("saved", [True, False])
def test_a_checkpoint_of_another_adapter_is_not_resumed(saved, tmp_path):
    """Its weights would not fit, or as with `lora_alpha` would mean others."""
    trainer_of(tmp_path, peft=saved, max_steps=1, save_steps=1).train()
    given = {"target_modules": "all-linear", "r": 4, "lora_alpha": 16}
    for change, says in (
        (None, "holds an adapter, and this run trains all weights"),
        ({"r": 2}, "`r`: 4 -> 2"),
        ({"lora_alpha": 8, "use_rslora": True}, "`lora_alpha`: 16 -> 8, `use_rslora`: False -> True"),
        ({"target_modules": ["q_proj"]}, r"`target_modules`: \['model.layers.0.mlp.down_proj'.* -> \['q_proj'\]"),
    ):
        adapter = None if change is None else LoraConfig(task_type="CAUSAL_LM", **given | change)
        args = config(QuantGRPOConfig, tmp_path, **SETTINGS | {"max_steps": 2})
        trainer = make(QuantGRPOTrainer, args, peft_config=adapter)
        if saved or adapter is not None:
            says = says if saved else "holds a whole model, and this run trains an adapter"
            with pytest.raises(ValueError, match=says):
                trainer.train(resume_from_checkpoint=True)
    trainer_of(tmp_path, peft=saved, max_steps=2).train(resume_from_checkpoint=True)


def test_a_checkpoint_of_weights_alone_is_resumed_with_a_warning(tmp_path, caplog):
    trainer_of(tmp_path, save_only_model=True, max_steps=3).train()
    assert not (tmp_path / "checkpoint-3/optimizer.pt").exists()
    resumed = trainer_of(tmp_path, save_only_model=True, max_steps=4)
    resumed.train(resume_from_checkpoint=True)
    assert "was saved with `save_only_model`: optimizer, learning rate schedule and random state" in caplog.text
    assert resumed.state.global_step == 4


@pytest.mark.parametrize(
    "lost", ["model-00002-of-00003.safetensors", "model.safetensors.index.json", "half", "elsewhere"]
)
def test_a_missing_shard_falls_back(copied, lost):
    checkpoint = copied / "checkpoint-2"
    weights = load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    names, index = sorted(weights), {}
    for i in range(3):
        file = f"model-{i + 1:05d}-of-00003.safetensors"
        save_file({name: weights[name] for name in names[i::3]}, checkpoint / file)
        index |= dict.fromkeys(names[i::3], file)
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert checkpoint_to_resume(copied).endswith("checkpoint-2")
    if lost == "half":
        os.truncate(checkpoint / "model-00002-of-00003.safetensors", 900)
    elif lost == "elsewhere":
        text = json.dumps({"weight_map": index | {names[0]: "../nowhere.safetensors"}})
        (checkpoint / "model.safetensors.index.json").write_text(text)
    else:
        (checkpoint / lost).unlink()
    assert checkpoint_to_resume(copied).endswith("checkpoint-1")
    assert last_complete_checkpoint(copied).endswith("checkpoint-1")


def test_half_an_adapter_falls_back(tmp_path):
    trainer_of(tmp_path, peft=True, max_steps=2, save_steps=1).train()
    assert checkpoint_to_resume(tmp_path).endswith("checkpoint-2")
    os.truncate(tmp_path / "checkpoint-2/adapter_model.safetensors", 100)
    assert checkpoint_to_resume(tmp_path).endswith("checkpoint-1")


def test_rotation_goes_by_steps(tmp_path):
    """A clock that went back after the first checkpoint makes the newer ones look older."""
    trainer_of(tmp_path, max_steps=2, save_steps=2, save_total_limit=2).train()
    later = time.time() + 1e6
    os.utime(tmp_path / "checkpoint-2", (later, later))
    trainer_of(tmp_path, max_steps=6, save_steps=2, save_total_limit=2).train(resume_from_checkpoint=True)
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-6"]


@pytest.mark.parametrize(
    ("steps", "step", "limit", "best", "left"),
    [
        ([2, 4, 6], 6, None, None, [2, 4, 6]),
        ([2, 4, 6], 6, 0, None, [2, 4, 6]),
        ([2, 4, 6], 6, 3, None, [2, 4, 6]),
        ([2, 4, 6], 6, 1, None, [6]),
        ([2, 4, 6], 6, 1, 2, [2, 6]),
        ([2, 4, 6], 6, 2, 2, [2, 6]),
        ([8, 9, 10, 11], 11, 2, None, [10, 11]),  # not in the order of names
        ([2, 4, 9], 4, 2, None, [2, 4]),  # 9 was not whole, and the run resumed at 2
        ([2, 4, 9], 4, 1, None, [4]),
    ],
)
def test_what_a_rotation_deletes(tmp_path, steps, step, limit, best, left):
    for number in steps:
        write_rollout_state(tmp_path / f"checkpoint-{number}", {"runs": ["a", "b"] if number > 2 else ["a"]})
    kept = {"checkpoint-best", "checkpoint-best-2", "checkpoint-1"}
    (tmp_path / "checkpoint-best").mkdir()
    write_rollout_state(tmp_path / "checkpoint-best-2", {"runs": ["a"]})  # a copy that the user keeps
    write_rollout_state(tmp_path / "checkpoint-1", {"runs": ["other"]})
    own_directory.rotate(tmp_path, step, limit, best and str(tmp_path / f"checkpoint-{best}"), ["a", "b"])
    found = {path.name for path in tmp_path.iterdir()}
    assert found == kept | {f"checkpoint-{number}" for number in left}


def test_a_copy_by_another_name_is_not_resumed(copied):
    shutil.copytree(copied / "checkpoint-1", copied / "checkpoint-before-the-change-9")
    assert checkpoint_to_resume(copied) == str(copied / "checkpoint-2")
    assert last_complete_checkpoint(copied) == str(copied / "checkpoint-2")


def test_another_runs_higher_checkpoint_is_not_taken(tmp_path, caplog):
    """Two runs in one directory: the one that got further is no continuation of the other, and loses nothing to it."""
    trainer_of(tmp_path, max_steps=4, save_steps=2).train()
    assert "of an earlier run" not in caplog.text
    trainer_of(tmp_path, max_steps=3, save_steps=1, save_total_limit=1, learning_rate=1e-3).train()
    assert "holds the checkpoint checkpoint-4 of an earlier run. Name another directory" in caplog.text
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-3", "checkpoint-4"]
    resumed = trainer_of(tmp_path, max_steps=6, save_steps=1)
    with pytest.raises(ValueError, match=r"several runs: checkpoint-3 \(run \w+\), checkpoint-4 \(run \w+\)"):
        resumed.train(resume_from_checkpoint=True)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert resumed.state.global_step == 6


@pytest.mark.parametrize(
    ("runs", "several"),
    [
        ({2: ["a"], 4: ["a"]}, False),
        ({2: ["a"], 4: ["a", "b"], 6: ["a", "b", "c"]}, False),
        ({2: None, 4: ["a"]}, False),  # of an older version, resumed
        ({2: None, 4: None}, False),
        ({2: ["a"], 10: None}, True),
        ({2: ["a"], 4: ["b"]}, True),
        ({2: ["b"], 4: ["a"]}, True),
        ({4: ["a"], 5: ["a", "b"], 6: ["a"]}, True),  # a branch
    ],
)
def test_whose_checkpoints_they_are(copied, runs, several):
    source = copied / "checkpoint-2"
    state = json.loads((source / "rollout_state.json").read_text())
    directory = copied.parent / "shared"
    for step, names in runs.items():
        shutil.copytree(source, directory / f"checkpoint-{step}")
        rest = {name: value for name, value in state.items() if name != "runs"}
        write_rollout_state(directory / f"checkpoint-{step}", rest | ({"runs": names} if names else {}))
    if several:
        with pytest.raises(ValueError, match="holds checkpoints of several runs"):
            checkpoint_to_resume(directory)
    else:
        assert checkpoint_to_resume(directory) == str(directory / f"checkpoint-{max(runs)}")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"loss_type": "dr_grpo"}, "`loss_type`: 'dapo' -> 'dr_grpo'"),
        ({"temperature": 0.7}, "`temperature`: 1.0 -> 0.7"),
        ({"scale_rewards": "none"}, "`scale_rewards`: 'group' -> 'none'"),
        ({"learning_rate": 3e-4}, "`learning_rate`: "),
        ({"beta": 0.1}, "`beta`: 0.0 -> 0.1"),
        ({"epsilon_high": 0.3}, "`epsilon_high`: "),
        ({"seed": 11}, "`seed`: "),
        ({"top_k": 5}, "`top_k`: 0 -> 5"),
        ({}, None),
        ({"logging_steps": 5, "save_steps": 2, "report_to": "none", "log_completions": True}, None),
    ],
)
def test_a_resume_tells_which_of_trls_settings_changed(copied, tmp_path, changes, says, caplog):
    before = read_rollout_state(copied / "checkpoint-2")["arguments"]
    now = config(QuantGRPOConfig, copied, **SETTINGS | {"max_steps": 2, "save_steps": 1} | changes)
    tell_changes(copied / "checkpoint-2", before, now.inherited_settings())
    ours = "".join(record.getMessage() for record in caplog.records if record.name.startswith("trl_quant"))
    if says is None:
        assert not ours
    else:
        assert f"other settings than it was trained with: {says}" in ours and ours.count("->") == 1
