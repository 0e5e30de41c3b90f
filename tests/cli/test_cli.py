"""`trl-quant`: help without heavy imports, training from the command line."""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT
from tiny import save_tiny
from transformers import AutoModelForCausalLM

import trl_quant.cli.train as train
from trl_quant import QuantGRPOConfig
from trl_quant.cli import COMMANDS, main
from trl_quant.cli.options import FIRST, STORED, check_train, train_options, trl_configs
from trl_quant.cli.write_options import collect
from trl_quant.report.runs import read_run


PROBLEMS = [{"prompt": f"{a}+{a}=", "answer": str(2 * a)} for a in range(8)]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> str:
    return save_tiny(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def problems(tmp_path) -> str:
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in PROBLEMS))
    return str(path)


@pytest.fixture
def argv(model_dir, problems, tmp_path) -> list[str]:
    """A small run on the CPU."""
    options = {
        "model_name_or_path": model_dir,
        "dataset_name": problems,
        "reward_funcs": "arithmetic",
        "output_dir": tmp_path / "run",
        "max_steps": 2,
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 8,
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": "true",
        "use_cpu": "true",
        "bf16": "false",
        "gradient_checkpointing": "false",
    }
    return [str(part) for name, value in options.items() for part in (f"--{name}", value)]


# The command


