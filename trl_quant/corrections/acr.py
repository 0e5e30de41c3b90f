"""`acr`: adaptive clipping range (QuRL, section 4.2, eq. 6-9).

    J = E[ min(w, C) * min(R A, clip(R, 1 - e_lo, (1 + e_hi) / r) A) ],    r = min(1, C / w)

| paper | here |
|---|---|
| `C` | `cap`, >= 1 |
| `w = pi_prox / pi_behav` | `exp(old_logps - rollout_logps)` |
| `r`, behaviour over truncated behaviour policy (eq. 7) | `r = min(1, C / w)` |
| `e_lo`, `e_hi` | `epsilon_low`, `epsilon_high`, as in the loss |

Truncation multiplies the objective by `r`, and with it the upper bound on `R`, which becomes `r (1 + e_hi)` instead of
`1 + e_hi` (eq. 8). Dividing the bound by `r` undoes this where the cap acts. Elsewhere `r = 1`, and the result is that
of `tis`, bit for bit.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from .base import CorrectionInputs, CorrectionOutput, Range, check_ranges
from .diagnostics import diagnose, rollout_ratio
from .traits import Correction


@dataclass(frozen=True)
class ACR(Correction):
    """The weight is `min(w, cap)`, and the upper clip bound widens where the cap acts."""

    cap: Annotated[float, Range(1)] = 2.0
    """`C`, the largest weight."""
    epsilon_low: Annotated[float, Range(0, 1)] = 0.2
    """`e_lo`: the loss clips `R` below `1 - e_lo`."""
    epsilon_high: Annotated[float | None, Range(0)] = None
    """`e_hi`: the loss clips `R` above `1 + e_hi`, which the cap widens. `None` stands for `epsilon_low`."""

    aliases: ClassVar[dict[str, str]] = {"cap": "is_cap", "epsilon_low": "epsilon", "epsilon_high": "epsilon_high"}
    token_only: ClassVar[bool] = True
    moves_clip_bounds: ClassVar[bool] = True

    def __post_init__(self):
        check_ranges(self)

    def __call__(self, inputs: CorrectionInputs) -> CorrectionOutput:
        ratio = rollout_ratio(inputs)
        metrics, _ = diagnose(inputs, ratio, self.cap)
        r = (self.cap / ratio.w).clamp(max=1.0)
        high = self.epsilon_low if self.epsilon_high is None else self.epsilon_high
        return CorrectionOutput(
            weights=ratio.w.clamp(max=self.cap),
            clip_low=torch.full_like(r, 1 - self.epsilon_low),
            clip_high=(1 + high) / r,
            metrics=metrics,
        )


def rescued(logps: Tensor, batch: dict[str, Tensor], mask: Tensor, epsilon_high: float) -> Tensor:
    """
    Measures how many tokens the wider bound rescues: those with `A > 0` and `1 + e_hi < R <= (1 + e_hi) / r`, whose
    gradient the loss's own bound would have cut.

    Args:
        logps (`torch.Tensor` of shape `(B, T)`): Log-probabilities of the current policy.
        batch (`dict`): The scored batch (see [`~corrections.batch`]).
        mask (`torch.Tensor` of shape `(B, T)`): 1 on the tokens that count.
        epsilon_high (`float`): `e_hi`.

    Returns:
        `torch.Tensor`: the share of rescued tokens among those that count, a scalar.
    """
    old = batch.get("old_per_token_logps")
    ratio = torch.exp(logps - (logps if old is None else old))
    advantages = batch["advantages"] if batch["advantages"].dim() == 2 else batch["advantages"][:, None]
    kept = (advantages > 0) & (ratio > 1 + epsilon_high) & (ratio <= batch["clip_high"])
    return (kept * mask).sum() / mask.sum().clamp(min=1)
