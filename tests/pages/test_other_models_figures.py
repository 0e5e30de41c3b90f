"""What the pages tell of steps and kernels of a mixture of experts and a hybrid is what the raw files have."""

from statistics import fmean

import pytest
from figures import BENCHMARKS, H200, cells_of, read, times
from pages import TEXTS


def test_sampling_from_a_mixture():
    engines = read(f"rollout-30b-a3b-{H200}")["results"]
    for name, of in (("bf16", "our BF16"), ("fp8", "FP8")):
        for key, what in (("sample_s", "sampling"), ("sync_s", "sync")):
            seconds = [f"{row[key]:.2f} s" for row in engines[name].values()]
            assert f"| {of}, {what} | {' | '.join(seconds)} |" in BENCHMARKS
    pairs = zip(engines["bf16"].values(), engines["fp8"].values(), strict=True)
    gains = times(ours["sample_s"] / quantized["sample_s"] for ours, quantized in pairs)
    assert f"| FP8 against our BF16, sampling | {' | '.join(gains)} |" in BENCHMARKS


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
        each = [1e3 * row["update"] / 8 / 48 for row in means.values()]  # micro-batches and layers
        assert f"takes {min(each):.0f} to {max(each):.0f} ms for a layer of a micro-batch" in " ".join(section.split())
        control = means["the control, BF16"]
        saved = [control[phase] - triton[phase] for phase in ("step", "sync", "sampling", "update")]
        told = (
            "Of the {:.2f} s that it saves, the sync gives {:.2f} and sampling {:.2f}, and the update takes {:.2f} more"
        )
        assert told.format(*saved[:3], -saved[3]) in " ".join(section.split())
        told = f"there is {means['the control, BF16']['step'] / triton['step']:.2f} times as fast as TRL's"
        assert told in " ".join(TEXTS["docs/mixtures.md"].split())
