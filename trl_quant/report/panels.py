"""Defines and draws the panels of a report, by topic. A panel is drawn only if one of its metrics was logged.

Colours and markers distinguish settings; line styles distinguish the metrics of a panel. A line is the mean of moving
averages over seeds, and a band is their range. A single run also shows its raw values, faintly.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from .findings import POSITION, buckets
from .held_out import of_dataset
from .runs import KL, REWARD, STEP_TIME, TOKENS_PER_SECOND, Group, Run, grouped
from .terminal import printable


# CSS variable -> colour on white, and on near black. Distinct in any colour vision, with a contrast of 3 (text: 4.5)
COLORS = {
    "--ink": ("#1b1f24", "#e6e9ed"),
    "--muted": ("#59636e", "#a3adb8"),
    "--grid": ("#d5dae0", "#3a424c"),
    "--s0": ("#4124df", "#21beff"),
    "--s1": ("#e06314", "#cc5519"),
    "--s2": ("#1e8f5d", "#76816a"),
    "--s3": ("#7731a6", "#aa4998"),
    "--s4": ("#752c00", "#f7d336"),
    "--s5": ("#8c89a8", "#c8dfd9"),
}
INK, MUTED, GRID, *SERIES = (light for light, _ in COLORS.values())
MARKERS = "os^DvP*X"
STYLES = ("-", "--", ":", "-.", (0, (8, 1.5)), (0, (4, 1.5, 1, 1.5, 1, 1.5)))
LEGEND_COLUMNS = 4
POINTS = 150  # largest number of points of a moving average
DECADE = 10.0  # a larger ratio of values gets a logarithmic scale, if the panel allows it


@dataclass(frozen=True)
class Panel:
    """
    A picture of the report.

    Attributes:
        title (`str`): The title.
        note (`str`): Advice on what to look for.
        unit (`str`): The unit of the values.
        lines (`dict[str, str]`): Label -> metric. That of an evaluation has a line for each dataset.
        log (`bool`): Whether a logarithmic scale makes sense. Values are then drawn without their signs.
        smooth (`bool`): Whether lines are moving averages.
        kind (`str`): `"steps"`, `"position"` (by position in the completion), or `"bars"` (means over the run).
        prefix (`str`): Prefix of the metrics to draw, in place of `lines`.
        scale (`float`): Factor from logged values to `unit`, for bars.
    """

    title: str
    note: str
    unit: str
    lines: dict[str, str]
    log: bool = False
    smooth: bool = True
    kind: str = "steps"
    prefix: str = ""
    scale: float = 1.0

    def metrics(self, runs: Sequence[Run]) -> dict[str, str]:
        """Returns label -> metric, for the metrics that were logged."""
        lines = {}
        if self.prefix:
            names = list(dict.fromkeys(name for run in runs for name in run.names(self.prefix)))
            if self.kind == "position":
                names = buckets(names)
            lines = {name.removeprefix(self.prefix): name for name in names}
            lines = {label: lines[label] for label in sorted(lines, key=_number)}
        datasets = dict.fromkeys(dataset for run in runs for dataset in run.datasets)
        for label, metric in self.lines.items():
            for dataset in datasets:
                name = of_dataset(metric, dataset)
                lines[label if name == metric else f"{label}, {dataset}"] = name
        return {label: metric for label, metric in lines.items() if any(run.values(metric) for run in runs)}


def _number(label: str) -> int:
    """Returns the number with which the name of a bucket begins; 0 if it begins with none."""
    return int(re.match("[0-9]{0,9}", label)[0] or 0)


TOPICS = {
    "Learning": (
        Panel("Reward", "Training reward.", "reward", {"reward": REWARD}),
        Panel(
            "Held-out reward",
            "Each evaluation.",
            "reward",
            {"reward": "eval_reward", "accuracy": "eval_accuracy"},
            smooth=False,
        ),
        Panel(
            "Entropy",
            "Of the trainer's and of the sampler's distribution. At 0 nothing is explored.",
            "nats",
            {"trainer": "entropy", "sampler": "mismatch/entropy"},
        ),
        Panel(
            "Groups and lengths that teach nothing",
            "Groups in which all rewards are the same; completions cut off at the longest length.",
            "share",
            {"same rewards": "frac_reward_zero_std", "cut off": "completions/clipped_ratio"},
        ),
        Panel(
            "Completion length",
            "Mean of those that a step trains on; with partial rollouts also of those that started together.",
            "tokens",
            {"length": "completions/mean_length", "of a start": "rollouts/started_length"},
        ),
        Panel("Gradient norm", "Before clipping.", "norm", {"norm": "grad_norm"}, log=True),
    ),
    "Mismatch": (
        Panel(
            "Mismatch KL",
            "KL(sampler to policy). k1, by its size, is noisier; far from k3, the sampler leaves tokens out.",
            "nats per token",
            {"k3": KL, "k1": "mismatch/kl_k1"},
            log=True,
        ),
        Panel(
            "Mismatch by position",
            "KL (k3) of early and late tokens of a completion, at the end of the run and (dashed) at its start.",
            "nats per token",
            {},
            log=True,
            kind="position",
            prefix=POSITION,
        ),
        Panel(
            "Mismatch by age",
            "KL (k3) of tokens that were sampled so many generations ago. Age 0 is the precision's part.",
            "nats per token",
            {},
            log=True,
            prefix="mismatch/by_age/",
        ),
        Panel(
            "Rerouted tokens",
            "In a mixture: share that the trainer's router would send to other experts than the sampler did.",
            "share",
            {"all layers": "routing/differs"},
        ),
        Panel("Age", "Of the returned tokens.", "generations", {"mean": "rollouts/age", "oldest": "rollouts/age_max"}),
        Panel("Largest weight", "Before the cap.", "weight", {"max w": "mismatch/max_weight"}, log=True),
        Panel("Effective sample size", "What weighting leaves of the samples.", "share", {"ESS": "mismatch/ess_ratio"}),
    ),
    "Correction": (
        Panel(
            "Weight of a token",
            "What multiplies its loss, after caps and interpolation.",
            "weight",
            {
                "mean": "sampling/importance_sampling_ratio/mean",
                "smallest": "sampling/importance_sampling_ratio/min",
                "largest": "sampling/importance_sampling_ratio/max",
            },
            log=True,
        ),
        Panel(
            "AIS's alpha and its parts",
            "How much of the correction is applied: reliable weights (ESS), size of the mismatch, penalty on variance.",
            "0 to 1",
            {"alpha": "ais/alpha", "ESS": "ais/alpha_ess", "mismatch": "ais/alpha_mis", "variance": "ais/alpha_var"},
        ),
        Panel(
            "Capped and dropped tokens",
            "At the cap, dropped by the correction, or without a log-probability.",
            "share of tokens",
            {
                "capped": "mismatch/cap_fraction",
                "dropped": "mismatch/dropped_fraction",
                "unscored": "mismatch/unscored_fraction",
            },
        ),
        Panel(
            "Clipping",
            "Tokens that the loss clips below and above; those that only a wider bound keeps.",
            "share of tokens",
            {"low": "clip_ratio/low_mean", "high": "clip_ratio/high_mean", "rescued": "mismatch/rescued_fraction"},
        ),
    ),
    "Noise and weights": (
        Panel(
            "Noise on the norms",
            "What was asked for and what arrived.",
            "sigma",
            {"arrived": "noise/effective_sigma", "asked for": "noise/sigma"},
            log=True,
            smooth=False,
        ),
        Panel(
            "Update against quantization error",
            "Change of the weights over one sync and since the run's first one, and the format's rounding.",
            "relative to the weights",
            {
                "update": "weights/normalized_update",
                "since the start": "weights/normalized_total_update",
                "quantization": "weights/normalized_quantization_error",
            },
            log=True,
        ),
        Panel(
            "What of an update arrives",
            "Codes that it changes; cosine of the copy's change and the policy's.",
            "0 to 1",
            {"codes changed": "weights/codes_changed", "cosine": "weights/update_cosine"},
        ),
        Panel(
            "Self-check",
            "Engine against policy, and the bound at which a run stops.",
            "nats",
            {"difference": "sync_check/logp_difference", "bound": "sync_check/bound"},
            log=True,
        ),
    ),
    "Time and memory": (
        Panel("Time of a step", "Sampling included.", "seconds", {"step": STEP_TIME}),
        Panel(
            "Time per phase",
            "Of a step, on average. Preparing the inputs holds sync, sampling and scoring; no phase the backward pass.",
            "seconds",
            {},
            kind="bars",
            prefix="profiling/",
        ),
        Panel("Tokens per second", "Prompts and completions.", "tokens/s", {"tokens": TOKENS_PER_SECOND}),
        Panel(
            "Memory",
            "What training added (`skip_memory_metrics=False`): kept to its end, and the peak above that.",
            "GiB",
            {
                "GPU": "train_mem_gpu_alloc_delta",
                "GPU peak": "train_mem_gpu_peaked_delta",
                "CPU": "train_mem_cpu_alloc_delta",
                "CPU peak": "train_mem_cpu_peaked_delta",
            },
            kind="bars",
            scale=2.0**-30,
        ),
    ),
}


def logged(groups: Sequence[Group]) -> dict[str, list[Panel]]:
    """Returns topic -> the panels with something to show. Topics without such a panel are left out."""
    runs = [run for group in groups for run in group.runs]
    found = {topic: [panel for panel in panels if panel.metrics(runs)] for topic, panels in TOPICS.items()}
    return {topic: panels for topic, panels in found.items() if panels}


# Drawing


def draw(axis: Axes, panel: Panel, groups: Sequence[Group]) -> None:
    """Draws a panel, with a legend above it if it has several lines."""
    labels = {"steps": _draw_steps, "position": _draw_position, "bars": _draw_bars}[panel.kind](axis, panel, groups)
    if panel.kind != "bars":
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        _scale(axis, panel.log)
    axis.grid(color=GRID, linewidth=0.6)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color(MUTED)
    axis.tick_params(colors=INK, labelsize=9)
    for label in (axis.xaxis.label, axis.yaxis.label):
        label.set(color=INK, size=9)
    if len(labels) > 1:
        handles = [Line2D([], [], color=INK, linestyle=style) for style in labels.values()]
        place = {"loc": "lower left", "bbox_to_anchor": (0, 1), "ncols": LEGEND_COLUMNS, "borderpad": 0}
        look = {"labelcolor": INK, "fontsize": 9, "handlelength": 2, "columnspacing": 1, "frameon": False}
        _name(axis.legend(handles, [f"line {i}" for i in range(len(labels))], **place, **look), labels)


def _name(legend: Legend, names: Iterable[str]) -> None:
    """Sets the names in a legend, which matplotlib would hide if they began with "_", and read as formulas with "$"."""
    for text, name in zip(legend.get_texts(), names, strict=True):
        text.set(text=printable(name), parse_math=False)


def _draw_steps(axis: Axes, panel: Panel, groups: Sequence[Group]) -> dict[str, str | tuple]:
    metrics = panel.metrics([run for group in groups for run in group.runs])
    labels = dict(zip(metrics, cycle(STYLES), strict=False))
    for i, group in enumerate(groups):
        color = color_of(i)
        for label, metric in metrics.items():
            steps, mean, low, high = group.band(metric, panel.smooth, size=panel.log)
            if not steps:
                continue
            if panel.smooth:  # neighbouring moving averages hardly differ; the last value is kept
                every = -(-len(steps) // POINTS)
                steps, mean, low, high = (
                    values[(len(values) - 1) % every :: every] for values in (steps, mean, low, high)
                )
            if len(group.runs) > 1:
                axis.fill_between(steps, low, high, color=color, alpha=0.16, linewidth=0)
            elif len(metrics) == 1 and panel.smooth:
                all_steps, raw = group.runs[0].series(metric)
                axis.plot(
                    all_steps, [abs(x) for x in raw] if panel.log else raw, color=color, alpha=0.25, linewidth=0.7
                )
            every = max(1, len(steps) // 6)
            marked = {"marker": marker_of(i), "markersize": 4, "markevery": (i * every // max(len(groups), 1), every)}
            axis.plot(steps, mean, color=color, linestyle=labels[label], linewidth=1.5, label=group.name, **marked)
    axis.set(xlabel="step", ylabel=panel.unit)
    axis.xaxis.get_major_locator().set_params(integer=True)
    return labels


def _draw_position(axis: Axes, panel: Panel, groups: Sequence[Group]) -> dict[str, str]:
    metrics = panel.metrics([run for group in groups for run in group.runs])
    for i, group in enumerate(groups):
        for early, style in ((True, "--"), (False, "-")):
            at, means = [], []
            for x, metric in enumerate(metrics.values()):
                ends = [run.first(metric) if early else run.last(metric) for run in group.runs]
                ends = [end for end in ends if end is not None]
                if ends:
                    at.append(x)
                    means.append(fmean(ends))
            look = {"color": color_of(i), "marker": marker_of(i), "markersize": 4, "linewidth": 1.5}
            if at:
                axis.plot(at, means, linestyle=style, label=group.name, **look)
    axis.set_xticks(range(len(metrics)), [f"{bucket}…" if bucket.endswith("-") else bucket for bucket in metrics])
    axis.set(xlabel="token of the completion", ylabel=panel.unit)
    return {"last steps": "-", "first steps": "--"}


def _draw_bars(axis: Axes, panel: Panel, groups: Sequence[Group]) -> dict[str, str]:
    metrics = panel.metrics([run for group in groups for run in group.runs])
    height = 0.8 / len(groups)
    for i, group in enumerate(groups):
        for y, metric in enumerate(metrics.values()):
            series = [run.values(metric) for run in group.runs]
            means = [panel.scale * fmean(values) for values in series if values]
            if means:
                mean = fmean(means)
                spread = [[mean - min(means)], [max(means) - mean]] if len(means) > 1 else None
                at = y + (i - (len(groups) - 1) / 2) * height
                axis.barh(at, mean, height * 0.9, xerr=spread, color=color_of(i), ecolor=INK, label=group.name)
    labels = [printable(label.rpartition(".")[2].strip("_").replace("_", " ")) for label in metrics]
    axis.set_yticks(range(len(metrics)), labels, parse_math=False)
    axis.invert_yaxis()
    axis.set(xlabel=panel.unit)
    return {}


def _scale(axis: Axes, log: bool) -> None:
    """Sets a logarithmic scale if the panel allows it and the lines span more than a decade."""
    values = [y for line in axis.lines for y in line.get_ydata()]
    values += [y for band in axis.collections for path in band.get_paths() for y in path.vertices[:, 1]]
    positive = [y for y in values if y > 0]
    if not any(values):
        axis.set_ylim(0, 1)
    if not log or not positive or max(positive) <= DECADE * min(positive):
        return
    axis.set_yscale("log")
    axis.set_ylim(min(positive) / 1.5, max(positive) * 1.5)  # which cannot show zeros
    axis.yaxis.set_major_locator(LogLocator(subs=(1.0,) if max(positive) > 1000 * min(positive) else (1.0, 2.0, 5.0)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.yaxis.set_minor_locator(NullLocator())


def color_of(i: int) -> str:
    return SERIES[i % len(SERIES)]


def marker_of(i: int) -> str:
    return MARKERS[i % len(MARKERS)]


def chart(runs: Sequence[Run], titles: Collection[str] = ()) -> Figure:
    """Draws all panels, or those with one of `titles`, in one picture with one legend."""
    groups = grouped(runs)
    panels = [panel for found in logged(groups).values() for panel in found if not titles or panel.title in titles]
    columns = min(4, max(1, len(panels)))
    rows = max(1, -(-len(panels) // columns))
    figure = Figure(figsize=(4.6 * columns, 3.2 * rows + 0.5), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for axis, panel in zip(axes, panels, strict=False):
        draw(axis, panel, groups)
        legend = axis.get_legend()
        above = 6 + 14 * -(-len(legend.get_texts()) // LEGEND_COLUMNS) if legend else None
        axis.set_title(panel.title, loc="left", fontsize="medium", pad=above)
    for axis in axes[len(panels) :]:
        axis.remove()
    handles = [Line2D([], [], color=color_of(i), marker=marker_of(i)) for i in range(len(groups))]
    labels = [f"setting {i}" for i in range(len(groups))]
    legend = figure.legend(handles, labels, loc="outside upper left", ncols=LEGEND_COLUMNS, frameon=False)
    _name(legend, [group.name for group in groups])
    return figure
