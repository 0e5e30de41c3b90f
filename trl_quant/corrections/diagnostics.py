"""How far the sampler is from the trainer, over all ranks together.

| symbol | here | meaning |
|---|---|---|
| `w_t` | `Ratio.w` | `exp(old_logps_t - rollout_logps_t)`, proximal over behaviour |
| `C` | `cap` | where a correction caps `w` |
| `N` | `Pooled.count` | tokens of all ranks that are unmasked and that the sampler scored |

Expectations are means over the `N` tokens, which the behaviour policy drew:

| metric | formula | note |
|---|---|---|
| `mismatch/kl_k1` | `E[-log w]` | KL(behaviour‖proximal), the k1 estimator: unbiased, may be negative |
| `mismatch/kl_k3` | `E[w - 1 - log w]` | the same KL, the k3 estimator: unbiased, never negative |
| `mismatch/abs_logp_diff` | `E[abs(log w)]` | AIS eq. 13 |
| `mismatch/abs_prob_diff` | `E[abs(exp(old_logps) - exp(rollout_logps))]` | AIS fig. 4 |
| `mismatch/weight_mean` | `E[w]` | 1 in expectation where no token is impossible for the sampler |
| `mismatch/max_weight` | `max w` | before any cap (QuRL fig. 3b) |
| `mismatch/ess_ratio` | `E[w]^2 / E[w^2]` | effective sample size / N |
| `mismatch/chi_square` | `E[w^2] - 1` | chi-square(proximal‖behaviour) |
| `mismatch/cap_fraction` | `E[w > C]` | 0 without a cap |
| `mismatch/unscored_fraction` | unscored / unmasked | tokens whose rollout logp is NaN or infinite |

With no token at all every metric has the value of no mismatch.
"""

import math
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .base import CorrectionInputs


# abs(log w) is bounded here so that a float32 weight never overflows: exp(80) = 5.5e34, four orders of magnitude below
# the largest float32, left for the advantage that multiplies it and the tokens it is summed with.
LOG_RATIO_BOUND = 80.0


class Ratio(NamedTuple):
    """The rollout-training ratio of each token: `w`, `log_w` of shape `(B, T)` in at least float32, 1 and 0 where the
    token does not count or was not scored; `counted` (unmasked) and `scored` (unmasked and scored), boolean."""

    w: Tensor
    log_w: Tensor
    counted: Tensor
    scored: Tensor


class Pooled(NamedTuple):
    """Moments of one quantity over the tokens of all ranks; `std` is the sample standard deviation (`N - 1`)."""

    count: int
    mean: float
    std: float
    max: float


def rollout_ratio(inputs: CorrectionInputs) -> Ratio:
    """`w = exp(old_logps - rollout_logps)`, with `log w` bounded by [`LOG_RATIO_BOUND`] on both sides."""
    old, rollout = _at_least_float32(inputs.old_logps), _at_least_float32(inputs.rollout_logps)
    counted = inputs.mask.bool()
    scored = counted & rollout.isfinite()
    log_w = torch.where(scored, old - rollout, 0.0).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return Ratio(log_w.exp(), log_w, counted, scored)


