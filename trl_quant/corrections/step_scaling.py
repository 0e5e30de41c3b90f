r"""
Scales the optimizer's step by how many of its completions still count (after VCPO, arXiv 2602.17616).

Weights correct the mean of a gradient, not its variance. Where a few completions carry most of the weight, the gradient
is as noisy as one of those few alone. The effective sample size says how many of B completions count, and a step that
rests on fewer of them than the run's first one is made smaller:

    w_i   = prod_t exp(logps_it - rollout_logps_it)
    rho   = (sum_i w_i)^2 / (B sum_i w_i^2)                 from 1 / B to 1
    eta'  = eta min(1, sqrt(rho / rho_0))

| symbol | here | meaning |
|---|---|---|
| `w_i` | `exp` of [`sequence_log_weights`] | weight of a whole completion, without a cap, of the current policy |
| `B` | | completions of the optimizer's step: of all ranks and micro-batches |
| `rho` | [`effective_share`] | effective sample size divided by B |
| `rho_0` | `first` | `rho` of the run's first step |
| `eta` | | learning rate of the step, from the schedule |

A product over a completion's tokens leaves the range of floating-point numbers, so everything is computed from its
logarithm. The weights of a correction, which may be capped or of tokens, play no part.

It is the learning rate that is scaled: Adam divides a gradient by its own size, so a factor on the gradient would not
change the step.
"""

import math

import torch
from torch import Tensor

from .diagnostics import at_least_float32, float64


def sequence_log_weights(logps: Tensor, rollout_logps: Tensor, mask: Tensor) -> Tensor:
    """
    Computes `log w_i` of completions.

    Args:
        logps, rollout_logps (`torch.Tensor` of shape `(B, T)`):
            Log-probabilities in nats under the current policy and under the sampler. NaN or -inf marks a token that the
            sampler did not score; it counts as one on which the two agree.
        mask (`torch.Tensor` of shape `(B, T)`): 1 on the completion tokens that count.

    Returns:
        `torch.Tensor` of shape `(B,)`: In float64; NaN for a completion without a scored token, which has no weight.
    """
    rollout = at_least_float32(rollout_logps)
    scored = mask.bool() & rollout.isfinite()
    log_w = torch.where(scored, float64(at_least_float32(logps)) - float64(rollout), 0.0).sum(1)
    return log_w.masked_fill(~scored.any(1), torch.nan)


def effective_share(log_w: Tensor) -> float:
    """
    Computes `rho` from the `log w_i` of all completions, (B,). Those that are NaN are left out; 1 if none is left.
    """
    log_w = log_w[~log_w.isnan()]
    if not len(log_w):
        return 1.0
    log_rho = 2 * log_w.logsumexp(0) - (2 * log_w).logsumexp(0) - math.log(len(log_w))
    return min(log_rho.exp().item(), 1.0)


def step_factor(rho: float, first: float) -> float:
    """Returns the factor on the step's learning rate, from its `rho` and the `rho` of the run's first step."""
    return min(1.0, math.sqrt(rho / first))
