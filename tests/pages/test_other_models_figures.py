"""The figures of a mixture of experts and a hybrid on the pages equal those of the raw files."""

from statistics import fmean, median

import pytest
from figures import BENCHMARKS, H200, cells_of, read, times
from pages import TEXTS


def test_sampling_from_a_mixture():
    raw, page = read(f"rollout-30b-a3b-triton-{H200}"), " ".join(BENCHMARKS.split())
    engines = raw["results"]
    for name, of in (("bf16", "our BF16"), ("fp8", "FP8")):
        for key, what in (("sample_s", "sampling"), ("sync_s", "sync")):
            seconds = [f"{row[key]:.2f} s" for row in engines[name].values()]
            assert f"| {of}, {what} | {' | '.join(seconds)} |" in BENCHMARKS
    gains = sampling_gains(engines)
    assert f"| FP8 against our BF16, sampling | {' | '.join(gains)} |" in BENCHMARKS
    in_words = "sampled {}, {} and {} times as fast in `fp8` as in `bf16`"
    assert in_words.format(*(gain[:-1] for gain in gains)) in " ".join(TEXTS["docs/mixtures.md"].split())
    with_cutlass = sampling_gains(read(f"rollout-30b-a3b-{H200}")["results"])
    assert "by itself, it was {}, {} and {} (an earlier commit".format(*with_cutlass) in page
    another = (row["sample_s"] for row in raw["another_host"]["bf16"].values())
    assert "of the same hour BF16 took {:.2f}, {:.2f} and {:.2f} s".format(*another) in page
    took = engines["bf16"]["8"]["sample_s"]
    assert f"where {took:.2f} s are {1000 * took / 256:.2f} ms a token" in page
    assert f"commit {raw['commit'][:8]}, load {raw['loads']['bf16']:.1f} to {raw['loads']['fp8']:.1f}" in page


def sampling_gains(engines: dict) -> list[str]:
    """How many times as fast FP8 samples as our BF16, by number of completions."""
    pairs = zip(engines["bf16"].values(), engines["fp8"].values(), strict=True)
    return times(ours["sample_s"] / quantized["sample_s"] for ours, quantized in pairs)


def test_the_kernels_of_experts():
    found, page = read(f"decode-30b-a3b-{H200}")["results"], " ".join(TEXTS["docs/mixtures.md"].split())
    rows = {"bf16": "BF16, Triton's kernels", "fp8": "FP8, CUTLASS's", "fp8 triton's experts": "FP8, Triton's"}
    for kind, name in rows.items():
        parts = (found[kind][batch][part] for batch in ("8", "64") for part in ("GPU", "products", "other"))
        assert cells_of(BENCHMARKS, f"{name} |", "| experts | 8 completions |")[1:] == [f"{part:.2f}" for part in parts]
    gpu = {kind: [found[kind][batch]["GPU"] for batch in ("8", "64")] for kind in rows}
    ours, vllms = (
        [slow / fast for slow, fast in zip(gpu["bf16"], gpu[kind])] for kind in ("fp8 triton's experts", "fp8")
    )
    gains = "FP8 is {:.2f} and {:.2f} times as fast as BF16, with CUTLASS's {:.2f} and {:.2f} times"
    assert gains.format(*ours, *vllms) in " ".join(BENCHMARKS.split())
    assert "takes the GPU {:.2f} and {:.2f} times as long in `bf16` as in `fp8`".format(*ours) in page
    longer = (slow / fast for slow, fast in zip(gpu["fp8"], gpu["fp8 triton's experts"]))
    assert "takes the GPU {:.2f} and {:.2f} times as long, with 8 and 64 completions".format(*longer) in page
    whole = (found[kind]["8"]["decode"] for kind in rows)
    assert "took {:.2f}, {:.2f} and {:.2f} ms;".format(*whole) in " ".join(BENCHMARKS.split())
    assert found["bf16"]["64"]["decode"] < 0


MIXTURE, TRITON, HYBRID = "step-30b-a3b", "step-30b-a3b-triton", "step-9b"
MICRO, ONE_COPY = "step-30b-a3b-micro-batches", "step-30b-a3b-one-copy"
OTHER_MODELS = {  # the run of a row
    "mixture": {
        "the control, BF16": (MIXTURE, "trl-control"),
        "BF16 with replay": (MIXTURE, "bf16+replay"),
        "`fp8` with replay, CUTLASS's kernels": (MIXTURE, "fp8+replay"),
        "`fp8` with replay, Triton's kernels": (TRITON, "fp8+replay"),
    },
    "hybrid": {
        "the control, BF16": (HYBRID, "trl-control"),
        "BF16": (HYBRID, "bf16"),
        "sampled and trained in `fp8`": (HYBRID, "fp8/fp8"),
    },
}


