"""The figures of README, the docs and the benchmarks' page are those of the raw files in `benchmarks/results`."""

import json
import re
import sys
from statistics import fmean, median

import pytest
from figures import (
    BENCHMARKS,
    CHOICE,
    H200,
    MEASURED,
    MEMORY,
    RESULTS,
    TRAINING,
    cells_of,
    gib,
    middle,
    read,
    times,
)
from pages import README, ROOT

from trl_quant.formats import FORMATS
from trl_quant.precisions import PRECISIONS, markdown


# Precisions


def test_the_table_of_precisions_is_the_generated_one():
    assert markdown() in CHOICE


def test_mismatches_are_those_that_were_measured():
    (path,) = RESULTS.glob("mismatch-float32-*.json")
    result = json.loads(path.read_text())
    stated = {name for name, precision in PRECISIONS.items() if precision.mismatch is not None}
    assert result["arguments"]["policy"] == "float32" and set(result["results"]) == stated
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
        if size == "7b":
            of_8, of_64 = times(batches[n]["tokens_per_s"] / base[n]["tokens_per_s"] for n in ("8", "64"))
            assert cells_of(CHOICE, f"`{name}`", "| precision | 8 completions |")[1:] == [of_8, of_64]
            assert cells_of(README, f"`{name}`", "| precision | GPU |")[2] == f"{of_8} / {of_64}"


def test_seconds_of_sampling():
    engines = read(f"rollout-7b-text-{H200}")["results"]["7b"]
    seconds = {name: [row["sample_s"] for row in batches.values()] for name, batches in engines.items()}
    gains = times(trl / ours for trl, ours in zip(seconds["trl"], seconds["fp8"], strict=True))
    rates = [[row["tokens_per_s"] for row in engines[name].values()] for name in ("fp8", "trl")]
    for row in ([f"{s:.2f} s" for s in seconds["trl"]], [f"{s:.2f} s" for s in seconds["fp8"]], gains):
        assert f"| {' | '.join(row)} |" in BENCHMARKS
    assert f"| {' | '.join(times(ours / trl for ours, trl in zip(*rates, strict=True)))} |" in BENCHMARKS
    what, *row = cells_of(MEASURED, "in another run, without training")
    assert row == gains
    assert f"TRL's took {seconds['trl'][1]:.2f} and {seconds['trl'][2]:.2f} s" in what


# Steps: each gain, and what it is where TRL's step does without its scoring pass


def gain(trl: dict, ours: dict) -> float:
    return trl["step"] / ours["step"]


def unscored(trl: dict, ours: dict) -> float:
    assert trl["scoring"] > 0 and ours["scoring"] == 0
    return (trl["step"] - trl["scoring"]) / ours["step"]


def both(*pairs: tuple[dict, dict]) -> list[str]:
    """The gain against TRL, and that against TRL without its scoring pass."""
    return [" / ".join(times(of(*pair) for pair in pairs)) for of in (gain, unscored)]


def steps(start: str, after: str = "") -> list[str]:
    """The two gains of a row of the docs' results."""
    return cells_of(MEASURED, start, after)[1:]


def sampled_in_fp8(policy: str) -> tuple[list[str], list[tuple[dict, dict]]]:
    """Shapes of the steps, and TRL's and ours for each."""
    (trainers,) = (found for name, found in read(f"step-7b-{H200}")["results"]["7b"].items() if policy in name)
    shapes = sorted(trainers["trl"], key=lambda shape: [int(number) for number in shape.split("x")])
    return shapes, [(trainers["trl"][shape], trainers["fp8 tis"][shape]) for shape in shapes]


def runs(name: str, shape: str) -> list[tuple[str | None, dict]]:
    """(`train_precision`, steps of this shape by trainer) for each run of a file that holds several."""
    found = [(run["arguments"]["train_precision"], run["results"]["7b"]) for run in read(name)["runs"]]
    return [(given, {n: t[shape] for n, t in trainers.items() if shape in t}) for given, trainers in found]


