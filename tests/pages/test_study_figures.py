"""What README, the docs and the benchmarks tell of the study is what its raw files in `benchmarks/results` have."""

import re
import sys
from statistics import fmean

from figures import ADVICE, BENCHMARKS, MEASURED, PPO, TRAINING, cells_of, read
from pages import TEXTS
from places import ROOT


sys.path.append(str(ROOT / "benchmarks" / "study"))


PAGE = " ".join(BENCHMARKS.split())
FLIGHT = " ".join(TEXTS["docs/partial_rollouts.md"].split())


# The study, as the docs' advice tells it


def study(question: str, *names: str, column: str = "gain") -> list[float]:
    """Of the cells whose names hold all of these words, in the order of the table."""
    rows = [row for row in read(f"study/{question}")["cells"] if all(name in row["name"] for name in names)]
    if column == "gain":
        return [row["gain"] for row in rows if row["gain"] is not None]
    found = [row["metrics"] for row in rows]
    return [m["KL"]["mean"] * m["length"]["mean"] if column == "nats" else m[column]["mean"] for m in found if m["KL"]]


def parted(question: str) -> set[str]:
    """The cells that differ from full precision by more than seeds do."""
    return {row["name"] for row in read(f"study/{question}")["cells"] if row["differs"]}


def percent(values: list[float]) -> str:
    return f"{min(values):.0%} to {max(values):.0%}" if len(values) > 1 else f"{values[0]:.0%}"


def advice(start: str) -> list[str]:
    return cells_of(ADVICE, start, "| sampler | nats | beyond the seeds' spread |")


def kept(start: str) -> str:
    """What a setting kept, of those without a difference beyond the seeds' spread."""
    return cells_of(ADVICE, start, "| setting | share of full precision's gain |")[1]


def test_advice_where_samples_are_near():
    _, _, why = advice("BF16, FP8, and INT8")
    near = study("cost") + study("corrections", "int8") + study("corrections", "fp8 ")
    uncorrected = study("cost", "none") + study("corrections", "int8 none") + study("corrections", "fp8 none")
    assert f"ten corrections kept {percent(near)}, and `none` {percent(uncorrected)}" in why
    assert not [
        name for q in ("cost", "corrections") for name in parted(q) if name.split()[0] in ("bf16", "int8", "fp8")
    ]


def test_advice_in_4_bits():
    _, _, why = advice("NVFP4, MXFP4, INT4")
    named = {"int4": ("dppo", "none", "acr"), "mxfp4": ("dppo", "trm")}
    coupled = [
        value for precision in ("nvfp4", "int4", "mxfp4") for value in study("corrections", f"{precision} coupled")
    ]
    assert f"`coupled` falls to {percent(coupled)}" in why
    for precision, corrections in named.items():
        part = why.partition(f"n {precision.upper()}, ")[2].partition(";")[0]
        for name in corrections:
            assert re.search(rf"`{name}` (kept )?{percent(study('corrections', f'{precision} {name}'))}", part)
    found = {f"{p} {name}" for p, names in named.items() for name in (*names, "coupled")} | {"nvfp4 coupled"}
    assert parted("corrections") == found


def test_advice_for_several_updates():
    _, _, why = advice("MXFP4, 99 tokens, four updates")
    for name in ("tis", "decoupled", "acr", "none", "geometric", "ais"):
        assert f"`{name}` {percent(study('reuse', f'mxfp4 {name}'))}" in why
    worst = sorted(v for name in ("coupled", "dppo", "trm") for v in study("reuse", f"mxfp4 {name}"))
    assert f"{worst[-1]:.0%} to {worst[0]:.0%}" in why
    assert f"`icepop` ({percent(study('reuse', 'mxfp4 icepop'))}) is not distinguishable from" in why
    rows = {row["name"] for row in read("study/reuse")["cells"]}
    assert rows - parted("reuse") == {"full precision", "mxfp4 icepop"}


