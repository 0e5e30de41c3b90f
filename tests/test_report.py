"""`trl-quant report`: what runs left behind is read, put together, judged in words, and drawn on one whole page."""

import inspect
import json
import math
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
import training
from rich.console import Console
from run_logs import climbing, entries, log, noisy, write_jsonl, write_state

from trl_quant import QuantGRPOConfig, QuantGRPOTrainer
from trl_quant.cli import main
from trl_quant.report import findings
from trl_quant.report.panels import logged
from trl_quant.report.runs import Group, Run, differences, find_runs, grouped, moving_average, named, read_run
from trl_quant.report.speed import Speed, speed, speed_rows
from trl_quant.report.table import table
from trl_quant.storage.whole import write_whole


ROOT = Path(__file__).parents[1]
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


# Findings


POSITIONS = {"mismatch__by_position__0-15": 1e-3, "mismatch__by_position__16-63": 2e-3}
SYNC = {"sync_check__bound": 0.1, "sync_check__logp_difference": 0.09}
WEIGHTS = {"weights__normalized_update": 1e-3, "weights__normalized_quantization_error": 0.09}
# finding, logs in which it says nothing, a log in which it says ...
CASES = [
    (
        findings.not_a_number,
        [{"loss": 0.1}, {"loss": None}],
        {"loss": lambda i: math.nan if i > 38 else 0.1},
        "loss is not a finite number at step 39 (2 such",
    ),
    (
        findings.reward_fell,
        [
            {"reward": climbing(0.2, 0.8)},
            {"reward": noisy(0.5, 0.2)},
            {"reward": lambda i: 0.2 + 0.03 * min(i, 20) - 0.01 * max(0, i - 20)},  # a third is lost
        ],
        {
            "reward": lambda i: 0.2 + 0.03 * min(i, 20) - 0.035 * max(0, i - 20),
            "mismatch__kl_k3": climbing(1e-3, 12e-3),
        },
        "fell from 0.72 around step 24 to 0.26 while the KL grew 6 times.",
    ),
    (findings.reward_fell, [], {"reward": climbing(-1.0, -3.2)}, "fell from -1 around step 5 to -2.7."),
    (
        findings.engine_off,
        [SYNC],
        SYNC | {"sync_check__logp_difference": climbing(0.09, 0.3)},
        "At step 21 the engine was 0.1 nats",
    ),
    (
        findings.kl_grew,
        [{"mismatch__kl_k3": climbing(1e-3, 3e-3)}, {"mismatch__kl_k3": climbing(1e-9, 9e-5)}],
        {"mismatch__kl_k3": climbing(1e-3, 1e-2)},
        "grew 8 times, from 0.001 to 0.008, rising since step 25",
    ),
    (
        findings.later_tokens_worse,
        [POSITIONS, {"mismatch__by_position__0-15": 1e-3}, dict(zip(POSITIONS, (1e-6, 9e-5), strict=True))],
        POSITIONS | {"mismatch__by_position__256-": 6e-3},
        "Tokens from 256 on have 6 times the KL of the first 16",
    ),
    (
        findings.weights_off_one,
        [{"mismatch__weight_mean": 1.04}, {"mismatch__weight_mean": 0.96}],
        {"mismatch__weight_mean": 0.9},
        "mean weight is 0.90",
    ),
    (
        findings.few_effective_samples,
        [{"mismatch__ess_ratio": 0.951}],
        {"mismatch__ess_ratio": climbing(0.99, 0.6)},
        "Only 69% of the samples",
    ),
    (
        findings.heavy_weight,
        [{"mismatch__max_weight": 99.0}],
        {"mismatch__max_weight": lambda i: 500.0 if i in (7, 9) else 2.0},
        "500 at step 7, and 2 of 40",
    ),
    (
        findings.capped,
        [{"mismatch__cap_fraction": 0.0099}, {"mismatch__cap_fraction": lambda i: 0.09 * (i == 20)}],
        {"mismatch__cap_fraction": climbing(0.001, 0.04)},
        "1 token in 32 at the cap, rising since step 25",
    ),
    (
        findings.capped,
        [],
        {"mismatch__cap_fraction": lambda i: 0.125 * (i < 20)},
        "1 token in 8 was at the cap around step 5; at the end 0 of them",
    ),
    (
        findings.dropped,
        [{"mismatch__dropped_fraction": 0.049}],
        {"mismatch__dropped_fraction": 0.5},
        "50% of the tokens dropped by the correction: take",
    ),
    (
        findings.dropped,
        [],
        {"mismatch__dropped_fraction": lambda i: 0.6 * (i < 20)},
        "60% of the tokens were dropped by the correction around step 5; at the end 0 of them",
    ),
    (
        findings.clipped,
        [{"clip_ratio__region_mean": 0.19}],
        {"clip_ratio__region_mean": 0.25},
        "1 token in 4 clipped by the loss: ",
    ),
    (
        findings.unscored,
        [{"mismatch__unscored_fraction": 0.0}],
        {"mismatch__unscored_fraction": 0.001},
        "1 token in 1000 around step 5",
    ),
    (
        findings.entropy_gone,
        [{"entropy": climbing(1.0, 0.2)}],
        {"entropy": climbing(1.0, -0.2, at=20)},
        "fell from 1 to",
    ),
    (findings.entropy_gone, [], {"entropy": 0.0}, "The entropy is 0 nats: the policy explores nothing."),
    (findings.same_rewards, [{"frac_reward_zero_std": 0.79}], {"frac_reward_zero_std": 0.9}, "In 90% of the groups"),
    (
        findings.cut_off,
        [{"completions__clipped_ratio": 0.24}],
        {"completions__clipped_ratio": 0.4},
        "40% of the completions",
    ),
    (findings.alpha_full, [{"ais__alpha": 0.94}], {"ais__alpha": 1.0}, "(alpha 1.00)"),
    (
        findings.noise_lost,
        [
            {"noise__sigma": 1e-2, "noise__effective_sigma": 0.85e-2},
            {"noise__sigma": 0.0, "noise__effective_sigma": 0.0},
        ],
        {
            "noise__sigma": climbing(1e-2, 5e-4),
            "noise__effective_sigma": lambda i: 1e-4 if i == 40 else climbing(1e-2, 5e-4)(i),
        },
        "sigma 0.0005 was asked for, 0.0001 arrived: norms in BF16 swallow it",
    ),
    (
        findings.noise_lost,
        [],
        {"noise__sigma": 1e-3, "noise__effective_sigma": 2e-3},
        "0.002 arrived: norms in BF16 round it up",
    ),
    (
        findings.update_buried,
        [WEIGHTS, WEIGHTS | {"weights__codes_changed": 0.0011}, WEIGHTS | {"weights__normalized_update": 0.0}],
        WEIGHTS | {"weights__codes_changed": 0.0009},
        "by 0.001 of their size, the format rounds by 0.09, and 0.1% of the codes change",
    ),
    (
        findings.update_buried,
        [],
        WEIGHTS | {"weights__normalized_update": 8e-4},
        "by 0.0008 of their size, the format rounds by 0.09: the",
    ),
]


