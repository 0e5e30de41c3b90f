"""
Lets a policy compute a trie of shared prefixes, which TRL's asynchronous trainer packs its samples into.

A row is the trie's tokens, one segment after the other. A segment attends to the path from the root to itself, whose
keys are gathered by an index, causally from the bottom right:

    [prompt] [completion 1] [completion 2]        segments, with queries tree_cu_seqlens_q
    [prompt] [prompt completion 1] [prompt completion 2]     their keys tree_kv_index, with borders tree_cu_seqlens_k

TRL takes the kernel for this from the hub. [`attend_tree`] is [`layers.packed.flash_attention`] instead: torch's flash
attention on a GPU, and loops over segments elsewhere. Without a trie, as in an engine's copy, it is transformers' SDPA.
"""

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ..layers.packed import Packed, flash_attention
from ..models.families import FAMILIES


TREES = "trl_quant_trees"  # its name in transformers' tables
ATTENDS_ALONG_PATHS = {"full_attention", "sliding_attention"}  # kinds of layers, by transformers' names


def attend_tree(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs
) -> tuple[Tensor, None]:
    """Causal attention along the paths of a trie; within each row, if there is no trie."""
    index, window = kwargs.get("tree_kv_index"), kwargs.get("sliding_window")
    if index is not None:
        packed = _segments(kwargs["tree_cu_seqlens_q"], kwargs["tree_cu_seqlens_k"], index)
    elif attention_mask is None and window is not None and key.shape[2] > window:  # SDPA needs a mask for a window
        packed = Packed.of(None, query.shape[0], query.shape[2], query.device)
    else:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    k, v = packed.with_shared(k), packed.with_shared(v)
    y = flash_attention(q, k, v, packed, kwargs["scaling"], window)
    return y.view(query.shape[0], query.shape[2], *y.shape[1:]), None


def _segments(starts: Tensor, key_starts: Tensor, index: Tensor) -> Packed:
    """Returns a trie's segments, with the borders (C + 1,) of their queries and keys and the keys' places (K,)."""
    longest, longest_keys = int(starts.diff().max()), int(key_starts.diff().max())
    tokens = torch.arange(int(starts[-1]), device=starts.device)
    return Packed(None, tokens, starts, longest, index, key_starts, longest_keys, (1, len(tokens)))


def _mask(attention_mask: Tensor | None = None, **given) -> Tensor | None:
    return None if attention_mask is None else sdpa_mask(attention_mask=attention_mask, **given)


AttentionInterface.register(TREES, attend_tree)
AttentionMaskInterface.register(TREES, _mask)


def why_no_tree(config: PreTrainedConfig) -> str | None:
    """Returns why a policy with this config cannot compute a trie; `None` if it can."""
    text = config.get_text_config()
    if text is not config:
        return "reads images"
    kinds = {*(getattr(text, "layer_types", None) or ())} - ATTENDS_ALONG_PATHS
    family = FAMILIES.get(text.model_type)
    if kinds or (family is not None and family.recurrent):
        what = ", ".join(sorted(kinds)) or "recurrent"
        return f"has {what} layers, which pass a state from one sample of a row to the next"
    if getattr(text, "attn_logit_softcapping", None) is not None:
        return f"caps the logits of its attention (`attn_logit_softcapping`={text.attn_logit_softcapping})"
    if text.model_type == "gpt_oss":
        return "has attention sinks"
    if getattr(text, "attention_dropout", 0.0):
        return f"has dropout in its attention (`attention_dropout`={text.attention_dropout})"
    return None
