"""Lists transformers' classes of norms and MLPs that our fused kernels can replace, by family.

Most decoders of transformers have Llama's norm and MLP under other class names:

    RMSNorm(x) = w * x / rms(x)
    MLP(x) = down_proj(act_fn(gate_proj(x)) * up_proj(x))

A family that is not in the table trains with its own classes, which give the same results and are slower.
"""

import sys
from typing import NamedTuple

from torch import nn


class Classes(NamedTuple):
    """
    The classes of one family.

    Attributes:
        module (`str`): Module that defines them, below `transformers.models`.
        norm (`str` or `None`): Class of the RMSNorm; `None` if it computes another function than Llama's.
        mlp (`str` or `None`): Class of the MLP; `None` if it computes another function than Llama's.
    """

    module: str
    norm: str | None
    mlp: str | None


CLASSES = {
    "arcee": Classes("arcee.modeling_arcee", "ArceeRMSNorm", None),
    "cwm": Classes("cwm.modeling_cwm", "CwmRMSNorm", "CwmMLP"),
    "ernie4_5": Classes("ernie4_5.modeling_ernie4_5", "Ernie4_5RMSNorm", "Ernie4_5MLP"),
    "exaone4": Classes("exaone4.modeling_exaone4", "Exaone4RMSNorm", "Exaone4MLP"),
    "glm": Classes("glm.modeling_glm", "GlmRMSNorm", None),
    "glm4": Classes("glm4.modeling_glm4", "Glm4RMSNorm", None),
    "granite": Classes("granite.modeling_granite", "GraniteRMSNorm", "GraniteMLP"),
    "hunyuan_v1_dense": Classes(
        "hunyuan_v1_dense.modeling_hunyuan_v1_dense", "HunYuanDenseV1RMSNorm", "HunYuanDenseV1MLP"
    ),
    "llama": Classes("llama.modeling_llama", "LlamaRMSNorm", "LlamaMLP"),
    "ministral": Classes("ministral.modeling_ministral", "MinistralRMSNorm", "MinistralMLP"),
    "ministral3": Classes("ministral3.modeling_ministral3", "Ministral3RMSNorm", "Ministral3MLP"),
    "mistral": Classes("mistral.modeling_mistral", "MistralRMSNorm", "MistralMLP"),
    "olmo2": Classes("olmo2.modeling_olmo2", None, "Olmo2MLP"),
    "olmo3": Classes("olmo3.modeling_olmo3", None, "Olmo3MLP"),
    "phi3": Classes("phi3.modeling_phi3", "Phi3RMSNorm", None),
    "qwen2": Classes("qwen2.modeling_qwen2", "Qwen2RMSNorm", "Qwen2MLP"),
    "qwen2_vl": Classes("qwen2_vl.modeling_qwen2_vl", "Qwen2VLRMSNorm", "Qwen2MLP"),
    "qwen2_5_vl": Classes("qwen2_5_vl.modeling_qwen2_5_vl", "Qwen2_5_VLRMSNorm", "Qwen2MLP"),
    "qwen3": Classes("qwen3.modeling_qwen3", "Qwen3RMSNorm", "Qwen3MLP"),
    "qwen3_vl": Classes("qwen3_vl.modeling_qwen3_vl", "Qwen3VLTextRMSNorm", "Qwen3VLTextMLP"),
    "seed_oss": Classes("seed_oss.modeling_seed_oss", "SeedOssRMSNorm", None),
    "smollm3": Classes("smollm3.modeling_smollm3", "SmolLM3RMSNorm", "SmolLM3MLP"),
}


def is_rms_norm(module: nn.Module) -> bool:
    """Whether a module is an RMSNorm of a family in the table, with its original forward pass."""
    return _is_one_of(module, [(classes.module, classes.norm) for classes in CLASSES.values()])


def is_gated_mlp(module: nn.Module) -> bool:
    """Whether a module is an MLP of a family in the table, with its original forward pass."""
    return _is_one_of(module, [(classes.module, classes.mlp) for classes in CLASSES.values()])


def _is_one_of(module: nn.Module, names: list[tuple[str, str | None]]) -> bool:
    if "forward" in vars(module):
        return False
    for path, name in names:
        loaded = sys.modules.get(f"transformers.models.{path}")  # `None` if no model of the family exists
        family_class = getattr(loaded, name, None) if name is not None else None
        if family_class is None or not isinstance(module, family_class):
            continue
        if type(module).forward is family_class.forward:  # FSDP's subclasses keep the forward pass
            return True
    return False
