"""What TRL's trainers and their users see of an engine.

TRL's trainers call two methods of their `vllm_generation`: `sync_weights` and `generate`. [`QuantGeneration`] is a
`VLLMGeneration` of TRL's that has an engine and passes both on to it. TRL's code neither starts vLLM nor samples here.

Each turn's log-probabilities are also recorded, because TRL's RLOO and distillation trainers drop them. Where TRL
samples by itself, [`recording`] adds the records to TRL's own class.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor
from trl.generation.vllm_generation import VLLMGeneration

from ..run_spec import EngineSpec
from .answers import Column
from .base import AdaptedEngine, RolloutEngine
from .engine import Engine, Samples, requests_for
from .kept import Kept
from .settings import SAMPLING, SamplingSettings


class Turn(NamedTuple):
    """
    One turn of a generation.

    Parameters:
        prompts (`list[list[int]]`): Token ids of the prompts.
        logps (`list[list[float | None]]`):
            The log-probabilities, in nats, with which the tokens of each completion were sampled; `None` where unknown.
        routing (`list[torch.Tensor | None]`, *optional*): The [`~rollout.routing`] of each; `None` where unknown.
        kept (`list[Kept | None]`, *optional*): The [`~rollout.kept`] tokens of each; `None` where unknown.
    """

    prompts: list[list[int]]
    logps: list[list[float | None]]
    routing: list[Tensor | None] | None = None
    kept: list[Kept | None] | None = None


def rows_of_turns(
    turns: list[Turn], prompts: list[list[int]], completions: list[list[int]]
) -> Iterator[tuple[Turn, Iterator[tuple[int, int]]]]:
    """
    Finds the completions that each turn has gone on with.

    Args:
        turns (`list[Turn]`): One turn or more. The first has all rows. The prompts of a later turn are the unfinished
            rows, in their order, each with its completion so far.
        prompts (`list[list[int]]`): The token ids of each row's prompt.
        completions (`list[list[int]]`): The token ids of each completion, with all of its turns.

    Yields:
        Each turn, and the places of its rows among the turn's and among all rows.
    """
    for number, turn in enumerate(turns):
        yield turn, enumerate(range(len(prompts))) if not number else _found_again(turn, prompts, completions)


def _found_again(turn: Turn, prompts: list[list[int]], completions: list[list[int]]) -> Iterator[tuple[int, int]]:
    rows = iter(range(len(prompts)))
    for place, before in enumerate(turn.prompts):
        yield place, next(row for row in rows if (prompts[row] + completions[row])[: len(before)] == before)


class QuantGeneration(VLLMGeneration):
    """
    TRL's `VLLMGeneration`, whose completions come from an engine.

    It has TRL's attributes. Each generation is sampled with their current values ([`settings`]).

    Parameters:
        sampler ([`RolloutEngine`]): The engine, which has started.
        args, kwargs: The arguments of TRL's `VLLMGeneration`.

    Attributes:
        sampler ([`RolloutEngine`]): The engine, with noise, metrics and checkpoints.
        engine ([`~rollout.engine.Engine`]): The engine that `build_engine` returned; `sampler` if it is one of ours.
        turns (`list[Turn]`): The turns of the last generation, or of the one that has begun.
        multimodal_fields (`dict`):
            The processor's results for the images of the next turn, such as `pixel_values`. TRL's trainers do not pass
            them to `generate`, so ours sets them here.
    """

    def __init__(self, sampler: RolloutEngine, *args, **kwargs):
        self.sampler = sampler
        self.turns: list[Turn] = []
        self.multimodal_fields: dict = {}
        self._returned: Samples | None = None
        self._was_asked = False  # since there are samples to return
        super().__init__(*args, **kwargs)

    def _init_vllm(self):
        """Does nothing. TRL's constructor calls this method to start vLLM; the engine has started before."""

    @property
    def engine(self) -> Engine:
        return self.sampler.engine if isinstance(self.sampler, AdaptedEngine) else self.sampler

    @property
    def settings(self) -> SamplingSettings:
        """How the next completions are drawn: the current values of TRL's attributes."""
        return SamplingSettings(**{name: getattr(self, name) for name in SAMPLING})

    @property
    def llm(self):
        """vLLM's `LLM`, of an engine in this process. Raises `AttributeError` if there is none."""
        return self.sampler.llm

    @property
    def vllm_client(self):
        """The client of a vLLM server, on the main process. Raises `AttributeError` if there is none."""
        return self.sampler.vllm_client

    def check_sync(self, quick: bool = False) -> dict[str, float]:
        """Compares a vLLM engine with the policy; see [`~rollout.vllm.base.VLLMBase.check_sync`]."""
        return self.sampler.check_sync(quick)

    def begin(self) -> None:
        """Begins a generation with the current settings, and forgets the turns of the last one."""
        self.turns.clear()
        self.sampler.settings = self.settings

    def sync_weights(self) -> None:
        """Copies the policy's weights into the engine. All ranks must call it."""
        self.sampler.sync()

    @property
    def has_samples(self) -> bool:
        """Whether the next turn returns samples that there are already."""
        return self._returned is not None

    @contextmanager
    def returning(self, samples: Samples) -> Iterator[None]:
        """
        Context in which [`generate`] returns `samples` and does not sample.

        Raises:
            `ValueError`: It was not called, so the trainer got other samples.
        """
        self._returned, self._was_asked = samples, False
        try:
            yield
        finally:
            self._returned = None
        if not self._was_asked:
            raise ValueError(
                "The trainer took other completions than the engine had sampled for it: with `rollouts_in_flight` or "
                "`dynamic_sampling_rounds` they are sampled before TRL asks for them. An override of "
                "`_generate_single_turn` must call `super()`; one that samples by itself needs both fields at their "
                "defaults."
            )

    def generate(self, prompts, images, num_generations, profiler=None) -> tuple:
        """
        Samples one turn of a generation; see TRL's `VLLMGeneration.generate`.

        Args:
            prompts (`list[list[int]]`): Token ids, one list for each completion.
            images: The images of each prompt.
            num_generations (`int`): Number of consecutive copies of each prompt.
            profiler: Context manager that times the sampling.

        Returns:
            `(prompt_ids, completion_ids, logprobs, logprob_token_ids)`. The last two have the shape (batch, completion
            length, 1): the log-probability, in nats, with which each token was sampled, and the token.

        Raises:
            `RuntimeError`: A policy cannot have sampled this; see [`~rollout.answers.fault_of_samples`].
        """
        samples, self._was_asked = self._returned, True
        if samples is None:
            if not self.sampler.is_generating:
                self.begin()
            self.sampler.settings = self.settings
            requests = requests_for(prompts, images, num_generations)
            samples = self.sampler.draw(requests, profiler, processed=self.multimodal_fields)
        logps = samples.logps
        if logps is None:
            logps = [[None] * len(ids) for ids in samples.token_ids]
        self.turns.append(Turn(prompts, logps, samples.routing, samples.kept))
        return prompts, samples.token_ids, [*map(Column, logps)], [*map(Column, samples.token_ids)]


def presented(engine: Engine, spec: EngineSpec, **given: Any) -> QuantGeneration:
    """
    Presents an engine to TRL's trainer.

    Args:
        engine ([`~rollout.engine.Engine`]): The engine.
        spec ([`~rollout.EngineSpec`]): The engine that the configuration describes.
        given: The arguments of TRL's `VLLMGeneration`, by name.
    """
    sampler = engine if isinstance(engine, RolloutEngine) else AdaptedEngine(engine, spec, **given)
    return QuantGeneration(sampler, **given)


def recording(generation: type) -> type:
    """
    Returns a subclass of TRL's `generation` that also has `turns`, until the trainer clears them. It asks vLLM for the
    log-probabilities of the drawn tokens, which TRL's RLOO and distillation trainers do not.
    """

    class Recording(generation):
        def __init__(self, **given):
            self.turns: list[Turn] = []
            super().__init__(**given | {"logprobs": 0})

        def generate(self, prompts, *args, **kwargs) -> tuple:
            samples = super().generate(prompts, *args, **kwargs)
            self.turns.append(Turn(prompts, [[drawn for drawn, *_ in row] for row in samples[2]]))
            return samples

    return Recording
