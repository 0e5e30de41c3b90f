"""The study's paired comparisons, its stored start models, and its runs with completions in flight."""

import json
import lzma
import runpy
import shutil
import sys
from dataclasses import replace
from math import exp, log, sqrt
from pathlib import Path
from statistics import fmean, stdev

import pytest
import torch
from long_tests import rest_is_long
from places import ROOT
from safetensors.torch import load, load_file
from transformers import AutoModelForCausalLM

from trl_quant.models.routers import routers
from trl_quant.report.runs import Group, Run, read_run
from trl_quant.tasks import load_prompts


STUDY = ROOT / "benchmarks" / "study"
sys.path[:0] = [str(STUDY), str(ROOT / "examples")]

import build_arithmetic_model as building  # noqa: E402
import paired  # noqa: E402
import run as runner  # noqa: E402
import starts  # noqa: E402
import table  # noqa: E402
import trial  # noqa: E402
from cell import Cell, Question  # noqa: E402
from cells import QUESTIONS  # noqa: E402
from raw_results import read_results  # noqa: E402


STORED = ROOT / "benchmarks" / "results" / "study"


# Student's t and Holm's values


@pytest.mark.parametrize(("df", "tabled"), [(1, 12.706), (2, 4.303), (3, 3.182), (5, 2.571), (10, 2.228), (29, 2.045)])
def test_students_quantiles_are_those_of_the_tables(df, tabled):
    assert paired.critical(df) == pytest.approx(tabled, abs=6e-4)


@pytest.mark.parametrize("df", [1, 2, 3, 4, 7, 12])
def test_students_share_is_the_integral_of_its_density(df):
    x = torch.linspace(0, 2.5, 100_001, dtype=torch.float64)
    density = (1 + x**2 / df) ** (-(df + 1) / 2)
    constant = torch.lgamma(torch.tensor([(df + 1) / 2, df / 2], dtype=torch.float64)).diff().neg().exp().item()
    expected = 2 * constant / sqrt(df * torch.pi) * torch.trapezoid(density, x).item()
    assert paired.within(2.5, df) == pytest.approx(expected, abs=1e-9)


def test_holms_values_by_hand():
    assert paired.holm([0.01, 0.04, 0.03, 0.005], 4) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert paired.holm([0.01, 0.04], 4) == pytest.approx([0.04, 0.12])  # two of four are not there yet
    assert paired.holm([0.9, 0.8], 2) == [1.0, 1.0]


def test_a_difference_is_that_of_runs_with_the_same_seed():
    found = paired.difference({0: 0.5, 1: 0.7, 2: 0.6, 5: 0.1}, {0: 0.4, 1: 0.5, 2: 0.6, 7: 0.9})
    assert found["pairs"] == 3 and found["mean"] == pytest.approx(0.1) and found["sd"] == pytest.approx(0.1)
    half = 4.303 * 0.1 / sqrt(3)
    assert (found["low"], found["high"]) == (pytest.approx(0.1 - half, abs=1e-4), pytest.approx(0.1 + half, abs=1e-4))
    assert found["p"] == pytest.approx(0.2254, abs=1e-4)  # t = sqrt(3) with two degrees of freedom
    assert paired.difference({0: 0.5, 1: 0.7}, {0: 0.4, 2: 0.5}) is None


def test_seeds_of_one_start_are_one_pair():
    cell, other = {0: 0.5, 1: 0.7, 2: 0.8, 3: 0.9, 4: 0.4}, dict.fromkeys(range(5), 0.4)
    found = paired.difference(cell, other, starts=2)  # 0.1, 0.4 and 0.0 of one start, 0.3 and 0.5 of the other
    by_hand = paired.difference({0: 1 / 6, 1: 0.4}, {0: 0.0, 1: 0.0})
    assert found == pytest.approx(by_hand) and found["pairs"] == 2
    assert found["mean"] != pytest.approx(paired.difference(cell, other)["mean"])
    question = Question("Which?", (Cell("a", starts=2),), compared={"one": (("b", "a"),)})
    (row,) = paired.differences(question, [group("a", [*other.values()]), group("b", [*cell.values()])])
    assert row["mean"] == pytest.approx(found["mean"]) and row["pairs"] == 2


