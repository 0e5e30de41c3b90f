"""
Makes the policy compute with its engine's kernels (`exact_rollouts`).

| part of the policy | is replaced by | because the engine |
|---|---|---|
| embeddings | embeddings rounded to BF16, so the residual stream is in BF16 too | adds and rounds in BF16 |
| norms | [`~layers.norm.FusedRMSNorm`] | uses the same kernel |
| rotary embeddings, attention | [`~attention.ExactAttention`], called by transformers | uses these kernels |
| TRL's fused head | [`~trl_seams.exact_log_probs`] | takes a log-softmax of whole rows |

The linear layers already compute in the engine's format ([`policy.unified`]). Names, types and checkpoints do not
change.
"""

from functools import partial

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import flash_attention_mask

from ...layers.norm import FusedRMSNorm
from ...layers.packed import PACKED
from ...models.families import is_rms_norm
from ...trl_seams import exact_log_probs, scoring_with
from .attention import ExactAttention, Kernels, Unrotated
from .head import frozen_head, log_probs


ENGINES_ATTENTION = "trl_quant_exact"  # its name in transformers' tables


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    sliding_window: int | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """
    Computes [`~attention.ExactAttention`], with the signature of transformers' attention functions. Raises
    `ValueError` in a step of cached generation.
    """
    if query.shape[2] != key.shape[2]:
        raise ValueError("A policy with `exact_rollouts`=True computes whole sequences only: generate with its engine.")
    packed = kwargs.get(PACKED)
    return module.exact_attention(query, key, value, attention_mask, scaling, sliding_window, packed=packed), None


AttentionInterface.register(ENGINES_ATTENTION, attend)
AttentionMaskInterface.register(ENGINES_ATTENTION, flash_attention_mask)  # shape (B, S), or `None` without padding


def compute_exactly(model: nn.Module, kernels: Kernels) -> None:
    """
    Makes a model compute with an engine's kernels, in place.

    Args:
        model (`nn.Module`): A causal language model of transformers, with or without an adapter of PEFT, and with TRL's
            fused head.
        kernels ([`~attention.Kernels`]): The engine's kernels.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    scored = exact_log_probs(*(partial(function, score=kernels.score) for function in (log_probs, frozen_head)))
    decoder, attention = base.get_decoder(), ExactAttention(kernels)
    for name, module in list(decoder.named_modules()):
        if is_rms_norm(module):
            module = FusedRMSNorm(module)
            decoder.set_submodule(name, module)
        if isinstance(module, FusedRMSNorm):
            module.rounds = True
        elif hasattr(module, "scaling") and hasattr(module, "layer_idx"):
            module.exact_attention = attention
    decoder.rotary_emb = Unrotated(kernels.rotated)
    base.set_attn_implementation(ENGINES_ATTENTION)
    base.get_input_embeddings().register_forward_hook(lambda module, args, output: output.to(kernels.dtype))
    base.forward = partial(_scored, base.forward, scored)


def _scored(forward, function, *args, **kwargs):
    """Calls a model's `forward` with `function` instead of TRL's fused head."""
    with scoring_with(function):
        return forward(*args, **kwargs)
