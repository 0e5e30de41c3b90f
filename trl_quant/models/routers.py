r"""
Routers of mixtures of experts: where they stand, and the weights that they give to experts.

A router maps a token's hidden state to a logit z_e for each of E experts, chooses k of them, and returns the logits,
the weights g_e of the chosen experts and their indices. With the set C of chosen experts,

    g_e = c s_e / sum_{f in C} s_f    or, without normalization,    g_e = c s_e

| symbol | Mixtral | Qwen3-MoE, Qwen2-MoE | GLM4-MoE |
|---|---|---|---|
| s | softmax(z) | softmax(z) | sigmoid(z) |
| normalized | always | with `norm_topk_prob` | with `norm_topk_prob` |
| c | 1 | 1 | `routed_scaling_factor` |

GLM-4 chooses by s_e plus a bias that corrects an unequal load. The bias has no part in the weights, so [`gates`] holds
for any C, whoever has chosen it.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from .families import FAMILIES, ROUTER_PLACE
from .names import place_in_layer


class Router(NamedTuple):
    """
    A router of a model.

    Attributes:
        layer (`int`): The index of its decoder layer.
        decoder_layer (`nn.Module`): That layer.
        module (`nn.Module`): The router.
        scores (`str`): `"softmax"` or `"sigmoid"`, the function s of its logits.
    """

    layer: int
    decoder_layer: nn.Module
    module: nn.Module
    scores: str


def routers(model: nn.Module) -> list[Router]:
    """
    Finds the routers of a model of transformers, with or without adapters of PEFT, in the order of its layers. A dense
    model has none, and none are found in a mixture of a family whose weights are not known. A router that PEFT trains
    whole is found twice: the original and the trained one.
    """
    family = FAMILIES.get(model.config.get_text_config().model_type)
    if family is None or family.scores is None:
        return []
    found = []
    for name, module in model.named_modules():
        place = place_in_layer(name)
        is_router = place is not None and place[2].removesuffix(".original_module") == ROUTER_PLACE
        if is_router and "weight" in dict(module.named_parameters(recurse=False)):
            stack, layer, _ = place
            found.append(Router(layer, model.get_submodule(f"{stack}.{layer}"), module, family.scores))
    return found


def gates(router: nn.Module, scores: str, logits: Tensor, experts: Tensor) -> Tensor:
    """
    Computes the weights of given experts.

    Args:
        router (`nn.Module`): The router, for its settings.
        scores (`str`): `"softmax"` or `"sigmoid"`.
        logits (`torch.Tensor` of shape `(T, E)`): The router's logits.
        experts (`torch.Tensor` of shape `(T, k)`): The indices of the experts of each token.

    Returns:
        `torch.Tensor` of shape `(T, k)`: The weights g, in FP32, with gradients to the logits.
    """
    logits = logits.float()
    s = torch.softmax(logits, -1) if scores == "softmax" else torch.sigmoid(logits)
    chosen = s.gather(-1, experts)
    if getattr(router, "norm_topk_prob", True):
        total = chosen.sum(-1, keepdim=True)
        chosen = chosen / total.clamp_min(torch.finfo(total.dtype).tiny)  # 0 if every chosen score underflows
    return chosen * getattr(router, "routed_scaling_factor", 1.0)
