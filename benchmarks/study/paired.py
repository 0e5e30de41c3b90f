r"""Differences between two cells, seed by seed, with what can be said of them.

Both runs of a pair have the same seed and, with stored models, the same start. Pairs of one start are not independent:
their mean counts as one pair. With d_1 ... d_n the differences in accuracy:

    mean(d) ± t_{n-1} sd(d) / sqrt(n)                                                        Student's interval, 95%
    d_i = (a_i + b_i) - (c_i + e_i)                                                                of sums of cells
    p_(i)' = max_{j <= i} min(1, (m - j + 1) p_(j))                   Holm's, of m values in order, the smallest first
    exp(mean(d))  with  d_i = ln(x_i / y_i)                                   a ratio of two means over a run, x and y

| symbol | here | meaning |
|---|---|---|
| n | `pairs` | starts of the seeds that both cells have finished; without stored models, those seeds |
| m | | comparisons of a family: Holm's values hold for all of them together, the intervals each for itself |
| a, b, c, e | `"a + b"` | cells with both of two effects, neither, and one each: d is 0 where the effects add up |
"""

from collections.abc import Callable, Sequence
from math import atan, cos, exp, log, pi, sin, sqrt
from statistics import fmean, stdev

from cell import Question

from trl_quant.report.runs import Group, Run


OUTCOME = "final_accuracy"
LEVEL = 0.95


def within(t: float, df: int) -> float:
    """Returns the chance that Student's t of `df` degrees of freedom lies between -t and t.

    The series of Abramowitz and Stegun, 26.7.3 and 26.7.4.
    """
    angle = atan(t / sqrt(df))
    term = total = cos(angle) if df % 2 else 1.0
    for k in range(3 if df % 2 else 2, df - 1, 2):
        term *= (k - 1) / k * cos(angle) ** 2
        total += term
    if df % 2:
        return 2 / pi * (angle + (sin(angle) * total if df > 1 else 0.0))
    return sin(angle) * total


def critical(df: int, level: float = LEVEL) -> float:
    """Returns the t that a share of `level` lies within, by bisection."""
    low, high = 0.0, 1e6
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if within(middle, df) < level else (low, middle)
    return high


def holm(values: Sequence[float], m: int) -> list[float]:
    """Returns p values that hold for all of `m` comparisons together, in the order given; some may not be there yet."""
    found, largest = [0.0] * len(values), 0.0
    for rank, i in enumerate(sorted(range(len(values)), key=values.__getitem__)):
        largest = max(largest, min(1.0, (m - rank) * values[i]))
        found[i] = largest
    return found


def summed(values: dict[str, dict[int, float]], cells: str) -> dict[int, float]:
    """Returns the values of a cell by seed, or the sums of several whose names are joined by `" + "`."""
    found = [values.get(name, {}) for name in cells.split(" + ")]
    return {seed: sum(cell[seed] for cell in found) for seed in set.intersection(*map(set, found))}


def difference(cell: dict[int, float], other: dict[int, float], starts: int = 0) -> dict | None:
    """
    Of a cell from another one, given the values of each by seed; `None` with fewer than two pairs. Seeds begin with
    `starts` stored models in turn; 0 has none.
    """
    of_start: dict[int, list[float]] = {}
    for seed in sorted(cell.keys() & other.keys()):
        of_start.setdefault(seed % starts if starts else seed, []).append(cell[seed] - other[seed])
    found = [fmean(values) for values in of_start.values()]
    if len(found) < 2:
        return None
    mean, error, df = fmean(found), stdev(found) / sqrt(len(found)), len(found) - 1
    half = critical(df) * error
    p = 1 - within(abs(mean) / error, df) if error else float(mean == 0)
    return {"pairs": len(found), "mean": mean, "low": mean - half, "high": mean + half, "sd": stdev(found), "p": p}


def ended(run: Run) -> float | None:
    """Returns the accuracy at the run's end; `None` where it was not judged by several draws."""
    values = run.values(OUTCOME)
    return values[-1] if values else None


def log_of(metric: str) -> Callable[[Run], float | None]:
    """Returns what takes the logarithm of a metric's mean over a run; `None` where it was not logged."""
    return lambda run: log(fmean(run.values(metric))) if run.values(metric) else None


def differences(
    question: Question, groups: Sequence[Group], outcome: Callable[[Run], float | None] = ended
) -> list[dict]:
    """Returns the question's comparisons as far as they have two pairs, by default of the accuracy at the end."""
    values = {
        group.name: {run.settings["seed"]: value for run in group.runs if (value := outcome(run)) is not None}
        for group in groups
    }
    rows, starts = [], max((cell.starts for cell in question.cells), default=0)
    for family, pairs in question.compared.items():
        found = [
            {"family": family, "cell": cell, "against": other, **apart}
            for cell, other in pairs
            if (apart := difference(summed(values, cell), summed(values, other), starts))
        ]
        for row, p in zip(found, holm([row["p"] for row in found], len(pairs)), strict=True):
            row["holm"] = p
        rows += found
    return rows


def ratios(question: Question, groups: Sequence[Group], metric: str) -> list[dict]:
    """Returns the same comparisons of a metric's mean over a run, as ratios."""
    rows = differences(question, groups, log_of(metric))
    return [row | {name: exp(row[name]) for name in ("mean", "low", "high")} for row in rows]


def compared(question: Question, groups: Sequence[Group], brief: bool = False) -> str:
    """
    The tables of those; nothing where the question compares nothing. Brief ones have the first family alone, whose name
    they say once, and of the p values only Holm's.
    """
    text = _table("comparisons", "difference", "{:+.3f}", differences(question, groups), brief)
    for label, metric in question.ratios.items():
        text += _table(f"{label}, over the run", "ratio", "{:.2f}", ratios(question, groups, metric), brief)
    return text


def _table(title: str, kind: str, number: str, rows: Sequence[dict], brief: bool) -> str:
    if not rows:
        return ""
    if brief:
        rows = [row for row in rows if row["family"] == rows[0]["family"]]
    header = [title, "cell", "against", "pairs", kind, "95%", *([] if brief else ["p"]), "p (Holm)"]
    lines, said = ["", f"| {' | '.join(header)} |", "|" + "---|" * len(header)], None
    for row in rows:
        mean, low, high = (number.format(row[name]) for name in ("mean", "low", "high"))
        numbers = [str(row["pairs"]), mean, f"{low} to {high}", f"{row['p']:.2g}", f"{row['holm']:.2g}"]
        if brief:
            del numbers[-2]
        family, said = "" if brief and row["family"] == said else row["family"], row["family"]
        lines.append(f"| {' | '.join([family, row['cell'], row['against'], *numbers])} |")
    return "\n".join(lines) + "\n"
