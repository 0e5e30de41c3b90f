"""Estimates a GPU's memory in a run, by part, only from the model's config.

    peak = held + max(training, sampling)

| part | meaning |
|---|---|
| policy | its weights, in the type in which it is loaded or in a frozen base's format |
| codes | the quantized copy of trained weights, with a `train_precision` and no frozen base |
| adapter | LoRA's weights |
| optimizer | the optimizer's states |
| reference | the reference model of a run with `beta`, unless an adapter is switched off for it |
| engine | the sampler's weights; with vLLM its cache and its work space as well |
| gradients | while training: of the trained weights |
| checkpoints | while training: each layer's input, kept by gradient checkpointing |
| work | while training: one layer, or the head, with its backward pass |
| cache | while sampling without vLLM: keys and values of a generation, and a hybrid's states |
| denoising | while a masked diffusion model samples: one layer without gradients, and its logits |
| beside | CUDA and libraries, which torch's allocator does not count |

The model is built on the meta device, where weights take no memory, and its parameters are counted. Only the memory of
a layer's backward pass cannot be counted this way. It is proportional to the tokens of a micro-batch, with a number of
bytes for each unit of the MLP's width and of the hidden width ([`WORK`]). These few numbers are the slopes that
`benchmarks/update.py` measured from 3B to 32B. Everything else is computed.

In a mixture of experts all experts count in weights, gradients and copies, and a layer's backward pass in the k experts
that a token reaches: with their widths, and with the rows of k experts' inputs and outputs.

In a hybrid a sequence has a state of one size in each layer that carries one, and keys and values in each layer with
attention. The backward pass of a layer counts as if it had attention alone.

Whole steps that were measured, of a mixture and a hybrid too, are compared with the estimate in docs/memory.md.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass

import torch
import transformers
from peft import PeftConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ..config import QuantGRPOConfig
from ..config.packed import why_not_packed
from ..formats import FORMATS
from ..layers.weight_only import BUFFER_BYTES
from ..models.families import EXPERT_PARTS
from ..models.linears import LinearLayer, linears
from ..policy.exact.model import ENGINES_ATTENTION
from ..policy.hybrids import is_hybrid, states_of
from ..policy.packed import accept_packed_rows, attention_of, shares_prompts
from ..precisions import PRECISIONS, unified_flows, with_products
from ..rollout.embedded.diffusion import CHUNK, TOKENS_AT_ONCE
from ..rollout.verify.kv_cache import CACHE_FORMATS


BF16_BYTES = 2
FP32_BYTES = 4
BESIDE = 900_000_000  # bytes of CUDA and libraries, 0.83 to 0.91 GB in `benchmarks/memory.py`
# Tile of the logits that TRL's fused head computes at a time: tokens, vocabulary entries
HEAD_TILE = (4096, 32768)
# Prefix of `optim` -> function from the bytes of a parameter to the bytes of its optimizer state
OPTIMIZERS = {
    "adamw_torch_8bit": lambda size: 2,
    "adamw_torch_4bit": lambda size: 1,
    "adamw_8bit": lambda size: 2,
    "adamw_bnb_8bit": lambda size: 2,
    "paged": lambda size: 0,  # it moves to the host's memory where the GPU's is short
    "adamw": lambda size: 2 * size,
    "lion_8bit": lambda size: 1,
    "lion": lambda size: size,
    "sgd": lambda size: 0,
    "adafactor": lambda size: 0,
}


@dataclass(frozen=True)
class Work:
    """
    Memory of a layer's backward pass for each token.

    Attributes:
        wide (`int`): Bytes for each unit of the MLP's width.
        hidden (`int`): Bytes for each unit of the hidden width.
    """

    wide: int
    hidden: int


# In BF16, gate, up, silu(gate), their product and its gradient take 10 bytes for each unit of the MLP's width. PEFT's
# branch needs further gradients, which a fused adapter does not.
WORK = {
    "weights": Work(12, 35),
    "adapter": Work(14, 35),
    "frozen": Work(12, 17),
    "unified": Work(12, 20),
    "unified in groups": Work(20, 16),
}
# Bytes for each unit of the hidden width and each expert that a token reaches: in BF16, the row that the expert gets,
# its output, the output weighed by the router, and the gradients of the three
ROWS_OF_EXPERT = 12


@dataclass(frozen=True)
class Shape:
    """
    Sizes of a model.

    Attributes:
        linear (`int`): Parameters of the decoder's linear layers and experts, which are quantized.
        other (`int`): All other parameters.
        adapter (`int`): Parameters of the adapter.
        embeddings (`int`): Parameters of embeddings and head, which an engine may share.
        head (`int`): Parameters of the head.
        hidden (`int`): Width of the residual stream.
        wide (`int`): Width of the MLP: in a mixture, of all experts that a token reaches.
        layers (`int`): Decoder layers.
        token (`int`): Values that the KV cache holds for a token.
        state (`int`): Values that the states of a hybrid hold for a sequence, in FP32; 0 in another model.
        window (`int`): Values that its convolutions keep of a sequence.
        experts (`int`): Parameters of all routed experts; 0 in a dense model.
        per_token (`int`): Number of experts that a token reaches in a layer; 0 in a dense model.
        active (`int`): Parameters that compute a token, which are those of `per_token` experts and all others.
    """

    linear: int
    other: int
    adapter: int
    embeddings: int
    head: int
    hidden: int
    wide: int
    layers: int
    token: int
    state: int
    window: int
    experts: int
    per_token: int
    active: int

    @property
    def parameters(self) -> int:
        """The number of parameters without the adapter's."""
        return self.linear + self.other

    @property
    def is_counted(self) -> bool:
        """Whether its decoder has linear layers, and experts only in tensors of which a token's are known."""
        return self.linear > 0 and (not self.experts or self.per_token > 0)

    @classmethod
    def of(cls, config: PreTrainedConfig, peft_config: PeftConfig | None = None) -> "Shape":
        """Counts the sizes of a model from its config. Nothing is loaded."""
        kind = getattr(transformers, (config.architectures or [""])[0], None)
        with torch.device("meta"):
            model = kind(config) if kind is not None else AutoModelForCausalLM.from_config(config)
            model.tie_weights()
            layers = linears(model).values()
            linear = sum(math.prod(layer.shape) for layer in layers)
            experts = sum(math.prod(layer.shape) for layer in layers if layer.is_expert)
            parameters = sum(parameter.numel() for parameter in model.parameters())
            tables = {id(table): table for table in _tables(model)}
            head = model.get_output_embeddings()
            adapter = 0
            if peft_config is not None:
                adapted = get_peft_model(model, peft_config)
                adapter = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
        text = config.get_text_config()
        held = [layer for layer in layers if layer.holds_experts]
        per_token = getattr(text, "num_experts_per_tok", 0) if held else 0
        asleep = sum(math.prod(layer.shape[1:]) * (layer.shape[0] - per_token) for layer in held)
        heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        kinds = getattr(text, "layer_types", None) or []
        attending = text.num_hidden_layers - kinds.count("linear_attention")  # the others keep a state of one size
        size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        state, window = states_of(model)
        return cls(
            linear=linear,
            other=parameters - linear,
            adapter=adapter,
            embeddings=sum(table.numel() for table in tables.values()),
            head=head.weight.numel(),
            hidden=text.hidden_size,
            wide=_width(layers, per_token),
            layers=text.num_hidden_layers,
            token=2 * attending * heads * size,
            state=state,
            window=window,
            experts=experts,
            per_token=per_token,
            active=parameters - asleep,
        )

    def cache(self, sequences: int, tokens: int, size: int, wide: int) -> int:
        """
        Returns the bytes of the cache of some sequences with `tokens` tokens each: keys and values of `size` bytes,
        windows of convolutions of `wide` bytes, and states.
        """
        return sequences * (tokens * self.token * size + self.window * wide + self.state * FP32_BYTES)


