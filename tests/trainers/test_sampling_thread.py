"""Sampling in a thread beside the training: versions, ages, what is dropped, faults, checkpoints."""

import copy
import logging
import time
import traceback

import numpy as np
import pytest
import torch
from asynchronous import asynchronous, given_samples, logps_of, policy_gradient
from long_tests import rest_is_long
from training import dataset, lora, spread

from trl_quant.trainers.async_grpo.sampling_thread import advantages_of


LONG = {"max_completion_length": 60, "per_device_train_batch_size": 4, "max_inflight_tasks": 8}


def early_letters(completion_ids, **columns) -> list[float]:
    """The share of tokens in the first half of the vocabulary: about a half of what is drawn at first."""
    return [sum(token < 128 for token in ids) / len(ids) for ids in completion_ids]


def logged(trainer, name) -> list:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


@pytest.mark.long
@pytest.mark.parametrize("precision", ["int8"])
def test_it_learns_while_it_samples(tmp_path, precision):
    settings = {"learning_rate": 1e-2, "per_device_train_batch_size": 16, "num_generations": 8, "max_staleness": 2}
    trainer = asynchronous(tmp_path, rollout_precision=precision, rewards=early_letters, max_steps=30, **settings)
    trainer.train()
    rewards = logged(trainer, "reward")
    assert len(rewards) == 30 and np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.3
    assert max(logged(trainer, "rollouts/age_max")) in (1, 2) and logged(trainer, "rollouts/age_max")[0] == 0
    assert trainer.model_version == 31  # a cold sync, and one after each step


@pytest.mark.parametrize(("max_staleness", "accumulated"), rest_is_long([(0, 2), (0, 1), (3, 1)], (0, 2), (3, 1)))
def test_nothing_older_is_trained_on(tmp_path, max_staleness, accumulated):
    """The copy has the policy's log-probabilities, rounded to BF16, while it has its version, and others afterwards."""
    settings = {"max_staleness": max_staleness, "gradient_accumulation_steps": accumulated, "max_steps": 6}
    trainer = asynchronous(tmp_path, rollout_precision="bf16", learning_rate=1e-2, **settings)
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "rollouts/age" in entry]
    assert len(steps) == 6 and max(step["rollouts/age_max"] for step in steps) <= max_staleness
    fresh = [step["mismatch/abs_logp_diff"] for step in steps if step["rollouts/age_max"] == 0]
    older = [step["mismatch/abs_logp_diff"] for step in steps if step["rollouts/age"] >= 0.5]
    assert fresh and max(fresh) < 0.05
    assert bool(older) == (max_staleness > 0) and all(difference > 0.05 for difference in older)


def syncs(trainer, enough) -> dict[int, dict]:
    """Syncs moved weights every few tokens until `enough`, and returns the weights of each version."""
    thread, weights, tokens = trainer.sampling_thread, {}, []
    draw = thread.engine.draw

    def counting(requests, enough):
        return draw(requests, enough=lambda ended: tokens.append(1) or enough(ended))

    thread.engine.draw = counting
    trainer.state.max_steps = 1
    trainer.model.train()
    while not enough(thread):
        drawn = len(tokens)
        for param in trainer.model.parameters():
            param.data.add_(0.02 * torch.randn_like(param))
        trainer._sync_weight()
        weights[trainer.model_version] = copy.deepcopy(trainer.model.state_dict())
        if len(weights) == 1:
            thread.start()
        while len(tokens) < drawn + 15 and not enough(thread):
            thread.check_health(60)
            time.sleep(0.001)
    thread.stop()
    return weights


def taken(thread) -> list:
    return [thread.rollout_buffer.get() for _ in range(thread.rollout_buffer.qsize())]


