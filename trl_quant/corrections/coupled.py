"""`coupled`: the sampler is the proximal policy (QuRL, section 4.1, eq. 3).

    J = E[ min(Rq A, clip(Rq, 1 - e_lo, 1 + e_hi) A) ],    Rq = exp(logps - rollout_logps)

| paper | here |
|---|---|
| `R^`, ratio of the current to the quantized old actor | `Rq` |
| the quantized old actor | `rollout_logps`, returned as the output's `old_logps` |

TRL's `use_bias_correction_kl` multiplies its KL term by `Rq` as well, and so corrects that term for the sampler too.

A clip range around the sampler's probability clips many more tokens, and in QuRL fig. 2 the rewards collapse. The
method is kept as a baseline.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from .base import CorrectionInputs, CorrectionOutput
from .diagnostics import diagnose, rollout_ratio
from .traits import Correction


@dataclass(frozen=True)
class Coupled(Correction):
    """The weight is 1. `rollout_logps` replaces `old_logps`, except on tokens that the sampler did not score."""

    has_levels: ClassVar[bool] = False
    clips_sampler: ClassVar[bool] = True
    unfit_for_few_bits: ClassVar[bool] = True

    def __call__(self, inputs: CorrectionInputs) -> CorrectionOutput:
        ratio = rollout_ratio(inputs)
        metrics, _ = diagnose(inputs, ratio)
        proximal = torch.where(ratio.scored, inputs.rollout_logps.detach(), inputs.old_logps.detach())
        return CorrectionOutput(torch.ones_like(ratio.w), metrics=metrics, old_logps=proximal)
