"""The figures of the second host's steps are those of the raw files."""

from statistics import median

import pytest
from figures import BENCHMARKS, H200, MEASURED, TRAINING, cells_of, middle, read, times
from pages import README, ROOT


SHAPES = ("64x4096 lognormal", "64x1024 equal", "256x512 equal")
LONG, FEW, MANY = SHAPES
# Trainer -> its rows on the docs' and on the benchmarks' page
ROWS = {
    "trl": ("TRL, BF16", "TRL's BF16"),
    "trl-liger": ("TRL with Liger, without its scoring pass", "TRL's with Liger, no scoring"),
    "bf16": ("ours, BF16", "ours, `bf16`"),
    "fp8": ("ours, sampled in `fp8`, trained in BF16", "ours, sampled in `fp8`"),
    "fp8/fp8": ("ours, sampled and trained in `fp8`", "ours, `fp8`"),
    "fp8/fp8+liger": ("the same with Liger", "ours, `fp8`, Liger"),
    "int8/int8/exact": ("ours, `int8` with `exact_rollouts`", "ours, `int8`, exact"),
}
TEXT, PAGE = " ".join(MEASURED.split()), " ".join(BENCHMARKS.split())


def steps(name: str) -> dict[str, dict[str, dict]]:
    """Results by trainer and shape."""
    found = {run["trainer"]: run["results"] for run in read(f"step-7b-{name}-{H200}")["runs"]}
    assert all(len(result["steps"]) == 5 for results in found.values() for result in results.values())
    return found


RUNS, WEIGHTS, FIRST = steps("another-host"), steps("weights"), steps("all")


def seconds(trainer: str, shape: str, phase: str = "step") -> float:
    return middle(RUNS[trainer][shape], phase)


def unscored(result: dict) -> float:
    """Seconds of a step without its scoring pass."""
    return median(step["step"] - step["scoring"] for step in result["steps"])


def gains(trainer: str) -> list[str]:
    """Against TRL's two shapes, against these without scoring, and against ours in BF16."""
    theirs = [seconds("trl", shape) for shape in (FEW, MANY)] + [unscored(RUNS["trl"][shape]) for shape in (FEW, MANY)]
    bf16 = [seconds("bf16", shape) for shape in SHAPES]
    own = [seconds(trainer, shape) for shape in (FEW, MANY, FEW, MANY, *SHAPES)]
    return times(base / mine for base, mine in zip([*theirs, *bf16], own, strict=True))


@pytest.mark.parametrize("trainer", ROWS)
def test_steps(trainer):
    start, _ = ROWS[trainer]
    cells = [f"{seconds(trainer, shape):.2f} s" if shape in RUNS[trainer] else "" for shape in SHAPES]
    assert cells_of(MEASURED, f"{start} |", "| another host |")[1:] == cells
    if not trainer.startswith("trl"):
        assert cells_of(MEASURED, f"{start} |", "| gain, another host |")[1:] == gains(trainer)


@pytest.mark.parametrize("trainer", ROWS)
def test_spread(trainer):
    (load,) = (run["load"][0] for run in read(f"step-7b-another-host-{H200}")["runs"] if run["trainer"] == trainer)
    of = {shape: [step["step"] for step in result["steps"]] for shape, result in RUNS[trainer].items()}
    cells = [f"{min(of[shape]):.2f}, {max(of[shape]):.2f}" if shape in of else "" for shape in SHAPES]
    differences = [result["logp_difference"] for result in RUNS[trainer].values()]
    largest = "" if None in differences else f"{max(differences):.2f}" if max(differences) else "0"
    row = cells_of(BENCHMARKS, f"{ROWS[trainer][1]} |", "| five steps, another host |")
    assert row[1:] == [*cells, largest, f"{load:.1f}"]