@pytest.mark.parametrize("kind", OTHER_MODELS)
def test_steps_of_other_models(kind):
    """Means of all steps after the first."""
    heading = "A mixture of experts" if kind == "mixture" else "A hybrid"
    section = BENCHMARKS.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    means = {}
    for row, (file, trainer) in OTHER_MODELS[kind].items():
        (results,) = (run["results"] for run in read(f"{file}-{H200}")["runs"] if run["trainer"] == trainer)
        ((_, result),) = results.items()
        assert len(result["steps"]) == 5
        means[row] = {phase: fmean(step[phase] for step in result["steps"]) for phase in result["steps"][0]}
        gain = means["the control, BF16"]["step"] / means[row]["step"]
        whole = [step["step"] for step in result["steps"]]
        cells = [f"{means[row]['step']:.2f} s", f"{min(whole):.2f}, {max(whole):.2f} s", f"{gain:.2f}x"]
        cells += [f"{means[row][phase]:.2f} s" for phase in ("sampling", "sync", "update")]
        assert cells_of(section, f"{row} |", "| trainer | step | fastest, slowest |")[1:] == cells
    if kind == "mixture":
        cutlass, triton = ([*means.values()][place] for place in (2, 3))
        assert f"differ by {cutlass['update'] - triton['update']:.2f} s in it" in " ".join(section.split())
        told = f"of 8 it is {means['the control, BF16']['step'] / triton['step']:.2f} times as fast as TRL's"
        assert told in " ".join(TEXTS["docs/mixtures.md"].split())


def test_steps_of_a_mixture_by_micro_batch():
    section = BENCHMARKS.partition("\n## A mixture of experts\n")[2].partition("\n## ")[0]
    page, means = " ".join(section.split()), {}
    rows = {
        ("trl-control", 32): (MICRO, "the control, BF16"),
        ("bf16+replay", 8): (MICRO, "BF16 with replay"),
        ("bf16+replay", 32): (MICRO, "BF16 with replay"),
        ("fp8/fp8/adapter+replay", 8): (MICRO, "one copy in FP8, with replay"),
        ("fp8/fp8/adapter+replay", 32): (ONE_COPY, "one copy in FP8, with replay"),
        ("fp8/fp8/adapter+replay", 64): (ONE_COPY, "one copy in FP8, with replay"),
    }
    for (trainer, micro), (file, name) in rows.items():
        runs = [run for run in read(f"{file}-{H200}")["runs"] if (run["trainer"], run["micro"]) == (trainer, micro)]
        ((result,),) = (run["results"].values() for run in runs)
        assert len(result["steps"]) == 5
        found = means[trainer, micro] = {
            phase: fmean(s[phase] for s in result["steps"]) for phase in result["steps"][0]
        }
        whole = [step["step"] for step in result["steps"]]
        gain = means["trl-control", 32]["step"] / found["step"]
        cells = [f"{found['step']:.2f} s", f"{min(whole):.2f}, {max(whole):.2f} s", f"{gain:.2f}x"]
        cells += [f"{found[phase]:.2f} s" for phase in ("sampling", "sync", "update")]
        cells.append(f"{result['peak_bytes'] / 2**30:.1f} GiB")
        assert cells_of(section, f"{name} | {micro} |", "| trainer | micro-batch | step |")[2:] == cells
    control, bf16, one = (
        means[key] for key in (("trl-control", 32), ("bf16+replay", 32), ("fp8/fp8/adapter+replay", 64))
    )
    gain = control["step"] / one["step"]
    same = means["fp8/fp8/adapter+replay", 32]["step"]
    told = "A step on one copy in FP8 is {:.2f} times as fast as the control's, with micro-batches of 64 against 32; "
    told += "with 32 in both it is {:.2f} times"
    assert told.format(gain, control["step"] / same) in page
    told = "is {:.2f} times as fast as TRL's without its scoring pass, with micro-batches of 64 against 32, and {:.2f}"
    assert told.format(gain, control["step"] / same) in " ".join(TEXTS["docs/mixtures.md"].split())
    ours = [f"{bf16['step'] / step:.2f}x" for step in (one["step"], same)]
    told = f"| {gain:.2f}x TRL's without its scoring pass; {ours[0]} ours in BF16; micro-batches of 64 against 32. "
    assert f"{told}With 32 in all: {control['step'] / same:.2f}x; {ours[1]} |" in TEXTS["README.md"]
    told = "is {:.2f} times as fast as ours in BF16 with 32, and with 32 itself {:.2f} times"
    assert told.format(bf16["step"] / one["step"], bf16["step"] / same) in page
    small = [means[name, 8]["update"] / 8 for name in ("fp8/fp8/adapter+replay", "bf16+replay")]
    assert "a micro-batch takes {:.2f} s in FP8 and {:.2f} s in BF16".format(*small) in page
    saved = [control[phase] - one[phase] for phase in ("step", "update", "sync", "sampling")]
    told = "{:.2f} s with micro-batches of 64, the update gives {:.2f}, the sync {:.2f} and sampling {:.2f}"
    assert told.format(*saved) in page


