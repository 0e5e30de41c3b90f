"""`trl-quant report`: what runs left behind is read, put together, and drawn on one whole page."""

import json
import math
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
import training
from rich.console import Console
from run_logs import climbing, entries, log, write_jsonl, write_state

from trl_quant import QuantGRPOConfig, QuantGRPOTrainer
from trl_quant.cli import main
from trl_quant.report.panels import logged
from trl_quant.report.runs import Group, Run, differences, find_runs, grouped, moving_average, named, read_run
from trl_quant.report.speed import Speed, speed, speed_rows
from trl_quant.report.table import row, table
from trl_quant.storage.whole import write_whole


WEIGHT = "sampling/importance_sampling_ratio"


# Reading


def test_runs_are_read_from_all_that_a_trainer_leaves(tmp_path):
    live = write_jsonl(tmp_path / "live", entries(3))
    assert read_run(live) == Run("live", entries(3))
    done = tmp_path / "done"
    for step in (9, 10):
        write_state(done / f"checkpoint-{step}", entries(step), global_step=step, max_steps=12)
    assert read_run(done).steps == 10  # the newest, by number and not by name
    assert read_run(done).status == "at step 10 of 12"
    write_state(done / "checkpoint-copy-99", entries(5), global_step=5, max_steps=12)  # kept by another name
    assert read_run(done).steps == 10
    write_state(done, entries(12))
    assert read_run(done, name="x") == Run("x", entries(12))
    write_state(done / "checkpoint-14", entries(14), global_step=14, max_steps=14)  # it went on after its end
    assert read_run(done).steps == 14 and read_run(done).status == "done"
    (done / "checkpoint-15").mkdir()
    (done / "checkpoint-15" / "trainer_state.json").write_text('{"log_history": [{"step"')  # being written
    assert read_run(done).steps == 14


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"nothing.*metrics\.jsonl.*trainer_state\.json"):
        read_run(tmp_path / "nothing")
    for name in ("b", "a"):
        write_jsonl(tmp_path / name, entries(1))
    with pytest.raises(ValueError, match=r"holds no run.*Runs below it: a, b\."):
        read_run(tmp_path)


def test_runs_are_found_below_a_directory(tmp_path):
    """Wherever they lie; not a run's own checkpoints, nor what hides; and the directories without runs are named."""
    for name in ("a", "deep/er/b", "deep/er/c"):
        write_jsonl(tmp_path / name, entries(1))
    write_state(tmp_path / "d/checkpoint-3", entries(3))
    for name in ("empty/below", "deep/empty", ".hidden", "a/images"):
        (tmp_path / name).mkdir(parents=True)
    write_jsonl(tmp_path / ".hidden/run", entries(1))
    (tmp_path / "linked").symlink_to(tmp_path / "a")  # the same run
    (tmp_path / "circle").symlink_to(tmp_path)
    runs, without = find_runs([tmp_path])
    assert [path.relative_to(tmp_path).as_posix() for path in runs] == ["a", "d", "deep/er/b", "deep/er/c"]
    assert [path.relative_to(tmp_path).as_posix() for path in without] == ["deep/empty", "empty"]
    assert find_runs([tmp_path / "deep", tmp_path / "a", tmp_path / "deep/er/b"])[0] == [
        tmp_path / name for name in ("deep/er/b", "deep/er/c", "a")
    ]
    assert find_runs([tmp_path / "empty", tmp_path / "nowhere"]) == ([tmp_path / "empty", tmp_path / "nowhere"], [])


def test_a_resumed_run_counts_each_step_once(tmp_path):
    """It had come to step 7 and went on from 4: what it logged of 5 to 7 is no longer what happened."""
    before = [*entries(7), {"step": 7, "eval_reward": 0.1}]
    after = [{"step": 4, "eval_reward": 0.9}, *entries(6, offset=5.0)[4:]]
    history = read_run(write_jsonl(tmp_path / "run", before + after)).history
    assert history == entries(4) + after
    losses = [{"step": i, "loss": float(i)} for i in range(1, 8)]  # distillation logs no rewards
    again = [{"step": i, "loss": 9.0} for i in (5, 6)]
    assert read_run(write_jsonl(tmp_path / "distilled", losses + again)).history == losses[:4] + again
    last = {"step": 6, "train_runtime": 1.0, "train_loss": 0.5}  # the last step again, and no step of training
    assert read_run(write_jsonl(tmp_path / "done", [*entries(6), last])).history == [*entries(6), last]


