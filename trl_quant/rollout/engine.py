"""The protocol of an engine: what any trainer needs of one, and nothing of a host library.

An engine holds a copy of the policy in its own number format. A trainer brings that copy up to date with `sync` and
takes completions from it with `sample`:

    class Shouting:
        def sync(self) -> None: ...

        def sample(self, prompts, images=None) -> Samples:
            return Samples([[33] for _ in prompts], [[0.0] for _ in prompts])

`trl_adapter` presents an engine to TRL's trainers. The engines of this package add noise, metrics and checkpoints to
this protocol; they inherit from [`~rollout.trl_adapter.RolloutEngine`].
"""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Samples:
    """
    One completion for each prompt.

    Parameters:
        token_ids (`list[list[int]]`):
            The tokens that were drawn, without the prompt.
        logps (`list[list[float | None]]`, *optional*):
            The log-probability, in nats, that each token was drawn with; `None` for a token whose log-probability is
            not known. If `None`, the engine knows none of them.
    """

    token_ids: list[list[int]]
    logps: list[list[float | None]] | None = None


class Engine(Protocol):
    """An engine, as every trainer sees it."""

    def sync(self) -> None:
        """Takes the policy's weights over into the engine's own format. Collective."""

    def sample(self, prompts: list[list[int]], images: list | None = None) -> Samples:
        """
        Draws one completion for each prompt.

        Args:
            prompts (`list[list[int]]`): Token ids of each prompt.
            images (`list`, *optional*): The images of each prompt, for a model that reads them.
        """


class ScoringEngine(Engine, Protocol):
    """An engine that also scores tokens which it did not draw."""

    def score(self, sequences: list[list[int]]) -> list[list[float]]:
        """
        Computes the log-probabilities of given tokens, in nats, in the engine's numbers and at temperature 1.

        Args:
            sequences (`list[list[int]]`): Token ids of whole sequences.

        Returns:
            `list[list[float]]`: for each sequence one value for each token but the first.
        """


@dataclass(frozen=True)
class RolloutNoise:
    """
    Adaptive quantization noise of one generation (QeRL eq. 7-8).

    Parameters:
        sigma (`float`): Standard deviation; 0 means the clean weights.
        seed (`int`): The run's seed.
        step (`int`): The optimizer step that the generation belongs to.
        draw (`int`): Which of the step's generations it is, from 0.
    """

    sigma: float = 0.0
    seed: int = 0
    step: int = 0
    draw: int = 0