def _width(layers: Collection[LinearLayer], per_token: int) -> int:
    """
    Returns the largest number of inputs that a token has at a matrix. Its experts count together, with a shared one.
    """
    widths = [layer.shape[-1] for layer in layers]
    for layer in layers:
        if layer.holds_experts and EXPERT_PARTS[layer.name.rpartition(".")[2]] == 1:
            block = layer.name.rsplit(".", 2)[0]
            beside = [x for x in layers if x.name.startswith(f"{block}.") and not x.is_expert and len(x.fused) == 1]
            widths.append(per_token * layer.shape[-1] + sum(x.shape[-1] for x in beside))
    return max(widths, default=0)


def _tables(model: nn.Module) -> list[nn.Parameter]:
    return [model.get_input_embeddings().weight, model.get_output_embeddings().weight]


@dataclass(frozen=True)
class Memory:
    """
    Bytes by part. `held` stays allocated; `training` and `sampling` are needed alternately. An engine with sleep mode
    counts in `sampling`.
    """

    held: dict[str, int]
    training: dict[str, int]
    sampling: dict[str, int]

    @property
    def peak(self) -> int:
        """The peak of torch's allocator."""
        return sum(self.held.values()) + max(sum(self.training.values()), sum(self.sampling.values()))

    @property
    def card(self) -> int:
        """The memory that a card must have."""
        return self.peak + BESIDE


