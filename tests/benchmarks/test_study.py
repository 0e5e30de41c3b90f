"""The study: its cells are valid, and its tables and figures say what the seeds say."""

import json
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
import trl.generation.vllm_generation as vllm_generation
from places import ROOT

from trl_quant import QuantGRPOConfig
from trl_quant.report.runs import Group, Run, grouped
from trl_quant.tasks.arithmetic import Division, Problem
from trl_quant.tasks.countdown import searches


STUDY = ROOT / "benchmarks" / "study"
sys.path[:0] = [str(STUDY), str(ROOT / "examples")]

import build_arithmetic_model as building  # noqa: E402
import run as runner  # noqa: E402
import table  # noqa: E402
import trial  # noqa: E402
from cell import SHAPES, Cell, Question  # noqa: E402
from cells import QUESTIONS  # noqa: E402
from outliers import CHANNELS, add_outliers  # noqa: E402


# Cells


@pytest.mark.parametrize("name", QUESTIONS)
def test_cells_are_valid_and_have_full_precision_beside_them(name, tmp_path):
    cells = QUESTIONS[name].cells
    assert len({cell.name for cell in cells}) == len(cells)
    assert len({json.dumps(replace(cell, name="").settings()) for cell in cells}) == len(cells)
    groups = grouped([Run(cell.name, [], settings=cell.settings()) for cell in cells])
    full = {table.regime(group) for group in groups if table.precision(group) is None}
    for group, cell in zip(groups, cells, strict=True):
        assert table.regime(group) in full, cell
        arguments = trial.QUIET | trial.arguments_of(cell.settings())
        config = trial.trainer_of(cell.settings()).config_class(output_dir=str(tmp_path), **arguments)
        assert config.learning_rate == cell.learning_rate and config.train_precision == cell.train_precision
    facets = table.facets(groups)
    assert {group.settings["name"] for some in facets.values() for group in some} == {c.name for c in cells}
    assert not any("max_completion_length" in title for title in facets)  # which follows from what is asked


@pytest.mark.parametrize("digits", [3, 6, 12, 24])
def test_the_longest_solution_fits(digits):
    largest = 10**digits - 1
    tokens = len(building.build_tokenizer()(Problem(largest, "+", largest).solution)["input_ids"]) + 1  # <eos>
    assert tokens <= Cell("", digits=digits).max_completion_length < tokens + 16


@pytest.mark.parametrize("quotient", [1, 4, 24])
def test_the_longest_division_fits(quotient):
    tokenizer = building.build_tokenizer()
    all_of_them = [Division(b * quotient + rest, b) for b in range(10, 100) for rest in (0, b - 1)]
    tokens = max(map(len, tokenizer([division.solution + "<eos>" for division in all_of_them])["input_ids"]))
    assert tokens <= Cell("", quotient=quotient).max_completion_length < tokens + 8


@pytest.mark.parametrize("numbers", [3, 4])
def test_the_longest_search_fits(numbers):
    tokenizer = building.build_tokenizer()
    solutions = [problem.solution + "<eos>" for problem in islice(searches(0, numbers), 300)]
    tokens = max(map(len, tokenizer(solutions)["input_ids"]))
    assert tokens <= Cell("", countdown=numbers).max_completion_length < tokens + 40


def test_the_longest_solution_in_words_fits():
    found = (p / "shared/data/gsm8k/train.jsonl" for p in ROOT.parents if (p / "shared/data/gsm8k").is_dir())
    if (source := next(found, None)) is None:
        pytest.skip("needs GSM8K in shared/data/gsm8k")
    args = building.BuildArguments(word_problems=str(source))
    tokenizer = building.learn_tokenizer(args)
    solutions = [problem.solution + "<eos>" for problem in islice(building.taught(args), args.known)]
    tokens = max(map(len, tokenizer(solutions)["input_ids"]))
    assert tokens <= Cell("", word_problems="openai/gsm8k").max_completion_length < tokens + 8


def test_the_longest_told_sum_fits():
    """A sum of the longest words and of the longest numbers, all of which are drawn sometimes."""
    longest = building.Problem(999, "+", 999)
    parts = [building.BEGINS, building.NAMES, building.OWNS, building.THINGS, building.LATER, building.NAMES]
    parts += [building.VERBS["+"], building.HENCE, building.ENDS, building.LAST]
    begins, he, owns, things, later, again, verb, hence, ends, last = (max(part, key=len) for part in parts)
    things = max(things, "of them", key=len)
    steps, _, answer = longest.solution.rpartition(" #### ")
    told = f"{begins} {he} {owns} 999 {things}, {later} {again} {verb} 999. {steps}, {hence} {ends} {answer} {last} "
    tokenizer = building.build_tokenizer()
    (bound,) = map(len, tokenizer([f"{told}#### {answer}<eos>"])["input_ids"])
    found = {}
    for told in (1, 8):
        stories = islice(building.stream(building.BuildArguments(told=told), 0, told), 5000)
        found[told] = max(map(len, tokenizer([story.solution + "<eos>" for story in stories])["input_ids"]))
    assert bound - 4 <= found[1] <= bound <= Cell("", told=1).max_completion_length < bound + 8
    assert 0.7 * Cell("", told=8).max_completion_length < found[8] <= Cell("", told=8).max_completion_length


