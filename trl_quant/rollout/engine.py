"""The protocol of an engine: the methods that any trainer needs, without a host library.

An engine holds a copy of the policy in its own number format. A trainer updates that copy with `sync` and draws
completions from it with `sample`:

    class Shouting:
        def sync(self) -> None: ...

        def sample(self, requests, enough=None) -> Samples:
            return Samples([[33] for _ in requests], [[0.0] for _ in requests])

`trl_face` presents an engine to TRL's trainers. The engines of this package add noise, metrics and checkpoints to this
protocol; they inherit from [`~rollout.base.RolloutEngine`].
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol


# Says, from which requests of a call have ended, whether the engine may leave the others unfinished
Enough = Callable[[list[bool]], bool]
# A processor's results that have a value for each token of a prompt: 0 for text
OF_EACH_TOKEN = ("token_type_ids", "mm_token_type_ids")


@dataclass(frozen=True)
class Request:
    """
    A request for one completion.

    Parameters:
        prompt (`list[int]`): Token ids of the prompt.
        images (`list`, *optional*): The images of the prompt, for a vision-language model.
        copies (`int`, *optional*, defaults to `1`):
            Number of consecutive requests, over all ranks, that have this prompt. A server samples them together.
        sampled (`list[int]`, *optional*):
            The completion's tokens so far, of an earlier call. The engine goes on after them, up to the same length.
    """

    prompt: list[int]
    images: list | None = None
    copies: int = 1
    sampled: list[int] = field(default_factory=list)

    @property
    def given(self) -> list[int]:
        """All tokens that the engine starts from."""
        return [*self.prompt, *self.sampled]


def requests_for(prompts: list[list[int]], images: list | None = None, copies: int = 1) -> list[Request]:
    """
    Returns a request for each prompt.

    Args:
        prompts (`list[list[int]]`): Token ids, one list for each completion.
        images (`list`, *optional*): The images of each prompt.
        copies (`int`, *optional*, defaults to `1`): Number of consecutive copies of each prompt.
    """
    rows = [None] * len(prompts) if images is None else images
    return [Request(prompt, row, copies) for prompt, row in zip(prompts, rows, strict=True)]


@dataclass(frozen=True)
class Samples:
    """
    One completion for each request.

    Parameters:
        token_ids (`list[list[int]]`):
            The tokens that this call sampled of each completion.
        logps (`list[list[float | None]]`, *optional*):
            The log-probability, in nats, with which each token was sampled; `None` for a token where it is unknown. If
            the whole argument is `None`, the engine returns no log-probabilities.
        ended (`list[bool]`, *optional*): Whether each completion has ended; `None` if all have.
        routing (`list[torch.Tensor | None]`, *optional*):
            For a mixture of experts, the experts of each request's tokens ([`~rollout.routing`]); `None` for a request
            that was not computed. If the whole argument is `None`, the engine returns no routing.
        kept (`list[Kept | None]`, *optional*):
            The tokens that truncation left to draw each sampled token from ([`~rollout.kept`]); `None` for a request
            that was not computed. If the whole argument is `None`, the engine does not return them.
    """

    token_ids: list[list[int]]
    logps: list[list[float | None]] | None = None
    ended: list[bool] | None = None
    routing: list[Any] | None = None
    kept: list[Any] | None = None


class Engine(Protocol):
    """The methods that every trainer calls."""

    def sync(self) -> None:
        """Copies the policy's weights into the engine, in the engine's own format. Trainers call it on all ranks."""

    def sample(self, requests: list[Request], enough: Enough | None = None) -> Samples:
        """
        Samples one completion for each request, in their order. It holds nothing between two calls.

        If `enough` is given, it is asked after each step, or only after a step with which a completion has ended; an
        engine behind a server also asks while none has. Once it says so, the other completions are returned with the
        tokens that they have, which may be none. A later call goes on with them: see [`Request`]. Ranks that form one
        engine are asked about the requests of all of them, in the order of the ranks, and must answer alike. The engine
        behind a server asks only the main process, about the requests of all ranks.
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
