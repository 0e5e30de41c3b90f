"""The figures of README and of the benchmarks' README are those of the raw files in `benchmarks/results`."""

import json
import re
from pathlib import Path
from statistics import fmean, median

import pytest

from trl_quant.precisions import PRECISIONS, markdown


ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
README, BENCHMARKS = ((ROOT / name).read_text() for name in ("README.md", "benchmarks/README.md"))
H200 = "NVIDIA-H200"


def read(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text())


def cells_of(text: str, start: str, after: str = "") -> list[str]:
    """The cells of the one row that starts so; with `after`, of what stands between that and an empty line."""
    if after:
        assert text.count(after) == 1, after
        text = text.partition(after)[2].partition("\n\n")[0]
    (row,) = re.findall(rf"^\| {re.escape(start)}.*\|$", text, re.MULTILINE)
    return [cell.strip() for cell in row.strip("|").split("|")]


def times(ratios) -> list[str]:
    return [f"{ratio:.2f}x" for ratio in ratios]


# Precisions


def test_the_table_of_precisions_is_the_generated_one():
    assert markdown() in README


def test_mismatches_are_those_that_were_measured():
    (path,) = RESULTS.glob("mismatch-float32-*.json")
    result = json.loads(path.read_text())
    assert result["arguments"]["policy"] == "float32" and set(result["results"]) == set(PRECISIONS)
    for name, seeds in result["results"].items():
        mean = fmean(run["kl_k3"] for run in seeds.values())
        assert f"{PRECISIONS[name].mismatch:.1e}" == f"{mean:.1e}"
        written = f"{mean:.1e}".replace("e-0", "e-")
        assert re.search(rf"^\| `{name}` \| {written} ", BENCHMARKS, re.MULTILINE)


# A sync


def test_the_fingerprint():
    """Medians of what was measured, in ms; the bandwidth in TB/s."""
    full, lora = read(f"fingerprint-7b-{H200}")["results"]
    assert (full["rank"], lora["rank"], lora["parameters"]) == (0, 32, 731)
    values, host = median(full["values"]), median(lora["host"])
    for words in (
        *(f"{median(run['fingerprint']):.1f} ms with" for run in (full, lora)),
        f"{full['bytes'] / values / 1e9:.1f} TB/s in {values:.1f} ms",
        f"731 parameters and their modules in {host:.1f} ms",
    ):
        assert words in BENCHMARKS


# Sampling alone


@pytest.mark.parametrize("size", ["7b", "32b"])
def test_tokens_per_second(size):
    engines = read(f"rollout-{size}-{H200}")["results"][size]
    base = engines.pop("trl")
    for name, batches in engines.items():
        ratios = times(row["tokens_per_s"] / base[batch]["tokens_per_s"] for batch, row in batches.items())
        assert f"| {name.upper()} | {' | '.join(ratios)} |" in BENCHMARKS


def test_seconds_of_sampling():
    engines = read(f"rollout-7b-text-{H200}")["results"]["7b"]
    seconds = {name: [row["sample_s"] for row in batches.values()] for name, batches in engines.items()}
    gains = times(trl / ours for trl, ours in zip(seconds["trl"], seconds["fp8"], strict=True))
    rates = [[row["tokens_per_s"] for row in engines[name].values()] for name in ("fp8", "trl")]
    for row in ([f"{s:.2f} s" for s in seconds["trl"]], [f"{s:.2f} s" for s in seconds["fp8"]], gains):
        assert f"| {' | '.join(row)} |" in BENCHMARKS
    assert f"| {' | '.join(times(ours / trl for ours, trl in zip(*rates, strict=True)))} |" in BENCHMARKS
    what, result, _ = cells_of(README, "In another run, without training")
    assert result == f"{gains[1]} / {gains[2]}; {gains[0]}"
    assert f"TRL's took {seconds['trl'][1]:.2f} / {seconds['trl'][2]:.2f} s" in what


