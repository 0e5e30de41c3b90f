"""The protocol of an engine: the methods that any trainer needs, without a host library.

An engine holds a copy of the policy in its own number format. A trainer updates that copy with `sync` and draws
completions from it with `sample`:

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
            The sampled tokens of each completion, without the prompt.
        logps (`list[list[float | None]]`, *optional*):
            The log-probability, in nats, with which each token was sampled; `None` for a token where it is unknown. If
            the whole argument is `None`, the engine returns no log-probabilities.
    """

    token_ids: list[list[int]]
    logps: list[list[float | None]] | None = None


class Engine(Protocol):
    """The methods that every trainer calls."""

    def sync(self) -> None:
        """Copies the policy's weights into the engine, in the engine's own format. Trainers call it on all ranks."""

    def sample(self, prompts: list[list[int]], images: list | None = None) -> Samples:
        """
        Samples one completion for each prompt.

        Args:
            prompts (`list[list[int]]`): Token ids of each prompt.
            images (`list`, *optional*): The images of each prompt, for a vision-language model.
        """


class ScoringEngine(Engine, Protocol):
    """An engine that can also score given tokens."""

    def score(self, sequences: list[list[int]]) -> list[list[float]]:
        """
        Computes the log-probabilities of given tokens, in nats, with the engine's arithmetic and at temperature 1.

        Args:
            sequences (`list[list[int]]`): Token ids of whole sequences.

        Returns:
            `list[list[float]]`: For each sequence, one value for each token except the first.
        """


@dataclass(frozen=True)
class RolloutNoise:
    """
    Adaptive quantization noise of one generation (QeRL eq. 7-8).

    Parameters:
        sigma (`float`): Standard deviation of the noise; 0 for none.
        seed (`int`): The run's seed.
        step (`int`): The optimizer step that the generation belongs to.
        draw (`int`): Index, from 0, of the generation within its step.
    """

    sigma: float = 0.0
    seed: int = 0
    step: int = 0
    draw: int = 0
