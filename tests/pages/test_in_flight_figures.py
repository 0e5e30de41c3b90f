"""The figures of steps with rollouts in flight, of unsloth's steps beside them, and of what the host costs are those of
the raw files."""

from statistics import fmean, median

from figures import BENCHMARKS, H200, MEASURED, cells_of, gib, read
from pages import README, TEXTS


PHASES = ("step", "sampling", "sync", "update", "rest")
# The host of each
FILES = {"1": "first", "2": "first", "3": "second", "bf16": "third", "factors": "fourth"}
FILES |= {"vllm-0.33": "fifth", "1.5": "sixth"}
NAMES = {
    "trl-control": "the control, BF16",
    "fp8/fp8": "`fp8`, every generation waits for all",
    "fp8/fp8@1.5": "`fp8`, `rollouts_in_flight=1.5`",
    "fp8/fp8@2": "`fp8`, `rollouts_in_flight=2`",
    "fp8/fp8@3": "`fp8`, `rollouts_in_flight=3`",
    "bf16": "BF16, every generation waits for all",
    "bf16@1.5": "BF16, `rollouts_in_flight=1.5`",
    "bf16@2": "BF16, `rollouts_in_flight=2`",
    "bf16@3": "BF16, `rollouts_in_flight=3`",
    "fp8_block/fp8_block/exact": "exact `fp8_block`, every generation waits for all",
    "fp8_block/fp8_block/exact@1.5": "exact `fp8_block`, `rollouts_in_flight=1.5`",
    "fp8_block/fp8_block/exact@2": "exact `fp8_block`, `rollouts_in_flight=2`",
    "fp8_block/fp8_block/exact@3": "exact `fp8_block`, `rollouts_in_flight=3`",
}
LOGNORMAL, EQUAL = "64x4096 lognormal", "64x1024 equal"
PAGE, TOLD, FIRST = (" ".join(text.split()) for text in (BENCHMARKS, MEASURED, README))


def runs(file: str, shape: str = LOGNORMAL, last: int = 16) -> dict[str, dict]:
    """The results of a file's runs of a shape, by trainer; with rollouts in flight, of the `last` steps."""
    found = {}
    for run in read(f"step-7b-in-flight-{file}-{H200}")["runs"]:
        if shape in run["results"]:
            result = run["results"][shape]
            kept = slice(-last, None) if "in_flight" in result else slice(None)
            found[run["trainer"]] = result | {"steps": result["steps"][kept], "load": run["load"][0]}
            if "in_flight" in result:
                found[run["trainer"]]["in_flight"] = result["in_flight"][kept]
    return found


def seconds(result: dict, *phases: str) -> list[float]:
    return [sum(step[phase] for phase in phases) for step in result["steps"]]


def tokens(file: str, result: dict) -> float:
    """Tokens of a completion: with rollouts in flight of those that returned, else of those that were drawn."""
    if "in_flight" in result:
        return fmean(entry["completions/mean_length"] for entry in result["in_flight"])
    lengths = read(f"step-7b-in-flight-{file}-{H200}")["lengths"][LOGNORMAL]
    return fmean(length for step in lengths[1 : len(result["steps"]) + 1] for length in step)