def test_advice_with_outliers():
    _, nats, why = advice("INT8 where activations have outliers")
    found = [v for v in study("endurance", "int8", column="nats") if v > 0.01]  # not the unified policy's
    assert nats == f"{min(found):.1f} to {max(found):.1f}"
    assert f"`tis` on sequences {percent(study('endurance', 'tis, sequences'))}" in why
    for name in ("ais", "none"):
        assert f"`{name}` {percent(study('endurance', f'int8 {name}'))}" in why
    (tis,) = (row["gain"] for row in read("study/endurance")["cells"] if row["name"] == "int8 tis")
    assert f"`tis` {tis:.0%}" in why
    assert parted("endurance") == {"int8 none", "int8 unified"}
    early = {row["name"]: row["gain"] for row in read("study/outliers")["cells"] if row["gain"] is not None}
    assert parted("outliers") == early.keys() and max(early, key=early.get) == "int8 tis, sequences"
    assert f"`tis` on sequences the least ({early['int8 tis, sequences']:.0%})" in why
    _, _, why = advice("The same, and you serve the INT8 model")
    copies = [v for name in ("ais", "tis") for v in study("endurance", f"int8 {name}", column="reward")]
    assert f"{study('endurance', 'unified', column='reward')[0]:.2f} of its samples" in why
    assert f"{min(copies):.2f} to {max(copies):.2f}" in why
    assert f"It kept {percent(study('endurance', 'unified'))} of full precision's gain" in why


def test_advice_for_text():
    assert kept("INT8 / FP8 on text") == " / ".join(percent(study("words", f"{p} none")) for p in ("int8", "fp8"))
    _, _, why = advice("NVFP4 / MXFP4 on text")
    assert why.startswith(f"`none` {' / '.join(percent(study('words', f'{p} none')) for p in ('nvfp4', 'mxfp4'))}")
    for name in ("ais", "tis", "acr", "coupled"):
        assert f"`{name}` {percent(study('words', f'mxfp4 {name}'))}" in why
    assert parted("words") == {"nvfp4 none", *(f"mxfp4 {name}" for name in ("none", "coupled", "tis", "acr", "ais"))}


def test_where_nothing_parts():
    assert kept("MXFP4, completions of 99 tokens") == percent(study("length", "mxfp4 none 12"))
    larger = [percent(study("scale", "fp8 none", shape)) for shape in ("512x6", "1024x8")]
    assert kept("FP8, `none`, at 20M / 110M") == " / ".join(larger)
    wide = [
        v
        for name in ("none", "tis", "coupled")
        for n in ("512x6", "1024x8")
        for v in study("scale", f"nvfp4 {name} {n}")
    ]
    assert kept("NVFP4 at 20M and 110M") == percent(wide)
    searched = [
        v for name in ("none", "tis", "acr", "ais") for p in ("nvfp4", "mxfp4") for v in study("countdown", p, name)
    ]
    assert kept("Countdown at 20M parameters").startswith(percent(searched))
    assert kept("Countdown, FP8") == percent(study("countdown", "fp8 none"))
    for kind, row in (
        ("beside", "NVFP4 and MXFP4 under LoRA, the adapter"),
        ("merged", "NVFP4 and MXFP4 under LoRA, sampled"),
    ):
        assert kept(row) == percent(study("adapter", kind))
    marked = {question: parted(question) for question in ("length", "scale", "countdown", "adapter")}
    assert marked == {
        "length": set(),
        "scale": {"nvfp4 coupled 128x2"},  # the smallest model's, as in `corrections`
        "countdown": {"nvfp4 coupled"},
        "adapter": set(),
    }


def test_scaling():
    """In the study it raised every mean, and one of them beyond the seeds' spread."""
    accuracy = {row["name"]: row["metrics"]["accuracy"]["mean"] for row in read("study/uaq")["cells"]}
    for precision, optimizer in (("int8", "adamw"), ("int8", "sgd"), ("fp8", "adamw"), ("fp8", "sgd")):
        assert accuracy[f"{precision} {optimizer} s=1.5"] > accuracy[f"{precision} {optimizer} s=1"]
    assert parted("uaq") == {"int8 sgd s=1.5"}
    assert not parted("rollouts") and not parted("noise") - {row for row in parted("noise") if "coupled" in row}


def test_the_sweep():
    gains = [row["gain"] for row in read("study/regimes")["cells"] if row["gain"] is not None]
    assert len([value for value in gains if 0.4 < value < 0.55]) == 3
    assert "`none` at about half of the gain in three of them" in ADVICE.replace("\n  ", " ")


# Learning curves of the trainers


