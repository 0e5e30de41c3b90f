"""
Measures how fast runs are: seconds per step, tokens per second, and each run's ratio to the first that logged them.

TRL logs the seconds of a step, as a mean over the steps of a log entry, and `num_tokens`, the total of prompts and
completions so far, which its asynchronous trainer does not count. A speed is all tokens and all seconds over the
entries after the first. The first entry is left out, unless it is the only one, because it includes compilation and
other work that later steps do not repeat.
"""

from collections.abc import Sequence
from typing import NamedTuple

from .runs import Run, is_number, step_seconds


HEADER = ("run", "s a step", "ratio", "tokens/s", "ratio")


class Speed(NamedTuple):
    """
    The speed of a run.

    Attributes:
        step_seconds (`float` or `None`): Seconds per step; `None` if no step time was logged.
        tokens_per_second (`float` or `None`): Tokens of prompts and completions; `None` if not logged.
    """

    step_seconds: float | None
    tokens_per_second: float | None


def speed(run: Run) -> Speed:
    """Computes the run's speed from its logged step times and token counts."""
    timed = [entry for entry in run.history if step_seconds(entry) is not None]
    steps = seconds = 0.0
    before = 0
    for i, entry in enumerate(timed):
        if i > 0 or len(timed) == 1:
            steps += entry["step"] - before
            seconds += step_seconds(entry) * (entry["step"] - before)
        before = entry["step"]
    return Speed(seconds / steps if steps else None, _tokens_per_second(timed))


def _tokens_per_second(timed: Sequence[dict]) -> float | None:
    """Divides the tokens between the first and the last entry that count them by the seconds in between."""
    elapsed = counted_from = counted_to = 0.0
    tokens_from, tokens_to, step, counts = 0.0, 0.0, 0, 0
    for entry in timed:
        elapsed += step_seconds(entry) * (entry["step"] - step)
        step = entry["step"]
        if is_number(entry.get("num_tokens")):
            counts += 1
            if counts == 2:
                tokens_from, counted_from = tokens_to, counted_to
            tokens_to, counted_to = entry["num_tokens"], elapsed
    seconds = counted_to - counted_from
    return (tokens_to - tokens_from) / seconds if counts and seconds > 0 else None


def speed_rows(runs: Sequence[Run]) -> list[list[str]]:
    """Returns a row below `HEADER` for each run. A run with a ratio above 1 is faster than the one of `1.00x`."""
    speeds = [speed(run) for run in runs]
    first = Speed(*(next(filter(None, column), None) for column in zip(*speeds, strict=True)))
    rows = []
    for run, found in zip(runs, speeds, strict=True):
        slower, tokens = found
        step_ratio = first.step_seconds / slower if slower else None
        token_ratio = tokens / first.tokens_per_second if tokens else None
        rows.append(
            [
                run.name,
                "-" if slower is None else f"{slower:.3g}",
                "-" if step_ratio is None else f"{step_ratio:.2f}x",
                "-" if tokens is None else f"{tokens:,.0f}",
                "-" if token_ratio is None else f"{token_ratio:.2f}x",
            ]
        )
    return rows
