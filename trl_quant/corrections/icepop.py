"""`icepop`: tokens on which sampler and trainer disagree are dropped (IcePop, Ring-1T report, arXiv 2510.18855).

    J = E[ M(w; alpha, beta) * min(R A, clip(R, 1 - e_lo, 1 + e_hi) A) ]
    M(w; alpha, beta) = w if alpha <= w <= beta, else 0

| paper | here |
|---|---|
| `alpha`, `beta` | `low` = 0.5, `high` = 5 |
| `k = pi_train(theta_old) / pi_infer(theta_old)` | `w = exp(old_logps - rollout_logps)` |

A token of weight 0 still counts in the loss's denominator. TRL's `token_mask` with both of its bounds is the same; at
the level of sequences, where `w` is the product over a sequence, its `sequence_mask` is.
"""

from dataclasses import dataclass

import torch

from .base import CorrectionInputs, CorrectionOutput, check
from .diagnostics import diagnose, rollout_ratio, unit_weights


@dataclass(frozen=True)
class IcePop:
    """Weight `w` within `[low, high]`, 0 outside."""

    low: float = 0.5
    high: float = 5.0

    def __post_init__(self):
        check("low", self.low, 0, 1)
        check("high", self.high, 1)

    def __call__(self, inputs: CorrectionInputs) -> CorrectionOutput:
        ratio = rollout_ratio(inputs)
        w = unit_weights(inputs, ratio)
        dropped = (w < self.low) | (w > self.high)
        metrics, _ = diagnose(inputs, ratio, dropped=dropped)
        return CorrectionOutput(torch.where(dropped, 0.0, w), metrics=metrics)
