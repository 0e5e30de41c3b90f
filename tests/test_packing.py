"""Packed rows: one row of sequences without padding has the log-probabilities and gradients of padded rows."""

import dataclasses

import pytest
import torch
from tiny import FAMILIES, save_tiny, tiny_model
from training import PROMPTS, config, lora, make
from trl.trainer.utils import add_fused_lm_head

from trl_quant import QuantGRPOTrainer
from trl_quant.config.values import CLIPPED_LOSSES
from trl_quant.layers.exact import Packed
from trl_quant.policy.packed import PackedRows, accept_packed_rows, why_not_packed
from trl_quant.precisions import frozen_bases


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


# In a trainer


def both(tmp_path, trainer_class=QuantGRPOTrainer, **settings) -> dict[bool, tuple[float, dict[str, torch.Tensor]]]:
    """The loss and the gradients of the first micro-batch of a run, by whether its rows are packed."""
    found, model = {}, save_tiny(tmp_path / "model", seed=3)
    peft_config = settings.pop("peft_config", None)
    for packs in (False, True):
        config_class = trainer_class.config_class
        args = config(config_class, tmp_path, pack_sequences=packs, max_completion_length=24, **settings)
        trainer = make(trainer_class, args, model=model, peft_config=peft_config)
        torch.manual_seed(0)
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = 1
        batch = trainer._generate_and_score_completions([{"prompt": text} for text in PROMPTS[:2] for _ in range(4)])
        cut = torch.tensor([24, 1, 3, 9, 17, 2, 24, 5])
        batch["completion_mask"] = (torch.arange(batch["completion_ids"].shape[1]) < cut.unsqueeze(1)).long()
        batch["completion_ids"] *= batch["completion_mask"]
        batch["num_items_in_batch"] = batch["completion_mask"].sum()
        loss = trainer._compute_loss(trainer.model, batch)
        loss.backward()
        found[packs] = loss.item(), {n: p.grad for n, p in trainer.model.named_parameters() if p.grad is not None}
    return found


def worst(found) -> float:
    padded, packed = found[False][1], found[True][1]
    assert padded.keys() == packed.keys() and padded
    return max(((packed[name] - grad).norm() / grad.norm().clamp(min=1e-9)).item() for name, grad in padded.items())


@pytest.mark.parametrize("loss_type", [*CLIPPED_LOSSES, "cispo", "sapo", "vespo"])
def test_every_loss(tmp_path, loss_type):
    found = both(tmp_path, rollout_precision="int4", loss_type=loss_type, beta=0.1)
    assert found[True][0] == pytest.approx(found[False][0], rel=1e-5)
    assert worst(found) < 1e-4


@pytest.mark.parametrize("precision", ["fp8", "int8", "fp8_block"])
@pytest.mark.parametrize("adapted", [False, True])
def test_every_training_precision(tmp_path, precision, adapted):
    """Another attention kernel may move an activation to the next code."""
    found = both(tmp_path, train_precision=precision, peft_config=lora() if adapted else None)
    assert worst(found) < (0.1 if precision == "fp8_block" else 1e-4)  # the groups of dW have other tokens


@pytest.mark.parametrize("precision", frozen_bases())
def test_a_4_bit_base(tmp_path, precision):
    found = both(tmp_path, train_precision=precision, peft_config=lora())
    assert worst(found) < (1e-2 if precision == "nf4" else 1e-4)  # bitsandbytes computes in BF16


# Mistakes


def mistaken(monkeypatch, mistake: str) -> None:
    make_packed = Packed.of

    def of(*args):
        packed = make_packed(*args)
        changes = {
            "positions": {
                "positions": packed.positions // 2
            },  # a shift alone does nothing: rotary embeddings are relative
            "borders": {"starts": packed.starts[[0, -1]], "longest": len(packed.positions)},
            "one token": {"starts": torch.cat([packed.starts[:1], packed.starts[1:-1] + 1, packed.starts[-1:]])},
        }
        return dataclasses.replace(packed, **changes[mistake])

    monkeypatch.setattr(Packed, "of", of)


@pytest.mark.parametrize("mistake", ["positions", "borders", "one token"])
def test_a_mistake_shows_in_the_gradient(monkeypatch, mistake):
    model, given = model_of("qwen3"), batch()
    padded = gradients(model, model, given)
    accept_packed_rows(model)
    mistaken(monkeypatch, mistake)
    packed = gradients(model, PackedRows(model), given)
    assert max((packed[2][n] - grad).norm() / grad.norm() for n, grad in padded[2].items()) > 0.01