# Steps: each gain, and what it is where TRL's step does without its scoring pass


def gain(trl: dict, ours: dict) -> float:
    return trl["step"] / ours["step"]


def unscored(trl: dict, ours: dict) -> float:
    assert trl["scoring"] > 0 and ours["scoring"] == 0
    return (trl["step"] - trl["scoring"]) / ours["step"]


def both(pairs: list[tuple[dict, dict]]) -> str:
    """As README writes it."""
    return "; unscored ".join(" / ".join(times(of(*pair) for pair in pairs)) for of in (gain, unscored))


def sampled_in_fp8(policy: str) -> tuple[list[str], list[tuple[dict, dict]]]:
    """Shapes of the steps, and TRL's and ours for each."""
    (trainers,) = (found for name, found in read(f"step-7b-{H200}")["results"]["7b"].items() if policy in name)
    shapes = sorted(trainers["trl"], key=lambda shape: [int(number) for number in shape.split("x")])
    return shapes, [(trainers["trl"][shape], trainers["fp8 tis"][shape]) for shape in shapes]


def runs(name: str, shape: str) -> list[tuple[str | None, dict]]:
    """(`train_precision`, steps of this shape by trainer) for each run of a file that holds several."""
    found = [(run["arguments"]["train_precision"], run["results"]["7b"]) for run in read(name)["runs"]]
    return [(given, {n: t[shape] for n, t in trainers.items() if shape in t}) for given, trainers in found]


def trained(shape: str) -> tuple[dict, dict[str, dict]]:
    """TRL's step and, by `train_precision`, ours on a LoRA policy."""
    name = f"step-7b-trained-{H200}" if shape == "64x1024" else f"step-7b-trained-{shape}-{H200}"
    found = runs(name, shape)
    return found[0][1]["trl"], {given: trainers[f"{given} tis"] for given, trainers in found if given}


def trained_weights() -> dict[str, tuple[dict, dict]]:
    """TRL's step and ours by shape, all weights trained in `fp8_block`."""
    shapes = ("64x1024", "64x4096")
    found = {shape: runs(f"step-7b-trained-weights-{H200}", shape) for shape in shapes}
    steps = {shape: [trainers for _, trainers in found[shape] if trainers] for shape in shapes}
    return {shape: (one["trl"], one["fp8_block tis"]) for shape, (one,) in steps.items()}


@pytest.mark.parametrize(
    ("policy", "row", "label"),
    [
        ("LoRA", "A GRPO step against TRL's, sampled in FP8, 7B LoRA", "LoRA"),
        ("all weights", "The same with all weights trained by plain SGD", "all weights"),
    ],
)
def test_steps_sampled_in_fp8(policy, row, label):
    shapes, pairs = sampled_in_fp8(policy)
    assert cells_of(README, row)[1] == both(pairs)
    columns = ["64x512", "64x1024", "64x2048", "256x512"]
    rows = {
        f"{label}, TRL's BF16 |": [f"{trl['step']:.2f}" for trl, _ in pairs],
        f"{label}, FP8 |": [f"{ours['step']:.2f}" for _, ours in pairs],
        f"{label}, gain |": times(gain(*pair) for pair in pairs),
        f"{label}, gain, unscored |": times(unscored(*pair) for pair in pairs),
    }
    for start, values in rows.items():
        written = dict(zip(columns, cells_of(BENCHMARKS, start)[1:], strict=True))
        assert {shape: value for shape, value in written.items() if value} == dict(zip(shapes, values, strict=True))


def test_phases_of_steps_sampled_in_fp8():
    _, pairs = sampled_in_fp8("LoRA")
    for phase in ("sampling", "sync", "scoring", "update", "rest"):
        values = [f"{trl[phase]:.2f} / {ours[phase]:.2f}" for trl, ours in pairs]
        assert cells_of(BENCHMARKS, f"{phase} |", "| phases with LoRA")[1:] == values
    assert cells_of(BENCHMARKS, "sampling, gain |")[1:] == times(t["sampling"] / o["sampling"] for t, o in pairs)


