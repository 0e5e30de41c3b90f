"""`acr`: adaptive clipping range (QuRL, section 4.2, eq. 6-9).

    J = E[ min(w, C) * min(R A, clip(R, 1 - e_lo, (1 + e_hi) / r) A) ],    r = min(1, C / w)

| paper | here |
|---|---|
| `C` | `cap`, >= 1 |
| `w = pi_prox / pi_behav` | `exp(old_logps - rollout_logps)` |
| `r`, behaviour over truncated behaviour policy (eq. 7) | `r = min(1, C / w)` |
| `e_lo`, `e_hi` | `epsilon_low`, `epsilon_high`, the loss's own |

Truncation multiplies the objective by `r`, and with it the bound that `R` meets: `r (1 + e_hi)` instead of `1 + e_hi`
(eq. 8). Dividing the bound by `r` undoes that where the cap bites; elsewhere `r = 1` and this is TIS, bit for bit.
"""

from dataclasses import dataclass

import torch

from .base import CorrectionInputs, CorrectionOutput, check
from .diagnostics import diagnose, rollout_ratio


@dataclass(frozen=True)
class ACR:
    """Weight `min(w, cap)`, and an upper clip bound that widens where the cap bites."""

    cap: float = 2.0
    epsilon_low: float = 0.2
    epsilon_high: float | None = None  # as `epsilon_low`

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