def test_learning_curves_of_the_trainers():
    """Three seeds of 200 steps each, at one commit; accuracy is recomputed from the runs' logs."""
    cells = {row["name"]: row for row in read("study/trainers")["cells"]}
    ends, starts = {}, {}
    for name, row in cells.items():
        logs = [run["log"]["eval_accuracy"] for run in row["runs"]]
        assert {run["seed"] for run in row["runs"]} == {0, 1, 2} and row["settings"]["max_steps"] == 200
        assert all([*log] == [str(step) for step in range(0, 201, 20)] for log in logs)
        ends[name], starts[name] = [fmean([log["180"], log["200"]]) for log in logs], {log["0"] for log in logs}
    assert len({run["commit"] for row in cells.values() for run in row["runs"]}) == 1
    precisions = ("full precision", "int8", "int4")
    for trainer, title in (("grpo", "GRPO"), ("ppo", "PPO"), ("rloo", "RLOO"), ("distillation", "distillation")):
        written = cells_of(MEASURED, f"{title} |", "| trainer | start | full precision |")[1:]
        (start,) = starts[f"{trainer} full precision"]
        found = [ends[f"{trainer} {precision}"] for precision in precisions]
        assert written == [f"{start:.3f}", *(f"{fmean(e):.3f}, {min(e):.3f} to {max(e):.3f}" for e in found)]
    assert not parted("trainers")
    assert f"samples kept {percent(study('trainers'))} of the gain" in MEASURED.replace("\n", " ")
    for trainer in ("grpo", "ppo", "rloo"):
        assert min(precisions, key=lambda precision: fmean(ends[f"{trainer} {precision}"])) == "int4"
    spread = max(max(found) - min(found) for name, found in ends.items() if "full precision" in name)
    assert f"seeds differ by up to {spread:.2f}, and" in MEASURED.replace("\n", " ")


# The study's own page


def ends(row: dict) -> str:
    accuracy = row["metrics"]["accuracy"]
    return f"{accuracy['smallest']:.3f} to {accuracy['largest']:.3f}"


def test_a_model_that_another_machine_taught_differs_by_more_than_seeds():
    (elsewhere,) = read("study-another-machine")["cells"]
    here = next(row for row in read("study/corrections")["cells"] if row["name"] == elsewhere["name"])
    changed = {name for name in here["settings"] if here["settings"][name] != elsewhere["settings"][name]}
    assert not changed - {"seed"}
    starts = [{f"{run['log']['eval_accuracy']['0']:.3f}" for run in row["runs"]} for row in (elsewhere, here)]
    (there,), (first,) = starts
    assert f"it started at {there} and ended at {ends(elsewhere)}" in PAGE
    assert f"In the table below it starts at {first} and ends at {ends(here)}" in PAGE
    assert elsewhere["metrics"]["accuracy"]["largest"] < here["metrics"]["accuracy"]["smallest"]


def test_machines_agree_from_one_model():
    cells = {"length": "full precision 3 digits", "uaq": "full precision adamw"}
    found = [
        row for question, name in cells.items() for row in read(f"study/{question}")["cells"] if row["name"] == name
    ]
    one, other = ([run["log"]["eval_accuracy"] for run in row["runs"]] for row in found)
    assert [log["0"] for log in one] == [log["0"] for log in other]
    assert {run["torch"] for run in found[0]["runs"]}.isdisjoint(run["torch"] for run in found[1]["runs"])
    told = ["{:.3f}, {:.3f} and {:.3f}".format(*(log["100"] for log in logs)) for logs in (one, other)]
    assert f"ended at {told[0]} in **length** and at {told[1]} in **uaq**" in PAGE


QAT = {  # label in the benchmarks' table -> cell, by the format that is served
    "in FP32, quantized": "full precision",
    "the same, sampled": "{} tis",
    "all weights": "{} all weights",
    "LoRA on a base": "{} frozen base",
}


def of_qat(digits: int) -> dict[str, dict]:
    """Three seeds of each cell, all at one commit."""
    rows = [row for row in read("study/qat")["cells"] if row["settings"]["digits"] == digits]
    assert len({run["commit"] for row in rows for run in row["runs"]}) == 1
    assert all({run["seed"] for run in row["runs"]} == {0, 1, 2} for row in rows)
    return {row["name"].partition(",")[0] if digits == 12 else row["name"]: row for row in rows}


