"""
Asks whether the kernels of a hybrid keep the sequences of a packed row apart.

Linear attention and state-space models carry a state from token to token, and so does the convolution before them. In a
packed row, both must start anew at each sequence. transformers passes the borders on to the kernels that are installed:

| kernel | of | takes borders by |
|---|---|---|
| `chunk_gated_delta_rule` of flash-linear-attention | Qwen3.5, Qwen3-Next | `cu_seqlens` |
| `mamba_chunk_scan_combined` of mamba-ssm | Falcon-H1 | `seq_idx` |
| `causal_conv1d_fn` of causal-conv1d | all | `seq_idx` |
| transformers' own, in PyTorch, of any that is not installed | all | nothing: they are dropped, or refused |

So the answer depends on the machine. [`runs_across_borders`] computes a row of two sequences and compares the second
with the same sequence alone.
"""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..models.families import FAMILIES


LENGTHS = (24, 16)  # tokens of the two sequences
KEPT = -6.0  # logarithm of the decay of a state at each token, so that the first sequence reaches through the second
# Relative difference. Rounding to BF16 explains a third of it, and what runs across is at least 4 times as large
CROSSED = 2**-5


def is_hybrid(model: PreTrainedModel) -> bool:
    """Whether a state passes from token to token in some of a model's layers."""
    family = FAMILIES.get(model.config.get_text_config().model_type)
    return family is not None and family.recurrent is not None


def convolutions(model: PreTrainedModel) -> list[nn.Parameter]:
    """Returns the weights of a hybrid's convolutions, which keep their type; empty for a model of another family."""
    if not is_hybrid(model):
        return []
    return [module.weight for module in model.get_decoder().modules() if isinstance(module, nn.Conv1d)]


def borders(starts: Tensor) -> dict[str, Tensor]:
    """
    Returns, by transformers' names, the borders of the sequences in a packed row.

    Args:
        starts (`torch.Tensor`): (C + 1,), INT32, where its segments start, and the row's length. Some may be empty.
    """
    starts = torch.unique_consecutive(starts)
    segments = torch.arange(len(starts) - 1, device=starts.device, dtype=torch.int32)
    return {
        "cu_seq_lens_q": starts,
        "cu_seq_lens_k": starts,
        "seq_idx": segments.repeat_interleave(starts.diff())[None],
    }


@torch.no_grad()
def runs_across_borders(model: PreTrainedModel) -> bool:
    """
    Whether a token of a packed row would depend on another sequence in the recurrent layers of a model, with the
    kernels that run here. The layer that is tried has the model's sizes and random weights; the model is not touched.
    """
    layer = _recurrent_layers(model)[0]
    weight, config = layer.conv1d.weight, model.config.get_text_config()
    with torch.random.fork_rng(), weight.device:
        torch.manual_seed(0)
        tried = type(layer)(config, layer.layer_idx).to(weight.dtype)
        for name, buffer in layer.named_buffers():  # Falcon-H1's model gives one to its layers
            tried.register_buffer(name, buffer)
        tried.A_log.fill_(KEPT)
        row = torch.randn(1, sum(LENGTHS), config.hidden_size, dtype=weight.dtype)
        starts = torch.tensor([0, LENGTHS[0], sum(LENGTHS)], dtype=torch.int32)
    for mode in (True, False):  # some kernels run in training alone
        tried.train(mode)
        try:
            packed, alone = tried(row, **borders(starts))[:, LENGTHS[0] :], tried(row[:, LENGTHS[0] :])
        except ValueError:  # transformers' own kernels since 5.24
            return True
        if not (packed - alone).norm() < CROSSED * alone.norm():
            return True
    return False


def states_of(model: PreTrainedModel) -> tuple[int, int]:
    """
    Returns how many values a sequence has in a model's cache whatever its length: in the states of a hybrid, and in the
    windows of its convolutions; zeros for a model of another family.
    """
    if not is_hybrid(model):
        return 0, 0
    config, layers = model.config.get_text_config(), _recurrent_layers(model)
    each = getattr(config, FAMILIES[config.model_type].recurrent)
    windows = (layer.conv1d.weight.shape for layer in layers)
    return (
        sum(layer.out_proj.in_features * each for layer in layers),
        sum(channels * width for channels, _, width in windows),
    )


def _recurrent_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Returns the layers of a hybrid that carry a state: each has a convolution of its own."""
    modules = model.get_decoder().modules()
    return [module for module in modules if isinstance(getattr(module, "conv1d", None), nn.Conv1d)]