def test_help_needs_no_heavy_library():
    code = (
        "import sys\n"
        "from trl_quant.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: print(sorted({'torch', 'transformers', 'trl', 'datasets', 'rich'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.stdout.endswith("[]\n"), result.stdout + result.stderr
    assert all(f"\n  {name} " in result.stdout for name in COMMANDS)


HEAVY = {"torch", "transformers", "trl", "vllm", "datasets", "accelerate", "peft", "matplotlib"}
REQUIRED = {
    "prepare": ["--model", "m", "--format", "int8", "--output", "x"],
    "export": ["--output", "x"],
    "train": ["--model_name_or_path", "m"],
    "eval": ["m", "--task", "gsm8k"],
    "plan": ["m"],
    "choose": ["m"],
    "report": ["x"],
    "report --mismatch": ["m"],
}


@pytest.mark.parametrize("wrong", [False, True], ids=["help", "wrong"])
@pytest.mark.parametrize("command", REQUIRED)
def test_help_and_wrong_options_need_no_heavy_library(command, wrong):
    """Loading them takes seconds. What is asked beside a wrong option is right, so that only it can be refused."""
    argv = [*command.split(), *REQUIRED[command], "--wrng" if wrong else "--help"]
    code = (
        "import sys\n"
        "from trl_quant.cli import main\n"
        f"try: main({argv})\n"
        f"except SystemExit as stop: print(stop.code or 0, sorted({HEAVY} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.stdout.endswith(f"{2 if wrong else 0} []\n"), result.stdout + result.stderr
    assert "--wrng" in result.stderr if wrong else f"usage: trl-quant {command.split()[0]}" in result.stdout


def test_every_command_is_tried():
    assert {command.split()[0] for command in REQUIRED} == set(COMMANDS)


@pytest.mark.parametrize("trainer", trl_configs())
def test_help_explains_ten_options_and_names_all(trainer, capsys):
    """The rest by groups; each is explained where its group, its name or everything is asked for."""

    def told(*topic: str) -> str:
        with pytest.raises(SystemExit, match="0"):
            main(["train", "--trainer", trainer, "--help", *topic])
        return capsys.readouterr().out

    short, whole = told(), told("all")
    assert len(short.splitlines()) < 200 < 900 < len(whole.splitlines())
    explained = re.findall(r"^  --(?!no_)(\w+)", short.partition("what to train on:")[0], re.MULTILINE)
    assert explained == list(FIRST) and len(FIRST) == 10
    for title, group in train_options(trainer).items():
        part = told(title.split()[-1])
        for name in group:
            assert f"--{name}" in short and f"\n  --{name}" in whole and f"\n  --{name}" in part, name
    assert "\n  --noise_stages" in told("noise_st") and "\n  --noise_sigma_end" not in told("noise_st")
    assert told("nonsense").strip() == "No group and no option has the word 'nonsense'."


def test_stored_options_are_up_to_date():
    """Otherwise: `python -m trl_quant.cli.write_options`."""
    assert STORED.read_text("utf-8") == collect()


@pytest.mark.parametrize("trainer", trl_configs())
def test_options_of_train_are_those_of_the_parser(trainer):
    """The options that are read from sources, against the parser that transformers makes of the dataclasses."""
    found = {name: option for group in train_options(trainer).values() for name, option in group.items()}
    actions = train.Parser(trainer).named()
    assert found.keys() == actions.keys() and len(found) > 200
    unknown = set()
    for name, option in found.items():
        action = actions[name]
        assert (option.nargs, option.help) == (action.nargs, action.help), name
        if option.default == argparse.SUPPRESS:
            unknown.add(name)
        else:
            assert option.default == action.default, name
        assert option.choices in (None, action.choices and list(action.choices)), name
        unknown |= {name} if option.choices is None and action.choices is not None else set()
    assert unknown <= {"optim", "log_level", "log_level_replica"}  # what code computes


@pytest.mark.parametrize("trainer", trl_configs())
def test_spellings_of_train_are_those_of_the_parser(capsys, trainer):
    """Each of the parser's option strings, also with hyphens and with `no` before it, is known; others are not."""
    actions = [action for action in train.Parser(trainer).added if action.dest not in ("help", "trainer")]
    argv = ["--trainer", trainer]
    for action in actions:
        for flag in action.option_strings:
            argv += [flag] if action.nargs in (0, "?") else [flag, "1"]
    check_train(argv)
    switched_off = [action for action in actions if action.nargs == 0]
    assert len(switched_off) > 3
    for flag in ("--no_learning_rate", "--nobf16", "--no_exact_rollouts"):
        with pytest.raises(SystemExit):
            check_train(["--trainer", trainer, flag])


def test_every_command_exists(monkeypatch):
    for name in COMMANDS:
        called = []
        monkeypatch.setattr(f"trl_quant.cli.{name}.main", called.append)
        main([name, "--output_dir", "x"])
        assert called == [["--output_dir", "x"]]


def test_unknown_command(capsys):
    with pytest.raises(SystemExit) as error:
        main(["teach"])
    assert error.value.code == 2 and "teach" in capsys.readouterr().err


# train


def test_train_and_resume(argv, tmp_path):
    """One step, then on from its checkpoint; the policy moves, and what is asked for is what runs."""
    quantized = [
        "--rollout_precision",
        "int4",
        "--is_correction",
        "ais",
        "--save_steps",
        "1",
        "--lr_scheduler_type",
        "constant",
        "--learning_rate",
        "1e-2",
    ]
    # The built-in reward is 0 on a random model's samples, hence no gradient: a reward with a spread beside it.
    quantized += ["--reward_funcs", "arithmetic", "messages.spread"]
    main(["train", *argv, *quantized, "--max_steps", "1", "--resume_from_checkpoint", "False"])
    first = AutoModelForCausalLM.from_pretrained(tmp_path / "run").state_dict()
    main(["train", *argv, *quantized, "--resume_from_checkpoint", "true"])
    second = AutoModelForCausalLM.from_pretrained(tmp_path / "run").state_dict()
    assert any((first[name] != second[name]).any() for name in first)

    history = [entry for entry in read_run(tmp_path / "run").history if "reward" in entry]
    assert [entry["step"] for entry in history] == [1, 2]
    for entry in history:
        assert entry["mismatch/kl_k3"] > 1e-6 and 0 < entry["ais/alpha"] <= 1
        assert {"rewards/arithmetic_reward/mean", "rewards/spread/mean"} <= set(entry)


def test_train_adapters_and_evaluate(argv, tmp_path, problems):
    main(["train", *argv, "--use_peft", "--lora_r", "4", "--eval_strategy", "steps", "--eval_steps", "1"])
    adapter = json.loads((tmp_path / "run" / "adapter_config.json").read_text())
    assert adapter["r"] == 4 and adapter["lora_dropout"] == 0
    entries = [entry for entry in read_run(tmp_path / "run").history if "eval_reward" in entry]
    assert [entry["step"] for entry in entries] == [1, 2]


def test_a_run_that_is_evaluated_on_its_own_prompts_says_so(argv, problems, tmp_path, capsys):
    """A file holds one split, under any name."""
    told = "No `eval_dataset_name`: the run is evaluated on the prompts that it trains on."
    halves = ["--dataset_train_split", "train[:4]", "--dataset_test_split", "test[4:]"]
    other = str(tmp_path / "others.json")
    Path(other).write_text(Path(problems).read_text())
    evaluated = ["--eval_strategy", "steps", "--eval_steps", "1"]
    for extra, says in ((evaluated, True), ([], False), ([*evaluated, *halves], False)):
        main(["train", *argv, *extra, "--dry_run", "true"])
        assert (told in capsys.readouterr().out) == says
    main(["train", *argv, *evaluated, "--eval_dataset_name", other, "--dry_run", "true"])
    assert told not in capsys.readouterr().out


def test_a_configuration_is_that_of_its_dataset(argv, problems, tmp_path, monkeypatch):
    read, load = [], train.launch.load_prompts

    def noting(name, split, config, *others):
        read.append((name, config))
        return load(name, split, None, *others)

    monkeypatch.setattr(train.launch, "load_prompts", noting)
    other = str(tmp_path / "others.json")
    Path(other).write_text(Path(problems).read_text())
    given = [*argv, "--dataset_config", "level_4", "--eval_strategy", "steps", "--dry_run", "true"]
    for name in ([], ["--eval_dataset_name", other]):
        main(["train", *given, *name])
    assert read == [(problems, "level_4"), (problems, "level_4"), (problems, "level_4"), (other, None)]


def test_own_rewards_are_added(argv, monkeypatch):
    class Stop(Exception):
        pass

    def trainer(**kwargs):
        raise Stop(kwargs)

    def brevity(completions, **kwargs):
        return [0.0]

    trainer.config_class = QuantGRPOConfig
    monkeypatch.setitem(train.launch.TRAINERS, "grpo", trainer)
    with pytest.raises(Stop) as stop:
        train.main(argv, reward_funcs=[brevity])
    (kwargs,) = stop.value.args
    assert [reward.__name__ for reward in kwargs["reward_funcs"]] == ["arithmetic_reward", "brevity"]
    assert kwargs["train_dataset"][0]["prompt"] == [{"role": "user", "content": "0+0="}]
    assert "eval_dataset" not in kwargs and kwargs["peft_config"] is None


def test_ais_brings_its_defaults(argv, tmp_path):
    """The same flag means the same from the command line and in a script."""
    args = train.parse_args([*argv, "--is_correction", "ais"])[1]
    script = QuantGRPOConfig("unused", is_correction="ais", use_cpu=True, bf16=False)
    assert args.scale_rewards == script.scale_rewards == "none" and args.loss_type == script.loss_type == "grpo"
    args = train.parse_args([*argv, "--is_correction", "ais", "--scale_rewards", "group", "--loss_type", "dapo"])[1]
    assert args.scale_rewards == "group" and args.loss_type == "dapo"
    assert train.parse_args([*argv, "--is_correction", "acr", "--rollout_precision", "fp8"])[1].scale_rewards == "group"

    (tmp_path / "recipe.yaml").write_text("is_correction: ais\nrollout_precision: fp8\nreward_funcs: [gsm8k, format]\n")
    cpu = ["--use_cpu", "--bf16", "false"]
    script, args, _ = train.parse_args(["--config", str(tmp_path / "recipe.yaml"), "--model_name_or_path", "m", *cpu])
    assert args.scale_rewards == "none" and args.rollout_precision == "fp8"
    assert script.reward_funcs == ["gsm8k", "format"] and script.dataset_name == "openai/gsm8k"
    (tmp_path / "recipe.yaml").write_text("reward_funcs: format\n")
    script, _, _ = train.parse_args(["--config", str(tmp_path / "recipe.yaml"), "--model_name_or_path", "m", *cpu])
    assert script.reward_funcs == ["format"] and len(script.rewards) == 1


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("trainer: [ppo]", r"`trainer`=\['ppo'\] is unknown. Allowed: 'grpo'"),
        ("dataset_name: [a]", r"`dataset_name`=\['a'\] must be a string"),
        ("instruction: 5", "`instruction`=5 must be a string"),
        ("max_steps: 2.5", "`max_steps`=2.5 must be an integer"),
    ],
)
def test_values_of_another_type_in_a_yaml_file(tmp_path, line, says):
    (tmp_path / "recipe.yaml").write_text(f"{line}\n")
    with pytest.raises(ValueError, match=says):
        train.parse_args(["--config", str(tmp_path / "recipe.yaml"), "--model_name_or_path", "m", "--use_cpu"])


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        (["--rollout_precision", "int5"], ["rollout_precision", "int5", "int4"]),
        (["--is_correction", "magic"], ["is_correction", "magic", "ais"]),
        (["--reward_funcs", "brevity"], ["reward_funcs", "brevity", "gsm8k"]),
        (["--reward_funcs", "messages.nothing"], ["reward_funcs", "messages.nothing", "gsm8k"]),
        (["--dataset_name", "nowhere.jsonl"], ["nowhere.jsonl"]),
        (["--dataset_name", "{no_prompts}"], ["text", "'prompt' or 'question'"]),
        (["--dataset_name", "{no_answers}"], ["arithmetic", "'answer'", "['prompt']"]),
        (["--eval_strategy", "steps", "--eval_dataset_name", "{no_prompts}"], ["text", "'prompt' or 'question'"]),
        (["--eval_dataset_name", "{no_answers}"], ["eval_dataset_name", "acts only with an `eval_strategy`"]),
    ],
)
def test_bad_input_is_refused_before_a_model_is_loaded(argv, extra, says, tmp_path, monkeypatch):
    for name, row in (("no_prompts", {"text": "1+1"}), ("no_answers", {"prompt": "1+1"})):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    extra = [part.replace("{", str(tmp_path) + "/").replace("}", ".jsonl") for part in extra]

    def load(*args, **kwargs):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", load)
    with pytest.raises(SystemExit) as error:
        main(["train", *argv, *extra])
    assert all(part in str(error.value.code) for part in ["error: ", *says])


