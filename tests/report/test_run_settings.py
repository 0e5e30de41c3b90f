"""`trl-quant eval RUN` and `report --mismatch RUN` repeat what the run did: its task, data, types and sampling."""

from dataclasses import fields
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from known_model import QUESTIONS, result, save_known, write
from tiny import tiny_model, tiny_tokenizer
from training import spread
from transformers import TrainingArguments
from trl.rewards import get_soft_overlong_punishment

import trl_quant.report.evaluation as evaluation
import trl_quant.report.run_settings as run_settings
from trl_quant import QuantGRPOConfig, QuantGRPOTrainer
from trl_quant.cli import eval as eval_command
from trl_quant.cli import main
from trl_quant.cli.report import mismatch_parser
from trl_quant.report import mismatch
from trl_quant.report.run_settings import OF_RUN, TYPES_OF_RUN, own_reward, take
from trl_quant.report.trained import FORWARD_TYPES, Trained
from trl_quant.rollout.sampling_options import FIELDS
from trl_quant.runs.checkpoints import write_rollout_state
from trl_quant.storage.run_checkpoints import read_rollout_state
from trl_quant.tasks.named_rewards import find_reward, name_of
from trl_quant.tasks.rewards import REWARDS


# A value of each option, and how a run's record says it
RECORDED = {
    "rollout_precision": ("int8", {"rollout_precision": "int8"}),
    "train_precision": ("nvfp4", {"train_precision": "nvfp4"}),
    "engine": ("embedded", {"use_vllm": False}),
    "vllm_engine_kwargs": ('{"seed": 3}', {"use_vllm": True, "vllm_engine_kwargs": "{'seed': 3}"}),
    "dtype": ("mixed_bfloat16", {"dtype": "bfloat16", "bf16": True}),
    "max_completion_length": (33, {"max_completion_length": 33}),
    "temperature": (0.7, {"temperature": 0.7}),
    "top_p": (0.9, {"top_p": 0.9}),
    "top_k": (5, {"top_k": 5}),
    "min_p": (0.1, {"min_p": 0.1}),
    "repetition_penalty": (1.2, {"repetition_penalty": 1.2}),
    "generation_kwargs": ('{"stop_strings": ["x"]}', {"generation_kwargs": "{'stop_strings': ['x']}"}),
}
# Options that are the run's by another way: its data, and how a masked diffusion model is denoised
DATA = {"task", "data", "instruction", "prompts"}
# Options of the command alone, though they have no default: how much is asked, and where the result goes
OF_COMMAND = {"num_questions", "num_samples", "task_kwargs", "reward_timeout", "output"}
COMMANDS = {
    "eval": (evaluation.EvaluationOptions, eval_command.parser, ["m"], evaluation.OTHERWISE),
    "mismatch": (mismatch.MismatchOptions, mismatch_parser, ["--mismatch", "m"], mismatch.OTHERWISE),
}


@pytest.fixture(autouse=True)
def fresh_accelerator(tmp_path):
    """A process has one mixed precision; what a trainer's arguments do lets the next test have another."""
    TrainingArguments(str(tmp_path / "unused"), use_cpu=True, bf16=False).device  # noqa: B018


@pytest.fixture
def vllm_runs(monkeypatch):
    monkeypatch.setattr(run_settings, "check_device", lambda precision, otherwise: None)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_taken_from_the_run_unless_it_is_given(command, vllm_runs):
    """Members are found by walking: an option without a default is the run's, or named here as the command's."""
    cls, parser, argv, defaults = COMMANDS[command]
    given = vars(parser().parse_args(argv))
    assert {f.name for f in fields(cls)} == {*given}
    open_options = {name for name, value in given.items() if value is None}
    assert open_options - DATA - {*evaluation.SCHEDULE} - OF_COMMAND == {*OF_RUN} == {*defaults} == {*RECORDED}
    assert {*FIELDS} <= {*OF_RUN}

    for name, (value, recorded) in RECORDED.items():
        options = cls(**vars(parser().parse_args(argv)))
        lines = take(options, recorded, defaults)
        assert getattr(options, name) == value != (defaults[name] if name != "engine" else None), name
        assert f"{name}: {value}, as in the run" in lines
        other = {"rollout_precision": "bf16", "train_precision": "int8", "engine": "vllm", "dtype": "float32"}
        text = other.get(name, "{}" if str(value).startswith("{") else "1")
        options = cls(**vars(parser().parse_args([*argv, f"--{name}", text])))
        lines = take(options, recorded, defaults)
        assert str(getattr(options, name)).removesuffix(".0") == text
        assert not [line for line in lines if line.startswith(f"{name}:")]


def test_a_model_that_is_no_run_has_the_commands_defaults():
    options = evaluation.EvaluationOptions(**vars(eval_command.parser().parse_args(["m"])))
    assert take(options, {}, evaluation.OTHERWISE) == []
    assert {name: getattr(options, name) for name in OF_RUN} == evaluation.OTHERWISE


