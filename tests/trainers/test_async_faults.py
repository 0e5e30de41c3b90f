"""The asynchronous trainer where something is wrong or slow: policies, rewards, the engine, samples too long."""

import logging
import threading

import numpy as np
import pytest
import torch
from asynchronous import asynchronous, given_samples, noted
from tiny import SIZES
from training import dataset, spread
from transformers import AutoConfig, AutoModelForCausalLM

from trl_quant.policy import trees
from trl_quant.trainers.async_grpo import sampling_thread


SECONDS = 30  # for which a test waits for another thread


def stored(path, family: str, **settings) -> str:
    """A checkpoint of a family that is not in the table, with weights large enough for its attention to matter."""
    torch.manual_seed(0)
    sizes = SIZES | {"vocab_size": 320, "pad_token_id": 256, "eos_token_id": 257, "bos_token_id": None}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes | settings), dtype=torch.float32)
    for param in model.parameters():
        param.data += 0.1 * torch.randn_like(param)
    model.save_pretrained(path / family)
    return str(path / family)


def test_a_policy_that_drops_the_trie_is_refused(tmp_path, monkeypatch):
    """By its name before it is loaded, and without the name by what it computes."""
    given = {"model": stored(tmp_path, "nemotron"), "max_steps": 1}
    with pytest.raises(ValueError, match=r"`model_type`='nemotron'.* Train it with QuantGRPOTrainer"):
        asynchronous(tmp_path, **given)
    monkeypatch.setattr(trees, "IGNORE_TRIES", ())
    for samples in (None, given_samples(2)):
        with pytest.raises(ValueError, match=r"NemotronForCausalLM, does not .* Train it with QuantGRPOTrainer"):
            asynchronous(tmp_path, samples, **given)


def test_another_family_that_computes_tries_trains(tmp_path):
    opt = {"ffn_dim": 64, "word_embed_proj_dim": SIZES["hidden_size"], "dropout": 0.0}
    trainer = asynchronous(tmp_path, model=stored(tmp_path, "opt", **opt), rollout_precision="bf16", max_steps=1)
    trainer.train()
    (apart,) = [entry["mismatch/abs_logp_diff"] for entry in trainer.state.log_history if "mismatch/kl_k3" in entry]
    assert apart < 0.05


# Rewards


def test_it_draws_while_a_reward_runs(tmp_path):
    draws, seen, groups = threading.Semaphore(0), [], []

    def slow(prompts, completions, **columns):
        if len(groups) == 1:  # the trainer has taken the first group's samples
            while draws.acquire(blocking=False):
                pass  # draws before this one
            seen.append(draws.acquire(timeout=SECONDS))
        groups.append(prompts[0])
        return spread(completions)

    data = dataset()
    trainer = asynchronous(tmp_path, rewards=slow, data=data, max_steps=2, max_inflight_tasks=8)
    draw = trainer.sampling_thread.engine.draw

    def counting(requests, enough):
        return draw(requests, enough=lambda ended: draws.release() or enough(ended))

    trainer.sampling_thread.engine.draw = counting
    sent = noted(trainer.sampling_thread.rollout_buffer)
    trainer.train()
    assert seen == [True]
    order = list(dict.fromkeys(sample.group_id for sample in sent))
    assert [data["prompt"][place % len(data)] for place in order] == groups[: len(order)]


def test_what_is_scored_waits(tmp_path):
    """No more groups start than an update takes while their rewards run, whatever may be in flight."""
    asked, go_on = threading.Event(), threading.Event()

    def held(completions, **columns):
        asked.set()
        go_on.wait(SECONDS)
        return spread(completions)

    trainer = asynchronous(tmp_path, rewards=held, max_staleness=0)
    thread = trainer.sampling_thread
    trainer.state.max_steps = 1
    trainer._sync_weight()
    thread.start()
    assert asked.wait(SECONDS)
    while thread.groups:
        thread.check_health(SECONDS)
    idle = threading.Event()
    idle.wait(0.5)  # for many looks at whether another group may start
    assert thread.started == 2 and thread.rollout_buffer.qsize() == 0
    go_on.set()
    while thread.rollout_buffer.qsize() < 8:
        thread.check_health(SECONDS)
    thread.stop()


def test_a_run_ends_without_rewards_that_nobody_needs(tmp_path, monkeypatch):
    monkeypatch.setattr(sampling_thread, "STOPPING", 10 * SECONDS)
    go_on, calls, ended = threading.Event(), [], []

    def held(completions, **columns):
        calls.append(1)
        if len(calls) > 2:  # not of the only update
            go_on.wait(SECONDS)
            ended.append(1)
        return spread(completions)

    trainer = asynchronous(tmp_path, rewards=held, max_steps=1)
    trainer.train()
    assert not ended and trainer.state.global_step == 1
    go_on.set()


