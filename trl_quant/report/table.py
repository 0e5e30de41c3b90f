"""Makes the tables of a report for a terminal: how fast runs are, and what they learned."""

from collections.abc import Sequence
from statistics import fmean

from rich import box
from rich.table import Table

from . import speed
from .held_out import of_dataset
from .runs import KL, REWARD, Run
from .terminal import plain


# TRL's name for the weight that multiplies a token's loss, after caps and interpolation; 1 without a correction
WEIGHT = "sampling/importance_sampling_ratio/mean"
TELLING = ("eval_accuracy", "eval_reward")  # of an evaluation: the first that was logged is shown
HEADER = ("run", "reward", "held-out", "KL mean", "last", "weight", "s", "status")


def row(run: Run) -> list[str]:
    """Returns a run's row below `HEADER`. First and last rewards and the last KL are means over a few steps."""
    kl, weight = run.values(KL), run.values(WEIGHT)
    seconds = run.values("train_runtime")
    cells = [
        f"{run.first(REWARD):.2f}→{run.last(REWARD):.2f}" if run.values(REWARD) else "",
        _held_out(run),
        f"{fmean(kl):.1e}" if kl else "",
        f"{run.last(KL):.1e}" if kl else "",
        f"{fmean(weight):.3f}" if weight else "",
        f"{seconds[-1]:.0f}" if seconds else "",
    ]
    return [run.name, *(cell or "-" for cell in cells), run.status]


def _held_out(run: Run) -> str:
    """Writes the first and the last value of each evaluation dataset, after its name if there are several."""
    parts = []
    for dataset in run.datasets:
        values = next(filter(None, (run.values(of_dataset(metric, dataset)) for metric in TELLING)), [])
        ends = "→".join(f"{value:.2f}" for value in values[:1] + values[1:][-1:])
        parts.append(f"{dataset} {ends}" if dataset and ends else ends)
    return ", ".join(filter(None, parts))


def table(runs: Sequence[Run]) -> Table:
    """Makes the table of what each run learned."""
    result = _empty(HEADER)
    for column in result.columns[1:-1]:
        column.justify = "right"
    for run in runs:
        result.add_row(*map(plain, row(run)))
    return result


def speed_table(runs: Sequence[Run]) -> Table:
    """Makes the table of each run's speed and its ratio to the first one."""
    result = _empty(speed.HEADER)
    for column in result.columns[1:]:
        column.justify = "right"
    for cells in speed.speed_rows(runs):
        result.add_row(*map(plain, cells))
    return result


def _empty(header: Sequence[str]) -> Table:
    """Makes an empty table that fits 80 columns."""
    result = Table(*header)
    result.box, result.padding, result.pad_edge = box.SIMPLE_HEAD, (0, 1, 0, 0), False
    return result
