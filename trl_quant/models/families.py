"""The table of model families, with the structure of each family's decoder layers. A new family is one new entry.

All paths are paths inside a decoder layer. Two RMSNorms of each layer feed only linear layers: one feeds q, k and v,
the other gate and up. A factor on such a norm's gain scales the inputs of those layers, and nothing else:

    RMSNorm_w(x) = w * x / rms(x)            the weight is the gain            (Llama, Qwen2, Qwen3, Mistral, Phi-3)
    RMSNorm_w(x) = (1 + w) * x / rms(x)      the weight is the gain minus one  (Gemma 2, Gemma 3)

Gemma also normalizes the outputs of attention and MLP (sandwich norms). Those norms feed the residual stream, so
Gemma's `post_attention_layernorm` must not be touched; its `pre_feedforward_layernorm` feeds the MLP.

Noise (AQN), scaling (UAQ) and the exact kernels need a family that is in the table. Linear layers are found in any
decoder, with the names that the families in the table use.
"""

import re
from typing import NamedTuple


class Family(NamedTuple):
    """
    The structure that the models of one family share.

    Attributes:
        feeds (`dict[str, tuple[str, ...]]`): norm -> the linear layers that it feeds.
        offset (`bool`): Whether a norm stores its gain minus one.
        fused (`tuple[tuple[str, ...], ...]`):
            Layers of one parent module that engines compute as one matrix, by the last part of their names, in the
            order of that matrix.
    """

    feeds: dict[str, tuple[str, ...]]
    offset: bool = False
    fused: tuple[tuple[str, ...], ...] = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
_PRE_NORM = Family({"input_layernorm": _QKV, "post_attention_layernorm": _GATE_UP})
_JOINED = Family(
    {"input_layernorm": ("self_attn.qkv_proj",), "post_attention_layernorm": ("mlp.gate_up_proj",)}, fused=()
)
_SANDWICH = Family({"input_layernorm": _QKV, "pre_feedforward_layernorm": _GATE_UP}, offset=True)

# model_type of a transformers config -> its family
FAMILIES = {
    "qwen2": _PRE_NORM,
    "qwen3": _PRE_NORM,
    "llama": _PRE_NORM,
    "mistral": _PRE_NORM,
    "phi3": _JOINED,
    "gemma2": _SANDWICH,
    "gemma3": _SANDWICH,
    "gemma3_text": _SANDWICH,
}

# The tensors of a checkpoint are known by their names alone, so the groups of all families act together.
FUSED = tuple(dict.fromkeys(group for family in FAMILIES.values() for group in family.fused))

# Names that transformers' families share: of tensors, and of the config's field that counts a router's experts
ROUTER = re.compile(r"(.*\.)?(gate|shared_expert_gate|\w*router(\.\w+)?)\.weight")
EXPERT = re.compile(r"(.*\.)?experts(\.\w+)+")
EMBEDDING = re.compile(r"(.*\.)?(\w*embed\w*|wte|wpe)\.weight")
EXPERT_COUNT = re.compile(r"(^|_)(num|n)_(local_|routed_)?experts$")
HEAD = ("lm_head",)  # the output layer of a language model


def family_of(model_type: str) -> Family:
    """Returns the family of a transformers `model_type`; `ValueError` if it is not in [`FAMILIES`]."""
    if model_type not in FAMILIES:
        raise ValueError(
            f"model_type {model_type!r} is not supported: it is not known which of its norms feed which linear layers. "
            f"Supported are {', '.join(FAMILIES)}."
        )
    return FAMILIES[model_type]


def number_of_experts(config: dict) -> int:
    """Returns the largest number of experts in a model's config, or in a config inside it; 0 for a dense model."""
    found = [number_of_experts(value) for value in config.values() if isinstance(value, dict)]
    if config.get("is_moe", True):
        found += [value for name, value in config.items() if EXPERT_COUNT.search(str(name)) and isinstance(value, int)]
    return max(found, default=0)
