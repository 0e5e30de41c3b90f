"""
Lets a policy compute one packed row ([`layers.packed`]) instead of padded ones.

In a decoder layer, only attention and positions depend on more than one token. Positions are counted in each sequence
and passed to the model. The segments are a keyword argument of the forward pass, which the layers pass on to their
attention. transformers' SDPA does not read it, so [`attend`] replaces SDPA. Without the keyword [`attend`] calls SDPA,
so generation and padded rows compute as before. [`attend`] stays set after the forward pass, because gradient
checkpointing computes the layers again in the backward pass and must use the same function.

In a hybrid, linear attention depends on more than one token too. It has no keys that sequences could share, and its
kernels read the borders of sequences from transformers' keywords, if they read them at all ([`~policy.hybrids`]).

transformers' flash attention reads the borders of sequences from its own keywords. A model that uses it keeps it, but
then computes a shared prompt once for each sequence.
"""

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ..layers.packed import PACKED, Packed, flash_attention
from ..layers.products import TOKENS
from ..trl_seams import balanced_by
from .exact.model import ENGINES_ATTENTION
from .hybrids import borders, is_hybrid, runs_across_borders
from .kept import KEPT
from .routing import ROUTED, Routed


ATTENTION = "trl_quant_packed"  # its name in transformers' tables
SHARING = (ATTENTION, ENGINES_ATTENTION)  # attention that reads the keyword of this package
FLASH = ("flash_attention_2", "flash_attention_3")  # attention that reads transformers' own


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs
) -> tuple[Tensor, None]:
    """Causal attention within the segments of a packed row; transformers' SDPA for padded rows."""
    packed = kwargs.get(PACKED)
    if packed is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    q, k, v = (x.squeeze(0).transpose(0, 1).contiguous() for x in (query, key, value))
    k, v = packed.with_shared(k), packed.with_shared(v)
    return flash_attention(q, k, v, packed, kwargs["scaling"], kwargs.get("sliding_window")).unsqueeze(0), None


AttentionInterface.register(ATTENTION, attend)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


def attention_of(model: PreTrainedModel) -> str:
    """Returns the name of a model's attention in transformers' tables."""
    return model.config.get_text_config()._attn_implementation


def accept_packed_rows(model: PreTrainedModel, whose: str = "policy") -> None:
    """
    Sets [`attend`] in a model that computes with SDPA. Results for padded rows stay the same, bit for bit. Errors call
    the model `whose`.

    Raises:
        ValueError: The model's attention, or what a hybrid has in its place, does not read the borders of sequences, or
            its attention has dropout.
    """
    dropout = max((getattr(module, "attention_dropout", 0.0) for module in model.modules()), default=0.0)
    if dropout:
        raise ValueError(f"the {whose}'s attention has dropout (`attention_dropout`={dropout})")
    if is_hybrid(model) and runs_across_borders(model):
        raise ValueError(
            f"the {whose}'s recurrent layers would carry their state from one sequence of a row into the next: the "
            "kernels that run here take no borders. Those of flash-linear-attention and causal-conv1d do, on a GPU"
        )
    if attention_of(model) == "sdpa":
        model.set_attn_implementation(ATTENTION)
    elif attention_of(model) not in (*SHARING, *FLASH):
        known = ", ".join(repr(name) for name in ("sdpa", *FLASH))
        raise ValueError(f"`attn_implementation`={attention_of(model)!r} is not among {known}")


def shares_prompts(model: PreTrainedModel) -> bool:
    """Whether a packed row of a model can have a prompt of several sequences once."""
    return attention_of(model) in SHARING and not is_hybrid(model)


def row_of(packed: Packed, ids: Tensor, shares: bool, routed: Routed | None = None) -> dict:
    """
    Returns the arguments with which a decoder computes a packed row of the padded `ids` (B, S), whose experts are
    `routed` in a mixture. A prompt that is computed once has the experts of its first row.
    """
    row = {
        "input_ids": ids.flatten()[packed.rows].unsqueeze(0),
        "attention_mask": torch.empty(1, 1, 0, 0, device=ids.device),  # 4 dimensions: transformers makes no mask
        "position_ids": packed.positions.unsqueeze(0),
        "use_cache": False,
        PACKED: packed,
    }
    if routed is not None:
        row[ROUTED] = routed.packed(packed.rows, packed.filled)
    if not shares:
        row |= borders(packed.starts)
        row |= {"max_length_q": packed.longest, "max_length_k": packed.longest}
    return row