def test_each_size_is_taught_a_model_of_its_own(tmp_path):
    jobs = runner.model_jobs(QUESTIONS["scale"].cells, tmp_path)
    assert [job.directory.name for job in jobs] == ["3-digits-0.33", "3-digits-0.33-512x6", "3-digits-0.33-1024x8"]
    for job, shape in zip(jobs, SHAPES, strict=True):
        given = dict(zip(job.command[2::2], job.command[3::2], strict=True))
        assert (given["--hidden_size"], given["--num_hidden_layers"]) == tuple(map(str, shape))
        assert given["--output_dir"] == str(job.directory)


@pytest.mark.parametrize(("given", "source"), [(None, "openai/gsm8k"), ("mine.jsonl", "mine.jsonl")])
def test_word_problems_are_read_from_the_hub_or_a_file(tmp_path, given, source):
    (job,) = runner.model_jobs(QUESTIONS["words"].cells, tmp_path, given)
    arguments = dict(zip(job.command[2::2], job.command[3::2], strict=True))
    assert job.directory.name == "openai-gsm8k-0.33" and arguments["--word_problems"] == source
    assert all(cell.settings()["word_problems"] == "openai/gsm8k" for cell in QUESTIONS["words"].cells)
    assert "--word_problems" not in runner.model_jobs([Cell("")], tmp_path, given)[0].command


def test_told_sums_begin_with_models_of_seeds(tmp_path):
    """Seeds that are equal but for a multiple of `starts` share a model, which is taught with its number as a seed."""
    cell = Cell("", told=1, starts=3)
    cells = [*(replace(cell, seed=seed) for seed in (4, 7, 5)), replace(cell, told=8, seed=4, hidden_size=512)]
    jobs = runner.model_jobs(cells, tmp_path)
    given = [dict(zip(job.command[2::2], job.command[3::2], strict=True)) for job in jobs]
    names = ("--seed", "--told", "--max_completion_length", "--hidden_size", "--max_steps")
    assert {job.directory.name: [each[name] for name in names] for job, each in zip(jobs, given)} == {
        "start-told-1-1": ["1", "1", "128", "128", "900"],
        "start-told-1-2": ["2", "1", "128", "128", "900"],
        "start-told-8-1-512x2": ["1", "8", "1000", "512", "3000"],
    }
    assert replace(cell, seed=4).settings()["model"] == "taught in turn"


def test_a_masked_model_is_taught_for_diffusion(tmp_path):
    jobs = runner.model_jobs(
        [Cell("a", trainer="diffusion"), Cell("b", "int8", trainer="diffusion"), Cell("c")], tmp_path
    )
    assert [(Path(job.command[1]).name, job.directory.name) for job in jobs] == [
        ("build_masked_model.py", "masked"),
        ("build_arithmetic_model.py", "3-digits-0.33"),
    ]
    masked = dict(zip(jobs[0].command[2::2], jobs[0].command[3::2], strict=True))
    assert masked == {"--output_dir": str(tmp_path / "models" / "masked"), "--eval_problems": "512"}


def test_outliers_change_activations_and_no_output():
    model = building.build_model(building.build_tokenizer()).double().eval()
    ids, seen = torch.randint(4, 60, (4, 16)), {}
    for name in ("q_proj", "up_proj", "down_proj"):
        module = next(module for path, module in model.named_modules() if path.endswith(name))
        module.register_forward_pre_hook(lambda module, args, name=name: seen.setdefault(name, []).append(args[0]))
    with pytest.raises(ValueError, match="`outliers`=48 is not a power of two"):
        add_outliers(model, 48)
    with torch.no_grad():
        before = model(ids).logits
        add_outliers(model, 64)
        after = model(ids).logits
    assert torch.equal(before, after)
    for plain, spread in seen.values():
        ratio = (spread / plain).flatten(0, 1)
        assert (ratio == 64).all(0).sum() == CHANNELS and (ratio == 1).all(0).sum() == ratio.shape[1] - CHANNELS


