"""Reward functions that hang, on one process and on one of two ranks, and rewards that are no finite numbers."""

import asyncio
import json
import logging
import math
import sys
import threading
import time
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from long_tests import rest_is_long
from ranks import on_two_ranks
from tiny import save_tiny
from training import assert_same_run, config, dataset, lora, make, metrics, parameters, spread

from trl_quant import QuantGRPOConfig, QuantGRPOTrainer


def run(tmp_path, reward, trained=True, **options):
    settings = {"rollout_precision": "int8", "max_steps": 3, "reward_timeout": 0.5} | options
    trainer = make(QuantGRPOTrainer, config(QuantGRPOConfig, tmp_path / "out", **settings), reward_funcs=reward)
    if trained:
        trainer.train()
    return trainer


def returning(change):
    """`spread` with something else in place of the third completion's reward, and the name `faulty`."""

    def faulty(completions, **kwargs):
        rewards = spread(completions)
        rewards[2] = change
        return rewards

    return faulty


# What hangs


def blocks_on_a_lock(completions, **kwargs):
    (lock := threading.Lock()).acquire()
    lock.acquire()


def hides_its_errors(completions, **kwargs):
    while True:
        try:
            time.sleep(60)
        except Exception:
            continue


def hangs_while_it_is_read(completions, **kwargs):
    yield 1.0
    time.sleep(60)


async def never_finishes(completions, **kwargs):
    await asyncio.Event().wait()


async def refuses_to_be_cancelled(completions, **kwargs):
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            continue


async def blocks_the_loop(completions, **kwargs):
    time.sleep(5)  # without `await`: nothing else of the loop runs either


class Judge:
    async def __call__(self, completions, **kwargs):
        await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("reward", "name"),
    [
        (blocks_on_a_lock, "blocks_on_a_lock"),
        (hides_its_errors, "hides_its_errors"),
        (hangs_while_it_is_read, "hangs_while_it_is_read"),
        (never_finishes, "never_finishes"),
        (refuses_to_be_cancelled, "refuses_to_be_cancelled"),
        (blocks_the_loop, "blocks_the_loop"),
        (Judge(), "Judge"),
    ],
)
def test_a_reward_that_hangs_ends_the_run(tmp_path, reward, name):
    with pytest.raises(TimeoutError, match=f"reward function '{name}', at step 0, did not return within") as error:
        run(tmp_path, [spread, reward])
    assert "`reward_timeout`=0.5 seconds" in str(error.value) and "start again" in str(error.value)


def test_a_run_goes_on_from_where_a_reward_hung(tmp_path):
    """The error names the checkpoint, and the resumed run is the one that nothing interrupted."""
    hangs = {"at": 2}

    def reward(completions, trainer_state, **kwargs):
        if trainer_state.global_step == hangs["at"]:
            time.sleep(60)
        return spread(completions)

    options = {"save_strategy": "steps", "save_steps": 1}
    with pytest.raises(TimeoutError, match=r"'reward', at step 2, .* last whole checkpoint is .*checkpoint-2"):
        run(tmp_path, reward, **options)
    hangs["at"] = None
    resumed = run(tmp_path, reward, trained=False, **options)
    resumed.train(resume_from_checkpoint=True)
    whole = run(tmp_path / "whole", reward, **options)
    for name, param in parameters(whole).items():
        assert torch.equal(param, parameters(resumed)[name])
    mine, theirs = ([log for log in metrics(trainer) if "train_loss" not in log] for trainer in (resumed, whole))
    assert mine == theirs and len(mine) == 3


def test_no_limit(tmp_path):
    def slow(completions, **kwargs):
        time.sleep(0.7)
        return spread(completions)

    with pytest.raises(TimeoutError):
        run(tmp_path, slow, max_steps=1)
    assert math.isfinite(metrics(run(tmp_path, slow, max_steps=1, reward_timeout=None))[0]["reward"])


