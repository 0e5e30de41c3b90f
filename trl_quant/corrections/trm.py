"""`trm`: trust region masking drops sequences with a token far from the sampler (arXiv 2512.23075).

    J = E[ M(y) * sum_t rho_t A ],    rho_t = pi(y_t) / pi_roll(y_t)
    M(y) = 1 if max_t D_KL(pi_roll(. | c_t) || pi(. | c_t)) <= delta, else 0

| paper | here |
|---|---|
| `pi_theta`, the current policy | `old_logps`, which `every_update` makes the current policy's |
| `pi_roll`, the sampler | `rollout_logps` |
| `rho_t` | `w_t = exp(old_logps_t - rollout_logps_t)`; the loss's own `R` is 1 and never clipped |
| `D_KL(c_t)`, from the logits of both policies | `k2 = (log w_t)^2 / 2`, from the sampled token |
| `delta` | `delta` = 0.05: `w` within [0.73, 1.37] |

Where the logits are not kept, the paper estimates the maximum by `k2`, which is symmetric in `log w` but is not a bound
on the KL. The paper's second criterion, on the mean of `k3`, is left out. The longer a sequence, the
likelier it has a token beyond the bound. A dropped sequence has weight 0 and still counts in the loss's
denominator, as in the paper. TRL's KL term is not weighted: `use_bias_correction_kl` multiplies it by `R`, whose value
is 1.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch

from .base import CorrectionInputs, CorrectionOutput, Range, check_ranges
from .diagnostics import diagnose, rollout_ratio
from .traits import Correction


@dataclass(frozen=True)
class TRM(Correction):
    """The weight is `w` in a sequence whose tokens all have `(log w)^2 / 2 <= delta`, and 0 in all other sequences."""

    delta: Annotated[float, Range(0, open_low=True)] = 0.05
    """The largest `(log w)^2 / 2` of a token, in nats."""

    every_update: ClassVar[bool] = True
    token_only: ClassVar[bool] = True

    def __post_init__(self):
        check_ranges(self)

    def __call__(self, inputs: CorrectionInputs) -> CorrectionOutput:
        ratio = rollout_ratio(inputs)
        far = (ratio.log_w.square() / 2 > self.delta).any(1, keepdim=True)
        dropped = ratio.counted & far
        metrics, _ = diagnose(inputs, ratio, dropped=dropped)
        return CorrectionOutput(torch.where(dropped, 0.0, ratio.w), metrics=metrics)
