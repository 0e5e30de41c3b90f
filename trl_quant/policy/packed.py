"""
Lets a policy compute one row of several sequences, one after the other, without padding between them.

Everything in a decoder layer works on single tokens, apart from attention and positions. Positions are counted anew in
each sequence and given to the model. The borders of the sequences travel through the layers to the attention under the
names that transformers has for them, `cu_seq_lens_q` and `max_length_q`: flash attention of transformers reads them,
and so does [`~policy.exact.attend`]. In the place of SDPA, which does not, this file sets [`attend`]. Without borders
it calls SDPA, so generation and padded rows compute as before. It stays set, because gradient checkpointing computes
the layers again in the backward pass, and must find the same function.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ..layers.exact import Packed, flash_attention
from ..models.families import FAMILIES
from .exact import ATTENTION as EXACT


ATTENTION = "trl_quant_packed"  # its name in transformers' tables
# Attention of transformers and of this package that reads the borders
READS_BORDERS = (EXACT, "flash_attention_2", "flash_attention_3")


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs
) -> tuple[Tensor, None]:
    """Causal attention within each sequence of a row with borders; transformers' SDPA for rows without."""
    starts = kwargs.get("cu_seq_lens_q")
    if starts is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    packed = Packed(None, None, starts, kwargs["max_length_q"])
    q, k, v = (x.squeeze(0).transpose(0, 1).contiguous() for x in (query, key, value))
    window = kwargs.get("sliding_window")
    return flash_attention(q, k, v, packed, kwargs["scaling"], window).unsqueeze(0), None


AttentionInterface.register(ATTENTION, attend)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


def why_not_packed(model: PreTrainedModel) -> str | None:
    """The reason for which a model cannot compute packed rows; `None` if it can."""
    config = model.config.get_text_config()
    attention = config._attn_implementation
    if config.model_type not in FAMILIES:
        return f"`model_type`={config.model_type!r} is not among {', '.join(FAMILIES)}"
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return f"its attention caps logits (`attn_logit_softcapping`={config.attn_logit_softcapping})"
    if getattr(config, "attention_dropout", 0.0):
        return f"its attention has dropout (`attention_dropout`={config.attention_dropout})"
    if attention not in ("sdpa", ATTENTION, *READS_BORDERS):
        return f"its `attn_implementation` is {attention!r}"
    return None


def accept_packed_rows(model: PreTrainedModel) -> None:
    """Sets [`attend`] where a model computes with SDPA. Its results for padded rows stay the same to the bit."""
    if model.config.get_text_config()._attn_implementation == "sdpa":
        model.set_attn_implementation(ATTENTION)


class PackedRows:
    """
    A model that is called with padded rows and computes packed ones: what TRL's
    `_get_per_token_logps_and_entropies` calls in the place of the model.

    Parameters:
        model (`nn.Module`): The policy or the reference model, wrapped for several ranks or not, with TRL's fused head.
    """

    def __init__(self, model: nn.Module):
        self.model = model

    def __call__(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor, **kwargs):
        """
        Computes the log-probabilities of a batch in one row without padding.

        Args:
            input_ids (`torch.Tensor`): (B, S), padded on any side.
            attention_mask (`torch.Tensor`): (B, S), 1 on tokens.
            labels (`torch.Tensor`): (B, S), -100 where nothing is scored.
            kwargs: As TRL gives them to its fused head.

        Returns:
            The model's output, whose `log_probs` and `entropy` have the shape (B, S - 1), with zeros on padding.
        """
        packed = Packed.of(attention_mask, *attention_mask.shape, attention_mask.device)
        first = packed.starts[:-1].long()
        labels = labels.flatten()[packed.rows]
        labels[first] = -100  # the token before it is another sequence's
        output = self.model(
            input_ids=input_ids.flatten()[packed.rows].unsqueeze(0),
            attention_mask=torch.empty(1, 1, 0, 0, device=input_ids.device),  # with 4 dimensions none is made
            position_ids=packed.positions.unsqueeze(0),
            labels=labels.unsqueeze(0),
            cu_seq_lens_q=packed.starts,
            cu_seq_lens_k=packed.starts,
            max_length_q=packed.longest,
            max_length_k=packed.longest,
            use_cache=False,
            **kwargs,
        )
        for name in ("log_probs", "entropy"):
            if output.get(name) is not None:
                output[name] = _padded(output[name].squeeze(0), packed.rows, attention_mask.shape)
        return output


def _padded(values: Tensor, rows: Tensor, shape: torch.Size) -> Tensor:
    """Takes a value for each token but the first (T - 1,) to (B, S - 1), with zeros on padding."""
    padded = values.new_zeros(shape.numel()).index_copy(0, rows, F.pad(values, (1, 0)))
    return padded.view(shape)[:, 1:]
