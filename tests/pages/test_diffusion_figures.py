"""The figures of masked diffusion are those of the raw files."""

from statistics import median

import pytest
from figures import H100, H200, MEASURED, cells_of, gib, middle, read, times
from pages import ROOT


NAMES = {"bf16": "BF16", "fp8": "`fp8`", "fp8_tensor": "`fp8_tensor`"}
PHASES = ("sampling", "scoring", "reference", "update", "step")


@pytest.mark.parametrize(
    ("file", "card", "completions", "of_a_prompt", "row"),
    [
        ("", H200, 4, 4, "Step of an 8B masked diffusion model"),
        ("-8-generations", H100, 8, 8, None),
        ("", H100, 16, 4, "The same step with 16 completions, on an H100"),
        ("-8-generations", H200, 16, 8, None),
    ],
)
def test_masked_diffusion(file, card, completions, of_a_prompt, row):
    found = read(f"diffusion-8b{file}-{card}")
    runs = {run["trainer"]: run["results"][f"{completions}x256"] for run in found["runs"]}
    assert all(len(result["steps"]) == 5 for result in runs.values()) and {"bf16", "fp8"} <= set(runs)
    assert found["arguments"]["generations"] == of_a_prompt
    start = f"{completions}, {of_a_prompt} |"
    for name, run in runs.items():
        cells = [*(f"{middle(run, phase):.2f} s" for phase in PHASES), f"{gib(run['peak_bytes'])} GiB"]
        told = cells_of(MEASURED, f"{start} {card[-4:]} | {NAMES[name]} |", "| completions, of a prompt | card |")
        assert told[3:] == cells
        if name != "bf16":
            gains = times(middle(runs["bf16"], phase) / middle(run, phase) for phase in ("sampling", "step"))
            assert cells_of(MEASURED, f"{start} {NAMES[name]} |", "| completions, of a prompt | copy |")[2:] == gains
    if row:
        sampling, step = times(
            middle(runs["bf16"], phase) / middle(runs["fp8"], phase) for phase in ("sampling", "step")
        )
        told = cells_of(MEASURED, row, "| what | result | repeat it |")[1].replace(" ours in BF16", "")
        assert told == f"{step}; sampling {sampling}"


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
    cells = cells_of(MEASURED, f"{shape} |", "| completions, of a prompt | paper, BF16 |")[1:]
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
