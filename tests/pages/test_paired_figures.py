"""The figures of the study's paired comparisons on the pages equal those of its raw files."""

import re
import sys
from math import sqrt
from statistics import fmean, variance

import pytest
from figures import ADVICE, BENCHMARKS, RESULTS, read
from pages import README, TEXTS
from places import ROOT

from trl_quant.report.runs import KL


sys.path.append(str(ROOT / "benchmarks" / "study"))

from cells import QUESTIONS
from paired import critical, difference, differences, ratios
from table import stored


PAGE = " ".join(BENCHMARKS.split())
FLIGHT = " ".join(TEXTS["docs/partial_rollouts.md"].split())


# Completions in flight


def mean_of(name: str, metric: str) -> float:
    """Over all generations of a cell's runs."""
    (runs,) = (row["runs"] for row in read("study/in_flight")["cells"] if row["name"] == name)
    return fmean(value for run in runs for value in run["log"][metric].values())


def test_what_is_told_of_the_factor_is_what_was_measured():
    """The page has each comparison that has two pairs, with its interval, and says which are told apart."""
    question = QUESTIONS["in_flight"]
    rows, groups = stored(RESULTS / "study" / "in_flight.json.xz")
    runs, planned = sum(len(row["runs"]) for row in rows), 6 * len(question.cells)
    for text in (PAGE, FLIGHT):
        assert re.findall(r"(\d+) of its (\d+) runs", text) == [(str(runs), str(planned))]
    found = {(row["cell"], row["against"]): row for row in differences(question, groups)}
    told = re.findall(r"\| `([^`]*)` \| `([^`]*)` \| (\d+) \| (\S+) \((\S+) to (\S+)\) \| (yes|no) \|", FLIGHT)
    primary = next(iter(question.compared.values()))
    assert [pair[:2] for pair in told] == [pair for pair in primary if pair in found]
    for cell, against, pairs, *interval, apart in told:
        row = found[cell, against]
        assert int(pairs) == row["pairs"] and (apart == "yes") is (row["holm"] < 0.05)
        assert interval == [f"{row[name]:+.3f}" for name in ("mean", "low", "high")]
    final = {row["name"]: row["metrics"]["final accuracy"]["mean"] for row in rows}
    with_tis = [value for name, value in final.items() if "tis" in name]
    ended = f"{min(with_tis):.3f} to {max(with_tis):.3f} of held-out problems"
    assert f"runs with `tis` ended at {ended}, full precision at {final['full precision']:.3f}" in FLIGHT
    ages = {row["name"]: row["metrics"]["age"]["mean"] for row in rows if row["metrics"]["age"]}
    old = [sorted({f"{age:.1f}" for name, age in ages.items() if name.endswith(f"x{factor}")}) for factor in (2, 3)]
    second, third = map(" to ".join, old)
    assert f"were {second} generations old on average with factor 2, and {third} with factor 3" in FLIGHT
    apart = [row for row in found.values() if row["holm"] < 0.05]
    assert f"Of the {len(found)} comparisons" in FLIGHT and "two are told apart" in FLIGHT and len(apart) == 2
    for row in apart:
        mean, *ends = (f"{row[name]:.3f}" for name in ("mean", "low", "high"))
        assert f"`{row['cell']}` lies {mean[1:]} below `{row['against']}` ({' to '.join(ends)}" in FLIGHT
    coupled = [f"{final[f'int4 coupled x{factor}']:.3f}" for factor in (1, 2, 3)]
    assert "`coupled` ended at {}, {} and {} with factors 1, 2".format(*coupled) in FLIGHT
    apart = [f"{mean_of('bf16 tis x3', f'mismatch/by_age/{age}'):.1e}" for age in (0, 1, 2)]
    assert "was {} at age 0, {} at age 1 and {} at age 2".format(*apart) in FLIGHT
    assert f"INT4 alone, at factor 1, had {mean_of('int4 tis x1', KL):.1e}" in FLIGHT
    starts = {(run["seed"], run["model_sha256"]) for row in rows for run in row["runs"]}
    assert len(starts) == len({seed for seed, _ in starts}) == len({model for _, model in starts})


