"""
Gives an asynchronous run a fixed age: update k trains on what version max(1, k - a) of the weights has sampled.

By itself the sampling thread begins a group whenever the trainer has taken samples, and ends a call where new weights
come, so that ages depend on how fast a machine samples and trains. Here version v samples one generation, an update's
samples, in one call of the engine; version 1 samples those of the first a + 1 updates:

    version     1                 2          3
    samples     1, ..., a + 1     a + 2      a + 3      while the trainer trains
    is trained  1                 2          3

With a = 0 the trainer waits for its samples. A sync waits until its version has sampled all of that. So every token
has the age min(a, k - 1), and a run repeats bit for bit on one machine: the thread alone draws random numbers, in one
order. A policy is judged, which seeds torch's numbers anew for that time, while the thread has nothing to do.
"""

import time
from collections.abc import Callable

from transformers import TrainerCallback


LOOK = 0.01  # seconds between two looks at whether all is sampled


class Pace(TrainerCallback):
    """
    Takes the place of the queue that the thread fills, by which the thread sees when to sample. It must be among the
    `callbacks` that a trainer is built with: those act before TRL's sync.

    Args:
        age (`int`): a, in versions of the weights. With one update for each sync these are updates.

    Attributes:
        trainer ([`QuantAsyncGRPOTrainer`]): Given by [`set`].
        delivered (`int`): Samples that the thread has put on the trainer's queue.
    """

    def __init__(self, age: int):
        self.age, self.delivered = age, 0

    def set(self, trainer) -> None:
        """Takes the trainer, before it trains."""
        self.trainer = trainer
        trainer.sampling_thread.rollout_buffer = self

    @property
    def ordered(self) -> int:
        """Samples that the versions so far have to sample."""
        version = self.trainer.sampling_thread.version
        return (version + self.age) * self.trainer.args.generation_batch_size if version else 0

    def wait(self) -> None:
        """Returns when they are sampled. Raises `RuntimeError` if the thread fails."""
        while self.delivered < self.ordered:
            self.trainer.sampling_thread.check_health(self.trainer.args.heartbeat_stale_after_s)
            time.sleep(LOOK)

    def on_step_end(self, args, state, control, **kwargs):
        self.wait()

    def at_rest(self, judge: Callable[..., float]) -> Callable[..., float]:
        """Returns `judge`, called while the thread has nothing to do."""

        def judged(*given, **named):
            self.wait()
            return judge(*given, **named)

        return judged

    # The queue, as the thread sees it

    def put(self, sample, timeout: float | None = None) -> None:
        self.trainer.rollout_queue.put(sample, timeout=timeout)
        self.delivered += 1

    def qsize(self) -> int:
        """0 if a generation may begin; else a whole one, with which the thread begins no group and draws to the end."""
        begun = self.trainer.sampling_thread.started * self.trainer.args.num_generations
        return 0 if begun == self.delivered < self.ordered else self.trainer.args.generation_batch_size