def group(name: str, values: list[float]) -> Group:
    runs = [Run(f"{name}-{i}", [{"step": 1, "final_accuracy": v}], settings={"seed": i}) for i, v in enumerate(values)]
    return Group(name, runs)


def test_comparisons_that_have_no_pairs_yet_are_left_out_and_counted():
    pairs = (("b", "a"), ("c", "a"), ("d", "a"))
    question = Question("Which?", (), compared={"one": pairs, "other": pairs[:1]})
    groups = [group("a", [0.4, 0.5, 0.6]), group("b", [0.3, 0.45, 0.5]), group("d", [0.4, 0.5, 0.7])]
    rows = paired.differences(question, groups)
    assert [(row["family"], row["cell"]) for row in rows] == [("one", "b"), ("one", "d"), ("other", "b")]
    assert rows[0]["holm"] == pytest.approx(3 * rows[0]["p"]) and rows[2]["holm"] == rows[2]["p"]
    assert paired.compared(question, groups[:1]) == "" and paired.compared(Question("", ()), groups) == ""
    line = paired.compared(question, groups).splitlines()[3]
    assert [cell.strip() for cell in line.split("|")[1:6]] == ["one", "b", "a", "3", "-0.083"]


def test_brief_comparisons_have_the_first_family_and_holms_p():
    pairs = (("b", "a"), ("c", "a"))
    question = Question("Which?", (), compared={"one": pairs, "other": pairs[:1]}, ratios={"KL": "kl"})
    groups = [group("a", [0.4, 0.5, 0.6]), group("b", [0.3, 0.45, 0.5]), group("c", [0.4, 0.5, 0.7])]
    for made in groups:
        for run in made.runs:
            run.history[0]["kl"] = 2.0 if made.name == "b" else 1.0
    every = paired.compared(question, groups).splitlines()
    lines = [line for line in every if not line.startswith("| other |")]
    brief = paired.compared(question, groups, brief=True).splitlines()
    assert len(brief) == len(lines) == len(every) - 2 == 10 and brief[1] == lines[1].replace("| p |", "|")
    for text, less in zip(lines, brief):
        whole, less = text.split("|"), less.split("|")
        assert less[1:2] == (["  "] if " c " in less else whole[1:2])
        assert less[2:] == [*whole[2:7], *whole[8:]]  # without p


def test_a_metric_is_compared_by_the_ratio_of_its_means_over_a_run():
    question = Question("Which?", (), compared={"one": (("b", "a"),)}, ratios={"KL": "kl"})

    def logged(name: str, runs: list[list[float]]) -> Group:
        histories = [[{"step": step, "kl": value} for step, value in enumerate(run)] for run in runs]
        return Group(name, [Run(f"{name}{seed}", h, settings={"seed": seed}) for seed, h in enumerate(histories)])

    groups = [logged("a", [[1.0, 3.0], [2.0, 2.0], [4.0]]), logged("b", [[2.0, 6.0], [1.0, 7.0], [32.0]])]
    (row,) = paired.ratios(question, groups, "kl")  # 2, 2 and 8, whose geometric mean is 32 ** (1 / 3)
    spread = stdev([log(2), log(2), log(8)])
    assert row["mean"] == pytest.approx(32 ** (1 / 3)) and row["sd"] == pytest.approx(spread)
    assert row["high"] == pytest.approx(row["mean"] * exp(4.303 * spread / sqrt(3)), rel=1e-3)
    assert row["low"] * row["high"] == pytest.approx(row["mean"] ** 2)
    assert paired.differences(question, groups) == []  # none was judged at its end
    assert "| KL, over the run | cell |" in (text := paired.compared(question, groups))
    assert "| one | b | a | 3 | 3.17 |" in text


