"""
Groups that teach nothing are replaced, and only those: checked against what the rewards saw, on one rank and on two.

As a script, one of the two ranks.
"""

import inspect
import json
import math
import os
import random
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from dynamic import DULL, Record, check_generation, half, tokens, trainer_of
from hypothesis import given, settings
from hypothesis import strategies as st
from long_tests import rest_is_long
from tiny import VOCAB_SIZE, save_tiny, tiny_model, tiny_tokenizer
from training import assert_same_run, config, dataset, metrics, parameters, spread
from transformers import Qwen3Config, Qwen3ForSequenceClassification
from trl import GRPOTrainer
from trl.rewards import get_soft_overlong_punishment

from trl_quant import QuantGRPOConfig, QuantGRPOTrainer
from trl_quant.config.data import check_dynamic_sampling, check_reads_ahead
from trl_quant.rollout.engine import Samples
from trl_quant.trainers.dynamic_sampling import informative
from trl_quant.trainers.prompt_order import PromptOrder


NAN = math.nan


def nothing(completions, **kwargs) -> list[float]:
    return [0.5] * len(completions)


# The parts


VALUES = st.sampled_from([0.0, 1.0, 0.25, NAN])


@settings(max_examples=200, deadline=None)
@given(st.data(), st.integers(1, 4), st.integers(2, 4), st.integers(1, 3), st.booleans())
def test_informative_groups_have_rewards_that_differ(data, groups, size, functions, apart):
    rows = [[data.draw(VALUES) for _ in range(functions)] for _ in range(groups * size)]
    weights = [data.draw(st.sampled_from([0.0, 0.5, 2.0])) for _ in range(functions)]
    expected = []
    for g in range(groups):
        group = rows[g * size : (g + 1) * size]
        columns = [{w * row[f] for row in group if not math.isnan(row[f])} for f, w in enumerate(weights)]
        scored = [row for row in group if not all(map(math.isnan, row))]
        totals = {sum(w * r for w, r in zip(weights, row, strict=True) if not math.isnan(r)) for row in scored}
        expected.append(any(len(column) > 1 for column in columns) if apart else len(totals) > 1)
    assert informative(torch.tensor(rows), torch.tensor(weights), size, apart).tolist() == expected


def test_rounding_is_no_difference():
    """One sum in different orders, whose float32 differ; but a small part of a large reward is a difference."""
    same = torch.tensor([[0.1, 0.1, 0.5], [0.5, 0.1, 0.1], [0.1, 0.5, 0.1]])
    assert same.nansum(1).unique().numel() > 1
    assert not informative(same, torch.ones(3), 3)
    assert not informative(torch.full((6, 1), 0.9), torch.ones(1), 6)
    assert informative(torch.tensor([[1000.0], [1000.01]]), torch.ones(1), 2)


# The trainer


OPTIONS = {
    "embedded": {},
    "policy": {"rollout_precision": None},
    "one_pass": {"is_correction": "decoupled"},
    "batch": {"scale_rewards": "batch"},
    "none": {"scale_rewards": "none", "is_correction": "ais", "loss_type": "dapo"},
    "apart": {"multi_objective_aggregation": "normalize_then_sum"},
    "iterations": {"num_iterations": 2, "max_steps": 4},
    "generations": {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "steps_per_generation": 1},
}


@pytest.mark.parametrize(
    "options",
    rest_is_long(OPTIONS.values(), OPTIONS["embedded"], OPTIONS["generations"]),
    ids=OPTIONS,
)
def test_informative_groups_are_left_alone(tmp_path, options):
    """Bit for bit the plain run where every group is informative, and another run where half of them are not."""
    runs = {}
    for rounds in (0, 8):
        for reward in (spread, half):
            runs[rounds, reward] = trainer_of(tmp_path, reward, rounds, **{"max_steps": 2} | options)
            runs[rounds, reward].train()
    for log in (same := runs[8, spread]).state.log_history:
        added = {name: log.pop(name) for name in list(log) if name.startswith("dynamic_sampling/")}
        assert not any(added.values()) and len(added) == (5 if "reward" in log else 0)
    assert_same_run(same, runs[0, spread])
    plain, sampled = parameters(runs[0, half]), parameters(runs[8, half])
    assert any(not torch.equal(plain[name], sampled[name]) for name in plain)
    logs = [log for log in metrics(runs[8, half]) if "dynamic_sampling/rounds" in log]
    assert sum(log["dynamic_sampling/replaced_groups"] for log in logs) > 0
    assert all(log["dynamic_sampling/remaining_fraction"] == 0 for log in logs)
    assert len(logs) == 2 and "dynamic_sampling/rounds" not in metrics(runs[0, half])[0]


