"""Finds reward functions by name: a key of `REWARDS`, or the dotted path of the user's own function."""

import importlib
import os
import sys
from collections.abc import Callable, Hashable, Iterable
from functools import wraps
from inspect import iscoroutinefunction, isfunction
from numbers import Real

from .rewards import REWARDS


def find_reward(name: str) -> Callable[..., list[float | None]]:
    """
    Returns the reward function with this name.

    Args:
        name (`str`): A key of [`REWARDS`], or a dotted path such as `"my_rewards.brevity"`. Modules in the working
            directory are found as well.

    Returns:
        `Callable`: The function. The user's own function is wrapped so that its results are checked, unless it is
        asynchronous.

    Raises:
        `ValueError`: if there is no such function.
    """
    if name in REWARDS:
        return REWARDS[name]
    module, _, function = name.rpartition(".")
    try:
        sys.path.insert(0, os.getcwd())
        reward = getattr(importlib.import_module(module), function)
    except (ValueError, ImportError, AttributeError, SyntaxError) as error:
        raise ValueError(
            f"`reward_funcs`={name!r} is unknown ({error}). Allowed: {', '.join(map(repr, REWARDS))}, or the dotted "
            "path of a function, such as 'my_rewards.brevity'."
        ) from None
    finally:
        sys.path.remove(os.getcwd())
    if not callable(reward):
        raise ValueError(f"`reward_funcs`={name!r} is a {type(reward).__name__}, not a function.")
    return reward if iscoroutinefunction(reward) else _checked(reward, name)


def name_of(reward: Callable) -> str:
    """
    Returns the name by which [`find_reward`] finds a reward function. The name of a function that it cannot find, such
    as one inside another function, has a part in `<>`; a reward model has the name of its checkpoint.
    """
    names = {function: name for name, function in REWARDS.items()}
    if isinstance(reward, Hashable) and reward in names:
        return names[reward]
    checkpoint = reward if isinstance(reward, str) else getattr(reward, "name_or_path", None)
    if checkpoint:
        return f"<model {checkpoint}>"
    if not isfunction(reward):
        return f"<{type(reward).__module__}.{type(reward).__qualname__}>"
    return f"{reward.__module__}.{reward.__qualname__}".replace("__main__", "<script>")


def _checked(reward: Callable, name: str) -> Callable[..., list[float | None]]:
    """Wraps a reward function so that any result other than a list of rewards raises an error that names it."""

    @wraps(reward)
    def checked(*args, **kwargs):
        rewards = reward(*args, **kwargs)
        if isinstance(rewards, Iterable):
            rewards = list(rewards)  # a generator can be read only once
        if not isinstance(rewards, list) or not all(value is None or _is_number(value) for value in rewards):
            raise ValueError(
                f"`reward_funcs`={name!r} returned {str(rewards)[:80]}, which must be a list with a number or None for "
                "each completion."
            )
        return rewards

    return checked


def _is_number(value) -> bool:
    return isinstance(value, Real) or getattr(value, "ndim", None) == 0
