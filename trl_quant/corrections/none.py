"""`none`: GRPO as if the trainer itself had sampled (QuRL, section 4.1, eq. 1).

    J = E[ min(R A, clip(R, 1 - e_lo, 1 + e_hi) A) ]

| paper | here |
|---|---|
| `R`, ratio of the current to the old full-precision actor | `exp(logps - old_logps)`, in the loss |
| the quantized actor | ignored: every weight is 1 |

The mismatch biases the gradient. This is the baseline for every correction.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from .base import CorrectionInputs, CorrectionOutput
from .diagnostics import diagnose, rollout_ratio
from .traits import Correction


@dataclass(frozen=True)
class NoCorrection(Correction):
    """The weight is 1 on every token. The mismatch is still measured."""

    ignores_sampler: ClassVar[bool] = True
    has_levels: ClassVar[bool] = False

    def __call__(self, inputs: CorrectionInputs) -> CorrectionOutput:
        ratio = rollout_ratio(inputs)
        metrics, _ = diagnose(inputs, ratio)
        return CorrectionOutput(torch.ones_like(ratio.w), metrics=metrics)