def test_sampling_within_steps_is_told_beside_sampling_alone():
    shapes, pairs = sampled_in_fp8("LoRA")
    of_512 = [pair for shape, pair in zip(shapes, pairs, strict=True) if shape.endswith("x512")]
    gains = times(trl["sampling"] / ours["sampling"] for trl, ours in of_512)
    what, result, _ = cells_of(README, "Sampling alone in FP8, 64 / 256 completions of 512 tokens")
    seconds = [f"{trl['sampling']:.2f}" for trl, _ in of_512]
    assert result == " / ".join(gains) and f"TRL's took {' / '.join(seconds)} s" in what
    assert f"{gains[0]} with 64 completions and {gains[1]} with 256" in BENCHMARKS
    assert f"{seconds[0]} and {seconds[1]} s there" in BENCHMARKS


def test_the_headline():
    sampled = sampled_in_fp8("LoRA")[1]
    trl, ours = trained("64x1024")
    text = README.partition("## Install")[0].replace("\n", " ")
    for of, both_ends in ((gain, "{:.2f} to {:.2f} times as fast"), (unscored, "{:.2f} to {:.2f} times")):
        ratios = [of(*pair) for pair in sampled]
        assert both_ends.format(min(ratios), max(ratios)) in text
        assert f"{of(trl, ours['fp8']):.2f} times" in text


def test_trained_steps_of_1024_tokens():
    trl, ours = trained("64x1024")
    assert cells_of(README, "A GRPO step against TRL's, 7B LoRA, sampled and trained")[1] == both([(trl, ours["fp8"])])
    exact = [(trl, ours[name]) for name in ("fp8_block", "int8")]
    assert cells_of(README, "The same with `exact_rollouts`")[1] == both(exact)


def test_trained_steps_of_4096_tokens():
    trl, ours = trained("64x4096")
    (beside,) = [t for given, t in runs(f"step-7b-trained-64x4096-{H200}", "64x4096") if given is None and len(t) == 2]
    pairs = [(beside["trl"], beside["fp8 tis"]), (trl, ours["fp8"]), (trl, ours["fp8_block"])]
    assert cells_of(README, "64 of 4096: sampled in `fp8`")[1] == both(pairs)
    written = cells_of(BENCHMARKS, "sampled in `fp8`, trained in BF16 |")
    assert written[1:4] == [f"{beside['fp8 tis']['step']:.2f}", *times(of(*pairs[0]) for of in (gain, unscored))]


@pytest.mark.parametrize("shape", ["64x1024", "64x4096"])
def test_phases_of_trained_steps(shape):
    trl, ours = trained(shape)
    after = {"64x1024": "Trained in FP8 or INT8", "64x4096": "64 completions of 4096 tokens, `--completions"}[shape]
    text = BENCHMARKS.partition(after)[2].partition("\n\n|")[2].partition("\n\n")[0]
    labels = {"fp8": "`fp8` |", "fp8_block": "`fp8_block`, `exact_rollouts`", "int8": "`int8`, `exact_rollouts`"}
    for name, step in ours.items():
        gains = times(of(trl, step) for of in (gain, unscored))
        phases = [f"{step['sampling']:.2f}", f"{step['sync']:.2f}", "0", f"{step['update']:.2f}"]
        assert cells_of(text, labels[name])[1:8] == [f"{step['step']:.2f}", *gains, *phases]
        assert f"{trl['update'] / step['update']:.2f}x" in BENCHMARKS


