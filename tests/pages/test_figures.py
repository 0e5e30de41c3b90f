"""The figures of README, the docs and the benchmarks' page are those of the raw files in `benchmarks/results`."""

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
from raw_results import read_results

from trl_quant.formats import FORMATS
from trl_quant.precisions import PRECISIONS, markdown


# Precisions


def test_the_table_of_precisions_is_the_generated_one():
    assert markdown() in CHOICE


def test_mismatches_are_those_that_were_measured():
    (path,) = RESULTS.glob("mismatch-float32-*.json.xz")
    result = read_results(path)
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
        assert words in " ".join(BENCHMARKS.split())


def test_syncs_of_a_merged_adapter():
    full, lora = (read(f"sync-7b{name}-{H200}")["results"] for name in ("", "-lora"))
    cells = [f"{lora[name]['sync']:.3f} s" for name in ("trl", "bf16", "fp8", "int8")]
    assert cells_of(BENCHMARKS, "merged LoRA |")[1:] == [*cells, ""]
    cells = [f"{full[name]['sync']:.3f} s" for name in ("trl", "fp8", "int8", "nvfp4")]
    assert cells_of(BENCHMARKS, "full weights |")[1:] == [cells[0], "", *cells[1:]]
    assert cells_of(MEASURED, f"{cells[1]} |", "| FP8 | INT8 | NVFP4 |") == cells[1:]


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


def test_seconds_of_sampling():
    engines = read(f"rollout-7b-text-{H200}")["results"]["7b"]
    seconds = {name: [row["sample_s"] for row in batches.values()] for name, batches in engines.items()}
    gains = times(trl / ours for trl, ours in zip(seconds["trl"], seconds["fp8"], strict=True))
    rates = [[row["tokens_per_s"] for row in engines[name].values()] for name in ("fp8", "trl")]
    for row in ([f"{s:.2f} s" for s in seconds["trl"]], [f"{s:.2f} s" for s in seconds["fp8"]], gains):
        assert f"| {' | '.join(row)} |" in BENCHMARKS
    assert f"| {' | '.join(times(ours / trl for ours, trl in zip(*rates, strict=True)))} |" in BENCHMARKS
    told = "with 8, 64 and 256 completions of 512 tokens, is {}, {} and {} times as fast in `fp8` as TRL's"
    assert told.format(*(gain[:-1] for gain in gains)) in MEASURED.replace("\n", " ")


# Steps


def test_sampling_in_fp8_block():
    found = {run["trainer"]: run["results"]["64x1024 equal"] for run in read(f"step-7b-all-{H200}")["runs"]}
    sampling = middle(found["trl"], "sampling") / middle(found["fp8_block/fp8_block/exact"], "sampling")
    assert f"`fp8_block` sampled {sampling:.2f} times as fast as TRL's BF16" in CHOICE


def test_sampling_from_a_4_bit_base():
    found = {run["trainer"]: run["results"] for run in read(f"step-32b-{H200}")["runs"]}
    gains = [
        middle(found["trl"][shape], "sampling") / middle(found["nvfp4/nvfp4"][shape], "sampling")
        for shape in ("8x512 equal", "64x512 equal")
    ]
    told = "sampled {:.2f} times as fast as TRL's BF16 with 8 completions, and {:.2f} times as fast with 64"
    assert told.format(*gains) in CHOICE.replace("\n", " ")


# Updates and memory

SIZES = ("3b", "7b", "14b", "32b")
EIGHT_BITS = ("fp8", "fp8_block", "int8")


