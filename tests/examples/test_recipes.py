"""Each recipe has its paper's settings, on eight GPUs and in a small run on a CPU, and its commands work."""

import importlib
import json
import re
import runpy
import shlex
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import yaml
from accelerate.commands.launch import launch_command_parser
from long_tests import rest_is_long
from papers import AIS
from places import ROOT
from tiny import tiny_model, tiny_tokenizer
from trl import ModelConfig

from trl_quant import QuantGRPOConfig
from trl_quant.cli import train
from trl_quant.report.runs import read_run
from trl_quant.tasks.arithmetic import problems


sys.path.insert(0, str(ROOT / "examples"))

LAPTOP = yaml.safe_load((ROOT / "examples/laptop.yaml").read_text())
# Settings of the papers, their appendices and, for FlashRL and DeepScaleR, their authors' scripts
PAPER = {
    "flashrl": {
        "rollout_precision": "int8",
        "is_correction": "tis",
        "is_cap": 2,
        "loss_type": "dapo",
        "epsilon": 0.2,
        "epsilon_high": 0.28,
        "delta": 10,
        "beta": 0,
        "temperature": 1.0,
        "num_generations": 16,
        "max_completion_length": 20480,
        "learning_rate": 1e-6,
        "warmup_steps": 160,
        "weight_decay": 0.1,
        "max_grad_norm": 1.0,
    },
    "qurl": {
        "rollout_precision": "int8",
        "is_correction": "acr",
        "uaq_scale": 1.5,
        "epsilon": 0.2,
        "beta": 0.001,
        "use_bias_correction_kl": False,
        "temperature": 0.6,
        "num_generations": 8,
        "max_completion_length": 8192,
        "learning_rate": 1e-6,
        "max_steps": 3200,
    },
    "qurl_dapo": {
        "rollout_precision": "int8",
        "is_correction": "acr",
        "uaq_scale": 1.5,
        "loss_type": "dapo",
        "epsilon": 0.2,
        "epsilon_high": 0.28,
        "beta": 0,
        "temperature": 1.0,
        "num_generations": 16,
        "max_completion_length": 8192,
        "learning_rate": 1e-6,
        "max_steps": 3200,
        "warmup_steps": 160,
        "weight_decay": 0.1,
        "max_grad_norm": 1.0,
    },
    "qerl": {
        "rollout_precision": "nvfp4",
        "train_precision": "nvfp4",
        "lora_sync": "adapter",
        "is_correction": "coupled",
        "noise_schedule": "exponential",
        "noise_sigma_start": 1e-2,
        "noise_sigma_end": 5e-4,
        "noise_stages": 10,
        "epsilon": 0.2,
        "epsilon_high": 0.28,
        "beta": 0,
        "temperature": 1.0,
        "num_iterations": 4,
        "num_generations": 8,
        "max_completion_length": 4096,
        "learning_rate": 1e-5,
    },
    "ais": AIS
    | {
        "beta": 0,
        "use_bias_correction_kl": False,
        "temperature": 0.9,
        "num_generations": 8,
        "max_completion_length": 1024,
        "adam_beta1": 0.9,
        "adam_beta2": 0.99,
        "weight_decay": 0.1,
        "max_grad_norm": 0.2,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 0.05,
        "learning_rate": 1e-6,
    },
    "jet_rl": {
        "train_precision": "fp8_block",
        "rollout_precision": "fp8_block",
        "is_correction": "none",
        "use_bias_correction_kl": False,
        "num_generations": 16,
        "max_completion_length": 16384,
    },
}
# Completions of an update, and of a generation, on the eight GPUs of each command
COMPLETIONS = {
    "flashrl": [(512, 8192)],
    "qurl": [(512, 2048), (1024, 4096), (1024, 4096)],
    "qurl_dapo": [(512, 8192)],
    "qerl": [(128, 128), (128, 128)],
    "ais": [(128, 128)],
    "jet_rl": [(4096, 4096), (1024, 1024)],
}
every_recipe = pytest.mark.parametrize("name", PAPER)