def test_a_step_of_a_mixture_with_two_copies_in_fp8():
    (run,) = read(f"step-30b-a3b-merged-{H200}")["runs"]
    assert (run["trainer"], run["micro"]) == ("fp8/fp8+replay", 64)
    ((result,),) = (run["results"].values(),)
    steps = result["steps"]
    whole, *parts = (fmean(step[name] for step in steps) for name in ("step", "sampling", "sync", "update"))
    spread = [extreme(step["step"] for step in steps) for extreme in (min, max)]
    told = "a step takes {:.2f} s, {:.2f} to {:.2f}: sampling {:.2f} s, sync {:.2f} s, update {:.2f} s, peak {:.1f} GiB"
    assert told.format(whole, *spread, *parts, result["peak_bytes"] / 2**30) in " ".join(BENCHMARKS.split())


def test_sizes_of_the_experts_kernel():
    found = read(f"decode-30b-a3b-sizes-of-kernels-{H200}")["results"]
    ours, *others = ([row["products"] for row in found[name].values()] for name in ("none", "block", "bf16"))
    cells = [f"{milliseconds:.2f} ms" for milliseconds in ours]
    assert f"| products in FP8, vLLM's sizes without a file | {' | '.join(cells)} |" in BENCHMARKS
    for name, products in zip(("FP8 by blocks", "BF16"), others, strict=True):
        changes = [f"{100 * (new / old - 1):+.1f}%" for new, old in zip(products, ours, strict=True)]
        assert f"| sizes for {name} | {' | '.join(changes)} |" in BENCHMARKS
    (experts,) = (kernel[2] for kernel in found["none"]["64"]["kernels"] if kernel[0] == "fused_moe_kernel")
    stored = 48 * 128 * 3 * 768 * 2048  # bytes
    told = f"take {experts:.2f} of the {ours[1]:.2f} ms, and reading their {stored / 1e9:.1f} GB once, "
    told += f"at the card's 4.8 TB/s, would take {stored / 4.8e9:.2f} ms"
    assert told in " ".join(BENCHMARKS.split())


def test_the_update_of_a_mixture():
    section = BENCHMARKS.partition("\n## A mixture of experts\n")[2].partition("\n## ")[0]
    before, after = (read(f"update-30b-a3b{name}-{H200}") for name in ("", "-experts-summed"))
    before, after = (each["results"]["30b-a3b"] for each in (before, after))
    rows = {
        "BF16": before["bf16"],
        "one copy in FP8": before["fp8/adapter"],
        "one copy in FP8, a token's experts summed in one function": after["fp8/adapter"],
    }
    for name, row in rows.items():
        cells = []
        for tokens in ("4096", "16384"):
            found = row[tokens]
            cells += [f"{found['update']:.3f}", f"{found['gpu_seconds']:.3f}", str(found["launched"])]
        assert cells_of(section, f"{name} |", "| | 4096 tokens |")[1:] == cells

    def seconds(row, name: str) -> float:
        return sum(took for kernel, _, took in row["16384"]["kernels"] if name in kernel)

    products = [seconds(row, "cutlass13device_kernel") for row in (before["bf16"], after["fp8/adapter"])]
    whole = [row["16384"]["gpu_seconds"] for row in (before["bf16"], after["fp8/adapter"])]
    told = "are {:.2f} of the {:.2f} s in BF16, and {:.2f} of the {:.2f} s in FP8"
    assert told.format(products[0], whole[0], products[1], whole[1]) in " ".join(section.split())
    added = seconds(before["fp8/adapter"], "indexFuncLargeIndex")
    assert f"which took {added:.2f} s" in " ".join(section.split())
    assert seconds(after["fp8/adapter"], "indexFuncLargeIndex") == 0


