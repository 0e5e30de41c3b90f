"""Which norm feeds which linear layers, per model family: the one map that noise (AQN) and scaling (UAQ) share.

In each decoder layer two RMSNorms feed only linear layers: one feeds q, k and v, the other gate and up. A factor on
such a norm's gain is a factor on the inputs of those layers, and nowhere else:

    RMSNorm_w(x) = w * x / rms(x)            the weight is the gain            (Llama, Qwen2, Qwen3, Mistral, Phi-3)
    RMSNorm_w(x) = (1 + w) * x / rms(x)      the weight is the gain minus one  (Gemma 2, Gemma 3)

Gemma also normalizes the outputs of attention and MLP (sandwich norms). Those feed the residual stream, so Gemma's
`post_attention_layernorm` must not be touched; `pre_feedforward_layernorm` feeds the MLP.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple

from .names import clean_name


class Family(NamedTuple):
    """`feeds`: norm -> the linear layers it feeds, as paths inside a decoder layer; `offset`: the gain is 1 + w."""

    feeds: dict[str, tuple[str, ...]]
    offset: bool = False


_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
_PRE_NORM = Family({"input_layernorm": _QKV, "post_attention_layernorm": _GATE_UP})
_FUSED = Family({"input_layernorm": ("self_attn.qkv_proj",), "post_attention_layernorm": ("mlp.gate_up_proj",)})
_SANDWICH = Family({"input_layernorm": _QKV, "pre_feedforward_layernorm": _GATE_UP}, offset=True)

# model_type of a transformers config -> its family
FAMILIES = {
    "qwen2": _PRE_NORM,
    "qwen3": _PRE_NORM,
    "llama": _PRE_NORM,
    "mistral": _PRE_NORM,
    "phi3": _FUSED,
    "gemma2": _SANDWICH,
    "gemma3": _SANDWICH,
    "gemma3_text": _SANDWICH,
}

_IN_LAYER = re.compile(r"(?P<stack>(?:.+\.)?layers)\.(?P<index>\d+)\.(?P<path>.+)")


def family_of(model_type: str) -> Family:
    """The family of a transformers `model_type`; `ValueError` if it is not in [`FAMILIES`]."""
    if model_type not in FAMILIES:
        raise ValueError(
            f"model_type {model_type!r} is not supported: it is not known which of its norms feed which linear layers. "
            f"Supported are {', '.join(FAMILIES)}."
        )
    return FAMILIES[model_type]


def feeding_norms(model_type: str, names: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """
    Finds the feeding norms among the parameters of a model.

    Args:
        model_type (`str`): `model_type` of the text model's config.
        names (`Iterable[str]`): Names of all parameters, with any prefix (`model.`, `model.language_model.`,
            `base_model.model.model.`); parameters outside the decoder layers are ignored.

    Returns:
        `dict[str, tuple[str, ...]]`: name of each norm's weight, as given -> clean names of the linear layers it
        feeds; two norms per decoder layer, in layer order.

    Raises:
        `ValueError`: for an unknown family, or unless every decoder layer among `names` has each norm exactly once.
    """
    family = family_of(model_type)
    layers: dict[str, set[int]] = {}  # stack of decoder layers -> indices
    found: dict[tuple[str, int, str], list[str]] = {}
    for name in names:
        if not (match := _IN_LAYER.fullmatch(name)):
            continue
        stack, index, path = match["stack"], int(match["index"]), clean_name(match["path"])
        layers.setdefault(stack, set()).add(index)
        norm = path.removesuffix(".weight")
        if norm in family.feeds and norm != path:
            found.setdefault((stack, index, norm), []).append(name)

    stacks = {stack for stack, _, _ in found}  # a vision tower is a stack of layers too, with other norms
    if len(stacks) != 1:
        raise ValueError(
            f"The parameter names must hold one stack of {model_type} decoder layers, with norms "
            f"{' and '.join(family.feeds)}; found {sorted(stacks) or 'none'}."
        )
    (stack,) = stacks
    result = {}
    for index in sorted(layers[stack]):
        for norm, linears in family.feeds.items():
            matches = found.get((stack, index, norm), [])
            if len(matches) != 1:
                raise ValueError(
                    f"{stack}.{index} must have exactly one {norm}.weight in a {model_type} model, found {matches}."
                )
            result[matches[0]] = tuple(f"{stack}.{index}.{linear}" for linear in linears)
    return result