def key_error(completions, **columns):
    raise KeyError("x")


async def late_key_error(completions, **columns):
    raise KeyError("x")


@pytest.mark.parametrize("reward", [key_error, late_key_error])
def test_a_reward_that_raises_is_named(tmp_path, reward):
    trainer = asynchronous(tmp_path, rewards=[spread, reward], max_steps=1)
    said = rf"^Sampling beside the training failed: The reward function '{reward.__name__}', at step 0, raised "
    with pytest.raises(RuntimeError, match=said + r"KeyError\('x'\)\. There is no checkpoint in .*; start again\.$"):
        trainer.train()


# The engine


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (KeyError("weight"), "failed: KeyError: 'weight'. There"),
        (RuntimeError("It is gone."), "failed: It is gone. There"),
    ],
)
def test_an_error_of_a_draw_names_step_and_checkpoint(tmp_path, error, said):
    trainer = asynchronous(tmp_path, max_steps=1)

    def failing(requests, enough):
        raise error

    trainer.sampling_thread.engine.draw = failing
    with pytest.raises(RuntimeError) as raised:
        trainer.train()
    assert str(raised.value) == (
        f"Sampling beside the training, at step 0, {said} is no checkpoint in {trainer.args.output_dir}; start again."
    )


def test_an_error_of_a_sync_names_step_and_checkpoint(tmp_path):
    trainer = asynchronous(tmp_path, max_steps=3, save_strategy="steps", save_steps=1)
    engine, syncs = trainer.sampling_thread.engine, []
    sync = engine.sync

    def failing():
        syncs.append(1)
        if len(syncs) == 3:  # a cold one, and one after each step
            raise RuntimeError("No tensor arrives.")
        sync()

    engine.sync = failing
    with pytest.raises(RuntimeError, match=r"failed at step 2.*checkpoint-1; continue .* Cause: No tensor arrives"):
        trainer.train()


# Samples that are too long


def longer(samples, groups, more: int) -> list:
    """Samples, those of some groups with more tokens."""
    for sample in samples:
        if sample.group_id in groups:
            for name in ("input_ids", "completion_mask", "old_log_probs", "versions"):
                values = getattr(sample, name)
                setattr(sample, name, np.concatenate([values, np.repeat(values[-1:], more)]))
    return samples


def test_a_resume_goes_on_behind_samples_that_are_too_long(tmp_path):
    """All samples of group 0 are above the budget, and TRL's planner would drop them without a trace of the group."""
    trainer = asynchronous(tmp_path, rollout_precision="bf16", token_budget=16, max_steps=9)
    samples = longer(given_samples(6), {0}, 20)
    for sample in samples:
        trainer.rollout_queue.put(sample)
    trainer.model_version = 1
    batches = iter(trainer.get_train_dataloader())
    while not {1, 2} <= trainer._trained_groups:
        assert next(batches)["input_ids"].shape[1] <= 16
    assert 0 not in trainer._trained_groups and trainer.sampling_state()["prompt_index"] >= 3
    logged = trainer._metrics["train"]
    assert sum(logged["rollouts/dropped_total"]) == sum(logged["batch/dropped_oversize_total"]) == 4
    lengths = [int(sample.completion_mask.sum()) for sample in samples[:4]]
    assert [length for length, _ in logged["rollouts/dropped_length"]] == lengths


def test_a_budget_below_the_longest_sample_is_told_once(tmp_path, caplog):
    given = {"is_correction": "none", "max_completion_length": 10}
    longest = max(len(ids) for ids in asynchronous(tmp_path).processing_class(text=[*dataset()["prompt"]])["input_ids"])
    for budget, is_told in ((longest + 10, False), (longest + 9, True)):
        caplog.clear()
        trainer = asynchronous(tmp_path, given_samples(2), token_budget=budget, **given)
        with caplog.at_level(logging.WARNING):
            trainer.get_train_dataloader()
        said = [record.getMessage() for record in caplog.records if "`token_budget`" in record.getMessage()]
        assert len(said) == is_told
    assert f"`token_budget`={longest + 9} is less than the longest prompt ({longest} tokens; all 8 prompts" in said[0]
    assert said[0].endswith(f"Set at least {longest + 10}.")


def test_a_budget_that_no_prompt_fits_in_is_refused(tmp_path):
    trainer = asynchronous(tmp_path, given_samples(2), is_correction="none", token_budget=1)
    with pytest.raises(ValueError, match=r"`token_budget`=1 is the longest row .*: no sample fits"):
        trainer.get_train_dataloader()


def test_a_sync_after_no_step_is_refused(tmp_path):
    with pytest.raises(ValueError, match="`weight_sync_steps`=0 is out of range"):
        asynchronous(tmp_path, weight_sync_steps=0)