@pytest.mark.parametrize(("finding", "well", "sick", "says"), CASES, ids=[case[0].__name__ for case in CASES])
def test_a_finding_is_there_where_it_should_be_and_only_there(finding, well, sick, says):
    assert says in finding(Run("sick", log(**sick)))
    for metrics in [{}, *well]:
        assert finding(Run("well", log(**metrics))) is None
    if finding not in (findings.not_a_number, findings.heavy_weight, findings.engine_off, findings.noise_lost):
        assert finding(Run("short", log(**sick)[:4])) is None  # too little to judge


def test_every_finding_has_its_case():
    assert {case[0] for case in CASES} == set(findings.FINDINGS)


def test_the_docs_and_findings_have_the_same_thresholds():
    lines = (ROOT / "docs/metrics.md").read_text().splitlines()
    rows = {row.split("`")[1]: row for row in lines if row.startswith("| `")}
    said = {
        ("mismatch/ess_ratio", findings.few_effective_samples): "below {below:g}",
        ("mismatch/max_weight", findings.heavy_weight): "above {above:g}",
        ("mismatch/cap_fraction", findings.capped): "above {above:g}",
        ("mismatch/dropped_fraction", findings.dropped): "above {above:g}",
        ("weights/normalized_update", findings.update_buried): "{times:g} times below",
    }
    for (metric, finding), words in said.items():
        thresholds = {name: p.default for name, p in inspect.signature(finding).parameters.items() if name != "run"}
        assert words.format(**thresholds) in rows[metric]


def test_a_rise_begins_where_it_began():
    steps = list(range(100))
    flat_then_up = [1.0] * 60 + [1.0 + i for i in range(1, 41)]
    assert findings.rising(steps, flat_then_up) == ", rising since step 63"  # 4 of 40 is a tenth of the way
    assert findings.rising(steps, [1.0 + 0.004 * i for i in steps]) == ""
    assert findings.rising(steps, flat_then_up[::-1]) == ""


