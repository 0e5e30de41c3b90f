"""The pages tell of routing replay what the study's raw file has."""

import sys
from statistics import fmean

from figures import BENCHMARKS, RESULTS, cells_of
from pages import TEXTS
from places import ROOT

from trl_quant.report.runs import KL, REWARD, Group


sys.path.append(str(ROOT / "benchmarks" / "study"))

from cells import QUESTIONS
from paired import differences, ratios
from table import stored


QUESTION = QUESTIONS["routing"]
STORED = RESULTS / "study" / "routing.json.xz"
MIXTURES = TEXTS["docs/mixtures.md"]
REROUTED, FINAL = "routing/differs", "final_accuracy"
PRECISIONS = ("bf16", "int8", "fp8", "int4")


def over(group: Group, metric: str) -> float:
    """The mean over the seeds of the mean over a run."""
    return fmean(fmean(run.values(metric)) for run in group.runs)


def primary(rows: list[dict]) -> dict[str, dict]:
    """By precision, of the comparisons of replay with no replay."""
    (family, *_) = QUESTION.compared
    return {row["cell"].split()[0]: row for row in rows if row["family"] == family}


def test_replay_as_it_is_told_is_as_it_was_measured():
    """Three seeds of each cell, from three start models, at one commit; or nothing yet, and the pages say so."""
    told = " ".join(BENCHMARKS.partition("**routing** asks")[2].partition("**diffusion** trains")[0].split())
    waits = "It was not run yet."
    assert (waits in told) == (waits in " ".join(MIXTURES.split())) == (not STORED.exists())
    if not STORED.exists():
        return
    rows, found = stored(STORED)
    groups = {group.name: group for group in found}
    assert groups.keys() == {cell.name for cell in QUESTION.cells}
    for row in rows:
        assert {run["seed"] for run in row["runs"]} == {0, 1, 2} and row["settings"]["max_steps"] == 100
    runs = [run for row in rows for run in row["runs"]]
    (commit,) = {run["commit"] for run in runs}
    starts = {(run["seed"], run["model_sha256"]) for run in runs}
    assert len(starts) == 3 == len({model for _, model in starts})
    assert f"at commit {commit[:7]}" in told
    accuracy = primary(differences(QUESTION, found))
    kl, rerouted = (primary(ratios(QUESTION, found, metric)) for metric in (KL, REROUTED))
    near = "{mean:.2f} ({low:.2f} to {high:.2f})".format
    apart = "{mean:+.3f} ({low:+.3f} to {high:+.3f})".format
    for precision in PRECISIONS:
        without, replay = (groups[f"{precision} {name}"] for name in ("no replay", "replay"))
        for metric, ratio, title in ((KL, kl, "KL"), (REROUTED, rerouted, "rerouted")):
            written = cells_of(MIXTURES, f"{precision.upper()} |", f"| samples | {title} | with replay | ratio |")[1:]
            number = "{:.1e}" if metric == KL else "{:.2%}"
            shown = [number.format(over(group, metric)) for group in (without, replay)]
            assert written == [*shown, near(**ratio[precision]), "yes" if ratio[precision]["holm"] < 0.05 else "no"]
        written = cells_of(MIXTURES, f"{precision.upper()} |", "| samples | accuracy | with replay | difference |")[1:]
        shown = [f"{over(group, FINAL):.3f}" for group in (without, replay)]
        answer = "yes" if accuracy[precision]["holm"] < 0.05 else "no"
        rewards = [f"{over(group, REWARD):.3f}" for group in (without, replay)]
        assert written == [*shown, apart(**accuracy[precision]), answer, *rewards]