def test_stored_results_give_the_same_comparisons(tmp_path, monkeypatch):
    cells = Cell("full precision"), Cell("a", "int4", None, "tis"), Cell("b", "int4", None, "tis", rollouts_in_flight=2)
    question = Question("Which?", cells, (), {"final": "final_accuracy"}, compared={"one": (("b", "a"),)})
    monkeypatch.setitem(QUESTIONS, "made up", question)
    for cell, values in zip(cells, ([0.5, 0.5], [0.41, 0.52, 0.63], [0.31, 0.47, 0.53]), strict=True):
        for seed, value in enumerate(values):
            directory = tmp_path / "made up" / f"{cell.name}-seed{seed}"
            directory.mkdir(parents=True)
            (directory / "settings.json").write_text(json.dumps(replace(cell, seed=seed).settings()))
            entry = {"step": 300, "eval_accuracy": 0.5, "final_accuracy": value, "mismatch/by_age/0": 0.001}
            (directory / "metrics.jsonl").write_text(json.dumps(entry | {"mismatch/by_age/3-4": 0.002}) + "\n")
            (directory / "finished.json").write_text("{}")
    text = table.write("made up", tmp_path / "made up", tmp_path)
    assert "| one | b | a | 3 | -0.083 |" in text and text == (tmp_path / "made up.md").read_text()
    rows, groups = table.stored(tmp_path / "made up.json.xz")
    assert table.markdown(question, rows) + paired.compared(question, groups) == text
    assert rows[2]["runs"][0]["log"]["mismatch/by_age/3-4"] == {"300": 0.002}


def test_the_comparisons_of_a_question_are_of_its_cells():
    for question in QUESTIONS.values():
        cells = {cell.name: cell for cell in question.cells}
        for pairs in question.compared.values():
            assert len(set(pairs)) == len(pairs)
            for sides in pairs:
                names = [side.split(" + ") for side in sides]
                compared = [cells[name] for side in names for name in side]
                assert len(names[0]) == len(names[1]) and len({cell.name for cell in compared}) == len(compared)
                assert len({cell.starts for cell in compared}) == 1
                assert all(cell.starts and cell.draws > 1 for cell in compared)
    (primary, *_) = QUESTIONS["in_flight"].compared.values()
    assert len(primary) == 4 and all("tis" in name for pair in primary for name in pair)


def test_effects_that_add_up_are_told_from_those_that_do_not():
    """By hand: the age costs 0.1 and the precision 0.2; together 0.3 in one cell, 0.4 in the other."""
    pairs = (("both + neither", "age + precision"), ("more + neither", "age + precision"))
    question = Question("Do they?", (), compared={"one": pairs})
    groups = [
        group("neither", [0.8, 0.7, 0.9, 0.1]),
        group("age", [0.7, 0.6, 0.8]),
        group("precision", [0.6, 0.5, 0.7]),
        group("both", [0.52, 0.38, 0.6]),
        group("more", [0.42, 0.28, 0.5]),
    ]
    added, more = paired.differences(question, groups)
    assert added["pairs"] == 3 and added["mean"] == pytest.approx(0.0, abs=1e-9) and added["p"] == pytest.approx(1.0)
    assert more["mean"] == pytest.approx(-0.1) and more["sd"] == added["sd"] == pytest.approx(0.02)
    assert paired.differences(question, groups[:2] + groups[3:]) == []  # a cell has not run
    assert "| one | more + neither | age + precision | 3 | -0.100 |" in paired.compared(question, groups)


# Start models


@pytest.mark.parametrize(
    "name", rest_is_long([*map(str, range(6)), *(f"mixture-{index}" for index in range(3))], "0", "mixture-0")
)
def test_a_start_model_is_the_one_whose_checksum_is_stored(tmp_path, name):
    starts.unpack(name, tmp_path)
    stored, unpacked = load(starts.weights_of(name)), load_file(tmp_path / "model.safetensors")
    assert unpacked.keys() == stored.keys()
    assert all(tensor.dtype == torch.float32 for tensor in unpacked.values())
    assert all(torch.equal(tensor, stored[key].float()) for key, tensor in unpacked.items())
    assert len(routers(AutoModelForCausalLM.from_pretrained(tmp_path))) == (2 if "mixture" in name else 0)
    assert len(load_prompts(str(tmp_path / "eval.jsonl"))) == 512
    assert len(load_prompts(str(tmp_path / "train.jsonl"))) == 4096
    sums = starts.SUMS.read_text().split()
    assert len(sums) == 18 == len(set(sums))


