"""The configuration of each published figure stands beside it, is what the benchmark builds, and can be run."""

import re
import shlex
import sys
from dataclasses import replace

import pytest
import torch
import yaml
from figures import MEASURED
from pages import README
from places import ROOT

import trl_quant
from trl_quant.cli.train import parse_args
from trl_quant.config.summary import lacks_for_speed, summary
from trl_quant.report.measured import STEPS, differences


LINK = re.compile(r"configs/figures/([\w-]+)\.yaml")
BUILDING = ("step.py", "diffusion.py", "memory.py", "update.py")  # benchmarks that build one trainer a figure


@pytest.fixture(scope="module")
def configurations():
    sys.path.append(str(ROOT / "benchmarks"))
    import configurations

    return configurations


def rows() -> list[str]:
    """README's table of results, and the one that continues it."""
    tables = [text.partition("\n| what | result | repeat it |")[2].partition("\n\n")[0] for text in (README, MEASURED)]
    return [row for table in tables for row in table.splitlines()[2:]]


def names() -> list[str]:
    return sorted(path.stem for path in (ROOT / "configs/figures").glob("*.yaml"))


def test_each_figure_has_its_configuration_beside_it(configurations):
    """Rows are walked: one of a benchmark that builds a trainer must link to the files of its own command."""
    linked = set()
    for row in rows():
        found = LINK.findall(row)
        linked |= {*found}
        (command,) = re.findall(r"`(python benchmarks/[^`]*|pytest [^`]*)`", row) or [None]
        if command is None:
            assert "the same" in row and found, row
            continue
        script, *words = shlex.split(command.removeprefix("python benchmarks/"))
        assert bool(found) == (script in BUILDING), row
        if script == "step.py":
            args = configurations.step.options(cuda=True).parse_args(words)
            own = [name for name in args.trainers if name not in configurations.step.TRLS]
            for name in found:
                of_file = yaml.safe_load((ROOT / f"configs/figures/{name}.yaml").read_text())
                made = [
                    configurations.step.settings_of(one(args, completions=[shape]), trainer, cuda=True)
                    for trainer in own
                    for shape in args.completions
                ]
                assert any(settings.items() <= of_file.items() for settings in made), (row, name)
    assert {*names()} == linked | {*LINK.findall(MEASURED)}
    assert "configs/figures" in README.partition("```diff")[0]  # where the two lines are shown


def one(args, **changed):
    """The arguments with others."""
    return type(args)(**vars(args) | changed)


def test_files_are_what_the_benchmarks_build(configurations, monkeypatch):
    """To the letter; and a benchmark builds its trainer with the very settings that a file has."""
    assert names() == sorted(configurations.FIGURES)
    for name in names():
        assert (ROOT / f"configs/figures/{name}.yaml").read_text() == configurations.text_of(name)
    step = configurations.step
    monkeypatch.setattr(step, "settings_of", lambda args, trainer, cuda=True: {"rollout_precision": "changed"})
    assert configurations.configuration(configurations.FIGURES["7b-fp8-64x1024"])["rollout_precision"] == "changed"


@pytest.mark.parametrize("script", ["step", "diffusion", "memory"])
def test_a_benchmark_takes_its_settings_from_one_function(configurations, script):
    """`make_trainer` names no field that `settings_of` returns, so the two cannot differ."""
    source = (ROOT / f"benchmarks/{script}.py").read_text()
    body = source.partition("def make_trainer(")[2].partition("\n\n\n")[0]
    if "run_settings(args" in body:  # shared with another trainer
        body += source.partition("def run_settings(")[2].partition("\n\n\n")[0]
    (name,) = [name for name in configurations.FIGURES if configurations.FIGURES[name].startswith(f"{script}.py")][:1]
    own = {*configurations.configuration(configurations.FIGURES[name])}
    own -= {"model_name_or_path", "dtype", "use_peft", "trainer", "vllm_engine_kwargs"}
    own = {field for field in own if not field.startswith("lora_")}
    assert "settings_of(args" in body and len(own) > 8
    assert not [field for field in own if f'"{field}"' in body]


@pytest.mark.parametrize("name", names())
def test_a_configuration_can_be_run(name, tmp_path):
    """The command takes it as it is, with every value; only the device differs here."""
    path = ROOT / f"configs/figures/{name}.yaml"
    here = ["--use_cpu", "true", "--output_dir", str(tmp_path), "--report_to", "none"]
    script_args, args, model_args = parse_args(["--config", str(path), *here])
    for field, value in yaml.safe_load(path.read_text()).items():
        holder = next(one for one in (script_args, model_args, args) if hasattr(one, field))
        found = getattr(holder, field)
        assert found in (value, [value]), field
    args.resolve_for(adapted=True)
    if "7b-fp8-" in name and "sampling" not in name:
        assert lacks_for_speed(args, True, torch.bfloat16) == []
    if name == "7b-fp8-64x1024":
        (step,) = [s for s in STEPS if (s.size, s.rollout, s.train, s.completions) == ("7b", "fp8", "fp8", 64)]
        assert differences(step, args, torch.bfloat16, True) == []
        assert differences(replace(step, completions=8), args, torch.bfloat16, True)


def test_the_first_line_says_what_a_run_lacks(tmp_path):
    """Each part alone, and only for a run that vLLM makes faster."""
    settings = {"use_vllm": True, "vllm_mode": "colocate", "rollout_precision": "fp8", "train_precision": "fp8"}
    settings |= {"per_device_train_batch_size": 8, "num_generations": 8, "max_completion_length": 1024}

    def lacking(adapted: bool = True, dtype=torch.bfloat16, **others) -> list[str]:
        args = trl_quant.QuantGRPOConfig(tmp_path, use_cpu=True, report_to=[], **settings | others)
        line = summary(args, adapted, dtype, on_cpu=False)
        found = lacks_for_speed(args, adapted, dtype)
        assert line.endswith(f"; lacks for README's speed: {', '.join(found)}") == bool(found)
        assert "lacks" not in summary(args, adapted, dtype)  # on a CPU
        return found

    assert lacking() == []
    assert lacking(dtype=torch.float32) == ["policy in FP32 (`dtype`='bfloat16')"]
    assert lacking(adapted=False) == ["no LoRA"]
    assert lacking(train_precision=None) == ["`train_precision` is not set"]
    assert lacking(max_completion_length=256) == [
        "micro-batches of at most 2048 tokens (`per_device_train_batch_size`), not 4096"
    ]
    assert len(lacking(adapted=False, dtype=torch.float32, train_precision=None, max_completion_length=16)) == 4
    assert lacking(adapted=False, dtype=torch.float32, use_vllm=False, train_precision=None) == []
    assert lacking(adapted=False, dtype=torch.float32, rollout_precision=None, train_precision=None) == []
