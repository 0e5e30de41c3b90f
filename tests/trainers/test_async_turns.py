"""
Tools beside an asynchronous training.

The tokens are compared with those of a conversation written by hand and with TRL's worker on the same turns, their
log-probabilities with the policy's own forward pass at each version.
"""

import asyncio
import copy
import threading
import time

import numpy as np
import pytest
import reference
import torch
from asynchronous import asynchronous, gradient_of_batch, logps_of, noted
from conversing import (
    ANSWER,
    ASKS,
    CALL,
    END,
    LIMIT,
    OPEN,
    Chosen,
    add,
    begun,
    by_hand,
    fails,
    logged,
    moved,
    reading_tokenizer,
    same_rows,
    speaking,
    taken,
    trls,
)
from tiny import tiny_tokenizer
from turns import calling_tokenizer, conversations, note

from trl_quant.config.lengths import Context


# Tokens, masks, versions, log-probabilities


def test_each_token_of_two_turns_knows_its_version(tmp_path):
    """A sync while the tool runs, for which it does not wait, and one in the middle of the second turn."""
    is_called, may_return = threading.Event(), threading.Event()

    def slow(a: int, b: int) -> int:
        is_called.set()
        assert may_return.wait(LIMIT)
        return a + b

    slow.__name__, slow.__doc__ = "add", add.__doc__
    trainer = speaking(tmp_path, tools=[slow])
    chosen = Chosen(trainer, lambda turns: (CALL, ANSWER)[turns], holds=1)
    weights = begun(trainer)
    assert is_called.wait(LIMIT)
    moved(trainer, weights)
    may_return.set()
    assert chosen.held.wait(LIMIT)
    moved(trainer, weights)
    samples = taken(trainer)

    result = f"\n<|im_start|>tool\n3{END}\n{OPEN}"
    ids, versions = by_hand((ASKS, 0), (CALL + END, 1), (result, 0), (ANSWER[:2], 2), (ANSWER[2:] + END, 3))
    for sample in samples:
        assert sample.input_ids.tolist() == ids and sample.versions.tolist() == versions
        assert sample.completion_mask.tolist() == [int(version > 0) for version in versions]
        assert not sample.old_log_probs[np.array(versions) == 0].any() and sample.model_version == 1
    assert len(samples) == 4 and len({sample.group_id for sample in samples}) == 1
    rows, completion = trls(trainer.processing_class, [CALL, ANSWER])
    assert same_rows(samples[:1], rows) and samples[0].completion == completion
    assert [message["role"] for message in completion] == ["assistant", "tool", "assistant"]

    trained = np.array(versions) > 0
    of_trained, found = np.array(versions)[trained], samples[0].old_log_probs[trained]
    apart = {}
    for version, state in weights.items():
        trainer.model.load_state_dict(state)
        with torch.no_grad():
            apart[version] = np.abs(logps_of(trainer.model.eval() and trainer, samples[:1])[0].numpy() - found)
    for version, differences in apart.items():
        assert differences[of_trained == version].max() < 0.05  # the copy's weights are rounded to BF16
        assert np.median(differences[of_trained != version]) > 0.2
    metrics = logged(trainer)
    assert sum(metrics["tools/add/call_total"]) == 4 and metrics["rollout/turns_max"] == [2.0] * 4
    assert samples[0].metrics["tools/call_frequency"] == 1 and samples[0].metrics["tools/failure_frequency"] == 0


THOUGHT = "(Let me see.) "


@pytest.mark.parametrize("threshold", [1, 1000])
def test_a_template_that_changes_what_was_said(tmp_path, threshold):
    """Thoughts are not shown again: the first turn is a row of its own, or loses what the template changed."""
    trainer = speaking(tmp_path, tools=[add], fork_threshold_tokens=threshold)
    Chosen(trainer, lambda turns: (THOUGHT + CALL, ANSWER)[turns])
    begun(trainer)
    samples = taken(trainer, 8 if threshold == 1 else 4)

    shown, result = CALL + END, f"\n<|im_start|>tool\n3{END}\n{OPEN}"
    if threshold == 1:
        expected = [
            by_hand((ASKS, 0), (THOUGHT + CALL + END, 1)),
            by_hand((ASKS + shown + result, 0), (ANSWER + END, 1)),
        ]
    else:  # "(" begins the thought, and "a" the call
        expected = [by_hand((ASKS + shown + result, 0), (ANSWER + END, 1))]
    first = samples[: len(expected)]
    assert [(s.input_ids.tolist(), s.completion_mask.tolist()) for s in first] == expected
    assert [sample.versions.tolist() for sample in first] == [mask for _, mask in expected]
    assert len({(sample.advantage, sample.group_id) for sample in first}) == 1
    rows, _ = trls(trainer.processing_class, [THOUGHT + CALL, ANSWER], fork_threshold_tokens=threshold)
    assert same_rows(first, rows)


