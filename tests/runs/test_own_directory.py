"""A run writes alone, and never over what it reads: the locks of runs and evaluations, `output_dir`, and ranks."""

import json
import os
import signal
from dataclasses import fields
from inspect import signature
from pathlib import Path

import pytest
from locks import holder
from tiny import save_tiny
from training import config, dataset, fields_of, make, spread

from trl_quant import QuantGRPOConfig, QuantGRPOTrainer
from trl_quant.cli import main as command
from trl_quant.config.places import check_output_dir, models_read
from trl_quant.report.output import check_output
from trl_quant.storage.identity import MODEL_FILES
from trl_quant.storage.lock import OUTPUT_LOCK
from trl_quant.storage.run_checkpoints import read_rollout_state
from trl_quant.trainers import precision, sampling
from trl_quant.trainers.launch import TRAINERS


every_trainer = pytest.mark.parametrize("trainer_class", TRAINERS.values(), ids=TRAINERS)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return save_tiny(tmp_path_factory.mktemp("model") / "model", seed=3, num_hidden_layers=1)


@pytest.fixture
def held(tmp_path):
    """An `output_dir` that another process writes."""
    process = holder(tmp_path / "run" / OUTPUT_LOCK)
    yield tmp_path / "run"
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def arguments(config_class, output, **settings):
    """A config, without the settings that its class lacks."""
    settings = {"block_length": 4} | settings
    return config(config_class, output, **{name: settings[name] for name in settings.keys() & fields_of(config_class)})


# Two writers


@every_trainer
def test_a_second_run_is_refused_before_a_model_is_loaded(held, trainer_class, model, monkeypatch):
    monkeypatch.setattr(precision, "check_before_loading", lambda **given: None)
    monkeypatch.setattr(sampling, "engine_of", None)  # with which loading begins
    args, names = arguments(trainer_class.config_class, held), signature(trainer_class.__init__).parameters
    given = {"train_dataset": dataset()} | {name: None for name in ("reward_funcs", "teacher_model") if name in names}
    with pytest.raises(ValueError, match=r"`output_dir`=.*another run writes there\. .* It is process \d+ on"):
        trainer_class(model=model, args=args, **given)


def test_a_second_run_is_refused_when_it_begins(tmp_path):
    """Also one that was built before the other began; afterwards it trains, and leaves no lock."""
    trainer = make(QuantGRPOTrainer, config(QuantGRPOConfig, tmp_path / "run", max_steps=1))
    process = holder(tmp_path / "run" / OUTPUT_LOCK)
    with pytest.raises(ValueError, match="another run writes there"):
        trainer.train()
    assert trainer.state.global_step == 0
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    trainer.train()
    assert trainer.state.global_step == 1 and not (tmp_path / "run" / OUTPUT_LOCK).exists()


def test_commands_are_refused(held, tmp_path, model, capsys):
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) + "\n" for i in range(8)))
    training = ["--model_name_or_path", model, "--dataset_name", data, "--output_dir", held, "--use_cpu", "true"]
    training += ["--bf16", "false", "--reward_funcs", "arithmetic", "--rollout_precision", "int8", "--max_steps", "1"]
    training += ["--num_generations", "4", "--per_device_train_batch_size", "4", "--max_completion_length", "4"]
    process = holder(tmp_path / f"eval.json{OUTPUT_LOCK}")
    evaluation = [
        model,
        "--task",
        "arithmetic",
        "--num_questions",
        "2",
        "--max_completion_length",
        "4",
        "--output",
        tmp_path / "eval.json",
    ]
    for name, arguments in (("train", training), ("eval", evaluation)):
        with pytest.raises(SystemExit, match=r"another (run|evaluation) writes there\..*It is process"):
            command([name, *map(str, arguments)])
    assert not (tmp_path / "eval.json").exists() and os.listdir(held) == [OUTPUT_LOCK]
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def test_at_each_save_the_newest_checkpoint_is_the_runs_own(tmp_path):
    """Where nothing can be locked: the second run to save ends before it writes."""
    settings = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    trainer = make(QuantGRPOTrainer, config(QuantGRPOConfig, tmp_path, **settings))

    def other_run(completions, **given):
        if trainer.state.global_step == 1:
            path = tmp_path / "checkpoint-1" / "rollout_state.json"
            path.write_text(json.dumps(read_rollout_state(path.parent) | {"runs": ["other"]}))
        return spread(completions)

    trainer.reward_funcs = [other_run]
    with pytest.raises(ValueError, match="another run, other, saved checkpoint-1 there"):
        trainer.train()
    assert not (tmp_path / "checkpoint-2").exists()


