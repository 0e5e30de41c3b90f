"""The command line: a foreseen error is one line and an exit code, and any other keeps its traceback."""

import io
import os
import subprocess
import sys
from dataclasses import fields

import pytest
import torch
from long_tests import rest_is_long
from places import ROOT
from tiny import save_tiny, tiny_tokenizer

from trl_quant import QuantGRPOConfig
from trl_quant.cli import main


REFUSED_COMMANDS = [  # arguments -> exit code, what is printed
    (["train", "--model_name_or_path", "{tmp}/nowhere"], 1, "nowhere"),
    (["train", "--model_name_or_path", "m", "--config"], 2, "--config"),
    (["train", "--model_name_or_path", "m", "--config", "{tmp}/nowhere.yaml"], 1, "nowhere.yaml"),
    (["train", "--model_name_or_path", "m", "--config={tmp}/bad.yaml"], 1, "bad.yaml is damaged"),
    (["train", "--model_name_or_path", "m", "--config={tmp}/list.yaml"], 1, "must contain a YAML mapping"),
    (["train", "--model_name_or_path", "m", "--rollout_precison", "int8"], 2, "did you mean --rollout_precision?"),
    (["train", "--model_name_or_path", "m", "--noise_stages", "3.5"], 2, "invalid int value: '3.5'"),
    (["train", "--model_name_or_path", "m", "--reward_funcs", "os.path"], 1, "`reward_funcs`='os.path' is a module"),
    (
        ["train", "--model_name_or_path", "m", "--reward_funcs", "os.nothing"],
        1,
        "`reward_funcs`='os.nothing' is",
    ),
    (["train", "--model_name_or_path", "m", "--per_device_train_batch_size", "3"], 1, "divisible by num_generations"),
    (["train", "--model_name_or_path", "{tmp}/model", "--dataset_name", "{tmp}/bad.jsonl"], 1, "bad.jsonl' cannot be"),
    (["train", "--model_name_or_path", "{tmp}/run"], 1, "its tokenizer cannot be read"),
    (["report", "{tmp}/run", "--output", "{tmp}/chart.txt"], 1, "chart.txt': charts are written as"),
    (["report", "{tmp}/run", "--output", "{tmp}/chart"], 1, "/chart': charts are written as"),
    (["report", "{tmp}/run", "--output", "{tmp}"], 1, "is a directory. Name a file."),
    (["report", "{tmp}/nowhere"], 1, "holds no run"),
    (["report", "{tmp}/run", "--output", "{tmp}/bad.yaml/chart.png"], 1, "bad.yaml"),
    (["prepare", "--model", "{tmp}/nowhere", "--format", "int8", "--output", "{tmp}/out"], 1, "nowhere"),
    (["prepare", "--model", "m", "--format", "int5", "--output", "{tmp}/out"], 2, "invalid choice: 'int5'"),
]


@pytest.mark.parametrize(("argv", "code", "says"), REFUSED_COMMANDS, ids=[says for _, _, says in REFUSED_COMMANDS])
def test_a_foreseen_error_is_one_line(argv, code, says, tmp_path, capsys):
    (tmp_path / "bad.yaml").write_text("a: [1\nb: }")
    (tmp_path / "list.yaml").write_text("- a\n")
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n{"prompt": \n')
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 1, "reward": 0.5}\n')
    if argv[0] == "train":
        argv = [*argv, "--use_cpu", "--bf16", "false", "--report_to", "none"]
    with pytest.raises(SystemExit) as error:
        main([part.replace("{tmp}", str(tmp_path)) for part in argv])
    printed = capsys.readouterr().err
    if code == 1:
        assert str(error.value.code).startswith("error: ") and says in error.value.code
    else:
        assert error.value.code == 2 and says in printed and len(printed.splitlines()) < 8


@pytest.mark.parametrize(
    ("wrong", "code", "says"),
    [
        (["--rollout_precison", "int8"], 2, "did you mean --rollout_precision?"),
        (["--rollout_precision", "fp9"], 1, "`rollout_precision`='fp9' is unknown"),
        (["--is_cap", "0.5"], 1, "`is_cap`=0.5 is out of range"),
    ],
)
def test_what_is_wrong_comes_before_what_the_machine_lacks(wrong, code, says, capsys):
    """BF16 is refused on a CPU unless `use_cpu` is set; by itself that is what is told."""
    for argv, expected in ((wrong, says), ([], "" if torch.cuda.is_available() else "use_cpu")):
        with pytest.raises(SystemExit) as error:
            main(["train", "--model_name_or_path", "nowhere/at/all", *argv])
        assert expected in str(error.value.code) + capsys.readouterr().err
        if argv:
            assert (error.value.code == 2) == (code == 2)


