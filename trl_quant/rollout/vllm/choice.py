"""Measures how fast vLLM samples in each precision on this device, and chooses the fastest, or, among several that are
about as fast, the one nearest to the policy.

Precisions are measured one after the other, with the arguments of the run's own engine, in separate processes that
leave nothing behind (`trial`). [`~trainers.choice.choose_precision`] calls this when the run's engine would be built.
"""

from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from ...precisions import PRECISIONS
from .trial import Speed, Trial, measure


WORTHWHILE = 1.05  # the factor by which a precision must be faster than one that is nearer to the policy


@dataclass(frozen=True)
class Choice:
    """
    What was measured, and the precision that follows from it.

    Attributes:
        precision (`str`): Among the precisions that no other beats by 5% in tokens per second, the one nearest to the
            policy.
        measured (`dict[str, Speed | str]`): The speed of each precision, or the reason why it has none.
        batch (`int`): Number of completions that one engine sampled at a time.
        length (`int`): Largest number of tokens in a completion.
        uncounted (`list[str]`): The parts of a step that take time in the run and were not measured.
    """

    precision: str
    measured: dict[str, Speed | str]
    batch: int
    length: int
    uncounted: list[str]

    @property
    def rates(self) -> dict[str, float | str]:
        """Each precision's tokens per second over a whole generation, or the reason why it has none."""
        return rates_of(self.measured, self.batch, self.length)

    @property
    def line(self) -> str:
        """The line for the run's config."""
        return f"rollout_precision: {self.precision}"

    def print(self) -> None:
        """Prints the speed of each precision, why the others failed, and the line for the run's config."""
        title = f"Sampling {self.batch} completions of {self.length} tokens after each sync"
        table = Table("precision", "decoding, tokens/s", "sync, s", "tokens/s", "of bf16", title=title)
        table.caption = f"Not counted: {', '.join(self.uncounted)}."
        base = self.rates.get("bf16")
        failed = {name: reason for name, reason in self.measured.items() if isinstance(reason, str)}
        for name, speed in self.measured.items():
            if name in failed:
                table.add_row(name, *"----")
            else:
                ratio = "-" if isinstance(base, str | None) else f"{self.rates[name] / base:.2f}"
                row = (f"{self.batch / speed.step:.0f}", f"{speed.sync:.3f}", f"{self.rates[name]:.0f}", ratio)
                table.add_row(name, *row, style="bold" if name == self.precision else None)
        console = Console()
        console.print(table)
        lines = [f"{name}: {reason}" for name, reason in failed.items()]
        console.print(*lines, self.line, sep="\n", soft_wrap=True, markup=False)


def choose(trials: dict[str, Trial | str], uncounted: list[str]) -> Choice:
    """
    Measures precisions and chooses one.

    Args:
        trials (`dict[str, Trial | str]`):
            What is measured for each precision, or the reason why the run cannot use it. At least one is measured.
        uncounted (`list[str]`): The parts of the run's step that are not measured.

    Raises:
        `RuntimeError`: No engine started.
    """
    measured = {name: trial if isinstance(trial, str) else measure(trial, name) for name, trial in trials.items()}
    one = next(trial for trial in trials.values() if isinstance(trial, Trial))
    precision = choice_of(rates_of(measured, one.batch, one.length))
    if precision is None:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in measured.items())
        raise RuntimeError(f"No precision can be chosen: no engine of {one.model} started. {reasons}")
    return Choice(precision, measured, one.batch, one.length, uncounted)


def rates_of(measured: dict[str, Speed | str], batch: int, length: int) -> dict[str, float | str]:
    """Returns each precision's tokens per second over a whole generation, or the reason why it failed."""
    rates = {}
    for name, speed in measured.items():
        rates[name] = speed if isinstance(speed, str) else speed.rate(batch, length)
    return rates


def choice_of(rates: dict[str, float | str]) -> str | None:
    """Returns the choice for the result of [`rates_of`]; `None` if all precisions failed."""
    speeds = {name: rate for name, rate in rates.items() if not isinstance(rate, str)}
    for name in PRECISIONS:  # the nearest to the policy comes first
        if name in speeds and speeds[name] * WORTHWHILE >= max(speeds.values()):
            return name
    return None