@pytest.mark.parametrize("options", [{}, OPTIONS["generations"]], ids=["one", "generations"])
def test_what_is_trained_on_was_sampled(tmp_path, options):
    """Completions, log-probabilities and advantages; what was thrown away is counted to the token, and all is paid."""
    record = Record(tmp_path, **options)
    engine, logps = record.trainer.vllm_generation, {}
    generate = engine.generate

    def generated(prompts, *args, **kwargs):
        output = generate(prompts, *args, **kwargs)
        logps.update({(*p, -1, *ids): lp for p, ids, lp in zip(prompts, output[1], output[2], strict=True)})
        return output

    engine.generate = generated
    record.trainer.train()
    logs, paid = [log for log in record.trainer.state.log_history if "loss" in log], 0
    per_step, tokenize = len(record.generations) // len(logs), record.trainer.processing_class
    assert sum(log["dynamic_sampling/replaced_groups"] for log in logs) > 2
    for step, log in enumerate(logs):
        generations = record.generations[step * per_step : (step + 1) * per_step]
        expected = Counter()
        for generation in generations:
            calls, trained = generation["calls"], generation["trained"]
            check_generation(calls, trained, 4)
            for prompt, ids, _, sampled in trained:
                assert sampled == pytest.approx([lp for (lp,) in logps[*tokenize(prompt)["input_ids"], -1, *ids]])
            replaced = sum(calls[0][i][0] != trained[i][0] for i in range(0, len(trained), 4))
            first = [len({r for *_, r in calls[0][i : i + 4]}) == 1 for i in range(0, len(trained), 4)]
            expected["dynamic_sampling/rounds"] += len(calls) - 1
            expected["dynamic_sampling/replaced_groups"] += replaced
            expected["dynamic_sampling/uninformative_fraction"] += sum(first) / len(first)
            expected["dynamic_sampling/wasted_tokens"] += sum(map(tokens, calls)) - tokens(trained)
            expected["completions/mean_length"] += tokens(trained) / len(trained)
            rows = [row for call in calls for row in call]
            paid += tokens(rows) + sum(len(tokenize(prompt)["input_ids"]) for prompt, *_ in rows)
        assert {name: log[name] * per_step for name in expected} == pytest.approx(dict(expected))
        assert log["num_tokens"] == paid and log["frac_reward_zero_std"] == 0


@pytest.mark.parametrize("rollout_precision", ["int4", None])
def test_rounds_end_with_the_budget(tmp_path, rollout_precision):
    """What stays without a replacement has no advantage, so nothing moves. The prompts go on, epoch after epoch."""
    options = {"rounds": 2, "n": 9, "max_steps": 2, "rollout_precision": rollout_precision}
    record = Record(tmp_path, nothing, **options)
    before, sampled = parameters(record.trainer), []
    order = PromptOrder(record.trainer)
    record.trainer.train()
    assert all(torch.equal(before[name], value) for name, value in parameters(record.trainer).items())
    for log, generation in zip(record.trainer.state.log_history, record.generations, strict=False):
        calls = generation["calls"]
        assert [row[:2] for row in calls[0]] == [row[:2] for row in generation["trained"]]
        assert [len(call) for call in calls] == [16, 16, 16]
        sampled += [prompt for call in calls for prompt, *_ in call]
        assert log["dynamic_sampling/rounds"] == 2 and log["dynamic_sampling/replaced_groups"] == 0
        assert log["dynamic_sampling/remaining_fraction"] == log["frac_reward_zero_std"] == 1
        assert log["dynamic_sampling/wasted_tokens"] == sum(map(tokens, calls[1:]))
    rows = [order[place] for place in range(24)]
    assert rows[:8] != sorted(rows[:8]) and len(set(rows[:8])) == 8
    assert sampled == [record.trainer.train_dataset[row]["prompt"] for row in rows for _ in range(4)]


