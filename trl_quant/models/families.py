"""The one table of model families: how each computes, and what of this package acts on it. A new family is one entry.

Most decoders of transformers have Llama's norm and MLP under other class names. The fused kernels take the place of
these classes; a family without them trains with its own classes, which give the same results and are slower:

    RMSNorm(x) = w * x / rms(x)
    MLP(x) = down_proj(act_fn(gate_proj(x)) * up_proj(x))

Two norms of each decoder layer feed only linear layers: one feeds q, k and v, the other gate and up. In a mixture of
experts, the other feeds the router, gate and up of each expert, and those of a shared expert with the gate that weighs
it. In Cohere's layers one norm feeds all five. A factor on such a norm's gain scales the inputs of those layers, and
nothing else. Noise (AQN) and scaling (UAQ) need a family whose feeding norms are known:

    RMSNorm_w(x) = w * x / rms(x)            the weight is the gain            (Llama, Qwen2, Qwen3, Mistral, Phi-3)
    RMSNorm_w(x) = (1 + w) * x / rms(x)      the weight is the gain minus one  (Gemma, Gemma 2, Gemma 3)
    LayerNorm_w(x) = w * (x - m) / std(x)    without a bias, which a factor on w would leave  (Cohere, Cohere 2)

Gemma and GLM-4 also normalize the outputs of attention and MLP (sandwich norms). Those norms feed the residual stream,
so Gemma's `post_attention_layernorm` must not be touched; its `pre_feedforward_layernorm` feeds the MLP. OLMo 2, OLMo 3
and EXAONE 4 have no other norms but those.

Hybrids carry a state from token to token, in some of their layers or in a part of each: Qwen3.5 and Qwen3-Next by the
gated delta rule, Falcon-H1 by a state-space model. One norm feeds all that reads a layer's input: q, k and v, or the
projections of linear attention, its gates among them. The norm inside of linear attention is weighed by one of these
projections, so it feeds none. A packed row needs kernels that take the borders of its sequences ([`~policy.hybrids`]).

A model's config, not its family, says where its positions depend on the batch ([`~models.positions`]). Linear layers
are found in any decoder, with the names that the families in the table use.
"""

import re
import sys
from typing import NamedTuple

from torch import nn


class Family(NamedTuple):
    """
    What the models of one family share.

    Attributes:
        feeds (`dict[str, tuple[str, ...]]`):
            norm -> the linear layers that it feeds, by their paths in a decoder layer. Empty if they are not known. A
            layer of a mixture has some of them: it is dense, or has experts.
        offset (`bool`): Whether a norm stores its gain minus one.
        fused (`tuple[tuple[str, ...], ...]`):
            Layers of one parent module that engines compute as one matrix, by the last part of their names, in the
            order of that matrix.
        packs (`bool`): Whether its attention is known to compute packed rows.
        recurrent (`str` or `None`):
            Of a hybrid, in which a state passes from token to token in some layers or in a part of each: the field of
            its config with the number of values that this state has for each input of the layer's `out_proj`.
        pads (`bool`):
            Whether a padded row is known to compute what the row does alone. It does not where attention depends on
            the place of a token and not on distances alone: transformers counts places from the padding on.
        exact (`bool`): Whether its forward pass is known to have the bits of vLLM's ([`~policy.exact`]).
        whole_images (`bool`): Whether the tokens of an image see each other, those after them too.
        both_ways (`bool`): Whether its attention is known to follow `is_causal=False` in a config.
        mixture (`bool`):
            Whether it is a mixture of experts that the embedded engine samples from: gated MLPs without biases, in
            tensors (experts, out, in).
        scores (`str` or `None`):
            torch's function of a router's logits from which experts get their weights ([`~models.routers`]); `None` for
            a dense family.
        read (`tuple[str, ...]`):
            Linear layers of whose modules a kernel that trains reads nothing but the weight, by their paths in a
            decoder layer: what replaces or wraps such a module would not act.
        norm (`str` or `None`): transformers' class of its RMSNorm; `None` if it computes another function than Llama's.
        mlp (`str` or `None`): transformers' class of its MLP; `None` if it computes another function than Llama's.
        vllm (`str` or `None`):
            What vLLM 0.31 was seen to run it with: a class of vLLM's `"own"`, or `"transformers"`' class. vLLM runs the
            other families with transformers' class too, where `vllm_model_impl` asks for that.
        wider_in_vllm (`int`): Tokens that vLLM's layers with a window see beyond those that transformers' see.
    """

    feeds: dict[str, tuple[str, ...]] = {}
    offset: bool = False
    fused: tuple[tuple[str, ...], ...] = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
    packs: bool = False
    recurrent: str | None = None
    pads: bool = True
    exact: bool = False
    both_ways: bool = False
    whole_images: bool = False
    mixture: bool = False
    scores: str | None = None
    read: tuple[str, ...] = ()
    norm: str | None = None
    mlp: str | None = None
    vllm: str | None = None
    wider_in_vllm: int = 0


