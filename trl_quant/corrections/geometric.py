"""`geometric`: drops sequences whose mean log ratio is far from 0 (Geo-Mask, part 3 of Liu and Li, "When Speed Kills
Stability"; SkyRL's sequence mask `geometric`, verl's `seq_mean_k1`).

    J = E[ M(y) * min(R A, clip(R, 1 - e_lo, 1 + e_hi) A) ]
    M(y) = 1 if 1 - e <= (prod_t w_t)^(1/T) <= 1 + e, else 0

| source | here |
|---|---|
| `C_low`, `C_high` (SkyRL: 0.99, 1.01; verl: 0.999, 1.001) | `1 - epsilon`, `1 + epsilon`; `epsilon` = 0.01 |
| `pi_old / mu_old` | `w_t = exp(old_logps_t - rollout_logps_t)` |
| `T` | the unmasked, scored tokens of a sequence |

The geometric mean of the ratios, unlike their product, does not grow with the length, so long sequences are not dropped
for being long. The method filters and does not weight: the tokens of a kept sequence have weight 1. The tokens of a
dropped one have weight 0 and still count in the loss's denominator.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from .base import CorrectionInputs, CorrectionOutput, Range, check_ranges
from .diagnostics import diagnose, rollout_ratio
from .traits import Correction


@dataclass(frozen=True)
class Geometric(Correction):
    """The weight is 1 for a sequence whose geometric mean of `w` is within `epsilon` of 1, and 0 for all others."""

    epsilon: Annotated[float, Range(0, 1, open_low=True)] = 0.01
    """The largest distance from 1 that the geometric mean may have."""

    has_levels: ClassVar[bool] = False

    def __post_init__(self):
        check_ranges(self)

    def __call__(self, inputs: CorrectionInputs) -> CorrectionOutput:
        ratio = rollout_ratio(inputs)
        length = ratio.scored.sum(1, keepdim=True).clamp(min=1)
        mean = (ratio.log_w.sum(1, keepdim=True) / length).exp()
        dropped = ratio.counted & ((mean - 1).abs() > self.epsilon)
        metrics, _ = diagnose(inputs, ratio, dropped=dropped)
        return CorrectionOutput((~dropped).to(ratio.w.dtype), metrics=metrics)