def test_each_token_knows_its_version(tmp_path):
    """A sync in the middle of a completion: its later tokens are the new weights', under tokens of the old ones."""
    trainer = asynchronous(tmp_path, rollout_precision="bf16", max_staleness=500, **LONG)
    weights = syncs(trainer, lambda thread: thread.rollout_buffer.qsize() >= 4)
    samples = taken(trainer.sampling_thread)
    assert max(len(set(sample.versions[sample.completion_mask > 0])) for sample in samples) > 1
    found = {}
    for version, state in weights.items():
        trainer.model.load_state_dict(state)
        with torch.no_grad():
            found[version] = logps_of(trainer.model.eval() and trainer, samples)
    apart = []
    for i, sample in enumerate(samples):
        trained = sample.completion_mask > 0
        assert sample.model_version == min(sample.versions[trained])
        for t, (version, logp) in enumerate(zip(sample.versions[trained], sample.old_log_probs[trained], strict=True)):
            assert abs(found[version][i][t] - logp) < 0.05  # the copy's weights are rounded to BF16
            others = [abs(found[other][i][t] - logp) for other in weights if other != version]
            apart.append(max(others) > 0.1)
    assert np.mean(apart) > 0.9


def test_groups_that_became_too_old_start_again(tmp_path):
    trainer = asynchronous(tmp_path, rollout_precision="bf16", max_staleness=0, **LONG)
    thread = trainer.sampling_thread
    syncs(trainer, lambda thread: len(dropped_by(thread)) > 1)
    dropped = dropped_by(thread)
    assert all(entry["rollouts/dropped_total"] == 4 for entry in dropped)
    tokens, completions = dropped[0]["rollouts/dropped_length"]
    assert completions == 4 and 0 < tokens < 240
    assert all(len(set(sample.versions[sample.completion_mask > 0])) == 1 for sample in taken(thread))


def dropped_by(thread) -> list[dict]:
    return [entry for entry in list(thread.metrics_queue.queue) if "rollouts/dropped_total" in entry]


def test_what_the_planner_holds_back_ages_too(tmp_path):
    """TRL's planner keeps the sample that did not fit for the next micro-batch, which may be a version later."""
    samples = given_samples(8)
    trainer = asynchronous(tmp_path, samples, is_correction="none", max_staleness=0, token_budget=40)
    trainer.model_version = 1
    batches = iter(trainer.get_train_dataloader())
    first = next(batches)
    (held,) = trainer._rollout_dataset.held
    second = next(batches)  # of the same update
    assert first["ages"].max() == second["ages"].max() == 0
    is_held = [np.array_equal(held["input_ids"], sample.input_ids) for sample in samples]
    assert second["input_ids"][0, : len(held["input_ids"]) - 1].tolist() == held["input_ids"][:-1].tolist()
    assert sum(is_held) == 1

    trainer.model_version = 2
    for sample in given_samples(2, seed=9, version=2):
        trainer.rollout_queue.put(sample)
    third = next(batches)
    logged = trainer._metrics["train"]
    assert third["ages"].max() == 0 and third["old_log_probs"].numel() > 0
    taken = int(first["segment_id"].max() + 1 + second["segment_id"].max() + 1)
    assert sum(logged["rollouts/dropped_total"]) == 32 - taken
    lengths = [int(sample.completion_mask.sum()) for sample in samples]
    assert sum(length for length, _ in logged["rollouts/dropped_length"]) == sum(lengths[taken:])


def test_advantages():
    rewards = np.array([[1.0, 0.0, 2.0, np.nan], [0.5, np.nan, 1.0, np.nan]])
    summed, standardized = advantages_of(rewards, standardizes=True)
    assert summed[:3].tolist() == [1.5, 0.0, 3.0] and np.isnan(summed[3])
    assert np.allclose(standardized, [0.0, -np.sqrt(1.5), np.sqrt(1.5), 0.0], atol=1e-6)
    assert advantages_of(rewards, standardizes=False)[1].tolist() == [0.0, -1.5, 1.5, 0.0]


