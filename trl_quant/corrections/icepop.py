"""`icepop`: drops tokens on which sampler and trainer disagree (IcePop, Ring-1T report, arXiv 2510.18855).

    J = E[ M(w; alpha, beta) * min(R A, clip(R, 1 - e_lo, 1 + e_hi) A) ]
    M(w; alpha, beta) = w if alpha <= w <= beta, else 0

| paper | here |
|---|---|
| `alpha`, `beta` | `low` = 0.5, `high` = 5 |
| `k = pi_train(theta_old) / pi_infer(theta_old)` | `w = exp(old_logps - rollout_logps)` |

A token of weight 0 still counts in the loss's denominator. TRL's `token_mask` with both of its bounds does the same. At
the level of sequences, where `w` is the product over a sequence, TRL's `sequence_mask` does.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch

from .base import CorrectionInputs, CorrectionOutput, Range, check_ranges
from .diagnostics import diagnose, rollout_ratio, unit_weights
from .traits import Correction


@dataclass(frozen=True)
class IcePop(Correction):
    """The weight is `w` within `[low, high]` and 0 outside."""

    low: Annotated[float, Range(0, 1)] = 0.5
    """The smallest `w` of a token that is kept."""
    high: Annotated[float, Range(1)] = 5.0
    """The largest `w` of a token that is kept."""

    weighs_prefixes: ClassVar[bool] = True

    def __post_init__(self):
        check_ranges(self)

    def __call__(self, inputs: CorrectionInputs) -> CorrectionOutput:
        ratio = rollout_ratio(inputs)
        w = unit_weights(inputs, ratio)
        dropped = (w < self.low) | (w > self.high)
        metrics, _ = diagnose(inputs, ratio, dropped=dropped)
        return CorrectionOutput(torch.where(dropped, 0.0, w), metrics=metrics)