def test_qat_of_long_sums():
    """Training for MXFP4 and INT4 pays where rounding to them costs: the two ranges do not overlap."""
    cells = of_qat(digits=12)
    text = BENCHMARKS.partition("With sums of 12 digits")[2].partition("**trainers**")[0].replace("\n", " ")
    assert f"at commit {cells['full precision']['runs'][0]['commit'][:7]}" in text
    found = {name: row["metrics"] for name, row in cells.items()}
    words = "{mean:.3f}, {smallest:.3f} to {largest:.3f}".format
    assert f"Before rounding, full precision ends at {words(**found['full precision']['accuracy'])}" in text
    header = "| trained, 12 digits | served in NVFP4 | in MXFP4 | in INT4 |"
    served = {name: f"served in {name}" for name in ("nvfp4", "mxfp4", "int4")}
    rounded = {name: found["full precision"][column] for name, column in served.items()}
    trained = {name: found[f"{name} all weights"][column] for name, column in served.items()}
    for label, row in (("in FP32, quantized", rounded), ("all weights in these", trained)):
        assert cells_of(BENCHMARKS, label, header)[1:] == [words(**row[name]) for name in served]
    apart = {name for name in served if rounded[name]["largest"] < trained[name]["smallest"]}
    assert apart == {"mxfp4", "int4"} and all(rounded[name]["mean"] < trained[name]["mean"] for name in served)
    told = TRAINING.replace("\n", " ")
    means = {name: (f"{trained[name]['mean']:.0%}", f"{rounded[name]['mean']:.0%}") for name in served}
    both = "{} of held-out problems in MXFP4 and {} in INT4, against {} and {} after rounding".format
    assert both(means["mxfp4"][0], means["int4"][0], means["mxfp4"][1], means["int4"][1]) in told
    assert "in NVFP4 on {} against {}".format(*means["nvfp4"]) in told


def test_qat_of_the_study():
    cells = of_qat(digits=3)
    header = "| trained | served in NVFP4 | in MXFP4 | in INT4 |"
    for label, name in QAT.items():
        for served, told in zip(("nvfp4", "mxfp4", "int4"), cells_of(BENCHMARKS, label, header)[1:], strict=True):
            row = cells.get(name.format(served))
            found = row and row["metrics"][f"served in {served}"]
            assert told == ("" if row is None else "{mean:.3f}, {smallest:.3f} to {largest:.3f}".format(**found))
    text = BENCHMARKS.partition("**qat**")[2].partition("**trainers**")[0].replace("\n", " ")
    for name, words in (("full precision", "the model ends at"), ("full precision, adapter", "it ends at")):
        assert f"{words} {cells[name]['metrics']['accuracy']['mean']:.3f}, {ends(cells[name])}" in text
    whole = cells["full precision"]["metrics"]
    costs = [whole["accuracy"]["mean"] - whole[f"served in {name}"]["mean"] for name in ("nvfp4", "mxfp4", "int4")]
    assert f"costs {min(costs):.3f} to {max(costs):.3f}" in text
    # "no higher": in each format the two ranges overlap
    for name in ("nvfp4", "mxfp4", "int4"):
        ours, rounded = (
            cells[cell]["metrics"][f"served in {name}"] for cell in (f"{name} all weights", "full precision")
        )
        assert ours["smallest"] < rounded["largest"] and rounded["smallest"] < ours["largest"]


def of_diffusion(outliers: bool) -> list[dict]:
    """Three seeds of each cell, all at one commit."""
    cells = [row for row in read("study/diffusion")["cells"] if ("outliers" in row["name"]) == outliers]
    assert len({run["commit"] for row in cells for run in row["runs"]}) == 1
    for row in cells:
        assert {run["seed"] for run in row["runs"]} == {0, 1, 2}
        assert row["settings"]["outliers"] == (256 if outliers else 1)
        assert row["settings"]["max_steps"] == (200 if outliers else 100)
    return cells


def first_and_last(row: dict) -> list[tuple[float, float]]:
    """The accuracies of each seed's run."""
    logs = [list(run["log"]["eval_accuracy"].values()) for run in row["runs"]]
    return [(log[0], log[-1]) for log in logs]