# Stages


def test_what_stage_1_tells_apart():
    question = QUESTIONS["stage_1"]
    rows, groups = stored(RESULTS / "study" / "stage_1.json.xz")
    found = {(row["cell"], row["against"]): row for row in differences(question, groups)}
    assert sum(len(row["runs"]) for row in rows) == 140 and {row["pairs"] for row in found.values()} == {5}
    least = min(row["holm"] for row in found.values())
    assert least > 0.05 and f"the smallest p of all {len(found)} comparisons is {least:.2f}" in PAGE
    apart = max((row for row in found.values() if "coupled" not in row["cell"]), key=lambda row: abs(row["mean"]))
    assert abs(apart["mean"]) < 0.03 and "within 0.03 of `tis`" in PAGE
    widest = max((row for row in found.values() if "coupled" not in row["cell"]), key=lambda r: r["high"] - r["low"])
    assert (widest["cell"], widest["against"]) == ("int4 ais u4", "int4 tis u4")
    advice = " ".join(ADVICE.split())
    for cell, row in found.items():
        signed = "{mean:+.3f} ({low:+.3f} to {high:+.3f})".format(**row)
        below = "{:.3f} below `tis` ({:+.3f} to {:+.3f})".format(-row["mean"], row["low"], row["high"])
        if "none" in cell[0] or "full precision" in cell[1] or cell[0] == "int4 ais u4":
            assert signed in PAGE
        if "none" in cell[0]:
            assert signed in advice
        if cell[0] == "int4 coupled u4":
            assert below in PAGE and below.replace(" below `tis`", "") in advice
    acr = found["int4 acr u4", "int4 tis u4"]
    assert "INT4: {mean:+.3f}, {low:+.3f} to {high:+.3f}".format(**acr) in advice
    lowest = min(run["log"]["final_accuracy"]["200"] for row in rows for run in row["runs"])
    assert f"One run fell to {lowest:.3f} there" in PAGE


def test_a_cell_with_another_instruction_set():
    """Of the difference of two means of five runs each, and of their pairs."""
    cells = [
        {run["seed"]: run for row in read(file)["cells"] if row["name"] == "int4 tis u4" for run in row["runs"]}
        for file in ("study-stage_1-with-avx512", "study/stage_1")
    ]
    there, stored_there = ({seed: run["log"]["final_accuracy"]["200"] for seed, run in runs.items()} for runs in cells)
    assert all(cells[0][seed]["log"] != cells[1][seed]["log"] for seed in range(5)) and len(there) == 5
    spread = sqrt((variance(there.values()) + variance(stored_there.values())) / 5)
    means = fmean(there.values()), fmean(stored_there.values())
    half, apart = critical(8) * spread, means[0] - means[1]
    assert f"{means[0]:.3f} on average, the stored ones at {means[1]:.3f}. The difference, {apart:+.3f}, lies" in PAGE
    assert abs(apart) < half and f"difference of two such means, ±{half:.3f}" in PAGE
    assert "five pairs have {low:+.3f} to {high:+.3f}".format(**difference(there, stored_there)) in PAGE
    assert {run["commit"][:8] for run in cells[0].values()} == {"43aeec3c"}