def trained() -> tuple[dict, dict[str, dict]]:
    """TRL's step of 64 completions of 1024 tokens and, by `train_precision`, ours on a LoRA policy."""
    found = runs(f"step-7b-trained-{H200}", "64x1024")
    return found[0][1]["trl"], {given: trainers[f"{given} tis"] for given, trainers in found if given}


@pytest.mark.parametrize(("label", "row"), [("LoRA", "LoRA"), ("all weights", "all weights by plain SGD")])
def test_steps_sampled_in_fp8(label, row):
    shapes, pairs = sampled_in_fp8(label)
    columns = ["64x512", "64x1024", "64x2048", "256x512"]
    header = f"| step | {' | '.join(columns)} |"
    for of, what in ((gain, "against TRL"), (unscored, "without its pass")):
        written = dict(zip(columns, steps(f"{row}, {what}", header), strict=True))
        expected = dict(zip(shapes, times(of(*pair) for pair in pairs), strict=True))
        assert {shape: value for shape, value in written.items() if value} == expected
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
    what, *row = cells_of(MEASURED, "in the LoRA steps above")
    seconds = [f"{trl['sampling']:.2f}" for trl, _ in of_512]
    assert row == ["", *gains] and f"TRL's took {' and '.join(seconds)} s" in what
    assert f"{gains[0]} with 64 completions and {gains[1]} with 256" in BENCHMARKS
    assert f"{seconds[0]} and {seconds[1]} s there" in BENCHMARKS


def test_the_step_sampled_in_fp8_in_readme():
    shapes, pairs = sampled_in_fp8("LoRA")
    first, second = both(pairs[shapes.index("64x1024")])
    told = cells_of(README, "The 7B policy sampled in FP8 and trained in BF16", "| what | result | repeat it |")[1]
    assert told == f"{first} TRL's; {second} without its scoring pass (one measured step)"


@pytest.mark.parametrize(
    ("file", "measured"),
    [("", 1), ("-nvfp4", 1), ("-trained", 2), ("-trained-weights", 1)],
)
def test_older_steps_are_few_and_the_pages_say_so(file, measured):
    found = read(f"step-7b{file}-{H200}")
    assert all(run["arguments"]["steps"] == 1 + measured for run in found.get("runs", [found]))
    text = MEASURED.replace("\n", " ")
    for told in (
        "**Each figure is of one measured step**",
        "without its pass (means of two steps)",
        "7B on an NVFP4 base, **one measured step each**",
    ):
        assert told in text


def test_trained_steps():
    trl, ours = trained()
    of_int8 = [ratio[:-1] for ratio in both((trl, ours["int8"]))]
    assert "{} times as fast as TRL's, and {} times".format(*of_int8) in MEASURED.replace("\n", " ")
    text = BENCHMARKS.partition("## Trained in FP8 or INT8")[2].partition("\n\n|")[2].partition("\n\n")[0]
    labels = {"fp8": "`fp8` |", "fp8_block": "`fp8_block`, `exact_rollouts`", "int8": "`int8`, `exact_rollouts`"}
    for name, step in ours.items():
        gains = times(of(trl, step) for of in (gain, unscored))
        phases = [f"{step['sampling']:.2f}", f"{step['sync']:.2f}", "0", f"{step['update']:.2f}"]
        assert cells_of(text, labels[name])[1:8] == [f"{step['step']:.2f}", *gains, *phases]
        assert f"{trl['update'] / step['update']:.2f}x" in BENCHMARKS


def test_sampling_in_fp8_block():
    found = {run["trainer"]: run["results"]["64x1024 equal"] for run in read(f"step-7b-all-{H200}")["runs"]}
    sampling = middle(found["trl"], "sampling") / middle(found["fp8_block/fp8_block/exact"], "sampling")
    assert f"`fp8_block` sampled {sampling:.2f} times as fast as TRL's BF16" in CHOICE


