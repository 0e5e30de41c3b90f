"""`tis`: truncated importance sampling (FlashRL; QuRL, section 4.1, eq. 5).

    J = E[ min(w, C) * min(R A, clip(R, 1 - e_lo, 1 + e_hi) A) ]

| paper | here |
|---|---|
| `C`, bound on the proximal-to-behaviour ratio | `cap`, >= 1 |
| `pi_prox / pi_behav` | `w = exp(old_logps - rollout_logps)` |

QuRL leaves `C` open; 2 is FlashRL's usual value.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from .base import CorrectionInputs, CorrectionOutput, Range, check_ranges
from .diagnostics import diagnose, rollout_ratio, unit_weights
from .traits import Correction


@dataclass(frozen=True)
class TIS(Correction):
    """The weight is `min(w, cap)`."""

    cap: Annotated[float, Range(1)] = 2.0
    """`C`, the largest weight."""

    weighs_prefixes: ClassVar[bool] = True
    aliases: ClassVar[dict[str, str]] = {"cap": "is_cap"}

    def __post_init__(self):
        check_ranges(self)

    def __call__(self, inputs: CorrectionInputs) -> CorrectionOutput:
        ratio = rollout_ratio(inputs)
        metrics, _ = diagnose(inputs, ratio, self.cap)
        return CorrectionOutput(unit_weights(inputs, ratio).clamp(max=self.cap), metrics=metrics)