def test_a_run_that_goes_on_after_its_end_is_not_done(tmp_path):
    """Its final state and `train_runtime` are those of the first end, until the next checkpoint is written."""
    end = {"step": 6, "train_runtime": 1.0, "train_loss": 0.5}
    run = write_jsonl(tmp_path / "run", [*entries(6), end])
    assert read_run(run).status == "done"
    write_state(run, [*entries(6), end], global_step=6, max_steps=6)
    assert read_run(run).status == "done"
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in entries(8)[6:])
    assert read_run(run).status == "at step 8"
    write_state(run / "checkpoint-7", [*entries(6), end, *entries(7)[6:]], global_step=7, max_steps=9)
    assert read_run(run).status == "at step 8 of 9"


def test_a_log_without_lines_hides_no_state(tmp_path):
    write_state(write_jsonl(tmp_path / "run", []), entries(12))
    assert read_run(tmp_path / "run").history == entries(12)


def test_only_numbers_are_values():
    odd = [math.nan, None, math.inf, True, "0.5", 2]
    run = Run("odd", [{"step": i, "reward": value} for i, value in enumerate(odd)])
    assert run.series("reward") == ([5], [2])


def test_tokens_per_second():
    """Tokens are a total over the run, seconds a mean over the steps of an entry, of which there are five here."""
    rows = [
        {"step": 5, "num_tokens": 1000, "step_time": 2.0},
        {"step": 5, "eval_reward": 1.0},
        {"step": 10, "step_time": 3.0},  # trains on the completions from before
        {"step": 15, "num_tokens": 4000, "step_time": 7.0},
        {"step": 20, "num_tokens": None, "step_time": math.nan},
    ]
    assert Run("x", rows).series("tokens_per_second") == ([5, 15], [1000 / (5 * 2), 3000 / (5 * 3 + 5 * 7)])
    assert Run("x", entries(3)).series("tokens_per_second") == ([], [])


# Repetitions


def test_runs_that_differ_in_the_seed_alone_are_one_group():
    def run(name, **settings):
        return Run(name, entries(3), settings=settings)

    runs = [
        run("int4-tis-seed0", lr=1e-4, seed=0, output_dir="a"),
        run("lr-2", lr=2e-4, seed=0),
        run("int4-tis-seed1", lr=1e-4, seed=1, output_dir="b"),
        Run("bare", entries(3)),
        Run("bare too", entries(3)),  # nobody knows whether these two are the same
    ]
    groups = grouped(runs)
    assert [[run.name for run in group.runs] for group in groups] == [
        ["int4-tis-seed0", "int4-tis-seed1"],
        ["lr-2"],
        ["bare"],
        ["bare too"],
    ]
    assert [group.name for group in groups] == ["int4-tis", "lr-2", "bare", "bare too"]
    assert differences(groups) == {"lr": [1e-4, 2e-4, None, None]}
    assert differences(groups[:1]) == {}


@pytest.mark.parametrize(
    ("names", "shared"),
    [
        (["tis1", "tis2"], "tis"),
        (["fp8-s0", "fp8-s1"], "fp8"),
        (["a_seed=10", "a_seed=11"], "a"),
        (["x", "y"], "x + y"),
        (["int4", "int4-seed1"], "int4"),  # the number of a format is no seed
        (["nvfp4", "nvfp4-2"], "nvfp4"),
        (["run1", "run10"], "run"),
    ],
)
def test_a_group_is_called_what_its_runs_share(names, shared):
    (group,) = grouped([Run(name, entries(1), settings={"lr": 1, "seed": i}) for i, name in enumerate(names)])
    assert group.name == shared


def test_no_two_groups_have_one_name():
    runs = [
        Run(f"run-{i}", entries(1), settings={"lr": lr, "seed": i}) for i, lr in enumerate((1e-5, 1e-5, 1e-6, 1e-6))
    ]
    assert [group.name for group in grouped(runs)] == ["run-0 + run-1", "run-2 + run-3"]
    assert [group.name for group in grouped(runs[:3])] == ["run", "run-2"]
    alone = Run("run", entries(1), settings={"lr": 1})
    assert [group.name for group in grouped([*runs[:2], alone])] == ["run-0 + run-1", "run"]


