"""
The correction for TRL's RLOO and distillation trainers, which drop the sampler's log-probabilities.

    vllm_generation.generate(...) -> `vllm_generation.turns` -> [`logps_of_turns`] -> the correction

`vllm_generation` records the log-probabilities of each turn ([`~rollout.trl_face.QuantGeneration`]; TRL's own sampler
by [`~rollout.trl_face.recording`]). [`RecordedRollouts`] passes them on to a [`RecordedStep`] when a generation ends.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from ..rollout.trl_face import Turn, recording, rows_of_turns
from ..trl_seams import generation_derived
from .correction_step import CorrectionStep
from .sampling import QuantSampling


def logps_of_turns(
    turns: list[Turn], prompts: list[list[int]], completions: list[list[int]]
) -> list[list[float | None]]:
    """
    Joins the log-probabilities of each completion's turns. TRL or a subclass of its trainer may have truncated a turn.

    Args:
        turns, prompts, completions: As [`~rollout.trl_face.rows_of_turns`] takes them.

    Returns:
        `list[list[float | None]]`: The log-probabilities of each completion's tokens, in nats; `None` for tokens that
        tools wrote between two turns.
    """
    samples: list[list[float | None]] = [[] for _ in prompts]
    for turn, rows in rows_of_turns(turns, prompts, completions):
        for place, row in rows:
            so_far = len(turn.prompts[place]) - len(prompts[row])
            samples[row] = (samples[row] + [None] * so_far)[:so_far] + turn.logps[place]
    return [logps[: len(ids)] for logps, ids in zip(samples, completions, strict=True)]


class RecordedStep(CorrectionStep):
    """A [`~trainers.correction_step.CorrectionStep`] that takes its samples from the records of a generation."""

    @property
    def trl_logs(self) -> bool:
        return False

    @contextmanager
    def scoring(self) -> Iterator[None]:
        self.forget_last()
        with self.sampled():
            yield

    def take_turns(self, turns: list[Turn], prompts: list[list[int]], completions: list[list[int]]) -> None:
        """Takes the log-probabilities of a generation; see [`logps_of_turns`]."""
        if turns:
            self.samples = logps_of_turns(turns, prompts, completions)
        else:
            self.refuse_missing_logps()


class RecordedRollouts(QuantSampling):
    """
    [`~trainers.sampling.QuantSampling`] for these trainers. It makes the calls of a [`RecordedStep`] up to the loss,
    in the order that the step's docstring lists.
    """

    def __init__(self, **given):
        needs_turns = self.correction_step.correction is not None and given["args"].use_vllm
        with generation_derived(type(self), recording) if needs_turns else nullcontext():
            super().__init__(**given)

    def _generate_and_score_completions(self, inputs):
        with self.correction_step.scoring():
            output = super()._generate_and_score_completions(inputs)
            self.correction_step.before_loss(output)
        return output

    def _generate(self, prompts):
        turns = []
        if self.correction_step.correction is not None and self.use_vllm:
            turns = self.vllm_generation.turns
            turns.clear()
        generated = super()._generate(prompts)
        self.correction_step.take_turns(turns, *generated[:2])  # token ids of the prompts and of the completions
        return generated