def test_updates_on_a_4_bit_base(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.delitem(sys.modules, "engines", raising=False)
    from engines import SHAPES

    for tokens in ("16384", "2048"):
        found = [read(f"update-{size}-{H200}")["results"][size] for size in SIZES]
        ratios = [f"{kinds['nvfp4'][tokens]['update'] / kinds['trl'][tokens]['update']:.2f}" for kinds in found]
        assert cells_of(MEASURED, f"{tokens} |", "| tokens of a micro-batch | 3B |")[1:] == ratios
    layers: dict[str, list[float]] = {"trl": [], "nvfp4": []}  # milliseconds of a layer with 2048 tokens
    for size in SIZES:
        found, cells = read(f"update-{size}-{H200}")["results"][size], []
        for tokens in ("2048", "16384"):
            trl, ours = found["trl"][tokens], found["nvfp4"][tokens]
            cells += [f"{run['update']:.3f} s, {gib(run['peak_bytes'])} GiB" for run in (trl, ours)]
            cells.append(f"{ours['update'] / trl['update']:.2f}")
        header = "| tokens of a micro-batch | 2048, TRL's BF16 LoRA | NVFP4 base | ratio |"
        assert cells_of(BENCHMARKS, f"{size.upper()} |", header)[1:] == cells
        for kind, each in layers.items():
            each.append(found[kind]["2048"]["update"] / SHAPES[size]["num_hidden_layers"] * 1e3)
    told = "takes {:.0f} to {:.0f} ms a layer on an NVFP4 base, and {:.0f} to {:.0f} ms in BF16"
    ends = [end(layers[kind]) for kind in ("nvfp4", "trl") for end in (min, max)]
    assert told.format(*ends) in " ".join(BENCHMARKS.split())


ALL_TOKENS = ("16384", "4096", "2048")
ELSEWHERE = ("another-host", "fifth-host", "sixth-host", "seventh-host", "adapter")
SEVENTH = ("seventh-host", "seventh-host-by-layer", "seventh-host-8-micro-batches-by-layer")


def updates(name: str) -> dict[str, dict]:
    rows = read(f"update-7b-{name}-{H200}")["results"]["7b"]
    assert all(
        len(row["steps"]) == 5 and row["update"] == median(row["steps"]) for r in rows.values() for row in r.values()
    )
    return rows


def test_updates_in_8_bits():
    found, ratios = read(f"update-7b-{H200}")["results"]["7b"], {}
    for kind, rows in found.items():
        assert all(len(row["steps"]) == 5 and row["update"] == median(row["steps"]) for row in rows.values())
        ratios[kind] = {tokens: f"{row['update'] / found['trl'][tokens]['update']:.2f}" for tokens, row in rows.items()}
    for tokens in ALL_TOKENS:
        told = cells_of(MEASURED, f"{tokens} |", "| tokens of a micro-batch | ours, BF16 |")[1:]
        assert told == [ratios[kind][tokens] for kind in ("bf16", *EIGHT_BITS)]
    told = " / ".join(ratios["fp8"][tokens] for tokens in ALL_TOKENS)
    elsewhere = [updates(name) for name in ELSEWHERE]
    there = [sorted(each["fp8"][t]["update"] / each["trl"][t]["update"] for each in elsewhere) for t in ALL_TOKENS]
    on_others = " / ".join(f"{found[0]:.2f}–{found[-1]:.2f}" for found in there)
    row = cells_of(MEASURED, "An update alone, trained in FP8")[1]
    longest, _, shortest = (ratios["fp8"][tokens] for tokens in ALL_TOKENS)
    short_of_it = f"An update in FP8 takes {longest} of TRL's time with 16384 tokens, and {shortest} with 2048"
    assert short_of_it in " ".join(README.split())
    assert len(elsewhere) == 5 and row.startswith(f"{told} of TRL's time; on five other hosts {on_others}; ")
    long, middle_sized, short = on_others.replace("–", " to ").split(" / ")
    told = f"`fp8` took {long} of TRL's time with 16384 tokens, {middle_sized} with 4096, and {short} with 2048."
    assert f"On five other hosts, {told}" in " ".join(MEASURED.split())


EIGHT = ("bf16", *EIGHT_BITS, "nvfp4")
HOSTS = {"third": "8-micro-batches", "fourth": "nvfp4", "sixth": "sixth-host-8-micro-batches"}
WITH_LIGER = {"fourth": "liger", "sixth": "sixth-host-8-micro-batches-liger"}


@pytest.mark.parametrize("hosts", [HOSTS, WITH_LIGER])
def test_updates_of_eight_micro_batches(hosts):
    after = f"| tokens of a micro-batch, host{', with Liger' * (hosts is WITH_LIGER)} |"
    for host, name in hosts.items():
        arguments, found = read(f"update-7b-{name}-{H200}")["arguments"], updates(name)
        assert arguments["accumulation"] == 8 and arguments.get("liger", False) == (hosts is WITH_LIGER)
        for tokens, row in found["trl"].items():
            cells = [f"{found[kind][tokens]['update'] / row['update']:.2f}" if kind in found else "" for kind in EIGHT]
            assert cells_of(MEASURED, f"{tokens}, {host} |", after)[1:] == [f"{row['update']:.2f} s", *cells]


def test_spread_of_eight_micro_batches():
    text, found = " ".join(MEASURED.split()), {name: updates(name) for name in (*HOSTS.values(), *WITH_LIGER.values())}

    def spread(host: str) -> float:
        rows = [row["2048"] for row in found[host].values()]
        return max((max(row["steps"]) - min(row["steps"])) / row["update"] for row in rows)

    assert f"on the third host differ by up to {spread(HOSTS['third']):.0%} of their median" in text
    assert f"one trainer differ by up to {spread(WITH_LIGER['sixth']):.0%} of their median." in text
    steps = [found["liger"][kind]["2048"]["steps"] for kind in ("trl", "fp8")]
    told = "TRL's took {:.2f} to {:.2f} s, those in `fp8` {:.2f} to {:.2f}."
    assert told.format(*(end(each) for each in steps for end in (min, max))) in text
    both_times = [found[HOSTS[host]] for host in ("third", "fourth")]
    both_times = [each["nvfp4"]["2048"]["update"] / each["trl"]["2048"]["update"] for each in both_times]
    assert "how much of {:.2f} against {:.2f} at 2048".format(*both_times) in BENCHMARKS.replace("\n", " ")


def profiled(row: dict[str, dict]) -> list[str]:
    """The cells of a table: a step's seconds, the GPU's, and the number of kernels, for each number of tokens."""
    return [
        cell
        for tokens in ALL_TOKENS
        for cell in (
            f"{row[tokens]['update']:.3f} s", f"{row[tokens]['gpu_seconds']:.3f} s", str(row[tokens]["launched"])
        )
    ]  # fmt: skip


def test_updates_on_a_sixth_host():
    plain, compiled = updates("sixth-host"), updates("sixth-host-by-layer")
    rows = {"TRL, BF16": plain["trl"], "TRL, compiled": compiled["trl"], "ours, BF16": plain["bf16"]}
    rows |= {"ours, BF16, compiled": compiled["bf16"], "`fp8`": plain["fp8"], "`int8`": plain["int8"]}
    rows |= {"NVFP4 base": plain["nvfp4"], "NVFP4 base, compiled": compiled["nvfp4"]}
    for name, row in rows.items():
        assert cells_of(MEASURED, f"{name} |", "| trainer | 16384 tokens | GPU |")[1:] == profiled(row)
    text, (ours, theirs) = " ".join(MEASURED.split()), (plain[kind]["2048"] for kind in ("fp8", "trl"))
    told = "In `fp8` the GPU computes for {:.3f} s of {:.3f} s, in TRL's BF16 for {:.3f} s of {:.3f} s."
    assert told.format(*(row[what] for row in (ours, theirs) for what in ("gpu_seconds", "update"))) in text
    each = [row["update"] / row["launched"] * 1e6 for row in (ours, theirs)]
    assert "for each: {:.0f} microseconds of the step, against {:.0f} in TRL's".format(*each) in text
    merging = [merging_seconds(plain["fp8"][tokens]["kernels"]) for tokens in ALL_TOKENS]
    assert f"Merging costs the GPU {min(merging):.3f} to {max(merging):.3f} s a step" in text
    told = "TRL's BF16 to {:.2f} to {:.2f} of its time, ours in BF16 with packed rows to {:.2f} to {:.2f}, and "
    kinds = ("trl", "bf16", "nvfp4")
    gains = {kind: [compiled[kind][t]["update"] / plain[kind][t]["update"] for t in ALL_TOKENS] for kind in kinds}
    assert told.format(*(end(gains[kind]) for kind in kinds[:2] for end in (min, max))) in text
    assert {f"{gain:.2f}" for gain in gains["nvfp4"]} == {"0.89"} and "an NVFP4 base to 0.89." in text
    eight = updates(HOSTS["sixth"])
    ratios = [each["fp8"]["2048"]["update"] / each["trl"]["2048"]["update"] for each in (eight, plain)]
    told = "with 2048 tokens, `fp8` takes {:.2f} of TRL's time in steps of eight micro-batches, and {:.2f} here"
    assert told.format(*ratios) in text
    kept = [found["fp8"]["16384"]["peak_bytes"] / 2**30 for found in (compiled, plain)]
    assert "({:.0f} GiB instead of {:.0f} with 16384 tokens)".format(*kept) in BENCHMARKS
    whole = updates("sixth-host-whole-model")["trl"]["2048"]["update"], compiled["trl"]["2048"]["update"]
    told = (
        "with 2048 tokens takes {:.3f} s then, in a run that took 170 s in all. The layers alone bring it to {:.3f} s."
    )
    assert told.format(*whole) in text


def merging_seconds(kernels: list) -> float:
    """Seconds of the kernels that merge 28 layers' adapters and quantize the sums: products and sums in FP32, codes."""
    names = ("f32f32_f32f32_f32", "CUDAFunctor_add<float>", "_rows_kernel")
    found = [(name, took) for name, calls, took in kernels if calls == 7 * 28 and any(each in name for each in names)]
    assert len(found) == len(names)
    return sum(took for _, took in found)


def listed(*numbers: float) -> str:
    *first, last = (f"{number:.2f}" for number in numbers)
    return f"{', '.join(first)} and {last}"


def test_updates_on_a_seventh_host():
    plain, compiled, _ = map(updates, SEVENTH)
    arguments = [read(f"update-7b-{name}-{H200}")["arguments"] for name in SEVENTH]
    assert [each["regional"] for each in arguments] == [False, True, True] and arguments[2]["accumulation"] == 8
    rows = {"TRL, BF16": plain["trl"], "TRL, BF16, compiled": compiled["trl"], "`fp8`": plain["fp8"]}
    rows |= {f"`{kind}`, compiled": compiled[kind] for kind in EIGHT_BITS}
    for name, row in rows.items():
        assert cells_of(MEASURED, f"{name} |", "| trainer, a seventh host |")[1:] == profiled(row)

    def ratios(ours: dict, theirs: dict, what: str = "update") -> list[float]:
        return [ours[tokens][what] / theirs[tokens][what] for tokens in ALL_TOKENS if tokens in ours]

    text, gains = " ".join(MEASURED.split()), {kind: ratios(compiled[kind], plain[kind]) for kind in plain}
    assert f"`fp8` to {listed(*gains['fp8'])} of its time with 16384, 4096 and 2048 tokens, and one in TRL's" in text
    assert f"BF16 to {listed(*gains['trl'])}. With" in text
    *others, last = (f"`{kind}` takes {listed(*ratios(compiled[kind], compiled['trl']))}" for kind in EIGHT_BITS)
    assert (
        f"{others[0]} of TRL's time with 16384, 4096 and 2048 tokens, {others[1].replace(' takes', '')}, and " in text
    )
    assert f"{last.replace(' takes', '')}. Against TRL without the compiler, compiled `fp8` takes " in text
    assert f"compiled `fp8` takes {listed(*ratios(compiled['fp8'], plain['trl']))}. - **The GPU" in text
    on_gpu = ratios(compiled["fp8"], compiled["trl"], "gpu_seconds")
    assert f"compiled `fp8` needs it for {listed(*on_gpu[:0:-1])} of the time of compiled BF16" in text
    each = [compiled[kind]["2048"]["update"] / compiled[kind]["2048"]["launched"] * 1e6 for kind in ("fp8", "trl")]
    assert (
        "needs {:.0f} microseconds of the step for each with 2048 tokens, against {:.0f} in TRL's".format(*each) in text
    )
    assert compiled["fp8"]["2048"]["launched"] < compiled["trl"]["2048"]["launched"]
    training, faster = " ".join(TRAINING.split()), {kind: [1 / gain for gain in gains[kind]] for kind in gains}
    assert (
        f"this made TRL's BF16 {min(faster['trl']):.2f} to {max(faster['trl']):.2f} times as fast, and `fp8` "
        in training
    )
    assert (
        "`fp8` {:.2f} times with 16384 tokens, {:.2f} with 4096 and {:.2f} with 2048".format(*faster["fp8"]) in training
    )
    both = ratios(compiled["fp8"], compiled["trl"])
    assert (
        "takes {:.2f} of BF16's time with 16384 tokens, {:.2f} with 4096, and {:.2f} with 2048.".format(*both)
        in training
    )
    row = "; both with compiled layers {:.2f} / {:.2f} / {:.2f}".format(*both)
    assert cells_of(MEASURED, "An update alone, trained in FP8")[1].endswith(row)
    fifth = updates("fifth-host")
    assert f"There `fp8` took {listed(*ratios(fifth['fp8'], fifth['trl']))} of TRL's time" in " ".join(
        BENCHMARKS.split()
    )


def test_compiled_updates_of_eight_micro_batches():
    plain, compiled, eight = map(updates, SEVENTH)
    text, of_both = " ".join(MEASURED.split()), [(eight[kind]["4096"], eight[kind]["2048"]) for kind in ("fp8", "trl")]
    told = "takes {:.2f} of TRL's time with 4096 tokens and {:.2f} with 2048: {:.2f} s and {:.2f} s."
    seconds = [row["update"] for row in of_both[0]]
    assert told.format(*(ours / row["update"] for ours, row in zip(seconds, of_both[1], strict=True)), *seconds) in text
    spread: dict[str, list[float]] = {}
    for run in (plain, compiled, eight):
        for tokens, row in run["fp8"].items():
            spread.setdefault(tokens, []).append(max(row["steps"]) / min(row["steps"]))
    told = "took up to {:.2f} times as long as the fastest with 2048 and 4096 tokens, and {:.2f} times with 16384."
    assert told.format(max(spread["2048"] + spread["4096"]), max(spread["16384"])) in text


def test_updates_in_8_bits_on_all_hosts():
    ratios: dict[str, list[float]] = {}
    eight = (HOSTS["third"], HOSTS["sixth"])
    for name in ("", *(f"-{name}" for name in (*ELSEWHERE, *eight))):
        found = read(f"update-7b{name}-{H200}")["results"]["7b"]
        # The first other host had no vLLM, whose product of INT8 codes is the one that is used beside it
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
    assert f"sampling {longer:.2f} times as long, and saves {less:.0f} GiB" in " ".join(BENCHMARKS.split())
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

    def steps(name: str, shape: str) -> dict[str, dict]:
        return {
            run["trainer"]: run["results"][shape]
            for run in read(f"step-7b-{name}-{H200}")["runs"]
            if shape in run["results"]
        }

    there = steps("another-host", "64x1024 equal")
    exact, weights = (steps(name, "64x1024 equal") for name in ("all", "weights"))
    trained = there["fp8/fp8"], exact["fp8_block/fp8_block/exact"], there["int8/int8/exact"]
    expected = {
        "7B LoRA, 64 completions of 1024 tokens": (there["trl"], there["fp8"]),
        "the same, sampled and trained in `fp8` / exact `fp8_block` / exact `int8`": (there["trl"], *trained),
        "7B, all weights": (weights["trl"], weights["fp8_block/fp8_block"]),
    }
    on_four_bits = steps("nvfp4", "64x512 equal")
    expected["7B, NVFP4 base"] = on_four_bits["trl"], on_four_bits["nvfp4/nvfp4"]
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
