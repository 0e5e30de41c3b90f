"""`ais`: adaptive importance sampling (AIS, section 3, eq. 9-19, algorithm 1).

    J = E[ wt * min(R A, clip(R, 1 - e_lo, 1 + e_hi) A) ],    wt = 1 + alpha (wb - 1),    wb = min(w, C)

One coefficient per batch, `alpha`, sets how much of the truncated correction is applied:

    alpha_ess = (1 + CV(wb)^2)^(-1/2)                                      reliability of the weights, eq. 12
    alpha_mis = min(1, mean abs(log w) / delta)                            divergence, eq. 13-14
    alpha_var = max(0, (ds - gamma) / gamma)                               variance amplification, eq. 15-16
           ds = std(A wb) / (std(A) + eps)
    alpha     = clip(alpha_ess - beta_var * alpha_var, 0, 1) * alpha_mis   eq. 17

| paper | here |
|---|---|
| `C` | `cap` = 5 |
| `delta`, `gamma`, `epsilon` | `delta` = 0.02, `gamma` = 1.2, `eps` = 1e-6 |
| `beta` (eq. 17; no value given) | `beta_var` = 1 |
| `w`, `rho_rt` | `exp(old_logps - rollout_logps)` |
| `B`, the mini-batch | the unmasked, scored tokens of all ranks |
| `CV`, `std` | of the sample (`N - 1`) |

The paper uses unnormalised advantages (the reward minus the mean of its group) and first averages over the tokens of
each sequence (eq. 19). Without a mismatch `alpha` is 0, and the result is that of GRPO.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from .base import CorrectionInputs, CorrectionOutput, Range, check_ranges
from .diagnostics import Pooled, diagnose, float64, per_token_advantages, rollout_ratio, unit_weights
from .traits import Correction


@dataclass(frozen=True)
class AIS(Correction):
    """The weight is `1 + alpha (min(w, cap) - 1)`, with one `alpha` in [0, 1] for the whole batch."""

    cap: Annotated[float, Range(1)] = 5.0
    """`C`, the largest weight before `alpha` is applied."""
    delta: Annotated[float, Range(0, open_low=True)] = 0.02
    """The mean `abs(log w)`, in nats, at which `alpha_mis` reaches 1."""
    gamma: Annotated[float, Range(0, open_low=True)] = 1.2
    """The growth `ds` of the advantages' standard deviation from which `alpha_var` counts."""
    beta_var: Annotated[float, Range(0)] = 1.0
    """The strength of `alpha_var`, the penalty on that growth."""
    eps: Annotated[float, Range(0, open_low=True)] = 1e-6
    """Keeps `ds` finite where all advantages are equal."""

    aliases: ClassVar[dict[str, str]] = {"cap": "is_cap"}
    whole_batch: ClassVar[bool] = True  # all tokens share `alpha`, so all must be scored before the first loss
    settings: ClassVar[dict[str, str]] = {"scale_rewards": "none", "loss_type": "grpo"}

    def __post_init__(self):
        check_ranges(self)

    def __call__(self, inputs: CorrectionInputs) -> CorrectionOutput:
        ratio = rollout_ratio(inputs)
        wb = unit_weights(inputs, ratio).clamp(max=self.cap)
        a = float64(per_token_advantages(inputs))
        metrics, pooled = diagnose(inputs, ratio, self.cap, {"wb": wb, "A": a, "A wb": a * float64(wb)})
        alpha = self.alpha(pooled["wb"], pooled["A"], pooled["A wb"], metrics["mismatch/abs_logp_diff"])
        weights = 1 + alpha["ais/alpha"] * (wb - 1)
        return CorrectionOutput(weights, metrics=metrics | alpha)

    def alpha(self, wb: Pooled, a: Pooled, a_wb: Pooled, d: float) -> dict[str, float]:
        """Computes eq. 12-17 from the pooled moments of `wb`, `A` and `A wb`, and from `d`, the mean `abs(log w)`."""
        cv = wb.std / wb.mean if wb.count else 0.0
        alpha_ess = (1 + cv**2) ** -0.5
        alpha_mis = min(1.0, d / self.delta)
        amplification = a_wb.std / (a.std + self.eps)
        alpha_var = max(0.0, (amplification - self.gamma) / self.gamma)
        alpha = min(max(alpha_ess - self.beta_var * alpha_var, 0.0), 1.0) * alpha_mis
        return {
            "ais/alpha": alpha,
            "ais/alpha_ess": alpha_ess,
            "ais/alpha_mis": alpha_mis,
            "ais/alpha_var": alpha_var,
        }
