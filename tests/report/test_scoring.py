"""`eval` calls a reward as the trainer does: sync or async, within a time limit, and it takes only finite numbers."""

import asyncio
import math
import sys
import time

import numpy as np
import pytest
import torch
from transformers import TrainerState

from trl_quant.report.scoring import Scorer


PROMPTS, TEXTS, IDS = ["1+1=", "2+2=", "3+3="], ["2", "four", "6"], [[50], [102, 111], [54]]
COLUMNS = {"prompt": PROMPTS, "answer": ["2", "4", "6"]}


def right(completions, prompts, completion_ids, answer, **kwargs):
    assert prompts == PROMPTS and completion_ids == IDS and {*kwargs} == {"trainer_state", "log_extra", "log_metric"}
    return [float(text == wanted) for text, wanted in zip(completions, answer, strict=True)]


async def right_later(completions, answer, **kwargs):
    texts = [messages[0]["content"] if isinstance(messages, list) else messages for messages in completions]
    await asyncio.sleep(0.01)
    return [text == wanted for text, wanted in zip(texts, answer, strict=True)]


def test_a_function_and_a_coroutine_score_the_same():
    columns = dict(COLUMNS)
    assert Scorer(right, 5.0)(TEXTS, IDS, columns) == Scorer(right_later, 5.0)(TEXTS, IDS, columns) == [1.0, 0.0, 1.0]
    assert columns == COLUMNS


def test_a_conversation_is_answered_by_a_message():
    columns = {"prompt": [[{"role": "user", "content": prompt}] for prompt in PROMPTS], "answer": ["2", "4", "6"]}
    scorer = Scorer(right_later, 5.0)
    assert scorer(TEXTS, IDS, columns) == scorer(TEXTS, IDS, columns) == [1.0, 0.0, 1.0]


def staged(prompts, completions, completion_ids, answer, trainer_state, log_extra, log_metric):
    """With all that TRL gives to a reward, and nothing else."""
    log_extra("answer", answer)
    log_metric("right", 1.0)
    return [float(trainer_state.global_step)] * len(completions)


async def staged_later(**kwargs):
    return staged(**kwargs)


def test_a_reward_of_the_asynchronous_trainer_gets_no_more_than_there():
    def exact(prompts, completions, completion_ids, answer):
        return [float(text == wanted) for text, wanted in zip(completions, answer, strict=True)]

    assert Scorer(exact, 5.0)(TEXTS, IDS, COLUMNS) == [1.0, 0.0, 1.0]


@pytest.mark.parametrize("reward", [staged, staged_later])
def test_a_reward_gets_what_it_gets_in_training(reward):
    assert Scorer(reward, 5.0)(TEXTS, IDS, COLUMNS) == [0.0] * 3
    assert Scorer(reward, 5.0, TrainerState(global_step=7))(TEXTS, IDS, COLUMNS) == [7.0] * 3


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        ([1.0, math.inf, 0.0], "returned inf for row 1, which is not finite: prompt '2+2=', completion 'four'"),
        ([1.0, 1e39, 0.0], "returned 1e+39 for row 1, which is not finite"),
        ([1.0, "0.5", 0.0], "returned '0.5' for row 1, which is not a number"),
        ([1.0, torch.ones(2), 0.0], "for row 1, which is not a number"),
        ([1.0, 0.0], "returned 2 rewards. It must return a list of 3 numbers, one for each completion."),
        (1.0, "returned 1.0 (float). It must return a list of 3 numbers"),
        ("101", "returned '101' (str). It must return a list"),
        (None, "returned None (NoneType)"),
        ([1.0, None, 0.0], "gives None for prompt '2+2=', which cannot be counted"),
        ([1.0, np.nan, 0.0], "gives nan for prompt '2+2=', which cannot be counted"),
    ],
    ids=str,
)
@pytest.mark.parametrize("is_async", [False, True])
def test_what_cannot_be_counted_is_refused(returned, says, is_async):
    def faulty(**kwargs):
        return returned

    async def faulty_later(**kwargs):
        return returned

    reward = faulty_later if is_async else faulty
    with pytest.raises(ValueError) as error:
        Scorer(reward, 5.0)(TEXTS, IDS, COLUMNS)
    text = str(error.value)
    assert text.startswith("The reward function '<test_scoring.") or reward.__qualname__ in text
    assert says in text


def hangs(**kwargs):
    time.sleep(60)


async def hangs_later(**kwargs):
    await asyncio.Event().wait()


def ends(**kwargs):
    sys.exit(3)


async def ends_later(**kwargs):
    sys.exit(3)


@pytest.mark.parametrize("reward", [hangs, hangs_later])
def test_a_reward_that_hangs_is_ended(reward):
    said = f"'{__name__}.{reward.__name__}' did not return within `reward_timeout`=0.2 seconds"
    with pytest.raises(TimeoutError, match=said):
        Scorer(reward, 0.2)(TEXTS, IDS, COLUMNS)


@pytest.mark.parametrize("reward", [ends, ends_later])
def test_a_reward_cannot_end_the_process(reward):
    with pytest.raises(RuntimeError, match=rf"'{__name__}.{reward.__name__}' ended the process: .*SystemExit\(3\)"):
        Scorer(reward, 5.0)(TEXTS, IDS, COLUMNS)
