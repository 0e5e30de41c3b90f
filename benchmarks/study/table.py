"""What the runs of a question say: a row for each cell over its seeds, a figure, and the raw values as JSON.

A run's value is the mean over the last tenth of its log, a cell's the mean over its seeds. The interval is that of
the mean, by bootstrap over seeds; with three it is too narrow, and the range says more. A cell differs from full
precision where no seed of one is among those of the other and their means are further apart than full precision's
seeds: one of 14 cells does so by chance (of two times three normal values).

| column | is |
|---|---|
| accuracy | of the trained policy at its end, on held-out problems, at temperature 1; range and interval are its |
| gain | how far the accuracy came from where full precision began, where 100% is its end |
| * | the cell differs from full precision in accuracy |
| ? | there are fewer than 3 seeds, here or in full precision: nothing is said |
| reward | of the samples that it is trained on, which are the sampler's |
| nats | KL of a token times tokens: how far sampler and policy are apart on a completion |

A question that compares cells seed by seed has a second table, which `paired.py` explains.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path
from statistics import fmean, stdev
from textwrap import fill

from cell import TREATMENT, Question
from cells import QUESTIONS
from matplotlib.figure import Figure
from paired import compared

from trl_quant.report.panels import SERIES, TOPICS, draw
from trl_quant.report.runs import KL, REWARD, Group, Run, differences, grouped, read_run
from trl_quant.storage.whole import write_whole
from trl_quant.tasks.estimates import bootstrap


sys.path.append(str(Path(__file__).parents[1]))

from palette import save_picture
from raw_results import read_results, write_results


ACCURACY = "eval_accuracy"
SEEDS = 3  # that a statement needs
METRICS = {"accuracy": ACCURACY, "reward": REWARD, "KL": KL, "entropy": "entropy", "length": "completions/mean_length"}
PANELS = {panel.title: panel for panels in TOPICS.values() for panel in panels}


def last_tenth(run: Run, metric: str) -> float | None:
    """Mean over the last tenth of what was logged, `None` where there is nothing."""
    values = run.values(metric)
    return fmean(values[-ceil(len(values) / 10) :]) if values else None


def over_seeds(values: Sequence[float | None]) -> dict | None:
    """Mean of a value over seeds and how sure it is; `None` if a seed lacks it."""
    if None in values:
        return None
    low, high = bootstrap(values)
    return {
        "mean": fmean(values),
        "low": low,
        "high": high,
        "smallest": min(values),
        "largest": max(values),
        "std": stdev(values) if len(values) > 1 else None,
        "seeds": len(values),
    }


def differs(cell: dict, full: dict) -> bool | None:
    """Whether no seed of one is among those of the other, and the means are further apart than full precision's seeds.

    `None` where there are too few seeds. Those of a cell that fails may differ as much as they like.
    """
    if min(cell["seeds"], full["seeds"]) < SEEDS:
        return None
    apart = cell["largest"] < full["smallest"] or full["largest"] < cell["smallest"]
    return apart and abs(cell["mean"] - full["mean"]) > full["largest"] - full["smallest"]


def regime(group: Group) -> frozenset:
    """What a cell has in common with its cell in full precision, whether a number is written 128 or 128.0."""
    return frozenset((k, v) for k, v in group.settings.items() if k not in ("name", *TREATMENT))


def precision(group: Group) -> str | None:
    """What it is trained or sampled in; `None` for full precision."""
    return group.settings["train_precision"] or group.settings["rollout_precision"]


def cells_of(groups: Sequence[Group], metrics: dict[str, str]) -> list[dict]:
    """A row for each group: its `settings`, and by metric what `over_seeds` says."""
    full = {regime(group): i for i, group in enumerate(groups) if precision(group) is None}
    rows = []
    for group in groups:
        found = {label: over_seeds([last_tenth(run, name) for run in group.runs]) for label, name in metrics.items()}
        rows.append(
            {
                "name": group.settings["name"],
                "settings": group.settings,
                "metrics": found,
                "gain": None,
                "differs": None,
            }
        )
    for i, (row, group) in enumerate(zip(rows, groups, strict=True)):
        if (at := full.get(regime(group), i)) == i:
            continue
        accuracy, reference = row["metrics"]["accuracy"], rows[at]["metrics"]["accuracy"]
        start = fmean(run.values(ACCURACY)[0] for run in groups[at].runs)
        if reference["mean"] > start:
            row["gain"] = (accuracy["mean"] - start) / (reference["mean"] - start)
        row["differs"] = differs(accuracy, reference)
    return rows


def markdown(question: Question, rows: Sequence[dict]) -> str:
    """The table."""
    further = question.metrics or {}
    header = ["cell", "seeds", "accuracy", "range", "95%", "gain", "", "reward", "KL", "nats", "entropy", *further]
    lines = [f"**{question.asks}**", "", f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    for row in rows:
        metrics = row["metrics"]
        accuracy, kl, length = metrics["accuracy"], metrics["KL"], metrics["length"]
        is_full = not any(row["settings"][name] for name in ("rollout_precision", "train_precision"))
        few = accuracy["seeds"] < SEEDS or (row["differs"] is None and not is_full)
        values = [
            row["name"],
            str(accuracy["seeds"]),
            f"{accuracy['mean']:.3f}",
            f"{accuracy['smallest']:.3f} to {accuracy['largest']:.3f}",
            f"{accuracy['low']:.3f} to {accuracy['high']:.3f}" if accuracy["seeds"] > SEEDS else "",  # else the range
            "" if row["gain"] is None else f"{row['gain']:.0%}",
            "?" if few else "*" if row["differs"] else "",
            f"{metrics['reward']['mean']:.3f}" if metrics["reward"] else "",
            f"{kl['mean']:.1e}" if kl else "",
            f"{kl['mean'] * length['mean']:.2g}" if kl and length else "",
            *("" if metrics[name] is None else f"{metrics[name]['mean']:.3g}" for name in ("entropy", *further)),
        ]
        lines.append(f"| {' | '.join(values)} |")
    return "\n".join(lines) + "\n"


def facets(groups: Sequence[Group], by_regime: bool = False) -> dict[str, list[Group]]:
    """Title -> what is drawn together: the cells of one precision in one regime, beside full precision.

    With `by_regime` the cells of a regime are drawn together, whatever their precision.
    """
    follows = ("name", "model", "max_completion_length")
    changes = [name for name in differences(groups) if name not in (*follows, *TREATMENT)]
    found = {}
    if by_regime:
        for group in groups:
            found.setdefault(", ".join(f"{name} {group.settings[name]}" for name in changes), []).append(group)
        return found
    for group in groups:
        if precision(group) is not None or len(groups) == 1:
            title = ", ".join([precision(group) or group.name, *(f"{name} {group.settings[name]}" for name in changes)])
            full = [other for other in groups if precision(other) is None and regime(other) == regime(group)]
            found.setdefault(title, full if precision(group) else []).append(group)
    return found or {"": list(groups)}


def figure(question: Question, groups: Sequence[Group]) -> Figure:
    """The question's panels for each facet; bands are the range of the seeds."""
    pictures = [
        (title, PANELS[panel], some)
        for title, some in facets(groups, question.by_regime).items()
        for panel in question.panels
    ]
    pictures = [
        (title, panel, some) for title, panel, some in pictures if panel.metrics([r for g in some for r in g.runs])
    ]
    columns = len(question.panels) if len(question.panels) > 1 else min(3, max(1, len(pictures)))
    rows = max(1, -(-len(pictures) // columns))
    drawn = Figure(figsize=(6.5 * columns, 4 * rows), layout="constrained")
    axes = drawn.subplots(rows, columns, squeeze=False).flatten()
    for axis, (title, panel, some) in zip(axes, pictures, strict=False):
        draw(axis, panel, some)
        heading = fill(f"{panel.title}, {title}", 72)
        axis.set_title(heading, loc="left", fontsize="medium", pad=20 if axis.get_legend() else None)
        if own := axis.get_legend():
            axis.add_artist(own)
        handles, labels = axis.get_legend_handles_labels()
        named = dict(zip(labels, handles, strict=True))
        for line in list(named.values())[len(SERIES) :]:  # colors come around
            line.set_linestyle("--")
        beside = {"loc": "upper left", "bbox_to_anchor": (1, 1)} if len(named) > len(SERIES) else {}
        axis.legend(named.values(), named.keys(), frameon=False, fontsize="small", **beside)
    for axis in axes[len(pictures) :]:
        axis.remove()
    return drawn


def rounded(run: Run) -> Run:
    """With five digits of each number, so that the files are small."""
    history = [{k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in entry.items()} for entry in run.history]
    return replace(run, history=history)


def read(question: Question, directory: Path) -> list[Group]:
    """The finished runs by cell, in the question's order; a cell has its own name."""
    order = {cell.name: i for i, cell in enumerate(question.cells)}
    runs = [rounded(read_run(path.parent)) for path in sorted(directory.glob("*/finished.json"))]
    groups = [Group(group.settings["name"], group.runs) for group in grouped(runs)]
    return sorted(groups, key=lambda group: order.get(group.name, len(order)))


def write(name: str, directory: Path, results: Path) -> str:
    """Writes `name`.json.xz, .md and .png into `results`; returns the table."""
    question = QUESTIONS[name]
    if not (groups := read(question, directory)):
        return f"{directory} holds no finished run."
    metrics = METRICS | (question.metrics or {})
    rows = cells_of(groups, metrics)
    for row, group in zip(rows, groups, strict=True):
        names = [*metrics.values(), *group.runs[0].names("mismatch/by_position/")]
        names += [name for name in group.runs[0].names("mismatch/by_age/") if name not in names]
        row["runs"] = [
            {
                "seed": run.settings["seed"],
                **json.loads((directory / run.name / "finished.json").read_text()),
                "log": {name: dict(zip(*run.series(name), strict=True)) for name in names},
            }
            for run in group.runs
        ]
    text = markdown(question, rows) + compared(question, groups)
    write_results(results / f"{name}.json.xz", {"asks": question.asks, "cells": rows})
    write_whole(results / f"{name}.md", text.encode())
    if question.panels:
        save_picture(figure(question, groups), results / f"{name}.png")
    return text


def stored(path: Path) -> tuple[list[dict], list[Group]]:
    """The rows of a file that `write` wrote, and the runs behind them as far as it holds their logs."""
    rows = read_results(path)["cells"]
    return rows, [Group(row["name"], [_stored_run(row, run) for run in row["runs"]]) for row in rows]


def _stored_run(row: dict, run: dict) -> Run:
    history: dict[int, dict] = {}
    for metric, values in run["log"].items():
        for step, value in values.items():
            history.setdefault(int(step), {"step": int(step)})[metric] = value
    settings = row["settings"] | {"seed": run["seed"]}
    return Run(f"{row['name']}-seed{run['seed']}", [history[step] for step in sorted(history)], settings=settings)
