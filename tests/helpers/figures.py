"""The raw results of `benchmarks/results`, and the tables of the pages that tell them."""

import re
import sys
from statistics import median

from pages import ROOT, TEXTS


sys.path.append(str(ROOT / "benchmarks"))
from raw_results import read_results


RESULTS = ROOT / "benchmarks" / "results"
BENCHMARKS = TEXTS["benchmarks/README.md"]
MEASURED, CHOICE, ADVICE, MEMORY, TRAINING, PPO = (
    TEXTS[f"docs/{name}.md"] for name in ("results", "precisions", "corrections", "memory", "training", "ppo")
)
H200, H100 = "NVIDIA-H200", "NVIDIA-H100"


def read(name: str) -> dict:
    return read_results(RESULTS / f"{name}.json.xz")


def cells_of(text: str, start: str, after: str = "") -> list[str]:
    """The cells of the one row that starts so; with `after`, of what stands between that and an empty line."""
    if after:
        assert text.count(after) == 1, after
        text = text.partition(after)[2].partition("\n\n")[0]
    (row,) = re.findall(rf"^\| {re.escape(start)}.*\|$", text, re.MULTILINE)
    return [cell.strip() for cell in row.strip("|").split("|")]


def times(ratios) -> list[str]:
    return [f"{ratio:.2f}x" for ratio in ratios]


def gib(size: float) -> str:
    return f"{size / 2**30:.1f}"


def middle(run: dict, phase: str) -> float:
    return median(step[phase] for step in run["steps"])
