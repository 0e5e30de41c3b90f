"""Batches with shared prompts, padded and packed, and the gradients of both."""

import torch
from tiny import FAMILIES, tiny_model
from trl.trainer.utils import add_fused_lm_head

from trl_quant.policy.packed import PackedRows, accept_packed_rows


# A token sees itself and seven tokens before it, in every layer or in some
WINDOWS = {
    "qwen2": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "mistral": {"sliding_window": 8},
    "gemma3": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
}
CAN_PACK = [family for family in FAMILIES if family != "gemma2"]  # which caps logits
PROMPT = 12  # columns of the prompts


def batch(seed: int = 0, completion: int = 40) -> dict[str, torch.Tensor]:
    """
    Left-padded prompts and right-padded completions of lengths that differ, as TRL joins them. Rows 0, 2 and 5 have one
    prompt, rows 1 and 4 another, which is longer than the windows; row 3 and row 6 have a prompt of their own, row 6
    the first one without its first token. Rows 7 and 8 have one prompt of a single token.
    """
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.tensor([7, 12, 7, 5, 12, 7, 6, 1, 1])
    completions = torch.tensor([3, 40, 1, 22, 9, 40, 12, 5, 2])
    places = torch.arange(PROMPT + completion)
    mask = (places >= PROMPT - prompts.unsqueeze(1)) & (places < PROMPT + completions.unsqueeze(1))
    ids = torch.randint(3, 256, mask.shape, generator=generator)
    for row, other in ((2, 0), (5, 0), (6, 0), (4, 1), (8, 7)):
        ids[row, :PROMPT] = ids[other, :PROMPT]
    ids = ids.where(mask, 0)
    labels = ids.masked_fill(~mask, -100)
    labels[:, :PROMPT] = -100
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": labels}


def model_of(family: str, **settings):
    model = tiny_model(family, **WINDOWS.get(family, {}) | settings)
    add_fused_lm_head(model, temperature=0.9, outputs=("log_probs", "entropy"))
    return model.train()


def gradients(model, call, given) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    output = call(**given, fused_lm_head=True)
    weights = torch.linspace(-1, 1, output.log_probs.numel(), device=output.log_probs.device).view_as(output.log_probs)
    scored = given["labels"][:, 1:] != -100
    (output.log_probs * weights * scored).sum().backward()
    return output.log_probs * scored, output.entropy * scored, {n: p.grad.clone() for n, p in model.named_parameters()}


def apart_from(exact: tuple, found: tuple) -> float:
    """The distance of gradients."""
    gaps = [(found[2][name].double() - grad.double()).norm() for name, grad in exact[2].items()]
    return torch.stack(gaps).norm().item()


def assert_as_near(model, given, dtype=None):
    """
    Packed rows are as near as padded ones to padded rows in FP32, under autocast to BF16 or, with a `dtype`, with a
    model in it.
    """
    device = given["input_ids"].device.type
    exact = gradients(model, model, given)
    if dtype is not None:
        model.to(dtype)
    with torch.autocast(device, dtype=torch.bfloat16, enabled=dtype is None):
        padded = gradients(model, model, given)
        accept_packed_rows(model)
        for shares in (False, True):
            packed = gradients(model, PackedRows(model, PROMPT, shares), given)
            assert 0 < apart_from(exact, packed) < 1.3 * apart_from(exact, padded)