@pytest.mark.parametrize("name", ["reward_timeout", "vllm_request_timeout"])
@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, "60", True, 1e12])
def test_limits_are_checked(tmp_path, name, value):
    with pytest.raises(ValueError, match=f"`{name}`="):
        config(QuantGRPOConfig, tmp_path, **{name: value})


@pytest.mark.long
@pytest.mark.slow
def test_a_reward_that_hangs_on_one_rank(tmp_path):
    save_tiny(tmp_path / "model", "qwen2")
    on_two_ranks("ddp", tmp_path, "hanging-int8-full")
    stuck, other = (json.loads((tmp_path / f"hanging-int8-full/rank-{rank}.json").read_text()) for rank in (0, 1))
    assert "TimeoutError: The reward function 'hangs_at_two', at step 2, did not return within" in stuck["error"]
    assert "`reward_timeout`=3 seconds. The last whole checkpoint is" in stuck["error"]
    assert "Rank 1 " in other["error"] and "lost another rank at step 2" in other["error"]
    printed = on_two_ranks("ddp", tmp_path, "resuming-int8-full")
    files = [tmp_path / f"resuming-int8-full/rank-{rank}.json" for rank in (0, 1)]
    assert all(file.is_file() for file in files), printed[-4000:]
    for found in (json.loads(file.read_text()) for file in files):
        assert found == {"error": None, "steps": [1, 2, 3, 4]}


# What is returned


@pytest.mark.parametrize("value", [math.inf, -math.inf, 1e39, 10**400, np.float64("inf"), torch.tensor(math.inf)])
@pytest.mark.parametrize("correction", rest_is_long(["tis", "ais"]))
def test_an_infinite_reward_is_refused(tmp_path, value, correction):
    """Before any weight is touched; 1e39 is infinite in float32."""
    trainer = run(tmp_path, returning(value), trained=False, is_correction=correction)
    before = {name: param.detach().clone() for name, param in trainer.model.named_parameters()}
    with pytest.raises(
        ValueError, match=r"'faulty', at step 0, returned .* for row 2, which is not finite: prompt "
    ) as e:
        trainer.train()
    assert "completion '" in str(e.value) and "start again" in str(e.value)
    assert all(torch.equal(before[name], param) for name, param in trainer.model.named_parameters())


@pytest.mark.parametrize("value", ["1.0", [1.0], {}, object(), 1j, torch.ones(2), np.ones(2)])
def test_what_is_no_number_is_refused(tmp_path, value):
    with pytest.raises(ValueError, match=r"'faulty', at step 0, returned .* for row 2, which is not a number: prompt "):
        run(tmp_path, returning(value))


async def later():
    return [1.0]


@pytest.mark.parametrize(
    "returned",
    [None, 1.0, "12345678", dict.fromkeys(range(8), 1.0), set(range(8)), torch.tensor(1.0), np.array(1.0)],
    ids=["None", "float", "str", "dict", "set", "tensor", "array"],
)
def test_what_is_no_list_is_refused(tmp_path, returned):
    def faulty(completions, **kwargs):
        return returned

    with pytest.raises(ValueError, match=r"'faulty', at step 0, returned .* must return a list of 8 numbers"):
        run(tmp_path, faulty)


def test_a_coroutine_of_a_function_that_is_none(tmp_path):
    with pytest.raises(ValueError, match=r"'<lambda>', at step 0, returned <coroutine .* \(coroutine\)"):
        run(tmp_path, lambda completions, **kwargs: later())


def test_too_few_rewards(tmp_path):
    with pytest.raises(
        ValueError, match=r"'<lambda>', at step 0, returned 3 rewards\. It must return a list of 8 numbers"
    ):
        run(tmp_path, lambda completions, **kwargs: [1.0, 2.0, 3.0])


def column(rewards):
    return torch.tensor(rewards)[:, None]


def double(rewards):
    return torch.tensor(rewards, dtype=torch.float64)


