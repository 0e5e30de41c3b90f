"""The figures of steps with rollouts in flight, of unsloth's steps beside them, and of what the host costs are those of
the raw files."""

from statistics import fmean, median

from figures import BENCHMARKS, H200, MEASURED, cells_of, gib, read
from pages import README, TEXTS


PHASES = ("step", "sampling", "sync", "update", "rest")
FILES = {"1": "first", "2": "first", "3": "second", "bf16": "third"}  # the host of each
NAMES = {
    "trl-control": "the control, BF16",
    "fp8/fp8": "`fp8`, every generation waits for all",
    "fp8/fp8@2": "`fp8`, `rollouts_in_flight=2`",
    "fp8/fp8@3": "`fp8`, `rollouts_in_flight=3`",
    "bf16": "BF16, every generation waits for all",
    "bf16@3": "BF16, `rollouts_in_flight=3`",
}
PAGE, TOLD, FIRST = (" ".join(text.split()) for text in (BENCHMARKS, MEASURED, README))


def runs(file: str) -> dict[str, dict]:
    """The results of the file's one shape, by trainer; with rollouts in flight, of the last 16 steps."""
    found = {}
    for run in read(f"step-7b-in-flight-{file}-{H200}")["runs"]:
        (result,) = run["results"].values()
        last = slice(-16, None) if "in_flight" in result else slice(None)
        found[run["trainer"]] = result | {"steps": result["steps"][last], "load": run["load"][0]}
        if "in_flight" in result:
            found[run["trainer"]]["in_flight"] = result["in_flight"][last]
    return found


def seconds(result: dict, *phases: str) -> list[float]:
    return [sum(step[phase] for phase in phases) for step in result["steps"]]


def test_steps_with_generations_in_flight():
    """Means: of the last 16 steps with rollouts in flight, else of all after the first."""
    mean = {}
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
            assert cells_of(MEASURED, f"{host}: {NAMES[trainer]}")[1:] == cells
    two = mean["first", "fp8/fp8"] / mean["first", "fp8/fp8@2"]
    three = mean["second", "fp8/fp8"] / mean["second", "fp8/fp8@3"]
    assert f"Two generations in flight make a step {two:.2f} times as fast, three {three:.2f} times" in MEASURED
    control = mean["second", "trl-control"] / mean["second", "fp8/fp8@3"]
    assert f"a step is {control:.2f} times as fast as the control's" in MEASURED
    plain, flying = mean["third", "bf16"], mean["third", "bf16@3"]
    assert f"in BF16 three make a step {plain / flying:.2f} times as fast" in TOLD
    partial = " ".join(TEXTS["docs/partial_rollouts.md"].split())
    assert f"In BF16, on a third host, a factor of 3 makes it {flying:.1f} instead of {plain:.1f}" in partial
    assert f"In BF16 it takes {flying / plain:.2f} and in `fp8` {1 / three:.2f}" in PAGE


