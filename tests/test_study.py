"""The study: its cells are valid, its runs resume and fail one by one, and its tables say what the seeds say."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
import trl.generation.vllm_generation as vllm_generation

from trl_quant import QuantGRPOConfig
from trl_quant.report.runs import Group, Run, grouped, read_run
from trl_quant.tasks.arithmetic import Division, Problem
from trl_quant.tasks.countdown import searches


ROOT = Path(__file__).parents[1]
STUDY = ROOT / "benchmarks" / "study"
sys.path[:0] = [str(STUDY), str(ROOT / "examples")]

import build_arithmetic_model as building  # noqa: E402
import run as runner  # noqa: E402
import table  # noqa: E402
import trial  # noqa: E402
from cells import QUESTIONS, SHAPES, Cell, Question  # noqa: E402
from outliers import CHANNELS, add_outliers  # noqa: E402
from rich.console import Console  # noqa: E402


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
        config = QuantGRPOConfig(output_dir=str(tmp_path), **trial.QUIET | cell.arguments())
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
    rows = {row["name"]: row for row in json.loads((study.parent / "made up.json").read_text())["cells"]}
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
    assert rows["full precision"][:5] == ["3", "0.700", "0.600 to 0.800", "0.600 to 0.800", ""]
    assert rows["far"] == [
        "3",
        "0.450",
        "0.400 to 0.500",
        "0.400 to 0.500",
        "50%",
        "*",
        "0.450",
        "2.0e-03",
        "0.08",
        "0.5",
    ]
    assert [rows[name][5] for name in rows] == ["", "", "*", "?", "?"]


def test_stored_results_give_the_same_table_and_figure(study):
    text = table.write("made up", study, study.parent)
    question, (rows, groups) = QUESTIONS["made up"], table.stored(study.parent / "made up.json")
    assert table.markdown(question, rows) == text
    assert table.markdown(question, table.cells_of(groups, table.METRICS)) == text
    (drawn, again) = (table.figure(question, found).axes for found in (table.read(question, study), groups))
    for before, after in zip(drawn, again, strict=True):
        assert after.get_title(loc="left") == before.get_title(loc="left")
        lines = [[(line.get_label(), *line.get_ydata()) for line in axis.lines] for axis in (before, after)]
        assert lines[0] == lines[1] and len(lines[0]) > 0
        assert len(before.collections) == len(after.collections)


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

    def build(args, **kwargs):
        told.update(args.vllm_engine_kwargs or {})
        if args.rollout_precision is None:
            assert args.vllm_engine_kwargs is None
            vllm_generation.LLM(model="")
        raise InterruptedError(args.rollout_precision)

    (tmp_path / "settings.json").write_text(json.dumps(cell.settings()))
    monkeypatch.setattr(vllm_generation, "LLM", lambda **arguments: told.update(arguments), raising=False)
    monkeypatch.setattr(trial, "QuantGRPOTrainer", build)
    monkeypatch.setattr(trial.AutoTokenizer, "from_pretrained", lambda path: None)
    monkeypatch.setattr(trial, "load_prompts", lambda path: None)
    with pytest.raises(InterruptedError, match=str(cell.rollout_precision)):
        trial.train(tmp_path, tmp_path)
    assert told.pop("model", None) == ("" if cell.rollout_precision is None else None)
    assert told == trial.VLLM["vllm_engine_kwargs"]


def test_a_question_without_panels_has_no_figure(study, monkeypatch):
    monkeypatch.setitem(QUESTIONS, "made up", replace(QUESTIONS["made up"], panels=()))
    text = table.write("made up", study, study.parent)
    assert "| near | 3 |" in text and sorted(path.suffix for path in study.parent.glob("made up.*")) == [".json", ".md"]


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


def test_runs_that_did_not_finish_are_no_rows(study):
    for path in study.glob("far-*/finished.json"):
        path.unlink()
    assert "far" not in [group.name for group in table.read(QUESTIONS["made up"], study)]
    assert "no finished run" in table.write("made up", study / "nothing", study.parent)


# Running


def job(directory: Path, code: str, settings: dict | None = None) -> runner.Job:
    """A process that notes each start beside its directory, and then does something."""
    started = directory.with_suffix(".starts")
    code = (
        f"import sys, time, pathlib\nopen({str(started)!r}, 'a').write('x')\nhere = pathlib.Path({str(directory)!r})\n"
        + code
    )
    return runner.Job(directory, [sys.executable, "-S", "-c", code], "finished.json", settings)


FINISH = "(here / 'finished.json').write_text('{}')"


def starts(job: runner.Job) -> int:
    return len(job.directory.with_suffix(".starts").read_text())


def test_a_finished_run_is_not_repeated_and_a_failure_stops_no_other(tmp_path):
    jobs = [
        job(tmp_path / "fine", FINISH, {"a": 1}),
        job(tmp_path / "wrong", "raise ValueError('the field is wrong')"),
        job(tmp_path / "killed", "import os; os.kill(os.getpid(), 9)"),
        job(tmp_path / "silent", "pass"),
        job(tmp_path / "late", FINISH),
    ]
    found = runner.run(jobs, 2, Console(quiet=True))
    assert found.keys() == {"wrong", "killed", "silent"}
    assert found["wrong"] == "ValueError: the field is wrong" and found["killed"] == "killed by SIGKILL"
    runner.run(jobs, 2, Console(quiet=True))
    assert [starts(job) for job in jobs] == [1, 2, 2, 2, 1]
    (tmp_path / "fine" / "left.txt").write_text("of the settings before")
    changed = replace(jobs[0], settings={"a": 2})
    assert not changed.finished and runner.run([changed], 1, Console(quiet=True)) == {}
    assert starts(changed) == 2 and changed.finished and not (tmp_path / "fine" / "left.txt").exists()


def test_a_run_that_another_question_finished_is_taken_over(tmp_path):
    def named(question, name, settings, code=FINISH):
        return job(tmp_path / question / name, code, {"name": name} | settings)

    first = named("one", "full", {"rate": 1.0}, "(here / 'metrics.jsonl').write_text('its log')\n" + FINISH)
    broken = named("one", "broken", {"rate": 3.0}, "pass")
    runner.run([first, broken], 2, Console(quiet=True))
    same = named("two", "the same", {"rate": 1})
    others = [named("two", "faster", {"rate": 2.0}), named("two", "again", {"rate": 3.0})]
    (tmp_path / "one" / "half").mkdir()
    (tmp_path / "one" / "half" / "finished.json").write_text("{}")  # of a copy that was killed
    runner.take_over([first, same, *others], tmp_path)
    assert same.finished and not any(other.directory.exists() for other in others)
    assert (same.directory / "metrics.jsonl").read_text() == "its log"
    assert json.loads((same.directory / "settings.json").read_text())["name"] == "the same"
    assert first.finished and starts(first) == 1 and not same.directory.with_suffix(".starts").exists()


def test_a_run_that_was_half_taken_over_is_not_finished(tmp_path, monkeypatch):
    first, same = (job(tmp_path / question / "full", FINISH, {"name": "full"}) for question in ("one", "two"))
    runner.run([first], 1, Console(quiet=True))

    def killed(*args, copy=runner.shutil.copytree, **kwargs):
        copy(*args, **kwargs)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(runner.shutil, "copytree", killed)
        runner.take_over([same], tmp_path)
    assert same.directory.exists() and not same.finished
    runner.take_over([same], tmp_path)
    assert same.finished


def test_runs_are_side_by_side_and_no_more_of_them(tmp_path):
    """Each of three waits for a second one to have started; the third has none but finds the files of the others."""
    code = (
        "(here.parent / (here.name + '.on')).touch()\nwhile len(list(here.parent.glob('*.on'))) < 2: time.sleep(0.01)\n"
    )
    jobs = [job(tmp_path / str(i), code + FINISH) for i in range(3)]
    assert runner.run(jobs, 2, Console(quiet=True)) == {}


def test_a_stopped_study_ends_its_runs_and_starts_them_over(tmp_path, monkeypatch):
    """It is told to stop while one run is finished and the other is in the middle."""
    pid = tmp_path / "slow" / "pid"
    done = job(tmp_path / "done", FINISH)
    slow = job(tmp_path / "slow", "import os\n(here / 'pid').write_text(str(os.getpid()))\ntime.sleep(600)")

    def stop_when_both_came_so_far(seconds, wait=time.sleep):
        wait(0.02)
        if pid.is_file() and pid.read_text():
            sys.exit(143)  # what a signal makes of it

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(runner.time, "sleep", stop_when_both_came_so_far)
        runner.run([done, slow], 1, Console(quiet=True))
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)
    again = replace(slow, command=job(tmp_path / "slow", FINISH).command)
    assert done.finished and not again.finished
    assert runner.run([done, again], 1, Console(quiet=True)) == {}
    assert (starts(done), starts(again)) == (1, 2) and again.finished and not pid.exists()


def test_a_killed_study_leaves_nothing_that_runs(tmp_path, capsys):
    """While it runs, a second one in its directory is refused; once it is killed, its run has ended with it."""
    code = (
        f"import sys; sys.path.insert(0, {str(STUDY)!r})\nimport run\nfrom pathlib import Path\n"
        f"path = Path({str(tmp_path)!r})\n"
        'there = \'import os, time; open("pid", "w").write(str(os.getpid())); time.sleep(600)\'\n'
        "command = ['env', '-C', str(path / 'slow'), sys.executable, '-S', '-c', there]\n"
        "with run.alone_in(path):\n    run.run([run.Job(path / 'slow', command, 'done')], 1, run.Console(quiet=True))"
    )
    study, pid = subprocess.Popen([sys.executable, "-c", code]), tmp_path / "slow" / "pid"
    try:
        while not (pid.is_file() and pid.read_text()):
            assert study.poll() is None
            time.sleep(0.05)
        with pytest.raises(SystemExit) as refused:
            runner.main(["cost", "--output", str(tmp_path)])
        assert str(refused.value).startswith(f"`--output`: another process runs the study in {tmp_path}.")
    finally:
        study.kill()
        study.wait()
    ended = Path("/proc", pid.read_text(), "stat")
    for _ in range(200):
        if left := ended.exists() and " Z " not in ended.read_text():
            time.sleep(0.05)
    assert not left
    with runner.alone_in(tmp_path):
        assert [path.name for path in (tmp_path / "slow").iterdir() if path.name != "output.txt"] == ["pid"]


# The command


def untaught(study: Path, **asked) -> Path:
    """Where the study finds the model of cells that ask this, untaught."""
    model, tokenizer = study / "models" / Cell("", **asked).model, building.build_tokenizer()
    building.build_model(tokenizer).save_pretrained(model)
    tokenizer.save_pretrained(model)
    for split in ("train", "eval"):
        rows = building.prompts(building.BuildArguments(**asked), seed=0, count=8, held_out=split == "eval")
        rows.to_json(model / f"{split}.jsonl")
    return model


@pytest.fixture
def built(tmp_path) -> Path:
    untaught(tmp_path / "study")
    return tmp_path / "study"


@pytest.mark.parametrize(
    ("asked", "reward"),
    [({"countdown": 3}, "countdown"), ({"quotient": 2}, "division"), ({"word_problems": "words.jsonl"}, "gsm8k")],
)
def test_each_problem_has_its_reward(tmp_path, monkeypatch, asked, reward):
    monkeypatch.chdir(tmp_path)
    rows = [{"question": f"{n}+10000?", "answer": f"#### {n + 10000}"} for n in range(64)]  # by chance nobody is right
    Path("words.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    cell = Cell("a", "mxfp4", max_steps=1, **asked)
    (tmp_path / "settings.json").write_text(json.dumps(cell.settings() | {"per_device_train_batch_size": 8}))
    trial.train(tmp_path, untaught(tmp_path, **asked))
    run = read_run(tmp_path)
    assert run.status == "done" and run.values(f"rewards/{reward}_reward/mean") == [0.0]
    assert 1 < run.values("completions/max_length")[0] <= cell.max_completion_length


def test_the_command_trains_and_writes_what_the_report_reads(built, monkeypatch, capsys):
    """In this process, since each of its own takes seconds to start."""
    small = {"per_device_train_batch_size": 8}
    monkeypatch.setattr(Cell, "settings", lambda self, whole=Cell.settings: whole(self) | small)

    def in_process(jobs, at_once, console):
        for job in jobs:
            if not job.finished:
                job.directory.mkdir(parents=True)
                (job.directory / "settings.json").write_text(json.dumps(job.settings))
                assert job.command[1].endswith("trial.py")
                trial.train(*map(Path, job.command[2:]))
        return {}

    monkeypatch.setattr(runner, "run", in_process)
    chosen = ["--cells", "mxfp4 tis", "--seeds", "3", "--steps", "2", "--output", str(built)]
    assert runner.main(["corrections", *chosen]) == 0
    assert "| mxfp4 tis | 1 |" in capsys.readouterr().out
    found = read_run(built / "corrections" / "mxfp4-tis-seed3")
    assert found.status == "done" and found.steps == 2 and len(found.values("eval_accuracy")) == 3
    assert found.settings["rollout_precision"] == "mxfp4" and found.settings["seed"] == 3
    assert found.values("mismatch/kl_k3")[0] > 0
    raw = json.loads((built / "corrections.json").read_text())["cells"][0]["runs"][0]
    assert raw["seed"] == 3 and raw["machine"] and raw["commit"] and raw["trl"]
    assert (built / "corrections.png").read_bytes()[:4] == b"\x89PNG"
    monkeypatch.setattr(trial, "train", None)  # nothing is left to do
    assert runner.main(["corrections", *chosen]) == 0
    (cell,) = (cell for cell in QUESTIONS["corrections"].cells if cell.name == "mxfp4 tis")
    monkeypatch.setitem(QUESTIONS, "another", Question("The same?", (replace(cell, name="mxfp4 renamed"),)))
    assert runner.main(["another", "--seeds", "3", *chosen[chosen.index("--steps") :]]) == 0
    assert "| mxfp4 renamed | 1 |" in capsys.readouterr().out


@pytest.mark.parametrize(
    "wrong",
    [
        ["colours"],
        ["cost", "--cells", "fp9"],
        ["cost", "--jobs", "0"],
        ["cost", "--steps", "-1"],
        ["words", "--word_problems", "none.jsonl"],
    ],
)
def test_wrong_arguments_are_refused(wrong, capsys, tmp_path):
    with pytest.raises(SystemExit):
        runner.main([*wrong, "--output", str(tmp_path / "out")])
    assert wrong[-1] in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_word_problems_that_no_cell_asks_are_refused(capsys, tmp_path):
    with pytest.raises(SystemExit):
        runner.main(["cost", "--table", "--word_problems", __file__, "--output", str(tmp_path / "out")])
    assert "`--word_problems`: 'cost' asks none" in capsys.readouterr().err and not (tmp_path / "out").exists()
