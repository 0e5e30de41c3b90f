"""Packed rows: one row of sequences without padding has the log-probabilities and gradients of padded rows."""

import pytest
import torch
from tiny import FAMILIES, tiny_model
from trl.trainer.utils import add_fused_lm_head

from trl_quant.policy.packed import PackedRows, accept_packed_rows, why_not_packed


# A token sees itself and seven tokens before it, in every layer or in some
WINDOWS = {
    "qwen2": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "mistral": {"sliding_window": 8},
    "gemma3": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
}
PACKED = [family for family in FAMILIES if family != "gemma2"]  # which caps logits


def batch(seed: int = 0, prompt: int = 7, completion: int = 40) -> dict[str, torch.Tensor]:
    """Left-padded prompts and right-padded completions of lengths that differ, as TRL joins them."""
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.tensor([7, 2, 5, 1])
    completions = torch.tensor([3, 40, 1, 22])
    places = torch.arange(prompt + completion)
    mask = (places >= prompt - prompts.unsqueeze(1)) & (places < prompt + completions.unsqueeze(1))
    ids = torch.randint(3, 256, mask.shape, generator=generator).where(mask, 0)
    labels = ids.masked_fill(~mask, -100)
    labels[:, :prompt] = -100
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": labels}


def model_of(family: str, **settings):
    model = tiny_model(family, **WINDOWS.get(family, {}) | settings)
    add_fused_lm_head(model, temperature=0.9, outputs=("log_probs", "entropy"))
    return model.train()


def gradients(model, call, given) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    output = call(**given, fused_lm_head=True)
    weights = torch.linspace(-1, 1, output.log_probs.numel()).view_as(output.log_probs)
    scored = given["labels"][:, 1:] != -100
    (output.log_probs * weights * scored).sum().backward()
    return output.log_probs * scored, output.entropy * scored, {n: p.grad.clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", PACKED)
def test_packed_rows_are_padded_ones(family, checkpointing):
    model = model_of(family)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    given = batch()
    padded = gradients(model, model, given)
    assert why_not_packed(model) is None
    accept_packed_rows(model)
    again = gradients(model, model, given)
    assert all(torch.equal(again[2][name], grad) for name, grad in padded[2].items())  # padded rows: the same bits
    packed = gradients(model, PackedRows(model), given)
    for mine, theirs in zip(packed[:2], padded[:2], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    for name, grad in padded[2].items():
        assert (packed[2][name] - grad).norm() < 3e-5 * grad.norm(), name
