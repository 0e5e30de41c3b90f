"""Generations of several turns: tools and `rollout_func`, with what an engine does once before them.

A tiny model calls no tools. A tokenizer that reads a call in whatever it wrote stands in for one that does, so the
number of turns is that of `max_tool_calling_iterations`, which the ranks of these tests set differently. vLLM has no
sleep mode on a CPU: where an engine sleeps here, a stand-in notes it, and at level 2 takes the weights away.
"""

import asyncio
import re
import runpy
import time
from collections import Counter
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from accelerate import PartialState
from long_tests import rest_is_long
from places import ROOT
from reference import DROPPING, diagnostics
from tiny import save_tiny, tiny_model
from training import config, dataset, make, metrics, parameters
from trl import GRPOConfig
from turns import generations, in_vllm, note, noted, put_to_sleep, spread_of_messages, with_tools

from trl_quant import QuantGRPOConfig, QuantGRPOTrainer
from trl_quant.corrections import TIS, CorrectionInputs
from trl_quant.rollout.verify import self_check
from trl_quant.trl_seams import exchanged


NOISE = {"noise_schedule": "exponential", "noise_sigma_start": 0.2, "noise_sigma_end": 0.1, "noise_stages": 3}


def rare(completions, **kwargs) -> list[float]:
    """A reward that few completions get, so that whole groups have none."""
    return [float(sum(map(ord, text)) % 4 == 0) for text in completions]


def note_checks(monkeypatch, events: list[str]) -> None:
    check = self_check.self_check
    monkeypatch.setattr(self_check, "self_check", lambda *args: events.append("check") or check(*args))


def threes(values: list) -> list[list]:
    return [values[start : start + 3] for start in range(0, len(values), 3)]


# Where there is no engine


@pytest.fixture
def without_engine(tmp_path):
    """A trainer that samples as TRL does, with TRL's own arguments."""
    args = config(GRPOConfig, tmp_path)
    trainer = make(QuantGRPOTrainer, args)
    trainer.args = args  # which know nothing of ours
    trainer.rollout_func = lambda prompts, trainer: {
        "prompt_ids": [[1] for _ in prompts],
        "completion_ids": [[2, 257] for _ in prompts],
        "logprobs": [[-0.5, -0.25] for _ in prompts],
        "env_mask": [[1, 0] for _ in prompts],
    }
    return trainer


def test_a_rollout_func_answers_without_an_engine(without_engine):
    prompt_ids, completion_ids, mask, completions, logps, *_ = without_engine._generate(["a", "b"])
    assert prompt_ids == [[1], [1]] and completion_ids == [[2, 257]] * 2 and mask == [[1, 0]] * 2
    assert completions == ["#"] * 2 and logps == [[-0.5, -0.25]] * 2
    del without_engine.rollout_func
    without_engine.rollout_func = None
    assert without_engine._generate(["a", "b"])[1] != completion_ids


def test_trls_engine_is_synced_once_a_step(without_engine):
    synced = []
    without_engine.use_vllm, without_engine._last_loaded_step = True, -1
    without_engine.vllm_generation = SimpleNamespace(
        sync_weights=lambda: synced.append(without_engine.state.global_step)
    )
    for step in (0, 0, 1, 1):
        without_engine.state.global_step = step
        without_engine._generate(["a"])
    assert synced == [0, 1]


# Once a generation


def test_the_embedded_engine_is_prepared_once(tmp_path):
    """One sync a step; one draw of noise a generation, which all of its turns sample with."""
    trainer = with_tools(tmp_path, tiny_model(seed=3), turns=3, rollout_precision="int8", **NOISE)
    events, norms = noted(trainer.vllm_generation)
    trainer.train()
    turns = ["turn"] * 3
    assert events == ["sync", *turns, "sync", "noise", *turns, "sync", "noise", *turns]
    assert [len(set(of_one)) for of_one in threes(norms)] == [1, 1, 1] and len(set(norms)) == 3
    logs = [log for log in metrics(trainer) if "loss" in log]
    assert [log["tools/call_frequency"] for log in logs] == [2, 2, 2]  # calls for each completion


