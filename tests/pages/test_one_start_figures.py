"""What the pages tell of questions whose seeds share one start: each interval, and what is not told apart."""

import re
import sys
from functools import cache
from itertools import product
from statistics import fmean

import pytest
from figures import BENCHMARKS, RESULTS, read
from pages import TEXTS
from places import ROOT


sys.path.append(str(ROOT / "benchmarks" / "study"))

from cells import QUESTIONS
from paired import difference, differences, holm
from table import stored


FULL, JUDGED = "full precision", "eval_accuracy"
FOUR_BITS = ("nvfp4", "mxfp4", "int4")
PAGES = {name: " ".join(TEXTS[f"docs/{name}.md"].split()) for name in ("ppo", "diffusion", "training", "results")}
OUTLIERS = [(f"int8 {name}, outliers", "int8 none, outliers") for name in ("tis", "ais")]
# question -> pairs of cells whose intervals have 0 in them, and those whose have not
NEAR = {
    "corrections": [
        *((f"int4 {name}", FULL) for name in ("none", "acr", "tis")),
        *((f"{name} tis", f"{name} none") for name in ("int8", "fp8")),
    ],
    "cost": [(f"bf16 {name}", "bf16 none") for name in ("tis", "dppo")],
    "reuse": [("mxfp4 none", FULL), ("mxfp4 none", "mxfp4 tis"), ("mxfp4 acr", "mxfp4 tis")],
    "ppo": [
        ("mxfp4 none", FULL),
        *(("mxfp4 " + a, "mxfp4 " + b) for a, b in (("none", "tis"), ("none", "acr"), ("tis", "acr"))),
    ],
    "words": [("fp8 none", FULL), ("int8 none", FULL), *((f"mxfp4 {name}", "mxfp4 none") for name in ("tis", "acr"))],
    "uaq": [
        *((f"{name} s=1.5", f"{name} s=1") for name in map(" ".join, product(("int8", "fp8"), ("adamw", "sgd")))),
        *((f"int8 {name} s=1.5", f"int8 {name} faster") for name in ("adamw", "sgd")),
    ],
    "noise": [(f"nvfp4 {name} exponential", f"nvfp4 {name} silent") for name in ("none", "acr", "coupled")],
    "unified": [(f"{name} unified", f"{name} tis") for name in ("int8", "fp8", "fp8_block")],
    "diffusion": OUTLIERS,
    "adapter": [("mxfp4 merged tis", FULL), *((f"{name} beside none", FULL) for name in ("nvfp4", "mxfp4"))],
    "rollouts": [("fp8_block none", "fp8_block unified")],
    "scale": [(f"nvfp4 coupled {size}", f"{FULL} {size}") for size in ("512x6", "1024x8")],
    "countdown": [("nvfp4 coupled", FULL), ("fp8 none", FULL)],
    "length": [(f"mxfp4 none {digits} digits", f"{FULL} {digits} digits") for digits in (3, 6, 12)],
    "outliers": [("int8 none", "int8 tis"), ("int8 tis, sequences", "int8 tis")],
    "endurance": [("int8 none", "int8 tis"), *((f"int8 {name}", FULL) for name in ("tis, sequences", "ais", "tis"))],
}
APART = {
    "corrections": [("int4 dppo", FULL)],
    "reuse": [("mxfp4 tis", FULL)],
    "words": [("mxfp4 ais", "mxfp4 none"), *((name, FULL) for name in ("nvfp4 none", "mxfp4 none", "mxfp4 coupled"))],
    "noise": [("nvfp4 none cosine", "nvfp4 none silent")],
    "diffusion": [("mxfp4 none", FULL)],
    "adapter": [("mxfp4 merged none", "mxfp4 merged tis")],
    "scale": [("nvfp4 coupled 128x2", f"{FULL} 128x2")],
    "outliers": [("int8 coupled", "int8 tis"), *((f"int8 {name}", FULL) for name in ("tis", "tis, sequences"))],
}


def section(question: str) -> str:
    """The question's paragraphs of the benchmarks' page."""
    (text,) = re.findall(rf"^\*\*{question}\*\* .*?(?=^\*\*\w|^## )", BENCHMARKS, re.DOTALL | re.MULTILINE)
    return " ".join(text.split())


@cache
def runs(question: str) -> dict[str, list[dict]]:
    return {row["name"]: row["runs"] for row in read(f"study/{question}")["cells"]}


def ends(question: str, name: str, metric: str = JUDGED, last: int = 1) -> dict[int, float]:
    """A cell's accuracies by seed: the last evaluation, or the mean of the `last` ones."""
    return {run["seed"]: fmean(list(run["log"][metric].values())[-last:]) for run in runs(question)[name]}


def apart(question: str, cell: str, against: str, *metrics: str, last: int = 1) -> dict:
    """Their difference by the metrics of both, or by the evaluations."""
    one, other = metrics or (JUDGED, JUDGED)
    return difference(ends(question, cell, one, last), ends(question, against, other, last))


def written(found: dict, level: str = "") -> str:
    return f"{found['mean']:+.3f} ({level}{found['low']:+.3f} to {found['high']:+.3f}"


