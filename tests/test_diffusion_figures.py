"""The figures of masked diffusion are those of the raw files."""

from statistics import median

import pytest
from figures import H100, H200, MEASURED, cells_of, gib, middle, read
from pages import ROOT


@pytest.mark.parametrize(
    ("card", "shape", "table", "row", "told"),
    [
        (
            H200,
            "4x256",
            "| copy that samples |",
            "Step of an 8B masked diffusion model",
            "In `fp8` sampling is {:.2f} times as fast, and the whole step {:.2f} times.",
        ),
        (
            H100,
            "16x256",
            "| copy, 16 completions |",
            "The same step with 16 completions, on an H100",
            "Sampling is {:.2f} times as fast here, and the whole step {:.2f} times.",
        ),
    ],
)
def test_masked_diffusion(card, shape, table, row, told):
    runs = {run["trainer"]: run["results"][shape] for run in read(f"diffusion-8b-{card}")["runs"]}
    assert all(len(result["steps"]) == 5 for result in runs.values())
    of = {
        name: {key: median(step[key] for step in runs[name]["steps"]) for key in runs[name]["warm_up"]} for name in runs
    }
    for name, title in {"bf16": "BF16", "fp8": "`fp8`"}.items():
        phases = [f"{of[name][phase]:.2f} s" for phase in ("sampling", "scoring", "reference", "update", "step")]
        cells = cells_of(MEASURED, f"{title} |", table)[1:]
        assert cells == [*phases, f"{gib(runs[name]['peak_bytes'])} GiB"]
    gains = [of["bf16"][key] / of["fp8"][key] for key in ("sampling", "step")]
    assert told.format(*gains) in MEASURED.replace("\n", " ")
    cells = cells_of(MEASURED, row, "| what | result | repeat it |")[1].replace(" ours in BF16", "")
    assert cells == "{1:.2f}x; sampling {0:.2f}x".format(*gains)


def test_masked_diffusion_with_eight_generations():
    found = read(f"diffusion-8b-8-generations-{H100}")
    runs = {run["trainer"]: run["results"]["8x256"] for run in found["runs"]}
    assert found["arguments"]["generations"] == 8 and all(len(run["steps"]) == 5 for run in runs.values())
    for name, title in {"bf16": "BF16 |", "fp8": "`fp8` |", "fp8_tensor": "`fp8_tensor` |"}.items():
        phases = [middle(runs[name], phase) for phase in ("sampling", "scoring", "reference", "update", "step")]
        cells = [*(f"{each:.2f} s" for each in phases), f"{gib(runs[name]['peak_bytes'])} GiB"]
        assert cells_of(MEASURED, title, "| copy, 8 completions |")[1:] == cells
    gains = [
        middle(runs["bf16"], phase) / middle(runs[name], phase)
        for phase in ("sampling", "step")
        for name in ("fp8", "fp8_tensor")
    ]
    told = "{:.2f} times as fast in `fp8` and {:.2f} times in `fp8_tensor`, and the whole step {:.2f} and {:.2f} times"
    assert told.format(*gains) in MEASURED


def test_masked_diffusion_with_sixteen_completions_of_two_prompts():
    found = read(f"diffusion-8b-8-generations-{H200}")
    runs = {run["trainer"]: run["results"]["16x256"] for run in found["runs"]}
    assert found["arguments"]["generations"] == 8 and all(len(run["steps"]) == 5 for run in runs.values())
    for name, title in {"bf16": "BF16 |", "fp8": "`fp8` |"}.items():
        phases = [middle(runs[name], phase) for phase in ("sampling", "scoring", "reference", "update", "step")]
        cells = [*(f"{each:.2f} s" for each in phases), f"{gib(runs[name]['peak_bytes'])} GiB"]
        assert cells_of(MEASURED, title, "| copy, 16 completions of two prompts |")[1:] == cells
    gains = [middle(runs["bf16"], phase) / middle(runs["fp8"], phase) for phase in ("sampling", "step")]
    assert "Sampling is {:.2f} times as fast, and the whole step {:.2f} times.".format(*gains) in MEASURED


@pytest.mark.parametrize(
    ("name", "shape", "paper"),
    [
        (f"diffusion-8b-{H200}", "4, 4", (47.56, 17.23)),
        (f"diffusion-8b-8-generations-{H100}", "8, 8", (29.41, 18.76)),
        (f"diffusion-8b-{H100}", "16, 4", (53.11, 45.96)),
        (f"diffusion-8b-8-generations-{H200}", "16, 8", (50.23, 37.17)),
    ],
)
def test_the_papers_totals_beside_ours(name, shape, paper):
    found, completions = read(name), shape.partition(",")[0]
    assert found["arguments"]["generations"] == int(shape[-1])
    runs = {run["trainer"]: run["results"][f"{completions}x256"]["steps"] for run in found["runs"]}
    phases = ("sampling", "estimate", "scoring", "reference")
    ours = [median(sum(step[phase] for phase in phases) for step in runs[precision]) for precision in ("bf16", "fp8")]
    told = [[f"{bf16:.2f} s", f"{fp8:.2f} s", f"{bf16 / fp8:.2f}x"] for bf16, fp8 in (paper, ours)]
    cells = cells_of(MEASURED, f"{shape} |", "| completions, of a prompt |")[1:]
    assert cells == [*told[0], name[-4:], *told[1]]


def test_the_limit_of_denoising(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from diffusion import SHAPES

    sizes = SHAPES["8b"]
    hidden, wide = sizes["hidden_size"], sizes["intermediate_size"]
    weights = sizes["num_hidden_layers"] * (4 * hidden**2 + 3 * hidden * wide)
    operations = 2 * weights * 4 * (256 + 256) * (256 // 2)
    least = [operations / rate for rate in (989e12, 1979e12)]
    text = MEASURED.replace("\n", " ")
    assert "H200 at least {:.2f} s in BF16 and {:.2f} s in FP8, at 989 and 1979 TFLOP/s".format(*least) in text
    runs = {run["trainer"]: run["results"]["4x256"] for run in read(f"diffusion-8b-{H200}")["runs"]}
    shares = [seconds / middle(runs[name], "sampling") for seconds, name in zip(least, ("bf16", "fp8"))]
    assert "BF16 samples at {:.0%} of that limit here, `fp8` at {:.0%}".format(*shares) in text