def test_bands_are_mean_and_range_of_moving_averages():
    rng = np.random.default_rng(0)
    values = rng.normal(size=(3, 30))
    lengths = (30, 30, 20)  # one is still going
    runs = [Run(str(i), [{"step": t, "x": v[t]} for t in range(n)]) for i, (v, n) in enumerate(zip(values, lengths))]
    steps, mean, low, high = Group("g", runs).band("x")
    assert steps == list(range(30))
    for t in steps:
        averages = [v[max(0, t - 9) : t + 1].mean() for v, n in zip(values, lengths) if t < n]
        assert (mean[t], low[t], high[t]) == pytest.approx((np.mean(averages), min(averages), max(averages)))
    raw = Group("g", runs).band("x", smooth=False)
    assert raw[2][25] == values[:2, 25].min() != pytest.approx(low[25])
    sizes = Group("g", runs).band("x", smooth=False, size=True)
    assert sizes[1][25] == pytest.approx(np.abs(values[:2, 25]).mean())


def test_moving_average():
    assert moving_average([1.0, 2.0, 6.0, 4.0], window=2) == [1.0, 1.5, 4.0, 5.0]
    long = list(np.random.default_rng(0).normal(size=1000))  # a fiftieth of the run
    assert moving_average(long)[500] == pytest.approx(fmean(long[481:501]))


# Speed


def test_speed_leaves_out_the_first_entry():
    """Entries of five steps: 10 s a step in the first, then 5 steps of 2 s and 5 of 4 s, with 3000 tokens."""
    rows = [
        {"step": 5, "num_tokens": 1000, "step_time": 10.0},
        {"step": 5, "eval_reward": 1.0},
        {"step": 10, "step_time": 2.0},  # trains on the completions from before
        {"step": 15, "num_tokens": 4000, "step_time": 4.0},
        {"step": 15, "num_tokens": math.nan, "step_time": math.inf},
    ]
    assert speed(Run("x", rows)) == Speed(3.0, 3000 / 30)
    assert speed(Run("x", rows[:1])) == Speed(10.0, 1000 / 50)
    assert speed(Run("x", rows[:3])) == Speed(2.0, 1000 / 50)
    assert speed(Run("x", entries(3))) == speed(Run("x", [])) == Speed(None, None)


def test_ratios_are_to_the_first_run():
    def run(name, seconds, tokens):
        return Run(name, [{"step": i, "step_time": seconds, "num_tokens": tokens * i} for i in (1, 2, 3)])

    runs = [run("slow", 4.0, 1000), run("fast", 2.0, 750), Run("old", entries(2))]
    assert speed_rows(runs) == [
        ["slow", "4", "1.00x", "250", "1.00x"],
        ["fast", "2", "2.00x", "375", "1.50x"],
        ["old", "-", "-", "-", "-"],
    ]
    assert [cells[2::2] for cells in speed_rows(runs[::-1])] == [["-", "-"], ["1.00x", "1.00x"], ["0.50x", "0.67x"]]


def test_an_asynchronous_run_has_a_speed():
    """TRL's asynchronous trainer times steps by another name, from the second one on, and counts no samples' tokens."""
    late = [{"step": 1, "batch/trained_tokens_per_step": 9.0}]
    late += [{"step": i, "perf/step_s": seconds, "perf/fwd_s": 1.0} for i, seconds in ((2, 40.0), (3, 3.0), (4, 5.0))]
    run = Run("async", late)
    assert speed(run) == Speed(4.0, None)
    assert run.series("step_time") == ([2, 3, 4], [40.0, 3.0, 5.0]) and run.series("tokens_per_second") == ([], [])
    sync = [Run(f"x{n}", log(4, step_time=n, num_tokens=lambda i: 100 * i, perf__step_s=9.0)) for n in (2.0, 1.0)]
    assert speed_rows([run, *sync]) == [  # tokens are compared among those that count them
        ["async", "4", "1.00x", "-", "-"],
        ["x2.0", "2", "2.00x", "50", "1.00x"],
        ["x1.0", "1", "4.00x", "100", "2.00x"],
    ]
    shown = {panel.title for panels in logged(grouped([run])).values() for panel in panels}
    assert shown == {"Time of a step"}