LEARNING = {"reward": 0.5, "entropy": 1.0, "frac_reward_zero_std": 0.1, "completions__clipped_ratio": 0.0}
MISMATCH = {"mismatch__weight_mean": 1.0, "mismatch__ess_ratio": 1.0, "mismatch__max_weight": 1.1}
MISMATCH |= {"mismatch__kl_k3": 1e-3, "mismatch__unscored_fraction": 0.0}


def said(*logs) -> list[str] | str:
    """What the report says of a group of runs."""
    group = Group("g", [Run(f"run{i}", rows) for i, rows in enumerate(logs)])
    return findings.findings(group) or findings.verdict(group)


def without(metrics: dict, *names: str) -> dict:
    return {name: value for name, value in metrics.items() if name not in names}


def test_all_well_is_said_only_where_it_is_so():
    learning, seen = LEARNING, LEARNING | MISMATCH
    well = log(**seen)
    assert said(well) == "All well."
    assert said(log(**learning)) == (
        "All well in what was logged. The mismatch was not logged: without a `rollout_precision` there is none to "
        "measure."
    )
    for name in seen.keys() - {"reward"}:
        unseen = log(**without(seen, name))
        for runs in ((unseen,), (well, unseen), (well, [*unseen[:-1], *well[-1:]])):  # at no step, and at one
            found = said(*runs)
            assert found.startswith("Nothing stands out") and found.endswith(f": {name.replace('__', '/')}."), found
    assert "The mismatch was not logged" in said(log(reward=0.5)) and "All well" not in said(log(reward=0.5))
    assert "Nor was entropy, frac_reward_zero_std and completions/clipped_ratio" in said(log(reward=0.5))
    assert said(well[:4]) == "Too little to judge: the reward was logged at 4 steps."
    assert said(well, well[:1]) == "Too little to judge: the reward was logged at 1 step."
    assert said([]) == "Too little to judge: the reward was logged at 0 steps."
    assert said(log(reward=lambda i: None, loss=0.1)) == "Too little to judge: the reward was logged at 0 steps."
    sick = log(reward=0.5, mismatch__kl_k3=climbing(1e-3, 1e-2))
    (line,) = said(well, sick, sick)
    assert line.startswith("The mismatch KL grew 8 times") and line.endswith("(run1; 2 of 3 runs)")
    assert said(sick) == [line.removesuffix(" (run1; 2 of 3 runs)")]


def test_ppo_needs_no_groups_of_rewards():
    """Its critic stands in for them. All else that it logs is needed, and GRPO's groups still are."""
    seen = without(LEARNING | MISMATCH, "frac_reward_zero_std")
    assert said(log(**seen, value__loss=0.1)) == "All well."
    assert said(log(**seen)).endswith(": frac_reward_zero_std.")
    assert said(log(**seen, value__loss=0.1), log(**seen)).endswith(": frac_reward_zero_std.")
    assert said(log(**without(seen, "entropy"), value__loss=0.1)).endswith(": entropy.")


def test_distillation_is_judged_without_rewards():
    """By the steps with a loss, or with a mismatch alone. One run with a reward makes the group one with rewards."""
    seen = without(LEARNING | MISMATCH, "reward", "frac_reward_zero_std")
    none = "No reward was logged, so none was judged."
    distilled = log(**seen, loss=0.1)
    assert said(distilled) == said(log(**seen)) == f"All well. {none}"
    assert said(distilled[:4]) == f"Too little to judge: the loss was logged at 4 steps. {none}"
    assert said(distilled, distilled[:1]) == f"Too little to judge: the loss was logged at 1 step. {none}"
    assert said(log(**seen)[:4]) == f"Too little to judge: the mismatch KL was logged at 4 steps. {none}"
    assert said(log(**without(seen, "entropy"), loss=0.1)).endswith(f": entropy. {none}")
    assert said(distilled, log(**LEARNING)) == "Too little to judge: the reward was logged at 0 steps."
    (line,) = said(log(**seen | {"mismatch__kl_k3": climbing(1e-3, 1e-2)}, loss=0.1))
    assert line.startswith("The mismatch KL grew 8 times")


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
    assert speed_rows(runs[::-1])[1] == ["fast", "2", "-", "375", "-"]


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
