"""The tables of docs/evidence.md: what the stored runs say of each piece of advice, and of each claim of the papers."""

import sys
from dataclasses import dataclass

import numpy as np
import pytest
from pages import TEXTS
from places import ROOT


sys.path.append(str(ROOT / "benchmarks" / "study"))

import evidence
import paired


PAGE = TEXTS["docs/evidence.md"]


def test_the_page_has_what_the_stored_runs_say():
    assert evidence.rewritten(PAGE) == PAGE
    other = PAGE.replace("-0.524 (-0.549 to -0.499)", "-0.524 (-0.549 to -0.500)")
    assert other != PAGE == evidence.rewritten(other)


@pytest.mark.parametrize("pairs", [3, 5, 6])
def test_a_difference_of_that_size_is_found_in_four_of_five_studies(pairs):
    """Simulated: pairs of that spread around that difference, each study with its own interval."""
    drawn = np.random.default_rng(0).normal(size=(4000, pairs))
    size = evidence.seen_from({"pairs": pairs, "sd": 1.0})
    found = [abs(row.mean() + size) > paired.critical(pairs - 1) * row.std(ddof=1) / pairs**0.5 for row in drawn]
    assert 0.77 < np.mean(found) < 0.86


@dataclass(frozen=True)
class Found:
    """A comparison, as `paired.differences` tells it."""

    mean: float
    holm: float | None = None

    def told(self) -> dict:
        return {"mean": self.mean} | ({} if self.holm is None else {"holm": self.holm})


@pytest.mark.parametrize(
    ("found", "says"),
    [
        ([Found(-0.1, 0.01), Found(-0.1, 0.2), Found(0.3)], "**Holds in 1 of 3 settings.**"),
        ([Found(0.1, 0.01), Found(-0.1, 0.2)], "**Is contradicted in 1 of 2 settings.**"),
        ([Found(-0.1, 0.01), Found(0.1, 0.01)], "**Holds in 1 and is contradicted in 1 of 2 settings.**"),
        ([Found(-0.1, 0.2), Found(-0.9)], "**Cannot be told.**"),
    ],
)
def test_a_claim_holds_only_where_a_designed_comparison_tells_it_apart(found, says, monkeypatch):
    monkeypatch.setattr(evidence, "compared", lambda row: found[row].told())
    assert evidence.outcome(-1, dict(enumerate(range(len(found))))) == says


def test_a_row_without_a_design_has_the_last_accuracies_of_its_seeds():
    """By hand, of `words`."""
    row = ("words", "fp8 none", "full precision")
    ends = {
        group.name: {run.settings["seed"]: run.values("eval_accuracy")[-1] for run in group.runs}
        for group in evidence.groups_of("words")
    }
    apart = [ends["fp8 none"][seed] - ends["full precision"][seed] for seed in (0, 1, 2)]
    found = evidence.compared(row)
    assert found["mean"] == pytest.approx(np.mean(apart)) and "holm" not in found and found["pairs"] == 3
    assert evidence.judged(found) == "one model"
    assert found["high"] - found["mean"] == pytest.approx(4.303 * np.std(apart, ddof=1) / 3**0.5, rel=1e-3)
