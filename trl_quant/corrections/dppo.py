"""`dppo`: divergence proximal policy optimization, DPPO-Binary-TV (arXiv 2602.04879).

    J = E[ sum_t M_t r_t A ],    r_t = pi(y_t) / mu(y_t)
    M_t = 0 if A > 0 and pi(y_t) - mu(y_t) > delta, or A < 0 and mu(y_t) - pi(y_t) > delta, else 1

| paper | here |
|---|---|
| `pi`, the current policy | `old_logps`, which `every_update` makes the current policy's |
| `mu`, the sampler, which anchors the ratio and the trust region | `rollout_logps` |
| `r_t` | `min(w_t, C)` with `w_t = exp(old_logps_t - rollout_logps_t)`; the loss's own `R` is 1 and never clipped |
| `delta` (the authors' scripts: 0.15) | `delta` |
| `C`, bound on the detached `r_t` (the authors' code: 10) | `cap`, >= 1 |

The mask replaces PPO's clip. It bounds the difference between a token's two probabilities, not their ratio, and drops
only the tokens whose gradient leads further away from the sampler. `abs(pi - mu)` is the total variation between the
two distributions over "this token" and "any other token". The method needs no old policy; the paper's runs that
anchored at the trainer's old policy collapsed. A dropped token has weight 0 and still counts in the loss's denominator.
TRL's KL term is not weighted: `use_bias_correction_kl` multiplies it by `R`, whose value is 1.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch

from .base import CorrectionInputs, CorrectionOutput, Range, check_ranges
from .diagnostics import at_least_float32, diagnose, per_token_advantages, rollout_ratio
from .traits import Correction


@dataclass(frozen=True)
class DPPO(Correction):
    """The weight is `min(w, cap)`, and 0 where a token that moved by more than `delta` would be pushed further."""

    delta: Annotated[float, Range(0, 1, open_low=True)] = 0.15
    """The probability by which a token may move away from the sampler."""
    cap: Annotated[float, Range(1)] = 10.0
    """`C`, the largest weight."""

    aliases: ClassVar[dict[str, str]] = {"cap": "is_cap"}
    every_update: ClassVar[bool] = True
    token_only: ClassVar[bool] = True

    def __post_init__(self):
        check_ranges(self)

    def __call__(self, inputs: CorrectionInputs) -> CorrectionOutput:
        ratio = rollout_ratio(inputs)
        moved = at_least_float32(inputs.old_logps).exp() - at_least_float32(inputs.rollout_logps).exp()  # pi - mu
        a = per_token_advantages(inputs)
        dropped = ratio.scored & (((a > 0) & (moved > self.delta)) | ((a < 0) & (moved < -self.delta)))
        metrics, _ = diagnose(inputs, ratio, self.cap, dropped=dropped)
        return CorrectionOutput(torch.where(dropped, 0.0, ratio.w.clamp(max=self.cap)), metrics=metrics)
