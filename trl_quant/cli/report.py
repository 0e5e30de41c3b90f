"""`trl-quant report`: a table and a chart of training runs, from the trainer's logs.

    trl-quant report runs/int4-none runs/int4-ais --output runs/report.png
    trl-quant report --mismatch runs/int4-ais --output runs/mismatch.png

A run is a directory with `metrics.jsonl` (one log entry per line, written during the run) or the `trainer_state.json`
of a [`~transformers.Trainer`], also in its newest `checkpoint-*`. With `--mismatch` it reports where the activations of
one run's trainer and engine part (`trl_quant.cli.mismatch`).
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table


REWARD, KL = "reward", "mismatch/kl_k3"
# TRL's name for the weight that multiplies a token's loss, after caps and interpolation; 1 without correction.
WEIGHT = "sampling/importance_sampling_ratio"
# metric -> axis label, scale
PANELS = {
    REWARD: ("reward", "linear"),
    KL: ("mismatch KL (nats per token, k3)", "log"),
    f"{WEIGHT}/mean": ("correction weight (mean; shaded: min to max)", "log"),
}
ENDS = 5  # logged steps that the first and last values are averaged over
HELD_OUT = ("eval_accuracy", "eval_reward")


@dataclass(frozen=True)
class Run:
    """A run's name, its log entries in order, and a note on how it ended."""

    name: str
    history: list[dict]
    note: str = ""
    finished: bool = False  # whether all its steps were made

    def series(self, metric: str) -> tuple[list[int], list[float]]:
        """Steps and values of the entries that have `metric`."""
        entries = [entry for entry in self.history if isinstance(entry.get(metric), int | float)]
        return [entry["step"] for entry in entries], [entry[metric] for entry in entries]

    def values(self, metric: str) -> list[float]:
        return self.series(metric)[1]

    @property
    def steps(self) -> int:
        return max((entry.get("step", 0) for entry in self.history), default=0)

    @property
    def status(self) -> str:
        if self.note:
            return self.note
        done = self.finished or self.values("train_runtime")
        return "done" if done else f"stopped at step {self.steps}"


def read_run(directory: str | Path, name: str | None = None) -> Run:
    """Reads one output directory.

    Raises:
        ValueError: when it holds neither `metrics.jsonl` nor a `trainer_state.json`, or one that cannot be read.
    """
    directory = Path(directory)
    name = name or directory.resolve().name
    checkpoints = [path for path in directory.glob("checkpoint-*") if path.name.rpartition("-")[2].isdecimal()]
    checkpoints.sort(key=lambda path: int(path.name.rpartition("-")[2]), reverse=True)
    states = (_state(path / "trainer_state.json") for path in (directory, *checkpoints))
    state = next(filter(None, states), {})
    finished = 0 < state.get("max_steps", 0) <= state.get("global_step", 0)
    if (directory / "metrics.jsonl").is_file():
        return Run(name, _entries(directory / "metrics.jsonl"), finished=finished)
    if state:
        return Run(name, state["log_history"], finished=finished)
    raise ValueError(f"`runs`={str(directory)!r} holds no run: it has neither metrics.jsonl nor trainer_state.json.")


def _state(path: Path) -> dict | None:
    """A trainer's state, `None` where it is missing or was not written to its end."""
    try:
        state = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return state if isinstance(state, dict) and "log_history" in state else None


def _entries(path: Path) -> list[dict]:
    """The lines of a log; the last one may be half written."""
    lines, entries = path.read_text().splitlines(), []
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
        except ValueError:
            entry = None
        if isinstance(entry, dict) and "step" in entry:
            entries.append(entry)
        elif number < len(lines):
            raise ValueError(f"{path}, line {number}: {line[:80]!r} is no log entry, a JSON object with a 'step'.")
    return entries


