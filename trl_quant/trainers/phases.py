"""The metrics `profiling/NAME`: how many seconds of a step TRL's phase NAME took.

TRL reports its phases to wandb, MLflow and Trackio alone, call by call; here they are metrics like all others. Phases
nest: `_prepare_inputs` includes sync, sampling and scoring. No phase includes the backward pass and the optimizer.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from transformers import Trainer, TrainerCallback

from ..trl_seams import phases_timed


# TRL's name of the phase in which an engine samples, and of the one in which transformers' `generate` does
IN_VLLM, IN_TRANSFORMERS = "vLLM.generate", "transformers.generate"


class PhaseTimes(TrainerCallback):
    """Gives `log` the seconds of each phase at the end of a step, before the trainer logs the step."""

    def __init__(self, log: Callable[[dict[str, float]], None], in_vllm: bool):
        self.log, self.in_vllm, self.seconds = log, in_vllm, defaultdict(float)

    def add(self, name: str, seconds: float) -> None:
        if name == IN_VLLM and not self.in_vllm:
            name = IN_TRANSFORMERS
        self.seconds[f"profiling/{name}"] += seconds

    def on_step_begin(self, *args, **kwargs):
        # Drops the times of an evaluation. A phase that does not run takes 0 s of its step, which keeps means right.
        self.seconds = defaultdict(float, dict.fromkeys(self.seconds, 0.0))

    def on_step_end(self, *args, **kwargs):
        self.log(dict(self.seconds))


@contextmanager
def logged(trainer: Trainer, log: Callable[[dict[str, float]], None] | None) -> Iterator[None]:
    """Context in which the phases of `trainer` are given to `log`; with `None` for `log` it does nothing."""
    if log is None:
        yield
        return
    times = PhaseTimes(log, in_vllm=trainer.args.use_vllm)
    trainer.add_callback(times)
    try:
        with phases_timed(times.add):
            yield
    finally:
        trainer.remove_callback(times)
