"""Scores the answers of an evaluation with a reward, called as TRL calls it and guarded as it is in training."""

import asyncio
import inspect
import math
from collections.abc import Callable

from transformers import TrainerState

from ..rollout.limits import CoroutineThread
from ..runs.reward_calls import checked_rewards
from ..runs.user_calls import guarded
from ..tasks.named_rewards import name_of


class Scorer:
    """
    Calls a reward, synchronous or asynchronous, on one batch of answers after another.

    Args:
        reward (`Callable`): The reward function, in TRL's signature.
        seconds (`float`): What a call may take at most.
        state ([`~transformers.TrainerState`], *optional*): The state of the trainer whose model answers.
    """

    def __init__(self, reward: Callable, seconds: float, state: TrainerState | None = None):
        name = name_of(reward)
        self._at = lambda message: f"The reward function {name!r} {message}"
        given = {"trainer_state": state or TrainerState(), "log_extra": _unlogged, "log_metric": _unlogged}
        self._given = {key: value for key, value in given.items() if _takes(reward, key)}
        self._reward = guarded(reward, seconds, self._at, CoroutineThread(), self._scores)

    def __call__(self, texts: list[str], ids: list[list[int]], columns: dict[str, list]) -> list[float]:
        """
        Returns the score of each answer.

        Args:
            texts (`list[str]`): The answers.
            ids (`list[list[int]]`): Their tokens.
            columns (`dict[str, list]`): The questions: `prompt`, and what the reward compares an answer with. Where the
                prompts are conversations, so are the answers that the reward gets.

        Raises:
            ValueError: The reward returned no finite number for an answer.
            RuntimeError: It tried to end the process.
            TimeoutError: It took longer than the limit.
        """
        others = {name: values for name, values in columns.items() if name != "prompt"}
        prompts = columns["prompt"]
        if isinstance(prompts[0], list):
            texts = [[{"role": "assistant", "content": text}] for text in texts]
        scores = self._reward(prompts=prompts, completions=texts, completion_ids=ids, **self._given, **others)
        return asyncio.run(_awaited(scores)) if inspect.isawaitable(scores) else scores

    def _scores(self, returned, arguments: dict) -> list[float]:
        prompts = arguments["prompts"]
        try:
            scores = checked_rewards(returned, prompts, arguments["completions"])
        except ValueError as error:
            raise ValueError(self._at(str(error))) from error
        for prompt, score in zip(prompts, scores, strict=True):
            if score is None or math.isnan(score):
                raise ValueError(self._at(f"gives {score} for prompt {prompt!r}, which cannot be counted."))
        return scores


def _takes(reward: Callable, name: str) -> bool:
    """Whether a reward takes an argument by name. Those of the asynchronous trainer need not take all of TRL's."""
    try:
        parameters = inspect.signature(reward).parameters
    except ValueError:  # a builtin without a signature
        return True
    return name in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values())


def _unlogged(*args, **kwargs) -> None:
    """Takes what a reward logs in training. An evaluation keeps only the scores."""


async def _awaited(scores):
    return await scores
