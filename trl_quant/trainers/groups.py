"""The completions of a prompt, finished or not, as a [`~trainers.pool.RolloutPool`] holds them."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..rollout.kept import Kept, then
from ..rollout.routing import continued


@dataclass
class Completion:
    """
    A completion, finished or not.

    Parameters:
        token_ids (`list[int]`): Its tokens so far.
        logps (`list[float | None]`): The log-probability, in nats, with which each was sampled; `None` if unknown.
        versions (`list[int]`): The generation that sampled each token.
        has_ended (`bool`): Whether the completion has finished.
        routing (`torch.Tensor` or `None`):
            The [`~rollout.routing`] of its prompt and its tokens so far, each as it was first computed; `None` if it is
            not known of all.
        kept ([`~rollout.kept.Kept`] or `None`): What truncation left for its tokens; `None` if it is not known.
    """

    token_ids: list[int] = field(default_factory=list)
    logps: list[float | None] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    has_ended: bool = False
    routing: Tensor | None = None
    kept: Kept | None = None

    def add(
        self,
        token_ids: list[int],
        logps: list,
        version: int,
        has_ended: bool,
        routing: Tensor | None,
        kept: Kept | None = None,
    ) -> None:
        """
        Adds what a generation, the `version`, has sampled. If an engine samples tokens without returning their routing,
        the completion loses what it had: a later call computes them again, with the experts of newer weights.
        """
        is_known = self.routing is not None or not self.token_ids
        if routing is not None and is_known:
            self.routing = continued(self.routing, routing)
        elif token_ids:
            self.routing = None
        if kept is not None:
            self.kept = then(self.kept, kept, len(self.token_ids))
        self.token_ids += token_ids
        self.logps += logps
        self.versions += [version] * len(token_ids)
        self.has_ended = has_ended

    def state_dict(self) -> dict:
        """Returns the completion as a checkpoint holds it."""
        logps = [math.nan if logp is None else logp for logp in self.logps]
        return {
            "token_ids": torch.tensor(self.token_ids, dtype=torch.int32),
            "logps": torch.tensor(logps, dtype=torch.float64),
            "versions": torch.tensor(self.versions, dtype=torch.int32),
            "has_ended": self.has_ended,
            "routing": self.routing,
            "kept": None if self.kept is None else tuple(self.kept),
        }

    @classmethod
    def from_state_dict(cls, state: dict) -> "Completion":
        """Returns the completion that [`state_dict`] has described."""
        logps = [None if math.isnan(logp) else logp for logp in state["logps"].tolist()]
        ids, versions = state["token_ids"].tolist(), state["versions"].tolist()
        kept = state.get("kept")
        return cls(
            ids, logps, versions, state["has_ended"], state.get("routing"), None if kept is None else Kept(*kept)
        )


@dataclass
class Group:
    """
    The completions of one prompt.

    Parameters:
        place (`int`): Its place, from 0, in the order in which the run's groups start.
        row (`int`): The row of the training data.
        prompt (`list[int]`): Token ids of the prompt.
        began (`int`): The generation in which it started.
        completions (`list[Completion]`): Its completions.
    """

    place: int
    row: int
    prompt: list[int]
    began: int
    completions: list[Completion]

    @property
    def has_finished(self) -> bool:
        return all(completion.has_ended for completion in self.completions)