def test_tokens_of_tools_have_no_gradient(tmp_path):
    trainer = speaking(tmp_path, tools=[add])
    Chosen(trainer, lambda turns: (CALL, ANSWER)[turns])
    begun(trainer)
    samples = taken(trainer)
    for sample, advantage in zip(samples, (1.0, -0.5, 2.0, 0.25), strict=True):
        sample.advantage = advantage

    def found(mask=None):
        settings = {"is_correction": "none", "per_device_train_batch_size": 4, "model": trainer.model.name_or_path}
        learner = asynchronous(tmp_path, copies(samples, mask), **settings)
        learner.model_version = 1
        batch = next(iter(learner.get_train_dataloader()))
        return learner, gradient_of_batch(learner, batch)

    learner, gradient = found()
    logps = logps_of(learner, samples)
    tokens = sum(len(row) for row in logps)
    loss = -sum(sample.advantage * row.sum() for sample, row in zip(samples, logps, strict=True)) / tokens
    learner.model.zero_grad()
    loss.backward()
    grads = [param.grad.flatten() for param in learner.model.parameters() if param.grad is not None]
    expected = torch.cat(grads).double()
    assert (gradient - expected).norm() < 1e-4 * expected.norm()
    after_prompt = [int(i >= len(samples[0].completion_mask) - 70) for i in range(len(samples[0].completion_mask))]
    _, without_mask = found(after_prompt)
    assert (without_mask - expected).norm() > 0.1 * expected.norm()


def copies(samples, mask=None) -> list:
    found = copy.deepcopy(samples)
    for sample in found:
        if mask is not None:
            sample.completion_mask = np.maximum(sample.completion_mask, mask)
    return found


@pytest.mark.parametrize("thought", ["", THOUGHT], ids=["one row", "forks"])
def test_each_turn_has_a_mismatch_of_its_own(tmp_path, thought):
    """Against slow loops over whole conversations, also where each turn is a row of its own."""
    calls = 'add({"a": 1, "b": 2})', 'add({"a": 4, "b": 3})'
    trainer = speaking(tmp_path, tools=[add], fork_threshold_tokens=1)
    Chosen(trainer, lambda turns: (*(thought + call for call in calls), ANSWER)[turns])
    begun(trainer)
    samples = taken(trainer, 12 if thought else 4)
    learner = asynchronous(tmp_path, samples, is_correction="tis", per_device_train_batch_size=len(samples))
    learner.model_version = 1
    spread = np.random.default_rng(0)
    for sample in samples:
        sample.old_log_probs += 0.3 * spread.normal(size=len(sample.turns)) * sample.turns
    gradient_of_batch(learner, next(iter(learner.get_train_dataloader())))

    # Each conversation's trained tokens, and a masked one between two turns
    logps, rows = logps_of(learner, samples), {}
    lengths = [len(by_hand((said + END, 0))[0]) for said in (*(thought + call for call in calls), ANSWER)]
    for i, (sample, of_sample) in enumerate(zip(samples, logps, strict=True)):
        sampled = torch.tensor(sample.old_log_probs[sample.completion_mask > 0])
        conversation = i // (len(samples) // 4)
        rows.setdefault(conversation, []).append(torch.stack([of_sample.detach(), sampled]))
    gap = torch.zeros(2, 1)
    parts = [torch.cat(of_one, 1).split(lengths, 1) for of_one in rows.values()]
    old, sampled = torch.stack([torch.cat([a, gap, b, gap, c], 1) for a, b, c in parts], 1)
    is_said = [1] * lengths[0] + [0] + [1] * lengths[1] + [0] + [1] * lengths[2]
    expected = reference.diagnostics(sampled, old, torch.tensor([is_said] * 4), 2.0)
    logged = {name: values for name, values in learner._metrics["train"].items() if "by_turn" in name}
    assert [*logged] == ["mismatch/by_turn/1", "mismatch/by_turn/2", "mismatch/by_turn/3-4"]
    for name in (*logged, "mismatch/kl_k3"):
        assert learner._metrics["train"][name] == [pytest.approx(expected[name], rel=1e-3)], name
    assert min(abs(values[0] / expected["mismatch/kl_k3"] - 1) for values in logged.values()) > 0.05


# Limits


def test_the_turns_share_a_length(tmp_path):
    """All tokens after the prompt count. A conversation without room for a turn ends with the call."""
    length = len(by_hand((CALL + END, 1))[0])
    result = len(by_hand((f"\n<|im_start|>tool\n3{END}\n{OPEN}", 0))[0])
    for room, replies in ((5, 2), (0, 1)):
        trainer = speaking(tmp_path, tools=[add], max_completion_length=length + result + room)
        Chosen(trainer, lambda turns: (CALL, ANSWER)[turns])
        begun(trainer)
        (sample, *_) = taken(trainer)
        assert int(sample.completion_mask.sum()) == length + room
        assert len(sample.input_ids) == len(by_hand((ASKS, 0))[0]) + length + (result + room) * (replies - 1)
        roles = [message["role"] for message in sample.completion]
        assert roles == ["assistant", "tool", "assistant"][: 2 * replies - 1]
        if room:
            assert sample.completion[-1]["content"] == ANSWER[:room]


