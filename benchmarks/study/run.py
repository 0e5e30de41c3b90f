"""
The study: which correction, in which precision, and when. Many small runs side by side, each in a process of its own.

    python benchmarks/study/run.py corrections --seeds 0 1 2 --jobs 8
    python benchmarks/study/run.py corrections --cells "full precision" "mxfp4 none" "mxfp4 tis" --steps 100
    python benchmarks/study/run.py corrections --table --results benchmarks/results/study

The questions are in `cells.py`. Each run has a directory, `OUTPUT/QUESTION/CELL-seedN`, that `trl-quant report` reads.
Run it again after an interruption: killed runs start over. Those that finished are not repeated, nor those that another
question made, nor those that `--results` has, as long as their cells have the settings of then. Runs end with the
process that started them, also where it is killed, and a second one in the same OUTPUT is refused. A run that fails
leaves the others alone, and its output in `output.txt`. On a CPU a run has one thread; on
GPUs the runs take turns.
"""

import argparse
import ctypes
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from cell import Cell
from cells import QUESTIONS
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from table import stored, write


ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from engines import free_port  # noqa: E402


EXAMPLE = ROOT / "examples" / "build_arithmetic_model.py"
STARTS = Path(__file__).with_name("starts.py")
MASKED = EXAMPLE.with_name("build_masked_model.py")
GPUS = torch.cuda.device_count()
LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