_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
_OWN, _TRANSFORMERS = {"vllm": "own"}, {"vllm": "transformers"}
_ATTENDS = {"packs": True, "both_ways": True}
_FEEDS = {"input_layernorm": _QKV, "post_attention_layernorm": _GATE_UP}
_PRE_NORM = {"feeds": _FEEDS, **_ATTENDS}
_SANDWICH = {"feeds": {"input_layernorm": _QKV, "pre_feedforward_layernorm": _GATE_UP}, "offset": True, **_ATTENDS}
_JOINED = {
    "feeds": {"input_layernorm": ("self_attn.qkv_proj",), "post_attention_layernorm": ("mlp.gate_up_proj",)},
    "fused": (),
    **_ATTENDS,
}
_JOINS_MLP = {
    "feeds": {"input_layernorm": _QKV, "post_attention_layernorm": ("mlp.gate_up_proj",)},
    "fused": (("q_proj", "k_proj", "v_proj"),),
    **_ATTENDS,
}
_UNGATED = {**_JOINS_MLP, "feeds": {"input_layernorm": _QKV, "post_attention_layernorm": ("mlp.up_proj",)}}
_ONE_NORM = {"feeds": {"input_layernorm": (*_QKV, *_GATE_UP)}, **_ATTENDS}
ROUTER_PLACE = "mlp.gate"
_ROUTED = (ROUTER_PLACE, "mlp.experts.gate_up_proj")
_SHARED = ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj", "mlp.shared_expert_gate")
_SHARED += ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj")
_MIXTURE = {
    "feeds": {"input_layernorm": _QKV, "post_attention_layernorm": (*_GATE_UP, *_ROUTED, *_SHARED)},
    "mixture": True,
    "scores": "softmax",
    "packs": True,
}
_LINEAR = ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z", "linear_attn.in_proj_a", "linear_attn.in_proj_b")
_LINEAR_JOINED = ("linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba")
_DELTA = {"offset": True, "packs": True, "recurrent": "linear_key_head_dim"}

