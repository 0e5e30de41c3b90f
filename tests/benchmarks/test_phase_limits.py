"""`benchmarks/limits.py`: the least seconds of a step's phases, against loops over tokens."""

import pytest
from places import BENCHMARKS


H200, H100 = "NVIDIA H200", "NVIDIA H100 80GB HBM3"
LENGTHS, PROMPT, GENERATIONS = [3, 70, 1, 20], 5, 2
# Qwen2.5 7B: hidden size, inner size, layers, outputs of k or v, vocabulary
HIDDEN, INNER, LAYERS, KEYS, VOCABULARY = 3584, 18944, 28, 512, 152064
WEIGHTS = {
    "q": HIDDEN * HIDDEN,
    "k": HIDDEN * KEYS,
    "v": HIDDEN * KEYS,
    "o": HIDDEN * HIDDEN,
    "gate": HIDDEN * INNER,
    "up": HIDDEN * INNER,
    "down": INNER * HIDDEN,
}
HEAD = VOCABULARY * HIDDEN


@pytest.fixture
def limits(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import limits

    return limits


def sampling_in_loops(bytes_of_a_weight: float, rate: float) -> float:
    layers = LAYERS * sum(WEIGHTS.values())
    seconds = 0.0
    for _ in range(len(LENGTHS) // GENERATIONS):
        for _ in range(PROMPT):
            seconds += 2 * layers / rate
    for step in range(max(LENGTHS)):
        read, operations = bytes_of_a_weight * layers + 2 * HEAD, 0.0
        for length in LENGTHS:
            if step < length:
                for _ in range(PROMPT + step):  # keys and values of each token, two bytes for each number
                    read += LAYERS * 2 * KEYS * 2
                operations += 2 * layers / rate + 2 * HEAD / 989e12
        seconds += max(read / 4.8e12, operations)
    return seconds


@pytest.mark.parametrize(
    "precision, size, rate", [("bf16", 2, 989e12), ("fp8", 1, 2 * 989e12), ("nvfp4", 9 / 16, 989e12)]
)
def test_sampling_against_loops(limits, precision, size, rate):
    given = limits.sampling_limit("7b", H200, precision, PROMPT, GENERATIONS, LENGTHS)
    # FP8's one scale for each output counts too: 4 bytes of 3584 weights and more
    assert given == pytest.approx(sampling_in_loops(size, rate), rel=1e-3)
    longest_alone = limits.sampling_limit("7b", H200, precision, PROMPT, 1, [max(LENGTHS)])
    assert 0.95 * given < longest_alone < given  # a decode step of few completions reads the weights all the same


def test_many_completions_are_bound_by_products(limits):
    few, many = ([length] * count for length, count in ((50, 2), (50, 2048)))
    by_weights = limits.weight_bytes("7b", "bf16") / 4.8e12
    assert limits.sampling_limit("7b", H200, "bf16", 1, 2, few) == pytest.approx(50 * by_weights, rel=0.01)
    assert limits.sampling_limit("7b", H200, "bf16", 1, 2, many) > 5 * 50 * by_weights


def update_in_loops(rate: float, lora: bool) -> float:
    layers, seconds = LAYERS * sum(WEIGHTS.values()), 0.0
    products = ["forward", "forward again", "dX"] + ([] if lora else ["dW"])
    prompts = [PROMPT] * (len(LENGTHS) // GENERATIONS)
    for _ in products:
        for tokens in (*prompts, *LENGTHS):
            seconds += 2 * layers * tokens / rate
    for _ in products:
        for tokens in LENGTHS:
            seconds += 2 * HEAD * tokens / 989e12
    seconds -= 2 * HEAD * sum(LENGTHS) / 989e12  # the head has no second forward
    for position in [range(PROMPT) for _ in prompts] + [range(PROMPT, PROMPT + length) for length in LENGTHS]:
        for keys in position:
            seconds += LAYERS * (2 * 2 + 5) * 2 * HIDDEN * (keys + 0.5) / 989e12
    return seconds


@pytest.mark.parametrize("lora", [True, False])
@pytest.mark.parametrize("precision, rate", [("bf16", 989e12), ("fp8_block", 2 * 989e12), ("mxfp4", 989e12)])
def test_updates_against_loops(limits, precision, rate, lora):
    given = limits.update_limit("7b", H200, precision, PROMPT, GENERATIONS, LENGTHS, lora)
    assert given == pytest.approx(update_in_loops(rate, lora), rel=1e-6)
    assert given != pytest.approx(limits.update_limit("7b", H200, precision, PROMPT, 1, LENGTHS, lora), rel=1e-3)


@pytest.mark.slow
def test_measured_phases_are_above_their_limits(monkeypatch):
    """Of each run with drawn lengths; the H200 and the H100 differ in memory alone."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import raw_results
    import step_runs

    names = ("lognormal", "all", "another-host", "weights")
    files = [path for name in names for path in BENCHMARKS.glob(f"results/step-7b-{name}-*.json.xz")]
    assert len(files) == 6
    for path in files:
        found = raw_results.read_results(path)
        for run in found["runs"]:
            for shape, result in run["results"].items():
                steps, lengths = result["steps"], found["lengths"][shape]
                sampling, update = step_runs.limits_of(run, found["machine"], found["arguments"], lengths[1:])
                assert sampling < min(step["sampling"] for step in steps)
                assert update < min(step["update"] for step in steps)
                (on_h200, update_there), (on_h100, update_here) = (
                    step_runs.limits_of(run, card, found["arguments"], lengths[1:]) for card in (H200, H100)
                )
                assert on_h100 > 1.3 * on_h200 and update_here == update_there