@pytest.mark.parametrize("question", NEAR)
def test_intervals(question):
    text = section(question)
    for pairs, has_zero in ((NEAR[question], True), (APART.get(question, ()), False)):
        for cell, against in pairs:
            found = apart(question, cell, against)
            assert found["pairs"] == 3 and written(found) in text, (cell, against, written(found))
            assert (found["low"] <= 0 <= found["high"]) == has_zero, (cell, against)


def widest(question: str, pairs) -> dict:
    return max((apart(question, *pair) for pair in pairs), key=lambda found: found["high"] - found["low"])


def strictest(question: str, pairs) -> float:
    """Holm's smallest p value, of the one pair whose interval leaves out 0."""
    found = [apart(question, *pair) for pair in pairs]
    assert len([row for row in found if not row["low"] <= 0 <= row["high"]]) == 1
    return min(holm([row["p"] for row in found], len(found)))


def test_what_is_said_of_all():
    silent = [
        (f"nvfp4 {name} {schedule}", f"nvfp4 {name} silent")
        for name, schedule in product(("none", "coupled", "acr"), ("exponential", "linear", "cosine", "logarithmic"))
    ]
    assert f"Holm's p {strictest('noise', silent):.2f})" in section("noise")
    copies = ("fp8", "int8", "int4", "mxfp4")
    text = section("diffusion")
    against = [(f"{copy} {name}", FULL) for copy, name in product(copies, ("none", "tis", "ais"))]
    assert f"Holm's p {strictest('diffusion', against):.2f})" in text
    steps = [[(f"{copy} {a}", f"{copy} {b}") for copy in copies] for a, b in (("tis", "none"), ("ais", "tis"))]
    first, second = ([apart("diffusion", *pair)["mean"] for pair in pairs] for pairs in steps)
    told = "`tis` is {:+.3f} to {:+.3f} from `none`, `ais` {:+.3f} to {:+.3f} from `tis`"
    assert told.format(min(first), max(first), min(second), max(second)) in text
    found = widest("diffusion", steps[0] + steps[1])
    assert found == apart("diffusion", "fp8 tis", "fp8 none") and f"`none`, {written(found)})" in text
    assert widest("adapter", [(name, FULL) for name in runs("adapter") if name != FULL]) == apart(
        "adapter", "mxfp4 merged tis", FULL
    )
    below = [name for name in runs("corrections") if apart("corrections", name, FULL)["high"] < 0]
    assert [name for name in below if "coupled" not in name] == ["int4 dppo"]


def test_qat():
    text = section("qat")
    rounding = {name: apart("qat", FULL, FULL, f"served/{name}", JUDGED) for name in FOUR_BITS}
    trained = {name: apart("qat", f"{name} all weights", FULL, *[f"served/{name}"] * 2) for name in FOUR_BITS}
    wide = {max(found, key=lambda name: found[name]["high"] - found[name]["low"]) for found in (rounding, trained)}
    assert wide == {"int4", "nvfp4"} and written(rounding["int4"]) in text and written(trained["nvfp4"]) in text
    assert written(trained["nvfp4"], "95%: ") in PAGES["training"]
    adapter = f"{FULL}, adapter"
    frozen = [apart("qat", f"{name} frozen base", adapter, f"served/{name}", JUDGED) for name in FOUR_BITS[:2]]
    assert all(written(found) in text for found in frozen)
    assert all(row["low"] < 0 < row["high"] for row in (*rounding.values(), *trained.values(), *frozen))
    for name in FOUR_BITS:
        cell, against = (f"{each}, 12 digits" for each in (f"{name} all weights", FULL))
        found = apart("qat", cell, against, *[f"served/{name}"] * 2)
        assert written(found) in text and written(found) in PAGES["training"]
        assert (found["low"] > 0) == (name != "nvfp4")
    (run,) = (run for run in read("study-searched-on-seed-100")["runs"] if run["name"] == "full precision 12")
    costs = [list(run["eval_accuracy"].values())[-1] - served for served in run["served"].values()]
    assert f"where rounding cost {min(costs):.2f} to {max(costs):.2f}" in text


def test_the_docs():
    for against in ("tis", "acr"):
        found = apart("ppo", "mxfp4 none", f"mxfp4 {against}")
        assert written(found, "95%: " if against == "tis" else "") in PAGES["ppo"]
    tis, ais = (apart("diffusion", *pair) for pair in OUTLIERS)
    assert f"{written(ais, '95%: ')}) and {written(tis)})" in PAGES["diffusion"]
    pairs = [
        (f"{trainer} {precision}", f"{trainer} {FULL}")
        for trainer, precision in product(("grpo", "ppo", "rloo", "distillation"), ("int8", "int4"))
    ]
    found = sorted((apart("trainers", *pair, last=2) for pair in pairs), key=lambda row: row["low"] - row["high"])
    assert all(row["low"] < 0 < row["high"] for row in found)
    told = f"PPO in INT4, {written(found[0])}), and of GRPO in INT8, {written(found[1])})"
    assert told in PAGES["results"] and found[0] == apart("trainers", *pairs[3], last=2)
    _, groups = stored(RESULTS / "study" / "stage_1.json.xz")
    found = differences(QUESTIONS["stage_1"], groups)
    coupled = [row["holm"] for row in found if row["cell"].startswith("int4 coupled")]
    assert len(coupled) == 2 and f"in INT4 (Holm's p {min(coupled):.2f})" in PAGES["results"]