@pytest.mark.parametrize(
    "kind", rest_is_long([list, tuple, iter, np.array, torch.tensor, double, column], list, iter, column)
)
def test_numbers_of_any_kind_are_rewards(tmp_path, kind):
    given = run(tmp_path, lambda completions, **kwargs: kind(spread(completions)), max_steps=2)
    assert_same_run(given, run(tmp_path, lambda completions, **kwargs: spread(completions), max_steps=2))


def test_single_numbers_of_any_kind(tmp_path):
    kinds = [True, np.float32(0.5), Decimal("0.25"), Fraction(1, 8), torch.tensor(1.5), np.bool_(True), 0, -3]

    def reward(completions, **kwargs):
        return kinds

    trainer = run(tmp_path, reward, max_steps=1)
    assert metrics(trainer)[0]["reward"] == pytest.approx(sum(map(float, kinds)) / len(kinds))


def test_nan_is_none_and_told_once(tmp_path, caplog):
    """As TRL has it: the other function alone scores that completion."""
    with caplog.at_level(logging.WARNING):
        given = run(tmp_path / "nan", [returning(math.nan), spread], max_steps=2)
    assert caplog.text.count("'faulty', at step 0, returned NaN for row 2") == 1 == caplog.text.count("returned NaN")
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert_same_run(given, run(tmp_path / "none", [returning(None), spread], max_steps=2))
    assert "returned NaN" not in caplog.text


@pytest.mark.parametrize("code", [0, 1])
def test_a_reward_that_exits(tmp_path, code):
    """A run that its reward ended with status 0 would look done."""

    def exits(completions, **kwargs):
        sys.exit(code)

    async def exits_later(completions, **kwargs):
        sys.exit(code)

    for reward in (exits, exits_later):
        with pytest.raises(RuntimeError, match=rf"'{reward.__name__}', .* it raised SystemExit\({code}\)"):
            run(tmp_path, reward)


def test_ctrl_c_in_a_reward_is_the_users(tmp_path):
    def interrupted(completions, **kwargs):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, interrupted)


class Model(torch.nn.Module):
    """A reward model that is wrong about one completion."""

    def __init__(self, value):
        super().__init__()
        self.value, self.config = value, SimpleNamespace(_name_or_path="my/judge")

    def forward(self, input_ids, **kwargs):
        logits = torch.arange(float(len(input_ids)))[:, None]
        logits[5] = self.value
        return SimpleNamespace(logits=logits)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_reward_model_that_is_not_finite(tmp_path, value):
    from tiny import tiny_tokenizer

    args = config(QuantGRPOConfig, tmp_path, rollout_precision="int8", max_steps=1)
    trainer = make(QuantGRPOTrainer, args, reward_funcs=[spread], reward_processing_classes=[tiny_tokenizer()])
    trainer.reward_funcs, trainer.reward_func_names = [Model(value)], ["judge"]
    with pytest.raises(ValueError, match=rf"reward model 'judge', at step 0, returned {value} for row 5 of .* 8"):
        trainer.train()


def test_without_a_rollout_precision_too(tmp_path):
    for hangs in (blocks_on_a_lock, never_finishes):
        with pytest.raises(TimeoutError, match="did not return within"):
            run(tmp_path, hangs, rollout_precision=None)
    with pytest.raises(ValueError, match="which is not finite"):
        run(tmp_path, returning(math.inf), rollout_precision=None)


def test_with_dynamic_sampling_and_an_adapter(tmp_path):
    args = config(QuantGRPOConfig, tmp_path, rollout_precision="int8", dynamic_sampling_rounds=1, reward_timeout=0.5)
    options = {"train_dataset": dataset(32), "peft_config": lora()}
    with pytest.raises(TimeoutError, match="'hides_its_errors'"):
        make(QuantGRPOTrainer, args, reward_funcs=hides_its_errors, **options).train()
