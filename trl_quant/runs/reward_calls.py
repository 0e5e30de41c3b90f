"""Checks what reward functions return: one finite number for each completion.

TRL does not check their results, and an infinite reward makes every weight NaN. So each function is wrapped while TRL's
`_calculate_rewards` runs, also for its time (see [`~runs.user_calls`]). A reward of `None` means for TRL that the
function does not apply, and that the others score the completion. TRL takes NaN as `None`, and a warning says so once
for each function.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..trl_seams import exchanged
from .user_calls import UserCalls


logger = logging.getLogger(__name__)

LARGEST_REWARD = torch.finfo(torch.float32).max  # TRL holds rewards in float32, where a larger one becomes infinite
# TRL's rewards that are never above 0
PENALTIES = ("soft_overlong_punishment_reward", "repetition_penalty_reward")
SHOWN = 80  # characters of a prompt or a completion that a message shows


class RewardCalls:
    """
    The calls of a trainer's reward functions.

    Args:
        trainer: The trainer.
        calls ([`~runs.user_calls.UserCalls`]): Guards the calls.

    Attributes:
        is_first (`bool`): Whether no generation was scored yet.
    """

    def __init__(self, trainer, calls: UserCalls):
        self.trainer, self.calls = trainer, calls
        self.is_first = True

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Context in which the trainer's functions are wrapped. Reward models stay as they are."""
        trainer = self.trainer
        functions = [
            function if isinstance(function, nn.Module) else self._wrapped(name, function)
            for name, function in zip(trainer.reward_func_names, trainer.reward_funcs, strict=True)
        ]
        with exchanged(trainer, reward_funcs=functions):
            yield

    def _wrapped(self, name: str, function: Callable) -> Callable:
        called = f"The reward function {name!r}"

        def rewards(returned, arguments: dict) -> list[float | None]:
            return rewards_of(self.calls, called, returned, arguments["prompts"], arguments["completions"])

        return self.calls.limited(function, called, rewards)

    def check_gathered(self, rewards: Tensor) -> None:
        """
        Raises `ValueError`, on every rank, if a reward model returned a reward that is not finite.

        Args:
            rewards (`torch.Tensor` of shape `(completions of all ranks, reward functions)`): As TRL gathers them.
        """
        models = torch.tensor([isinstance(function, nn.Module) for function in self.trainer.reward_funcs])
        wrong = ~rewards.isfinite() & models.to(rewards.device)
        if wrong.any():
            row, column = wrong.nonzero()[0].tolist()
            raise ValueError(
                self.calls.at(
                    f"The reward model {self.trainer.reward_func_names[column]!r}",
                    f"returned {rewards[row, column].item()} for row {row} of all ranks' {len(rewards)}. A reward must "
                    "be finite.",
                )
            )

    def tell_zeros(self, rewards: Tensor, completions: list) -> None:
        """
        Warns as [`tell_zeros`], after the first generation.

        Args:
            rewards (`torch.Tensor` of shape `(completions of all ranks, reward functions)`): As TRL gathers them.
            completions (`list`): The completions of this rank.
        """
        if self.is_first and self.trainer.accelerator.is_main_process:
            self.is_first = False
            tell_zeros(self.trainer.reward_func_names, rewards.t(), completions)


def tell_zeros(names: list[str], rewards: Tensor, completions: list) -> None:
    """
    Warns of each function that gave 0 to all completions of the first generation. It may look for something that no
    completion of the run can have.

    Args:
        names (`list[str]`): The functions' names.
        rewards (`torch.Tensor` of shape `(reward functions, completions)`): NaN where a function does not apply.
        completions (`list`): Some of the completions.
    """
    for name, given in zip(names, rewards, strict=True):
        given = given[given.isfinite()]
        if len(given) and not given.any() and name not in PENALTIES:
            logger.warning(
                "The reward function %r gave 0 to each of the %d completions of the first generation. If it can give "
                "nothing else, nothing is learned from it: compare what it looks for with a completion, such as %s. A "
                "tag that the chat template opens at the end of the prompt, and a special token, are not in the text.",
                name,
                len(given),
                _short(completions[0]),
            )


def rewards_of(calls: UserCalls, called: str, returned, prompts: list, completions: list) -> list[float | None]:
    """
    Returns the [`checked_rewards`] of a function that messages call `called`, and warns once of NaN. Its error says at
    which step the function was called.
    """
    try:
        rewards = checked_rewards(returned, prompts, completions)
    except ValueError as error:
        raise ValueError(calls.at(called, str(error))) from error
    unscored = [row for row, reward in enumerate(rewards) if reward is not None and math.isnan(reward)]
    if unscored and called not in calls.warned:
        calls.warned.add(called)
        logger.warning(
            "%s returned NaN for row %d. TRL takes NaN as None: the function does not apply, and only the others "
            "score the completion %s. If you mean that, return None. This warning comes once.",
            calls.now(called),
            unscored[0],
            _short(completions[unscored[0]]),
        )
    return rewards


def checked_rewards(returned, prompts: list, completions: list) -> list[float | None]:
    """
    Returns what a reward function returned as a list of floats, NaN and `None` included.

    Args:
        returned: What the function returned.
        prompts, completions (`list`): What it was given, one for each reward.

    Raises:
        ValueError: It is no list of one number, finite in float32, for each completion. The text goes on after the
            function's name.
    """
    rewards = _listed(returned)
    if rewards is None or len(rewards) != len(completions):
        what = f"{_short(returned)} ({type(returned).__name__})" if rewards is None else f"{len(rewards)} rewards"
        raise ValueError(
            f"returned {what}. It must return a list of {len(completions)} numbers, one for each completion."
        )
    return [_reward(*row) for row in zip(range(len(rewards)), rewards, prompts, completions, strict=True)]


def _reward(row: int, reward, prompt, completion) -> float | None:
    if reward is None:
        return None
    number = _number(reward)
    if number is None or abs(number) > LARGEST_REWARD:
        wrong = "not a number" if number is None else "not finite"
        raise ValueError(
            f"returned {_short(reward)} for row {row}, which is {wrong}: prompt {_short(prompt)}, completion "
            f"{_short(completion)}. A reward is a finite number, or None where the function does not apply."
        )
    return number


def _listed(returned) -> list | None:
    """Returns a reward function's result as a list; `None` if it is not a sequence."""
    if isinstance(returned, str | bytes | Mapping | Set):
        return None
    try:
        return returned.tolist() if isinstance(returned, Tensor) and returned.dim() == 1 else list(returned)
    except TypeError:  # for example a single number
        return None


def _number(reward) -> float | None:
    """Converts a reward to a float, also a bool or a scalar of NumPy or torch; `None` if it is not a number."""
    if isinstance(reward, str | bytes):
        return None
    try:
        return float(reward)
    except OverflowError:  # an integer that is too large for a float
        return math.inf
    except (TypeError, ValueError, RuntimeError):
        return None


def _short(value) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
