"""`benchmarks/diffusion.py`: its steps through the trainer, and the table of a file of runs."""

import math

import pytest
from places import BENCHMARKS
from tiny import save_words


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import diffusion

    monkeypatch.setattr(diffusion.diffusion, "denoise", diffusion.diffusion.denoise)  # restored, for it is timed
    return diffusion


def test_a_step_is_divided_into_its_phases(benchmark, tmp_path):
    """Every forward pass is in one of them, and no completion ends before its last denoising step."""
    words = ["--tokenizer", str(save_words(tmp_path / "tokenizer.json")), "--generations", "2", "--new", "8"]
    args = benchmark.options().parse_args([*words, "--one", "int8", "--completions", "4", "2", "--micro", "2"])
    benchmark.start(args)
    results = benchmark.measure(args)
    assert list(results) == ["4x8", "2x8"]
    for result in results.values():
        assert len(result["steps"]) == 2 and result["logp_difference"] > 0
        for seconds in (result["warm_up"], *result["steps"]):
            assert all(seconds[phase] > 0 for phase in (*benchmark.DenoisingSteps.phases, "update", "rest"))
            assert math.isclose(sum(seconds.values()), 2 * seconds["step"], rel_tol=1e-6)


def test_batches_that_do_not_divide_are_refused(benchmark, tmp_path):
    words = ["--tokenizer", str(save_words(tmp_path / "tokenizer.json"))]
    with pytest.raises(ValueError, match="--completions 6 is no multiple of both --micro 4 and --generations 4"):
        benchmark.start(benchmark.options().parse_args([*words, "--completions", "6"]))


def test_the_table_compares_with_bf16(benchmark, capsys):
    def run(name, sampling, update):
        phases = {"sampling": sampling, "estimate": 0.5, "scoring": 0.5, "reference": 0.5, "sync": 0.1, "rest": 0.1}
        step = phases | {"update": update, "step": sum(phases.values()) + update}
        later = dict.fromkeys(step, 0.0) | {"step": 9.0}  # a further update of the generation
        results = {"4x8": {"steps": [step, later], "peak_bytes": 2**30}}
        return {"trainer": name, "results": results}

    found = {"machine": "a", "commit": "b", "versions": {"torch": "2"}, "arguments": {"new": 8}, "lengths": {"4x8": []}}
    benchmark.print_table(found | {"runs": [run("bf16", 6.0, 2.3), run("fp8", 3.0, 1.3)]})
    *_, bf16, fp8 = capsys.readouterr().out.splitlines()
    assert bf16.split()[-3:] == ["1.00", "1.00", "1.00"]
    # sampling 6 / 3, with three passes of 0.5 seconds 7.5 / 4.5, and the step 10 / 6
    assert " ".join(fp8.split()) == "fp8 3.000 0.500 0.100 0.500 0.500 1.300 0.100 4.500 6.000 1.0 2.00 1.67 1.67"