def test_steps_with_generations_in_flight():
    """Means: of the last 16 steps with rollouts in flight, else of all after the first."""
    mean, counts = {}, []
    for file, host in FILES.items():
        for trainer, result in runs(file).items():
            if trainer not in NAMES:  # unsloth's, which has a table of its own
                continue
            own = {phase: fmean(seconds(result, phase)) for phase in PHASES}
            mean[host, trainer] = own["step"]
            entries = result.get("in_flight", [{"rollouts/age": 0, "rollouts/recomputed_tokens": 0}])
            age, again = (fmean(each[f"rollouts/{what}"] for each in entries) for what in ("age", "recomputed_tokens"))
            cells = [f"{own[phase]:.2f} s" for phase in ("step", "sampling", "update", "rest")]
            cells += [f"{age:.2f}", f"{again:.0f} tokens a step"] if again else ["0", "0"]
            cells.append(f"{tokens(file, result):.0f}")
            assert cells_of(MEASURED, f"{host}: {NAMES[trainer]}")[1:] == cells
            if "in_flight" in result:
                assert len(result["steps"]) == 16
            elif trainer != "trl-control":
                counts.append((host, len(result["steps"])))
    assert "({}, {}, {}, {}, {} and {} of them)".format(*dict(counts).values()) in TOLD and len({*counts}) == 6
    two = mean["first", "fp8/fp8"] / mean["first", "fp8/fp8@2"]
    three = mean["second", "fp8/fp8"] / mean["second", "fp8/fp8@3"]
    assert f"Two generations in flight make a step {two:.2f} times as fast, three {three:.2f} times" in MEASURED
    control = mean["second", "trl-control"] / mean["second", "fp8/fp8@3"]
    assert f"a step is {control:.2f} times as fast as the control's" in MEASURED
    plain, flying = mean["third", "bf16"], mean["third", "bf16@3"]
    half = mean["fourth", "bf16"] / mean["fourth", "bf16@2"]
    assert f"in BF16 two make a step {half:.2f} times as fast, three {plain / flying:.2f} times" in TOLD
    partial = " ".join(TEXTS["docs/partial_rollouts.md"].split())
    assert f"In BF16, on a third host, a factor of 3 makes it {flying:.1f} instead of {plain:.1f}" in partial
    exact = "fp8_block/fp8_block/exact"
    pairs = (("fp8/fp8@1.5", "fp8/fp8"), ("bf16@2", "bf16"), (f"{exact}@2", exact), (f"{exact}@3", exact))
    shares = (mean["fourth", name] / mean["fourth", base] for name, base in pairs)
    fifth = (mean["fifth", f"fp8/fp8@{factor}"] / mean["fifth", "fp8/fp8"] for factor in (2, 3))
    assert "on the fifth, `fp8` takes {:.2f} at 2 and {:.2f} at 3".format(*fifth) in PAGE
    told = "`fp8` takes {:.2f} at 1.5, BF16 {:.2f} at 2, and exact `fp8_block` {:.2f} at 2 and {:.2f} at 3"
    assert told.format(*shares) in PAGE
    sixth = (mean["sixth", f"{name}@1.5"] / mean["sixth", name] for name in ("bf16", exact))
    assert "On the sixth, at 1.5, BF16 takes {:.2f} and exact `fp8_block` {:.2f}".format(*sixth) in PAGE
    assert f"In BF16 it takes {flying / plain:.2f} and in `fp8` {1 / three:.2f}" in PAGE


def test_steps_in_which_kernels_were_compiled():
    found = runs("factors")
    two, three = (found[f"fp8_block/fp8_block/exact@{factor}"] for factor in (2, 3))
    slow = [[each for each in result["steps"] if each["sampling"] > 12.5] for result in (two, three)]
    fast = [[each for each in result["steps"] if each["sampling"] <= 12.5] for result in (two, three)]
    assert [*map(len, slow)] == [5, 2]
    sampled = [each["sampling"] for each in slow[0]]
    told = f"sampled for {min(sampled):.1f} to {max(sampled):.1f} s, the others for "
    assert f"{told}{max(each['sampling'] for each in fast[0]):.1f} s at most" in TOLD
    means = (fmean(each["step"] for each in steps) for steps in fast)
    assert "Without them the means are {:.2f} and {:.2f} s".format(*means) in TOLD


def kernels_by_step(file: str, factor: str, times: str, ended: float) -> tuple[list[float], list[dict], list[int], int]:
    """
    The seconds at which kernels were written after the start of a host's jobs, an exact run's steps, its first with
    them, the number of kernels in each, and that before. Its job `ended` a few seconds after its last step.
    """
    written, steps = read(f"kernels-7b-in-flight-{times}{H200}")["seconds"], []
    for run in read(f"step-7b-in-flight-{file}-{H200}")["runs"]:
        if run["trainer"] == f"fp8_block/fp8_block/exact@{factor}":
            steps = [run["results"][LOGNORMAL]["warm_up"], *run["results"][LOGNORMAL]["steps"]]
    end, counts = ended - 3, []
    for step in reversed(steps):
        counts.insert(0, sum(end - step["step"] <= moment < end for moment in written))
        end -= step["step"]
    return written, steps, counts, sum(moment < end for moment in written)