def test_what_stage_2_tells_apart():
    rows, groups = stored(RESULTS / "study" / "stage_2.json.xz")
    found = differences(QUESTIONS["stage_2"], groups)
    assert [sorted(run["seed"] for run in row["runs"]) for row in rows] == [[*range(6, 24)]] * 8
    assert {row["pairs"] for row in found} == {6}
    tis, full = (
        {
            row["cell"].removeprefix("int4 ").removesuffix("u4").rstrip(" ,"): row
            for row in found
            if row["against"] == to
        }
        for to in ("int4 tis u4", "full precision u4")
    )
    assert {name for name in tis if tis[name]["holm"] < 0.05} == {"none"}
    assert {name for name in full if full[name]["holm"] < 0.05} == {"tis, sequences", "icepop"}
    advice = " ".join(ADVICE.split())
    for name, below, of in (("none", "`tis`", tis), ("tis, sequences", "it", tis), ("tis, sequences", "it", full)):
        row = of[name]
        told = "{:.3f} below {} ({low:+.3f} to {high:+.3f}; Holm's p {:.2g})".format(
            -row["mean"], below, row["holm"], **row
        )
        assert told in PAGE and f"{-row['mean']:.3f} below" in advice
        assert f"({-row['high']:.3f} to {-row['low']:.3f}" in advice
    for name, row in (("ess_step_scaling` has", tis["tis, scaled steps"]), ("`cis`", tis["cis"])):
        assert "{} {mean:+.3f} ({low:+.3f} to {high:+.3f})".format(name, **row) in PAGE
    others = [abs(row["mean"]) for name, row in tis.items() if name not in ("none", "tis, sequences")]
    assert len(others) == 4 and f"other four end within {max(others):.3f} of `tis`" in PAGE
    assert (
        "`tis` is not told apart from full precision, {mean:+.3f} ({low:+.3f} to {high:+.3f})".format(**full["tis"])
        in PAGE
    )
    assert "full precision ({mean:+.3f}, {low:+.3f} to {high:+.3f})".format(**full["tis"]) in advice
    icepop = "`icepop` is, {mean:+.3f} ({low:+.3f} to {high:+.3f}; Holm's p {holm:.2g})"
    assert icepop.format(**full["icepop"]) in PAGE
    ends = [run["log"]["final_accuracy"]["200"] for row in rows if "sequences" in row["name"] for run in row["runs"]]
    assert f"one of its runs fell to {min(ends):.3f}" in PAGE
    commits = {run["seed"]: run["commit"][:8] for row in rows for run in row["runs"]}
    assert f"seeds 6 to 11 at commit {commits[6]}, 12 to 23 at {commits[12]}" in PAGE and len({*commits.values()}) == 2


def test_what_stage_3_tells_of_outliers():
    rows, groups = stored(RESULTS / "study" / "stage_3_outliers.json.xz")
    assert [sorted(run["seed"] for run in row["runs"]) for row in rows] == [[*range(24, 30)]] * 8
    found = differences(QUESTIONS["stage_3_outliers"], groups)
    full, tis = ({r["cell"]: r for r in found if r["against"] == name} for name in ("full precision", "int8 tis"))
    assert all(row["holm"] < 0.05 and row["pairs"] == 6 for row in full.values()) and len(full) == 7
    advice = " ".join(ADVICE.split())
    for cell, row in full.items():
        numbers = f"{-row['mean']:.3f} ({row['low']:+.3f} to {row['high']:+.3f})"
        assert any(f"{named(cell)}{says} {numbers}" in PAGE.replace(" below it (", " (") for says in ("", " ends"))
        if cell in ("int8 tis, sequences", "int8 tis", "int8 none"):
            assert f"{named(cell)} by {-row['mean']:.3f} ({-row['high']:.3f} to {-row['low']:.3f})" in advice
    coupled, sequences = tis.pop("int8 coupled"), tis.pop("int8 tis, sequences")
    assert coupled["holm"] < 0.05
    below = "{:.3f} below it ({low:+.3f} to {high:+.3f})".format(-coupled["mean"], **coupled)
    above = "{mean:.3f} above it ({low:+.3f} to {high:+.3f}".format(**sequences)
    assert f"only `coupled` is told apart**, {below}" in PAGE
    assert f"`tis` on sequences ends {above}; Holm's p {sequences['holm']:.2f})" in PAGE and above in advice
    least, *_, most = sorted(-row["mean"] for row in tis.values())
    p = min(row["holm"] for row in tis.values())
    assert f"the others end {least:.3f} to {most:.3f} below (p {p:.2f} and more)" in PAGE and p > 0.05
    assert {run["commit"][:8] for row in rows for run in row["runs"]} == {"37db408f"} and "commit 37db408f" in PAGE


