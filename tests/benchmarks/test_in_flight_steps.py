"""The decode steps that `benchmarks/in_flight.py` counts, against lengths alone and against a stored run."""

import sys

import pytest
from places import ROOT


sys.path.insert(0, str(ROOT / "benchmarks"))

import in_flight
import limits
from raw_results import read_results


def test_a_factor_of_1_samples_each_step_alone():
    drawn = [[3, 1, 2, 5], [4, 4, 1, 2]]
    found = [*in_flight.generations(drawn, 1.0, each=2, prompt=10)]
    for generation, lengths in zip(found, drawn, strict=True):
        assert generation.returned == lengths and generation.again == 0
        assert generation.active == [sum(length > step for length in lengths) for step in range(max(lengths))]
        assert generation.tokens == [active * (10 + step) for step, active in enumerate(generation.active)]
        of_prompts = 2 * limits.weights_of("7b")[0] * 2 * 10 / limits.rate_of("fp8", "H200")
        expected = limits.sampling_limit("7b", "H200", "fp8", 10, 2, lengths)
        assert in_flight.limit(generation, "7b", "H200", "fp8") + of_prompts == pytest.approx(expected, rel=1e-12)


def test_a_generation_ends_when_enough_groups_have_finished():
    """Two groups in flight for each that returns, worked out by hand."""
    first, second, third = in_flight.generations([[6, 2], [3, 3], [1, 9]], 2.0, each=2, prompt=10)
    # Group 1 finishes after 3 steps; group 0 then has 3 and 2 of its 6 and 2 tokens
    assert (first.active, first.returned, first.again) == ([4, 4, 3], [3, 3], 0)
    # Its longer completion goes on beside group 2, after its 3 tokens and its prompt were computed again
    assert (second.active, second.again, second.returned) == ([3, 2, 2], 3 + 10, [6, 2])
    assert second.tokens == [13 + 2 * 10, 14 + 11, 15 + 12]
    assert (third.active, third.again, third.returned) == ([1] * 6, 3 + 10, [1, 9])


@pytest.mark.parametrize("factor", [1.0, 1.5, 2.0, 3.0])
def test_every_token_is_sampled_once(factor):
    drawn = [[7 * i % 31 + 1 for i in range(step, step + 8)] for step in range(12)]
    found = [*in_flight.generations(drawn, factor, each=2, prompt=10)]
    assert sum(sum(generation.active) for generation in found) == sum(map(sum, drawn))
    assert sorted(length for g in found for length in g.returned) == sorted(length for step in drawn for length in step)


def test_generations_are_those_of_a_run_in_vllm():
    stored = read_results(ROOT / "benchmarks/results/step-7b-in-flight-2-NVIDIA-H200.json.xz")
    (run,) = stored["runs"]
    (shape, drawn), arguments = *stored["lengths"].items(), stored["arguments"]
    returned = [entry["completions/mean_length"] for entry in run["results"][shape]["in_flight"]]

    def same(factor: float) -> int:
        found = in_flight.generations(drawn, factor, arguments["generations"], arguments["prompt"])
        return sum(sum(each.returned) / 64 == length for each, length in zip(found, returned, strict=True))

    assert same(2.0) >= 14 and same(1.5) <= 1  # of 20: vLLM starts some completions a step later