def test_ais_gets_advantages_as_they_are(tmp_path):
    trainer = asynchronous(tmp_path, rewards=early_letters, is_correction="ais", max_steps=1)
    trainer.train()
    samples = taken(trainer.sampling_thread)
    groups = {group: [s for s in samples if s.group_id == group] for group in {s.group_id for s in samples}}
    whole = [group for group in groups.values() if len(group) == 4]
    for group in whole:
        rewards = np.array([sample.metrics["reward"] for sample in group])
        assert np.allclose([sample.advantage for sample in group], rewards - rewards.mean(), atol=1e-6)
    assert whole


def broken(completions, **columns):
    return [float("inf")] * len(completions)


def test_a_broken_reward_ends_the_run(tmp_path):
    trainer = asynchronous(tmp_path, rewards=broken)
    with pytest.raises(RuntimeError, match="'broken', at step 0, returned inf for row 0"):
        trainer.train()


def test_an_engine_that_hangs_is_named(tmp_path):
    trainer = asynchronous(tmp_path, heartbeat_stale_after_s=0.5)
    trainer.sampling_thread.engine.draw = lambda *args, **given: time.sleep(3)
    with pytest.raises(RuntimeError, match=r"hangs: no token for `heartbeat_stale_after_s`=0\.5 seconds"):
        trainer.train()


def test_messages_become_prompts_of_the_template(tmp_path):
    rows = [[{"role": "user", "content": text}] for text in dataset()["prompt"]]
    seen = []

    def reward(prompts, completions, answer, **columns):
        seen.append((prompts, completions, answer))
        return early_letters(columns["completion_ids"])

    data = dataset().add_column("answer", list(range(8))).remove_columns("prompt").add_column("prompt", rows)
    trainer = asynchronous(tmp_path, rewards=reward, data=data, max_steps=1)
    trainer.train()
    prompts, completions, answers = seen[0]
    assert prompts == [rows[0]] * 4 and answers == [0] * 4
    assert completions[0][0]["role"] == "assistant"
    expected = trainer.processing_class.apply_chat_template(rows[0], add_generation_prompt=True, return_dict=False)
    assert trainer.sampling_thread.prompt({"prompt": rows[0]}) == expected


def test_data_with_fewer_rows_than_an_update_are_read_again(tmp_path):
    seen = []

    def recording(prompts, completions, **columns):
        seen.append(prompts[0])
        return spread(completions)

    data = dataset(3)
    trainer = asynchronous(tmp_path, data=data, rewards=recording, per_device_train_batch_size=16, max_steps=2)
    trainer.train()
    assert len(seen) >= 8 and set(seen) == set(data["prompt"]) and len(set(data["prompt"])) == 3


def test_a_base_is_never_merged_in_place(tmp_path):
    """TRL merges an adapter into the base for each sync, and takes it out again."""
    trainer = asynchronous(tmp_path, peft_config=lora(), max_steps=3)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if not p.requires_grad}
    trainer.train()
    assert before and all(torch.equal(dict(trainer.model.named_parameters())[n], value) for n, value in before.items())
    assert logged(trainer, "mismatch/kl_k3")[-1] < 1


@pytest.mark.parametrize("precision", rest_is_long(["int8", "int4"]))
def test_a_policy_that_trains_in_the_samplers_numbers(tmp_path, precision):
    """The copy gets the codes that the policy computes with, so that at age 0 only last bits differ."""
    apart = {}
    for training in (precision, None):
        settings = {"train_precision": training, "rollout_precision": precision, "learning_rate": 1e-2}
        trainer = asynchronous(tmp_path, max_staleness=0, max_steps=3, **settings)
        trainer.train()
        apart[training] = logged(trainer, "mismatch/abs_logp_diff")
    assert max(apart[precision]) < 5e-3 < 1e-2 < min(apart[None])


