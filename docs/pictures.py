"""Draws the pictures of README, CONTRIBUTING and the docs: those of figures from the raw results.

python docs/pictures.py
"""

import sys
from itertools import accumulate
from pathlib import Path
from statistics import fmean, median

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch


ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
sys.path.append(str(ROOT / "benchmarks"))

from palette import save_picture  # noqa: E402
from raw_results import read_results  # noqa: E402


INK, MUTED, GRID = "#1b1f24", "#59636e", "#d5dae0"

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


# How busy a card is that samples and trains

WATCHED = RESULTS / "async-7b-one-card-watched-NVIDIA-H200.json.xz"


def card_and_updates() -> tuple[list[list[float]], list[float]]:
    """(second, card, percentage of the time in which it computed, MiB) since the first update, and updates' ends."""
    found = read_results(WATCHED)["runs"][0]["found"]
    return found["cards"], [*accumulate(found["seconds"])]


def draw_card(cards: list[list[float]], ends: list[float]) -> Figure:
    figure = Figure(figsize=(9, 2.3), layout="constrained")
    axis = figure.subplots()
    seconds, _, busy, _ = zip(*cards)
    axis.fill_between(seconds, busy, step="pre", color=PHASES["sampling"], alpha=0.25, linewidth=0)
    axis.step(seconds, busy, where="pre", color=PHASES["sampling"], linewidth=1)
    for end in ends:
        axis.axvline(end, color=PHASES["update"], linestyle="--", label="" if end != ends[0] else "an update has ended")
    axis.set(xlim=(0, ends[-1] + 0.3), ylim=(0, 104), xlabel="seconds", ylabel="card busy, %")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(loc="lower right", bbox_to_anchor=(1, 1), frameon=False)
    return figure


# One step, as the data sees it

STAGES = {  # (column, row) -> title, what happens, what goes on to the next stage
    (0, 1): ("1 Sync", "the policy's weights,\nquantized, into the engine", "weights in the\nsampler's format"),
    (1, 1): ("2 Noise", "AQN on the engine's norms,\nif it is on", "the same,\nnoisy norms"),
    (2, 1): ("3 Sample", "the engine completes\nthe prompts", "token ids,\nrollout_logps"),
    (3, 1): ("4 Reward", "rewards of the completions,\nrelative to their group", "advantages,\nmask"),
    (3, 0): ("5 Score", "the policy, only where\nthe correction needs it", "old_logps"),
    (2, 0): ("6 Correct", "sampler against policy:\nwhat a token counts", "weights or\nclip bounds"),
    (1, 0): ("7 Loss", "TRL's own, on rows\nwithout padding", "loss"),
    (0, 0): ("8 Update", "backward pass\nand optimizer", "(name, tensor)"),
}
ENGINE = "#d9d2f9"  # the stages of the engine that samples; the others are the trainer's
TRAINER = "#cfe9da"


def box(axis: Axes, x: float, y: float, width: float, height: float, color: str) -> None:
    style = "round,pad=0,rounding_size=0.07"
    patch = FancyBboxPatch((x, y), width, height, boxstyle=style, facecolor=color, edgecolor=MUTED, linewidth=0.8)
    axis.add_patch(patch)


def blank(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    axis = figure.subplots()
    axis.set(xlim=(0, width), ylim=(height, 0), xticks=[], yticks=[])
    axis.set_axis_off()
    return figure, axis


def draw_step() -> Figure:
    """The stages of a step go around: the engine's below, the trainer's above."""
    wide, high, column, row = 2.0, 0.95, 3.05, 1.75
    figure, axis = blank(3 * column + wide + 0.1, row + high + 0.55)
    places = [*STAGES]
    for i, (place, (title, text, passed)) in enumerate(STAGES.items()):
        x, y = place[0] * column + 0.05, place[1] * row + 0.05
        engine = place[1] == 1 and place[0] < 3
        box(axis, x, y, wide, high, ENGINE if engine else TRAINER)
        axis.text(x + wide / 2, y + 0.24, title, ha="center", va="center", weight="bold", color=INK, fontsize=10)
        axis.text(x + wide / 2, y + 0.62, text, ha="center", va="center", color=INK, fontsize=8, linespacing=1.25)
        to = places[(i + 1) % len(places)]
        ends = (to[0] - place[0], to[1] - place[1])
        start = (x + wide / 2 + ends[0] * wide / 2, y + high / 2 + ends[1] * high / 2)
        end = (start[0] + ends[0] * (column - wide), start[1] + ends[1] * (row - high))
        axis.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": INK, "linewidth": 1})
        across = ends[0] != 0
        at = ((start[0] + end[0]) / 2, start[1] - 0.08) if across else (start[0] + 0.1, (start[1] + end[1]) / 2)
        aligned = {"ha": "center", "va": "bottom"} if across else {"ha": "left", "va": "center"}
        axis.text(*at, passed, color=MUTED, fontsize=8, linespacing=1.2, **aligned)
    for x, color, label in ((0.05, ENGINE, "the engine that samples"), (2.4, TRAINER, "the trainer")):
        box(axis, x, row + high + 0.28, 0.2, 0.14, color)
        axis.text(x + 0.3, row + high + 0.35, label, va="center", fontsize=8, color=INK)
    return figure


# The house: a room imports only rooms below it

HOUSE = (
    {"cli": "the commands"},
    {"report": "plans, runs, findings, evaluations"},
    {"trainers": "TRL's trainers with quantized rollouts"},
    {"runs": "what keeps a run safe: checkpoints, limits"},
    {"config": "fields, and what may not go together"},
    {"rollout": "engines that sample: embedded, vllm; verify"},
    {"policy": "how the trained model computes"},
    {"layers": "linear layers, norms", "storage": "checkpoints on disk"},
    {"kernels": "Triton", "noise": "AQN", "scaling": "UAQ", "tasks": "rewards, data"},
    {"formats": "number formats", "models": "families, names", "corrections": "what a token counts"},
)
FLOORS = ("#ffffff", "#d9d2f9")


def draw_house() -> Figure:
    width, high = 9.0, 0.5
    figure, axis = blank(width, len(HOUSE) * (high + 0.1))
    for floor, rooms in enumerate(HOUSE):
        each = width / len(rooms)
        for i, (name, text) in enumerate(rooms.items()):
            x, y = i * each + 0.04, floor * (high + 0.1) + 0.05
            box(axis, x, y, each - 0.08, high, FLOORS[floor % 2])
            label = f"$\\bf{{{name}}}$   {text}"
            axis.text(x + each / 2 - 0.04, y + high / 2, label, ha="center", va="center", fontsize=9.5, color=INK)
    return figure


PICTURES = {
    "seconds": lambda: draw_seconds(seconds_by_phase()),
    "learning": lambda: draw_learning(accuracies()),
    "card": lambda: draw_card(*card_and_updates()),
    "one_step": draw_step,
    "house": draw_house,
}


if __name__ == "__main__":
    for name, draw in PICTURES.items():
        save_picture(draw(), ROOT / f"docs/{name}.png")
