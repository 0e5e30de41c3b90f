"""
Rows of a hybrid: padding changes nothing, and sequences are packed into one row only where the kernels that run keep
them apart.
"""

import copy
import logging

import pytest
import torch
from kept_borders import kernels_that_keep_borders
from packed_rows import PROMPT, apart_from, batch, gradients
from tiny import HYBRIDS, save_tiny, tiny_model
from training import config, make
from trl.trainer.utils import add_fused_lm_head

from trl_quant import QuantGRPOConfig, QuantGRPOTrainer
from trl_quant.policy.hybrids import is_hybrid, runs_across_borders
from trl_quant.policy.packed import PackedRows, accept_packed_rows, shares_prompts


every_hybrid = pytest.mark.parametrize("family", HYBRIDS)


@torch.no_grad()
def logps(model, ids, mask=None):
    return model(ids, attention_mask=mask).logits.log_softmax(-1)


@every_hybrid
def test_a_padded_row_is_the_row_alone(family):
    """No state starts on padding, and none passes from one row to another. Without the mask it would."""
    model = tiny_model(family)
    ids = torch.randint(3, 250, (1, 20), generator=torch.Generator().manual_seed(0))
    alone = logps(model, ids)
    for pads in (1, 2, 7):  # fewer than the convolution reads, and more
        padded = torch.cat([torch.full((1, pads), 256), ids], 1)
        mask = (torch.arange(20 + pads) >= pads).long()[None]
        other = torch.randint(3, 250, padded.shape, generator=torch.Generator().manual_seed(1))
        rows, masks = torch.cat([padded, other]), torch.cat([mask, torch.ones_like(mask)])
        assert (logps(model, rows, masks)[:1, pads:] - alone).abs().max() < 5e-5
        assert (logps(model, rows)[:1, pads:] - alone).abs().max() > 0.1


@every_hybrid
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_are_asked_whether_they_take_borders(family, dtype, monkeypatch):
    """Both the convolution and the state must: transformers' own take no borders, and say nothing."""
    model = tiny_model(family, dtype=dtype)
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    for convolution, recurrence in ((False, False), (True, False), (False, True), (True, True)):
        with monkeypatch.context() as patch:
            kernels_that_keep_borders(patch, family, convolution, recurrence)
            assert runs_across_borders(model) != (convolution and recurrence)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)


def with_head(family):
    model = tiny_model(family)
    add_fused_lm_head(model, temperature=0.9, outputs=("log_probs", "entropy"))
    return model.train()


@every_hybrid
def test_packed_rows_are_padded_ones_where_kernels_take_borders(family, monkeypatch):
    given, model = batch(), with_head(family)
    padded = gradients(model, model, given)
    size = torch.stack([grad.norm() for grad in padded[2].values()]).norm().item()
    with pytest.raises(ValueError, match="the policy's recurrent layers would carry their state from one sequence"):
        accept_packed_rows(model)
    model.set_attn_implementation("trl_quant_packed")  # as if it had not been asked
    try:
        across = gradients(model, PackedRows(model, PROMPT, False), given)
    except ValueError as refused:  # by transformers, from 5.24 on
        assert "can't keep packed sequences apart" in str(refused)
    else:
        assert apart_from(padded, across) > 0.01 * size
    kernels_that_keep_borders(monkeypatch, family)
    accept_packed_rows(model)
    packed = gradients(model, PackedRows(model, PROMPT, False), given)
    for mine, theirs in zip(packed[:2], padded[:2], strict=True):
        assert (mine - theirs).abs().max() < 1e-4
    assert apart_from(padded, packed) < 1e-4 * size


@every_hybrid
def test_a_prompt_of_several_sequences_is_not_shared(family, monkeypatch):
    """A completion goes on from its prompt's state, which a segment of its own does not hand on."""
    kernels_that_keep_borders(monkeypatch, family)
    given, model = batch(), with_head(family)
    padded = gradients(model, model, given)
    size = torch.stack([grad.norm() for grad in padded[2].values()]).norm().item()
    accept_packed_rows(model)
    assert is_hybrid(model) and not shares_prompts(model)
    assert apart_from(padded, gradients(model, PackedRows(model, PROMPT, True), given)) > 0.01 * size
    dense = with_head("qwen3")
    accept_packed_rows(dense)
    assert shares_prompts(dense) and not is_hybrid(dense)


def test_a_run_packs_where_kernels_take_borders(tmp_path, monkeypatch, caplog):
    path = save_tiny(tmp_path / "model", "qwen3_5_text")

    def run(**settings):
        args = config(QuantGRPOConfig, tmp_path / "out", rollout_precision="bf16", **settings)
        return make(QuantGRPOTrainer, args, model=path)

    with caplog.at_level(logging.WARNING):
        assert not run().packs
    assert "recurrent layers would carry their state" in caplog.text
    with pytest.raises(ValueError, match=r"`pack_sequences`=True cannot act: the policy's recurrent layers"):
        run(pack_sequences=True)
    kernels_that_keep_borders(monkeypatch, "qwen3_5_text")
    assert run(pack_sequences=True).packs