# Evaluation datasets


def evaluation(step: int, dataset: str | None = None, **metrics: float) -> dict:
    """An entry as TRL logs it: the dataset's name is only in the metrics that transformers computes."""
    own = "eval" if dataset is None else f"eval_{dataset}"
    theirs = {"loss": 0.0, "runtime": 2.0, "samples_per_second": 4.0}
    of_trl = {f"eval_{name}": value for name, value in metrics.items()}
    return {"step": step} | {f"{own}_{name}": value for name, value in theirs.items()} | of_trl


def test_evaluations_of_several_datasets_are_told_apart():
    rows = [{"step": i, "reward": 0.5} for i in range(1, 5)]
    for step, easy, hard in ((2, 0.9, 0.1), (4, 0.8, 0.2)):
        rows += [evaluation(step, "easy", reward=easy, loss_runtime=7.0), evaluation(step, "h_loss", reward=hard)]
    run = Run("two", rows)
    assert row(run)[2] == "easy 0.90→0.80, h_loss 0.10→0.20"
    assert run.series("eval_easy_reward") == ([2, 4], [0.9, 0.8]) and run.values("eval_h_loss_reward") == [0.1, 0.2]
    assert run.values("eval_reward") == [] and run.values("eval_easy_loss") == [0.0, 0.0]
    rows[-1] |= {"eval_accuracy": 0.25}  # tells more than a reward, of this dataset alone
    assert row(Run("two", rows))[2] == "easy 0.90→0.80, h_loss 0.25"


@pytest.mark.parametrize("dataset", [None, "easy"])
def test_evaluations_of_one_dataset_keep_their_names(dataset):
    """Whether it has a name or not, and whatever a reward function logs."""
    rows = [evaluation(step, dataset, reward=step / 10, judge_loss=1.0) for step in (2, 4)]
    run = Run("one", rows)
    assert row(run)[2] == "0.20→0.40"
    assert set(run.names("eval_")) == set(rows[0]) - {"step"}
    assert run.series("eval_reward") == ([2, 4], [0.2, 0.4])


# The table


def text_of(result) -> str:
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(result)
    return console.export_text()


def test_table():
    finished = [{"step": 0, "eval_accuracy": 0.25}, *entries(20), {"step": 20, "train_runtime": 61.4}]
    finished += [{"step": 20, "eval_accuracy": 0.75}]
    runs = [Run("int4 ais", finished), Run("bare", [{"step": 3, "reward": 0.5}]), Run("broken", [], "failed: x")]
    header, _, first, second, third = (line for line in text_of(table(runs)).splitlines() if line.strip())
    assert header.split() == ["run", "reward", "held-out", "KL", "mean", "last", "weight", "s", "status"]
    # rewards 0, .1, .2, .3, .4 -> 0.20 and 1.5 ... 1.9 -> 1.70; KL .001 ... .020 -> .0105 and .018
    assert first.split() == ["int4", "ais", "0.20→1.70", "0.25→0.75", "1.1e-02", "1.8e-02", "0.900", "61", "done"]
    assert second.split() == ["bare", "0.50→0.50", "-", "-", "-", "-", "-", "at", "step", "3"]
    assert third.split()[-2:] == ["failed:", "x"]


def test_runs_of_one_name_are_told_apart():
    assert named(["a/run", "b/run", "b/other"]) == ["a/run", "b/run", "other"]


# The command


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    target = tmp_path / "new" / "report.html"
    write_whole(target, b"first")

    def full(self, data):
        self.touch()
        raise OSError(28, "No space left on device", str(self))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(OSError, match="No space"):
            write_whole(target, b"second")
    assert target.read_bytes() == b"first" and [path.name for path in target.parent.iterdir()] == ["report.html"]
    write_whole(target, b"second")
    assert target.read_bytes() == b"second"


