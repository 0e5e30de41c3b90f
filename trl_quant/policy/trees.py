"""
Lets a policy compute a trie of shared prefixes, which TRL's asynchronous trainer packs its samples into.

A row is the trie's tokens, one segment after the other. A segment attends to the path from the root to itself, whose
keys are gathered by an index, causally from the bottom right:

    [prompt] [completion 1] [completion 2]        segments, with queries tree_cu_seqlens_q
    [prompt] [prompt completion 1] [prompt completion 2]     their keys tree_kv_index, with borders tree_cu_seqlens_k

TRL takes the kernel for this from the hub. [`attend_tree`] is [`layers.packed.flash_attention`] instead: torch's flash
attention on a GPU, and loops over segments elsewhere. Without a trie, as in an engine's copy, it is transformers' SDPA.

A model may drop the arguments that describe the trie before they reach its attention, which then mixes samples; another
may take positions from a token's place in the row. So [`check_tree`] compares a small trie with its rows alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ..layers.packed import Packed, flash_attention
from ..models.families import FAMILIES
from ..models.positions import switching


TREES = "trl_quant_trees"  # its name in transformers' tables
ATTENDS_ALONG_PATHS = {"full_attention", "sliding_attention"}  # kinds of layers, by transformers' names
# Model types whose layers drop the trie, or whose positions are a token's place in the row
IGNORE_TRIES = ("bloom", "codegen", "falcon", "gpt_neo", "gptj", "mpt", "nemotron", "stablelm")
STEM, BRANCH = 5, 6  # tokens of the trie that `check_tree` computes
OF_MIXED, ROUNDED = 0.2, 0.005  # its bounds: a share of what mixed samples are off, and nats beside the rounding


def attend_tree(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs
) -> tuple[Tensor, None]:
    """
    Causal attention along the paths of a trie; within each row, if there is no trie. Raises `ValueError` for attention
    sinks, which it has not.
    """
    if kwargs.get("s_aux") is not None:
        raise ValueError(f"{type(module).__name__} has attention sinks (`s_aux`), which a trie is computed without.")
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


@torch.no_grad()
def check_tree(model: nn.Module, policy: PreTrainedModel) -> None:
    """
    Computes a trie of two samples that share a prefix, and the second one alone with transformers' own attention.
    Afterwards the layers compute tries.

    Args:
        model (`nn.Module`): The policy, with TRL's fused head.
        policy ([`~transformers.PreTrainedModel`]): The same without PEFT's model around it.

    Raises:
        `ValueError`: The log-probabilities of the second sample differ.
    """
    vocabulary, device = policy.config.get_text_config().vocab_size, next(policy.parameters()).device
    places = torch.arange(STEM + 2 * BRANCH, device=device)
    ids = (places * 7919 + 11) % vocabulary
    prefix, first, second = segments = places.split([STEM, BRANCH, BRANCH])
    paths = [prefix, torch.cat([prefix, first]), torch.cat([prefix, second])]
    positions = torch.where(places < STEM + BRANCH, places, places - BRANCH)[None]
    trie = {"tree_kv_index": torch.cat(paths), "tree_max_seqlen_q": BRANCH, "tree_max_seqlen_k": STEM + BRANCH}
    for name, parts in (("tree_cu_seqlens_q", segments), ("tree_cu_seqlens_k", paths)):
        trie[name] = torch.tensor([0, *map(len, parts)], device=device).cumsum(0).int()

    def scored(taken: Tensor, **given) -> Tensor:
        row = ids[taken][None]
        outputs = model(input_ids=row, shift_labels=row, fused_lm_head=True, **given)
        return outputs.log_probs.flatten()[-BRANCH:].float()  # of the second sample

    with _evaluating(model):
        policy.set_attn_implementation("eager")
        alone = scored(paths[-1], attention_mask=torch.ones_like(paths[-1])[None])
        policy.set_attn_implementation(TREES)
        try:
            together = scored(places, position_ids=positions, **trie)
        except (TypeError, KeyError, ValueError) as error:
            raise _refused(policy, f"{type(error).__name__}: {str(error).rstrip('.')}") from error
        mixed = scored(places, position_ids=positions)
    off, without = ((found - alone).abs().mean().item() for found in (together, mixed))
    computes = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else policy.dtype
    rounding = torch.finfo(computes).eps * alone.abs().mean().item()
    if not off < OF_MIXED * without + ROUNDED + rounding:
        raise _refused(policy, f"its log-probabilities are {off:.2g} nats off those of a sample alone")


def _refused(policy: PreTrainedModel, why: str) -> ValueError:
    return ValueError(
        f"The policy, a {type(policy).__name__}, does not compute samples that share a row, in a trie of their "
        f"prefixes: {why}. Train it with QuantGRPOTrainer."
    )


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Context in which a model has no dropout."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


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
    if text.model_type in IGNORE_TRIES:
        return f"(`model_type`={text.model_type!r}) does not attend along the paths of a trie in transformers"
    if (found := switching(text)) is not None:
        return f"has {found}, also where the samples of a row are shorter"
    if getattr(text, "attention_dropout", 0.0):
        return f"has dropout in its attention (`attention_dropout`={text.attention_dropout})"
    return None