def table(runs: Sequence[Run]) -> Table:
    """One row per run; first and last rewards and the last KL are means over `ENDS` logged steps."""
    result = Table("run", *("reward", "held-out", "KL mean", "last", "weight", "s"), "status")
    result.box, result.padding, result.pad_edge = box.SIMPLE_HEAD, (0, 1, 0, 0), False  # fits 80 columns
    for column in result.columns[1:-1]:
        column.justify = "right"
    for run in runs:
        reward, kl, weight = run.values(REWARD), run.values(KL), run.values(f"{WEIGHT}/mean")
        held_out = next(filter(None, map(run.values, HELD_OUT)), [])
        seconds = run.values("train_runtime")
        cells = [
            f"{fmean(reward[:ENDS]):.2f}→{fmean(reward[-ENDS:]):.2f}" if reward else "",
            "→".join(f"{value:.2f}" for value in (held_out[:1] + held_out[1:][-1:])),
            f"{fmean(kl):.1e}" if kl else "",
            f"{fmean(kl[-ENDS:]):.1e}" if kl else "",
            f"{fmean(weight):.3f}" if weight else "",
            f"{seconds[-1]:.0f}" if seconds else "",
        ]
        result.add_row(run.name, *(cell or "-" for cell in cells), run.status)
    return result


def moving_average(values: Sequence[float], window: int = 2 * ENDS) -> list[float]:
    """Mean of each value and up to `window - 1` values before it."""
    return [fmean(values[max(0, i + 1 - window) : i + 1]) for i in range(len(values))]


def chart(runs: Sequence[Run]) -> Figure:
    """Reward, mismatch KL and correction weight over steps, with all runs in each panel."""
    figure = Figure(figsize=(15, 4.5), layout="constrained")
    for axis, (metric, (label, scale)) in zip(figure.subplots(1, len(PANELS)), PANELS.items(), strict=True):
        for i, run in enumerate(runs):
            color = f"C{i}"
            steps, values = run.series(metric)
            if metric == WEIGHT + "/mean":
                lowest, highest = run.series(WEIGHT + "/min"), run.series(WEIGHT + "/max")
                axis.fill_between(lowest[0], lowest[1], highest[1], color=color, alpha=0.15, linewidth=0)
            else:
                axis.plot(steps, values, color=color, alpha=0.2, linewidth=1)
                values = moving_average(values)
            axis.plot(steps, values, color=color, label=run.name, linewidth=1.8)
        axis.set(xlabel="step", ylabel=label, yscale=scale if any(run.values(metric) for run in runs) else "linear")
        axis.grid(alpha=0.3)
    figure.axes[0].legend(fontsize="small")
    return figure


def plot(runs: Sequence[Run], path: str | Path) -> None:
    """Writes [`chart`] as a PNG."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    chart(runs).savefig(path, dpi=120)


def check_output(path: str, *others: str) -> None:
    """Raises `ValueError` for a file to write that is no chart, and not one of the `others`."""
    suffix, known = Path(path).suffix.removeprefix("."), [*Figure().canvas.get_supported_filetypes(), *others]
    if suffix and suffix not in known:
        raise ValueError(f"`--output`={path!r}: charts are written as {', '.join(sorted(known))}.")


def main(argv: list[str] | None = None) -> None:
    """Prints the table of the runs named on the command line and writes their chart."""
    argv = sys.argv[1:] if argv is None else argv
    if any(part.partition("=")[0] == "--mismatch" for part in argv):
        from . import mismatch

        return mismatch.main(argv)
    parser = argparse.ArgumentParser(
        prog="trl-quant report",
        description=__doc__.partition("\n")[0],
        epilog="Instead of runs, `--mismatch MODEL_OR_RUN` reports where the activations of trainer and engine part, "
        "operator by operator; `trl-quant report --mismatch MODEL --help` lists its options.",
    )
    parser.add_argument("runs", nargs="+", help="output directories")
    parser.add_argument("--output", default="report.png", help="where the chart goes (default: %(default)s)")
    args = parser.parse_args(argv)
    check_output(args.output)
    runs = [read_run(directory) for directory in args.runs]
    console = Console()
    console.print(table(runs))
    plot(runs, args.output)
    console.print(f"chart: {args.output}")