def test_what_stage_3_tells_of_experts():
    question = QUESTIONS["stage_3_experts"]
    rows, groups = stored(RESULTS / "study" / "stage_3_experts.json.xz")
    assert [sorted(run["seed"] for run in row["runs"]) for row in rows] == [[*range(24, 30)]] * 7
    found = differences(question, groups)
    by_family = {}
    for row in found:
        by_family.setdefault(row["family"], []).append(abs(row["mean"]))
    mean = [max(by_family[name]) for name in ("primary: cis and none, against tis", "replay", "full precision")]
    told = "within {:.3f} of `tis`, with replay and without"
    assert told.format(mean[0]) in PAGE and told.format(mean[0]) in " ".join(TEXTS["docs/mixtures.md"].split())
    assert "replay changes {:.3f} at most, and no cell ends more than {:.3f} from full".format(*mean[1:]) in PAGE
    assert len(found) == 13 and {row["pairs"] for row in found} == {3}
    widest = max(found, key=lambda row: row["high"] - row["low"])
    assert f"these intervals is {widest['low']:+.3f} to {widest['high']:+.3f}" in PAGE
    least = min(row["holm"] for row in found)
    assert f"Of all {len(found)}, Holm's smallest p is {least:.2f}" in PAGE and least > 0.05
    rerouted = [row["metrics"]["rerouted"]["mean"] for row in rows if row["metrics"]["rerouted"]]
    assert {f"{share:.0%}" for share in rerouted} == {"3%"} and "(3% of the tokens here)" in PAGE
    kl = [row for row in ratios(question, groups, KL) if row["family"] == "replay"]
    least, *_, most = sorted(row["mean"] for row in kl)
    p = min(row["holm"] for row in kl)
    assert (
        f"the mismatch KL is {least:.2f} to {most:.2f} of that without, which three pairs do not tell apart (p {p:.2f})"
        in PAGE
    )


def test_what_stage_3_tells_of_text():
    rows, groups = stored(RESULTS / "study" / "stage_3_text.json.xz")
    assert [sorted(run["seed"] for run in row["runs"]) for row in rows] == [[*range(24, 30)]] * 7
    found = differences(QUESTIONS["stage_3_text"], groups)
    full, tis = (
        {row["cell"].removeprefix("mxfp4 "): row for row in found if row["against"] == name}
        for name in ("full precision", "mxfp4 tis")
    )
    assert {row["pairs"] for row in found} == {6} and {name for name in full if full[name]["holm"] < 0.05} == {
        "coupled"
    }
    assert {name for name in tis if tis[name]["holm"] < 0.05} == {"coupled"}
    below = "{:.3f} below {} ({:+.3f} to {:+.3f}"
    told = {
        name: [below.format(-row["mean"], than, row["low"], row["high"]) for row, than in pairs]
        for name in ("coupled", "none")
        for pairs in [((tis[name], "`tis`"), (full[name], "full precision"))]
    }
    assert "it ends {}) and {})".format(*told["coupled"]) in PAGE
    p = tis["none"]["holm"], full["none"]["holm"]
    assert (
        "`none` ends {}; Holm's p {:.2f}) and {}; p {:.2f})".format(told["none"][0], p[0], told["none"][1], p[1])
        in PAGE
    )
    advice = " ".join(ADVICE.split())
    for name, than in (("coupled", "`tis`"), ("none", "it")):
        row = tis[name]
        assert f"`{name}` ends {-row['mean']:.3f} below {than} ({-row['high']:.3f} to {-row['low']:.3f})" in advice
    readme = " ".join(README.split())
    assert "full precision ({mean:+.3f} in accuracy, {low:+.3f} to {high:+.3f})".format(**full["tis"]) in readme
    lower = tis["coupled"]
    assert f"they end {-lower['mean']:.3f} lower ({-lower['high']:.3f} to {-lower['low']:.3f})" in readme
    others = [name for name in tis if name not in ("coupled", "none")]
    near = max(abs(tis[name]["mean"]) for name in others)
    assert len(others) == 3 and f"`acr`, `ais` and `cis` end within {near:.3f} of `tis`" in PAGE
    assert f"`acr`, `ais` and `cis` within {near:.3f}." in advice
    least, *_, most = sorted(-full[name]["mean"] for name in (*others, "tis"))
    p = min(full[name]["holm"] for name in (*others, "tis"))
    assert (
        f"ends {least:.3f} to {most:.3f} below full precision, of which none is told apart (p {p:.2f} and more)" in PAGE
    )
    ends = {row["name"]: [next(iter(run["log"]["final_accuracy"].values())) for run in row["runs"]] for row in rows}
    *rest, furthest = sorted(t - n for t, n in zip(ends["mxfp4 tis"], ends["mxfp4 none"], strict=True))
    assert f"six runs is {furthest:.3f} below that with `tis`, the others at most {max(rest):.3f}" in PAGE
    began = {run["log"]["eval_accuracy"]["0"] for row in rows for run in row["runs"]}
    assert f"at 0.02, where it began at {min(began):.2f} to {max(began):.2f}" in PAGE and len(began) == 6
    assert f"{sum(ends['mxfp4 coupled']) / 6:.2f}" == "0.02"
    assert {run["commit"][:8] for row in rows for run in row["runs"]} == {"bf9e8e8d"} and "commit bf9e8e8d" in PAGE