ADAPTERS_IN_VAIN = [  # options -> what the message says
    (["--lora_r", "4"], "`lora_r`=4 acts only with `use_peft`=True: without it all weights are trained"),
    (["--lora_target_modules", "all-linear"], "`lora_target_modules`='all-linear' acts only with"),
    (["--use_dora", "--use_peft", "false"], "`use_dora`=True acts only with"),
    (["--config", "{tmp}/lora.yaml"], "`lora_alpha`=8 acts only with"),
    (["--load_in_4bit", "true"], "`load_in_4bit`=True acts only with `use_peft`=True: weights in so few bits"),
]


@pytest.mark.parametrize(("extra", "says"), ADAPTERS_IN_VAIN, ids=[says for _, says in ADAPTERS_IN_VAIN])
def test_options_of_an_adapter_want_one(argv, extra, says, tmp_path):
    """A run that trains all weights would ignore them. A recipe may set them for its own adapter."""
    (tmp_path / "lora.yaml").write_text("lora_alpha: 8\n")
    extra = [part.replace("{tmp}", str(tmp_path)) for part in extra]
    with pytest.raises(ValueError) as error:
        train.parse_args([*argv, *extra])
    assert says in str(error.value)
    if "--load_in_4bit" not in extra:
        train.parse_args([*argv, *(part for part in extra if part not in ("--use_peft", "false")), "--use_peft"])
    recipe = {"use_peft": True, "lora_r": 32, "lora_target_modules": ["q_proj", "v_proj"]}
    train.parse_args([*argv, "--use_peft", "false"], recipe)