@pytest.mark.parametrize(
    "options",
    rest_is_long([{}, OPTIONS["generations"], {"rollouts_in_flight": 2.5}], OPTIONS["generations"]),
    ids=["one", "generations", "in flight"],
)
def test_killed_and_resumed_equals_unbroken(tmp_path, options):
    kill = []

    def reward(trainer_state, **kwargs):
        if kill and trainer_state.global_step == 3:
            raise InterruptedError
        return half(**kwargs)

    def run(name):
        saving = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "noise_schedule": "exponential"}
        return trainer_of(tmp_path / name, reward, noise_stages=3, **saving | options)

    whole = run("whole")
    whole.train()
    broken = run("broken")
    kill.append(True)
    with pytest.raises(InterruptedError):
        broken.train()
    kill.clear()
    resumed = run("broken")
    resumed.train(resume_from_checkpoint=True)
    for trainer in (whole, resumed):
        del trainer.state.log_history[-1]["train_loss"]  # averaged over the steps of one process
    assert_same_run(resumed, whole)
    assert all(log["dynamic_sampling/replaced_groups"] > 0 for log in whole.state.log_history[2:4])


class Lots:
    """An engine that draws each token by lot, and ends one completion in six with each."""

    def __init__(self):
        self.lots, self.carried, self.calls = random.Random(0), 0, 0

    def sync(self):
        pass

    def sample(self, requests, enough=None):
        self.calls += 1
        self.carried += sum(bool(request.sampled) for request in requests)
        drawn, ended = [[] for _ in requests], [False] * len(requests)
        while not all(ended) and not (enough and enough(ended)):
            for i, request in enumerate(requests):
                if not ended[i]:
                    ends = self.lots.random() < 1 / 6 or len(request.sampled) + len(drawn[i]) == 23
                    drawn[i].append(257 if ends else self.lots.randrange(65, 91))
                    ended[i] = ends
        return Samples(drawn, [[-1.0] * len(ids) for ids in drawn], ended)


class DrawsLots(QuantGRPOTrainer):
    def build_engine(self, *args, **settings):
        return Lots()


@pytest.mark.parametrize("rounds", [8, 1])
def test_groups_in_flight_replace_those_without_a_signal(tmp_path, rounds):
    """Finished groups that wait are taken before anything is sampled. Each prompt is sampled once, in its order."""
    given = {"num_generations": 2, "per_device_train_batch_size": 8, "max_completion_length": 24, "max_steps": 10}
    record = Record(tmp_path, rounds=rounds, kind=DrawsLots, rollouts_in_flight=2.0, rollout_precision="bf16", **given)
    trainer, order, rows, taken = record.trainer, PromptOrder(record.trainer), [], 0
    trainer.train()
    logs, engine = [log for log in metrics(trainer) if "loss" in log], trainer.vllm_generation.engine
    for log, generation in zip(logs, record.generations, strict=True):
        calls = generation["calls"]
        check_generation(calls, generation["trained"], 2, once=False)
        taken += len(calls) - 1 - log["dynamic_sampling/rounds"]
        rows += [prompt for call in calls for prompt, *_ in call[::2]]
        assert log["dynamic_sampling/rounds"] <= rounds
        wasted = sum(map(tokens, calls)) - tokens(generation["trained"])
        assert log["dynamic_sampling/wasted_tokens"] == wasted
        assert log["dynamic_sampling/remaining_fraction"] == log["frac_reward_zero_std"]
    assert engine.carried and taken and sum(log["dynamic_sampling/replaced_groups"] for log in logs) > 2
    assert any(log["frac_reward_zero_std"] for log in logs) == (rounds == 1)
    assert engine.calls <= len(logs) + sum(log["dynamic_sampling/rounds"] for log in logs)
    started, prompts = trainer.pool.started, trainer.train_dataset["prompt"]
    assert not trainer.pool.groups and len(rows) == started  # nothing is left, and all were scored
    assert Counter(rows) == Counter(prompts[order[place]] for place in range(started))


@pytest.mark.parametrize("options", [{"rounds": 0, "rollouts_in_flight": 2.0}, {"rounds": 1}], ids=["flight", "signal"])
def test_an_error_of_the_engine_is_explained(tmp_path, options):
    options = options | {"save_strategy": "steps", "save_steps": 2, "max_steps": 6, "max_completion_length": 24}
    trainer = trainer_of(tmp_path, kind=DrawsLots, rollout_precision="bf16", **options)
    engine, sample = trainer.vllm_generation.engine, trainer.vllm_generation.engine.sample

    def failing(requests, enough=None):
        if trainer.state.global_step == 3:
            raise OSError("The engine is gone")
        return sample(requests, enough)

    engine.sample = failing
    with pytest.raises(RuntimeError, match=r"rollout engine failed at step 3.*checkpoint-2.*The engine is gone"):
        trainer.train()