def test_which_runs_on_text_still_rise():
    rises: dict[str, float] = {}
    for cell in read("study/words")["cells"]:
        logs = [list(run["log"]["eval_accuracy"].values()) for run in cell["runs"]]
        rises[cell["name"]] = fmean(log[-1] - log[-2] for log in logs)
    rising = [
        rises.pop(name) for name in ("full precision", "fp8 none", *(f"mxfp4 {c}" for c in ("tis", "acr", "ais")))
    ]
    told = f"`ais` still rose by {min(rising):.3f} to {max(rising):.3f} on average. The others changed by "
    assert f"{told}{max(map(abs, rises.values())):.3f} at most." in PAGE


def test_diffusion_of_the_study():
    cells = of_diffusion(outliers=False)
    (start,) = {f"{first:.3f}" for row in cells for first, _ in first_and_last(row)}
    assert f"is right on {start} of new sums" in PAGE
    for row in cells:
        label = "full precision |" if row["gain"] is None else f"`{row['name']}` |"
        accuracy, gained = cells_of(BENCHMARKS, label, "| copy, correction | accuracy, range | gain |")[1:]
        assert accuracy == f"{row['metrics']['accuracy']['mean']:.3f}, {ends(row)}"
        assert gained == ("100%" if row["gain"] is None else f"{row['gain']:.0%}")
    metrics = [row["metrics"] for row in cells]
    nats = max(m["KL"]["mean"] * m["length"]["mean"] for m in metrics)
    assert not {row["name"] for row in cells} & parted("diffusion") and f"at most {nats:.2f} nats away" in PAGE


def test_diffusion_with_outliers():
    cells = {row["name"].removesuffix(", outliers"): row for row in of_diffusion(outliers=True)}
    docs = ROOT.joinpath("docs/diffusion.md").read_text().replace("\n", " ")
    header = "| copy, correction, with outliers | accuracy, range | nats of a completion |"
    for name, row in cells.items():
        label = {"full precision": name, "int8 unified": "trained and sampled"}.get(name, f"`{name}`")
        accuracy, nats = cells_of(BENCHMARKS, label, header)[1:]
        metrics = row["metrics"]
        assert accuracy == f"{metrics['accuracy']['mean']:.3f}, {ends(row)}"
        assert nats == (f"{metrics['KL']['mean'] * metrics['length']['mean']:.0f}" if label.startswith("`") else "")
    means = {name: f"{row['metrics']['accuracy']['mean']:.0%}" for name, row in cells.items()}
    assert f"Full precision ends at {means['full precision']} there" in docs
    for name in ("ais", "none", "tis", "coupled"):
        assert f"`{name}` at {means[f'int8 {name}']}" in docs
    ended = {name: [last for _, last in first_and_last(row)] for name, row in cells.items()}
    (start,) = {f"{first:.3f}" for name, row in cells.items() for first, _ in first_and_last(row) if "uni" not in name}
    assert f"still learns, from {start}" in PAGE and min(ended["full precision"]) > float(start)
    assert all(max(ended[f"int8 {name}"]) < float(start) for name in ("none", "tis", "ais", "coupled"))
    assert f"starts at {first_and_last(cells['int8 unified'])[0][0]:.3f}" in PAGE
    assert all(tis < none for tis, none in zip(ended["int8 tis"], ended["int8 none"], strict=True))
    assert min(ended["int8 ais"]) < min(ended["int8 none"]) and max(ended["int8 ais"]) > max(ended["int8 none"])


# Updates of a generation, learning rate, steps
SEARCHED = ((4, 5e-5, 100), (4, 1e-4, 100), (4, 2e-4, 100), (4, 4e-4, 100), (2, 1e-4, 200), (1, 2e-4, 200))


def searched(trainer: str, name: str, rate: float, updates: int) -> list[float]:
    """The accuracies of a run on seed 100, by which a regime was chosen."""
    (run,) = (
        run
        for run in read("study-searched-on-seed-100")["runs"]
        if (run["trainer"], run["name"], run["learning_rate"], run["num_iterations"]) == (trainer, name, rate, updates)
    )
    assert run["seed"] == 100
    return list(run["eval_accuracy"].values())