def named(cell: str) -> str:
    return {"tis, sequences": "`tis` on sequences"}.get(name := cell.removeprefix("int8 "), f"`{name}`")


@pytest.mark.parametrize("name", ["stage_3_outliers", "asynchronous"])
def test_pilots_that_fixed_a_learning_rate(name):
    rows, _ = stored(RESULTS / f"study-pilot-of-{name}.json.xz")
    (run,) = next(row["runs"] for row in rows if row["name"] == "full precision")
    began, (ended,) = run["log"]["eval_accuracy"]["0"], run["log"]["final_accuracy"].values()
    told = f"It went from {began:.3f} to {ended:.3f} ([raw](results/study-pilot-of-{name}.json.xz)"
    assert told in PAGE and ended - began > 0.08 and run["seed"] == 100


def test_the_pilot_of_stage_3_text():
    rows, _ = stored(RESULTS / "study-pilot-of-stage_3_text.json.xz")
    ended = {row["name"]: run["log"]["final_accuracy"]["100"] for row in rows for run in row["runs"]}
    began = {run["log"]["eval_accuracy"]["0"] for row in rows for run in row["runs"]}
    slow, medium, fast, mxfp4 = (
        ended[f"{name}, lr {rate}"]
        for name, rate in (
            *(("full precision", rate) for rate in ("0.0001", "0.0002", "0.0004")),
            ("mxfp4 none", "0.0001"),
        )
    )
    told = f"from {began.pop():.3f} to {slow:.3f} with lr 1e-4, to {medium:.3f} with 2e-4 and to {fast:.3f} with 4e-4"
    assert f"{told}, and MXFP4 with `none` to {mxfp4:.4f}" in PAGE and not began
    rows, _ = stored(RESULTS / "study-second-pilot-of-stage_3_text.json.xz")
    logs = {row["name"]: run["log"] for row in rows for run in row["runs"]}
    (more,), (longer,) = (
        logs[f"full precision, {name}"]["final_accuracy"].values() for name in ("128 completions", "200 steps")
    )
    began = {log["eval_accuracy"]["0"] for log in logs.values()}
    told = f"from {began.pop():.3f} to {more:.3f} with 128 completions, and to {longer:.3f} with 64 in 200 steps"
    assert told in PAGE and not began