def commands(name: str, program: str) -> list[list[str]]:
    """The words of a docstring's commands of `program` that run this recipe."""
    text = importlib.import_module(name).__doc__.replace("\\\n", " ")
    found = [shlex.split(line) for line in re.findall(rf"^    ({program} .*)$", text, re.MULTILINE)]
    assert found and all(f"examples/{name}.py" in words for words in found)
    return found


def options(words: list[str], name: str) -> list[str]:
    return words[words.index(f"examples/{name}.py") + 1 :]


def settings(args, names) -> dict:
    return {field: getattr(args, field) for field in names}


@every_recipe
def test_every_name_is_an_option(name):
    known = {f.name for kind in (train.TrainArguments, QuantGRPOConfig, ModelConfig) for f in fields(kind)}
    assert not importlib.import_module(name).RECIPE.keys() - known
    assert not LAPTOP.keys() - known


@every_recipe
def test_the_commands_for_eight_gpus_have_the_papers_settings(name):
    recipe, completions = importlib.import_module(name).RECIPE, []
    for words in commands(name, "accelerate launch"):
        launcher = launch_command_parser().parse_args(words[2 : words.index(f"examples/{name}.py") + 1])
        assert yaml.safe_load((ROOT / launcher.config_file).read_text())["num_processes"] == 8
        cpu = ["--use_cpu", "--bf16", "false", "--exact_rollouts", "false"]
        given = options(words, name)
        script, args, _ = train.parse_args([*given, *cpu], recipe)
        expected = {field: value for field, value in PAPER[name].items() if f"--{field}" not in given}
        assert settings(args, expected) == expected
        assert args.use_vllm and args.vllm_mode == "colocate"
        each = 8 * args.per_device_train_batch_size
        completions.append((each * args.gradient_accumulation_steps, each * args.steps_per_generation))
        assert all(number % args.num_generations == 0 for number in completions[-1])
    assert completions == COMPLETIONS[name]
    assert script.overlong_punishment == {"flashrl": 0.2, "qerl": 0.2, "qurl_dapo": 0.5}.get(name, 0)


def test_the_options_of_qerls_release_are_options():
    """The options that its docstring lists set the release's values, and the recipe has others."""
    text = importlib.import_module("qerl").__doc__
    release = shlex.split(text.partition("its scripts set\n")[2])
    cpu = ["--use_cpu", "--bf16", "false"]
    expected = {
        "loss_type": "bnpo",
        "num_iterations": 1,
        "noise_sigma_end": 1e-4,
        "adam_beta2": 0.99,
        "weight_decay": 0.1,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 0.1,
        "max_grad_norm": 0.2,
        "mask_truncated_completions": True,
    }
    recipe = importlib.import_module("qerl").RECIPE
    (_, own, _), (_, args, model) = (train.parse_args([*cpu, *given], recipe) for given in ([], release))
    assert settings(args, expected) == expected
    assert all(value != expected[name] for name, value in settings(own, expected).items())
    assert (model.lora_r, model.lora_alpha) == (16, 16)


@every_recipe
def test_boxing_the_question_is_worth_nothing(name):
    """No recipe's rewards pay for an expression in place of its value."""
    cpu = ["--use_cpu", "--bf16", "false", "--exact_rollouts", "false"]
    script, _, _ = train.parse_args(cpu, importlib.import_module(name).RECIPE)
    texts = ["42", r"6 \cdot 7", r"\frac{84}{2}", r"\sum_{k=1}^{6} 2k", "42!"]
    completions = [[{"role": "assistant", "content": rf"\boxed{{{text}}}"}] for text in texts]
    scores = [reward(completions, answer=["42"] * 5, solution=["42"] * 5) for reward in script.rewards]
    assert scores[0] == [1.0, 0.0, 0.0, 0.0, 0.0]
    expected = {"qerl": ["gsm8k", "think_answer"], "ais": ["gsm8k", "format"]}.get(name, ["strict_math"])
    assert script.reward_funcs == expected


@pytest.fixture(scope="module")
def arithmetic(tmp_path_factory) -> Path:
    """A tiny model with problems beside it and without a chat template, as build_arithmetic_model.py leaves it."""
    path, tokenizer = tmp_path_factory.mktemp("arithmetic"), tiny_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(path)
    tiny_model().save_pretrained(path)
    stream = problems(0)
    rows = [json.dumps(next(stream).row) + "\n" for _ in range(32)]
    (path / "train.jsonl").write_text("".join(rows))
    return path