@pytest.mark.parametrize("output", ["missing", "closed", "ascii"])
@pytest.mark.parametrize("argv", [["--version"], ["train", "--help"], ["report", "nowhere"]])
def test_an_unusual_standard_output(output, argv, monkeypatch):
    ascii = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stdout", {"missing": None, "closed": closed, "ascii": ascii}[output])
    with pytest.raises(SystemExit) as error:
        main(argv)
    assert not error.value.code or "`runs`='nowhere' holds no run" in error.value.code
    if output == "ascii" and "--help" in argv:
        ascii.flush()
        assert b"--rollout_precision" in ascii.buffer.getvalue()


@pytest.mark.parametrize(
    "command",
    rest_is_long(["main(['train', '--model_name_or_path', 'm'])", "from trl_quant import QuantGRPOTrainer"]),
)
def test_a_torchvision_of_another_build_is_named(tmp_path, command):
    """As its import ends beside a torch without CUDA; transformers says that `TrainingArguments` cannot be imported."""
    for path, text in {
        "torchvision/__init__.py": "raise RuntimeError('operator torchvision::nms does not exist')",
        "torchvision-0.28.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: torchvision\nVersion: 0.28.0+cu130\n",
    }.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    code = f"from trl_quant.cli import main; {command}"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True
    )
    said = done.stderr.strip().splitlines()[-1]
    assert "rror: torchvision cannot be imported" in said and "torchvision::nms does not exist" in said


@pytest.mark.parametrize("command", [["eval", "--task", "sudoku"], ["plan"]])
def test_a_config_that_contradicts_itself(command, tmp_path):
    """One layer more than the types of layers that it lists."""
    config = tmp_path / "model" / "config.json"
    save_tiny(config.parent)
    config.write_text(config.read_text().replace('"num_hidden_layers": 2', '"num_hidden_layers": 3'))
    with pytest.raises(SystemExit, match=r"^error: .*\n?.*`num_hidden_layers` \(3\) must be equal"):
        main([command[0], str(config.parent), *command[1:]])


def test_an_error_that_nobody_foresaw_keeps_its_traceback(monkeypatch):
    def slip(argv):
        int("seven")

    monkeypatch.setattr("trl_quant.cli.report.main", slip)
    with pytest.raises(ValueError, match="invalid literal"):
        main(["report"])

    def reward(argv):  # not ours
        raise ValueError("mine")

    monkeypatch.setattr("trl_quant.cli.report.main", reward)
    with pytest.raises(ValueError, match="mine"):
        main(["report"])


def test_the_version_is_told(capsys):
    from trl_quant import __version__

    with pytest.raises(SystemExit) as error:
        main(["--version"])
    assert error.value.code == 0 and capsys.readouterr().out == f"trl-quant {__version__}\n"


def test_help_shows_our_options_first(capsys):
    with pytest.raises(SystemExit):
        main(["train", "--help", "all"])
    lines = capsys.readouterr().out.splitlines()
    titles = [line.removesuffix(":") for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert titles[:2] == ["what to train on", "what the policy computes in"]
    assert titles[-3:] == ["ModelConfig of TRL", "GRPOConfig of TRL", "TrainingArguments of transformers"]
    named = [line.split()[0] for line in lines if line.startswith("  --")]
    assert named.index("--uaq_scale") < named.index("--lora_r") < named.index("--beta") < named.index("--max_steps")
    assert {f"--{f.name}" for f in fields(QuantGRPOConfig)} <= {*named}


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("trainer: null", "`trainer`=None must be a string"),
        ("overlong_punishment: null", "`overlong_punishment`=None must be a finite number"),
        ("overlong_punishment: [0.5]", r"`overlong_punishment`=\[0.5\] must be a finite number"),
        ("reward_funcs: null", "`reward_funcs`=None must be a name or a list of names"),
        ("reward_funcs: [3]", r"`reward_funcs`=\[3\] must be a name or a list of names"),
        ("reward_funcs: {gsm8k: 1}", r"`reward_funcs`=\{'gsm8k': 1\} must be a name or a list of names"),
        ("dry_run: 3", "`dry_run`=3 must be True or False"),
    ],
)
def test_a_value_of_another_type_in_a_file_is_refused(line, says, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(f"{line}\n")
    argv = ["train", "--model_name_or_path", "m", "--config", str(file), "--use_cpu", "--bf16", "false"]
    with pytest.raises(SystemExit, match=f"error: {says}"):
        main(argv)