def test_a_conversation_ends_where_the_samplers_context_does(tmp_path, monkeypatch):
    """The result of its call leaves no token of the context, or some."""
    length = len(by_hand((ASKS, 0), (CALL + END, 1), (f"\n<|im_start|>tool\n3{END}\n{OPEN}", 0))[0])
    for room, replies in ((9, 2), (0, 1)):
        context = Context(length + room, "`--max-model-len`", True)
        monkeypatch.setattr("trl_quant.trainers.checks.context_of", lambda *given, context=context: context)
        trainer = speaking(tmp_path, tools=[add])
        Chosen(trainer, lambda turns: (CALL, ANSWER)[turns])
        begun(trainer)
        (sample, *_) = taken(trainer)
        roles = [message["role"] for message in sample.completion]
        assert roles == ["assistant", "tool", "assistant"][: 2 * replies - 1]


def test_the_calls_have_a_limit(tmp_path):
    trainer = speaking(tmp_path, tools=[add], max_tool_calling_iterations=2)
    Chosen(trainer, lambda turns: CALL)
    begun(trainer)
    (sample, *_) = taken(trainer)
    assert [message["role"] for message in sample.completion] == ["assistant", "tool"] * 2 + ["assistant"]
    assert sample.metrics["tools/call_frequency"] == 2
    assert {cut / ended for cut, ended in logged(trainer)["tools/loop_exhausted_frac"]} == {1}


# Tools that fail


def broken() -> int:
    """Breaks."""
    raise KeyError("nothing there")


def hangs() -> int:
    """Hangs."""
    time.sleep(60)


async def later(a: int, b: int) -> int:
    await asyncio.sleep(0)
    return a + b


later.__doc__ = add.__doc__


async def never() -> int:
    """Never answers."""
    await asyncio.Event().wait()


def test_the_model_reads_the_errors_of_tools(tmp_path):
    """Of one that raises, ones that never return, and one that is not there. Others answer meanwhile."""
    calls = 'broken({}) hangs({}) never({}) missing({}) later({"a": 1, "b": 2})'
    trainer = speaking(tmp_path, tools=[broken, hangs, never, later], reward_timeout=0.3)
    Chosen(trainer, lambda turns: (calls, ANSWER)[turns])
    begun(trainer)
    (sample, *_) = taken(trainer)
    told = [message["content"] for message in sample.completion if message["role"] == "tool"]
    assert "nothing there" in told[0] and "unknown tool missing" in told[3] and told[4] == "3"
    for name, says in zip(("hangs", "never"), told[1:3], strict=True):
        assert f"The tool '{name}' did not return within `reward_timeout`=0.3 seconds" in says
    assert sample.metrics["tools/call_frequency"] == 5 and sample.metrics["tools/failure_frequency"] == 0.8


def unawaited() -> int:
    """Returns what nobody runs."""
    return (i for i in ())


def test_a_tool_that_nobody_runs_ends_the_run(tmp_path):
    trainer = speaking(tmp_path, tools=[unawaited])
    Chosen(trainer, lambda turns: ("unawaited({})", ANSWER)[turns])
    fails(trainer, "nobody runs")


# Whole runs


def test_a_run_with_tools_resumes(tmp_path):
    """Without a stand-in: every completion calls the tool, whatever the policy writes."""
    settings = {"save_strategy": "steps", "save_steps": 2, "learning_rate": 1e-4}
    settings |= {"data": conversations(8), "max_tool_calling_iterations": 1, "fork_threshold_tokens": 1}
    settings |= {"processing_class": calling_tokenizer(), "tools": [note]}

    def run(steps, **given):
        trainer = speaking(tmp_path, max_steps=steps, **settings | given)
        trainer.model.generation_config.eos_token_id = [257, *range(94, 200)]  # short turns
        samples = noted(trainer.sampling_thread.rollout_buffer)
        trainer.train(resume_from_checkpoint=bool(given))
        return trainer, samples

    first, samples = run(2)
    again, later = run(3, model=first.model.name_or_path)
    entries = [entry for entry in again.state.log_history if "rollouts/age" in entry]
    assert [entry["step"] for entry in entries] == [1, 2, 3]
    assert all(entry["tools/call_frequency"] == 1 and entry["tools/failure_frequency"] == 0 for entry in entries)
    assert all(entry["mismatch/kl_k3"] < 0.02 for entry in entries)
    assert again.sampling_thread.first_row == len(first._trained_groups) > 0
    assert later[0].prompt == conversations(8)[again.sampling_thread.first_row]["prompt"] != samples[0].prompt
    second = [sample for sample in samples if "tool\nok" in first.processing_class.decode(sample.input_ids)]
    assert len(second) == len(samples) / 2  # TRL's message of a call is not what was drawn


# Refusals before a model is loaded


def test_a_template_that_shows_no_calls(tmp_path):
    with pytest.raises(ValueError, match="shows the model no call of a tool"):
        speaking(tmp_path, tools=[add], processing_class=tiny_tokenizer())
    unknown = reading_tokenizer()
    del unknown.response_schema
    with pytest.raises(ValueError, match="Unrecognized chat template"):
        speaking(tmp_path, tools=[add], processing_class=unknown)
