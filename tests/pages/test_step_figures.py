"""The figures of the trainers' steps are those of the raw files."""

from statistics import median

import pytest
from figures import BENCHMARKS, H100, H200, MEASURED, PPO, TRAINING, cells_of, middle, read, times
from pages import README, ROOT, TEXTS


SHAPES = {"64x4096 lognormal": "64 of up to 4096", "64x1024 equal": "64 of 1024", "256x512 equal": "256 of 512"}
# Trainer -> its rows on the docs' and on the benchmarks' page
ALL = {
    "trl": ("TRL, BF16", "TRL's BF16"),
    "trl-control": ("the control, BF16", "the control"),
    "bf16": ("ours, BF16", "ours, `bf16`"),
    "fp8/fp8": ("ours, sampled and trained in `fp8`", "ours, `fp8`"),
    "fp8_block/fp8_block/exact": ("ours, `fp8_block` with `exact_rollouts`", "ours, `fp8_block`, exact"),
}


def all_trainers() -> tuple[dict, dict[str, dict[str, dict]]]:
    """The file of steps that all trainers made on one host, and their results by trainer and shape."""
    found = read(f"step-7b-all-{H200}")
    runs = {run["trainer"]: run["results"] for run in found["runs"]}
    assert runs.keys() == ALL.keys() and all(results.keys() == SHAPES.keys() for results in runs.values())
    return found, runs


def ratios(phase: str, first: str, second: str) -> list[float]:
    """How many times as long a phase takes the first trainer, by shape."""
    _, runs = all_trainers()
    return [middle(runs[first][shape], phase) / middle(runs[second][shape], phase) for shape in SHAPES]


def told_as(numbers: list[float]) -> str:
    first, second, third = (f"{number:.2f}" for number in numbers)
    return f"{first}, {second} and {third}"


@pytest.mark.parametrize("shape", SHAPES)
def test_steps_of_all_trainers(shape):
    _, runs = all_trainers()
    completions, _, tokens = SHAPES[shape].partition(" of ")
    table = f"| {completions} completions of {tokens} tokens | step |"
    order = list(ALL)
    for trainer, (start, _) in ALL.items():
        run = runs[trainer][shape]
        assert len(run["steps"]) == 5
        gains = [
            f"{middle(runs[base][shape], 'step') / middle(run, 'step'):.2f}x"
            if order.index(base) <= order.index(trainer)
            else ""
            for base in ("trl", "trl-control", "bf16")
        ]
        phases = [middle(run, phase) for phase in ("sampling", "sync", "scoring", "update")]
        cells = [
            f"{middle(run, 'step'):.2f} s",
            *gains,
            *(f"{seconds:.2f} s" if seconds else "0" for seconds in phases),
        ]
        assert cells_of(MEASURED, start, table)[1:] == cells


def test_spread_of_all_trainers():
    found, runs = all_trainers()
    loads = {run["trainer"]: run["load"][0] for run in found["runs"]}
    for trainer, (_, start) in ALL.items():
        steps = [[step["step"] for step in runs[trainer][shape]["steps"]] for shape in SHAPES]
        cells = [f"{min(each):.2f}, {max(each):.2f}" for each in steps]
        cells += [f"{runs[trainer][shape]['peak_bytes'] / 2**30:.0f}" for shape in SHAPES]
        differences = [runs[trainer][shape]["logp_difference"] for shape in SHAPES]
        largest = None if None in differences else max(differences)
        cells += ["" if largest is None else f"{largest:.2f}" if largest else "0", f"{loads[trainer]:.1f}"]
        assert cells_of(BENCHMARKS, f"{start} |", "| five steps | fastest, slowest: 64 of up")[1:] == cells
    before = {run["trainer"]: run["results"] for run in read(f"step-7b-lognormal-64x4096-{H200}")["runs"]}
    shape = next(iter(SHAPES))
    bf16, fp8 = (
        abs(middle(runs[name][shape], "step") / middle(before[name][shape], "step") - 1) for name in ("bf16", "fp8/fp8")
    )
    assert bf16 < 0.01 < fp8 < 0.06 and "`bf16` was within 1% and `fp8` within 6%" in " ".join(BENCHMARKS.split())


