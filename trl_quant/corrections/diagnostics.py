"""Measures how far the sampler is from the trainer, over all ranks.

| symbol | here | meaning |
|---|---|---|
| `w_t` | `Ratio.w` | `exp(old_logps_t - rollout_logps_t)`, proximal over behaviour |
| `C` | `cap` | the correction's cap on `w` |
| `N` | `Pooled.count` | unmasked, scored tokens of all ranks |

Expectations are means over the `N` tokens, which the behaviour policy drew:

| metric | formula | note |
|---|---|---|
| `mismatch/kl_k1` | `E[-log w]` | KL(behaviour‖proximal) by the k1 estimator: unbiased, may be negative |
| `mismatch/kl_k3` | `E[w - 1 - log w]` | the same KL by the k3 estimator: never negative, unbiased where `E[w]` is 1 |
| `mismatch/abs_logp_diff` | `E[abs(log w)]` | AIS eq. 13 |
| `mismatch/abs_prob_diff` | `E[abs(exp(old_logps) - exp(rollout_logps))]` | AIS fig. 4 |
| `mismatch/weight_mean` | `E[w]` | 1 in expectation if the sampler can draw every token |
| `mismatch/max_weight` | `max w` | before any cap (QuRL fig. 3b) |
| `mismatch/ess_ratio` | `E[w]^2 / E[w^2]` | effective sample size divided by `N` |
| `mismatch/chi_square` | `E[(w - 1)^2]` | chi-square(proximal‖behaviour): never negative |
| `mismatch/entropy` | `E[-rollout_logps]` | of the sampler, in nats |
| `mismatch/cap_fraction` | `E[W > C]` | `W` is `w`, or its product over a sequence or a prefix; 0 without a cap |
| `mismatch/same_fraction` | `E[w = 1]` | tokens with the same log-probability, bit for bit, on both sides |
| `mismatch/by_position/a-b` | `E[w - 1 - log w]` of tokens a to b | positions in the completion, from 0 |
| `mismatch/by_turn/a-b` | the same, of turns a to b | turns from 1, where tools or environments speak |
| `mismatch/by_age/a-b` | the same, of tokens of age a to b | in generations; age 0 has the precision's mismatch alone |
| `mismatch/quadrant/x_y` | `sum_xy abs(A log w) / sum abs(A log w)` | sign of `A`, and `up` or `down` of `log w` |
| `mismatch/unscored_fraction` | unscored / unmasked | tokens whose rollout log-probability is NaN or infinite |
| `mismatch/dropped_fraction` | tokens of weight 0 / `N` | only for corrections that drop tokens |
| `mismatch/dropped_sequence_fraction` | sequences with a dropped token / sequences | the same |

k3 is k1 plus `E[w] - 1`, which is 0 in expectation if the sampler can draw every token that the proximal policy can. A
sampler that truncates cannot, and k3 is then too low by the probability of the tokens that it leaves out: under
`top_p=0.9`, k3 is 0.0045 nats and k1 is 0.097.

A turn is a run of unmasked tokens, unless the batch has `turns`: what tools and environments add to a completion is
masked. `mismatch/by_turn` is left out where no completion has a second turn, and `mismatch/by_age` where a generation
returns only what it sampled.

The quadrants are the shares of `abs(A log w)` of the tokens with one sign of the advantage `A` and one of `log w`
(after TRIAGE, arXiv 2610.07043). There, mass at `negative_down` beside the other three preceded collapse: tokens that
training makes less likely, and that the policy already finds less likely than the sampler does. They are left out where
there are no advantages, or no mismatch.

If no token is scored, every metric has the value that a batch without a mismatch would have.
"""

import math
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from .base import CorrectionInputs


# The bound on abs(log w) keeps float32 weights from overflowing. exp(80) = 5.5e34 is four orders of magnitude below the
# largest float32, which leaves room for the advantage that multiplies a weight and for sums over tokens.
LOG_RATIO_BOUND = 80.0
POSITIONS = (0, 16, 64, 256, 1024, 4096, 16384)  # first member of each bucket of `mismatch/by_position`
TURNS = (1, 2, 3, 5, 9, 17, 33)  # first member of each bucket of `mismatch/by_turn`
AGES = (0, 1, 2, 3, 5, 9)  # first member of each bucket of `mismatch/by_age`


class Ratio(NamedTuple):
    """
    The ratio of each token, as tensors of shape `(B, T)`. `w` and `log_w` are in at least float32; on masked and on
    unscored tokens they are 1 and 0. `counted` marks the unmasked tokens, `scored` those that the sampler scored too.
    """

    w: Tensor
    log_w: Tensor
    counted: Tensor
    scored: Tensor


class Pooled(NamedTuple):
    """The moments of one quantity over the tokens of all ranks. `std` is the sample standard deviation (`N - 1`)."""

    count: int
    mean: float
    std: float
    max: float