def test_a_frozen_base_is_shared_and_its_adapter_is_not(tmp_path):
    """Right after a sync only last bits differ. An update later the adapter has moved on."""
    given = {"train_precision": "nvfp4", "rollout_precision": "nvfp4", "learning_rate": 1e-2, "max_steps": 4}
    trainer = asynchronous(tmp_path, max_staleness=0, weight_sync_steps=2, peft_config=lora(), **given)
    engine = trainer.sampling_thread.engine
    policy, copied = (dict(model.named_parameters()) for model in (engine.weights.base_model, engine.copy))
    own = {name for name, param in policy.items() if copied[name] is not param}
    trained = {name for name, param in policy.items() if param.requires_grad}
    assert own == trained and any("weight_packed" in name for name in policy.keys() - own)
    trainer.train()
    apart = logged(trainer, "mismatch/abs_logp_diff")
    assert max(apart[0], apart[2]) < 1e-5 and min(apart[1], apart[3]) > 1e-2
    assert all(torch.equal(policy[name], copied[name]) for name in trained)  # the last sync follows the last step


def test_noise_is_drawn_for_each_version(tmp_path):
    noise = {"noise_schedule": "linear", "noise_sigma_start": 0.05, "noise_sigma_end": 0.01, "noise_stages": 3}
    trainer = asynchronous(tmp_path, rollout_precision="bf16", max_steps=6, uaq_scale=1.5, max_staleness=0, **noise)
    trainer.train()
    sigmas, effective = logged(trainer, "noise/sigma"), logged(trainer, "noise/effective_sigma")
    # logged at the step whose samples it made: the first has none, and the later stages less than the earlier ones
    assert sigmas == [0, 0, 0.05, 0.05, 0.01, 0.01]
    assert all(0.5 * sigma <= found <= 1.5 * sigma for sigma, found in zip(sigmas, effective, strict=True))
    apart = logged(trainer, "mismatch/abs_logp_diff")
    assert max(apart[:2]) < 0.01 < 0.015 < min(apart[4:]) and max(apart[4:]) < min(apart[2:4])


def test_noise_of_a_run_of_epochs_has_all_stages(tmp_path):
    """TRL bounds such a run by 32 times the steps that it makes."""
    noise = {"noise_schedule": "linear", "noise_sigma_start": 0.05, "noise_sigma_end": 0.01, "noise_stages": 3}
    trainer = asynchronous(tmp_path, rollout_precision="bf16", max_steps=-1, num_train_epochs=2, **noise)
    trainer.train()
    sigmas = logged(trainer, "noise/sigma")
    assert trainer.state.global_step == len(sigmas) < trainer.state.max_steps / 8
    assert sorted({*sigmas}) == [0, 0.01, 0.05] and sigmas == sorted(sigmas, key=[0, 0.05, 0.01].index)


@pytest.mark.parametrize("preserves", [False, True])
def test_a_recomputation_leaves_the_random_numbers_to_the_thread(tmp_path, monkeypatch, preserves):
    """It would set back the state from which the thread draws meanwhile; a user may ask for that."""
    users, restore = [], torch.set_rng_state

    def noting(state):
        users.append(traceback.extract_stack(limit=2)[0].filename)
        restore(state)

    monkeypatch.setattr(torch, "set_rng_state", noting)
    given = {"gradient_checkpointing_kwargs": {"preserve_rng_state": True}} if preserves else {}
    asynchronous(tmp_path, gradient_checkpointing=True, max_steps=1, **given).train()
    assert any(name.endswith("checkpoint.py") for name in users) == preserves


# Rewards


def test_rewards_get_what_they_are_checked_for(tmp_path):
    """No state of the trainer, and nothing that logs: the thread is not in a step."""

    def exact(prompts, completions, completion_ids):
        return [float(len({*ids})) for ids in completion_ids]

    def needing(completions, trainer_state, **columns):
        return [1.0] * len(completions)

    asynchronous(tmp_path, rewards=exact, max_steps=1).train()
    with pytest.raises(ValueError, match=r"needing.* cannot be called as a reward: missing a required .*trainer_state"):
        asynchronous(tmp_path, rewards=needing)