def test_a_run_that_cannot_start_is_refused_before_a_model_is_loaded(argv, tmp_path, monkeypatch):
    """An `output_dir` of another run, or no directory; a resume of nothing, or of other settings. Also in a dry run."""
    quantized = [*argv, "--rollout_precision", "int4"]
    main(["train", *quantized, "--max_steps", "1"])
    (tmp_path / "file").write_text("")
    (tmp_path / "number.yaml").write_text("resume_from_checkpoint: 1\n")
    place = argv.index("--output_dir") + 1

    def load(*args, **kwargs):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", load)
    for output_dir, extra, says in (
        ("run", [], "holds the checkpoint checkpoint-1 of an earlier run"),
        ("file", [], "file is not a directory"),
        ("file/in/it", [], "file is not a directory"),
        ("new", ["--resume_from_checkpoint", "true"], "there is nothing to resume"),
        ("new", ["--resume_from_checkpoint", str(tmp_path / "run/checkpoint-7")], "checkpoint-7' is not a directory"),
        ("run", ["--resume_from_checkpoint", "true", "--is_correction", "ais"], "`is_correction`: 'tis' -> 'ais'"),
        ("run", ["--config", str(tmp_path / "number.yaml")], "`resume_from_checkpoint`=1 must be the directory of a"),
    ):
        quantized[place] = str(tmp_path / output_dir)
        for dry in ("false", "true"):
            with pytest.raises(SystemExit) as error:
                main(["train", *quantized, *extra, "--dry_run", dry])
            assert str(error.value).startswith("error: ") and says in str(error.value)
    quantized[place] = str(tmp_path / "run")
    main(["train", *quantized, "--resume_from_checkpoint", "true", "--dry_run", "true"])
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("dry", ["false", "true"])
def test_a_tracker_that_is_not_installed_is_refused_before_a_model_is_loaded(argv, monkeypatch, dry):
    def load(*args, **kwargs):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", load)
    monkeypatch.setattr("transformers.integrations.integration_utils.is_wandb_available", lambda: False)
    for tracker, says in (
        ("wandb", r"`report_to`=\['wandb'\]: 'wandb' cannot be imported"),
        ("wanda", "wanda is not supported, only .*wandb"),
    ):
        with pytest.raises(SystemExit, match=says):
            main(["train", *argv, "--report_to", tracker, "--dry_run", dry])


def test_a_model_must_be_named(problems):
    for on_a_cpu in (["--use_cpu", "--bf16", "false"], []):
        with pytest.raises(SystemExit, match="`model_name_or_path`=None: name the model to train"):
            main(["train", "--dataset_name", problems, *on_a_cpu])