def rollout_ratio(inputs: CorrectionInputs) -> Ratio:
    """Computes `w = exp(old_logps - rollout_logps)`, with `log w` bounded by [`LOG_RATIO_BOUND`] on both sides."""
    old, rollout = at_least_float32(inputs.old_logps), at_least_float32(inputs.rollout_logps)
    counted = inputs.mask.bool()
    scored = counted & rollout.isfinite()
    log_w = torch.where(scored, old - rollout, 0.0).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return Ratio(log_w.exp(), log_w, counted, scored)


def unit_weights(inputs: CorrectionInputs, ratio: Ratio) -> Tensor:
    """
    Returns `(B, T)`: the ratio of each token. At the level of sequences, it is the product over the token's sequence;
    at the level of prefixes, the product over the tokens before it, which is 1 for the first. Masked tokens get 1.
    """
    if inputs.level == "token":
        return ratio.w
    if inputs.level == "prefix":
        log_w = F.pad(ratio.log_w.cumsum(1)[:, :-1], (1, 0))
    else:
        log_w = ratio.log_w.sum(1, keepdim=True)
    return torch.where(ratio.counted, log_w.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp(), 1.0)


def diagnose(
    inputs: CorrectionInputs,
    ratio: Ratio,
    cap: float | Tensor = math.inf,
    extra: dict[str, Tensor] | None = None,
    dropped: Tensor | None = None,
) -> tuple[dict[str, float], dict[str, Pooled]]:
    """
    Computes the metrics of the mismatch, with one small collective and one transfer from the device.

    Args:
        inputs ([`CorrectionInputs`]): The batch of this rank.
        ratio ([`Ratio`]): The ratios of this batch.
        cap (`float` or `torch.Tensor` of shape `(B, T)`): The correction's cap on `w`.
        extra (`dict[str, torch.Tensor]`, *optional*): More `(B, T)` quantities to pool.
        dropped (`torch.Tensor` of shape `(B, T)`, *optional*): The tokens that the correction drops.

    Returns:
        The metrics of the table above by name, and the [`Pooled`] moments of each quantity of `extra` by its name.

    Raises:
        `ValueError`: on every rank, if `old_logps` or `advantages` is NaN on a counted token of any rank.
    """
    old, rollout = at_least_float32(inputs.old_logps), at_least_float32(inputs.rollout_logps)
    w, log_w = float64(ratio.w), float64(ratio.log_w)
    quantities = {
        "k1": -log_w,
        "k3": torch.expm1(log_w) - log_w,  # `w` is rounded, by more than the whole k3 of tokens that nearly agree
        "abs_logp": log_w.abs(),
        "abs_prob": (old.exp() - rollout.exp()).abs(),
        "w": w,
        "entropy": -rollout,
        "same": old == rollout,
        "capped": unit_weights(inputs, ratio) > cap,
        **(extra or {}),
    }
    advantages = per_token_advantages(inputs)
    counts = {
        "counted": ratio.counted.sum(),
        "old_logps": (ratio.counted & inputs.old_logps.isnan()).sum(),
        "advantages": (ratio.counted & advantages.isnan()).sum(),
    }
    mass = torch.where(ratio.scored, (advantages * ratio.log_w).abs(), 0.0)
    for sign, of_sign in {"positive": advantages > 0, "negative": advantages < 0}.items():
        for way, goes in {"up": ratio.log_w > 0, "down": ratio.log_w < 0}.items():
            counts[f"quadrant/{sign}_{way}"] = float64(torch.where(of_sign & goes, mass, 0.0)).sum()
    if dropped is not None:
        quantities["dropped"] = dropped
        counts["sequences"] = ratio.scored.any(1).sum()
        counts["dropped_sequences"] = (ratio.scored & dropped).any(1).sum()
    by_position = torch.arange(w.shape[1], device=w.device)
    by_turn = (turns(ratio.counted) if inputs.turns is None else inputs.turns).to(w.device)
    scored = ratio.scored.to(w.device)
    counts |= _bucket_sums("by_position", by_position, POSITIONS, quantities["k3"], scored)
    counts |= _bucket_sums("by_turn", by_turn, TURNS, quantities["k3"], scored)
    if inputs.ages is not None:
        counts |= _bucket_sums("by_age", inputs.ages.to(w.device), AGES, quantities["k3"], scored)
    totals, pooled = _pool(quantities, ratio.scored, counts)
    for name in ("old_logps", "advantages"):
        if totals[name]:
            raise ValueError(f"{name} must be numbers where the mask is 1, got {totals[name]:.0f} NaN.")

    p = pooled["w"]
    variance = p.std**2 * (p.count - 1) / p.count if p.count else 0.0  # population variance, as in E[w^2]
    mean = p.mean if p.count else 1.0
    metrics = {
        "mismatch/kl_k1": pooled["k1"].mean,
        "mismatch/kl_k3": pooled["k3"].mean,
        "mismatch/abs_logp_diff": pooled["abs_logp"].mean,
        "mismatch/abs_prob_diff": pooled["abs_prob"].mean,
        "mismatch/weight_mean": mean,
        "mismatch/max_weight": p.max if p.count else 1.0,
        "mismatch/ess_ratio": mean**2 / (mean**2 + variance),
        "mismatch/chi_square": variance + (mean - 1) ** 2,
        "mismatch/entropy": pooled["entropy"].mean,
        "mismatch/cap_fraction": pooled["capped"].mean,
        "mismatch/same_fraction": pooled["same"].mean if p.count else 1.0,
        "mismatch/unscored_fraction": 1 - p.count / totals["counted"] if totals["counted"] else 0.0,
    }
    if dropped is not None:
        metrics["mismatch/dropped_fraction"] = pooled["dropped"].mean
        metrics["mismatch/dropped_sequence_fraction"] = totals["dropped_sequences"] / max(totals["sequences"], 1)
    quadrants = {name: total for name, total in totals.items() if name.startswith("quadrant/")}
    if whole := sum(quadrants.values()):
        metrics |= {f"mismatch/{name}": total / whole for name, total in quadrants.items()}
    metrics |= _bucket_means("by_position", POSITIONS, totals)
    if inputs.ages is not None:
        metrics |= _bucket_means("by_age", AGES, totals)
    of_turns = _bucket_means("by_turn", TURNS, totals)
    if len(of_turns) > 1:  # a single bucket of turns has no other to compare with
        metrics |= of_turns
    return metrics, {name: pooled[name] for name in extra or {}}