def has_prompts_once(args: QuantGRPOConfig, policy: PreTrainedModel, processing_class) -> bool:
    """
    Whether the trainer of a run computes a prompt once for its completions in a micro-batch. The policy is asked what
    [`~trainers.packing.packed_rows`] asks of a loaded one. It stays as it is.

    Args:
        args ([`QuantGRPOConfig`]): The run's settings.
        policy ([`~transformers.PreTrainedModel`]): The policy, with or without its weights, and without an adapter.
        processing_class: The policy's tokenizer or processor.
    """
    if args.spec.packs is False or why_not_packed(args, policy.config, processing_class) is not None:
        return False
    if is_hybrid(policy):  # its kernels, which decide whether it packs, cannot run without weights
        return False
    own, given = attention_of(policy), (args.model_init_kwargs or {}).get("attn_implementation")
    # By its name alone, since another machine may have the library that this one lacks
    policy.config._attn_implementation = ENGINES_ATTENTION if args.exact_rollouts else given or own
    try:
        accept_packed_rows(policy)
        return shares_prompts(policy)
    except ValueError:
        return False
    finally:
        policy.config._attn_implementation = own


def estimate(
    args: QuantGRPOConfig,
    shape: Shape,
    dtype: torch.dtype,
    prompt: int,
    card: int,
    prompts_once: bool = False,
) -> Memory:
    """
    Estimates the memory of one GPU that holds the whole policy, without FSDP or DeepSpeed.

    Args:
        args ([`QuantGRPOConfig`]): The run's settings, with a `max_completion_length`.
        shape ([`Shape`]): The model's sizes.
        dtype (`torch.dtype`): Type in which the policy is loaded.
        prompt (`int`): Tokens of the longest prompt.
        card (`int`): Bytes of the GPU. vLLM takes a share of them.
        prompts_once (`bool`, *optional*, defaults to `False`):
            Whether a prompt is computed once for its completions in a micro-batch, as [`has_prompts_once`] says.

    Returns:
        [`Memory`]: The estimate.
    """
    held = _held(args, shape, dtype)
    engine, cache = _engine(args, shape, dtype, prompt, card)
    sampling = {"cache": cache}
    if args.denoises:
        sampling["denoising"] = _denoising(args, shape, prompt)
    if args.use_vllm and args.vllm_enable_sleep_mode:
        sampling["engine"] = engine
    else:
        held["engine"] = engine
    rows = args.per_device_train_batch_size
    prompts = _most_prompts(args, rows) if prompts_once else rows
    tokens = rows * args.max_completion_length + prompts * prompt
    return Memory(held, _training(args, shape, dtype, tokens), sampling)


