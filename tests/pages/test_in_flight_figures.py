"""The figures of steps with rollouts in flight are those of the raw files."""

from statistics import fmean

from figures import H200, MEASURED, cells_of, read


def test_steps_with_generations_in_flight():
    """Means: of the last 16 steps with rollouts in flight, else of all after the first."""
    means = {}
    for factor in (1, 2, 3):
        for run in read(f"step-7b-in-flight-{factor}-{H200}")["runs"]:
            (result,) = run["results"].values()
            host = "second" if factor == 3 else "first"
            name = {"trl-control": "the control, BF16", "fp8/fp8": "`fp8`, every generation waits for all"}.get(
                run["trainer"], f"`fp8`, `rollouts_in_flight={factor}`"
            )
            last = slice(-16, None) if "in_flight" in result else slice(None)
            mean = {phase: fmean(step[phase] for step in result["steps"][last]) for phase in result["steps"][0]}
            means[f"{host}: {name}"] = mean
            entries = result.get("in_flight", [{"rollouts/age": 0, "rollouts/recomputed_tokens": 0}])[last]
            age, again = (fmean(each[f"rollouts/{what}"] for each in entries) for what in ("age", "recomputed_tokens"))
            cells = [f"{mean[phase]:.2f} s" for phase in ("step", "sampling", "update", "rest")]
            cells += [f"{age:.2f}", f"{again:.0f} tokens a step"] if again else ["0", "0"]
            assert cells_of(MEASURED, f"{host}: {name}")[1:] == cells
    of = {name: mean["step"] for name, mean in means.items()}
    ratio = of["first: `fp8`, every generation waits for all"] / of["first: `fp8`, `rollouts_in_flight=2`"]
    third = of["second: `fp8`, `rollouts_in_flight=3`"]
    gain = of["second: `fp8`, every generation waits for all"] / third
    assert f"Two generations in flight make a step {ratio:.2f} times as fast, three {gain:.2f} times" in MEASURED
    assert f"a step is {of['second: the control, BF16'] / third:.2f} times as fast as the control's" in MEASURED