def test_sampling_while_training():
    raw, page = read(f"async-7b-one-card-{H200}"), " ".join(BENCHMARKS.split())
    found, logged = raw["found"], raw["logged"]
    told = "An update took {:.1f} s, the median of six ({:.1f} to {:.1f} s), for {:,.0f} trained tokens, of age {:.1f}."
    seconds = found["seconds"]
    middle = [median(found[name]) for name in ("seconds", "tokens", "age")]
    assert told.format(middle[0], min(seconds), max(seconds), *middle[1:]) in page and len(seconds) == 6
    assert sum(waited < 0.001 for waited in found["waited"]) == 5 and "Five of the six waited for no sample" in page
    first, *others = logged["perf/weight_sync_transfer_s"]
    assert f"in {min(others):.2f} to {max(others):.2f} s (without the first, {first:.2f} s)" in page
    first, *others = logged["perf/fwd_bwd_s"]
    assert f"passes took {first:.1f} s, those of the others {min(others):.1f} to {max(others):.1f} s" in page
    slower = f"beside a sampling server took {min(others) / first:.1f} to {max(others) / first:.1f} times as long as"
    assert f"the passes of an update {slower} those of the first one" in " ".join(TEXTS["docs/async.md"].split())
    assert (
        f"commit {raw['commit']}, load {raw['load']:.1f}" in page and raw["command"].split("--completions")[1] in page
    )


def test_sampling_while_training_beside_steps():
    raw, steps = read(f"async-7b-one-card-64x1024-{H200}"), read(f"step-7b-geometric-64x1024-{H200}")
    assert raw["commit"] == steps["commit"] and raw["commit"] in BENCHMARKS
    (lengths,) = steps["lengths"].values()
    tokens = [sum(of_step) for of_step in lengths[1:]]  # the first one warms up
    rows = {}
    for run in steps["runs"]:
        (found,) = run["results"].values()
        rows[run["trainer"]] = [step["step"] for step in found["steps"]], tokens
    rows["async"] = raw["found"]["seconds"], raw["found"]["tokens"]
    rates = {name: sum(trained) / sum(seconds) for name, (seconds, trained) in rows.items()}
    names = {"trl-control": "TRL's control, BF16, synchronous", "fp8": "`fp8`, synchronous"}
    for name, (seconds, trained) in rows.items():
        numbers = f"{fmean(seconds):.2f} s | {min(seconds):.2f}, {max(seconds):.2f} s | {fmean(trained):,.0f}"
        assert f"| {names.get(name, '`fp8`, asynchronous')} | {numbers} | {rates[name]:,.0f} |" in BENCHMARKS
    ratio = f"{rates['async'] / rates['fp8']:.2f}"
    assert f"tokens a second compare them: {ratio}x" in BENCHMARKS
    assert f"on {ratio} times as many tokens a second as" in " ".join(TEXTS["docs/async.md"].split())
    idle, busy = [], []
    for seconds in raw["logged"]["perf/fwd_bwd_s"]:
        (idle if seconds < 4 else busy).append(seconds)
    told = f"took {min(idle):.1f} to {max(idle):.1f} s where enough samples waited and the server was idle, and"
    assert f"{told} {min(busy):.1f} to {max(busy):.1f} s while it sampled" in " ".join(BENCHMARKS.split())
    waiting = [size for size in raw["logged"]["sample/rollout_queue_size"] if size > 90]
    assert len(waiting) == len(idle) - 1  # and the first update, before which the server had not begun to sample more
    _, *syncs = raw["logged"]["perf/weight_sync_transfer_s"]
    assert f"A sync took {min(syncs):.2f} to {max(syncs):.2f} s without the first one" in BENCHMARKS
    assert f"The mean age was {fmean(raw['found']['age']):.1f}." in BENCHMARKS
    assert f"longer than {max(raw['found']['waited']):.2f} s for samples" in BENCHMARKS