@pytest.mark.vllm
@pytest.mark.parametrize("level", rest_is_long([2, 1, 0]))
def test_vllm_is_prepared_once(tmp_path, monkeypatch, level):
    """One waking, one sync and one self-check a generation, whatever the number of turns."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from vllm_engines import keep

    model = save_tiny(tmp_path / "model", dtype=torch.bfloat16)
    twice = {"gradient_accumulation_steps": 2, "steps_per_generation": 1}  # generations of a step
    trainer = with_tools(tmp_path, model, 3, rollout_precision="int8", **in_vllm(), **NOISE, **twice)
    keep(trainer)
    events, norms = noted(trainer.vllm_generation)
    note_checks(monkeypatch, events)
    if level:
        put_to_sleep(trainer.vllm_generation.engine, level, events)
    trainer.train()

    turns = ["turn"] * 3
    if not level:
        steps = [["sync", "check"], [], ["sync", "noise"], ["noise"], ["sync", "noise"], ["noise"]]
        assert events == [event for before in steps for event in [*before, *turns]]
    else:
        found = generations(events, "sleep")
        assert len(found) == 6
        for index, generation in enumerate(found):
            sync = ["sync"] if level == 2 or index % 2 == 0 else []
            once = [*sync, "wake weights", "wake kv_cache", "check"]
            # The check takes the noise of the generation before off, where no sync did
            noises = 0 if index < 2 else 1 if sync else 2
            assert generation[-4:] == [*turns, "sleep"]
            assert Counter(generation[:-4]) == Counter([*once, *["noise"] * noises])
    per_generation = [set(of_one) for of_one in threes(norms)]
    assert all(len(sums) == 1 for sums in per_generation) and len(set(norms)) > 3


@pytest.mark.vllm
def test_a_rollout_func_finds_the_engine_ready(tmp_path, monkeypatch):
    """Awake, with the step's weights, though it may not take a turn at all."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from vllm_engines import greedy, keep

    found = []

    def rollout(prompts, trainer):
        found.append(greedy(trainer.vllm_generation.llm, n=4))
        answer = {"prompt_ids": [[1]], "completion_ids": [[65, 257]], "logprobs": [[-1.0, -1.0]]}
        return {name: values * len(prompts) for name, values in answer.items()}

    args = config(QuantGRPOConfig, tmp_path / "out", rollout_precision="int8", max_steps=2, **in_vllm())
    model = save_tiny(tmp_path / "model", dtype=torch.bfloat16)
    trainer = make(QuantGRPOTrainer, args, model=model, rollout_func=rollout)
    keep(trainer)
    trainer.vllm_generation.sync_weights()
    expected = greedy(trainer.vllm_generation.llm, n=4)
    events, _ = noted(trainer.vllm_generation)
    note_checks(monkeypatch, events)
    put_to_sleep(trainer.vllm_generation.engine, 2, events)
    assert greedy(trainer.vllm_generation.llm, n=4) != expected  # the stand-in takes the weights away
    trainer.train()
    once = ["sync", "wake weights", "wake kv_cache", "check", "sleep"]
    assert events == once * 2 and found == [expected] * 2  # all rewards are equal, and nothing is learned


# What is logged of a sync