def test_what_an_earlier_round_sampled_does_not_count_as_sampled_elsewhere(tmp_path, caplog):
    trainer_of(tmp_path, max_steps=1).train()
    assert "was not sampled from the rollout engine" not in caplog.text


def test_an_evaluation_samples_once(tmp_path):
    def constant(completions, trainer_state, **kwargs):
        calls.append(len(completions))
        return nothing(completions)

    calls = []
    evaluating = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4, "num_generations_eval": 2}
    trainer = trainer_of(tmp_path, constant, rounds=1, max_steps=1, **evaluating)
    trainer.train()
    assert calls == [16, 16, 4]
    logs = trainer.state.log_history
    (evaluated,) = [log for log in logs if "eval_reward" in log]
    assert not [name for name in evaluated if "dynamic_sampling" in name] and evaluated["eval_reward"] == 0.5
    assert logs[0]["dynamic_sampling/remaining_fraction"] == 1


def test_every_kind_of_reward(tmp_path):
    """A model's, an asynchronous one, DAPO's for overlong completions; what they log is of the final batch."""

    async def asynchronous(prompts, completions, log_extra, log_metric, **kwargs):
        log_extra("echo", [f"{p}|{c}" for p, c in zip(prompts, completions, strict=True)])
        log_metric("calls", 1.0)
        return [None if p.strip() == "99-1=" else r for p, r in zip(prompts, half(prompts, completions), strict=True)]

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 2, "vocab_size": VOCAB_SIZE, "num_labels": 1, "pad_token_id": 256}
    judge = Qwen3ForSequenceClassification(Qwen3Config(**sizes))
    rewards = [judge, asynchronous, get_soft_overlong_punishment(6, 2)]
    options = {"reward_processing_classes": [tiny_tokenizer(), None, None], "reward_weights": [0.0, 1.0, 0.0]}
    trainer = trainer_of(tmp_path, rewards, rounds=6, max_steps=1, **options)
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["dynamic_sampling/replaced_groups"] > 0 == log["dynamic_sampling/remaining_fraction"]
    assert log["calls"] == 1 and log["rewards/soft_overlong_punishment_reward/mean"] < 0
    texts = zip(trainer._logs["prompt"], trainer._logs["completion"], strict=True)
    assert [*trainer._logs["extra"]["echo"]] == [f"{prompt}|{completion}" for prompt, completion in texts]
    assert not {prompt.strip() for prompt in trainer._logs["prompt"]} & {*DULL, "99-1="}
    assert not trainer._pending_extra_logs and not trainer._pending_metrics


# Refusals


@pytest.mark.parametrize("name", ["tools", "rollout_func", "environment_factory"])
def test_turns_are_refused(tmp_path, name):
    args = config(QuantGRPOConfig, tmp_path)
    args.dynamic_sampling_rounds = 2
    check_dynamic_sampling(args, tools=[])
    with pytest.raises(ValueError, match=f"dynamic_sampling_rounds`=2 .*`{name}`"):
        check_dynamic_sampling(args, **{name: [print]})
    args.dynamic_sampling_rounds = 0
    check_dynamic_sampling(args, **{name: [print]})


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"dynamic_sampling_rounds": 2}, "^`dynamic_sampling_rounds`=2 reads"),
        ({"rollouts_in_flight": 2.0}, "^`rollouts_in_flight`=2.0 reads"),
        ({"dynamic_sampling_rounds": 2, "rollouts_in_flight": 2.0}, "=2 and `rollouts_in_flight`=2.0 reads"),
    ],
    ids=str,
)
def test_streams_are_refused(tmp_path, options, named):
    args = config(QuantGRPOConfig, tmp_path, rollout_precision="int8", **options)
    check_reads_ahead(args, dataset(8))
    with pytest.raises(ValueError, match=named):
        check_reads_ahead(args, dataset(8).to_iterable_dataset())
    check_reads_ahead(config(QuantGRPOConfig, tmp_path), dataset(8).to_iterable_dataset())


def test_trl_has_what_this_is_built_on(tmp_path):
    """The parts of TRL that are called or stood in for."""
    rewards, turn = GRPOTrainer._calculate_rewards, GRPOTrainer._generate_single_turn
    assert [*inspect.signature(rewards).parameters][1:] == ["inputs", "prompts", "completions", "completion_ids_list"]
    assert "_generate_single_turn" in GRPOTrainer._generate.__code__.co_names and callable(turn)
    trainer = trainer_of(tmp_path, rounds=0)
    prompt_ids, completion_ids, tool_mask, completions, logps, extra, images, _ = trainer._generate(["1+1="] * 4)
    assert tool_mask is None and images is None and not extra
    assert [len(ids) for ids in completion_ids] == [len(row) for row in logps] and prompt_ids[0] == [16, 10, 16, 28]
    assert tiny_tokenizer().batch_decode(completion_ids, skip_special_tokens=True) == completions


