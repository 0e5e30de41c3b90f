"""Where the time of a step goes: `profiling/NAME`, the seconds of a step that TRL's phase NAME took.

TRL times its phases for wandb, MLflow and Trackio alone, call by call; here they are metrics like all others. They
nest: `_prepare_inputs` holds sync, sampling and scoring. What no phase holds is the backward pass and the optimizer.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from transformers import Trainer, TrainerCallback

from ..trl_seams import phases_timed


class PhaseTimes(TrainerCallback):
    """Hands the seconds of each step's phases to `log`, before the trainer logs the step."""

    def __init__(self, log: Callable[[dict[str, float]], None]):
        self.log, self.seconds = log, defaultdict(float)

    def add(self, name: str, seconds: float) -> None:
        self.seconds[f"profiling/{name}"] += seconds

    def on_step_begin(self, *args, **kwargs):
        # Forgets an evaluation; a step without a phase took no time for it, so that means are those of a step
        self.seconds = defaultdict(float, dict.fromkeys(self.seconds, 0.0))

    def on_step_end(self, *args, **kwargs):
        self.log(dict(self.seconds))


@contextmanager
def logged(trainer: Trainer, log: Callable[[dict[str, float]], None] | None) -> Iterator[None]:
    """Context in which the phases of `trainer` go to `log`; without one, it does nothing."""
    if log is None:
        yield
        return
    trainer.add_callback(times := PhaseTimes(log))
    try:
        with phases_timed(times.add):
            yield
    finally:
        trainer.remove_callback(times)