def test_causes_of_the_gain():
    causes = {
        "no scoring pass": ratios("step", "trl", "trl-control"),
        "no padding": ratios("step", "trl-control", "bf16"),
        "FP8 in sampling": ratios("step", "bf16", "fp8/fp8"),
    }
    for start, each in causes.items():
        assert cells_of(MEASURED, start, "| cause |")[1:4] == times(each)
    text = MEASURED.replace("\n", " ")
    assert f"ours samples in {told_as(ratios('sampling', 'bf16', 'trl'))} of TRL's time" in text
    prompt, each = 256, 8
    positions = [(prompt / each + new) / (prompt + new) for new in (1024, 512)]
    of_the_control = ratios("update", "bf16", "trl-control")[1:]
    told = (
        "have {:.2f} and {:.2f} of its positions, and the update in BF16 takes {:.2f} and {:.2f} of the control's time"
    )
    assert told.format(*positions, *of_the_control) in text
    sampling, update = (told_as(ratios(phase, "bf16", "fp8/fp8")) for phase in ("sampling", "update"))
    assert f"makes sampling {sampling} times as fast, and the update {update} times" in text
    found, runs = all_trainers()
    fp8 = runs["fp8/fp8"]["64x4096 lognormal"]
    assert f"sampling is then {middle(fp8, 'sampling') / middle(fp8, 'step'):.0%} of the step" in text
    lengths = found["lengths"]["64x4096 lognormal"][1:]
    padding = [1 - sum(each) / (len(each) * max(each)) for each in lengths]
    assert f"{min(padding):.0%} to {max(padding):.0%} of the positions are padding" in text
    assert all(result["logp_difference"] == 0 for result in runs["fp8_block/fp8_block/exact"].values())

    speed = README.partition("## Install")[0].replace("\n", " ")
    gain, equal, _ = ratios("step", "trl", "fp8/fp8")
    trl = runs["trl"]["64x4096 lognormal"]
    assert f"{gain:.2f} times as fast as TRL's: {middle(fp8, 'step'):.1f} s, not {middle(trl, 'step'):.1f}. " in speed
    scoring, rows, precision = (each[0] for each in causes.values())
    assert f"gives {scoring:.2f}, " in speed and f"give {rows:.2f}. FP8 gives the other {precision:.2f}." in speed
    assert f"no padding to save, and the step is {equal:.2f} times as fast" in speed
    by_baseline = [times(ratios("step", base, "fp8/fp8")) for base in ("trl", "trl-control", "bf16")]
    table = "| what | result | repeat it |"
    told = "{} TRL's; {} TRL's without its scoring pass; {} ours in BF16".format(*(each[0] for each in by_baseline))
    assert cells_of(README, "Step of a 7B LoRA policy, sampled and trained in FP8, 64", table)[1] == told
    others = "; ".join(" / ".join(each[1:]) for each in by_baseline)
    assert cells_of(README, "The same, 64 completions of 1024 tokens / 256 of 512", table)[1] == others