def _held(args, shape: Shape, dtype: torch.dtype) -> dict[str, int]:
    size, adapted = dtype.itemsize, shape.adapter > 0
    trained = shape.adapter if adapted else shape.parameters
    policy = size * shape.parameters
    is_frozen = args.spec.training.freezes_base
    if is_frozen:
        policy = _in_bits(shape.linear, args.train_precision) + size * shape.other
    held = {"policy": policy}
    if args.train_precision is not None and not is_frozen:
        held["codes"] = _in_bits(shape.linear, args.train_precision)
    if adapted:
        held["adapter"] = FP32_BYTES * shape.adapter  # PEFT holds it in FP32, whatever the policy's type
    held["optimizer"] = trained * _state(args.optim.value, FP32_BYTES if adapted else size)
    if args.needs_reference and not adapted:
        held["reference"] = policy
    return held


def _in_bits(parameters: int, precision: str) -> int:
    format = PRECISIONS[precision].format
    return round(parameters * (16 if format is None else FORMATS[format].bits) / 8)


def _state(optimizer: str, size: int) -> int:
    """Returns the bytes of optimizer state for a parameter. An unknown optimizer counts as AdamW."""
    kinds = [kind for kind in OPTIMIZERS if optimizer.startswith(kind)]
    return OPTIMIZERS[max(kinds, key=len, default="adamw")](size)


def _engine(args, shape: Shape, dtype: torch.dtype, prompt: int, card: int) -> tuple[int, int]:
    """Returns the engine's bytes beside the policy, and those of a cache that it holds only while it samples."""
    name = args.spec.source
    if name == "server":
        return 0, 0
    if name == "colocate":
        return sum(_vllm(args, shape, card)), 0
    size = BF16_BYTES if args.bf16 or args.fp16 else dtype.itemsize
    cache = shape.cache(completions_in_flight(args), prompt + args.max_completion_length, size, size)
    if args.denoises and not args.cache_finished_blocks:
        cache = 0
    if name not in ("embedded", "diffusion"):
        return 0, cache
    if name == "diffusion" and args.spec.sampled_in in with_products():  # only codes, as on a GPU
        return _in_bits(shape.linear, args.spec.sampled_in) + shape.other * dtype.itemsize, cache
    mixed = args.bf16 or dtype == torch.bfloat16
    format = FORMATS.get(PRECISIONS[args.spec.sampled_in].format)
    in_groups = format is not None and format.activations is not None and format.grouped
    linear = FP32_BYTES if in_groups or not mixed else BF16_BYTES
    return shape.linear * linear + shape.other * dtype.itemsize, cache