def test_steps_with_all_weights_trained_in_fp8():
    ((_, trainers),) = runs(f"step-7b-trained-weights-{H200}", "64x1024")
    trl, ours = trainers["trl"], trainers["fp8_block tis"]
    written = cells_of(BENCHMARKS, "64x1024, `fp8_block`")
    assert written[1:4] == [f"{ours['step']:.2f}", *times(of(trl, ours) for of in (gain, unscored))]
    shapes, pairs = sampled_in_fp8("all weights")
    faster = pairs[shapes.index("64x1024")][0]
    assert faster["step"] < trl["step"]
    told = "took {:.2f} s in the run [above](#completions-of-one-length), with the same settings. Against that one "
    told += "the gain is {:.2f}x, unscored {:.2f}x."
    told = told.format(faster["step"], gain(faster, ours), unscored(faster, ours))
    assert told in BENCHMARKS.replace("\n", " ")


def test_steps_on_a_4_bit_base():
    pairs, trainers = {}, read(f"step-7b-nvfp4-{H200}")["results"]["7b"]
    for shape in ("8x512", "64x512"):
        trl, ours = pairs[shape] = trainers["trl"][shape], trainers["nvfp4 tis"][shape]
        gains = times(of(trl, ours) for of in (gain, unscored))
        assert cells_of(BENCHMARKS, f"7B, {shape}")[1:4] == [f"{trl['step']:.2f} / {ours['step']:.2f}", *gains]
        assert steps(f"7B, {shape} |") == gains
    trl, ours = pairs["64x512"]
    speed = trl["sampling"] / ours["sampling"]
    assert f"with 64 completions, NVFP4 sampled at {speed:.2f} of BF16's speed at 7B" in CHOICE.replace("\n", " ")


# Updates and memory

SIZES = ("3b", "7b", "14b", "32b")
EIGHT_BITS = ("fp8", "fp8_block", "int8")


def test_updates_on_a_4_bit_base():
    for tokens in ("16384", "2048"):
        found = [read(f"update-{size}-{H200}")["results"][size] for size in SIZES]
        ratios = [f"{kinds['nvfp4'][tokens]['update'] / kinds['trl'][tokens]['update']:.2f}" for kinds in found]
        assert cells_of(MEASURED, f"{tokens} |", "| tokens of a micro-batch | 3B |")[1:] == ratios


def test_updates_in_8_bits():
    found, ratios = read(f"update-7b-{H200}")["results"]["7b"], {}
    for kind, rows in found.items():
        assert all(len(row["steps"]) == 5 and row["update"] == median(row["steps"]) for row in rows.values())
        ratios[kind] = {tokens: f"{row['update'] / found['trl'][tokens]['update']:.2f}" for tokens, row in rows.items()}
    for tokens in ("16384", "4096", "2048"):
        told = cells_of(MEASURED, f"{tokens} |", "| tokens of a micro-batch | ours, BF16 |")[1:]
        assert told == [ratios[kind][tokens] for kind in ("bf16", *EIGHT_BITS)]
    told = " / ".join(ratios["fp8"][tokens] for tokens in ("16384", "4096", "2048"))
    there = read(f"update-7b-another-host-{H200}")["results"]["7b"]
    on_another = {t: {k: there[k][t]["update"] / there["trl"][t]["update"] for k in there} for t in there["trl"]}
    for tokens, ratio in on_another.items():
        cells = cells_of(MEASURED, f"{tokens} |", "| tokens, another host |")[1:]
        assert cells == [f"{there['trl'][tokens]['update']:.2f} s", *(f"{ratio[k]:.2f}" for k in ("fp8", "fp8_block"))]
    elsewhere = " / ".join(f"{on_another[tokens]['fp8']:.2f}" for tokens in ("16384", "4096", "2048"))
    row = cells_of(README, "An update alone, trained in FP8")[1]
    assert row == f"{told} of TRL's time; on another host {elsewhere}"