def test_lengths_of_the_completions():
    """With rollouts in flight those that returned, else those that were drawn."""
    found, drawn = [], []
    for file in FILES:
        lengths = read(f"step-7b-in-flight-{file}-{H200}")["lengths"]["64x4096 lognormal"]
        for trainer, result in runs(file).items():
            if "in_flight" in result:
                found.append(fmean(entry["completions/mean_length"] for entry in result["in_flight"]))
                assert len(result["steps"]) == 16 and len(lengths) == 20
            elif trainer != "trl-control":
                measured = [length for step in lengths[1 : len(result["steps"]) + 1] for length in step]
                drawn.append((trainer, len(result["steps"]), fmean(measured)))
    assert "completions have {:.0f}, {:.0f} and {:.0f} tokens on average".format(*found) in TOLD
    counts, means = zip(*((steps, mean) for trainer, steps, mean in drawn if trainer != "unsloth"))
    told = "the mean of {}, {} and {} steps ({:.0f}, {:.0f} and {:.0f} tokens)"
    assert told.format(*counts, *means) in TOLD
    (theirs,) = [f"{mean:.0f}" for trainer, _, mean in drawn if trainer == "unsloth"]
    assert f"took the first four, {theirs} tokens a completion without the first step" in PAGE


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
    (first, slow, last), (own, own_slow, own_last, _) = seconds(theirs, "update"), seconds(ours, "update")
    assert f"took {first:.2f} and {last:.2f} s there, ours {own:.2f} and {own_last:.2f} s" in TOLD
    assert f"the update took {slow:.2f} s, ours {own_slow:.2f} s" in TOLD
    tokens = [sum(each) for each in read(f"step-7b-in-flight-bf16-{H200}")["lengths"]["64x4096 lognormal"][1:4]]
    assert tokens[1] == max(tokens) and slow > 2 * max(first, last)
    longer = [one / two for one, two in zip(seconds(theirs, "step"), seconds(ours, "step"))]
    assert f"its step took {longer[0]:.2f} and {longer[2]:.2f} times as long as ours" in TOLD
    longer = [one / two for one, two in zip(seconds(theirs, "sampling"), seconds(ours, "sampling", "sync"))]
    assert f"Its sampling took {min(longer):.2f} to {max(longer):.2f} times as long as our sampling and sync" in TOLD
    assert f"not its mean of {fmean(seconds(theirs, 'step')):.2f} s" in TOLD
    fp8 = [fmean(seconds(runs("3")[name], "step")) for name in ("fp8/fp8", "fp8/fp8@3")]
    told = "Its {:.2f} s on the second host, and {:.2f} s with three generations in flight, are {:.2f} and {:.2f} times"
    assert told.format(*fp8, *(step["unsloth"] / each for each in fp8)) + " as fast as unsloth's BF16" in TOLD

    entry = theirs["unsloth"]
    versions = ("trl", "transformers", "datasets", "xformers")
    named = "TRL {}, transformers {}, datasets {} and xformers {}".format(*(entry["versions"][v] for v in versions))
    assert f"torch 2.11, vLLM 0.26, {named}" in PAGE
    assert f"[Unsloth](https://github.com/unslothai/unsloth) {entry['versions']['unsloth']} has" in MEASURED
    assert entry["packing"]["_unsloth_seq_packing_grad_ok"] and entry["adds_adapter_to_base"]
    assert f"with up to {entry['packing']['_unsloth_seq_packing_grad_verified_T']} tokens in a row" in PAGE
    assert entry["packed_attention"] == "xformers"


def test_what_the_host_costs():
    found = read(f"host-7b-{H200}")
    of, new = found["results"], found["arguments"]["new"]
    middle = {batch: {part: median(took) for part, took in parts.items()} for batch, parts in of.items()}
    longer = {part: [middle[batch][part] / middle[batch]["all"] - 1 for batch in of] for part in of["64"]}
    for part, shares in longer.items():
        cells = []
        for batch, share in zip(of, shares, strict=True):
            cells += [f"{1e3 * middle[batch][part] / new:.3f}", f"{share:.1%}" if part != "all" else ""]
        start = "nothing" if part == "all" else part
        assert cells_of(BENCHMARKS, f"{start} |", "| without | 64 in flight |")[1:] == cells
    spread = [(max(parts["all"]) - min(parts["all"])) / middle[batch]["all"] for batch, parts in of.items()]
    assert "the three generations differ by {:.1%}, {:.1%} and {:.1%}".format(*spread) in PAGE
    assert max(spread) < min(longer["text"]) and longer["outputs"][0] < 0.03 < min(longer["outputs"][1:])
    assert [share > 0.03 for share in longer["blocks"]] == [False, True, False] and max(longer["gc"]) < 0.03
    one, another, slow = sorted(of["192"]["gc"])
    told = "one of the three generations without it, with 192 in flight, took {:.2f} s, the others {:.2f} and {:.2f}"
    assert told.format(slow, one, another) in PAGE
    three = runs("3")["fp8/fp8@3"]
    sampling = fmean(seconds(three, "sampling")) / fmean(seconds(three, "step"))
    assert f"Sampling is {sampling:.0%} of the step of `fp8` with three generations in flight" in PAGE
    shares = (sampling * longer[part][-1] for part in ("text", "outputs"))
    assert "{:.1%} for `text`, {:.1%} for `outputs`".format(*shares) in PAGE