def test_what_sampling_alone_gains():
    told = "sampling, which is {:.2f}, {:.2f} and {:.2f} times as fast as in BF16. "
    told = told.format(*(seconds("bf16", shape, "sampling") / seconds("fp8", shape, "sampling") for shape in SHAPES))
    told += (
        "Against TRL's it is {:.2f} times as fast with 64 completions of 1024 tokens, and {:.2f} times with 256 of 512"
    )
    pairs = [(seconds("trl", shape, "sampling"), seconds("fp8", shape, "sampling")) for shape in (FEW, MANY)]
    assert told.format(*(theirs / ours for theirs, ours in pairs)) in TEXT
    theirs, ours = pairs[1]
    alone = read(f"rollout-7b-text-{H200}")["results"]["7b"]
    told = (
        "gained less: {:.2f}x. TRL's sampling took {:.2f} s there and {:.2f} s here. In FP8 it took {:.2f} s there and "
    )
    told += "{:.2f} s here."
    here = [alone[name]["256"]["sample_s"] for name in ("trl", "fp8")]
    assert told.format(theirs / ours, theirs, here[0], ours, here[1]) in PAGE
    update = [seconds("fp8", shape, "update") / seconds("fp8", shape) for shape in (FEW, MANY)]
    assert min(update) > 0.5 and "is most of the step where the completions have equal lengths" in TEXT


def test_what_the_host_costs():
    longer = {
        name: [seconds(name, shape) / middle(FIRST[name][shape], "step") for shape in SHAPES]
        for name in ("fp8/fp8", "bf16")
    }
    told = "take {:.2f}, {:.2f} and {:.2f} times as long as on the first host, those in BF16 {:.2f}, {:.2f} and {:.2f}"
    assert told.format(*longer["fp8/fp8"], *longer["bf16"]) in TEXT
    kernels = {shape: RUNS["fp8/fp8"][shape]["update_kernels"] for shape in SHAPES}
    computes = {shape: sum(took for _, _, took in kernels[shape]) for shape in SHAPES}
    update = {shape: seconds("fp8/fp8", shape, "update") for shape in SHAPES}
    launched = sum(calls for _, calls, _ in kernels[MANY])
    assert f"launches {launched} kernels for an update. The GPU computes for {computes[MANY]:.2f} s of it" in TEXT
    assert f"but the update takes {update[MANY]:.2f} s" in TEXT
    assert f"the GPU computes for {computes[FEW]:.2f} s of {update[FEW]:.2f} s" in TEXT
    # About as many for a micro-batch of few tokens as for one of many: 32 and 8 of them
    assert 0.9 < launched / 32 / (sum(calls for _, calls, _ in kernels[FEW]) / 8) < 1

    def of(*words: str) -> float:
        return sum(took for name, _, took in kernels[FEW] if any(word in name for word in words))

    quantizers = ("rows_kernel", "gradient_kernel", "numbers_kernel", "transpose_kernel")
    rotary = ("BFloat16, c10::BFloat16, c10::BFloat16, at::native::binary_internal::MulFunctor", "neg_kernel")
    rotary += (
        "CatArrayBatchedCopy<",
        "elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::CUDAFunctor_add<c10",
    )
    told = (
        "Of the {:.2f} s at 64 of 1024, products in FP8 take {:.2f} s, attention {:.2f}, quantizers {:.2f}, products "
    )
    told += "in BF16 (the head, adapters) {:.2f}, and rotary embeddings {:.2f}."
    parts = of("nvjet_sm90_qqtst"), of("flash"), of(*quantizers), of("nvjet_sm90_t"), of(*rotary)
    assert told.format(computes[FEW], *parts) in PAGE


def test_what_liger_saves():
    pairs = [(seconds("fp8/fp8+liger", s, "update"), seconds("fp8/fp8", s, "update")) for s in (MANY, FEW)]
    told = "the update takes {:.2f} s instead of {:.2f} s, and {:.2f} s instead of {:.2f} s"
    assert told.format(*pairs[0], *pairs[1]) in TEXT
    spread = [[step["update"] for step in RUNS[name][LONG]["steps"]] for name in ("fp8/fp8", "fp8/fp8+liger")]
    assert abs(median(spread[0]) - median(spread[1])) < max(spread[0]) - min(spread[0])
    whole = [(seconds("fp8/fp8+liger", shape), seconds("fp8/fp8", shape)) for shape in (MANY, FEW)]
    told = (
        "256 completions of 512 tokens took {:.2f} s instead of {:.2f} s, one with 64 of 1024 tokens {:.2f} s instead "
    )
    told += "of {:.2f} s"
    assert told.format(*whole[0], *whole[1]) in TRAINING.replace("\n", " ")
    own, wanted = seconds("fp8/fp8+liger", FEW), seconds("trl", FEW) / 2.3
    assert f"`fp8` with Liger misses {own - wanted:.2f} s of {own:.2f}" in PAGE


