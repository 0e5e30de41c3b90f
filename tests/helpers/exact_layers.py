"""Stand-ins in torch for an engine's kernels, and a batch to score with them."""

from functools import partial

import torch

from trl_quant.layers.packed import flash_attention
from trl_quant.models.families import families_with
from trl_quant.policy.exact.attention import Kernels
from trl_quant.policy.exact.head import log_softmax


EXACT_FAMILIES = families_with("exact")
TEMPERATURE = 0.7


def rotation(model) -> torch.Tensor:
    """Cosines and sines (positions, rotated), as vLLM keeps them, of a model's own rotary embedding."""
    positions = torch.arange(64)[None]
    cos, sin = model.get_decoder().rotary_emb(torch.zeros(1, dtype=torch.float32), positions)
    half = cos.shape[-1] // 2
    return torch.cat([cos[0, :, :half], sin[0, :, :half]], 1)


def rotate(positions, q, k, inverse, cache, size):
    """In place, like vLLM's kernel: the first half of a head's rotated features with the second."""
    cos, sin = cache[positions].unsqueeze(1).chunk(2, -1)
    sin = -sin if inverse else sin
    for x in (q, k):
        x = x.view(len(x), -1, size)
        a, b = x[..., : cache.shape[1]].clone().chunk(2, -1)
        x[..., : cache.shape[1]] = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def attend(q, k, v, packed, scale, window):
    return flash_attention(q, k, v, packed, scale, window).detach(), None


def stand_ins(model, dtype=torch.float32) -> Kernels:
    config, cache = model.config, rotation(model)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Kernels(partial(rotate, cache=cache.to(dtype), size=size), attend, log_softmax, cache.shape[1], dtype)


def batch(generator=None):
    """Three prompts padded on the left with completions padded on the right."""
    generator = generator or torch.Generator().manual_seed(0)
    ids = torch.randint(5, 300, (3, 20), generator=generator)
    mask = torch.ones(3, 20, dtype=torch.long)
    mask[0, :4], mask[1, 15:], mask[2, :2], mask[2, 18:] = 0, 0, 0, 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :8] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def scored(model, inputs) -> torch.Tensor:
    return model(**inputs, fused_lm_head=True).log_probs