def test_seeds_are_repetitions_of_one_cell():
    cell, other = Cell("a", "fp8"), Cell("a", "fp8", learning_rate=1e-5)
    runs = [Run(f"a-seed{seed}", [], settings=replace(cell, seed=seed).settings()) for seed in (0, 1)]
    assert [len(group.runs) for group in grouped([*runs, Run("b", [], settings=other.settings())])] == [2, 1]


def test_a_regime_knows_how_large_a_number_is_and_not_its_type():
    cells = [Cell("a", outliers=128), Cell("b", outliers=128.0), Cell("c", outliers=64.0)]
    one, same, other = (
        table.regime(Group(cell.name, [Run(cell.name, [], settings=cell.settings())])) for cell in cells
    )
    assert one == same != other


# Tables, against values computed by hand


def write_run(directory: Path, cell: Cell, rewards: list[float], kl: float | None = None) -> None:
    directory.mkdir(parents=True)
    (directory / "settings.json").write_text(json.dumps(cell.settings()))
    entries = [{"step": i, "reward": reward, "entropy": 0.5} for i, reward in enumerate(rewards, 1)]
    for entry in entries if kl else []:
        entry |= {"mismatch/kl_k3": kl, "completions/mean_length": 40.0}
    entries = [{"step": 0, "eval_accuracy": 0.2}, *entries, {"step": len(entries), "eval_accuracy": rewards[-1] - 0.01}]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    (directory / "finished.json").write_text(json.dumps({"machine": "a machine", "commit": "c0ffee"}))


def write_cell(directory: Path, cell: Cell, ends: list[float], kl: float | None = None) -> None:
    """Runs of 20 steps that start at a reward of 0.2; the last two steps are around their end."""
    for seed, end in enumerate(ends):
        rewards = [0.2] * 18 + [end - 0.01, end + 0.01]
        write_run(directory / f"{cell.name.replace(' ', '-')}-seed{seed}", replace(cell, seed=seed), rewards, kl)


@pytest.fixture
def study(tmp_path, monkeypatch) -> Path:
    full, near, far = Cell("full precision"), Cell("near", "fp8", None, "tis"), Cell("far", "fp8", None, "none")
    few, alone = Cell("few", "int8", None, "tis"), Cell("alone", "fp8", None, "tis", learning_rate=1.0)
    monkeypatch.setitem(QUESTIONS, "made up", Question("Which?", (full, near, far, few, alone)))
    directory = tmp_path / "made up"
    write_cell(directory, full, [0.6, 0.7, 0.8])
    write_cell(directory, near, [0.5, 0.6, 0.55], kl=0.001)  # 0.15 apart, seeds 0.2
    write_cell(directory, far, [0.45, 0.5, 0.4], kl=0.002)  # 0.25 apart, none among the others
    write_cell(directory, few, [0.1, 0.1])
    write_cell(directory, alone, [0.1, 0.1, 0.1])
    return directory


def test_a_cell_is_the_mean_and_the_spread_of_its_seeds(study):
    text = table.write("made up", study, study.parent)
    rows = {row["name"]: row for row in table.read_results(study.parent / "made up.json.xz")["cells"]}
    assert list(rows) == ["full precision", "near", "far", "few", "alone"]
    reward = rows["full precision"]["metrics"]["reward"]
    assert rows["far"]["metrics"]["accuracy"]["mean"] == pytest.approx(0.45)
    assert reward["mean"] == pytest.approx(0.7) and reward["std"] == pytest.approx(0.1) and reward["seeds"] == 3
    assert (reward["smallest"], reward["largest"]) == (pytest.approx(0.6), pytest.approx(0.8))
    # 1 of 27 draws of three seeds is the smallest each time, which is more than 2.5%
    assert (reward["low"], reward["high"]) == (pytest.approx(0.6), pytest.approx(0.8))
    assert rows["far"]["gain"] == pytest.approx(0.5)  # from 0.2 to 0.45, and from 0.2 to 0.7
    assert {name: row["differs"] for name, row in rows.items()} == {
        "full precision": None,
        "near": False,
        "far": True,
        "few": None,
        "alone": None,  # nothing in full precision has its learning rate
    }
    assert rows["full precision"]["metrics"]["KL"] is None and rows["near"]["metrics"]["KL"]["mean"] == 0.001
    (first, *_) = rows["near"]["runs"]
    assert first["seed"] == 0 and first["commit"] == "c0ffee" and first["machine"] == "a machine"
    assert first["log"]["reward"]["20"] == pytest.approx(0.51) and len(first["log"]["reward"]) == 20
    assert text == (study.parent / "made up.md").read_text() and (study.parent / "made up.png").stat().st_size > 1000
    assert rows["near"]["settings"]["warmup_steps"] == 5 and "seed" not in rows["near"]["settings"]