def turns(counted: Tensor) -> Tensor:
    """
    Numbers the turns of each completion.

    Args:
        counted (`torch.Tensor` of shape `(B, T)`): Booleans, true on the tokens that the policy wrote.

    Returns:
        `torch.Tensor` of shape `(B, T)`: The turn of each of those tokens, from 1. Elsewhere the number has no meaning.
    """
    begins = counted.clone()
    begins[:, 1:] &= ~counted[:, :-1]
    return begins.cumsum(1)


def _bucket_sums(kind: str, members: Tensor, starts: tuple[int, ...], k3: Tensor, scored: Tensor) -> dict[str, Tensor]:
    """
    Counts the scored tokens of each bucket, and sums their `k3`.

    Args:
        kind (`str`): `"by_position"`, `"by_turn"` or `"by_age"`.
        members (`torch.Tensor` that broadcasts to `(B, T)`): The position, the turn or the age of each token.
        starts (`tuple[int, ...]`): The first member of each bucket.
        k3, scored (`torch.Tensor` of shape `(B, T)`): The quantity, and which tokens count.
    """
    sums = {}
    bucket = torch.bucketize(members, torch.tensor(starts[1:], device=members.device), right=True)
    for i, name in enumerate(_bucket_names(starts)):
        inside = scored & (bucket == i)
        sums[f"tokens/{kind}/{name}"] = inside.sum()
        sums[f"{kind}/{name}"] = torch.where(inside, k3, 0.0).sum()
    return sums


def _bucket_means(kind: str, starts: tuple[int, ...], totals: dict[str, float]) -> dict[str, float]:
    """Returns the metrics of the buckets that have tokens, from the totals of [`_bucket_sums`] over all ranks."""
    names = [f"{kind}/{name}" for name in _bucket_names(starts)]
    return {f"mismatch/{name}": totals[name] / totals[f"tokens/{name}"] for name in names if totals[f"tokens/{name}"]}


def _bucket_names(starts: tuple[int, ...]) -> list[str]:
    """Names buckets that begin at `starts` by their first and last member, `a-b`, or `a` if there is only one."""
    lasts = [start - 1 for start in starts[1:]]
    names = [f"{first}" if first == last else f"{first}-{last}" for first, last in zip(starts, lasts)]
    return [*names, f"{starts[-1]}-"]


def _pool(
    quantities: dict[str, Tensor], select: Tensor, counts: dict[str, Tensor]
) -> tuple[dict[str, float], dict[str, Pooled]]:
    """
    Returns the totals of `counts`, and the moments of each `(B, T)` quantity over the selected tokens of all ranks.

    Each rank contributes `(n, mean, M2, max)` with `M2 = sum (x - mean)^2`. Centred sums combine without the
    cancellation that `sum x^2 - (sum x)^2 / n` suffers from. A single gather collects everything.
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
    totals = dict(zip(counts, head[:, 1:].sum(0).tolist()))
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
    """Gathers `(S,)` of each rank into `(ranks, S)` on every rank."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return row[None]
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row)
    return torch.stack(rows)


def per_token_advantages(inputs: CorrectionInputs) -> Tensor:
    """Returns the advantages as `(B, T)`."""
    advantages = inputs.advantages.detach()
    return (advantages[:, None] if advantages.dim() == 1 else advantages).expand(inputs.old_logps.shape)


def float64(x: Tensor) -> Tensor:
    """Returns `x` in float64. From Apple GPUs, which lack float64, it moves to the CPU first."""
    return (x.cpu() if x.device.type == "mps" else x).double()


def at_least_float32(x: Tensor) -> Tensor:
    """Returns `x`, detached, in float32, or in its own type if that is wider."""
    return x.detach().to(torch.promote_types(x.dtype, torch.float32))