# model_type of a transformers config -> its family. Classes are those of `transformers.models.X.modeling_X`.
FAMILIES = {
    "qwen2": Family(norm="Qwen2RMSNorm", mlp="Qwen2MLP", exact=True, **_PRE_NORM, **_OWN),
    "qwen3": Family(norm="Qwen3RMSNorm", mlp="Qwen3MLP", exact=True, **_PRE_NORM, **_OWN),
    "llama": Family(norm="LlamaRMSNorm", mlp="LlamaMLP", exact=True, **_PRE_NORM, **_OWN),
    "mistral": Family(norm="MistralRMSNorm", mlp="MistralMLP", exact=True, **_PRE_NORM, **_OWN),
    "phi3": Family(norm="Phi3RMSNorm", exact=True, **_JOINED, **_OWN),
    "gemma2": Family(**_SANDWICH, **_OWN),
    "gemma3": Family(whole_images=True, **_SANDWICH, **_OWN),
    "gemma3_text": Family(**_SANDWICH, **_OWN),
    "arcee": Family(norm="ArceeRMSNorm", **_UNGATED, **_OWN),
    "cohere": Family(**_ONE_NORM, **_OWN),
    "cohere2": Family(wider_in_vllm=1, **_ONE_NORM, **_OWN),
    "cwm": Family(norm="CwmRMSNorm", mlp="CwmMLP", **_PRE_NORM, **_OWN),
    "ernie4_5": Family(norm="Ernie4_5RMSNorm", mlp="Ernie4_5MLP", **_PRE_NORM, **_OWN),
    "exaone4": Family(norm="Exaone4RMSNorm", mlp="Exaone4MLP", **_ATTENDS, **_OWN),
    "gemma": Family(offset=True, **_PRE_NORM, **_OWN),
    "glm": Family(norm="GlmRMSNorm", **_JOINS_MLP, **_OWN),
    "glm4": Family(norm="Glm4RMSNorm", **_JOINS_MLP, **_OWN),
    "granite": Family(norm="GraniteRMSNorm", mlp="GraniteMLP", **_PRE_NORM, **_OWN),
    # Normalizes queries and keys after their rotation, with a weight for each channel
    "hunyuan_v1_dense": Family(
        norm="HunYuanDenseV1RMSNorm",
        mlp="HunYuanDenseV1MLP",
        feeds=_FEEDS,
        packs=True,
        pads=False,
        **_TRANSFORMERS,
    ),
    "ministral": Family(norm="MinistralRMSNorm", mlp="MinistralMLP", **_PRE_NORM),
    "ministral3": Family(norm="Ministral3RMSNorm", mlp="Ministral3MLP", **_PRE_NORM, **_OWN),
    "olmo": Family(mlp="OlmoMLP", **_ATTENDS, **_TRANSFORMERS),
    "olmo2": Family(mlp="Olmo2MLP", **_ATTENDS, **_TRANSFORMERS),
    "olmo3": Family(mlp="Olmo3MLP", **_ATTENDS, **_TRANSFORMERS),
    "seed_oss": Family(norm="SeedOssRMSNorm", **_PRE_NORM, **_OWN),
    "smollm3": Family(norm="SmolLM3RMSNorm", mlp="SmolLM3MLP", **_PRE_NORM, **_TRANSFORMERS),
    "starcoder2": Family(**_UNGATED | {"feeds": {}}, **_TRANSFORMERS),
    # Mixtures of experts
    "qwen2_moe": Family(**_MIXTURE),
    "qwen3_moe": Family(**_MIXTURE),
    "mixtral": Family(fused=(*Family().fused, ("w1", "w3")), **_MIXTURE),  # its experts' gate and up on disk
    "glm4_moe": Family(**_MIXTURE | {"scores": "sigmoid"}),
    # Hybrids
    "qwen3_5_text": Family(
        feeds={"input_layernorm": (*_QKV, *_LINEAR), "post_attention_layernorm": _GATE_UP},
        fused=(*Family().fused, ("in_proj_qkv", "in_proj_z")),
        **_DELTA,
    ),
    "qwen3_next": Family(
        **_MIXTURE | {"feeds": {**_MIXTURE["feeds"], "input_layernorm": (*_QKV, *_LINEAR_JOINED)}} | _DELTA,
    ),
    "falcon_h1": Family(
        feeds={
            "input_layernorm": (*_QKV, "mamba.in_proj"),
            "pre_ff_layernorm": ("feed_forward.gate_proj", "feed_forward.up_proj"),
        },
        packs=True,
        recurrent="mamba_d_state",
        read=("mamba.out_proj",),  # by mamba-ssm
    ),
    # The text of models that read images. Their classes are those of the whole model's family
    "qwen2_5_vl_text": Family(feeds=_FEEDS),
    "qwen3_vl_text": Family(feeds=_FEEDS),
    "qwen2_vl": Family(norm="Qwen2VLRMSNorm", mlp="Qwen2MLP"),
    "qwen2_5_vl": Family(norm="Qwen2_5_VLRMSNorm", mlp="Qwen2MLP"),
    "qwen3_vl": Family(norm="Qwen3VLTextRMSNorm", mlp="Qwen3VLTextMLP"),
}

# The tensors of a checkpoint are known by their names alone, so the groups of all families act together.
FUSED = tuple(dict.fromkeys(group for family in FAMILIES.values() for group in family.fused))

