"""The study's command: runs side by side, that resume and fail one by one, and what they leave."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from long_tests import rest_is_long
from places import ROOT

from trl_quant.report.runs import read_run


STUDY = ROOT / "benchmarks" / "study"
CPUINFO = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").is_file() else ""
STORED = ROOT / "benchmarks" / "results" / "study"
sys.path[:0] = [str(STUDY), str(ROOT / "examples")]

import build_arithmetic_model as building  # noqa: E402
import build_masked_model as masked_building  # noqa: E402
import run as runner  # noqa: E402
import trial  # noqa: E402
from cell import Cell, Question  # noqa: E402
from cells import QUESTIONS  # noqa: E402
from raw_results import read_results  # noqa: E402
from rich.console import Console  # noqa: E402


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


@pytest.mark.long
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


@pytest.mark.long
@pytest.mark.parametrize(
    ("asked", "reward"),
    rest_is_long(
        [({"quotient": 2}, "division"), ({"countdown": 3}, "countdown"), ({"word_problems": "words.jsonl"}, "gsm8k")]
    ),
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


@pytest.mark.long
@pytest.mark.parametrize(
    "trainer", rest_is_long(["grpo", "rloo", "ppo", "distillation", "diffusion"], "grpo", "diffusion")
)
def test_each_trainer_is_judged_on_the_way(built, tmp_path, trainer):
    """Distillation starts from a disturbed copy of the model, and has no reward. Diffusion has a model of its own."""
    if trainer == "diffusion":
        masked = masked_building.BuildArguments(str(built / "models" / "masked"), max_steps=1, eval_problems=8)
        masked_building.build(masked)
    cell = Cell("a", "int4", trainer=trainer, max_steps=2, evaluations=2, per_device_train_batch_size=8)
    (tmp_path / "settings.json").write_text(json.dumps(cell.settings()))
    trial.train(tmp_path, built / "models" / cell.model)
    run = read_run(tmp_path)
    assert run.status == "done" and run.series("eval_accuracy")[0] == [0, 1, 2]
    assert bool(run.values("reward")) is (trainer != "distillation")
    assert bool(run.values("value/loss")) is (trainer == "ppo")
    losses = run.values("loss")
    # The teacher is the model itself, from which an undisturbed student would not diverge
    assert trainer != "distillation" or min(losses) > 0.01


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
    raw = read_results(built / "corrections.json.xz")["cells"][0]["runs"][0]
    assert raw["seed"] == 3 and raw["machine"] and raw["commit"] and raw["trl"]
    assert (built / "corrections.png").read_bytes()[:4] == b"\x89PNG"
    monkeypatch.setattr(trial, "train", None)  # nothing is left to do
    assert runner.main(["corrections", *chosen]) == 0
    (cell,) = (cell for cell in QUESTIONS["corrections"].cells if cell.name == "mxfp4 tis")
    monkeypatch.setitem(QUESTIONS, "another", Question("The same?", (replace(cell, name="mxfp4 renamed"),)))
    assert runner.main(["another", "--seeds", "3", *chosen[chosen.index("--steps") :]]) == 0
    assert "| mxfp4 renamed | 1 |" in capsys.readouterr().out


def test_a_run_says_which_cpu_and_which_of_its_instruction_sets(monkeypatch):
    """A GPU is named as before."""
    here = trial.environment()["machine"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    model, _, instructions = trial.environment()["machine"].rpartition(", ")
    assert instructions == torch.backends.cpu.get_cpu_capability()
    if (info := Path("/proc/cpuinfo")).is_file() and "model name" in info.read_text():
        assert f": {model}\n" in info.read_text()
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX0")
    assert trial.environment()["machine"] == f"{model}, AVX0" != here  # as under ATEN_CPU_CAPABILITY
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert trial.environment()["machine"] == trial.machine()


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


@pytest.mark.long
@pytest.mark.skipif("AuthenticAMD" not in CPUINFO, reason="the stored bits are those of an AMD CPU")
def test_a_stored_run_repeats_bit_for_bit(tmp_path):
    """With AVX2, which its CPU had, in its first twelve steps."""
    command = [sys.executable, STUDY / "run.py", "stage_1", "--cells", "int4 tis u1", "--seeds", "3", "--steps", "12"]
    avx2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    subprocess.run([*map(str, command), "--output", tmp_path], check=True, env=os.environ | avx2)
    (again,), stored_cells = (read_results(path / "stage_1.json.xz")["cells"] for path in (tmp_path, STORED))
    (before,) = (run for row in stored_cells if row["name"] == "int4 tis u1" for run in row["runs"] if run["seed"] == 3)
    (again,) = again["runs"]
    for metric in ("entropy", "reward", "mismatch/kl_k3"):
        values = again["log"][metric]
        assert len(values) == 12 and values == {step: before["log"][metric][step] for step in values}