@dataclass(frozen=True)
class Job:
    """
    A process.

    Attributes:
        directory (`Path`): Where it works, and leaves its output.
        command (`list[str]`): Which program, with its arguments.
        done (`str`): File in `directory` that it writes last.
        settings (`dict` or `None`): What it is to do, given to it as `settings.json`; a directory of others is emptied.
        steps (`int`): That it makes.
    """

    directory: Path
    command: list[str]
    done: str
    settings: dict | None = None
    steps: int = 1

    @property
    def finished(self) -> bool:
        path = self.directory / "settings.json"
        same = self.settings is None or (path.is_file() and json.loads(path.read_text()) == self.settings)
        return same and (self.directory / self.done).is_file()

    def start(self, place: int) -> subprocess.Popen:
        """Starts it over, on a GPU that depends on its `place` among those that run."""
        shutil.rmtree(self.directory, ignore_errors=True)
        self.directory.mkdir(parents=True)
        if self.settings is not None:
            (self.directory / "settings.json").write_text(json.dumps(self.settings))
        own = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
        own["MASTER_PORT"] = str(free_port())  # runs that start together would look for one in the same order
        own["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        if GPUS:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(GPUS)))
            own["CUDA_VISIBLE_DEVICES"] = visible.split(",")[place % GPUS]
        with (self.directory / "output.txt").open("w") as output:
            return subprocess.Popen(
                self.command, stdout=output, stderr=subprocess.STDOUT, env=os.environ | own, preexec_fn=end_with_parent
            )

    @property
    def step(self) -> int:
        """The last one logged."""
        try:
            lines = (self.directory / "metrics.jsonl").read_text().splitlines()
            return json.loads(lines[-1])["step"]
        except (OSError, IndexError, ValueError):  # none yet, or half a line
            return 0

    def failure(self, code: int) -> str:
        """Why it ended otherwise than it should."""
        if code < 0:
            return f"killed by {signal.Signals(-code).name}"
        lines = [line for line in (self.directory / "output.txt").read_text().splitlines() if line.strip()]
        return next((line for line in reversed(lines) if "Error" in line), (lines or [f"exit status {code}"])[-1])


def end_with_parent() -> None:
    """Has Linux kill this process when its parent ends, in whatever way. Others leave it to itself."""
    if sys.platform == "linux":
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


@contextmanager
def alone_in(output: Path) -> Iterator[None]:
    """Context in which no other process of this program works in `output`: it would empty directories that are used."""
    output.mkdir(parents=True, exist_ok=True)
    with (output / "lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.exit(f"`--output`: another process runs the study in {output}. Wait for it, or take another directory.")
        yield


def run(jobs: Sequence[Job], at_once: int, console: Console) -> dict[str, str]:
    """Runs those that are not finished; returns why, by name, of those that failed."""
    failures, running = {}, {}
    waiting = [job for job in jobs if not job.finished]
    columns = TextColumn("{task.description:32}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console) as progress:
        total = progress.add_task("all", total=len(jobs), completed=len(jobs) - len(waiting))
        try:
            while waiting or running:
                for place in sorted(set(range(at_once)) - running.keys())[: len(waiting)]:
                    job = waiting.pop(0)
                    bar = progress.add_task(job.directory.name, total=job.steps)
                    running[place] = job, job.start(place), bar
                time.sleep(0.1)
                for place, (job, process, bar) in list(running.items()):
                    progress.update(bar, completed=job.step)
                    if process.poll() is None:
                        continue
                    del running[place]
                    progress.remove_task(bar)
                    progress.advance(total)
                    if process.returncode or not job.finished:
                        failures[job.directory.name] = job.failure(process.returncode)
                        console.print(
                            f"{job.directory.name} failed: {failures[job.directory.name]}",
                            markup=False,
                            highlight=False,
                        )
        finally:  # also when this process is told to stop
            for _, process, _ in running.values():
                process.terminate()
            for _, process, _ in running.values():
                process.wait()
    return failures


def model_jobs(cells: Sequence[Cell], output: Path, word_problems: str | None = None) -> list[Job]:
    """Teaches the models that the cells start from; harder problems are taught for longer, and two ways of solving.

    Stored ones are unpacked. Where sums are told, each start has a seed of its own.
    `word_problems` is where those are read, if not from the hub.
    """
    found = {}
    for cell in cells:
        if cell.starts and not cell.told:
            path = output / "models" / cell.taught
            found[cell.taught] = Job(path, [sys.executable, str(STARTS), cell.start, str(path)], "eval.jsonl")
            continue
        if cell.trainer == "diffusion":
            path = output / "models" / cell.taught
            words = ["--output_dir", str(path), "--eval_problems", "512"]
            found[cell.taught] = Job(path, [sys.executable, str(MASKED), *words], "eval.jsonl")
            continue
        hard = cell.quotient or cell.countdown or cell.word_problems or cell.told > 1
        options = {
            "output_dir": output / "models" / cell.taught,
            "target_accuracy": cell.accuracy,
            "max_digits": cell.digits,
            "max_completion_length": cell.max_completion_length,
            "quotient": cell.quotient,
            "countdown": cell.countdown,
            "eval_problems": 64 if cell.quotient else 512,
            "direct": cell.direct,
            "hidden_size": cell.hidden_size,
            "num_hidden_layers": cell.num_hidden_layers,
            "num_experts": cell.num_experts,
            "max_steps": round((3000 if hard else 300 * cell.digits) / (1 - cell.direct)),
        }
        if cell.word_problems:
            options["word_problems"] = word_problems or cell.word_problems
        if cell.told:
            options |= {"told": cell.told, "seed": cell.number}
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        found[cell.taught] = Job(options["output_dir"], [sys.executable, str(EXAMPLE), *words], "eval.jsonl")
    return list(found.values())


def outlier_jobs(cells: Sequence[Cell], output: Path) -> list[Job]:
    """Gives those models their outliers."""
    script, models = str(Path(__file__).with_name("outliers.py")), output / "models"
    return [
        Job(models / cell.model, [sys.executable, script, *map(str, paths), f"{cell.outliers:g}"], "train.jsonl")
        for cell in {cell.model: cell for cell in cells if cell.outliers != 1}.values()
        for paths in [(models / cell.taught, models / cell.model)]
    ]


def trial_jobs(cells: Sequence[Cell], output: Path, question: str) -> list[Job]:
    """Trains the cells."""
    script = str(Path(__file__).with_name("trial.py"))
    found = []
    for cell in cells:
        directory = output / question / f"{cell.name.replace(' ', '-')}-seed{cell.seed}"
        command = [sys.executable, script, str(directory), str(output / "models" / cell.model)]
        found.append(Job(directory, command, "finished.json", cell.settings(), cell.max_steps))
    return found


def take_over(jobs: Sequence[Job], output: Path) -> None:
    """Copies runs that another question has finished: several have the same cell, some under another name."""

    def work(settings: dict) -> frozenset:
        return frozenset((key, value) for key, value in settings.items() if key != "name")

    done = {
        work(json.loads(path.read_text())): path.parent
        for path in output.glob("*/*/settings.json")
        if path.with_name("finished.json").is_file()
    }
    for job in jobs:
        if (source := done.get(work(job.settings))) and not job.finished:
            shutil.rmtree(job.directory, ignore_errors=True)
            shutil.copytree(source, job.directory, ignore=shutil.ignore_patterns("settings.json"))
            (job.directory / "settings.json").write_text(json.dumps(job.settings))  # last: it is finished with that


def take_stored(question: str, results: Path, output: Path) -> None:
    """
    Lays the runs of a file that the table's command wrote into `output`, where they count as finished: a question can
    be asked on several days. Runs whose cells have other settings now are left out.
    """
    if not (path := results / f"{question}.json.xz").is_file():
        return
    cells = {cell.name: cell for cell in QUESTIONS[question].cells}
    for row, group in zip(*stored(path), strict=True):
        for run, read in zip(row["runs"] if row["name"] in cells else (), group.runs):
            (job,) = trial_jobs([replace(cells[row["name"]], seed=run["seed"])], output, question)
            if job.directory.exists() or not row["settings"].items() <= job.settings.items():  # it may have more fields
                continue
            job.directory.mkdir(parents=True)
            (job.directory / "metrics.jsonl").write_text("".join(f"{json.dumps(entry)}\n" for entry in read.history))
            finished = {name: value for name, value in run.items() if name not in ("seed", "log")}
            (job.directory / job.done).write_text(json.dumps(finished))
            (job.directory / "settings.json").write_text(json.dumps(job.settings))  # last: it is finished with that


def run_cells(cells: Sequence[Cell], args: argparse.Namespace, console: Console) -> dict[str, str]:
    """Runs what `cells` need and they themselves, as far as they are missing; returns why, by name, of what failed."""
    failures = run(model_jobs(cells, args.output, args.word_problems), args.jobs, console)
    failures |= run(outlier_jobs([c for c in cells if c.taught not in failures], args.output), args.jobs, console)
    ready = [cell for cell in cells if not {cell.taught, cell.model} & failures.keys()]
    trials = trial_jobs(ready, args.output, args.question)
    take_over(trials, args.output)
    return failures | run(trials, args.jobs, console)


def positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{value} is below 1")
    return value


def main(argv: list[str] | None = None) -> int:
    """Runs what is missing, then writes the table; returns the number of failures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("question", choices=QUESTIONS)
    parser.add_argument("--cells", nargs="+", metavar="NAME", help="some of the question's (default: all)")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=positive, help="optimizer steps of each run, in place of the cell's")
    parser.add_argument("--jobs", type=positive, default=8 * GPUS or os.cpu_count(), help="runs side by side")
    parser.add_argument("--word_problems", metavar="FILE", help="where to read them, if not from the hub")
    parser.add_argument("--output", type=Path, default=Path("runs/study"), help="where everything goes")
    parser.add_argument("--table", action="store_true", help="run nothing, only write the table")
    parser.add_argument(
        "--results",
        type=Path,
        help="directory for table, figure and raw results (default: --output); runs that it has are not repeated",
    )
    args = parser.parse_args(argv)
    cells = {cell.name: cell for cell in QUESTIONS[args.question].cells}
    if unknown := set(args.cells or ()) - cells.keys():
        parser.error(f"`--cells`: {sorted(unknown)} of {args.question!r}. Allowed: {', '.join(map(repr, cells))}.")
    chosen = [
        replace(cells[name], seed=seed, max_steps=args.steps or cells[name].max_steps)
        for seed in dict.fromkeys(args.seeds)  # a seed of every cell first: an interrupted study is then a smaller one
        for name in args.cells or cells
    ]
    if args.word_problems and not any(cell.word_problems for cell in chosen):
        parser.error(f"`--word_problems`: {args.question!r} asks none.")
    if args.word_problems and not Path(args.word_problems).exists():
        parser.error(f"`--word_problems`: there is no {args.word_problems!r}.")
    console, failures = Console(), {}
    if args.results is not None and args.steps is None:
        take_stored(args.question, args.results, args.output)
    if not args.table:
        with alone_in(args.output):
            failures = run_cells(chosen, args, console)
    console.print(
        write(args.question, args.output / args.question, args.results or args.output), markup=False, soft_wrap=True
    )
    for name, reason in failures.items():
        console.print(f"{name} failed: {reason}", markup=False, highlight=False)
    return len(failures)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(min(main(), 1))