# Names that transformers' families share: of tensors, and of the config's field that counts a router's experts
ROUTER = re.compile(r"(.*\.)?(gate|shared_expert_gate|\w*router(\.\w+)?)\.weight")
ROUTERS = "re:" + ROUTER.pattern.removesuffix(r"\.weight") + "$"  # as a pattern of modules, among layers to ignore
# The gates of linear attention: how fast each head forgets, and how much it writes. Published checkpoints in FP8 keep
# their type, and a matrix with a row for each head is smaller than a block of scales.
GATE = re.compile(r"(.*\.)?linear_attn\.in_proj_(a|b|ba)\.weight")
GATES = "re:" + GATE.pattern.removesuffix(r"\.weight") + "$"
EXPERT = re.compile(r"(.*\.)?experts(\.\w+)+")
# Tensors that hold all experts of a layer -> how many matrices of an expert each joins, one below the other
EXPERT_PARTS = {"gate_up_proj": 2, "down_proj": 1}
EMBEDDING = re.compile(r"(.*\.)?(\w*embed\w*|wte|wpe)\.weight")
EXPERT_COUNT = re.compile(r"(^|_)(num|n)_(local_|routed_)?experts$")
HEAD = ("lm_head",)  # the output layer of a language model


def families_with(trait: str) -> list[str]:
    """Returns the model types of the families that have a trait, such as `"packs"` or known `"feeds"`."""
    return [model_type for model_type, family in FAMILIES.items() if getattr(family, trait)]


def is_tested(config) -> bool:
    """Whether a model of transformers, by its config, is of a family in the table."""
    return not FAMILIES.keys().isdisjoint({config.model_type, config.get_text_config().model_type})


def wider_window(config, context: int | None) -> int | None:
    """
    Returns the window, in tokens, of some of a model's layers, if vLLM's see more and a row can be longer.

    Args:
        config ([`~transformers.PreTrainedConfig`]): The model's config, with or without a text config inside.
        context (`int` or `None`): The longest sequence that vLLM takes, in tokens; `None` for vLLM's default.
    """
    config = config.get_text_config()
    family, window = FAMILIES.get(config.model_type), getattr(config, "sliding_window", None)
    if family is None or not family.wider_in_vllm or window is None or "sliding_attention" not in config.layer_types:
        return None
    return window if context is None or context > window else None


def family_of(model_type: str) -> Family:
    """Returns the family of a transformers `model_type`; `ValueError` if its feeding norms are not known."""
    known = families_with("feeds")
    if model_type not in known:
        raise ValueError(
            f"model_type {model_type!r} is not supported: it is not known which of its norms feed which linear layers. "
            f"Supported are {', '.join(known)}."
        )
    return FAMILIES[model_type]


def is_rms_norm(module: nn.Module) -> bool:
    """Whether a module is an RMSNorm of a family in the table, with its original forward pass."""
    return _is_one_of(module, {name: family.norm for name, family in FAMILIES.items()})


def is_gated_mlp(module: nn.Module) -> bool:
    """Whether a module is an MLP of a family in the table, with its original forward pass."""
    return _is_one_of(module, {name: family.mlp for name, family in FAMILIES.items()})


def _is_one_of(module: nn.Module, classes: dict[str, str | None]) -> bool:
    if "forward" in vars(module):
        return False
    for family, name in classes.items():
        loaded = sys.modules.get(f"transformers.models.{family}.modeling_{family}")  # `None` if no model of it exists
        family_class = None if name is None else getattr(loaded, name, None)
        if family_class is None or not isinstance(module, family_class):
            continue
        if type(module).forward is family_class.forward:  # FSDP's subclasses keep the forward pass
            return True
    return False


def token_of_images(config) -> int | None:
    """
    Returns the token of which a prompt has one for each feature of its images, as a transformers config names it;
    `None` if the model reads only text.
    """
    return getattr(config, "image_token_id", None)


def number_of_experts(config: dict) -> int:
    """Returns the largest number of experts in a model's config, or in a config inside it; 0 for a dense model."""
    found = [number_of_experts(value) for value in config.values() if isinstance(value, dict)]
    if config.get("is_moe", True):
        found += [value for name, value in config.items() if EXPERT_COUNT.search(str(name)) and isinstance(value, int)]
    return max(found, default=0)