def test_rewards_that_teach_nothing_are_told(tmp_path, caplog):
    def nothing(completions, **columns):
        return [float("nan")] * len(completions)

    def zero(completions, **columns):
        return [0.0] * len(completions)

    asynchronous(tmp_path, rewards=[nothing, zero, early_letters], max_steps=3).train()
    said = [record.getMessage() for record in caplog.records if "reward function" in record.getMessage()]
    assert len(said) == 2 and "'nothing', at step 0, returned NaN for row 0" in said[0]
    assert "'zero' gave 0 to each of the 8 completions of the first generation" in said[1]


def test_a_proximal_pass_acts_in_every_second_update(tmp_path):
    """The thread samples for both, though samples of the sync before are too old for either."""
    settings = {"proximal_pass": True, "weight_sync_steps": 2, "max_staleness": 0, "learning_rate": 1e-2}
    trainer = asynchronous(tmp_path, max_steps=4, **settings)
    trainer.train()
    assert [ratio == 1 for ratio in logged(trainer, "ratio")] == [True, False, True, False]
    assert trainer.model_version == 3 and logged(trainer, "rollouts/age_max") == [0] * 4


def test_a_run_resumes_behind_what_it_has_trained_on(tmp_path, caplog):
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    first = asynchronous(tmp_path / "run", model=None, **saving) if (tmp_path / "run").mkdir() is None else None
    first.train()
    trained = set(first._trained_groups)
    assert len(trained) >= 4
    again = asynchronous(tmp_path / "run", model=first.model.name_or_path, **saving | {"max_steps": 6})
    with caplog.at_level(logging.WARNING):
        again.train(resume_from_checkpoint=True)
    assert "Samples that waited for training" in caplog.text
    assert again.sampling_thread.first_row == len(trained) and again.state.global_step == 6
    assert again.model_version == first.model_version + 3  # a cold sync, and two steps
    assert [entry["step"] for entry in again.state.log_history if "rollouts/age" in entry] == [1, 2, 3, 4, 5, 6]


def test_a_run_resumes_behind_what_was_too_old(tmp_path):
    """Groups 0 and 2 are dropped, 1 and 3 trained on, and 4 waits."""
    (tmp_path / "run").mkdir()
    trainer = asynchronous(tmp_path / "run", rollout_precision="bf16", max_staleness=0, max_steps=9)
    trainer.model_version = trainer.sampling_thread.first_row = 1
    for sample in given_samples(5):
        sample.versions = sample.versions * (sample.group_id not in (0, 2))
        trainer.rollout_queue.put(sample)
    next(iter(trainer.get_train_dataloader()))
    state = trainer.sampling_state()
    assert trainer._trained_groups == {1, 3} and trainer.rollout_queue.qsize() == 4
    assert state["prompt_index"] == 1 + 4 and state["groups_trained"] == 2
    trainer.load_sampling_state("checkpoint", state)
    assert trainer.sampling_thread.first_row == 5 and trainer._groups_before_resume == 2


def test_a_run_of_another_sampler_resumes_with_all_data(tmp_path, caplog):
    saving = {"save_strategy": "steps", "save_steps": 2, "is_correction": "tis"}
    (tmp_path / "run").mkdir()
    first = asynchronous(tmp_path / "run", given_samples(), max_steps=2, **saving)
    first.train()
    path = first.model.name_or_path
    again = asynchronous(tmp_path / "run", model=path, max_steps=3, resume_with_changes=True, **saving)
    again.train(resume_from_checkpoint=True)
    assert "sampled in another way. The data begin anew" in caplog.text
    assert again.sampling_thread.first_row == 0 and again.state.global_step == 3


def test_samples_of_given_workers_have_one_version(tmp_path):
    samples = given_samples(2, version=3)
    for sample in samples:
        sample.versions = None
    trainer = asynchronous(tmp_path, samples, is_correction="tis")
    trainer.model_version = 5
    policy_gradient(trainer)
    total, count = trainer._metrics["train"]["rollouts/age"][0]
    assert total == 2 * count