# Reader and writer


def named_models(trainer_class) -> list[str]:
    """The fields of its config and the arguments of its constructor that name a model, by what their names say."""
    known = [f.name for f in fields(trainer_class.config_class) if "model" in f.name and "path" in f.name]
    return known + [n for n in signature(trainer_class.__init__).parameters if n in ("model", "teacher_model")]


@every_trainer
@pytest.mark.parametrize("way", ["itself", "link", "relative", "checkpoint"])
def test_an_output_dir_that_the_run_reads_is_refused(trainer_class, model, tmp_path, way, monkeypatch):
    monkeypatch.chdir(Path(model).parent)
    (tmp_path / "link").symlink_to(model)
    (tmp_path / "checkpoint-3").symlink_to(model)
    output = {"itself": model, "link": tmp_path / "link", "relative": "./model/../model", "checkpoint": tmp_path}[way]
    read = str(tmp_path / "checkpoint-3") if way == "checkpoint" else model
    if way == "checkpoint":
        (tmp_path / "checkpoint-3").unlink()
        read = save_tiny(tmp_path / "checkpoint-3", num_hidden_layers=1)
    before = sorted(os.listdir(read))
    names = signature(trainer_class.__init__).parameters
    for role in named_models(trainer_class):
        other = save_tiny(tmp_path / "other", num_hidden_layers=1)
        in_config = role in {f.name for f in fields(trainer_class.config_class)}
        args = arguments(trainer_class.config_class, output, **{role: read} if in_config else {})
        given = {"model": other, "teacher_model": other, "reward_funcs": spread, "train_dataset": dataset()}
        given = {name: value for name, value in given.items() if name in names} | ({} if in_config else {role: read})
        with pytest.raises(ValueError, match=f"the run would write over .*{Path(read).name}"):
            trainer_class(args=args, **given)
    assert sorted(os.listdir(read)) == before


def test_what_a_run_reads(model, tmp_path):
    """Every argument that is a model, each of several rewards, and vLLM's start; a neighbour may be written."""
    kwargs = {"model": "start"}
    args = config(QuantGRPOConfig, tmp_path, use_vllm=True, rollout_precision="int8", vllm_engine_kwargs=kwargs)
    read = models_read("policy", args, reward_funcs=[spread, "reward"], tools=None, teacher_model="teacher")
    assert {name for name, _ in read.values()} == {"policy", "reward", "start", "teacher"}
    for output in (tmp_path, tmp_path / "model", f"{model}/runs/a", Path(model).parent):
        args.output_dir = str(output)
        check_output_dir(args, models_read(model, args))


def test_commands_write_over_no_model(model, tmp_path):
    """Each command with an `--output`, on each of the files of a model."""
    files = sorted(path for path in Path(model).iterdir())
    before = {path: path.read_bytes() for path in files}
    with pytest.raises(SystemExit, match="exists"):
        command(["prepare", "--model", model, "--format", "int8", "--output", model])
    with pytest.raises(SystemExit, match="exists"):
        command(["export", "--model", model, "--format", "int8", "--output", model])
    for path in files:
        with pytest.raises(ValueError, match=r"is a file of a model|charts are written as"):
            check_output(str(path), "json", path.suffix.removeprefix("."))
        if path.suffix == ".json":
            with pytest.raises(SystemExit, match="is a file of the model"):
                command(["eval", model, "--task", "arithmetic", "--output", str(path)])
    assert {path: path.read_bytes() for path in sorted(Path(model).iterdir())} == before
    assert any(path.suffix == ".json" for path in files) and MODEL_FILES
