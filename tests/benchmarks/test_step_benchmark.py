"""`benchmarks/step.py`: lengths drawn beforehand, trainers by name, and files of runs that can stand in one table."""

import argparse
import copy
import json
import math
import statistics
import subprocess
import sys
from types import SimpleNamespace

import pytest
import warm
from long_tests import rest_is_long
from places import BENCHMARKS
from tiny import save_words


@pytest.fixture
def step(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import step

    return step


@pytest.fixture
def step_runs(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import step_runs

    return step_runs


# Lengths


def drawn(step, *words: str, completions: int = 64, new: int = 64, lengths: str = "lognormal") -> list[list[int]]:
    return step.draw_lengths(step.options().parse_args(["--median", "20", *words]), completions, new, lengths)


def test_lengths_are_the_same_for_all_trainers_and_other_ones_in_each_step(step):
    first = drawn(step, "--trainers", "bf16")
    assert first == drawn(step, "--trainers", "int8", "--micro", "2")
    assert first != drawn(step, "--seed", "1")
    assert len(first) == 6 and len(set(map(tuple, first))) == 6
    assert drawn(step, "--steps", "3") == first[:3]


def test_lengths_are_lognormal_and_cut(step):
    lengths = [length for each in drawn(step, completions=4000, new=64) for length in each]
    assert min(lengths) >= 1 and max(lengths) == 64
    assert abs(statistics.median(lengths) - 20) <= 1
    # The share of a normal distribution beyond the cut
    beyond = statistics.NormalDist().cdf((math.log(20) - math.log(64)) / 0.8)
    assert abs(lengths.count(64) / len(lengths) - beyond) < 0.01
    assert min(map(min, drawn(step, "--median", "0.1"))) == 1
    assert drawn(step, lengths="equal") == [[64] * 64] * 6


def test_lengths_are_geometric_and_cut(step):
    """Of what is left at any length half ends within the next 20 tokens."""
    lengths = [length for each in drawn(step, completions=4000, new=64, lengths="geometric") for length in each]
    assert min(lengths) == 1 and max(lengths) == 64
    for passed in (20, 40):
        left = [length for length in lengths if length > passed - 20]
        assert abs(sum(length > passed for length in left) / len(left) - 0.5) < 0.02


def test_steps_of_other_lengths_are_refused(step):
    logged = [{f"completions/{name}_length": float(value) for name, value in (("min", 1), ("mean", 2), ("max", 3))}]
    step.check_lengths(logged, [[1, 2, 3]])
    for wrong in ([[1, 1, 3]], [[1, 2, 4]], [[0, 2, 3]], [[1, 2, 3]] * 2):
        with pytest.raises(AssertionError):
            step.check_lengths(logged, wrong)


def test_a_warm_up_alone_is_refused(step, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["step.py", "--steps", "1"])
    with pytest.raises(SystemExit):
        step.main()
    assert "`--steps` must be at least 2" in capsys.readouterr().err


# Trainers


def test_trainers_by_name(step):
    assert step.fields_of("bf16") == {"rollout_precision": "bf16"}
    assert step.fields_of("bf16+padded") == {"rollout_precision": "bf16", "pack_sequences": False}
    assert step.fields_of("bf16+replay") == {"rollout_precision": "bf16", "router_replay": True}
    assert step.fields_of("bf16+liger") == {"rollout_precision": "bf16", "use_liger_kernel": True}
    assert step.fields_of("int8/int8/exact+packed") == {
        "rollout_precision": "int8",
        "train_precision": "int8",
        "exact_rollouts": True,
        "pack_sequences": True,
    }
    assert step.fields_of("bf16/nvfp4") == {
        "rollout_precision": "bf16",
        "train_precision": "nvfp4",
        "lora_sync": "adapter",
    }


def test_shapes_by_name(step):
    assert step.shape_of("64x4096:lognormal") == (64, 4096, "lognormal")
    assert step.shape_of("64x4096:geometric") == (64, 4096, "geometric")
    assert step.shape_of("8x16") == step.shape_of("8x16:equal") == (8, 16, "equal")
    for text in ("64", "64x", "64x4096:normal", "64x4096:", "ax4"):
        with pytest.raises(argparse.ArgumentTypeError, match="is no shape such as 64x1024 or 64x4096:lognormal"):
            step.shape_of(text)


def test_the_method_stands_before_the_name(step, step_runs):
    assert step.fields_of("rloo:int8/int8") == step.fields_of("int8/int8")
    assert step.fields_of("ppo:bf16+padded") == step.fields_of("bf16+padded")
    assert step.trainer_name("rloo:trl") == "rloo:trl"
    found = [step_runs.parts_of(name) for name in ("fp8/fp8", "rloo:trl", "ppo:int8/int8/exact")]
    assert found == [("grpo", "fp8/fp8"), ("rloo", "trl"), ("ppo", "int8/int8/exact")]


@pytest.mark.parametrize(
    "name",
    [
        "sft:bf16",
        "ppo:trl",
        ":bf16",
        "rloo:trl-control",
        "int9",
        "trl-contrl",
        "int8/bf16",
        "int8/exact",
        "bf16/nvfp4/exact",
        "bf16+long",
        "",
    ],
)
def test_other_names_are_refused(step, name, capsys):
    with pytest.raises(SystemExit):
        step.options().parse_args(["--trainers", "bf16", name])
    assert repr(name) in capsys.readouterr().err


def test_unsloth_runs_in_a_process_with_its_own_packages(step, step_runs, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/ours")
    args = step.options().parse_args(["--trainers", "trl", "unsloth-fp8", "--unsloth_site", "/theirs"])
    assert args.trainers == ["trl", "unsloth-fp8"]
    assert step_runs.process_of("trl", args) == {}
    process = step_runs.process_of("unsloth-fp8", args)
    assert process == {"script": str(BENCHMARKS / "unsloth_step.py"), "PYTHONPATH": "/theirs:/ours"}
    assert (BENCHMARKS / "unsloth_step.py").is_file()
    shared = step.settings_of(args, "unsloth")
    assert shared == step.settings_of(args, "trl-control")


def test_another_script_runs_with_further_variables(step, monkeypatch):
    import engines

    def run(command, env, **options):
        assert command[1:] == ["other.py", "--one", "unsloth"] and env["PYTHONPATH"] == "/theirs"
        return engines.subprocess.CompletedProcess(command, 0, "RESULT {}", "")

    monkeypatch.setattr(engines.subprocess, "run", run)
    assert engines.in_own_process(["--one", "unsloth"], 1, script="other.py", PYTHONPATH="/theirs") == {}


def test_limits_of_unsloth_are_those_of_its_base(step_runs):
    arguments = {"prompt": 256, "generations": 8, "lora": 32}
    for name, ours in (("unsloth", "bf16"), ("unsloth-fp8", "fp8/fp8")):
        theirs, same = (
            step_runs.limits_of({"trainer": trainer, "size": "7b"}, "H100", arguments, [[64] * 8])
            for trainer in (name, ours)
        )
        assert theirs == same


def test_limits_of_a_switch_are_those_without_it(step_runs):
    arguments = {"prompt": 256, "generations": 8, "lora": 32}
    runs = ({"trainer": name, "size": "30b-a3b"} for name in ("fp8+replay", "fp8", "bf16"))
    replayed, fp8, bf16 = (step_runs.limits_of(run, "H200", arguments, [[64] * 8]) for run in runs)
    assert replayed == fp8 != bf16


# Files of runs


SHAPE = "2x64 lognormal"


def runs_of(*trainers: tuple[str, int, list[float]]) -> dict:
    runs = []
    for trainer, micro, steps in trainers:
        phases = {"sampling": 1.0, "sync": 0.1, "scoring": 0.0, "rest": 0.0}
        measured = [phases | {"step": step, "update": step - 1.1} for step in steps]
        results = {SHAPE: {"warm_up": {"step": 99.0}, "steps": measured, "peak_bytes": 2**30}}
        runs.append({"trainer": trainer, "size": "tiny", "micro": micro, "load": [0.5, 0, 0], "results": results})
    return {
        "machine": "a CPU",
        "commit": "c0ffee",
        "versions": {"torch": "2"},
        "arguments": {"prompt": 16},
        "lengths": {SHAPE: [[60, 60], [10, 20], [30, 40]]},
        "runs": runs,
    }


def test_runs_of_several_calls_stand_in_one_file(step_runs, tmp_path):
    one, two = runs_of(("bf16", 4, [4.0, 6.0])), runs_of(("int8", 4, [2.0, 3.0]))
    two["lengths"]["2x64 equal"] = [[64, 64]] * 3
    for name, found in (("one", one), ("two", two)):
        step_runs.write(found, tmp_path / f"{name}.json")
    both = step_runs.read(tmp_path / "one.json", tmp_path / "two.json")
    assert [run["trainer"] for run in both["runs"]] == ["bf16", "int8"]
    assert both["lengths"] == two["lengths"]


def test_a_run_of_fewer_steps_stands_beside_the_others(step_runs, capsys):
    found, shorter = runs_of(("bf16", 4, [4.0, 6.0])), runs_of(("int8", 4, [2.0]))
    shorter["lengths"][SHAPE] = shorter["lengths"][SHAPE][:2]
    for both in (step_runs.merged(found, shorter), step_runs.merged(shorter, found)):
        assert both["lengths"] == found["lengths"]
        step_runs.print_tables(both)
        rows = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines() if "  " in line}
        # steps, the median, and tokens per second: 30 and 70 in a second, or 30 alone
        assert [rows["bf16"][i] for i in (2, 3, -3)] == ["2", "5.00", "50"]
        assert [rows["int8"][i] for i in (2, 3, -3)] == ["1", "2.00", "30"]


@pytest.mark.parametrize(
    "name, value",
    [
        ("machine", "another"),
        ("commit", "decaf"),
        ("versions", {"torch": "3"}),
        ("arguments", {"prompt": 8}),
        ("lengths", {SHAPE: [[60, 60], [10, 20], [30, 41]]}),
    ],
)
def test_runs_that_cannot_be_compared_are_refused(step_runs, name, value):
    found = runs_of(("bf16", 4, [4.0, 6.0]))
    other = copy.deepcopy(found) | {name: value}
    with pytest.raises(ValueError, match=name):
        step_runs.merged(found, other)


def test_table_has_medians_and_a_ratio_to_each_baseline(step_runs, capsys):
    rounds = [("trl", 4, [12.0, 20.0]), ("bf16", 2, [9.0, 9.0]), ("bf16", 4, [6.0, 6.0]), ("int8", 4, [3.0, 3.0])]
    step_runs.print_tables(runs_of(*rounds, ("trl", 4, [12.0, 12.0])))
    title, heading, *rows = capsys.readouterr().out.strip().splitlines()[2:]
    assert title == "Qwen2.5 tiny, 2x64 lognormal: steps of 30 to 70 tokens, 25 a completion"
    assert heading.split()[:11] == ["trainer", "micro", "steps", "step", "s", "min", "max", "mean", "x", "trl", "x"]
    # trainer, micro-batch, steps, median, fastest, slowest, mean, ratios to TRL's and to the faster of ours in BF16
    assert [row.split()[:9] for row in rows] == [
        ["trl", "4", "4", "12.00", "12.00", "20.00", "14.00", "1.00", "0.50"],
        ["bf16", "2", "2", "9.00", "9.00", "9.00", "9.00", "1.33", "0.67"],
        ["bf16", "4", "2", "6.00", "6.00", "6.00", "6.00", "2.00", "1.00"],
        ["int8", "4", "2", "3.00", "3.00", "3.00", "3.00", "4.00", "2.00"],
    ]
    # sampling, sync, no scoring, update, rest, tokens per second (30 and 70 in a second), memory, load
    assert rows[-1].split()[9:] == ["1.00", "0.10", "0", "1.90", "0", "50", "1.0", "0.5"]


def test_the_mean_is_that_of_the_last_16_steps(step_runs, capsys):
    run = runs_of(("int8@2", 4, [100.0, 1.0, 3.0, *[2.0] * 14]))
    run["lengths"][SHAPE] *= 6
    step_runs.print_tables(run)
    row = capsys.readouterr().out.strip().splitlines()[-1].split()
    assert row[:1] + row[2:4] + row[6:7] == ["int8@2", "17", "2.00", "2.00"]


def test_a_trainer_is_compared_with_those_of_its_method(step_runs, capsys):
    runs = [("trl", 4, [12.0]), ("rloo:trl", 4, [20.0]), ("rloo:int8", 4, [5.0]), ("ppo:int8", 4, [4.0])]
    step_runs.print_tables(runs_of(*runs))
    rows = [row.split() for row in capsys.readouterr().out.strip().splitlines()[4:]]
    assert [row[7] for row in rows] == ["1.00", "1.00", "4.00", "-"]


def test_processes_that_start_together_get_ports_of_their_own(step, monkeypatch):
    """TRL takes the first free one of four, and a second process may find it free before the first has taken it."""
    import engines

    given = []

    def run(command, env, **options):
        given.append(env["MASTER_PORT"])
        return engines.subprocess.CompletedProcess(command, 0, "RESULT {}", "")

    monkeypatch.setattr(engines.subprocess, "run", run)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    for _ in range(2):
        assert engines.in_own_process([], 1) == {}
    assert given[0] != given[1] and not {"29500", "23456", "12355", "12345"} & set(given)
    monkeypatch.setenv("MASTER_PORT", "29511")
    engines.in_own_process([], 1)
    assert given[2] == "29511"


# The whole


@pytest.mark.slow
@pytest.mark.parametrize("size", rest_is_long(["tiny", "tiny-moe", "tiny-hybrid"]))
def test_trainers_get_the_lengths_that_were_drawn(size, tmp_path, step, monkeypatch, capsys):
    """The trainer in a process of its own, which is the script's; the tables are the same when they are shown again."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    import engines

    def run(command, timeout=None, **options):
        return warm.run(command, **options) if command[0] == sys.executable else subprocess.run(command, **options)

    monkeypatch.setattr(engines, "subprocess", SimpleNamespace(**vars(subprocess) | {"run": run}))
    output = tmp_path / "runs.json"
    words = ["--tokenizer", save_words(tmp_path / "tokenizer.json"), "--sizes", size, "--generations", "2"]
    words += ["--trainers", "bf16", "--completions", "4x16:lognormal", "8x8", "--micro", "8"]
    words += ["--steps", "3", "--median", "6"]

    def printed(*words) -> str:
        monkeypatch.setattr(sys, "argv", [str(BENCHMARKS / "step.py"), *map(str, words)])
        step.main()
        return capsys.readouterr().out.strip()

    done = printed(*words, "--output", output)
    found = json.loads(output.read_text())
    assert len(set(map(tuple, found["lengths"]["4x16 lognormal"]))) == 3
    assert found["lengths"]["8x8 equal"] == [[8] * 8] * 3
    (run,) = found["runs"]
    assert run["results"].keys() == found["lengths"].keys()
    for result in run["results"].values():
        assert len(result["steps"]) == 2
        for seconds in (result["warm_up"], *result["steps"]):
            assert seconds["sampling"] > 0 and seconds["update"] > 0 and seconds["scoring"] == 0
            phases = sum(seconds[phase] for phase in ("sampling", "sync", "scoring", "update", "rest"))
            assert math.isclose(phases, seconds["step"], rel_tol=1e-6)
    shown = printed("--show", output)
    assert shown and shown in done