def test_regimes_that_were_searched():
    for updates, rate, steps in SEARCHED:
        runs = [searched("diffusion", name, rate, updates) for name in ("full precision", "mxfp4 none")]
        told = cells_of(BENCHMARKS, f"{updates}, {rate:g}, {steps} |", "| updates of a generation, lr, steps |")[1:]
        assert told == [f"{run[-1] - run[0]:.2f}" for run in runs]
    faster, slower = (searched("ppo", "full precision", rate, 4) for rate in (2e-4, 1e-4))
    text = PAGE.partition("**ppo**")[2]
    told = "had gained nothing after 50 steps with the rate of **reuse**"
    assert round(faster[3] - faster[0], 2) == 0 and told in text
    assert f"and {slower[-1] - slower[0]:.2f} after 100 steps with half of that rate" in text


def test_reuse_of_the_study():
    for row in read("study/reuse")["cells"]:
        label = row["name"].removeprefix("mxfp4 ")
        start = f"{label} |" if row["gain"] is None else f"`{label}` |"
        accuracy, gained, *_ = cells_of(BENCHMARKS, start, "| correction | accuracy, range | gain | over steps")[1:]
        assert accuracy == f"{row['metrics']['accuracy']['mean']:.3f}, {ends(row)}"
        assert gained == ("100%" if row["gain"] is None else f"{row['gain']:.0%}")


def test_ppo_of_the_study():
    """Two regimes, three seeds of each cell; where full precision gains nothing, no gain is told."""
    rows = {row["name"]: row for row in read("study/ppo")["cells"]}
    for name in ("full precision", "mxfp4 none", "mxfp4 tis", "mxfp4 acr"):
        start = f"`{name.removeprefix('mxfp4 ')}` |" if name.startswith("mxfp4") else f"{name} |"
        told = cells_of(BENCHMARKS, start, "| PPO, correction |")[1:]
        row, half = rows[name], rows[f"{name}, half the batch"]
        gain = "100%" if row["gain"] is None else f"{row['gain']:.0%}"
        accuracies = [f"{each['metrics']['accuracy']['mean']:.3f}, {ends(each)}" for each in (row, half)]
        assert [told[0], told[1], told[3]] == [accuracies[0], gain, accuracies[1]]
        for each, nats in ((row, told[2]), (half, told[4])):
            assert len(each["runs"]) == 3 and len({run["commit"] for run in each["runs"]}) == 1
            means = each["metrics"]
            assert nats == (f"{means['KL']['mean'] * means['length']['mean']:.1f}" if means["KL"] else "")
    (start,) = {run["log"]["eval_accuracy"]["0"] for row in rows.values() for run in row["runs"]}
    full, none, tis, acr = (
        rows[name]["metrics"]["accuracy"]["mean"] for name in ("full precision", "mxfp4 none", "mxfp4 tis", "mxfp4 acr")
    )
    page = PPO.replace("\n", " ")
    assert f"full precision rose from {start:.3f} to {full:.3f}. With `none` it fell to {none:.3f}" in page
    assert f"with `tis` and `acr` it rose to {tis:.3f} and {acr:.3f}" in page
    assert rows["mxfp4 none"]["metrics"]["accuracy"]["largest"] < start
    rescued = [run["log"]["mismatch/rescued_fraction"] for name in rows if "acr" in name for run in rows[name]["runs"]]
    most = max(max(values.values()) for values in rescued)
    assert 1e-4 < most <= 2e-4 and "at most 2 of 10000 tokens of a step" in PAGE
    assert f"they keep {rows['mxfp4 tis']['gain']:.0%} and {rows['mxfp4 acr']['gain']:.0%} of the gain" in PAGE
    told = f"accuracy at the end, from {start:.3f}; its gain; nats of a completion"
    assert told in PAGE.partition("**ppo**")[2].partition("**scale**")[0]
    gained = rows["full precision, half the batch"]["metrics"]["accuracy"]["mean"] - start
    assert f"Full precision itself gained {gained:.2f} there" in PAGE


def test_corrections_of_the_study():
    rows = {row["name"]: row for row in read("study/corrections")["cells"]}
    for name in ("none", "coupled", "decoupled", "tis", "acr", "ais", "icepop", "geometric", "trm", "dppo"):
        written = cells_of(BENCHMARKS, f"`{name}` |", "| nats of a completion, `none` |")[1:]
        found = [rows[f"{precision} {name}"] for precision in ("int8", "fp8", "nvfp4", "int4", "mxfp4")]
        assert [cell.strip("*") for cell in written] == [f"{row['gain']:.0%}".strip("%") for row in found]
        assert ["*" in cell for cell in written] == [row["differs"] for row in found]