@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.slow
def test_a_sync_that_brings_weights_back_is_not_logged(tmp_path):
    """With evaluations, two generations a step and dynamic sampling a run logs the same asleep and awake."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from vllm_engines import keep

    model = save_tiny(tmp_path / "model", dtype=torch.bfloat16)
    runs = {}
    for level in (0, 2):
        args = config(
            QuantGRPOConfig,
            tmp_path / str(level),
            rollout_precision="int8",
            max_steps=3,
            gradient_accumulation_steps=2,
            steps_per_generation=1,
            dynamic_sampling_rounds=2,
            eval_strategy="steps",
            eval_steps=1,
            eval_on_start=True,
            **in_vllm(),
        )
        options = {"train_dataset": dataset(64), "eval_dataset": dataset(4), "reward_funcs": rare}
        trainer = make(QuantGRPOTrainer, args, model=model, **options)
        keep(trainer)
        events, _ = noted(trainer.vllm_generation)
        if level:
            put_to_sleep(trainer.vllm_generation.engine, level, events)
        trainer.train()
        logs = [{k: v for k, v in log.items() if "sync_check/" not in k} for log in metrics(trainer)]
        runs[level] = events, logs, parameters(trainer)
    (awake, logs, weights), (asleep, same, other) = runs[0], runs[2]
    assert same == logs and all(torch.equal(weight, other[name]) for name, weight in weights.items())
    updates = [log.get("weights/normalized_update") for log in logs if "loss" in log]
    assert updates[0] is None and min(updates[1:]) > 0
    # Every batch that was sampled, and only those, woke the engine and brought its weights
    assert awake.count("sync") == 4 < asleep.count("sync") == asleep.count("sleep") == asleep.count("turn")
    assert asleep.count("turn") == awake.count("turn") > 6 + 4
    assert asleep.count("wake weights") == asleep.count("wake kv_cache") == asleep.count("turn")


# What counts


class Garbled(QuantGRPOTrainer):
    """Its sampler claims `garbage` for the log-probability of each token that the policy did not write, or wrote."""

    garbage, of_tools = None, True

    def _generate(self, prompts):
        with exchanged(self.correction_step, take_samples=lambda logps: None):
            generated = super()._generate(prompts)
        _, _, mask, _, logps, *_ = generated
        for row, kept in zip(logps, mask, strict=True):
            for t, by_policy in enumerate(kept):
                if self.garbage is not None and by_policy != self.of_tools:
                    row[t] = self.garbage
        self.correction_step.take_samples(logps)
        return generated


# The correction and its level
CORRECTED = [("tis", "token"), ("ais", "sequence"), ("geometric", "token")]


@pytest.mark.parametrize(("correction", "level"), CORRECTED)
def test_tokens_of_tools_weigh_one_and_count_nowhere(tmp_path, correction, level):
    """Other log-probabilities of a tool's tokens change no bit of a run. Those of the policy's tokens change it."""
    runs = {}
    for name, garbage, of_tools in (("as it is", None, True), ("tools", -30.0, True), ("policy", -3.0, False)):
        settings = {"rollout_precision": "int8", "max_steps": 1, "is_correction": correction}
        settings |= {"importance_sampling_level": level, **DROPPING.get(correction, {})}
        trainer = with_tools(tmp_path, tiny_model(seed=3), turns=2, kind=Garbled, **settings)
        trainer.garbage, trainer.of_tools = garbage, of_tools
        batches, correct = [], trainer.correct

        def kept(batch, correct=correct, batches=batches):
            correct(batch)
            batches.append(batch)

        trainer.correct = kept
        trainer.train()
        (batch,) = batches
        written = (batch["completion_mask"] == 1) & (batch["tool_mask"] == 0)
        assert 0 < written.sum() < batch["completion_mask"].sum()
        if name == "tools":
            assert (batch["sampling_per_token_logps"][written] == garbage).all()
        if "importance_sampling_ratio" in batch:
            assert (batch["importance_sampling_ratio"][written] == 1).all()
        runs[name] = metrics(trainer)[0], parameters(trainer)
    (log, weights), (same_log, same), (other_log, other) = (runs[name] for name in ("as it is", "tools", "policy"))
    assert same_log == log and all(torch.equal(value, weights[name]) for name, value in same.items())
    assert other_log["mismatch/kl_k3"] != log["mismatch/kl_k3"]
    assert any(not torch.equal(value, weights[name]) for name, value in other.items())


def test_each_turn_has_a_mismatch_of_its_own(tmp_path):
    """Against slow loops over the turns of each completion; completions of one turn have none."""
    trainer = with_tools(tmp_path, tiny_model(seed=3), 3, rollout_precision="int4", num_iterations=2, max_steps=2)
    batches, correct = [], trainer.correct
    trainer.correct = lambda batch: correct(batch) or batches.append(dict(batch))
    trainer.train()
    batch, log = batches[0], metrics(trainer)[0]
    mask = batch["completion_mask"] * batch["tool_mask"]
    expected = diagnostics(
        batch["sampling_per_token_logps"], batch["old_per_token_logps"], mask, 2.0, batch["advantages"]
    )
    by_turn = {name: value for name, value in expected.items() if "by_turn" in name}
    assert [*by_turn] == ["mismatch/by_turn/1", "mismatch/by_turn/2", "mismatch/by_turn/3-4"]
    for name, value in expected.items():
        assert log[name] == pytest.approx(value, rel=1e-4, abs=1e-7), name
    assert len(set(by_turn.values())) == 3

    one_turn = batch | {"tool_mask": (mask.cumsum(1) <= 2).long() * mask}
    inputs = (one_turn[name] for name in ("sampling_per_token_logps", "old_per_token_logps", "advantages"))
    found = TIS()(CorrectionInputs(*inputs, one_turn["tool_mask"])).metrics
    assert not any("by_turn" in name for name in found)


class Shop:
    """An environment whose state is the number of notes that were taken since the last `reset`."""

    def reset(self, **kwargs) -> None:
        self.notes = 0

    def note(self) -> str:
        """Takes a note."""
        self.notes += 1
        return f"{self.notes}"


def test_an_environment_is_prepared_for_once(tmp_path):
    """One sync and one draw of noise a generation; its turns have a state, and what it says counts nowhere."""
    told = []

    def reads(completions, **kwargs):
        told.extend([m["content"] for m in messages if m["role"] == "tool"] for messages in completions)
        return spread_of_messages(completions)

    options = {"tools": None, "environment_factory": Shop}
    trainer = with_tools(
        tmp_path, tiny_model(seed=3), 3, reward=reads, options=options, rollout_precision="int8", **NOISE
    )
    events, norms = noted(trainer.vllm_generation)
    trainer.train()
    turns = ["turn"] * 3
    assert events == ["sync", *turns, "sync", "noise", *turns, "sync", "noise", *turns]
    assert [len(set(of_one)) for of_one in threes(norms)] == [1, 1, 1]
    assert told == [["1", "2"]] * (3 * 8)
    assert all("mismatch/by_turn/2" in log for log in metrics(trainer) if "loss" in log)


def test_the_example_trains(tmp_path, monkeypatch):
    """One step of what a user runs: the model asks the calculator, hears what it knows, and goes on."""
    monkeypatch.chdir(tmp_path)
    script = runpy.run_path(str(ROOT / "examples/tools.py"))
    assert [script["column"](digits) for digits in ("7+2+0", "7+8+0", "4+4+1", "4-8-0", "9-2-0")] == [
        *("9c0 ", "", "", "", "7b0 ")
    ]
    told, reward = [], script["arithmetic_reward"]

    def reads(completions, **kwargs):
        told.extend(completions)
        return reward(completions, **kwargs)

    reads.__name__ = "arithmetic_reward"
    script["main"].__globals__["arithmetic_reward"] = reads
    settings = {"max_steps": 1, "logging_steps": 1, "per_device_train_batch_size": 32, "disable_tqdm": True}
    log = metrics(script["main"](**settings))[0]
    called = [m for messages in told for m in messages if m.get("tool_calls")]
    asked = [call["function"]["arguments"]["digits"] for message in called for call in message["tool_calls"]]
    assert len(asked) > 32 and all(re.fullmatch(r"\d([+-])\d\1\d", digits) for digits in asked)
    said = [m["content"] for messages in told for m in messages if m["role"] == "tool"]
    assert set(said) <= {script["column"](digits) for digits in asked} and len(said) > 32
    assert log["reward"] > 0.1 and log["tools/call_frequency"] > 1 and log["tools/failure_frequency"] == 0
    assert "" in said and log["grad_norm"] > 0
    assert all(log[f"mismatch/by_turn/{turn}"] < 0.01 for turn in (1, 2))


# Ranks


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["embedded", pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.long])])
def test_two_ranks_with_unequal_turns_finish(tmp_path, engine):
    """One takes one turn a generation, the other three, and each syncs and checks once: no rank waits for the other."""
    if engine == "vllm" and not find_spec("vllm"):
        pytest.skip("vLLM is not installed")
    from ranks import on_two_ranks, results
    from turn_ranks import assert_finished

    save_tiny(tmp_path / "model", dtype=torch.bfloat16)
    case = f"turns-int8-{2 if engine == 'vllm' else engine}"
    assert_finished(*results(tmp_path, case, on_two_ranks("ddp", tmp_path, case)), engine == "vllm")


# What TRL cannot do


IN_A_SERVER = {"rollout_precision": "int8", "use_vllm": True, "vllm_mode": "server"}


def without_a_model(path, monkeypatch, settings: dict, given: dict, processes: int) -> QuantGRPOTrainer:
    """A trainer whose model does not exist."""
    args = config(QuantGRPOConfig, path, **IN_A_SERVER | settings)
    monkeypatch.setattr(PartialState(), "num_processes", processes)
    return make(QuantGRPOTrainer, args, model="no/such-model", **given)


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("settings", "given", "says"),
    [
        ({}, {"tools": [note]}, "`tools` with `vllm_mode`='server' on 2 processes"),
        ({}, {"environment_factory": object}, "`environment_factory` with `vllm_mode`='server'"),
        (
            {"vllm_mode": "colocate", "vllm_tensor_parallel_size": 2},
            {"tools": [note]},
            "`tools` with `vllm_tensor_parallel_size`=2",
        ),
    ],
)
def test_turns_that_ranks_would_take_together_are_refused(tmp_path, monkeypatch, settings, given, says):
    """Before a model is loaded, or looked for."""
    with pytest.raises(ValueError, match=re.escape(says)) as refusal:
        without_a_model(tmp_path, monkeypatch, settings, given, processes=2)
    assert "wait for each other" in str(refusal.value)


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("settings", "given", "processes"),
    [
        ({}, {"tools": [note]}, 1),
        ({}, {"tools": []}, 2),
        ({"vllm_mode": "colocate"}, {"tools": [note]}, 2),
        ({"rollout_precision": None}, {"tools": [note]}, 2),
    ],
)
def test_other_turns_are_not_refused(tmp_path, monkeypatch, settings, given, processes):
    """The model is what is missing."""
    pytest.importorskip("vllm")
    with pytest.raises(ValueError, match=re.escape("huggingface.co")) as refusal:
        without_a_model(tmp_path, monkeypatch, settings, given, processes)
    assert "wait for each other" not in str(refusal.value)


# A tool that hangs


def hanging() -> str:
    """Takes a note."""
    time.sleep(60)


async def hanging_later() -> str:
    """Takes a note."""
    await asyncio.Event().wait()


@pytest.mark.parametrize("tool", [hanging, hanging_later])
def test_a_tool_that_hangs_is_told_to_the_model(tmp_path, monkeypatch, tool):
    """As any tool that fails is; the run goes on."""
    told = []

    def reads(completions, **kwargs):
        told.extend(message["content"] for messages in completions for message in messages if message["role"] == "tool")
        return spread_of_messages(completions)

    monkeypatch.setattr(tool, "__name__", "note")
    with_tools(tmp_path, None, 2, tool, reads, reward_timeout=0.1, max_steps=1, rollout_precision="int8").train()
    error = {"error": "The tool 'note' did not return within `reward_timeout`=0.1 seconds."}
    assert len(told) == 8 and set(told) == {str(error)}