def test_what_reuse_keeps_without_the_seed_that_chose_it():
    rows, groups = stored(RESULTS / "study" / "reuse.json.xz")
    ends = {
        row["name"]: {run["seed"]: read.values("eval_accuracy") for run, read in zip(row["runs"], group.runs)}
        for row, group in zip(rows, groups, strict=True)
    }
    start, end = (fmean(ends["full precision"][seed][place] for seed in (1, 2)) for place in (0, -1))
    kept = {
        name: (fmean(ends[f"mxfp4 {name}"][seed][-1] for seed in (1, 2)) - start) / (end - start)
        for name in ("tis", "none", "geometric")
    }
    told = "Without seed 0 `tis` keeps {tis:.0%}, `none` {none:.0%} and `geometric` {geometric:.0%}."
    assert told.format(**kept) in PAGE
    assert f"and here at {ends['mxfp4 none'][0][-1]:.3f} with 2.13" in PAGE


# Asynchronous training


def test_what_is_told_of_age_is_what_was_measured():
    question, (rows, groups) = QUESTIONS["asynchronous"], stored(RESULTS / "study" / "asynchronous.json.xz")
    runs = [run for row in rows for run in row["runs"]]
    assert len(runs) == 3 * len(question.cells) == 105 and "All 105 have ended" in PAGE
    assert f"{sum(run['seconds'] for run in runs) / 3600:.0f} core-hours" in PAGE
    compared = differences(question, groups)
    assert min(row["holm"] for row in compared) > 0.05 and {row["family"] for row in compared} == {*question.compared}
    found = {(row["cell"], row["against"]): row for row in compared}

    def told(cell: str, against: str, said: str = "") -> str:
        return "{mean:+.3f}{said} ({low:+.3f} to {high:+.3f})".format(**found[cell, against], said=said)

    assert f"`none` {told('int4 none a3', 'int4 tis a3', ' from `tis`')} and `coupled` " in PAGE
    assert f"and `coupled` {told('int4 coupled a3', 'int4 tis a3')}." in PAGE
    one = [told(f"{precision} tis a1", f"{precision} tis a0") for precision in ("bf16", "int8", "int4")]
    three = [told(f"{precision} tis a3", f"{precision} tis a0") for precision in ("bf16", "int8", "int4")]
    first, interval = one[0].split(" ", 1)
    assert f"samples of age 1 end {first} from those of age 0 in BF16 {interval}, " in PAGE
    in_words = [text.replace(" (", f" in {precision} (", 1) for text, precision in zip(one[1:], ("INT8", "INT4"))]
    assert f"{in_words[0]}, and {in_words[1]}; of age 3 {three[0]}, {three[1]} and {three[2]}." in PAGE
    lows = {p: min(found[f"{p} tis a{age}", f"{p} tis a0"]["low"] for age in (1, 3)) for p in ("bf16", "int8", "int4")}
    assert max(-lows["bf16"], -lows["int8"]) < 0.0455 < -lows["int4"]
    assert all("losses above 0.045" in text for text in (PAGE, " ".join(TEXTS["docs/async.md"].split())))
    values = {row["name"]: row["metrics"] for row in rows}
    kl = {name: f"{of['KL']['mean']:.1e}".replace("e-0", "e-") for name, of in values.items() if of["KL"]}
    apart = f"KL of a token is {kl['bf16 tis a3']} in BF16 at age 3, {kl['int4 tis a0']} in INT4 at age 0, and "
    assert f"{apart}{kl['int4 tis a3']} in INT4 at age 3." in PAGE
    assert f"at age 1 they are {kl['bf16 tis a1']} and {kl['int4 tis a1']}." in PAGE
    ends = {
        name: [values[f"int4 {name} a{age}"]["final accuracy"]["mean"] for age in (0, 1, 3)]
        for name in ("coupled", "tis")
    }
    shown = {name: "{:.3f}, {:.3f} and {:.3f}".format(*of) for name, of in ends.items()}
    assert f"ends at {shown['coupled']} at ages 0, 1 and 3, where `tis` ends at {shown['tis']}." in PAGE
    assert all(low < high for low, high in zip(ends["coupled"], ends["tis"]))


# The first tables of QeRL, and QuRL's fourth


