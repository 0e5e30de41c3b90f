"""`benchmarks/limits.py`: the least seconds of a step's phases, against loops over tokens."""

from itertools import combinations, product

import pytest
import torch
from places import BENCHMARKS
from transformers import AutoConfig, AutoModelForCausalLM


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


# Mixtures of experts


def counted(limits, size: str) -> tuple[int, int, int]:
    """Returns the weights of attention and of one expert in all layers, and of the head, of transformers' model."""
    import engines

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(engines.model_directory(size)))
    named = {name: param.numel() for name, param in model.named_parameters() if "norm" not in name}
    attention = sum(count for name, count in named.items() if ".self_attn." in name)
    experts = sum(count for name, count in named.items() if ".experts." in name)
    return attention, experts // model.config.num_experts, named["lm_head.weight"]


def reached_by_trying(experts: int, each: int, tokens: int) -> float:
    """Returns the mean number of different experts over every choice that the tokens can make."""
    choices = [*product(combinations(range(experts), each), repeat=tokens)]
    return sum(len(set().union(*chosen)) for chosen in choices) / len(choices)


def test_experts_that_tokens_reach(limits):
    for tokens in (1, 2, 3):
        mean = reached_by_trying(8, 2, tokens)
        assert limits.experts_reached("tiny-moe", tokens) == pytest.approx(mean, rel=1e-12)
        assert limits.experts_reached("7b", tokens) == 1
    assert mean < 5  # of 8, although 3 tokens have 6 choices


def test_weights_of_a_mixture(limits):
    """Qwen3-30B-A3B has 30.5B parameters, of which a token takes 3.3B with the embeddings and the head."""
    attention, expert, head = counted(limits, "30b-a3b")
    assert limits.weights_of("30b-a3b") == (attention + 8 * expert, head)
    assert limits.weights_of("30b-a3b", 128) == (attention + 128 * expert, head)
    assert sum(limits.weights_of("30b-a3b", 128)) + head == pytest.approx(30.53e9, rel=1e-3)
    assert sum(limits.weights_of("30b-a3b")) + head == pytest.approx(3.34e9, rel=1e-2)
    assert limits.cache_bytes("30b-a3b") == 96 << 10


def test_sampling_of_a_mixture_against_loops(limits):
    lengths, prompt = [3, 1, 2], 5
    attention, expert, _ = counted(limits, "tiny-moe")
    head = VOCABULARY * 256
    seconds = len(lengths) * prompt * 2 * (attention + 2 * expert) / 989e12
    all_experts = seconds
    for step in range(3):
        active = sum(length > step for length in lengths)
        cached = active * (prompt + step) * 2 * 2 * 2 * 2 * 128  # bytes, k and v, layers, heads, their width
        reads = (attention + experts * expert for experts in (reached_by_trying(8, 2, active), 8))
        own, of_all = ((2 * read + 2 * head + cached) / 4.8e12 for read in reads)
        seconds, all_experts = seconds + own, all_experts + of_all
    given = limits.sampling_limit("tiny-moe", H200, "bf16", prompt, 1, lengths)
    assert given == pytest.approx(seconds, rel=1e-9) and given < 0.99 * all_experts


def test_update_of_a_mixture_against_loops(limits):
    attention, expert, head = counted(limits, "30b-a3b")
    seconds = 0.0
    for length in LENGTHS:
        seconds += 3 * 2 * (attention + 8 * expert) * length / 989e12 + 2 * 2 * head * length / 989e12
        for keys in range(PROMPT, PROMPT + length):
            seconds += 48 * (2 * 2 + 5) * 2 * 32 * 128 * (keys + 0.5) / 989e12
    for _ in range(len(LENGTHS) // GENERATIONS):
        seconds += 3 * 2 * (attention + 8 * expert) * PROMPT / 989e12
        seconds += sum(48 * (2 * 2 + 5) * 2 * 32 * 128 * (keys + 0.5) for keys in range(PROMPT)) / 989e12
    given = limits.update_limit("30b-a3b", H200, "bf16", PROMPT, GENERATIONS, LENGTHS)
    assert given == pytest.approx(seconds, rel=1e-6)


# Hybrids


def test_weights_and_caches_of_a_hybrid(limits):
    """Qwen3.5-9B's text has 9.0B parameters; of its 32 layers 8 have keys and values, and 24 a state."""
    import engines

    config = AutoConfig.from_pretrained(engines.model_directory("9b"))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert sum(param.numel() for param in model.parameters()) == pytest.approx(8.95e9, rel=1e-3)
    matrices = {name: param.numel() for name, param in model.named_parameters() if param.ndim == 2}
    gates = [name for name in matrices if "in_proj_a" in name or "in_proj_b" in name]
    layers = sum(count for name, count in matrices.items() if ".layers." in name and name not in gates)
    assert len(gates) == 2 * 24 and limits.weights_of("9b") == (layers, matrices["lm_head.weight"])
    assert limits.kinds_of_layers("9b") == (8, 24) and limits.rarest_layers("9b") == 8
    assert limits.kinds_of_layers("7b") == (28, 0) and limits.rarest_layers("7b") == 28
    assert limits.cache_bytes("9b") == 8 * 2 * 4 * 256 * 2 and limits.state_bytes("9b") == 24 * 32 * 128 * 128 * 2


def test_sampling_and_update_of_a_hybrid_against_loops(limits):
    lengths, prompt = [3, 1, 2], 5
    layers, head = limits.weights_of("9b")
    seconds = len(lengths) * prompt * 2 * layers / 989e12
    for step in range(3):
        moved = 2 * layers + 2 * head
        for length in lengths:
            if step < length:
                moved += (prompt + step) * 8 * 2 * 4 * 256 * 2 + 2 * 24 * 32 * 128 * 128 * 2  # read, and written
        seconds += moved / 4.8e12
    assert limits.sampling_limit("9b", H200, "bf16", prompt, 1, lengths) == pytest.approx(seconds, rel=1e-9)
    tokens, pairs = sum(lengths), 0.0
    for length in lengths:
        pairs += sum(keys + 0.5 for keys in range(prompt + length))
    seconds = (3 * 2 * layers * (tokens + 3 * prompt) + 2 * 2 * head * tokens) / 989e12
    seconds += 8 * (2 * 2 + 5) * 2 * 16 * 256 * pairs / 989e12
    assert limits.update_limit("9b", H200, "bf16", prompt, 1, lengths) == pytest.approx(seconds, rel=1e-9)


@pytest.mark.long
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