def test_updates_of_eight_micro_batches():
    found = read(f"update-7b-8-micro-batches-{H200}")
    assert found["arguments"]["accumulation"] == 8
    kinds = found["results"]["7b"]
    for tokens in ("2048", "4096"):
        assert all(len(row[tokens]["steps"]) == 5 for row in kinds.values())
        trl = kinds["trl"][tokens]["update"]
        cells = [
            f"{trl:.2f} s",
            *(f"{kinds[kind][tokens]['update'] / trl:.2f}" for kind in ("bf16", *EIGHT_BITS, "nvfp4")),
        ]
        assert cells_of(MEASURED, f"{tokens}, a step |")[1:] == cells
    spread = max((max(x["steps"]) - min(x["steps"])) / x["update"] for x in (row["2048"] for row in kinds.values()))
    assert f"differ by up to {spread:.0%} of their median" in MEASURED


def test_updates_on_a_fourth_host():
    nvfp4, liger = (read(f"update-7b-{name}-{H200}") for name in ("nvfp4", "liger"))
    assert liger["arguments"]["liger"] and not nvfp4["arguments"]["liger"]
    assert nvfp4["arguments"]["accumulation"] == liger["arguments"]["accumulation"] == 8
    found, fused = nvfp4["results"]["7b"], liger["results"]["7b"]
    for tokens in ("2048", "4096"):
        assert all(len(rows[tokens]["steps"]) == 5 for rows in found.values())
        trl = found["trl"][tokens]["update"]
        cells = [f"{trl:.2f} s", f"{found['nvfp4'][tokens]['update'] / trl:.2f}", "", ""]
        if tokens == "2048":
            theirs, ours = (fused[kind][tokens]["update"] for kind in ("trl", "fp8"))
            cells[2:] = [f"{theirs:.2f} s", f"{ours / theirs:.2f}"]
            told = f"[an update in `fp8`](results.md#updates) then took {ours / theirs:.2f} of the time that TRL's"
            assert told in TRAINING.replace("\n", " ")
        assert cells_of(MEASURED, f"{tokens} |", "| tokens of a micro-batch, a fourth host |")[1:] == cells
    spread = [f"{min(row['2048']['steps']):.2f} to {max(row['2048']['steps']):.2f}" for row in fused.values()]
    assert "TRL's took {} s, those in `fp8` {}.".format(*spread) in MEASURED.replace("\n", " ")
    before = read(f"update-7b-8-micro-batches-{H200}")["results"]["7b"]
    both_times = [each["nvfp4"]["2048"]["update"] / each["trl"]["2048"]["update"] for each in (before, found)]
    assert "how much of {:.2f} against {:.2f} at 2048".format(*both_times) in BENCHMARKS.replace("\n", " ")


def test_updates_in_8_bits_on_all_hosts():
    ratios: dict[str, list[float]] = {}
    for name in ("", "-another-host", "-8-micro-batches"):
        found = read(f"update-7b{name}-{H200}")["results"]["7b"]
        # The other host had no vLLM, whose product of INT8 codes is the one that is used beside it
        for kind in found.keys() & set(EIGHT_BITS) - ({"int8"} if name == "-another-host" else set()):
            for tokens, row in found[kind].items():
                ratios.setdefault(tokens, []).append(row["update"] / found["trl"][tokens]["update"])
    long, middle_sized, short = (
        f"{min(ratios[tokens]):.2f} to {max(ratios[tokens]):.2f}" for tokens in ("16384", "4096", "2048")
    )
    told = f"of 16384 tokens an update takes {long} of BF16's time, with 4096 tokens {middle_sized}. Micro-batches of "
    assert f"{told}2048 tokens take {short} of it" in TRAINING.replace("\n", " ")