def in_one_row(compute: Callable[..., Tensor], ids: Tensor, mask: Tensor, routed: Routed | None = None) -> Tensor:
    """
    Computes outputs of padded rows in one row, as [`PackedRows`] does. It shares no prompts.

    Args:
        compute (`Callable`): Maps the arguments of a decoder for a row of N tokens to outputs (1, N, D).
        ids (`torch.Tensor`): (B, S), padded on any side.
        mask (`torch.Tensor`): (B, S), 1 on tokens.
        routed ([`~policy.routing.Routed`], *optional*): The experts of the padded tokens, in a mixture.

    Returns:
        `torch.Tensor`: (B, S, D), with zeros on padding.
    """
    packed = Packed.of(mask, *mask.shape, mask.device).filled_up(TOKENS)
    return packed.padded(compute(**row_of(packed, ids, False, routed)).squeeze(0))


class PackedBackbone(nn.Module):
    """
    Stands in for a model where TRL's `_get_last_hidden_state` calls its decoder with padded rows, and computes a packed
    one. It shares no prompts.

    Parameters:
        model (`nn.Module`): A causal language model of transformers, with or without an adapter of PEFT.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model.get_base_model() if hasattr(model, "get_base_model") else model

    def base_model(self, input_ids: Tensor, attention_mask: Tensor, **kwargs) -> SimpleNamespace:
        """
        Computes the decoder's outputs in one row, as [`PackedRows`] does.

        Args:
            input_ids (`torch.Tensor`): (B, S), padded on any side.
            attention_mask (`torch.Tensor`): (B, S), 1 on tokens.
            kwargs: The routing of a mixture ([`~policy.routing`]). Arguments for TRL's heads are ignored.

        Returns:
            `SimpleNamespace`: Its `last_hidden_state` is (B, S, H), with zeros on padding.
        """
        hidden = in_one_row(
            lambda **row: self.model.base_model(**row).last_hidden_state, input_ids, attention_mask, kwargs.get(ROUTED)
        )
        return SimpleNamespace(last_hidden_state=hidden)


class PackedRows:
    """
    Stands in for a model where TRL's `_get_per_token_logps_and_entropies` calls it with padded rows, and computes a
    packed one.

    Parameters:
        model (`nn.Module`): The policy or the reference model, wrapped for several ranks or not, with TRL's fused head.
        prompt (`int`): Columns of the prompts, padded on the left.
        shares (`bool`): Whether a prompt of several rows is computed once. See [`shares_prompts`].
    """

    def __init__(self, model: nn.Module, prompt: int, shares: bool):
        self.model, self.prompt, self.shares = model, prompt, shares

    def __call__(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor, **kwargs):
        """
        Computes the log-probabilities of a batch in one row. Its only padding are fewer than `TOKENS` tokens at the
        end, which fill the last tile of the low-precision products, so that no layer copies its input to pad it.

        Args:
            input_ids (`torch.Tensor`): (B, S), padded on any side.
            attention_mask (`torch.Tensor`): (B, S), 1 on tokens.
            labels (`torch.Tensor`): (B, S), -100 where nothing is scored, as in the prompts.
            kwargs: The arguments that TRL passes to its fused head, the routing of a mixture, and what was left to a
                sampler that truncates ([`~policy.kept`]).

        Returns:
            The model's output, whose `log_probs` and `entropy` have the shape (B, S - 1), with zeros on padding.
        """
        if self.shares:
            packed = Packed.sharing(attention_mask, input_ids, self.prompt)
        else:
            packed = Packed.of(attention_mask, *attention_mask.shape, attention_mask.device)
        packed = packed.filled_up(TOKENS)
        labels = labels.flatten()[packed.rows]
        first = packed.starts[:-1][packed.starts.diff() > 0].long()
        labels[first] = -100  # not predicted: the token before belongs to another segment
        labels[len(labels) - packed.filled :] = -100
        labels, kept = labels.unsqueeze(0), kwargs.pop(KEPT, None)
        row = row_of(packed, input_ids, self.shares, kwargs.pop(ROUTED, None))
        scored = nullcontext() if kept is None else kept.packed(packed.rows, packed.filled).scoring(labels)
        with balanced_by(packed.copies), scored:
            output = self.model(labels=labels, **row, **kwargs)
        for name in ("log_probs", "entropy"):
            if output.get(name) is not None:
                of_each_token = F.pad(output[name].squeeze(0), (1, 0))  # the first token has none
                output[name] = packed.padded(of_each_token)[:, 1:]
        return output