def _denoising(args, shape: Shape, prompt: int) -> int:
    """Returns the bytes of a denoising step: the residual stream and an MLP in BF16, and later a block's logits."""
    columns = prompt + args.max_completion_length
    rows = min(args.generation_batch_size // args.world_size, max(1, TOKENS_AT_ONCE // columns))
    layer = BF16_BYTES * rows * columns * (3 * shape.wide + 4 * shape.hidden)
    logits = rows * args.block_length * shape.head // shape.hidden
    # Tokens are drawn in float64 from parts of the logits: these parts, the noise, and their sum
    return max(layer, BF16_BYTES * logits + 3 * 8 * min(logits, CHUNK))


def completions_in_flight(args) -> int:
    """Returns the number of completions that one GPU samples at a time."""
    groups = math.ceil(args.rollouts_in_flight * (args.generation_batch_size // args.num_generations))
    return math.ceil(groups * args.num_generations / args.world_size)


def cache_of(args, shape: Shape, prompt: int, card: int) -> tuple[int, int]:
    """
    Returns the bytes of the cache of a GPU's completions in flight at their longest, and the bytes that vLLM in the
    trainer's process has for them.
    """
    dtype = (args.vllm_engine_kwargs or {}).get("kv_cache_dtype", "auto")
    size = 1 if dtype in CACHE_FORMATS else BF16_BYTES
    _, room = _vllm(args, shape, card)
    tokens = prompt + args.max_completion_length
    return shape.cache(completions_in_flight(args), tokens, size, BF16_BYTES), room


def _vllm(args, shape: Shape, card: int) -> tuple[int, int]:
    """Returns the bytes of vLLM's weights, and of its cache: what its share of the card leaves, or what is given."""
    shares = args.spec.training.freezes_base and args.spec.samples_as_trained and args.lora_sync == "adapter"
    if shares:
        weights = BF16_BYTES * (shape.other - shape.embeddings)
    elif args.spec.sampled_in is None:
        weights = BF16_BYTES * shape.parameters
    else:
        weights = _in_bits(shape.linear, args.spec.sampled_in) + BF16_BYTES * shape.other
    adapter = BF16_BYTES * shape.adapter if args.lora_sync == "adapter" else 0
    least = (weights + adapter) // args.vllm_tensor_parallel_size
    cache = (args.vllm_engine_kwargs or {}).get("kv_cache_memory_bytes")
    if cache is not None:
        return least, int(cache)
    return least, max(round(args.vllm_gpu_memory_utilization * card) - least, 0)


def _training(args, shape: Shape, dtype: torch.dtype, tokens: int) -> dict[str, int]:
    """Returns the bytes of a micro-batch of so many `tokens`."""
    adapted, mixed = shape.adapter > 0, args.bf16 or args.fp16
    gradients = FP32_BYTES * shape.adapter if adapted else dtype.itemsize * shape.parameters
    stream = dtype.itemsize * shape.hidden * tokens  # one copy of the residual stream
    kind = WORK[_kind(args, adapted)]
    layer = tokens * (kind.wide * shape.wide + (kind.hidden + ROWS_OF_EXPERT * shape.per_token) * shape.hidden)
    rows, columns = HEAD_TILE
    head = BF16_BYTES * min(tokens, rows) * columns + (FP32_BYTES + BF16_BYTES) * shape.hidden * tokens
    if not adapted:
        head += FP32_BYTES * shape.head  # the head's gradient is summed in FP32
    decodes = args.train_precision is not None and args.train_precision not in unified_flows()
    decoded = BUFFER_BYTES if decodes else 0  # of one weight at a time
    if not args.gradient_checkpointing:
        return {"gradients": gradients, "activations": layer * shape.layers + max(head - layer, decoded)}
    # Autocast keeps its 16-bit copies of trained weights until the forward pass ends
    copies = BF16_BYTES * shape.linear if dtype == torch.float32 and mixed and not adapted else 0
    work = max(layer + decoded, head, copies + BF16_BYTES * min(tokens, rows) * columns)
    return {"gradients": gradients, "checkpoints": stream * shape.layers, "work": work}


def _most_prompts(args, rows: int) -> int:
    """Returns of how many prompts a micro-batch of `rows` completions can be."""
    groups, rest = divmod(rows * args.steps_per_generation, args.num_generations)
    return min(rows, groups + 2 * bool(rest))  # a rank may have parts of two more groups


def _kind(args, adapted: bool) -> str:
    """Returns the key of [`WORK`] for a run."""
    if args.train_precision in unified_flows():
        grouped = FORMATS[PRECISIONS[args.train_precision].format].grouped
        return "unified in groups" if grouped else "unified"
    if args.spec.training.freezes_base:
        return "frozen"
    return "adapter" if adapted else "weights"