def test_report_command(tmp_path, capsys, monkeypatch):
    sick = log(reward=0.5, mismatch__kl_k3=climbing(1e-3, 1e-1))
    runs = [str(write_jsonl(tmp_path / name, rows)) for name, rows in (("one", entries(3)), ("two", sick))]
    outputs = [tmp_path / "report.html", tmp_path / "chart.png"]
    main(["report", *runs, *(part for path in outputs for part in ("--output", str(path)))])
    printed = " ".join(capsys.readouterr().out.split())
    assert "one: Too little to judge" in printed and "two: The mismatch KL grew 78 times" in printed
    assert outputs[0].read_text().startswith("<!DOCTYPE html>") and outputs[1].read_bytes().startswith(b"\x89PNG")
    monkeypatch.chdir(tmp_path / "one")
    main(["report", runs[0]])
    assert (tmp_path / "one" / "report.html").is_file()
    with pytest.raises(SystemExit, match="nowhere"):
        main(["report", str(tmp_path / "nowhere")])


def test_a_directory_of_runs_is_reported(tmp_path, capsys, monkeypatch):
    """It opens with their speed; what is no run, or a broken one, is skipped, unless it was named."""
    monkeypatch.chdir(tmp_path)
    runs = Path("runs")
    timed = [{"step_time": 2.0, "num_tokens": 100 * row["step"]} | row for row in entries(8)]
    write_jsonl(runs / "one", timed)
    write_jsonl(runs / "seeds/two", [row | {"step_time": 1.0} for row in timed])
    (runs / "notes").mkdir()
    broken = write_jsonl(runs / "broken", [{"loss": 1}])
    main(["report", "runs"])
    printed = " ".join(capsys.readouterr().out.split())
    assert "notes holds no run." in printed and "broken/metrics.jsonl, line 1" in printed
    assert "one 2 1.00x 50 1.00x two 1 2.00x 100 2.00x" in printed
    places = [printed.index(part) for part in ("s a step", "held-out", "one: ", "report: ")]
    assert places == sorted(places)
    page = Path("report.html").read_text()
    assert page.index(">Speed<") < page.index(">Findings<") < page.index(">Runs<")
    with pytest.raises(SystemExit, match="not a log entry"):
        main(["report", str(broken)])
    with pytest.raises(SystemExit, match="holds no run"):
        main(["report", str(runs / "notes")])


def test_the_ends_of_a_short_run_are_its_ends():
    """Means over five of seven steps would tell 0.41 to 0.56 as 0.46 to 0.51; long runs have means over five."""
    rewards = [0.41, 0.43, 0.46, 0.48, 0.51, 0.53, 0.56]
    short = Run("short", [{"step": i, "reward": value} for i, value in enumerate(rewards)])
    assert row(short)[1] == "0.41→0.56"
    for n in range(1, 60):
        run = Run("run", [{"step": i, "reward": float(i)} for i in range(n)])
        taken = max(1, min(5, n // 4))
        assert run.first("reward") == (taken - 1) / 2 and run.last("reward") == n - 1 - (taken - 1) / 2
        assert 2 * taken <= n or n == 1


def test_real_runs_are_grouped_by_what_their_checkpoints_record(tmp_path):
    """Two corrections with two seeds each, as the trainer leaves them."""
    for correction in ("none", "ais"):
        for seed in (0, 1):
            settings = {"rollout_precision": "int4", "is_correction": correction, "scale_rewards": "none"}
            saving = {"save_strategy": "steps", "save_steps": 2, "noise_schedule": "linear", "noise_stages": 3}
            path = tmp_path / f"{correction}-{seed}"
            args = training.config(
                QuantGRPOConfig, path, seed=seed, max_steps=4, loss_type="grpo", **settings, **saving
            )
            training.make(QuantGRPOTrainer, args).train()
    found = [read_run(path) for path in sorted(tmp_path.iterdir())]
    groups = grouped(found)
    assert [(group.name, len(group.runs)) for group in groups] == [("ais", 2), ("none", 2)]
    assert differences(groups) == {"is_correction": ["ais", "none"]}
    assert [run.status for run in found] == ["done"] * 4
    shown = [panel.title for panels in logged(groups).values() for panel in panels]
    assert {"Reward", "Entropy", "Mismatch KL", "Mismatch by position", "Noise on the norms"} <= set(shown)
    assert {
        "Update against quantization error",
        "Tokens per second",
        "Time per phase",
        "AIS's alpha and its parts",
    } <= set(shown)
    alpha = groups[0].band("ais/alpha")
    assert alpha[0] == [1, 2, 3, 4] and groups[1].band("ais/alpha")[0] == []
    assert alpha[2][0] < alpha[3][0]  # seeds differ