def test_a_start_model_with_another_bit_is_refused(tmp_path):
    shutil.copytree(starts.STORED, tmp_path / "starts")
    data = bytearray(starts.weights_of("0"))
    data[-1] ^= 1
    (tmp_path / "starts" / "0.safetensors.xz").write_bytes(lzma.compress(data))
    with pytest.raises(ValueError, match=r"0\.safetensors\.xz has the SHA-256 [0-9a-f]{64}, which is not that of"):
        starts.weights_of("0", tmp_path / "starts")
    assert starts.weights_of("1", tmp_path / "starts") == starts.weights_of("1")


def test_start_models_fit_into_the_repository():
    """The dense ones, of the demo's kind, in 4 MB; the mixtures come on top."""
    sizes = {path.name: path.stat().st_size for path in starts.STORED.iterdir()}
    dense = [size for name, size in sizes.items() if name[0].isdigit()]
    assert len(dense) == 6 and sum(dense) < 4e6 and sum(sizes.values()) < 8e6


@pytest.mark.parametrize("start", rest_is_long(range(6)))
def test_stored_runs_began_with_the_stored_start_models(tmp_path, monkeypatch, start):
    """Unpacked, and given outliers, by the study's own commands. Each start has another checksum, with outliers too."""
    cells = [replace(QUESTIONS[name].cells[0], seed=start) for name in ("stage_1", "stage_3_outliers")]
    for job in runner.model_jobs(cells, tmp_path) + runner.outlier_jobs(cells, tmp_path):
        monkeypatch.setattr(sys, "argv", job.command[1:])
        runpy.run_path(sys.argv[0], run_name="__main__")
    plain, spread = (trial.sha256_of(tmp_path / "models" / cell.model) for cell in cells)
    for name in ("stage_1", "stage_2", "in_flight", "stage_3_outliers"):
        rows = read_results(STORED / f"{name}.json.xz")["cells"]
        found = {(run["model_sha256"], run["seed"] % 6 == start) for row in rows for run in row["runs"]}
        began = {model for model, here in found if here}
        if (name, start) != ("stage_1", 5):  # which has five starts
            assert began == {spread if name == "stage_3_outliers" else plain}
        assert began.isdisjoint(model for model, here in found if not here)


def test_seeds_start_from_the_stored_models_in_turn(tmp_path):
    cells = [Cell("a", starts=6, seed=seed) for seed in (0, 5, 7)]
    assert [cell.model for cell in cells] == ["start-0", "start-5", "start-1"]
    assert len({json.dumps(replace(cell, seed=0).settings()) for cell in cells}) == 1
    jobs = runner.model_jobs([*cells, Cell("b", starts=6, seed=1)], tmp_path)
    assert [job.command[2:] for job in jobs] == [[str(i), str(tmp_path / "models" / f"start-{i}")] for i in (0, 5, 1)]
    (job,) = runner.model_jobs([Cell("c", starts=3, num_experts=8, seed=seed) for seed in (2, 5)], tmp_path)
    assert job.command[2:] == ["mixture-2", str(tmp_path / "models" / "start-mixture-2")]
    trials = runner.trial_jobs(cells, tmp_path, "in_flight")
    assert [job.command[-1] for job in trials] == [str(job.directory) for job in jobs]