def test_one_seed_among_those_of_full_precision_is_no_difference():
    full = table.over_seeds([0.6, 0.61, 0.62])
    assert table.differs(table.over_seeds([0.1, 0.2, 0.59]), full) is True
    assert table.differs(table.over_seeds([0.1, 0.2, 0.605]), full) is False
    assert table.differs(table.over_seeds([0.59, 0.595, 0.599]), full) is False


def test_the_markdown_table(study):
    question = QUESTIONS["made up"]
    text = table.markdown(question, table.cells_of(table.read(question, study), table.METRICS))
    rows = {
        line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]] for line in text.splitlines()[4:]
    }
    assert rows["full precision"][:5] == ["3", "0.700", "0.600 to 0.800", "", ""]
    assert rows["far"] == [
        "3",
        "0.450",
        "0.400 to 0.500",
        "",
        "50%",
        "*",
        "0.450",
        "2.0e-03",
        "0.08",
        "0.5",
    ]
    assert [rows[name][5] for name in rows] == ["", "", "*", "?", "?"]
    # With four seeds an interval of the mean is narrower than their range
    write_cell(study.parent / "four", question.cells[0], [0.6, 0.7, 0.8, 0.5])
    text = table.markdown(question, table.cells_of(table.read(question, study.parent / "four"), table.METRICS))
    seeds, mean, ends, interval = (cell.strip() for cell in text.splitlines()[4].split("|")[2:6])
    low, high = map(float, interval.split(" to "))
    assert (seeds, mean, ends) == ("4", "0.650", "0.500 to 0.800") and 0.5 < low < 0.6 < 0.7 < high < 0.8


def test_stored_results_give_the_same_table_and_figure(study):
    text = table.write("made up", study, study.parent)
    question, (rows, groups) = QUESTIONS["made up"], table.stored(study.parent / "made up.json.xz")
    assert table.markdown(question, rows) == text
    assert table.markdown(question, table.cells_of(groups, table.METRICS)) == text
    (drawn, again) = (table.figure(question, found).axes for found in (table.read(question, study), groups))
    for before, after in zip(drawn, again, strict=True):
        assert after.get_title(loc="left") == before.get_title(loc="left")
        lines = [[(line.get_label(), *line.get_ydata()) for line in axis.lines] for axis in (before, after)]
        assert lines[0] == lines[1] and len(lines[0]) > 0
        assert len(before.collections) == len(after.collections)


def test_stored_runs_are_finished_ones(study, tmp_path):
    """In an output that has none: the table is the same, and only the seeds that are missing are run."""
    text, results, output = table.write("made up", study, tmp_path), tmp_path, tmp_path / "later"
    cells = {cell.name: cell for cell in QUESTIONS["made up"].cells}
    near = [replace(cells["near"], seed=seed) for seed in range(4)]
    assert not any(job.finished for job in runner.trial_jobs(near, output, "made up"))
    runner.take_stored("made up", results, output)
    assert [job.finished for job in runner.trial_jobs(near, output, "made up")] == [True] * 3 + [False]
    other = [replace(cell, learning_rate=0.5) for cell in near]
    assert not any(job.finished for job in runner.trial_jobs(other, output, "made up"))
    before = (tmp_path / "made up.json.xz").read_bytes()
    assert table.write("made up", output / "made up", tmp_path) == text
    assert (tmp_path / "made up.json.xz").read_bytes() == before


def test_runs_whose_settings_have_changed_are_not_taken(study, tmp_path, monkeypatch):
    table.write("made up", study, tmp_path)
    cells = tuple(
        replace(cell, learning_rate=0.5) if cell.name == "near" else cell for cell in QUESTIONS["made up"].cells
    )
    monkeypatch.setitem(QUESTIONS, "made up", Question("Which?", cells))
    runner.take_stored("made up", tmp_path, tmp_path / "later")
    found = {path.parent.name.partition("-seed")[0] for path in (tmp_path / "later").glob("*/*/finished.json")}
    assert found == {"full-precision", "far", "few", "alone"}


def test_runs_side_by_side_have_ports_of_their_own(tmp_path):
    command = [sys.executable, "-c", "import os; open('port', 'w').write(os.environ['MASTER_PORT'])"]
    ports = set()
    for i in range(2):
        job = runner.Job(tmp_path / str(i), ["env", "-C", str(tmp_path / str(i)), *command], "port")
        assert job.start(i).wait() == 0 and job.finished
        ports.add(int((job.directory / "port").read_text()))
    assert len(ports) == 2 and min(ports) > 1023


