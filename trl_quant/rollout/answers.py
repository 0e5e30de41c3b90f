"""
Checks what an engine, a server or a `rollout_func` returns: whether a policy can have sampled it.

Wrong tokens or log-probabilities train without an error, on ratios that mean nothing. So all samples pass
[`fault_of_samples`], wherever they come from. A log-probability of NaN, or `None`, is no fault: such a token counts as
unscored.
"""

from collections.abc import Sequence
from itertools import chain

import numpy as np


ROUNDED_ZERO = 1e-3  # largest log-probability, in nats, that counts as a rounded 0
ENDED = ("stop", "length", "repetition")  # vLLM's reasons for the end of a completion that is whole


class Column(Sequence):
    """
    Values that each have an axis of their own, as TRL and servers give log-probabilities: shape (values, 1).

    The list of a value is made when it is read, and no longer. Lists of 80,000 tokens, if they stay, set off Python's
    garbage collection, which takes half a second beside a vLLM engine.

    Parameters:
        values (`list`): The values.
    """

    def __init__(self, values: list):
        self.values = list(values)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, place):
        return Column(self.values[place]) if isinstance(place, slice) else [self.values[place]]

    def __setitem__(self, place: int, value: list) -> None:
        (self.values[place],) = value

    def __eq__(self, other) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    def __repr__(self) -> str:
        return repr(list(self))


def fault_of_samples(
    token_ids: list[list[int]],
    logps: list[list] | None,
    logp_token_ids: list[list[list[int]]] | None,
    *,
    count: int,
    vocabulary: int,
    most: int | None,
    ended: list[bool] | None = None,
) -> str | None:
    """
    Returns what is wrong with samples, or `None`.

    Args:
        token_ids (`list[list[int]]`): The completions' tokens.
        logps (`list[list[list[float | None]]]` or `None`):
            Log-probabilities in nats, of shape (completions, tokens, 1); `None` if there are none.
        logp_token_ids (`list[list[list[int]]]` or `None`): The tokens that they belong to, in the same shape.
        count (`int`): Number of completions that were asked for.
        vocabulary (`int`): Number of the model's tokens.
        most (`int` or `None`): Largest number of tokens that were asked for in a completion; `None` for any.
        ended (`list[bool]`, *optional*): Which completions have ended, and so have a token; by default all.
    """
    if len(token_ids) != count:
        return f"{len(token_ids)} completions were returned, and {count} were asked for"
    lengths = [*map(len, token_ids)]
    for row, length in enumerate(lengths):
        if not length and (ended is None or ended[row]):
            return f"completion {row} has no token"
    if most is not None and max(lengths, default=0) > most:
        return f"completion {np.argmax(lengths)} has {max(lengths)} tokens, and at most {most} were asked for"
    fault = fault_of_ids("completion_ids", token_ids, vocabulary)
    if fault is not None or logps is None:
        return fault
    given = {"log-probabilities": logps, "tokens of log-probabilities": logp_token_ids}
    for name, rows in given.items():
        if rows is None:
            continue
        if [*map(len, rows)] != lengths:
            return f"completions and {name} have different lengths"
        if set(map(len, chain.from_iterable(rows))) - {1}:
            return f"a token has {name} other than one"
    if logp_token_ids is not None:
        sampled, scored = _flat(token_ids), _flat(map(chain.from_iterable, logp_token_ids))
        row = _first_row(sampled != scored, lengths)
        if row is not None:
            return f"row {row} of 'logprobs' belongs to other tokens than the sampled ones"
    return fault_of_logps(map(chain.from_iterable, logps), lengths)


def fault_of_ids(name: str, rows: list[list[int]], vocabulary: int) -> str | None:
    """Returns what is wrong with rows of token ids, which are called `name`, or `None`."""
    ids = _flat(rows)
    if ids.size and ids.dtype.kind not in "iu":
        return f"{name!r} holds values that are not integers"
    outside = (ids < 0) | (ids >= vocabulary)
    row = _first_row(outside, [*map(len, rows)])
    if row is None:
        return None
    return (
        f"row {row} of {name!r} holds {ids[outside][0]}, which is not a token of the model. Its tokens are at least 0 "
        f"and below {vocabulary}"
    )


def fault_of_logps(rows, lengths: list[int]) -> str | None:
    """Returns what is wrong with rows of log-probabilities of these lengths, or `None`."""
    values = np.array([*chain.from_iterable(rows)], dtype=np.float64)  # `None` becomes NaN
    impossible = (values > ROUNDED_ZERO) | (values == -np.inf)
    row = _first_row(impossible, lengths)
    if row is None:
        return None
    return (
        f"row {row} of 'logprobs' holds {values[impossible][0]:g}. The log-probability of a sampled token is finite "
        f"and at most 0; up to {ROUNDED_ZERO:g} counts as rounding"
    )


def fault_of_end(reasons) -> str | None:
    """Returns what is wrong with vLLM's reasons for the ends of completions, or `None`."""
    for row, reason in enumerate(reasons):
        if reason not in ENDED:
            return (
                f"completion {row} is not whole (finish_reason {reason!r}): the engine has dropped it, as it does when "
                "it is stopped, or when another client aborts requests"
            )
    return None


def _flat(rows) -> np.ndarray:
    return np.array([*chain.from_iterable(rows)])


def _first_row(is_wrong: np.ndarray, lengths: list[int]) -> int | None:
    """Returns the row of the first wrong value among the values of rows with these lengths, or `None`."""
    if not is_wrong.any():
        return None
    return int(np.searchsorted(np.cumsum(lengths), int(np.argmax(is_wrong)), side="right"))
