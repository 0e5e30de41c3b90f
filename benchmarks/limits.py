"""
The least time that a GPU needs for the two long phases of a step.

    sampling = sum over decode steps of  max(bytes / bandwidth, operations / rate)  +  the prompts' operations / rate
    update   = operations / rate

A decode step reads the weights of the layers, a BF16 head, and the keys and values of all tokens so far, each once. It
has two operations for each weight and each completion that has not ended.

In a mixture of experts a token has operations with its k experts alone, and a decode step reads the experts that its n
tokens reach. If each token takes any k of the E experts with the same probability, those are on average

    E (1 - (1 - k/E)^n)

of each layer. Routers are left out.

In a hybrid one layer in four has attention, whose queries come with a gate, and with it keys and values. The others
have linear attention: a state of one size for each sequence, which a decode step reads and writes. It counts in 16
bits, in which vLLM holds it unless a model's config asks for 32. The operations on it, gates and convolutions are left
out.

An update has two operations for each weight of the layers, each token and each product: forward, forward again because
of gradient checkpointing, dX, and dW if all weights are trained. The head has them for completions alone, without the
second forward. Attention is causal, has two products in a forward pass, which is computed twice, and five in the
backward pass.

Each prompt counts once, however many completions it has, and padding does not count. `rate` is that of dense products:
8-bit ones have twice the rate of BF16, which the head and attention have in every precision.
"""

from engines import ATTENDS_EVERY, BANDWIDTH, FLOPS, SHAPES, VOCABULARY, family_of, of_card

from trl_quant.formats import FORMATS
from trl_quant.precisions import PRECISIONS


def head_width(size: str) -> int:
    """Returns the width of a head of attention."""
    shape = SHAPES[size]
    return shape.get("head_dim", shape["hidden_size"] // shape["heads"])


def kinds_of_layers(size: str) -> tuple[int, int]:
    """Returns the numbers of layers with attention and with linear attention."""
    layers = SHAPES[size]["num_hidden_layers"]
    attending = layers // ATTENDS_EVERY if family_of(size) == "Qwen3.5" else layers
    return attending, layers - attending


def rarest_layers(size: str) -> int:
    """Returns the number of layers of the rarest kind."""
    return min(filter(None, kinds_of_layers(size)))


def linear_widths(size: str) -> tuple[int, int]:
    """Returns the widths of keys and of values in linear attention, all heads together."""
    shape = SHAPES[size]
    keys = shape["linear_num_key_heads"] * shape["linear_key_head_dim"]
    return keys, shape["linear_num_value_heads"] * shape["linear_value_head_dim"]


def weights_of(size: str, experts: float | None = None) -> tuple[float, int]:
    """
    Returns the numbers of weights in the linear layers of all decoder layers, and in the head. In a mixture, `experts`
    of each layer count; by default those that a token has operations with. A dense MLP is one expert.
    """
    shape = SHAPES[size]
    hidden, inner = shape["hidden_size"], shape.get("moe_intermediate_size") or shape["intermediate_size"]
    attending, linear = kinds_of_layers(size)
    mixers = attending * 2 * hidden * head_width(size) * (shape["heads"] + shape["kv_heads"])
    if linear:
        keys, values = linear_widths(size)
        mixers += attending * hidden * head_width(size) * shape["heads"]  # the gate of the queries
        mixers += linear * hidden * (2 * keys + 3 * values)  # q, k, v, z, and the output
    experts = shape.get("num_experts_per_tok", 1) if experts is None else experts
    mlps = shape["num_hidden_layers"] * experts * 3 * hidden * inner
    return mixers + mlps, shape.get("vocab_size", VOCABULARY) * hidden


def experts_reached(size: str, tokens: int) -> float:
    """Returns the expected number of different experts that `tokens` tokens reach in a layer; 1 for a dense MLP."""
    shape = SHAPES[size]
    experts = shape.get("num_experts", 1)
    return experts * (1 - (1 - shape.get("num_experts_per_tok", 1) / experts) ** tokens)


def weight_bytes(size: str, precision: str, tokens: int = 1) -> float:
    """
    Returns the bytes of the weights that a decode step of `tokens` tokens reads: the linear layers' in `precision`, and
    a BF16 head.
    """
    layers, head = weights_of(size, experts_reached(size, tokens))
    format = PRECISIONS[precision].format
    return layers * (16 if format is None else FORMATS[format].bits) / 8 + 2 * head


def cache_bytes(size: str) -> int:
    """Returns the bytes of one token's keys and values in BF16."""
    attending, _ = kinds_of_layers(size)
    return 2 * 2 * attending * SHAPES[size]["kv_heads"] * head_width(size)


def state_bytes(size: str) -> int:
    """Returns the bytes of one sequence's states in BF16: in each linear layer a matrix for each head of the values."""
    _, linear = kinds_of_layers(size)
    if not linear:
        return 0
    _, values = linear_widths(size)
    return 2 * linear * values * SHAPES[size]["linear_key_head_dim"]


def step_bytes(size: str, precision: str, sequences: int, tokens: float) -> float:
    """Returns the bytes that a decode step of so many sequences moves, with `tokens` tokens before each."""
    states = 2 * state_bytes(size)  # read and written
    return weight_bytes(size, precision, sequences) + sequences * (tokens * cache_bytes(size) + states)


def pool_bytes(size: str, sequences: int, tokens: int) -> int:
    """Returns the bytes that vLLM needs for so many sequences. A hybrid's caches come in pages as large as a state."""
    return int(1.1 * sequences * (tokens * cache_bytes(size) + 2 * state_bytes(size))) + (64 << 20)


def rate_of(precision: str, machine: str) -> float:
    """Returns the operations a second of products whose weights and inputs are in `precision`."""
    format = PRECISIONS[precision].format
    has_8_bit_inputs = format is not None and FORMATS[format].activations is not None
    return of_card(FLOPS, machine) * (2 if has_8_bit_inputs else 1)


def sampling_limit(size: str, machine: str, precision: str, prompt: int, generations: int, lengths: list[int]) -> float:
    """Returns the least seconds for sampling completions of these `lengths` on prompts of `prompt` tokens."""
    layers, head = weights_of(size)
    bandwidth, rate, rate_16 = of_card(BANDWIDTH, machine), rate_of(precision, machine), rate_of("bf16", machine)
    prompts = len(lengths) / generations
    seconds = 2 * layers * prompts * prompt / rate
    for step in range(max(lengths)):
        active = sum(length > step for length in lengths)
        moved = step_bytes(size, precision, active, prompt + step)
        multiplied = 2 * active * (layers / rate + head / rate_16)
        seconds += max(moved / bandwidth, multiplied)
    return seconds


def update_limit(
    size: str, machine: str, precision: str, prompt: int, generations: int, lengths: list[int], lora: bool = True
) -> float:
    """Returns the least seconds for an update with gradient checkpointing, its products in `precision`."""
    layers, head = weights_of(size)
    shape, completions = SHAPES[size], sum(lengths)
    prompts = len(lengths) / generations
    products = 3 if lora else 4
    seconds = 2 * products * layers * (completions + prompts * prompt) / rate_of(precision, machine)
    # Of a token with each token before it: one product for the scores and one for their sums, all heads each
    pairs = prompts * prompt**2 / 2 + sum(length * prompt + length**2 / 2 for length in lengths)
    attending, _ = kinds_of_layers(size)
    attention = 2 * shape["heads"] * head_width(size) * attending * pairs * (2 * 2 + 5)
    return seconds + (2 * (2 if lora else 3) * head * completions + attention) / rate_of("bf16", machine)