def test_steps_of_which_each_slow_one_compiled():
    """FP8 samples faster than BF16 with the same lengths, except in six steps: DeepGEMM wrote kernels only there."""
    written, steps, counts, before = kernels_by_step("1.5", "1.5", "sixth-host-", 879)
    plain = runs("1.5", last=19)["bf16@1.5"]["steps"]
    slow = [ours["sampling"] > 1.2 * base["sampling"] for ours, base in zip(steps[1:], plain, strict=True)]
    assert slow == [count > 0 for count in counts[1:]] and sum(slow) == 6 and sum(slow[-16:]) == 4
    told = "of {}, {} were written before the first step with a factor of 1.5, {} in it, which warms up, {} in the six"
    assert told.format(len(written), before, counts[0], sum(counts[1:])) in PAGE and {*counts[1:]} == {0, 2, 3}
    pairs = [(each["sampling"], base["sampling"]) for each, base, is_slow in zip(steps[1:], plain, slow) if is_slow]
    ours, theirs = zip(*pairs)
    assert f"for {min(ours):.1f} to {max(ours):.1f} s, where BF16 with the same lengths took" in TOLD
    assert f"took {min(theirs):.1f} to {max(theirs):.1f} s. {sum(counts[1:])} kernels were written in these 6" in TOLD
    others = fmean(each["step"] for each, is_slow in zip(steps[-16:], slow[-16:]) if not is_slow)
    assert f"the other twelve take {others:.2f} s on average" in TOLD


def test_when_kernels_were_written():
    written, steps, counts, before = kernels_by_step("factors", "2", "", 621)
    slow = [step["sampling"] > 12.5 for step in steps]
    late = sum(moment >= 621 for moment in written)
    inside = [sum(count for count, each in zip(counts[4:], slow[4:]) if each is is_slow) for is_slow in (True, False)]
    told = (
        "Of {}, {} were written while the first two exact engines started. With factor 2, {} fell into the warm-up, {} "
    )
    told += "into the first three steps, which also sampled long and are not counted, and {} into the five slow steps; "
    told += "{} fell into the other eleven. {} fell into the time of the two slow steps"
    assert told.format(len(written), before, counts[0], sum(counts[1:4]), *inside, late) in PAGE
    assert all(slow[1:4]) and sum(slow[4:]) == 5 and sum(map(bool, counts[4:])) == 6


def test_what_a_larger_batch_alone_gives():
    """Of whole turns: of 16 steps with a factor of 2, of 15 with 3."""
    steps = [
        fmean(seconds(runs("factors", EQUAL, last)[name], "step"))
        for name, last in (("fp8/fp8", 5), ("fp8/fp8@2", 16), ("fp8/fp8@3", 15))
    ]
    told = "takes {:.2f} s without generations in flight, {:.2f} s with a factor of 2 and {:.2f} s with a factor of 3"
    assert told.format(*steps) in TOLD


def test_unsloth():
    found = runs("bf16")
    rows = {
        "unsloth": "unsloth, BF16",
        "bf16": "ours, BF16",
        "bf16@3": "ours, BF16, `rollouts_in_flight=3`",
    }
    step = {name: median(seconds(found[name], "step")) for name in rows}
    for name, start in rows.items():
        whole = seconds(found[name], "step")
        cells = [f"{step[name]:.2f} s", f"{min(whole):.2f}, {max(whole):.2f} s", f"{step['unsloth'] / step[name]:.2f}x"]
        cells += [f"{median(seconds(found[name], *phases)):.2f} s" for phases in (("sampling", "sync"), ("update",))]
        cells.append(f"{gib(found[name]['peak_bytes'])} GiB")
        assert cells_of(MEASURED, f"{start} |", "| trainer, third host |")[1:] == cells
        assert f"{found[name]['load']:.1f}" == "32.4"
    flying = step["unsloth"] / step["bf16@3"]
    assert (
        f"takes about as long as ours, and {flying:.2f} times as long as with three generations in flight" in MEASURED
    )
    told = f"{step['bf16']:.1f} and {step['unsloth']:.1f} s on another host, and {step['bf16@3']:.1f} s with "
    assert told + "`rollouts_in_flight=3`" in FIRST

    theirs, ours = found["unsloth"], found["bf16"]
    assert step["unsloth"] - step["bf16"] < max(seconds(ours, "step")) - min(seconds(ours, "step"))
    mean = tokens("bf16", theirs)
    assert f"took the first four, {mean:.0f} tokens a completion without the first step" in PAGE
    (first, slow, last), (own, own_slow, own_last, _) = seconds(theirs, "update"), seconds(ours, "update")
    assert f"took {first:.2f} and {last:.2f} s there, ours {own:.2f} and {own_last:.2f} s" in TOLD
    assert f"the update took {slow:.2f} s, ours {own_slow:.2f} s" in TOLD
    drawn = [sum(each) for each in read(f"step-7b-in-flight-bf16-{H200}")["lengths"][LOGNORMAL][1:4]]
    assert drawn[1] == max(drawn) and slow > 2 * max(first, last)
    longer = [one / two for one, two in zip(seconds(theirs, "step"), seconds(ours, "step"))]
    assert f"its step took {longer[0]:.2f} and {longer[2]:.2f} times as long as ours" in TOLD
    longer = [one / two for one, two in zip(seconds(theirs, "sampling"), seconds(ours, "sampling", "sync"))]
    assert f"Its sampling took {min(longer):.2f} to {max(longer):.2f} times as long as our sampling and sync" in TOLD
    assert f"not its mean of {fmean(seconds(theirs, 'step')):.2f} s" in TOLD

    entry = theirs["unsloth"]
    versions = ("trl", "transformers", "datasets", "xformers")
    named = "TRL {}, transformers {}, datasets {} and xformers {}".format(*(entry["versions"][v] for v in versions))
    assert f"torch 2.11, vLLM 0.26, {named}" in PAGE
    assert f"[Unsloth](https://github.com/unslothai/unsloth) {entry['versions']['unsloth']} has" in MEASURED
    assert entry["packing"]["_unsloth_seq_packing_grad_ok"] and entry["adds_adapter_to_base"]
    assert f"with up to {entry['packing']['_unsloth_seq_packing_grad_verified_T']} tokens in a row" in PAGE
    assert entry["packed_attention"] == "xformers"


