"""
What an engine returns with each token of its samples, on its way to the forward passes that score and train on them.

TRL calls our trainer at several places between a generation and its losses; a [`CarriedStep`] holds what they share.
There are two: [`~trainers.routing.RoutingStep`] for the experts of a mixture, [`~trainers.kept.KeptStep`] for the
tokens that a truncated distribution has left.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..rollout.trl_face import Turn, rows_of_turns


class CarriedStep(ABC):
    """
    What was returned with a trainer's samples, and its state between two calls of TRL.

    The calls in their order, with what is read and written at each:

    1. TRL samples, and `vllm_generation` records what each turn returned.
    2. `_generate` ends. [`take`] keeps that of each completion.
    3. TRL scores the old policy and the reference. [`rows`] adds it to these passes.
    4. `_generate_and_score_completions` ends. [`write`] adds the [`column`] to the batch. A critic may still score the
       policy.
    5. TRL shuffles the batch with this column, and splits it into micro-batches.
    6. `_compute_loss` begins, for each micro-batch of each update. [`during_loss`] opens its column.
    7. TRL's loss scores the current policy. [`rows`] adds it.
    8. `_compute_loss` ends. [`during_loss`] logs what the pass has measured, and drops the column. The backward pass
       may compute layers again, with the arguments of the pass in 7.

    Args:
        trainer: The trainer, whose engine returns it.

    Attributes:
        samples (`list` or `None`): That of each completion of the newest generation, until its first loss; `None` for a
            completion of which it is not known.
        opened: The column of the micro-batch whose loss TRL is computing; `None` outside of a loss.
        passes (`list`): What stands in for the model in the passes of this loss.
    """

    column: ClassVar[str]

    def __init__(self, trainer):
        self.trainer = trainer
        self.samples: list | None = None
        self.opened: Any = None
        self.passes: list = []

    @abstractmethod
    def of_turn(self, turn: Turn) -> list | None:
        """Returns what a turn has returned with each of its completions; `None` if nothing."""

    @abstractmethod
    def joined(self, before: Any, after: Any, so_far: int) -> Any:
        """
        Returns that of a completion's turns so far, `before`, which may be `None`, and of the next, `after`, which
        began with `so_far` tokens, also of tools.
        """

    @abstractmethod
    def check_missing(self) -> None:
        """Raises `ValueError` if the run needs what was not returned with a generation."""

    @abstractmethod
    def padded(self, mask: Tensor) -> Any:
        """Returns the column of the newest generation. `mask` is 1 on the tokens of its rows, (B, S)."""

    @abstractmethod
    def standing_in(self, rows, column: Any) -> Any:
        """Returns what stands in for `rows`, which TRL calls with padded rows: it adds their `column`."""

    @abstractmethod
    def log(self, batch: dict[str, Tensor]) -> None:
        """Logs over all ranks what the passes of the loss of a micro-batch have measured."""

    def fits(self, model: nn.Module) -> bool:
        """Whether a model takes what is carried."""
        return True

    def take(self, turns: list[Turn], prompts: list[list[int]], completions: list[list[int]]) -> None:
        """
        Takes what was returned with a generation. A token keeps what the turn returned that sampled it.

        Args:
            turns, prompts, completions: As [`~rollout.trl_face.rows_of_turns`] takes them.

        Raises:
            `ValueError`: The run needs it, and the engine has returned nothing.
        """
        self.samples = [None] * len(prompts)
        if not turns or any(self.of_turn(turn) is None for turn in turns):
            self.check_missing()
            return
        for turn, rows in rows_of_turns(turns, prompts, completions):
            for place, row in rows:
                found, so_far = self.of_turn(turn)[place], len(turn.prompts[place]) - len(prompts[row])
                if found is not None:
                    self.samples[row] = self.joined(self.samples[row], found, so_far)

    def rows(self, rows, model: nn.Module, mask: Tensor):
        """
        Returns what stands in for a model that TRL calls with padded rows.

        Args:
            rows: The model, or what stands in for it already.
            model (`nn.Module`): The model. One that does not take what is carried, such as a teacher, gets nothing.
            mask (`torch.Tensor` of shape `(B, S)`): 1 on the tokens of all rows.
        """
        if self.opened is None and self.samples is None:
            return rows
        if not self.fits(self.trainer.accelerator.unwrap_model(model)):
            return rows
        self.passes.append(self.standing_in(rows, self.padded(mask) if self.opened is None else self.opened))
        return self.passes[-1]

    def write(self, batch: dict[str, Any]) -> None:
        """Writes the column of a generation into its batch."""
        if self.samples is not None:
            batch[self.column] = self.padded(mask_of(batch))

    @contextmanager
    def during_loss(self, batch: dict[str, Any]) -> Iterator[None]:
        """Context of TRL's `_compute_loss` on a micro-batch."""
        self.opened, self.samples, self.passes = batch.get(self.column), None, []
        try:
            yield
            if self.passes:
                self.log(batch)
        finally:
            self.opened, self.passes = None, []


def mask_of(batch: dict[str, Tensor]) -> Tensor:
    """Returns the mask of a batch's rows, (B, S): 1 on the tokens of prompts and completions."""
    return torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