@pytest.mark.parametrize("name", rest_is_long(PAPER, "qerl", "ais"))
def test_the_command_for_a_laptop_runs(name, arithmetic, tmp_path, monkeypatch):
    """Two steps of it, on the tiny model; what the laptop need not change is as in the paper."""
    (words,) = [words for words in commands(name, "python") if "examples/laptop.yaml" in words]
    small = f"""--model_name_or_path {arithmetic} --dataset_name {arithmetic}/train.jsonl --output_dir {tmp_path}
        --reward_funcs training.spread --max_steps 2 --per_device_train_batch_size 16 --max_completion_length 8
        --report_to none --disable_tqdm true --save_strategy no""".split()
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *options(words, name), *small])
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")

    args = torch.load(tmp_path / "training_args.bin", weights_only=False)
    expected = {field: value for field, value in PAPER[name].items() if field not in LAPTOP}
    if name == "qerl":
        expected["lora_sync"] = "merge"  # a field of vLLM's
    assert len(expected) > 3 and settings(args, expected) == expected
    changed = {field: value for field, value in LAPTOP.items() if hasattr(args, field) and f"--{field}" not in sys.argv}
    assert len(changed) > 8 and settings(args, changed) == changed
    assert args.steps_per_generation == (4 if name in ("flashrl", "qurl", "qurl_dapo") else 1)

    first, second = [log for log in read_run(tmp_path).history if "loss" in log]
    assert first["grad_norm"] > 0 and second["grad_norm"] > 0
    # What is trained in the numbers that sample it differs in a code at most, of hundreds
    assert (first["mismatch/abs_logp_diff"] < 5e-3) is (name in ("qerl", "jet_rl"))
    assert ("rewards/soft_overlong_punishment_reward/mean" in first) is (name in ("flashrl", "qerl", "qurl_dapo"))
    assert ("ais/alpha" in first) is (name == "ais")


@every_recipe
def test_help_shows_the_recipe(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help", "is_correction"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    assert stop.value.code == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.startswith(f"usage: {name}.py [--config FILE.yaml]")
    correction = printed[printed.index(" --is_correction ") :]
    assert re.search(r"\(default: (\w+)\)", correction)[1] == PAPER[name]["is_correction"]


def test_overlong_completions_are_punished(arithmetic, monkeypatch):
    """From three quarters of the length on, linearly down to -1; and by nothing where it is not asked for."""
    given = {}
    monkeypatch.setattr(train.launch, "train", lambda arguments, *others: given.update(arguments))
    argv = ["--model_name_or_path", str(arithmetic), "--dataset_name", f"{arithmetic}/train.jsonl", "--use_cpu"]
    argv += ["--bf16", "false", "--max_completion_length", "8"]
    train.main([*argv, "--overlong_punishment", "0.25"])
    _, reward = given["reward_funcs"]
    assert reward([[0] * length for length in (6, 7, 8, 9)]) == [0.0, -0.5, -1.0, -1.0]
    train.main(argv)
    assert len(given["reward_funcs"]) == 1


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"overlong_punishment": 1.5}, "`overlong_punishment`=1.5 must be a number from 0 to 1"),
        ({"overlong_punishment": 0.2, "max_completion_length": None}, "`overlong_punishment`=0.2 needs a `max_compl"),
        ({"overlong_punishment": 0.01, "max_completion_length": 48}, "`overlong_punishment`=0.01 of .* than a token"),
        ({"is_corection": "tis"}, "unknown arguments: --is_corection tis .did you mean --is_correction"),
    ],
)
def test_bad_recipes_are_refused_before_anything_is_loaded(settings, says, monkeypatch, capsys):
    monkeypatch.setattr(train.launch, "load_data", None)
    with pytest.raises(SystemExit) as stop:
        train.main(["--use_cpu", "--bf16", "false"], recipe={"model_name_or_path": "missing"} | settings)
    assert re.search(says, f"{stop.value} {capsys.readouterr().err}")