def test_what_the_missed_aim_would_take(monkeypatch):
    """2.3 times TRL's speed with 64 completions of 1024 tokens."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import step_runs

    found, runs = all_trainers()
    trl, fp8 = (runs[name]["64x1024 equal"] for name in ("trl", "fp8/fp8"))
    missing = middle(fp8, "step") - middle(trl, "step") / 2.3
    (run,) = [run for run in found["runs"] if run["trainer"] == "fp8/fp8"]
    lengths = found["lengths"]["64x1024 equal"][1:]
    _, limit = step_runs.limits_of(run, found["machine"], found["arguments"], lengths)
    on_the_gpu = read(f"decode-7b-{H200}")["results"]["fp8"]["64"]["GPU"]
    told = "is missed by {:.2f} s of {:.2f}. There a decode step takes {:.1f} ms. The GPU computes for {:.1f} ms of it "
    told += "(in [another run](#tokens-per-second)). "
    told += "The update runs at {:.0%} of the card's limit in FP8. A decode step of {:.1f} ms, or an update at {:.0%} "
    told += "of the limit"
    sampling, update = middle(fp8, "sampling"), middle(fp8, "update")
    told = told.format(
        missing,
        middle(fp8, "step"),
        sampling / 1.024,
        on_the_gpu,
        limit / update,
        (sampling - missing) / 1.024,
        limit / (update - missing),
    )
    assert told in " ".join(BENCHMARKS.split())


def test_syncs_in_these_steps():
    _, runs = all_trainers()
    seconds = {name: sorted(middle(run, "sync") for run in results.values()) for name, results in runs.items()}
    between = {name: f"{each[0]:.2f} to {each[-1]:.2f} s" for name, each in seconds.items()}
    text = MEASURED.replace("\n", " ")
    assert f"ours {between['fp8/fp8']} in `fp8`" in text and f"{seconds['trl'][0]:.2f} s, ours" in text
    exact = between["fp8_block/fp8_block/exact"]
    assert f"{exact} in `fp8_block`, which vLLM reloads" in text
    first = runs["fp8/fp8"]["256x512 equal"]["warm_up"]["sync"]
    text = " ".join(BENCHMARKS.split())
    assert f"the first sync in `fp8` took {first:.2f} s, and later ones {between['fp8/fp8']}" in text
    assert f"vLLM still reloads: {exact}" in text and f"TRL's took {seconds['trl'][-1]:.2f} s" in text


def test_steps_of_32b(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import step_runs

    found = read(f"step-32b-{H200}")
    runs = {run["trainer"]: run for run in found["runs"]}
    assert {name: run["micro"] for name, run in runs.items()} == {"trl": 2, "nvfp4/nvfp4": 16, "fp8/fp8/adapter": 16}
    names = {
        "trl": ("TRL, BF16", "TRL's BF16"),
        "nvfp4/nvfp4": ("NVFP4 base", "NVFP4 base"),
        "fp8/fp8/adapter": ('FP8 base, `lora_sync="adapter"`', "FP8 base, adapter beside it"),
    }
    gains: dict[str, list[list[str]]] = {name: [] for name in names}
    for completions in (8, 64):
        shape = f"{completions}x512 equal"
        trl = runs["trl"]["results"][shape]
        unscored = median(step["step"] - step["scoring"] for step in trl["steps"])
        for name, (start, _) in names.items():
            result = runs[name]["results"][shape]
            own = middle(result, "step")
            assert len(result["steps"]) == 5
            gains[name].append(times([middle(trl, "step") / own, unscored / own]))
            phases = [middle(result, phase) for phase in ("sampling", "scoring", "update")]
            cells = [f"{own:.2f} s", *(["1.00x", ""] if name == "trl" else gains[name][-1])]
            cells += [f"{seconds:.2f} s" if seconds else "0" for seconds in phases]
            cells.append(f"{result['peak_bytes'] / 2**30:.0f} GiB")
            row = cells_of(MEASURED, f"{start} | {completions} |", "| 32B | completions |")
            assert row[2:] == cells
    words = (" TRL's", " without its scoring pass")
    for name, page, start in (
        ("fp8/fp8/adapter", README, "Step of a 32B LoRA policy on an FP8 base"),
        ("nvfp4/nvfp4", MEASURED, "Step of a 32B LoRA policy on an NVFP4 base"),
    ):
        told = [" / ".join(each) for each in zip(*gains[name], strict=True)]
        row = cells_of(page, start, "| what | result | repeat it |")
        assert row[1] == "; ".join(each + word for each, word in zip(told, words))
    for name, (_, start) in names.items():
        cells = []
        for completions in (64, 8):
            steps = [step["step"] for step in runs[name]["results"][f"{completions}x512 equal"]["steps"]]
            cells.append(f"{min(steps):.2f}, {max(steps):.2f}")
        largest = max(result["logp_difference"] for result in runs[name]["results"].values())
        assert cells_of(BENCHMARKS, f"{start} |", "| 32B, five steps |")[1:] == [*cells, f"{largest:.2f}"]
    many = [gains[name][1][0][:-1] for name in ("nvfp4/nvfp4", "fp8/fp8/adapter")]
    text = TRAINING.replace("\n", " ")
    assert f"is [{many[0]} times as fast](results.md#a-base-in-4-or-8-bits) as TRL's" in text
    peaks = [runs[name]["results"]["64x512 equal"]["peak_bytes"] for name in ("nvfp4/nvfp4", "fp8/fp8/adapter")]
    more = (peaks[1] - peaks[0]) / 2**30
    assert f"makes it {many[1]} times as fast, and needs {more:.0f} GiB more" in text

    # What 1.8 times TRL's speed would take with 8 completions
    shape = "8x512 equal"
    run = runs["fp8/fp8/adapter"]
    fp8, trl = run["results"][shape], runs["trl"]["results"][shape]
    sampling, own = middle(fp8, "sampling"), middle(fp8, "step")
    limit, _ = step_runs.limits_of(run, found["machine"], found["arguments"], found["lengths"][shape][1:])
    told = (
        "sampling takes {:.2f} s of {:.2f}: a decode step takes {:.1f} ms, of which reading the weights takes {:.1f}. "
    )
    told += "To meet the aim, a decode step would have to take {:.1f} ms."
    wanted = sampling - (own - middle(trl, "step") / 1.8)
    told = told.format(sampling, own, sampling / 0.512, limit / 0.512, wanted / 0.512)
    assert told in " ".join(BENCHMARKS.split())


def test_steps_of_7b_on_a_4_bit_base():
    found = read(f"step-7b-nvfp4-{H200}")
    runs = {run["trainer"]: run["results"] for run in found["runs"]}
    both, text = {"trl": "TRL, BF16", "nvfp4/nvfp4": "NVFP4 base"}, " ".join(MEASURED.split())
    updates, samplings = [], []
    for completions in (8, 64):
        trl, ours = (runs[name][f"{completions}x512 equal"] for name in both)
        unscored = median(step["step"] - step["scoring"] for step in trl["steps"])
        for (name, start), result in zip(both.items(), (trl, ours), strict=True):
            steps, own = [step["step"] for step in result["steps"]], middle(result, "step")
            assert len(steps) == 5
            cells = [f"{own:.2f} s", f"{min(steps):.2f}, {max(steps):.2f} s"]
            cells += ["1.00x", ""] if name == "trl" else times([middle(trl, "step") / own, unscored / own])
            phases = [middle(result, phase) for phase in ("sampling", "scoring", "update")]
            cells += [f"{seconds:.2f} s" if seconds else "0" for seconds in phases]
            assert cells_of(MEASURED, f"{start} | {completions} |", "| 7B | completions |")[2:] == cells
        updates.append(middle(ours, "update") / middle(trl, "update"))
        samplings.append(middle(ours, "sampling") / middle(trl, "sampling"))
    told = "The update takes {:.2f} and {:.2f} of TRL's time, and prompts that are computed once leave {:.2f} of TRL's"
    prompt, generations = found["arguments"]["prompt"], found["arguments"]["generations"]
    positions = (prompt / generations + 512) / (prompt + 512)
    assert told.format(*reversed(updates), positions) in text
    told = "Sampling takes {:.2f} times as long as in BF16 with 8 completions, and {:.2f} times with 64."
    assert told.format(*samplings) in text
    few = middle(runs["nvfp4/nvfp4"]["8x512 equal"], "sampling")
    rate = 8 * 512 / few
    told = f"in {few:.2f} s, which is {rate:.0f} per second and would be {1 - rate / 2229:.0%}"
    assert told in " ".join(BENCHMARKS.split())


def test_longer_steps_on_an_h100():
    runs = {run["trainer"]: run for run in read(f"step-7b-lognormal-64x4096-{H100}")["runs"]}
    trl, ours = (runs[name]["results"]["64x4096 lognormal"] for name in ("trl", "fp8/fp8"))
    unscored = median(each["step"] - each["scoring"] for each in trl["steps"])
    for told, benchmark, run in (
        ("TRL, BF16 |", "TRL's BF16, H100 |", trl),
        ("ours, sampled and trained in `fp8`", "ours, `fp8`, H100 |", ours),
    ):
        own, steps = middle(run, "step"), [each["step"] for each in run["steps"]]
        assert len(steps) == 5
        phases = [f"{middle(run, phase):.2f}" for phase in ("sampling", "sync", "scoring", "update")]
        phases[2] = phases[2] if run is trl else "0"
        gains = ["1.00x", ""] if run is trl else times([middle(trl, "step") / own, unscored / own])
        seconds = [f"{phase} s" if phase != "0" else "0" for phase in (phases[0], *phases[2:])]
        assert cells_of(MEASURED, told, "| trainer, on an H100 |")[1:] == [f"{own:.2f} s", *gains, *seconds]
        cells = [f"{own:.2f}", f"{min(steps):.2f}, {max(steps):.2f}", *gains, *phases]
        cells.append(f"{run['peak_bytes'] / 2**30:.0f}")
        assert cells_of(BENCHMARKS, benchmark)[1:] == cells
    told = cells_of(MEASURED, "README's first step on an H100")[1]
    assert told == f"{gains[0]} TRL's; {gains[1]} without TRL's scoring pass"


def test_ours_on_another_h100():
    ours = read(f"step-7b-lognormal-64x4096-ours-{H100}")
    before = read(f"step-7b-lognormal-64x4096-{H100}")
    steps = {run["trainer"]: run["results"]["64x4096 lognormal"] for run in (*ours["runs"], *before["runs"])}
    assert ours["lengths"] == before["lengths"] and ours["machine"] == before["machine"]
    bf16, exact = steps["bf16"], steps["fp8_block/fp8_block/exact"]
    for told, benchmark, run in (
        ("BF16 |", "`bf16`, H100", bf16),
        ("`fp8_block` with", "`fp8_block`, exact rollouts, H100", exact),
    ):
        own, seconds = middle(run, "step"), [each["step"] for each in run["steps"]]
        assert len(seconds) == 5
        (gain,) = times([middle(bf16, "step") / own])
        sampling, sync, update = (f"{middle(run, phase):.2f}" for phase in ("sampling", "sync", "update"))
        cells = cells_of(MEASURED, told, "| ours, on another host |")[1:]
        assert cells == [f"{own:.2f} s", gain, f"{sampling} s", f"{update} s"]
        cells = [f"{own:.2f}", f"{min(seconds):.2f}, {max(seconds):.2f}", gain, sampling, sync, update]
        assert cells_of(BENCHMARKS, benchmark)[1:] == [*cells, f"{run['peak_bytes'] / 2**30:.0f}"]
    step = {name: middle(run, "step") for name, run in steps.items()}
    told = "ours in BF16 is {:.2f} times as fast as TRL, and `fp8` {:.2f} times as fast as ours in BF16"
    assert told.format(step["trl"] / step["bf16"], step["bf16"] / step["fp8/fp8"]) in MEASURED.replace("\n", " ")
    assert exact["logp_difference"] == 0


@pytest.mark.parametrize(
    ("name", "table", "baseline", "rows"),
    [
        (
            f"rloo-{H200}",
            "RLOO",
            "rloo:trl",
            {
                "rloo:trl": "TRL's RLOO, BF16",
                "rloo:bf16": "ours, RLOO, BF16",
                "rloo:fp8/fp8": "ours, RLOO, `fp8`",
            },
        ),
        (f"ppo-{H100}", "PPO", "ppo:bf16", {"ppo:bf16": "ours, PPO, BF16", "ppo:fp8/fp8": "ours, PPO, `fp8`"}),
        (
            f"qat-{H100}",
            "GRPO, all weights",
            "bf16",
            {"bf16": "ours, GRPO, all weights in BF16", "nvfp4/nvfp4": "ours, GRPO, all weights for NVFP4"},
        ),
    ],
)
def test_other_trainers(name, table, baseline, rows):
    runs = {run["trainer"]: run["results"]["64x512 equal"] for run in read(f"step-7b-{name}")["runs"]}
    for trainer, start in rows.items():
        run = runs[trainer]
        assert len(run["steps"]) == 5
        gain = middle(runs[baseline], "step") / middle(run, "step")
        phases = [middle(run, phase) for phase in ("sampling", "sync", "scoring", "update")]
        steps = [each["step"] for each in run["steps"]]
        cells = [f"{median(steps):.2f} s", f"{min(steps):.2f}, {max(steps):.2f} s", f"{gain:.2f}x"]
        cells += [f"{each:.2f} s" if each else "0" for each in phases]
        assert cells_of(MEASURED, start, f"| {table} | step |")[1:] == cells
    if name.startswith("ppo"):
        assert f"[{gain:.2f} times as fast](results.md#other-trainers)" in PPO.replace("\n", " ")
    elif name.startswith("qat"):
        assert f"[{1 / gain:.2f} times as long]" in TRAINING
        sampling = middle(runs["bf16"], "sampling") / middle(runs["nvfp4/nvfp4"], "sampling")
        assert f"sampling is {sampling:.2f} times as fast, but" in MEASURED.replace("\n", " ")
    else:
        step = [middle(runs[trainer], "step") for trainer in rows]
        shared, precision = step[0] / step[1], step[1] / step[2]
        told = (
            "[{:.2f} times as fast](results.md#other-trainers) as TRL's: {:.2f} times in BF16, most of it by prompts "
        )
        told += "that are computed once, and {:.2f} times by FP8."
        assert told.format(gain, shared, precision) in TEXTS["docs/rloo.md"].replace("\n", " ")
        text = MEASURED.replace("\n", " ")
        assert f"two parts: ours in BF16 ({shared:.2f}x), and FP8 ({precision:.2f}x against that)" in text
        trl, bf16 = (runs[trainer] for trainer in list(rows)[:2])
        scoring, update = (middle(bf16, phase) / middle(trl, phase) for phase in ("scoring", "update"))
        prompt, new, each = 256, 512, 8
        positions = (prompt / each + new) / (prompt + new)
        told = f"compute {positions:.2f} of TRL's positions; they take {scoring:.2f} and {update:.2f} of its time"
        assert told in text
        told = f"{gain:.2f}x TRL's; {precision:.2f}x ours in BF16, whose prompts are computed once too"
        assert cells_of(MEASURED, "Step of RLOO, sampled and trained in FP8")[1] == told


def test_differences_of_log_probabilities_in_those_steps():
    found: dict[str, list[float]] = {}
    for name in (f"lognormal-64x4096-ours-{H100}", f"ppo-{H100}", f"qat-{H100}", f"rloo-{H200}"):
        for run in read(f"step-7b-{name}")["runs"]:
            (result,) = run["results"].values()
            found.setdefault(run["trainer"].rpartition(":")[2], []).append(result["logp_difference"])
    told = "largest difference between vLLM and trainer in the log-probability of a sampled token was {:.2f} nats in "
    told += "BF16, {:.2f} where all weights were trained for NVFP4, {:.2f} in `fp8`"
    largest = (max(found[name]) for name in ("bf16", "nvfp4/nvfp4", "fp8/fp8"))
    assert told.format(*largest) in BENCHMARKS.replace("\n", " ")


def test_limits_of_all_trainers(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import step_runs

    found, runs = all_trainers()
    for run in found["runs"]:
        if (name := {"bf16": "BF16", "fp8/fp8": "`fp8`"}.get(run["trainer"])) is None:
            continue
        for shape, completions in SHAPES.items():
            lengths = found["lengths"][shape][1:]
            limits = step_runs.limits_of(run, found["machine"], found["arguments"], lengths)
            pairs = zip((middle(runs[run["trainer"]][shape], phase) for phase in ("sampling", "update")), limits)
            written = [f"{seconds:.2f} s" for pair in pairs for seconds in pair]
            assert cells_of(MEASURED, f"{name}, {completions} |", "| trainer, completions |")[1:] == written


def test_where_sampling_takes_its_time(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from limits import cache_bytes, weight_bytes

    lengths = all_trainers()[0]["lengths"]["64x4096 lognormal"]
    left = [sum(length > step for length in each) for each in lengths[1:] for step in range(max(each))]
    shares = [sum(count <= most for count in left) / len(left) for most in (16, 8)]
    assert (
        "{:.0%} of the decode steps have at most 16 completions left, and {:.0%} at most 8".format(*shares) in MEASURED
    )
    sampled = read(f"rollout-7b-text-{H200}")["results"]["7b"]["fp8"]
    batches = (8, 64, 256)
    table = MEASURED.partition("## Where sampling takes its time")[2]
    decode = [f"{sampled[str(batch)]['profile']['decode']:.1f} ms" for batch in batches]
    assert cells_of(table, "a decode step")[1:] == decode
    middle_length = 256 + 512 // 2
    read_bytes = [weight_bytes("7b", "fp8") + batch * middle_length * cache_bytes("7b") for batch in batches]
    assert cells_of(table, "its limit")[1:] == [f"{each / 4.8e9:.1f} ms" for each in read_bytes]
    seconds = [sampled[str(batch)]["sample_s"] for batch in batches]
    assert cells_of(table, "512 tokens of each")[1:] == [f"{each:.2f} s" for each in seconds]
    assert f"four times as many take {seconds[2] / seconds[1]:.2f} times as long" in table


def test_decode_steps_by_kernel(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from limits import weight_bytes

    found = read(f"decode-7b-{H200}")["results"]
    for batch in ("1", "8", "64", "256"):
        cells = [f"{found[kind][batch][part]:.1f}" for part in ("GPU", "products") for kind in ("bf16", "fp8", "w4a8")]
        assert cells_of(MEASURED, f"{batch} |", "| completions | BF16 | `fp8` | W4A8 |")[1:] == cells
        assert found["w4a8"][batch]["products"] > found["fp8"][batch]["products"]
    eight, head = found["fp8"]["8"], 2 * 152064 * 3584
    least = (weight_bytes("7b", "fp8") - head) / 4.8e9
    told = "products take {:.1f} ms of {:.1f} (reading the weights of all layers takes {:.1f}), quantizers, norms and "
    told += "activations {:.1f}, attention {:.1f}, the head {:.1f}, and sampling with log-probabilities {:.1f}. If "
    told += "products alone reached their limit, a step would take {:.1f} ms."
    parts = (eight[part] for part in ("other", "attention", "head", "after"))
    told = told.format(eight["products"], eight["GPU"], least, *parts, eight["GPU"] - eight["products"] + least)
    assert told in MEASURED.replace("\n", " ")


def test_decode_steps_with_other_kernels():
    found = read(f"decode-7b-kernels-{H200}")["results"]
    kinds = ("fp8", "fp8 vllm's kernels", "fp8 vllm's kernels, fused", "fp8 cublas")
    for batch in ("8", "64"):
        times = [found[kind][batch]["GPU"] for kind in kinds]
        header = "| completions | `fp8` | vLLM's own kernels"
        assert cells_of(MEASURED, f"{batch} |", header)[1:] == [f"{each:.2f}" for each in times]
        assert times[0] == min(times)


def test_a_step_in_both_orders():
    names = {"trl": "TRL, BF16", "bf16": "ours, BF16", "fp8/fp8": "ours, sampled and trained in `fp8`"}
    longer, gains, loads = {}, {}, {}
    for host in ("", "-sixth-host"):
        runs = read(f"step-7b-order{host}-{H200}")["runs"]
        assert [run["trainer"] for run in runs] == ["trl", "bf16", "fp8/fp8", "fp8/fp8", "bf16"]
        found: dict[str, list] = {}
        for run in runs:
            (result,) = run["results"].values()
            assert len(result["steps"]) == 5
            found.setdefault(run["trainer"], []).append(result)
        steps = {kind: [middle(result, "step") for result in results] for kind, results in found.items()}
        longer[host] = sorted(steps[kind][1] / steps[kind][0] - 1 for kind in ("bf16", "fp8/fp8"))
        taken = [[step["step"] for step in result["steps"]] for kind in ("bf16", "fp8/fp8") for result in found[kind]]
        assert min(max(each) / min(each) - 1 for each in taken) > max(map(abs, longer[host]))
        gains[host], loads[host] = steps["trl"][0] / steps["fp8/fp8"][0], [run["load"][0] for run in runs]
        for kind, name in names.items() if host == "" else ():
            cells = [f"{steps[kind][0]:.2f} s", f"{steps[kind][1]:.2f} s" if len(steps[kind]) == 2 else ""]
            for phase in ("sampling", "update"):
                cells.append(", ".join(f"{middle(result, phase):.2f}" for result in found[kind]) + " s")
            cells.append(f"{steps['trl'][0] / steps[kind][0]:.2f}x")
            assert cells_of(MEASURED, f"{name} |", "| 64 completions of 1024 tokens, an idle host |")[1:] == cells
    text = " ".join(MEASURED.split())
    assert "The reversed turns are {:.1%} to {:.1%} longer.".format(*longer[""]) in text
    shorter = [-change for change in reversed(longer["-sixth-host"])]
    assert "on its other cards, they were {:.1%} to {:.1%} shorter.".format(*shorter) in text
    text, idle, (first, *others) = " ".join(BENCHMARKS.split()), loads[""], loads["-sixth-host"]
    assert f"the host's load was {min(idle):.1f} to {max(idle):.1f} when each trainer started" in text
    assert f"it was {first:.0f} for TRL's trainer, and {min(others):.0f} to {max(others):.0f} for the others." in text
    assert f"There `fp8` is {gains['-sixth-host']:.2f} times as fast as TRL." in text
