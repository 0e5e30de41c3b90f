"""`trl-quant`: help without heavy imports, training from the command line, reports of runs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib import image
from rich.console import Console
from tiny import save_tiny
from transformers import AutoModelForCausalLM

import trl_quant.cli.train as train
from trl_quant import QuantGRPOConfig
from trl_quant.cli import COMMANDS, main
from trl_quant.cli.report import Run, chart, moving_average, plot, read_run, table


ROOT = Path(__file__).parents[1]
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


def spread(completions, **kwargs) -> list[float]:
    """A reward that differs within every group."""
    return [sum(map(ord, message["content"])) % 97 / 97 for (message,) in completions]


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


def test_every_command_exists(monkeypatch):
    for name in COMMANDS:
        called = []
        monkeypatch.setattr(f"trl_quant.cli.{name}.main", called.append)
        main([name, "--some", "option"])
        assert called == [["--some", "option"]]


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
    quantized += ["--reward_funcs", "arithmetic", "test_cli.spread"]
    main(["train", *argv, *quantized, "--max_steps", "1"])
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
    assert json.loads((tmp_path / "run" / "adapter_config.json").read_text())["r"] == 4
    entries = [entry for entry in read_run(tmp_path / "run").history if "eval_reward" in entry]
    assert [entry["step"] for entry in entries] == [1, 2]


def test_own_rewards_are_added(argv, monkeypatch):
    class Stop(Exception):
        pass

    def trainer(**kwargs):
        raise Stop(kwargs)

    def brevity(completions, **kwargs):
        return [0.0]

    monkeypatch.setattr(train, "QuantGRPOTrainer", trainer)
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


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        (["--rollout_precision", "int5"], ["rollout_precision", "int5", "int4"]),
        (["--is_correction", "magic"], ["is_correction", "magic", "ais"]),
        (["--reward_funcs", "brevity"], ["reward_funcs", "brevity", "gsm8k"]),
        (["--reward_funcs", "test_cli.nothing"], ["reward_funcs", "test_cli.nothing", "gsm8k"]),
        (["--dataset_name", "nowhere.jsonl"], ["nowhere.jsonl"]),
        (["--dataset_name", "{no_prompts}"], ["text", "'prompt' or 'question'"]),
        (["--dataset_name", "{no_answers}"], ["arithmetic", "'answer'", "['prompt']"]),
        (["--eval_strategy", "steps", "--eval_dataset_name", "{no_prompts}"], ["text", "'prompt' or 'question'"]),
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


def test_a_model_must_be_named(problems):
    with pytest.raises(SystemExit, match="model_name_or_path"):
        main(["train", "--dataset_name", problems, "--use_cpu", "--bf16", "false"])


# report


def entries(n: int, offset: float = 0.0) -> list[dict]:
    weight = "sampling/importance_sampling_ratio"
    return [
        {
            "step": i + 1,
            "reward": i / 10 + offset,
            "mismatch/kl_k3": 0.001 * (i + 1),
            f"{weight}/min": 0.5,
            f"{weight}/mean": 0.9,
            f"{weight}/max": 2.0,
        }
        for i in range(n)
    ]


def write_jsonl(directory: Path, rows: list[dict]) -> Path:
    directory.mkdir()
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def text_of(result) -> str:
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(result)
    return console.export_text()


def test_runs_are_read_from_all_that_a_trainer_leaves(tmp_path):
    live = write_jsonl(tmp_path / "live", entries(3))
    assert read_run(live) == Run("live", entries(3))
    done = tmp_path / "done"
    for step in (9, 10):
        (done / f"checkpoint-{step}").mkdir(parents=True)
        state = {"log_history": entries(step), "global_step": step}
        (done / f"checkpoint-{step}" / "trainer_state.json").write_text(json.dumps(state))
    assert read_run(done).steps == 10  # the newest, by number and not by name
    (done / "trainer_state.json").write_text(json.dumps({"log_history": entries(12)}))
    assert read_run(done, name="x") == Run("x", entries(12))
    with pytest.raises(ValueError, match=r"nothing.*metrics\.jsonl.*trainer_state\.json"):
        read_run(tmp_path / "nothing")


def test_table():
    finished = [{"step": 0, "eval_accuracy": 0.25}, *entries(20), {"step": 20, "train_runtime": 61.4}]
    finished += [{"step": 20, "eval_accuracy": 0.75}]
    runs = [Run("int4 ais", finished), Run("bare", [{"step": 3, "reward": 0.5}]), Run("broken", [], "failed: x")]
    header, _, first, second, third = (line for line in text_of(table(runs)).splitlines() if line.strip())
    assert header.split() == ["run", "reward", "held-out", "KL", "mean", "last", "weight", "s", "status"]
    # rewards 0, .1, .2, .3, .4 -> 0.20 and 1.5 ... 1.9 -> 1.70; KL .001 ... .020 -> .0105 and .018
    assert first.split() == ["int4", "ais", "0.20→1.70", "0.25→0.75", "1.1e-02", "1.8e-02", "0.900", "61", "done"]
    assert second.split() == ["bare", "0.50→0.50", "-", "-", "-", "-", "-", "stopped", "at", "step", "3"]
    assert third.split()[-2:] == ["failed:", "x"]


def test_moving_average():
    assert moving_average([1.0, 2.0, 6.0, 4.0], window=2) == [1.0, 1.5, 4.0, 5.0]


def test_chart_draws_every_run(tmp_path):
    runs = [Run("a", entries(4)), Run("b", entries(6, offset=0.5)), Run("full", [{"step": 1, "reward": 1.0}])]
    reward, kl, weight = chart(runs).axes
    named = [
        {x.get_label(): x for x in axis.lines if not x.get_label().startswith("_")} for axis in (reward, kl, weight)
    ]
    assert [list(lines) for lines in named] == [["a", "b", "full"]] * 3
    assert list(named[0]["b"].get_xdata()) == [1, 2, 3, 4, 5, 6]
    assert list(named[0]["a"].get_ydata()) == moving_average([0.0, 0.1, 0.2, 0.3])
    assert list(named[1]["b"].get_ydata()) == moving_average([0.001 * i for i in range(1, 7)])
    assert [list(named[2][name].get_ydata()) for name in ("a", "b", "full")] == [[0.9] * 4, [0.9] * 6, []]
    assert kl.get_yscale() == weight.get_yscale() == "log"
    band = weight.collections[0].get_paths()[0].vertices[:, 1]
    assert (band.min(), band.max()) == (0.5, 2.0)
    plot(runs, tmp_path / "new/chart.png")
    assert image.imread(tmp_path / "new/chart.png").std() > 0.01


def test_report_command(tmp_path, capsys):
    runs = [str(write_jsonl(tmp_path / name, entries(3))) for name in ("one", "two")]
    main(["report", *runs, "--output", str(tmp_path / "chart.png")])
    printed = capsys.readouterr().out
    assert "one" in printed and "two" in printed and (tmp_path / "chart.png").is_file()
    with pytest.raises(SystemExit, match="nowhere"):
        main(["report", str(tmp_path / "nowhere")])