def test_types_are_those_of_weights_and_autocast():
    """Each pair has types of its own; others are refused, and none is guessed."""
    assert sorted(TYPES_OF_RUN.values()) == sorted(FORWARD_TYPES)
    for (weights, mixed), name in TYPES_OF_RUN.items():
        options = evaluation.EvaluationOptions(**vars(eval_command.parser().parse_args(["m"])))
        take(options, {"dtype": weights, "bf16": mixed}, evaluation.OTHERWISE)
        assert options.dtype == name
        assert FORWARD_TYPES[name] == getattr(torch, weights) and name.startswith("mixed") == mixed
    for settings in ({"dtype": "float16", "bf16": False}, {"dtype": "float32", "bf16": False, "fp16": True}):
        with pytest.raises(ValueError, match="`--dtype`: the run trained weights in float"):
            take(options_of_eval(), settings, evaluation.OTHERWISE)
    lines = take(options_of_eval(), {"rollout_precision": "int8"}, evaluation.OTHERWISE)
    assert "dtype: bfloat16, since the run did not record its own" in lines


def options_of_eval(*argv: str) -> evaluation.EvaluationOptions:
    return evaluation.EvaluationOptions(**vars(eval_command.parser().parse_args(["m", *argv])))


def test_vllm_is_the_engine_where_it_runs(vllm_runs, monkeypatch):
    settings = {"use_vllm": True, "vllm_engine_kwargs": "{'seed': 3}"}
    options = options_of_eval()
    take(options, settings, evaluation.OTHERWISE)
    assert (options.engine, options.vllm_engine_kwargs) == ("vllm", '{"seed": 3}')

    def refuse(precision, otherwise):
        raise ValueError(f"no {precision} on this device.")

    monkeypatch.setattr(run_settings, "check_device", refuse)
    options = options_of_eval()
    lines = take(options, settings | {"rollout_precision": "fp8"}, evaluation.OTHERWISE)
    assert (options.engine, options.vllm_engine_kwargs) == ("embedded", "{}")
    assert "engine: embedded, though the run sampled with vLLM. no fp8 on this device." in lines
    with pytest.raises(ValueError, match="`--generation_kwargs`: the run recorded '<object>'"):
        take(options_of_eval(), {"generation_kwargs": "<object>"}, evaluation.OTHERWISE)


# Rewards


def own_function(completions, answer, **kwargs) -> list[float]:
    """Half right is half a point."""
    return [0.5 + 0.5 * (text == gold) for text, gold in zip(completions, answer, strict=True)]


def test_a_rewards_name_finds_it_again():
    for name, reward in REWARDS.items():
        assert name_of(reward) == name and find_reward(name_of(reward)) is reward
    assert find_reward(name_of(own_function)) is own_function
    found = name_of(find_reward(name_of(own_function)))
    assert found == f"{__name__}.own_function"
    for unknown in (lambda completions: None, get_soft_overlong_punishment(9, 3)):
        assert "<" in name_of(unknown)
    assert name_of(tiny_model()).startswith("<")


def test_the_reward_of_a_run_is_the_one_that_compares():
    """Rewards of the form alone are left out; several, or those that cannot be found, are refused."""
    overlong = name_of(get_soft_overlong_punishment(9, 3))
    form = [name for name in REWARDS if name in ("format", "think_answer")]
    for name in {*REWARDS} - {*form}:
        assert own_reward({"reward_funcs": [name, *form, overlong]}, "m") == (name, [*form, overlong])
    for name in REWARDS:
        assert own_reward({"reward_funcs": [name]}, "m") == (name, [])
    for names in (None, [], ["gsm8k", "countdown"], ["x.<lambda>"], ["<model judge>"], form):
        with pytest.raises(ValueError, match="`--task`: 'm' has no task of its own"):
            own_reward({"reward_funcs": names}, "m")


