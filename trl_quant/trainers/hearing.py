"""
The correction of a trainer whose base in TRL drops the sampler's log-probabilities: TRL's RLOO and distillation.

    engine.generate(...) -> log-probabilities -> [`HearingStep.hear`] -> TRL, which keeps the tokens alone
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from ..trl_seams import exchanged
from .correction_step import CorrectionStep


Logps = list[float | None]  # of the sampled tokens of a completion, in nats; `None` where the sampler has none


class Heard:
    """Stands in for an engine and passes on what it samples."""

    def __init__(self, engine, hear: Callable[[list[list[int]], list[Logps]], None]):
        self.engine, self.hear = engine, hear

    def __getattr__(self, name: str):
        return getattr(self.engine, name)

    def generate(self, prompts, *args, **kwargs) -> tuple:
        samples = self.engine.generate(prompts, *args, **kwargs)
        self.hear(prompts, [[drawn for drawn, *_ in row] for row in samples[2]])
        return samples


class HearingStep(CorrectionStep):
    """
    A [`~trainers.correction_step.CorrectionStep`] that listens to the engine.

    Attributes:
        heard (`tuple`): By turn, the prompts and the log-probabilities of their samples, until `_generate` ends.
    """

    heard: tuple[tuple[list[list[int]], list[Logps]], ...] = ()

    @property
    def trl_logs(self) -> bool:
        return False

    @contextmanager
    def scoring(self) -> Iterator[None]:
        self.forget_last()
        with exchanged(self, samples=None, heard=()):
            yield

    def listening(self) -> AbstractContextManager:
        """Context of TRL's `_generate_single_turn`."""
        trainer = self.trainer
        if self.correction is None or not trainer.use_vllm:
            return nullcontext()
        return exchanged(trainer, vllm_generation=Heard(trainer.vllm_generation, self.hear))

    def hear(self, prompts: list[list[int]], logps: list[Logps]) -> None:
        self.heard = (*self.heard, (prompts, logps))

    def take_samples(self, prompts: list[list[int]], completions: list[list[int]]) -> None:
        """
        Takes what was heard of each completion. TRL, or a subclass of the trainer, may have cut a turn. What tools
        wrote between two turns has no log-probabilities.

        Args:
            prompts (`list[list[int]]`): The token ids of each prompt.
            completions (`list[list[int]]`): Those of each completion, with all of its turns.
        """
        if not self.heard:
            return
        (_, first), *later = self.heard
        self.heard = ()
        samples = [list(logps) for logps in first]
        for asked, logps in later:
            # A turn asks for the rows that go on, in their order, with all that they have so far
            rows = iter(range(len(prompts)))
            for before, drawn in zip(asked, logps, strict=True):
                row = next(row for row in rows if (prompts[row] + completions[row])[: len(before)] == before)
                own = len(before) - len(prompts[row])
                samples[row] = (samples[row] + [None] * own)[:own] + drawn
        self.samples = [logps[: len(ids)] for logps, ids in zip(samples, completions, strict=True)]
