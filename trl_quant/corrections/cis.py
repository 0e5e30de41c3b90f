"""`cis`: a cap on the ratio that tightens as the token's probability nears 1 (CIS, arXiv 2609.32444).

    J = E[ min(w, C(p)) * min(R A, clip(R, 1 - e_lo, 1 + e_hi) A) ]
    C(p) = 1 + lambda * max(1 - p, kappa)

| paper | here |
|---|---|
| `p`, the trainer's probability of the token | `exp(old_logps)`, without gradient, fixed for a generation |
| `q`, the sampler's probability of the token | `exp(rollout_logps)` |
| `lambda` | `lam` = 2.3 |
| `kappa` | `kappa` = 0.005 |

A mismatch is a shift of log-odds, `e = logit p - logit q`, whose spread hardly depends on `p`. For a small shift `w` is
`1 + (1 - p) e`, so a constant cap on `e` is a cap on `w` that tightens as `p` nears 1. `kappa` leaves some room there.
Only the upper side is bounded. The paper samples at temperature 1; at another temperature `p` is the probability in the
distribution that is sampled from. Its runs are mixtures of experts in BF16; it was not tried on quantized samplers.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch

from .base import CorrectionInputs, CorrectionOutput, Range, check_ranges
from .diagnostics import at_least_float32, diagnose, rollout_ratio
from .traits import Correction


@dataclass(frozen=True)
class CIS(Correction):
    """The weight is `min(w, 1 + lam * max(1 - p, kappa))`."""

    lam: Annotated[float, Range(0)] = 2.3
    """`lambda`, the room that the cap leaves above 1 for a token of probability 0."""
    kappa: Annotated[float, Range(0, 1)] = 5e-3
    """The part of `lam` that a token of probability 1 keeps."""

    token_only: ClassVar[bool] = True

    def __post_init__(self):
        check_ranges(self)

    def __call__(self, inputs: CorrectionInputs) -> CorrectionOutput:
        ratio = rollout_ratio(inputs)
        old_logps = torch.where(ratio.scored, at_least_float32(inputs.old_logps), 0.0)
        cap = 1 + self.lam * (-torch.expm1(old_logps)).clamp(min=self.kappa)
        metrics, _ = diagnose(inputs, ratio, cap)
        return CorrectionOutput(torch.minimum(ratio.w, cap), metrics=metrics)
