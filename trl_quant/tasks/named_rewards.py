"""Finds reward functions by name: a key of `REWARDS`, or the dotted path of the user's own function."""

import importlib
import os
import sys
from collections.abc import Callable, Hashable
from inspect import isfunction

from .rewards import REWARDS


def find_reward(name: str) -> Callable[..., list[float | None]]:
    """
    Returns the reward function with this name.

    Args:
        name (`str`): A key of [`REWARDS`], or a dotted path such as `"my_rewards.brevity"`. Modules in the working
            directory are found as well.

    Returns:
        `Callable`: The function. Its results are checked by the trainer.

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
    return reward


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