# Whole runs


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run of `trl-quant train` that learns nothing, of a model whose answers to its own data are all right."""
    path = tmp_path_factory.mktemp("run")
    model = save_known(path / "known")
    data = write(path / "train.jsonl", *QUESTIONS)
    options = {"model_name_or_path": model, "dataset_name": data, "reward_funcs": "arithmetic", "learning_rate": "0"}
    options |= {
        "max_steps": 1,
        "per_device_train_batch_size": 4,
        "num_generations": 2,
        "gradient_accumulation_steps": 1,
    }
    options |= {"max_completion_length": 3, "rollout_precision": "int8", "use_cpu": "true", "bf16": "false"}
    options |= {"dtype": "float32", "temperature": 0.9, "save_strategy": "no", "report_to": "none"}
    options |= {"output_dir": path / "out", "gradient_checkpointing": "false"}
    main(["train", *(str(part) for name, value in options.items() for part in (f"--{name}", value))])
    return path / "out"


def test_a_run_is_evaluated_on_its_own_data(run, tmp_path, capsys):
    """All right there; the task's own questions are others, and wrong."""
    main(["eval", str(run), "--output", str(tmp_path / "own.json")])
    found, printed = result(tmp_path, "own"), " ".join(capsys.readouterr().out.split())
    assert found["metrics"]["accuracy"]["value"] == 1 and found["task"] == "run"
    settings = found["settings"]
    taken = {"rollout_precision": "int8", "dtype": "float32", "max_completion_length": 3, "engine": "embedded"}
    assert {name: settings[name] for name in taken} == taken
    assert settings["source"] == str(run.parent / "train.jsonl") and settings["questions"] == 6
    assert "right is what the run's reward 'arithmetic' says" in printed and "what the run trained on" in printed
    for name, value in taken.items():
        assert f"{name}: {value}, as in the run" in printed

    main(["eval", str(run), "--task", "arithmetic", "--output", str(tmp_path / "task.json")])
    assert result(tmp_path, "task")["metrics"] == found["metrics"]
    others = ["--task", "arithmetic", "--task_kwargs", "{}", "--num_questions", "6"]
    main(["eval", str(run), *others, "--output", str(tmp_path / "generated.json")])
    assert result(tmp_path, "generated")["metrics"]["accuracy"]["value"] < 1
    assert "data and instruction: the task's, not the run's" in capsys.readouterr().out
    wrong = write(tmp_path / "wrong.jsonl", *({**row, "answer": "9"} for row in QUESTIONS))
    main(["eval", str(run), "--data", wrong, "--output", str(tmp_path / "given.json")])
    assert result(tmp_path, "given")["metrics"]["accuracy"]["value"] == 0

    main(["eval", str(run), "--num_samples", "2", "--output", str(tmp_path / "sampled.json")])
    assert result(tmp_path, "sampled")["settings"]["temperature"] == 0.9


def test_mismatch_is_measured_on_the_runs_data(run, tmp_path, capsys, monkeypatch):
    prompts = []
    monkeypatch.setattr(mismatch, "measure", lambda engine, asked, temperature: prompts.append((asked, temperature)))
    monkeypatch.setattr(mismatch, "table", lambda result: pytest.fail("measured"))
    for options, expected in (
        ([], [row["prompt"] for row in QUESTIONS][:2]),
        (["--prompts", write(tmp_path / "p.jsonl", {"prompt": "abc"})], ["abc", "abc"]),
    ):
        with pytest.raises(TypeError):
            main(["report", "--mismatch", str(run), "--num_completions", "2", *options])
        asked, temperature = prompts.pop()
        assert [tiny_tokenizer().decode(ids) for ids in asked] == expected and temperature == 0.9
    printed = " ".join(capsys.readouterr().out.split())
    assert f"prompts: {run.parent}/train.jsonl, split train, as in the run".replace(" ", "") in printed.replace(" ", "")


def test_what_the_api_trains_is_recorded_as_far_as_it_is_known(tmp_path, capsys):
    """The reward by its name; not the rows, so that `--data` must name them."""
    config = QuantGRPOConfig(
        output_dir=str(tmp_path / "out"), use_cpu=True, bf16=False, rollout_precision="int8", num_generations=2,
        per_device_train_batch_size=2, max_completion_length=3, max_steps=1, report_to="none", save_strategy="steps",
    )  # fmt: skip
    trainer = QuantGRPOTrainer(
        model=save_known(tmp_path / "model"),
        reward_funcs=[own_function, spread],
        args=config,
        train_dataset=Dataset.from_list(QUESTIONS),
    )
    trainer.save_model()
    recorded = read_rollout_state(tmp_path / "out")["arguments"]
    assert recorded["reward_funcs"] == [name_of(own_function), name_of(spread)]
    assert "dataset_name" not in recorded and recorded["tools"] == []
    for options, says in (
        ([], "of which no single one can be taken"),
        (["--task", "jsonl"], "`--data`=None, and the run did not record its data"),
    ):
        with pytest.raises(SystemExit, match=says):
            main(["eval", str(tmp_path / "out"), *options])


def test_a_reward_with_parts_of_a_point_gives_its_mean(run, tmp_path):
    """Not the number of whole points."""
    state = read_rollout_state(run)
    copied = Path(save_known(tmp_path / "copied"))
    state["arguments"]["reward_funcs"] = [name_of(own_function)]
    write_rollout_state(copied, state)
    data = write(tmp_path / "half.jsonl", *QUESTIONS[:3], *({**row, "answer": "9"} for row in QUESTIONS[3:]))
    main(["eval", str(copied), "--data", data, "--output", str(tmp_path / "out.json")])
    ((name, found),) = result(tmp_path)["metrics"].items()
    assert name == "reward" and found["value"] == 0.75 and found["low"] < 0.75 < found["high"]


def test_the_settings_of_the_adapter_and_of_turns_are_told(run):
    settings = Trained.find(str(run)).settings
    assert run_settings.not_repeated(settings) == []
    told = run_settings.not_repeated(settings | {"tools": ["m.add"], "rollout_func": "m.f", "exact_rollouts": True})
    assert [line.partition(":")[0] for line in told] == ["tools", "rollout_func", "exact_rollouts"]
