"""
The correction for TRL's RLOO and distillation trainers, which drop the sampler's log-probabilities.

    engine.generate(...) -> log-probabilities -> [`HearingStep.hear`] -> TRL, which keeps only the tokens

[`HearingStep`] records the log-probabilities of a generation, and [`HearingRollouts`] calls it where TRL samples.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from ..trl_seams import exchanged
from .correction_step import CorrectionStep
from .quantized import QuantRollouts


Logps = list[float | None]  # of the sampled tokens of a completion, in nats; `None` where the sampler has none


class Heard:
    """Wraps an engine, and also passes the log-probabilities that the engine returns to `hear`."""

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
    A [`~trainers.correction_step.CorrectionStep`] that records the engine's log-probabilities.

    Attributes:
        heard (`tuple`): For each turn, the prompts and the log-probabilities of their samples, until `_generate` ends.
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
        """Context of TRL's `_generate_single_turn`, in which the engine's log-probabilities are recorded."""
        trainer = self.trainer
        if self.correction is None or not trainer.use_vllm:
            return nullcontext()
        return exchanged(trainer, vllm_generation=Heard(trainer.vllm_generation, self.hear))

    def hear(self, prompts: list[list[int]], logps: list[Logps]) -> None:
        """Adds a turn: the token ids of its prompts, and the log-probabilities of what was sampled for each."""
        self.heard = (*self.heard, (prompts, logps))

    def take_samples(self, prompts: list[list[int]], completions: list[list[int]]) -> None:
        """
        Joins the recorded log-probabilities of each completion's turns. TRL, or a subclass of the trainer, may have
        truncated a turn. Tokens that tools wrote between two turns get `None`.

        Args:
            prompts (`list[list[int]]`): The token ids of each prompt.
            completions (`list[list[int]]`): The token ids of each completion, with all of its turns.
        """
        if not self.heard:
            return self.refuse_missing_logps()
        (_, first), *later = self.heard
        self.heard = ()
        samples = [list(logps) for logps in first]
        for asked, logps in later:
            # A turn's prompts are the unfinished rows, in their order, each with its completion so far
            rows = iter(range(len(prompts)))
            for before, drawn in zip(asked, logps, strict=True):
                row = next(row for row in rows if (prompts[row] + completions[row])[: len(before)] == before)
                so_far = len(before) - len(prompts[row])
                samples[row] = (samples[row] + [None] * so_far)[:so_far] + drawn
        self.samples = [logps[: len(ids)] for logps, ids in zip(samples, completions, strict=True)]


class HearingRollouts(QuantRollouts):
    """
    [`~trainers.quantized.QuantRollouts`] for these trainers. It makes the calls of a [`HearingStep`] up to the loss, in
    the order that the step's docstring lists.
    """

    def __init__(self, **given):
        super().__init__(**given)
        if self.correction_step.correction is not None and self.use_vllm:
            self.vllm_generation.logprobs = 0  # TRL requests none; 0 requests those of the drawn tokens only

    def _generate_and_score_completions(self, inputs):
        with self.correction_step.scoring():
            output = super()._generate_and_score_completions(inputs)
            self.correction_step.before_loss(output)
        return output

    def _generate_single_turn(self, *args, **kwargs):
        with self.correction_step.listening():
            return super()._generate_single_turn(*args, **kwargs)

    def _generate(self, prompts):
        generated = super()._generate(prompts)
        self.correction_step.take_samples(*generated[:2])  # token ids of the prompts and of the completions
        return generated
