"""Checks of single values: the error names the field, the value and what is allowed."""

import math
from numbers import Integral, Real
from threading import TIMEOUT_MAX
from typing import get_args


TYPES = {
    bool: "True or False",
    int: "an integer",
    float: "a finite number",
    str: "a string",
    dict: "a dict (or a JSON object)",
    type(None): "None",
}
# Fields that nothing else checks before the model is loaded -> at least, or with `True` above; at most
BOUNDS = {
    "temperature": (0.0, True, math.inf),
    "top_p": (0.0, True, 1.0),
    "min_p": (0.0, False, 1.0),
    "repetition_penalty": (0.0, True, math.inf),
    "max_completion_length": (1, False, math.inf),
    "num_iterations": (1, False, math.inf),
    "generation_batch_size": (1, False, math.inf),
    "vllm_gpu_memory_utilization": (0.0, True, 1.0),
    "learning_rate": (0.0, False, math.inf),
    "beta": (0.0, False, math.inf),
    "epsilon": (0.0, False, math.inf),
    "icepop_low": (0.0, False, 1.0),
    "icepop_high": (1.0, False, math.inf),
    "geometric_epsilon": (0.0, True, 1.0),
    "trm_delta": (0.0, True, math.inf),
    "dppo_delta": (0.0, True, 1.0),
    "reward_timeout": (0.0, True, TIMEOUT_MAX),
    "vllm_request_timeout": (0.0, True, TIMEOUT_MAX),
}
# Losses that clip the policy ratio between two bounds; only these have an upper bound that ACR can widen.
CLIPPED_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
CHOICES = {
    "scale_rewards": ("group", "batch", "none"),
    "loss_type": (*CLIPPED_LOSSES, "cispo", "sapo", "vespo"),
}


def listed(names) -> str:
    """`'a', 'b' or 'c'`."""
    *first, last = map(repr, names)
    return f"{', '.join(first)} or {last}" if first else last


def is_of(kind: type, value) -> bool:
    """Whether a field of type `kind` takes `value`. Integers are numbers, `True`, infinity and NaN are not."""
    if kind in (int, float):
        number = isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
        return number and math.isfinite(value)
    return isinstance(value, kind)


def check_type(name: str, value, hint) -> None:
    """Raises `ValueError` unless a field with the type hint `hint` takes `value`."""
    kinds = get_args(hint) or (hint,)
    kinds = [kind for kind in kinds if kind is not str or dict not in kinds]  # JSON was read before
    if not any(is_of(kind, value) for kind in kinds):
        raise ValueError(f"`{name}`={value!r} must be {' or '.join(TYPES[kind] for kind in kinds)}.")


def check_choice(name: str, value, choices) -> None:
    """Raises `ValueError` unless `value` is `None` or one of `choices`."""
    if value is not None and value not in choices:
        raise ValueError(f"`{name}`={value!r} is unknown. Allowed: {', '.join(map(repr, choices))}.")


def check_at_least(name: str, value: float | None, bound: float, strict: bool = False) -> None:
    """Raises `ValueError` unless `value` is `None` or at least `bound` (with `strict` above it); NaN fails."""
    if value is not None and not (value > bound if strict else value >= bound):
        raise ValueError(f"`{name}`={value!r} is out of range. It must be {'>' if strict else '>='} {bound}.")


def check_bounds(name: str, value: float | None, called: str | None = None) -> None:
    """Raises `ValueError` for a field in [`BOUNDS`] that is out of them; the message calls it `called`, or its name."""
    bound, strict, most = BOUNDS[name]
    check_at_least(called or name, value, bound, strict)
    if value is not None and value > most:
        raise ValueError(f"`{called or name}`={value!r} is out of range. It must be <= {most}.")