@pytest.mark.parametrize("cell", QUESTIONS["rollouts"].cells, ids=lambda cell: cell.name)
def test_vllm_is_told_the_same_in_every_cell(cell, tmp_path, monkeypatch):
    """In full precision it is TRL's, which takes no arguments for it."""
    told = {}

    def build(cls, args, **kwargs):
        told.update(args.vllm_engine_kwargs or {})
        if args.rollout_precision is None:
            assert args.vllm_engine_kwargs is None
            vllm_generation.LLM(model="")
        raise InterruptedError(args.rollout_precision)

    (tmp_path / "settings.json").write_text(json.dumps(cell.settings()))
    monkeypatch.setattr(vllm_generation, "LLM", lambda **arguments: told.update(arguments), raising=False)
    monkeypatch.setitem(
        trial.TRAINERS, "grpo", type("Trainer", (), {"config_class": QuantGRPOConfig, "__new__": build})
    )
    monkeypatch.setattr(trial.AutoTokenizer, "from_pretrained", lambda path: None)
    monkeypatch.setattr(trial, "load_prompts", lambda path: None)
    with pytest.raises(InterruptedError, match=str(cell.rollout_precision)):
        trial.train(tmp_path, tmp_path)
    assert told.pop("model", None) == ("" if cell.rollout_precision is None else None)
    assert told == trial.VLLM["vllm_engine_kwargs"]


def test_a_question_without_panels_has_no_figure(study, monkeypatch):
    monkeypatch.setitem(QUESTIONS, "made up", replace(QUESTIONS["made up"], panels=()))
    text = table.write("made up", study, study.parent)
    assert "| near | 3 |" in text and sorted(path.suffix for path in study.parent.glob("made up.*")) == [".md", ".xz"]


def test_the_figure_has_full_precision_beside_each_precision(study):
    groups = table.read(QUESTIONS["made up"], study)
    drawn = {title: {group.name for group in some} for title, some in table.facets(groups).items()}
    assert drawn == {
        "fp8, learning_rate 0.0004": {"full precision", "near", "far"},
        "int8, learning_rate 0.0004": {"full precision", "few"},
        "fp8, learning_rate 1.0": {"alone"},
    }
    axes = table.figure(QUESTIONS["made up"], groups).axes
    assert len(axes) == 6  # two panels each
    (line,) = [line for line in axes[0].lines if line.get_label() == "far"]
    assert line.get_ydata()[0] == pytest.approx(0.2) and line.get_ydata()[-1] > 0.2
    assert len(axes[0].collections) == 3  # a band for each cell


def test_a_figure_by_regime_has_all_precisions_of_a_trainer_together(tmp_path, monkeypatch):
    """Distillation has no reward, and its gain is that over its own full precision."""
    cells = [Cell(f"{t} {p}", p, trainer=t) for t in ("grpo", "distillation") for p in (None, "int8", "int4")]
    question = Question("Which?", tuple(cells), ("Held-out reward",), by_regime=True)
    monkeypatch.setitem(QUESTIONS, "made up", question)
    for cell, end in zip(cells, (0.7, 0.6, 0.5, 0.4, 0.4, 0.3), strict=True):
        write_cell(tmp_path / "made up", cell, [end] * 3)
    for path in (tmp_path / "made up").glob("distillation-*/metrics.jsonl"):
        path.write_text(path.read_text().replace('"reward"', '"loss"'))
    groups = table.read(question, tmp_path / "made up")
    drawn = {title: [group.name for group in some] for title, some in table.facets(groups, by_regime=True).items()}
    assert drawn == {f"trainer {t}": [f"{t} {p}" for p in (None, "int8", "int4")] for t in ("grpo", "distillation")}
    assert [len(axis.collections) for axis in table.figure(question, groups).axes] == [3, 3]
    rows = table.cells_of(groups, table.METRICS)
    assert [row["gain"] for row in rows] == [None, *map(pytest.approx, (0.8, 0.6)), None, *map(pytest.approx, (1, 0.5))]
    found = [[cell.strip() for cell in line.split("|")] for line in table.markdown(question, rows).splitlines()[4:]]
    assert [cells[8] for cells in found] == ["0.700", "0.600", "0.500", "", "", ""]


def test_runs_that_did_not_finish_are_no_rows(study):
    for path in study.glob("far-*/finished.json"):
        path.unlink()
    assert "far" not in [group.name for group in table.read(QUESTIONS["made up"], study)]
    assert "no finished run" in table.write("made up", study / "nothing", study.parent)