def diagnose(
    inputs: CorrectionInputs, ratio: Ratio, cap: float = math.inf, extra: dict[str, Tensor] | None = None
) -> tuple[dict[str, float], dict[str, Pooled]]:
    """
    Diagnostics of the mismatch, with one small collective and one transfer from the device.

    Args:
        inputs ([`CorrectionInputs`]): The batch of this rank.
        ratio ([`Ratio`]): Its ratios.
        cap (`float`): Where the correction caps `w`.
        extra (`dict[str, torch.Tensor]`, *optional*): Further `(B, T)` quantities to pool on the way.

    Returns:
        The metrics, and the pooled moments of each of `extra`.

    Raises:
        `ValueError`: on every rank, if on any of them `old_logps` or `advantages` is NaN on a token that counts.
    """
    old, rollout = _at_least_float32(inputs.old_logps), _at_least_float32(inputs.rollout_logps)
    w, log_w = float64(ratio.w), float64(ratio.log_w)
    quantities = {
        "k1": -log_w,
        "k3": (w - 1) - log_w,
        "abs_logp": log_w.abs(),
        "abs_prob": (old.exp() - rollout.exp()).abs(),
        "w": w,
        "capped": w > cap,
        **(extra or {}),
    }
    advantages = per_token_advantages(inputs)
    counts = {
        "counted": ratio.counted.sum(),
        "old_logps": (ratio.counted & inputs.old_logps.isnan()).sum(),
        "advantages": (ratio.counted & advantages.isnan()).sum(),
    }
    totals, pooled = _pool(quantities, ratio.scored, counts)
    for name in ("old_logps", "advantages"):
        if totals[name]:
            raise ValueError(f"{name} must be numbers where the mask is 1, got {totals[name]} NaN.")

    p = pooled["w"]
    variance = p.std**2 * (p.count - 1) / p.count if p.count else 0.0  # of the population, as in E[w^2]
    mean = p.mean if p.count else 1.0
    metrics = {
        "mismatch/kl_k1": pooled["k1"].mean,
        "mismatch/kl_k3": pooled["k3"].mean,
        "mismatch/abs_logp_diff": pooled["abs_logp"].mean,
        "mismatch/abs_prob_diff": pooled["abs_prob"].mean,
        "mismatch/weight_mean": mean,
        "mismatch/max_weight": p.max if p.count else 1.0,
        "mismatch/ess_ratio": mean**2 / (mean**2 + variance),
        "mismatch/chi_square": variance + (mean - 1) * (mean + 1),
        "mismatch/cap_fraction": pooled["capped"].mean,
        "mismatch/unscored_fraction": 1 - p.count / totals["counted"] if totals["counted"] else 0.0,
    }
    return metrics, {name: pooled[name] for name in extra or {}}


def _pool(
    quantities: dict[str, Tensor], select: Tensor, counts: dict[str, Tensor]
) -> tuple[dict[str, int], dict[str, Pooled]]:
    """
    Moments of each `(B, T)` quantity over the selected tokens of all ranks, and the totals of `counts`.

    Each rank contributes `(n, mean, M2, max)` with `M2 = sum (x - mean)^2`; centred sums combine without the
    cancellation that `sum x^2 - (sum x)^2 / n` suffers. Gathering them also brings the maxima in the same collective.
    """
    x = torch.stack([float64(q) for q in quantities.values()])  # (K, B, T)
    x = x[:, select.to(x.device)]  # (K, n)
    n = x.shape[1]
    if n:
        mean = x.mean(1)
        local = torch.stack([mean, (x - mean[:, None]).square().sum(1), x.amax(1)])  # (3, K)
    else:
        local = x.new_zeros(3, x.shape[0])
    header = torch.stack([x.new_tensor(n), *(float64(c) for c in counts.values())])
    rows = _gather(torch.cat([header, local.flatten()])).cpu()  # (ranks, 1 + len(counts) + 3 K)

    head, rows = rows[:, : len(header)], rows[:, len(header) :].view(-1, 3, len(quantities))
    totals = dict(zip(counts, (int(c) for c in head[:, 1:].sum(0))))
    rows, sizes = rows[head[:, 0] > 0], head[head[:, 0] > 0, 0, None]  # ranks that have tokens
    count = int(sizes.sum())
    if not count:
        return totals, {name: Pooled(0, 0.0, 0.0, 0.0) for name in quantities}
    means, m2s, maxima = rows.unbind(1)
    mean = (sizes * means).sum(0) / count
    m2 = (m2s + sizes * (means - mean).square()).sum(0)
    std = (m2 / max(count - 1, 1)).sqrt()
    moments = zip(mean.tolist(), std.tolist(), maxima.amax(0).tolist())
    return totals, {name: Pooled(count, *m) for name, m in zip(quantities, moments)}


def _gather(row: Tensor) -> Tensor:
    """`(S,)` on each rank -> `(ranks, S)` on every rank."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return row[None]
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row)
    return torch.stack(rows)


def per_token_advantages(inputs: CorrectionInputs) -> Tensor:
    """Advantages as `(B, T)`."""
    advantages = inputs.advantages.detach()
    return (advantages[:, None] if advantages.dim() == 1 else advantages).expand(inputs.old_logps.shape)


def float64(x: Tensor) -> Tensor:
    """`x` in float64, which Apple's GPUs do not have: from there it moves to the CPU."""
    return (x.cpu() if x.device.type == "mps" else x).double()


def _at_least_float32(x: Tensor) -> Tensor:
    return x.detach().to(torch.promote_types(x.dtype, torch.float32))
