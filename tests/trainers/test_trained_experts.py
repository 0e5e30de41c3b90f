"""GRPO with a mixture whose experts train in FP8, in the numbers that sample."""

import json
from statistics import mean

import pytest
import torch
from slow_routing import blocks_of, mixture_of
from trained import mismatches, trainer_of
from training import (
    UnevenLengths,
    assert_same_run,
    generation,
    gradient_of,
    lora,
    metrics,
    parameters,
    trainer_for,
)

from trl_quant import QuantGRPOTrainer, QuantRLOOTrainer
from trl_quant.formats import quantize
from trl_quant.layers import UnifiedExperts
from trl_quant.rollout import SharedEngine


pytestmark = pytest.mark.isa
ATTENTION = {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}


class UnevenGRPO(UnevenLengths, QuantGRPOTrainer):
    pass


class UnevenRLOO(UnevenLengths, QuantRLOOTrainer):
    pass


def run_of(path, family="qwen3_moe", **given):
    return trainer_of(path, model=mixture_of(family), **{"precision": "fp8"} | given)


def experts_in(trainer) -> list[UnifiedExperts]:
    return [module for module in trainer.model.modules() if isinstance(module, UnifiedExperts)]


@pytest.mark.parametrize(("family", "adapted"), [("qwen2_moe", False), ("glm4_moe", True)])
def test_trainer_and_sampler_agree(tmp_path, family, adapted):
    """Trainer and sampler differ by last bits that move a code; a plain trainer is far from the same sampler."""
    given = {"max_completion_length": 12, "peft_config": lora(**ATTENTION) if adapted else None}
    ours = run_of(tmp_path / "ours", family, **given)
    engine, before = ours.vllm_generation.engine, parameters(ours)
    assert isinstance(engine, SharedEngine) and ours.spec.replays is not False
    assert len(experts_in(ours)) == len(blocks_of(engine.copy)) > 0
    ours.train()
    plain = run_of(tmp_path / "plain", family, precision=None, rollout_precision="fp8", **given)
    plain.train()
    assert mean(mismatches(ours)) < 0.2 * mean(mismatches(plain))
    after = parameters(ours)
    moved = {name for name in after if not torch.equal(before[name], after[name])}
    assert moved == {name for name in after if not adapted or "lora_" in name}
    logged = [entry for entry in metrics(ours) if "loss" in entry]
    assert all(entry["routing/differs"] <= 0.02 for entry in logged)
    engine.sync()
    ids = torch.tensor([[5, 60, 7, 80, 9]])
    with torch.no_grad():
        assert torch.equal(engine.copy(ids).logits, ours.model(ids).logits)
    for experts in experts_in(ours):
        codes = quantize(experts.down_proj.detach(), "fp8")
        assert torch.equal(experts.codes("down_proj").values.float(), codes.values.float())


def test_codes_follow_each_step_and_frozen_experts_keep_theirs(tmp_path):
    for adapter in (None, lora(**ATTENTION)):
        trainer = run_of(tmp_path / str(adapter is None), peft_config=adapter, max_steps=1)
        (experts, *_) = experts_in(trainer)
        before = experts.codes("gate_up_proj")
        trainer.train()
        after = experts.codes("gate_up_proj")
        assert torch.equal(before.scale, after.scale) == (adapter is not None)


def test_another_sampler(tmp_path):
    """The check of its copy puts the copy's experts, which are others, in place of the policy's."""
    trainer = run_of(tmp_path, rollout_precision="int4", max_steps=1)
    assert not isinstance(trainer.vllm_generation.engine, SharedEngine)
    trainer.train()
    assert mismatches(trainer)[0] > 1e-3


def test_checkpointing_changes_nothing_and_it_is_saved_as_it_was(tmp_path):
    runs = []
    for checkpoints in (False, True):
        runs.append(run_of(tmp_path / str(checkpoints), gradient_checkpointing=checkpoints, max_steps=2))
        runs[-1].train()
    assert_same_run(*runs)
    runs[0].save_model(tmp_path / "saved")
    saved = type(runs[0].model).from_pretrained(tmp_path / "saved")
    assert "quantization_config" not in json.loads((tmp_path / "saved/config.json").read_text())
    own = parameters(runs[0])
    assert all(torch.equal(own[name], tensor) for name, tensor in saved.named_parameters())


@pytest.mark.parametrize("kind", [UnevenGRPO, UnevenRLOO])
def test_packed_rows_and_replay(tmp_path, kind):
    """
    The gradient of packed rows is that of padded ones, but for codes that a last bit moves, each token with its
    sampler's experts; that of other experts is far from both.
    """
    found = {}
    for packs in (False, True):
        given = {"train_precision": "fp8", "pack_sequences": packs, "router_replay": True, "num_iterations": 2}
        given |= {"beta": 0.0}
        trainer = trainer_for(tmp_path / str(packs), mixture_of("qwen3_moe"), kind, **given)
        batch = generation(trainer)
        assert trainer.packs == packs
        found[packs] = gradient_of(trainer._compute_loss(trainer.model, batch), trainer.model)
        batch["routed_experts"] = (batch["routed_experts"] + 1) % 4
        wrong = gradient_of(trainer._compute_loss(trainer.model, batch), trainer.model)
    padded, packed = found[False], found[True]
    assert (packed - padded).norm() < 0.08 * padded.norm() < 0.2 * (wrong - packed).norm()
