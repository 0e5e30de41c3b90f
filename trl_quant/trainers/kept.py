"""
Truncated sampling in a trainer: from an engine's samples to the policy that scores and trains on them.

[`~policy.kept`] says what is computed, [`~trainers.carried`] when TRL calls what is here.
"""

import logging

import torch
from torch import Tensor, nn

from ..config.truncation import replays, truncating_options, why_not_replayed
from ..corrections.batch import counted
from ..policy.kept import KEPT, Truncation
from ..policy.packed import PackedRows
from ..rollout.base import RolloutEngine
from ..rollout.kept import Kept, then
from ..rollout.trl_face import Turn
from .carried import CarriedStep


logger = logging.getLogger(__name__)


class KeptRows(nn.Module):
    """
    Stands in for a model where TRL calls it with padded rows, and renormalises its log-probabilities.

    Parameters:
        rows: The model, or what stands in for it.
        column (`list[tuple | None]`): The fields of [`~rollout.kept.Kept`] of all rows. TRL may call with some at a
            time.

    Attributes:
        calls (`list[Truncation]`): That of each call.
    """

    def __init__(self, rows, column: list[tuple | None]):
        super().__init__()
        self.rows, self.column = rows, column
        self.calls: list[Truncation] = []
        self._done = 0

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor, **kwargs):
        """Computes what `rows` computes, over the tokens that were left for the next rows."""
        column = self.column[self._done : self._done + len(input_ids)]
        self._done += len(input_ids)
        self.calls.append(truncation_of(column, labels))
        given = {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
        if isinstance(self.rows, PackedRows):
            return self.rows(**given, **{KEPT: self.calls[-1]}, **kwargs)
        with self.calls[-1].scoring(labels):
            return self.rows(**given, **kwargs)


def truncation_of(column: list[tuple | None], labels: Tensor) -> Truncation:
    """
    Returns what was left for the tokens of padded rows.

    Args:
        column (`list[tuple | None]`): The fields of [`~rollout.kept.Kept`] of each row; `None` where it is not known.
        labels (`torch.Tensor` of shape `(B, S)`): The rows' tokens, -100 outside of the completions.
    """
    found = [None if fields is None else Kept(*fields) for fields in column]
    known = [kept for kept in found if kept is not None]
    places, number = torch.full(labels.shape, -1), 0
    for row, kept in enumerate(found):
        if kept is None:
            continue
        scored = (labels[row] != -100).nonzero()[:, 0].cpu()
        entries = torch.arange(number, number + len(kept.counts))[: len(scored)]
        entries[kept.counts[: len(scored)] < 0] = -1
        places[row, scored[: len(entries)]] = entries
        number += len(kept.counts)
    nothing = [torch.empty(0, dtype=torch.int32)]
    counts = torch.cat([*nothing, *(kept.counts for kept in known)]).clamp(min=0).long()
    starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    words = torch.cat([*nothing, *(kept.words for kept in known)])
    vocabulary = max((kept.vocabulary for kept in known), default=0)
    return Truncation(*(x.to(labels.device) for x in (words, starts, places)), vocabulary)


class KeptStep(CarriedStep):
    """
    What truncation left for each token of a trainer's samples. Its column has the fields of a [`~rollout.kept.Kept`]
    for each row, on the CPU. The policy and its reference are renormalised over the same tokens.
    """

    column = KEPT

    def of_turn(self, turn: Turn) -> list[Kept | None] | None:
        return turn.kept

    def joined(self, before: Kept | None, after: Kept, so_far: int) -> Kept:
        return then(before, after, so_far)

    def check_missing(self) -> None:
        if self.trainer.args.truncation_replay:
            raise ValueError(
                f"`truncation_replay`=True, but {type(self.trainer).__name__} sampled without the tokens that were "
                "left to draw from. An engine must return them with its samples, and a subclass that overrides "
                "`_generate_single_turn` must call `super()`. Else leave the field unset."
            )

    def padded(self, mask: Tensor) -> list[tuple | None]:
        return [None if kept is None else tuple(kept) for kept in self.samples]

    def standing_in(self, rows, column: list[tuple | None]) -> KeptRows:
        return KeptRows(rows, column)

    def log(self, batch: dict[str, Tensor]) -> None:
        """Logs the policy's mean probability of what was left, and the share of tokens scored among all."""
        found = sum(mass for rows in self.passes for call in rows.calls for mass in call.masses)
        tokens = counted(batch).sum().double().unsqueeze(0)
        mass, known, scored = self.trainer.accelerator.reduce(torch.cat([found, tokens]), "sum").tolist()
        values = {"truncation/kept_mass": mass / known} if known else {}
        self.trainer.log_values(values | {"truncation/unreplayed": max(1 - known / max(scored, 1), 0.0)})


def kept_step(trainer, sampler: RolloutEngine) -> KeptStep | None:
    """
    Returns the step for a trainer that samples from an engine; `None` if the policy is not renormalised.

    Raises:
        `ValueError`: `truncation_replay=True`, and the engine does not return what was left.
    """
    args = trainer.args
    if not replays(args):
        return None
    why_not = why_not_replayed(args, {"rollout_func": getattr(trainer, "rollout_func", None)})
    if why_not is None and not sampler.returns_kept:
        why_not = (
            f"the {type(sampler).__name__} of this run does not return it (an engine that does says `returns_kept`)"
        )
    if why_not is None:
        return KeptStep(trainer)
    if args.truncation_replay:
        raise ValueError(f"`truncation_replay`=True cannot act: {why_not}. Leave it unset, or use the embedded engine.")
    logger.warning(
        "%s: the sampler draws from another distribution than the trainer scores with, and `mismatch/*` contains the "
        "difference. What truncation left to draw from is not known: %s.",
        " and ".join(f"`{name}`={value!r}" for name, value in truncating_options(args).items()),
        why_not,
    )
    return None