def test_steps_with_all_weights_trained_in_fp8():
    steps = trained_weights()
    for shape, (trl, ours) in steps.items():
        written = cells_of(BENCHMARKS, f"{shape}, `fp8_block`")
        assert written[1:4] == [f"{ours['step']:.2f}", *times(of(trl, ours) for of in (gain, unscored))]
    shapes, pairs = sampled_in_fp8("all weights")
    faster, slower = pairs[shapes.index("64x1024")][0], steps["64x1024"][0]
    assert faster["step"] < slower["step"]
    assert cells_of(README, "All weights trained in `fp8_block`")[1] == both([(faster, steps["64x1024"][1])])
    assert cells_of(README, "The same, 64 of 4096 with `--micro 2`")[1] == both([steps["64x4096"]])


def test_steps_on_a_4_bit_base():
    pairs = {}
    for size in ("7b", "32b"):
        trainers = read(f"step-{size}-nvfp4-{H200}")["results"][size]
        for shape in ("8x512", "64x512"):
            trl, ours = pairs[size, shape] = trainers["trl"][shape], trainers["nvfp4 tis"][shape]
            written = cells_of(BENCHMARKS, f"{size.upper()}, {shape}")
            gains = times(of(trl, ours) for of in (gain, unscored))
            assert written[1:4] == [f"{trl['step']:.2f} / {ours['step']:.2f}", *gains]
    assert cells_of(README, "A GRPO step on an NVFP4 base")[1] == both(list(pairs.values()))
    trl, ours = pairs["7b", "64x512"]
    assert f"with 64, NVFP4 sampled at {trl['sampling'] / ours['sampling']:.2f} of BF16's speed at 7B" in README


# The study, as README's advice tells it


def study(question: str, *names: str, column: str = "gain") -> list[float]:
    """Of the cells whose names hold all of these words, in the order of the table."""
    rows = [row for row in read(f"study/{question}")["cells"] if all(name in row["name"] for name in names)]
    if column == "gain":
        return [row["gain"] for row in rows if row["gain"] is not None]
    found = [row["metrics"] for row in rows]
    return [m["KL"]["mean"] * m["length"]["mean"] if column == "nats" else m[column]["mean"] for m in found if m["KL"]]


def percent(values: list[float]) -> str:
    return f"{min(values):.0%} to {max(values):.0%}" if len(values) > 1 else f"{values[0]:.0%}"


def advice(start: str) -> list[str]:
    return cells_of(README, start, "| sampler | nats | take |")


def test_advice_where_samples_are_near():
    *_, why = advice("BF16; FP8; INT8")
    near = study("cost") + study("corrections", "int8") + study("corrections", "fp8 ")
    uncorrected = study("cost", "none") + study("corrections", "int8 none") + study("corrections", "fp8 none")
    assert f"ten corrections kept {percent(near)}, `none` {percent(uncorrected)}" in why
    for size, shape in (("20M", "512x6"), ("110M", "1024x8")):
        assert re.search(rf"{percent(study('scale', 'fp8 none', shape))} at {size}", why)
    assert f"{percent(study('countdown', 'fp8 none'))} on Countdown" in why


def test_advice_in_4_bits():
    *_, why = advice("NVFP4, MXFP4, INT4")
    named = {"`none`": ["none"], "`dppo`": ["dppo"], "`coupled`": ["coupled"], "`acr` and `tis` kept": ["acr", "tis"]}
    for label, corrections in named.items():
        cells = [f"{p} {c}" for c in corrections for p in ("nvfp4", "int4", "mxfp4")]
        assert f"{label} {percent([value for cell in cells for value in study('corrections', cell)])}" in why
    searched = [
        v for name in ("none", "tis", "acr", "ais") for p in ("nvfp4", "mxfp4") for v in study("countdown", p, name)
    ]
    assert f"kept {percent(searched)}, which" in why
    marked = [row["name"] for row in read("study/countdown")["cells"] if row["differs"]]
    assert marked == ["nvfp4 coupled"]
    assert f"`none` {percent(study('regimes', 'lr 0.0006 x1 3 digits from 0.33'))}" in why