def test_trainers_that_sample_while_training():
    raw = read(f"async-7b-one-card-trainers-{H200}")
    steps = read(f"step-7b-geometric-64x1024-in-flight-{H200}")
    assert raw["commit"] == steps["commit"] and f"commit {raw['commit']}" in BENCHMARKS
    (run,) = steps["runs"]
    (found,) = run["results"].values()
    partial = found["in_flight"][1:]  # the first one warms up
    seconds = [step["step"] for step in found["steps"]]
    tokens = [64 * step["completions/mean_length"] for step in partial]
    rows = {"`fp8`, `rollouts_in_flight=2`": (seconds, tokens, [step["rollouts/age"] for step in partial])}
    names = {"trl-async": "TRL's asynchronous, BF16", "bf16": "BF16, asynchronous", "fp8": "`fp8`, asynchronous, again"}
    logged = {}
    for each in raw["runs"]:
        trainer = each["found"]["trainer"]
        rows[names[trainer]] = [each["found"][name] for name in ("seconds", "tokens", "age")]
        logged[trainer] = each["logged"]
    rates = {name: sum(tokens) / sum(seconds) for name, (seconds, tokens, _) in rows.items()}
    for name, (seconds, tokens, age) in rows.items():
        numbers = f"{fmean(seconds):.2f} s | {min(seconds):.2f}, {max(seconds):.2f} s | {fmean(tokens):,.0f}"
        assert f"| {name} | {numbers} | {rates[name]:,.0f} | {fmean(age):.1f} |" in BENCHMARKS
    ratio = f"{rates['`fp8`, `rollouts_in_flight=2`'] / rates[names['fp8']]:.2f}"
    assert f"trained on {ratio} times as many tokens a second as the asynchronous trainer" in BENCHMARKS
    assert f"trained on {ratio} times as many as the asynchronous one" in " ".join(TEXTS["docs/async.md"].split())
    (partly, of_partly, _), (apart, of_apart, _) = rows["`fp8`, `rollouts_in_flight=2`"], rows[names["fp8"]]
    assert f"By updates alone it is {fmean(apart) / fmean(partly):.2f} times" in BENCHMARKS
    assert f"{fmean(of_partly) / 64:.0f} tokens in the mean instead of {fmean(of_apart) / 64:.0f}." in BENCHMARKS
    dropped = sum(count or 0 for count in logged["trl-async"]["sample/dropped_stale_total"][1:])
    updates = len(rows[names["trl-async"]][0])
    assert f"trained on {64 * updates} samples and dropped {dropped:.0f} as older" in BENCHMARKS
    waits = sorted(wait for wait in logged["trl-async"]["perf/rollout_wait_s"][1:] if wait > 1)
    counts = dict(zip(logged["trl-async"]["sample/dropped_stale_total"], logged["trl-async"]["perf/rollout_wait_s"]))
    assert sorted(counts[count] for count in sorted(count or 0 for count in counts)[-2:]) == waits
    assert f"it waited, twice, for {waits[0]:.1f} and {waits[1]:.1f} s" in BENCHMARKS and len(waits) == 2
    sent = [logged[name]["perf/weight_sync_transfer_s"][1:] for name in names]
    theirs, ours = sent[0], sent[1] + sent[2]
    told = f"its adapter in {min(theirs):.2f} to {max(theirs):.2f} s, ours the merged weights in {min(ours):.2f} to"
    assert f"{told} {max(ours):.2f} s" in BENCHMARKS
    loads = [run["load"][0], *(each["load"] for each in raw["runs"])]
    assert f"load {min(loads):.1f} to {sorted(loads)[-2]:.1f}, and {max(loads)} in the last minute" in BENCHMARKS


def test_how_busy_a_card_is_that_samples_and_trains():
    raw, page = read(f"async-7b-one-card-watched-{H200}"), " ".join(BENCHMARKS.split())
    (run,) = raw["runs"]
    found, logged = run["found"], run["logged"]
    assert f"commit {raw['commit']}, vLLM {raw['vllm'][:4]}, load {run['load']:.1f}" in page
    busy = [row[2] for row in found["cards"]]
    low = sum(each < 50 for each in busy) / len(busy)
    assert f"busy for {fmean(busy):.0f}% of the time in the mean, and for less than half of it in {low:.0%} of" in page
    _, *syncs = logged["perf/weight_sync_s"]
    seconds = found["seconds"]
    assert (
        f"A sync took {min(syncs):.2f} to {max(syncs):.2f} s, of {fmean(seconds):.2f} s an update in the mean" in page
    )
    rate = sum(found["tokens"]) / sum(seconds)
    told = f"took {min(seconds):.2f} to {max(seconds):.2f} s, {rate:,.0f} trained tokens a second, at an age of"
    assert f"{told} {fmean(found['age']):.1f}." in page
    passes = [both for _, both in sorted(zip(seconds, logged["perf/fwd_bwd_s"][1:], strict=True))]
    others = f"in the others {min(passes[2:]):.1f} to {max(passes[2:]):.1f} s"
    assert f"In the two short ones the passes took {passes[0]:.1f} and {passes[1]:.1f} s, {others}." in page
    assert f"Trainer and server held {max(row[3] for row in found['cards']) / 1024:.1f} GiB together" in page
