"""`decoupled`: importance sampling from the quantized to the full-precision old actor (QuRL, section 4.1, eq. 4).

    J = E[ w * min(R A, clip(R, 1 - e_lo, 1 + e_hi) A) ]

| paper | here |
|---|---|
| `pi_behav`, the quantized old actor | `rollout_logps` |
| `pi_prox`, the full-precision old actor | `old_logps` |
| `pi_prox / pi_behav` | `w = exp(old_logps - rollout_logps)`, no cap |

Each token's estimate is unbiased if the sampler can draw every token that the proximal policy can. The variance is
unbounded: QuRL fig. 3b shows ratios of 1e5.
"""

from dataclasses import dataclass
from typing import ClassVar

from .base import CorrectionInputs, CorrectionOutput
from .diagnostics import diagnose, rollout_ratio, unit_weights
from .traits import Correction


@dataclass(frozen=True)
class Decoupled(Correction):
    """The weight is `w`, bounded only to avoid overflow in float32."""

    weighs_prefixes: ClassVar[bool] = True

    def __call__(self, inputs: CorrectionInputs) -> CorrectionOutput:
        ratio = rollout_ratio(inputs)
        metrics, _ = diagnose(inputs, ratio)
        return CorrectionOutput(unit_weights(inputs, ratio), metrics=metrics)