def found_in(name: str, apart: int) -> dict[tuple[str, str], str]:
    """The comparisons of a question that ran as it was designed, `apart` of which are told apart: cells -> as told."""
    question, (rows, groups) = QUESTIONS[name], stored(RESULTS / "study" / f"{name}.json.xz")
    runs = [run for row in rows for run in row["runs"]]
    assert {row["name"]: sorted(run["seed"] for run in row["runs"]) for row in rows} == {
        cell.name: [*range(30, 36)] for cell in question.cells
    }
    assert {run["commit"][:8] for run in runs} == {"188f7aeb"} and len({run["machine"] for run in runs}) == 1
    assert f"{sum(run['seconds'] for run in runs) / 3600:.1f} core-hours): " in PAGE
    compared = differences(question, groups)
    assert sum(row["holm"] < 0.05 for row in compared) == apart
    return {(row["cell"], row["against"]): "{mean:+.3f} ({low:+.3f} to {high:+.3f})".format(**row) for row in compared}


def test_what_is_told_of_a_base_in_nvfp4_and_of_noise():
    found = found_in("noisy_base", apart=0)
    assert "0.7 core-hours): nothing is told apart" in PAGE
    base, small, large = (
        found[pair].split(" ", 1)
        for pair in (("nvfp4", "full precision"), *((f"nvfp4 noise {sigma}", "nvfp4") for sigma in (0.01, 0.05)))
    )
    told = f"The base is {base[0]} from full precision {base[1]}, noise from 0.01 {small[0]} from none {small[1]}, "
    assert f"{told}and from 0.05 {large[0]} {large[1]}." in PAGE


def test_what_is_told_of_scales_where_a_step_changes_few_codes():
    found = found_in("scales", apart=6)
    half, double, faster, full = (
        found[cell, of].split(" ", 1)
        for cell, of in (
            *((f"int8 {name}", "int8") for name in ("s=1.5", "s=2", "faster")),
            ("full precision faster", "full precision"),
        )
    )
    told = f"With s = 1.5 a run ends {half[0]} from none {half[1]}, with s = 2 {double[0]} {double[1]}, "
    told += f"and with 1.5 times the learning rate {faster[0]} {faster[1]}, which gives full precision "
    assert f"{told}{full[0]} {full[1]} too." in PAGE
    interval = half[1].replace("+", "")
    advice = (
        f"it gains {half[0][1:]} in accuracy with INT8 samples and a small learning rate {interval[:-1]}, six models)"
    )
    assert f"{advice}, and 1.5 times the learning rate gains {faster[0][1:]}." in " ".join(ADVICE.split())
    question, (_, groups) = QUESTIONS["scales"], stored(RESULTS / "study" / "scales.json.xz")
    same = {(row["cell"], row["against"]) for row in differences(question, groups) if row["holm"] > 0.05}
    assert same == {("int8 s=1.5", "int8 faster"), ("int8 s=2", "int8 faster"), ("int8", "full precision")}
    rows, _ = stored(RESULTS / "study" / "scales.json.xz")
    metrics = {row["name"]: row["metrics"] for row in rows}
    changed = [metrics[name]["codes changed"]["mean"] for name in ("int8", "int8 s=1.5", "int8 s=2")]
    assert "changes {:.2%} of the codes, with the scales {:.2%} and {:.2%}".format(*changed) in PAGE


def test_the_pilot_of_scales():
    rows, _ = stored(RESULTS / "study-pilot-of-scales.json.xz")
    logs = {row["name"]: run["log"] for row in rows for run in row["runs"]}
    slow, fast = (logs[f"full precision lr {rate}"] for rate in ("1e-05", "2e-05"))
    (ended,), (ended_fast,) = (log["final_accuracy"].values() for log in (slow, fast))
    began = slow["eval_accuracy"]["0"]
    assert f"from {began:.3f} to {ended:.3f} with 1e-5, and to {ended_fast:.3f} with 2e-5" in PAGE
    assert ended - began > 0.05 and fast["eval_accuracy"]["0"] == began
    (rate,) = {cell.learning_rate for cell in QUESTIONS["scales"].cells if not cell.name.endswith("faster")}
    assert rate == 1e-5