def test_unsloth_in_fp8():
    (run,) = read(f"step-7b-unsloth-fp8-{H200}")["runs"]
    theirs = run["results"][LOGNORMAL]
    step = seconds(theirs, "step")
    told = f"took {median(step):.2f} s on the fifth host, the median of 3 ({min(step):.2f} to {max(step):.2f} s;"
    assert told in TOLD and len(step) == 3
    phases = (median(seconds(theirs, phase)) for phase in ("sampling", "update"))
    assert "with {:.2f} s of sampling and {:.2f} s of update".format(*phases) in TOLD
    ours = [median(seconds(runs("vllm-0.33", last=19)[name], "step")) for name in ("fp8/fp8", "fp8/fp8@3")]
    told = "our `fp8` took {:.2f} s, and {:.2f} s with three generations in flight: {:.2f} and {:.2f} times as fast"
    assert told.format(*ours, *(median(step) / each for each in ours)) in TOLD
    told = "In FP8 it takes {:.1f} s, unsloth's {:.1f} s, and ours {:.1f} s with `rollouts_in_flight=3`"
    assert told.format(ours[0], median(step), ours[1]) in FIRST
    drawn = [sum(each) for each in read(f"step-7b-unsloth-fp8-{H200}")["lengths"][LOGNORMAL][1:4]]
    assert step.index(max(step)) == drawn.index(max(drawn))
    assert theirs["unsloth"]["packed_attention"] == "sdpa" and not theirs["unsloth"]["adds_adapter_to_base"]


def test_what_the_host_costs():
    shares, spreads, slow = {}, {}, {}
    for host, file in (("third", "host-7b"), ("fourth", "host-7b-fourth-host")):
        found = read(f"{file}-{H200}")
        of, new = found["results"], found["arguments"]["new"]
        middle = {batch: {part: median(took) for part, took in parts.items()} for batch, parts in of.items()}
        longer = {part: [middle[batch][part] / middle[batch]["all"] - 1 for batch in of] for part in of["64"]}
        for part, those in longer.items():
            cells = []
            for batch, share in zip(of, those, strict=True):
                cells += [f"{1e3 * middle[batch][part] / new:.3f}", f"{share:.1%}" if part != "all" else ""]
            start = "nothing" if part == "all" else part
            assert cells_of(BENCHMARKS, f"{host}: {start} |", "| host: without | 64 in flight |")[1:] == cells
        shares[host] = longer
        spreads[host] = [(max(parts["all"]) - min(parts["all"])) / middle[batch]["all"] for batch, parts in of.items()]
        *_, others, slow[host] = sorted(of["192"]["gc"])
        assert slow[host] > others + 0.75 and others < 2.25
    told = "differ by {:.1%}, {:.1%} and {:.1%} on the third host and by {:.1%}, {:.1%} and {:.1%} on the fourth"
    assert told.format(*spreads["third"], *spreads["fourth"]) in PAGE
    rounds = {
        part: sum(without > whole for parts in of.values() for without, whole in zip(parts[part], parts["all"]))
        for part in ("text", "outputs", "blocks", "gc")
    }
    told = "without `text` took longer than the one with all parts in {text} of 15 rounds, "
    told += "without `outputs` in {outputs}, without `blocks` in {blocks}, and without `gc` in {gc}"
    assert told.format(**rounds) in PAGE
    third, fourth = (shares[host]["blocks"] for host in ("third", "fourth"))
    assert (
        f"saves {third[1]:.1%} with 128 in flight on the third host, {fourth[0]:.1%} and {fourth[1]:.1%} with" in PAGE
    )
    assert third[2] < 0.01 > fourth[2] and all(abs(longer["gc"][-1]) < 0.03 for longer in shares.values())
    assert f"took 0.8 s longer than the others: {slow['third']:.2f} s and {slow['fourth']:.2f} s" in PAGE
    three = runs("3")["fp8/fp8@3"]
    sampling = fmean(seconds(three, "sampling")) / fmean(seconds(three, "step"))
    assert f"Sampling is {sampling:.0%} of the step of `fp8` with three generations in flight" in PAGE
    most = (*(sampling * shares["third"][part][-1] for part in ("text", "outputs")), sampling * fourth[0])
    assert "{:.1%} for `text` and {:.1%} for `outputs` on the third host, and {:.1%} for `blocks`".format(*most) in PAGE
    assert round(0.8 / fmean(seconds(three, "step")), 2) == 0.06