def test_readme():
    table = "| what | result | repeat it |"
    few, _, scored, _, _, bf16, _ = gains("fp8")
    row = cells_of(MEASURED, "The 7B policy sampled in FP8 and trained in BF16", table)[1]
    assert row == f"{few} TRL's; {scored} without its scoring pass; {bf16} ours in BF16"
    plain, liger = (" / ".join(gains(name)[:2]) for name in ("fp8/fp8", "fp8/fp8+liger"))
    assert cells_of(MEASURED, "README's second step on another host", table)[1] == f"{plain} TRL's; with Liger {liger}"
    few, many = gains("fp8/fp8")[:2]
    assert f"the gains of `fp8` with completions of equal lengths were {few} and {many} against TRL" in TEXT
    exact = gains("int8/int8/exact")[0]
    row = cells_of(README, f"`exact_rollouts`: log-probabilities of sampler and trainer, {6 * 64 * 1024} tokens", table)
    assert row[1].startswith(f"equal bit for bit; {exact} TRL's step on [another host](")
    told = f"Sampling alone in FP8 then gives little: {bf16[:-1]} times our BF16 with 64 completions of 1024 tokens."
    assert told in " ".join(README.split())
    assert all(result["logp_difference"] == 0 for result in RUNS["int8/int8/exact"].values())


def test_all_weights(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import step_runs

    rows = {"trl": "TRL, BF16", "bf16": "ours, BF16", "fp8_block/fp8_block": "ours, sampled and trained in `fp8_block`"}
    results = {name: results[FEW] for name, results in WEIGHTS.items()}
    step = {name: middle(result, "step") for name, result in results.items()}
    bases = step["trl"], unscored(results["trl"]), step["bf16"]
    for name, start in rows.items():
        against = times(base / step[name] for base in bases)
        against = ["1.00x", "", ""] if name == "trl" else against
        phases = [middle(results[name], phase) for phase in ("sampling", "sync", "scoring", "update")]
        cells = [f"{step[name]:.2f} s", *against, *(f"{taken:.2f} s" if taken else "0" for taken in phases)]
        assert cells_of(MEASURED, f"{start} |", "| all weights |")[1:] == cells
    spread = {name: [each["step"] for each in result["steps"]] for name, result in results.items()}
    told = (
        "`fp8_block` took {:.2f} to {:.2f} s, TRL's trainer {:.2f} to {:.2f} s, and ours in BF16 {:.2f} to {:.2f} s. "
    )
    told += "In this order, torch's peaks are {:.0f}, {:.0f} and {:.0f} GiB"
    order = ("fp8_block/fp8_block", "trl", "bf16")
    ends = [end for name in order for end in (min(spread[name]), max(spread[name]))]
    assert told.format(*ends, *(results[name]["peak_bytes"] / 2**30 for name in order)) in PAGE

    found = read(f"step-7b-weights-{H200}")
    (run,) = (run for run in found["runs"] if run["trainer"] == "fp8_block/fp8_block")
    _, limit = step_runs.limits_of(run, found["machine"], found["arguments"], found["lengths"][FEW][1:])
    own, update = step["fp8_block/fp8_block"], middle(results["fp8_block/fp8_block"], "update")
    missing = own - step["trl"] / 2
    told = (
        "missed by {:.2f} s of {:.2f}. The update runs at {:.0%} of the card's limit in FP8, and would have to run at "
    )
    assert told.format(missing, own, limit / update) + f"{limit / (update - missing):.0%}" in PAGE


def test_the_update_in_other_precisions():
    trl = middle(FIRST["trl"][FEW], "update")
    fp8, exact = (middle(FIRST[name][FEW], "update") for name in ("fp8/fp8", "fp8_block/fp8_block/exact"))
    told = "takes {:.2f} s in TRL, {:.2f} s ({:.2f}x) in `fp8`, and {:.2f} s ({:.2f}x) in exact `fp8_block`"
    assert told.format(trl, fp8, trl / fp8, exact, trl / exact) in PAGE