# Engines and ranks


@pytest.mark.vllm
def test_vllm(tmp_path):
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from vllm_engines import SMALL, keep

    engine = {"vllm_engine_kwargs": SMALL, "vllm_max_model_length": 512, "rollout_precision": "bf16"}
    model = save_tiny(tmp_path / "model", dtype=torch.bfloat16)
    record = Record(tmp_path, model=model, use_vllm=True, vllm_mode="colocate", **engine)
    keep(record.trainer)
    record.trainer.train()
    logs = [log for log in record.trainer.state.log_history if "loss" in log]
    for log, generation in zip(logs, record.generations, strict=True):
        check_generation(**generation, num_generations=4)
        wasted = sum(map(tokens, generation["calls"])) - tokens(generation["trained"])
        assert log["dynamic_sampling/wasted_tokens"] == wasted and log["frac_reward_zero_std"] == 0
    assert sum(log["dynamic_sampling/replaced_groups"] for log in logs) > 0


# Completions of a group, and of a rank: a group may lie on two ranks
CASES = {"across": (4, 6, {}), "uneven": (3, 6, {}), "flight": (2, 4, {"rollouts_in_flight": 2.0})}


def unrepeated(call: list[tuple], num_generations: int) -> list[tuple]:
    """A call of both ranks without the groups that were scored again, so that each rank scores as many completions."""
    groups = [tuple(call[i : i + num_generations]) for i in range(0, len(call), num_generations)]
    return [row for group in dict.fromkeys(groups) for row in group]


@pytest.mark.long
@pytest.mark.slow
def test_two_ranks(tmp_path, monkeypatch):
    """Both score as many completions in every round, and end with one batch between them."""
    from ranks import on_two_ranks, results

    monkeypatch.setattr("ranks.__file__", __file__)
    save_tiny(tmp_path / "model", seed=3)
    printed = on_two_ranks("cpu", tmp_path, *CASES)
    for case, (num_generations, _, options) in CASES.items():
        ranks = results(tmp_path, case, printed)
        assert ranks[0]["logs"] == ranks[1]["logs"] and ranks[0]["weights"] == ranks[1]["weights"]
        logs = ranks[0]["logs"]
        assert sum(log["dynamic_sampling/replaced_groups"] for log in logs) > 2
        travelled = 0
        for log, *both in zip(logs, *(rank["generations"] for rank in ranks), strict=True):
            assert [len(call) for call in both[0]["calls"]] == [len(call) for call in both[1]["calls"]]
            for one in both:  # JSON has no tuples
                one["calls"] = [[(prompt, tuple(ids), r) for prompt, ids, r in call] for call in one["calls"]]
                one["trained"] = [(prompt, tuple(ids), *rest) for prompt, ids, *rest in one["trained"]]
                own = {row[:2] for call in one["calls"] for row in call}
                travelled += sum(row[:2] not in own for row in one["trained"])
            calls = [
                unrepeated(left + right, num_generations)
                for left, right in zip(*(one["calls"] for one in both), strict=True)
            ]
            trained = both[0]["trained"] + both[1]["trained"]
            check_generation(calls, trained, num_generations, once=not options)
            assert log["dynamic_sampling/wasted_tokens"] == sum(map(tokens, calls)) - tokens(trained)
            assert log["frac_reward_zero_std"] == log["dynamic_sampling/remaining_fraction"]
        assert travelled


def run_rank(path: Path, case: str) -> None:
    num_generations, size, options = CASES[case]
    sizes = {"num_generations": num_generations, "per_device_train_batch_size": size} | options
    torch.manual_seed(0)
    record = Record(path / case, model=tiny_model(seed=3), max_steps=4, **sizes)
    record.trainer.train()
    weights = {name: value.double().sum().item() for name, value in parameters(record.trainer).items()}
    names = ("dynamic_sampling/", "num_tokens", "reward", "frac_reward_zero_std")
    logs = [{k: v for k, v in log.items() if k.startswith(names)} for log in metrics(record.trainer) if "loss" in log]
    found = {"generations": record.generations, "logs": logs, "weights": weights}
    (path / case / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    for name in sys.argv[2:]:
        run_rank(Path(sys.argv[1]), name)