def test_profiles_of_an_update_and_a_sync():
    update, sync = ((RESULTS / f"profile-{name}-7b-{H200}.txt").read_text() for name in ("update", "sync"))
    kernels, milliseconds = re.search(r"kernels (\d+), gpu ([\d.]+) ms", update).groups()
    least = min(float(found) for found in re.findall(r"training_step 2048 \d: ([\d.]+) ms", update))
    told = f"for {float(milliseconds) / 1e3:.2f} s of a micro-batch's {least / 1e3:.2f} s or more, in {kernels} kernels"
    assert told in MEASURED.replace("\n", " ")
    assert f"{least / 28:.0f} ms a layer" in MEASURED

    taken = [float(found) / 1e3 for found in re.findall(r"sync in a step -?[1-9]: ([\d.]+) ms", sync)]
    (milliseconds,) = re.findall(r"kernels \d+, gpu ([\d.]+) ms", sync)
    text = BENCHMARKS.replace("\n", " ")
    assert f"A sync took {min(taken):.2f} to {max(taken):.2f} s there" in text
    assert f"Kernels ran for {float(milliseconds) / 1e3:.3f} s of it" in text


def test_updates_in_the_benchmarks_page():
    found = read(f"update-7b-{H200}")["results"]["7b"]
    names = {"ours in BF16, packed rows": "bf16", "NVFP4 base": "nvfp4"} | {f"`{kind}`": kind for kind in EIGHT_BITS}
    for name, kind in ({"TRL's BF16 LoRA": "trl"} | names).items():
        cells = []
        for tokens, row in found[kind].items():
            ratio = f" ({row['update'] / found['trl'][tokens]['update']:.2f})" if kind != "trl" else ""
            cells.append(f"{row['update']:.3f} s{ratio}, {gib(row['peak_bytes'])} GiB")
        assert cells_of(BENCHMARKS, f"{name} |", "| tokens of a micro-batch | 2048 | 4096 | 16384 |")[1:] == cells


def test_an_adapter_beside_a_base_in_codes():
    found, steps = read(f"update-7b-adapter-{H200}")["results"]["7b"], {}
    names = {"TRL's BF16 LoRA, there": "trl", "`fp8`, merged": "fp8", "`fp8`, beside the base": "fp8/adapter"}
    names |= {"`int8`, beside the base": "int8/adapter", "`fp8_block`, beside the base": "fp8_block/adapter"}
    for name, kind in names.items():
        cells = []
        for tokens, row in found[kind].items():
            assert len(row["steps"]) == 5 and row["update"] == median(row["steps"])
            ratio = f" ({row['update'] / found['trl'][tokens]['update']:.2f})" if kind != "trl" else ""
            cells.append(f"{row['update']:.3f} s{ratio}, {gib(row['peak_bytes'])} GiB")
        assert cells_of(BENCHMARKS, f"{name} |", "| tokens of a micro-batch, adapter beside")[1:] == cells
    slower = [row["update"] / found["fp8"][tokens]["update"] for tokens, row in found["fp8/adapter"].items()]
    text = TRAINING.replace("\n", " ")
    assert f"takes {min(slower):.2f} to {max(slower):.2f} times as long" in text
    peaks = [[row["peak_bytes"] for row in found[kind].values()] for kind in ("fp8", "fp8/adapter")]
    saved = {round((merged - beside) / 2**30) for merged, beside in zip(*peaks, strict=True)}
    assert saved == {12} and "peaks 12 GiB lower" in text

    of = read(f"step-7b-lognormal-64x4096-{H200}")
    runs = {run["trainer"]: run["results"]["64x4096 lognormal"] for run in of["runs"]}
    names = {"`bf16` |": "bf16", "`fp8`, adapter merged": "fp8/fp8", "`fp8`, adapter beside": "fp8/fp8/adapter"}
    names |= {"`fp8_block`, exact rollouts": "fp8_block/fp8_block/exact"}
    for name, trainer in names.items():
        run = runs[trainer]
        each = [step["step"] for step in run["steps"]]
        steps[trainer] = median(each)
        cells = [f"{median(each):.2f}", f"{min(each):.2f}, {max(each):.2f}"]
        cells.append(f"{middle(runs['bf16'], 'step') / median(each):.2f}x")
        cells += [f"{middle(run, phase):.2f}" for phase in ("sampling", "sync", "update")]
        cells.append(f"{run['peak_bytes'] / 2**30:.0f}")
        told = cells_of(BENCHMARKS, name, "| seconds, medians | step | fastest, slowest | against ours")
        assert len(each) == 5 and told[1:] == cells
    beside, merged = runs["fp8/fp8/adapter"], runs["fp8/fp8"]
    longer = middle(beside, "sampling") / middle(merged, "sampling")
    less = (merged["peak_bytes"] - beside["peak_bytes"]) / 2**30
    assert f"sampling {longer:.2f} times as long, and saves {less:.0f} GiB" in BENCHMARKS
    assert f"samples {longer:.2f} times as long" in text


