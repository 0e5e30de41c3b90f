"""Applies a correction to a scored batch, a dict of tensors under TRL's names.

| read | symbol |
|---|---|
| `sampling_per_token_logps` | `rollout_logps` |
| `old_per_token_logps` | `old_logps` |
| `advantages`, `completion_mask`, `tool_mask` | `A`, the mask |
| `ages` | the age of each token, in generations; there only if a generation returns older ones |
| `turns` | the turn of each token, from 1; there only where masked tokens are left out of the rows |

| written | symbol |
|---|---|
| `importance_sampling_ratio` | the weights, unless they are TRL's own |
| `old_per_token_logps` | another proximal policy, where the correction has one |
| `clip_low`, `clip_high` | a token's own clip bounds, where the correction has them |
"""

from collections.abc import Callable

import torch
from torch import Tensor

from .base import CorrectionInputs, CorrectionOutput


def counted(batch: dict[str, Tensor]) -> Tensor:
    """Returns the mask `(B, T)` of the tokens that count: completion tokens that no tool wrote."""
    return batch["completion_mask"] * batch.get("tool_mask", 1)


def corrected(
    correction: Callable[[CorrectionInputs], CorrectionOutput], batch: dict[str, Tensor], level: str
) -> CorrectionOutput:
    """
    Applies a correction to a batch, without changing the batch.

    Args:
        correction (`Callable`): One of [`~corrections.CORRECTIONS`], with its hyperparameters set.
        batch (`dict[str, torch.Tensor]`): The scored batch, with the tensors of this module's first table.
        level (`str`): The unit that gets a weight, as in [`CorrectionInputs`].

    Raises:
        `ValueError`: if shapes do not match, or if `old_per_token_logps` or `advantages` is NaN on a counted token.
    """
    return correction(
        CorrectionInputs(
            rollout_logps=batch["sampling_per_token_logps"],
            old_logps=batch["old_per_token_logps"],
            advantages=batch["advantages"],
            mask=counted(batch),
            level=level,
            ages=batch.get("ages"),
            turns=batch.get("turns"),
        )
    )


def write(output: CorrectionOutput, batch: dict[str, Tensor]) -> None:
    """Writes a correction's output into the batch, where the loss reads it."""
    if output.weights is not None:
        batch["importance_sampling_ratio"] = output.weights
    if output.old_logps is not None:
        batch["old_per_token_logps"] = output.old_logps
    if output.clip_high is not None:
        batch["clip_low"], batch["clip_high"] = output.clip_low, output.clip_high


def joined(batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Concatenates the micro-batches of a generation, all of one `T`, and keeps only what a correction reads."""
    names = ("sampling_per_token_logps", "old_per_token_logps", "advantages", "completion_mask", "tool_mask", "ages")
    return {name: torch.cat([batch[name] for batch in batches]) for name in names if name in batches[0]}


def sampling_metrics(batch: dict[str, Tensor], weights: Tensor, gather: Callable[[Tensor], Tensor]) -> dict[str, float]:
    """
    Computes TRL's `sampling/*` metrics, with `weights` `(B, T)` in place of TRL's ratio. `gather` concatenates a tensor
    over all ranks, so every rank must call this function.
    """
    mask = counted(batch).bool()
    difference = (batch["old_per_token_logps"] - batch["sampling_per_token_logps"]).abs()
    values = {
        "importance_sampling_ratio": weights[mask],
        "sampling_logp_difference": difference[mask & ~difference.isnan()],
    }
    values = {name: value if value.numel() else value.new_zeros(1) for name, value in values.items()}
    ratio = values["importance_sampling_ratio"]
    metrics = {"sampling/importance_sampling_ratio/min": gather(ratio.min()).min().item()}
    for name, value in values.items():
        metrics[f"sampling/{name}/mean"] = gather(value.mean()).mean().item()
        metrics[f"sampling/{name}/max"] = gather(value.max()).max().item()
    return metrics