def test_the_command_of_stage_3_text_teaches_the_six_starts_of_its_table(tmp_path):
    """Start 5 is left out, and 6 taught in its place. The stored runs count as those of the cells of now."""
    rows = read_results(STORED / "stage_3_text.json.xz")["cells"]
    models = {(run["seed"], run["model_sha256"]) for row in rows for run in row["runs"]}
    seeds = sorted(seed for seed, _ in models)
    assert seeds == [*range(24, 30)] and len({model for _, model in models}) == 6
    cells = [replace(QUESTIONS["stage_3_text"].cells[0], seed=seed) for seed in seeds]
    jobs = runner.model_jobs(cells, tmp_path)
    given = [dict(zip(job.command[2::2], job.command[3::2], strict=True)) for job in jobs]
    assert [each["--seed"] for each in given] == ["0", "1", "2", "3", "4", "6"]
    assert [job.directory.name for job in jobs] == [f"start-told-1-{each['--seed']}" for each in given]
    trials = runner.trial_jobs(cells, tmp_path, "stage_3_text")
    assert [job.command[-1] for job in trials] == [each["--output_dir"] for each in given]
    runner.take_stored("stage_3_text", STORED, tmp_path)
    assert all(job.finished for job in trials)


def test_seeds_are_one_pair_where_they_have_one_start():
    for question in QUESTIONS.values():
        for cell in (cell for cell in question.cells if cell.starts):
            names = {replace(cell, seed=seed).model: seed % cell.starts for seed in range(2 * cell.starts)}
            assert sorted(names.values()) == [*range(cell.starts)]
    with_numbers = [cell for question in QUESTIONS.values() for cell in question.cells if cell.numbers]
    assert with_numbers and all(len(cell.numbers.split()) == cell.starts for cell in with_numbers)
    assert "numbers" in with_numbers[0].settings() and "numbers" not in Cell("a", starts=6).settings()


# Runs


def test_the_policy_is_judged_by_several_draws_at_its_end(tmp_path):
    log = trial.Log(tmp_path / "metrics.jsonl", lambda model, seed=10: [0.25, 0.5, 1.0][seed], 1, (), 3)
    state = type("State", (), {"global_step": 7})
    log.on_train_end(None, state, None)
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {
        "step": 7,
        "final_accuracy": fmean([0.25, 0.5, 1.0]),
    }


def untaught(directory: Path, num_experts: int = 0) -> Path:
    tokenizer = building.build_tokenizer()
    building.build_model(tokenizer, num_experts=num_experts).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    for split in ("train", "eval"):
        building.prompts(building.BuildArguments(), 0, 16, held_out=split == "eval").to_json(
            directory / f"{split}.jsonl"
        )
    return directory


@pytest.mark.long
@pytest.mark.parametrize("factor", rest_is_long([3, 1]))
def test_a_run_keeps_its_cells_factor_in_flight_and_says_what_it_started_from(tmp_path, factor):
    model = untaught(tmp_path / "model")
    cell = Cell(f"int4 x{factor}", "int4", None, "tis", rollouts_in_flight=factor, max_steps=8, draws=2)
    assert "rollouts_in_flight" in table.TREATMENT
    directory = tmp_path / "run"
    directory.mkdir()
    (directory / "settings.json").write_text(json.dumps(cell.settings() | {"per_device_train_batch_size": 16}))
    trial.train(directory, model)
    run = read_run(directory)
    assert run.status == "done" and len(run.values("final_accuracy")) == 1
    # An untaught model ends no completion: all in flight finish together and wait
    assert max(run.values("rollouts/age_max"), default=0) == factor - 1
    finished = json.loads((directory / "finished.json").read_text())
    assert finished["model_sha256"] == trial.sha256((model / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.parametrize("replays", rest_is_long([True, False]))
def test_a_mixtures_run_says_what_is_rerouted_with_and_without_replay(tmp_path, replays):
    assert "router_replay" in table.TREATMENT
    model, directory = untaught(tmp_path / "model", num_experts=4), tmp_path / "run"
    cell = Cell("int4", "int4", None, "tis", router_replay=replays, num_experts=4, max_steps=1)
    directory.mkdir()
    (directory / "settings.json").write_text(json.dumps(cell.settings() | {"per_device_train_batch_size": 8}))
    trial.train(directory, model)
    run = read_run(directory)
    assert run.values("routing/unreplayed") == [0.0 if replays else 1.0]
    layers = [run.values(f"routing/by_layer/{layer}")[0] for layer in (0, 1)]
    assert min(layers) > 0 and run.values("routing/differs") == [pytest.approx(fmean(layers))]