@pytest.mark.parametrize("size", SIZES)
def test_peaks_of_an_update(size):
    found = read(f"update-{size}-{H200}")["results"][size]
    for tokens in ("2048", "16384"):
        peaks = [
            gib(found[kind][tokens]["peak_bytes"]) if kind in found else "" for kind in ("trl", "nvfp4", *EIGHT_BITS)
        ]
        assert cells_of(MEMORY, f"{size.upper()}, {tokens} |")[1:] == peaks


def test_peaks_of_steps():
    def peaks(*steps: dict) -> str:
        return " / ".join(f"{step['peak_bytes'] / 2**30:.0f}" for step in steps)

    trl, ours = trained()
    expected = {"the same, sampled and trained in `fp8` / `fp8_block` / `int8`": (trl, *(ours[n] for n in EIGHT_BITS))}
    for policy, row in (("LoRA", "7B LoRA, 64 completions of 1024 tokens"), ("all weights", "7B, all weights")):
        shapes, pairs = sampled_in_fp8(policy)
        expected[row] = pairs[shapes.index("64x1024")]
    trainers = read(f"step-7b-nvfp4-{H200}")["results"]["7b"]
    expected["7B, NVFP4 base"] = trainers["trl"]["64x512"], trainers["nvfp4 tis"]["64x512"]
    found = {run["trainer"]: run["results"]["64x512 equal"] for run in read(f"step-32b-{H200}")["runs"]}
    expected["32B, 64 of 512"] = found["trl"], found["nvfp4/nvfp4"], found["fp8/fp8/adapter"]
    for row, (theirs, *others) in expected.items():
        assert cells_of(MEMORY, row)[1:] == [peaks(theirs), peaks(*others)]


def test_peaks_under_a_cap():
    found = read(f"memory-32b-70b-{H200}")["results"]
    most = [max(found[size]["nvfp4"][part]["reserved"] for part in ("start", "steps")) / 1e9 for size in ("32b", "70b")]
    beside = {f"{found[size]['nvfp4']['steps']['beside'] / 1e9:.1f}" for size in ("32b", "70b")}
    text = MEMORY.replace("\n", " ")
    assert (
        f"peaked at {most[0]:.1f} GB for 32B and {most[1]:.1f} GB for 70B, and {beside.pop()} GB beside torch" in text
    )
    row = cells_of(README, "Peak memory of whole steps on an NVFP4 base")
    assert not beside and row[1] == f"32B {most[0]:.1f} GB, 70B {most[1]:.1f} GB"


def test_weights_of_one_copy(monkeypatch):
    """Computed from the shapes: the decoder's linear layers in the format's bits, embeddings and head in BF16."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.delitem(sys.modules, "engines", raising=False)
    from engines import SHAPES

    assert FORMATS["int8"].bits == FORMATS["fp8"].bits
    for size in (*SIZES, "70b"):
        shape = SHAPES[size]
        width, inner, depth = shape["hidden_size"], shape["intermediate_size"], shape["num_hidden_layers"]
        keys = width // shape["heads"] * shape["kv_heads"]
        linear, rest = depth * (2 * width * (width + keys) + 3 * width * inner), 2 * 152064 * width
        row = [f"{(linear + rest) / 1e9:.1f}B", gib(4 * (linear + rest)), gib(2 * (linear + rest))]
        row += [gib(linear * FORMATS[name].bits / 8 + 2 * rest) for name in ("int8", "nvfp4", "mxfp4")]
        assert cells_of(MEMORY, f"{size.upper()} |", "| model | parameters |")[1:] == row