def test_speculation():
    found, known = read(f"speculation-3b-{H200}"), read(f"speculation-3b-known-text-{H200}")
    none, ngram = (found["results"][kind] for kind in ("none", "ngram"))
    ratios = [median(none[batch]["seconds"]) / median(ngram[batch]["seconds"]) for batch in ("8", "64")]
    accepted = [ngram[batch]["rollouts/accepted_tokens"] for batch in ("8", "64")]
    assert "n-grams: {:.2f} and {:.2f} times as fast with 8 and 64 completions".format(*ratios) in TOLD
    losses = [found["taught"][name]["loss"] for name in ("policy", "drafter")]
    assert "policy to a loss of {:.2f} nats a token, the drafter to {:.2f}".format(*losses) in PAGE
    assert "accepts {:.2f} n-grams' tokens a step".format(*accepted) in PAGE and max(accepted) < 0.1
    steps = [1e3 * median(kind["8"]["seconds"]) / 512 for kind in (none, ngram)]
    assert "A decode step with 8 completions takes {:.1f} ms instead of {:.1f}".format(*reversed(steps)) in PAGE
    losses = [known["taught"][name]["loss"] for name in ("policy", "drafter")]
    assert "learned them to {:.2f} nats a token, the drafter to {:.2f}".format(*losses) in PAGE
    rows = {
        "waiting": "asynchronous scheduling off",
        "ngram": "n-grams, on the host",
        "ngram_gpu": "n-grams, on the GPU",
    }
    longer = {}
    for kind, name in rows.items():
        cells = []
        for batch in ("8", "64"):
            row, whole = known["results"][kind][batch], known["results"]["none"][batch]
            longer[kind, batch] = median(row["seconds"]) / median(whole["seconds"])
            accepted = row.get("rollouts/accepted_tokens")
            cells += [f"{1 / longer[kind, batch]:.2f}x", "" if accepted is None else f"{accepted:.2f}"]
        assert cells_of(BENCHMARKS, f"{name} |", "| kind | 8 completions |")[1:] == cells
    told = "sampling takes {:.2f} and {:.2f} times as long"
    assert told.format(*(longer["waiting", batch] for batch in ("8", "64"))) in PAGE
    draft = read(f"speculation-3b-draft-{H200}")
    losses = [draft["taught"][name]["loss"] for name in ("policy", "drafter")]
    assert "taught to {:.2f} and {:.2f} nats".format(*losses) in PAGE
    ratios, accepted = [], []
    for batch in ("8", "64"):
        none, row = (draft["results"][kind][batch] for kind in ("none", "draft"))
        ratios.append(median(none["seconds"]) / median(row["seconds"]))
        accepted.append(row["rollouts/accepted_tokens"])
    told = "{:.2f}x with 8 completions and {:.2f}x with 64, with {:.2f} and {:.2f} of three drafted tokens"
    assert told.format(*ratios, *accepted) in PAGE
    assert "a draft model has {:.2f} and {:.2f}".format(*ratios) in TOLD
    none, row = (1e3 * median(draft["results"][kind]["8"]["seconds"]) / 512 for kind in ("none", "draft"))
    kept = 1 + accepted[0]
    assert f"takes {row * kept:.1f} ms instead of {none:.1f}, and brings {kept:.2f} tokens" in PAGE
    for file, nats in ((found, "5.80 nats a token"), (known, "4.42")):
        assert f"by {nats[:4].rstrip('0')}" in file["results"]["draft"]["error"] and f"({nats})" in PAGE
