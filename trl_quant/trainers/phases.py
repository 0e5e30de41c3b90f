"""Logs the metrics `profiling/NAME`: the seconds that TRL's phase NAME took in a step.

TRL reports its phases only to wandb, MLflow and Trackio, call by call. Here they are metrics like all others. Phases
nest: `_prepare_inputs` includes sync, sampling and scoring. No phase includes the backward pass and the optimizer.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from transformers import Trainer, TrainerCallback

from ..trl_seams import phases_timed


# TRL's names of the phase in which an engine samples, and of the one in which transformers' `generate` samples
IN_VLLM, IN_TRANSFORMERS = "vLLM.generate", "transformers.generate"


class PhaseTimes(TrainerCallback):
    """Passes the seconds of each phase to `log` at the end of a step, before the trainer logs the step."""

    def __init__(self, log: Callable[[dict[str, float]], None], in_vllm: bool):
        self.log, self.in_vllm, self.seconds = log, in_vllm, defaultdict(float)

    def add(self, name: str, seconds: float) -> None:
        """Adds the seconds of a phase to its sum in this step."""
        if name == IN_VLLM and not self.in_vllm:
            name = IN_TRANSFORMERS
        self.seconds[f"profiling/{name}"] += seconds

    def on_step_begin(self, *args, **kwargs):
        # Drops the times of an evaluation. A phase that does not run in a step counts as 0 s in the mean over steps.
        self.seconds = defaultdict(float, dict.fromkeys(self.seconds, 0.0))

    def on_step_end(self, *args, **kwargs):
        self.log(dict(self.seconds))


@contextmanager
def logged(trainer: Trainer, log: Callable[[dict[str, float]], None] | None) -> Iterator[None]:
    """Context in which the phases of `trainer` are passed to `log`. If `log` is `None`, it does nothing."""
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
