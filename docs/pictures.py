"""Draws the pictures of README from the raw results.

python docs/pictures.py
"""

import sys
from pathlib import Path
from statistics import fmean, median

from matplotlib.figure import Figure


ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
sys.path.append(str(ROOT / "benchmarks"))

from palette import save_picture  # noqa: E402
from raw_results import read_results  # noqa: E402


INK, GRID = "#1b1f24", "#d5dae0"

# The seconds of a step

TRAINERS = {  # in `step-7b-all` -> as the picture calls it
    "trl": "TRL, BF16",
    "trl-control": "TRL without its scoring pass",
    "bf16": "trl_quant, BF16",
    "fp8/fp8": "trl_quant, FP8",
}
PHASES = {"sampling": "#4124df", "scoring": "#8c89a8", "update": "#e06314", "sync and the rest": "#1b1f24"}


def seconds_by_phase() -> dict[str, dict[str, float]]:
    """Trainer -> phase -> seconds: medians over the steps of 64 completions of up to 4096 tokens."""
    found = {}
    for run in read_results(RESULTS / "step-7b-all-NVIDIA-H200.json.xz")["runs"]:
        if run["trainer"] in TRAINERS:
            steps = run["results"]["64x4096 lognormal"]["steps"]
            steps = [step | {"sync and the rest": step["sync"] + step["rest"]} for step in steps]
            found[run["trainer"]] = {name: median(step[name] for step in steps) for name in ("step", *PHASES)}
    return {name: found[name] for name in TRAINERS}


def draw_seconds(found: dict[str, dict[str, float]]) -> Figure:
    figure = Figure(figsize=(9, 2.9), layout="constrained")
    axis = figure.subplots()
    for i, (trainer, seconds) in enumerate(found.items()):
        left = 0.0
        for phase, color in PHASES.items():
            axis.barh(i, seconds[phase], left=left, color=color, height=0.62, label="" if i else phase)
            if seconds[phase] > 4:
                middle = left + seconds[phase] / 2
                axis.text(middle, i, f"{seconds[phase]:.1f}", color="white", ha="center", va="center")
            left += seconds[phase]
        gain = "" if trainer == "trl" else f"  ({found['trl']['step'] / seconds['step']:.2f}x)"
        axis.text(left + 0.8, i, f"{seconds['step']:.1f} s{gain}", color=INK, va="center", weight="bold")
    axis.set_yticks(range(len(found)), [TRAINERS[name] for name in found], fontsize=11)
    axis.set(xlim=(0, 95), xlabel="seconds of a step")
    axis.invert_yaxis()
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(axis="y", length=0)
    axis.legend(loc="lower center", bbox_to_anchor=(0.4, 1), ncols=len(PHASES), frameon=False)
    return figure


# What is learned

CELLS = {  # of the study's corrections -> as the picture calls it, colour, marker
    "full precision": ("sampled in full precision", "#4124df", "o"),
    "int4 tis": ("sampled in INT4, default correction", "#1e8f5d", "s"),
    "int4 coupled": ("sampled in INT4, without a proximal policy (coupled)", "#e06314", "^"),
}


def accuracies() -> dict[str, dict[int, list[float]]]:
    """Cell -> step -> accuracy on held-out problems, of each seed."""
    rows = {row["name"]: row["runs"] for row in read_results(RESULTS / "study/corrections.json.xz")["cells"]}
    return {
        name: {
            int(step): [run["log"]["eval_accuracy"][step] for run in rows[name]]
            for step in rows[name][0]["log"]["eval_accuracy"]
        }
        for name in CELLS
    }


def draw_learning(found: dict[str, dict[int, list[float]]]) -> Figure:
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axis = figure.subplots()
    for name, by_step in found.items():
        label, color, marker = CELLS[name]
        steps, seeds = list(by_step), list(by_step.values())
        axis.fill_between(steps, [*map(min, seeds)], [*map(max, seeds)], color=color, alpha=0.16, linewidth=0)
        axis.plot(steps, [*map(fmean, seeds)], color=color, marker=marker, label=label)
    axis.set(xlabel="step", ylabel="accuracy on new problems", ylim=(0, 0.75))
    axis.grid(color=GRID, linewidth=0.6)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, loc="lower left")
    return figure


PICTURES = {
    "seconds": lambda: draw_seconds(seconds_by_phase()),
    "learning": lambda: draw_learning(accuracies()),
}


if __name__ == "__main__":
    for name, draw in PICTURES.items():
        save_picture(draw(), ROOT / f"docs/{name}.png")
