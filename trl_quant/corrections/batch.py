"""A correction applied to a scored batch, which is a dict of tensors under TRL's names.

| read | symbol |
|---|---|
| `sampling_per_token_logps` | `rollout_logps` |
| `old_per_token_logps` | `old_logps` |
| `advantages`, `completion_mask`, `tool_mask` | `A`, the mask |

| written | symbol |
|---|---|
| `importance_sampling_ratio` | the weights |
| `old_per_token_logps` | another proximal policy, where the correction has one |
| `clip_low`, `clip_high` | a token's own clip bounds, where the correction has them |
"""

from collections.abc import Callable

from torch import Tensor

from .base import CorrectionInputs, CorrectionOutput


def counted(batch: dict[str, Tensor]) -> Tensor:
    """The mask `(B, T)` of the tokens that count: completions, without what tools wrote."""
    return batch["completion_mask"] * batch.get("tool_mask", 1)


def corrected(
    correction: Callable[[CorrectionInputs], CorrectionOutput], batch: dict[str, Tensor], level: str
) -> CorrectionOutput:
    """What a correction makes of a batch."""
    return correction(
        CorrectionInputs(
            rollout_logps=batch["sampling_per_token_logps"],
            old_logps=batch["old_per_token_logps"],
            advantages=batch["advantages"],
            mask=counted(batch),
            level=level,
        )
    )


def write(output: CorrectionOutput, batch: dict[str, Tensor]) -> None:
    """Has the loss use it."""
    batch["importance_sampling_ratio"] = output.weights
    if output.old_logps is not None:
        batch["old_per_token_logps"] = output.old_logps
    if output.clip_high is not None:
        batch["clip_low"], batch["clip_high"] = output.clip_low, output.clip_high