def test_advice_for_long_completions():
    *_, why = advice("MXFP4, completions of 99 tokens")
    swept = [v for lr in ("5e-05", "0.0002") for v in study("regimes", f"lr {lr} x1 12 digits")]
    listed = [f"{value:.0%}" for value in sorted(swept)]
    assert f"one seed a cell, {', '.join(listed[:-1])} and {listed[-1]}" in why
    assert f"`none` kept {percent(study('length', 'mxfp4 none 12'))}" in why
    *_, why = advice("The same, four updates")
    for name in ("tis", "icepop", "decoupled", "acr", "none", "ais"):
        assert f"`{name}` {percent(study('reuse', f'mxfp4 {name}'))}" in why
    assert max(v for name in ("coupled", "dppo", "trm") for v in study("reuse", f"mxfp4 {name}")) < -0.7
    assert f"({percent(study('regimes', 'lr 0.0002 x4 12 digits from 0.33'))} in the sweep)" in why


def test_advice_with_outliers():
    _, nats, _, why = advice("INT8 where activations have outliers")
    found = [v for v in study("endurance", "int8", column="nats") if v > 0.01]  # not the unified policy's
    assert nats == f"{min(found):.1f} to {max(found):.1f}"
    assert why.startswith(f"{percent(study('endurance', 'tis, sequences'))} after 900 steps")
    for name in ("ais", "none"):
        assert f"`{name}` {percent(study('endurance', f'int8 {name}'))}" in why
    *_, why = advice("The same, and the INT8 model")
    copies = [v for name in ("ais", "tis") for v in study("endurance", f"int8 {name}", column="reward")]
    assert f"{study('endurance', 'unified', column='reward')[0]:.2f} of its samples" in why
    assert f"{min(copies):.2f} to {max(copies):.2f}" in why


def test_advice_for_text():
    *_, why = advice("INT8 / FP8, text")
    assert why == f"`none` kept {' / '.join(percent(study('words', f'{p} none')) for p in ('int8', 'fp8'))}"
    *_, why = advice("NVFP4 / MXFP4, text")
    assert why.startswith(f"`none` {' / '.join(percent(study('words', f'{p} none')) for p in ('nvfp4', 'mxfp4'))}")
    for name in ("ais", "tis", "acr", "coupled"):
        assert f"`{name}` {percent(study('words', f'mxfp4 {name}'))}" in why


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
    text = BENCHMARKS.replace("\n", " ")
    assert f"went from {there} to {ends(elsewhere)}" in text and f"has {first} and {ends(here)}" in text
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
    assert f"ended at {told[0]} in **length** and at {told[1]} in **uaq**" in BENCHMARKS.replace("\n", " ")


def test_reuse_of_the_study():
    for row in read("study/reuse")["cells"]:
        label = row["name"].removeprefix("mxfp4 ")
        start = f"{label} |" if row["gain"] is None else f"`{label}` |"
        accuracy, gained, *_ = cells_of(BENCHMARKS, start, "| correction | accuracy, range | gain | over steps")[1:]
        assert accuracy == f"{row['metrics']['accuracy']['mean']:.3f}, {ends(row)}"
        assert gained == ("100%" if row["gain"] is None else f"{row['gain']:.0%}")


def test_corrections_of_the_study():
    rows = {row["name"]: row for row in read("study/corrections")["cells"]}
    for name in ("none", "coupled", "decoupled", "tis", "acr", "ais", "icepop", "geometric", "trm", "dppo"):
        written = cells_of(BENCHMARKS, f"`{name}` |", "| nats of a completion, `none` |")[1:]
        found = [rows[f"{precision} {name}"] for precision in ("int8", "fp8", "nvfp4", "int4", "mxfp4")]
        assert [cell.strip("*") for cell in written] == [f"{row['gain']:.0%}".strip("%") for row in found]
        assert ["*" in cell for cell in written] == [row["differs"] for row in found]
