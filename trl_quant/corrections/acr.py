"""`acr`: adaptive clipping range (QuRL, section 4.2, eq. 6-9).

    J = E[ min(w, C) * min(R A, clip(R, 1 - e_lo, (1 + e_hi) / r) A) ],    r = min(1, C / w)

| paper | here |
|---|---|
| `C` | `cap`, >= 1 |
| `w = pi_prox / pi_behav` | `exp(old_logps - rollout_logps)` |
| `r`, behaviour over truncated behaviour policy (eq. 7) | `r = min(1, C / w)` |
| `e_lo`, `e_hi` | `epsilon_low`, `epsilon_high`, as in the loss |

Truncation multiplies the objective by `r`, and with it the upper bound on `R`: `r (1 + e_hi)` instead of `1 + e_hi`
(eq. 8). Dividing the bound by `r` undoes that where the cap bites; elsewhere `r = 1` and this is TIS, bit for bit.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .base import CorrectionInputs, CorrectionOutput, check
from .diagnostics import diagnose, rollout_ratio


@dataclass(frozen=True)
class ACR:
    """Weight `min(w, cap)`, and an upper clip bound that widens where the cap bites."""

    cap: float = 2.0
    epsilon_low: float = 0.2
    epsilon_high: float | None = None  # default: `epsilon_low`

    token_only: ClassVar[bool] = True

    def __post_init__(self):
        check("cap", self.cap, 1)
        check("epsilon_low", self.epsilon_low, 0, 1)
        if self.epsilon_high is not None:
            check("epsilon_high", self.epsilon_high, 0)

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
    Tokens whose gradient the wider bound keeps: `A > 0` and `1 + e_hi < R <= (1 + e_hi) / r`.

    Args:
        logps (`torch.Tensor` of shape `(B, T)`): Of the current policy.
        batch (`dict`): The scored batch, see [`~corrections.batch`].
        mask (`torch.Tensor` of shape `(B, T)`): 1 on the tokens that count.
        epsilon_high (`float`): `e_hi`.

    Returns:
        `torch.Tensor`: their share of the tokens that count, a scalar.
    """
    old = batch.get("old_per_token_logps")
    ratio = torch.exp(logps - (logps if old is None else old))
    advantages = batch["advantages"] if batch["advantages"].dim() == 2 else batch["advantages"][:, None]
    kept = (advantages > 0) & (ratio > 1 + epsilon_high) & (ratio <= batch["clip_high"])
    return (kept * mask).sum() / mask.sum().clamp(min=1)
