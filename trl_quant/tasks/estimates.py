r"""Estimates how often a model is right, with intervals, from n answers to each question of which c are right.

    pass@k = 1 - C(n - c, k) / C(n, k)                the chance that one of k answers is right (Codex, eq. 1)
    (p + z^2/2N ± z sqrt(p (1 - p) / N + z^2/4N^2)) / (1 + z^2/N)                   Wilson's score interval

| symbol | meaning |
|---|---|
| N | questions |
| p | share of them that is right |
| z | 1.96, so that 95% of such intervals hold the true value |

avg@k is the mean of c / n. Wilson's formula does not hold for a mean of values between 0 and 1, so its interval comes
from the bootstrap: questions are resampled with replacement, and the interval lies between quantiles of their mean.
Both intervals are over questions; answers to the same question are not treated as independent.
"""

from collections.abc import Sequence
from math import comb, sqrt
from statistics import NormalDist, fmean

import torch


LEVEL = 0.95
RESAMPLES = 10_000


def pass_at_k(n: int, c: int, k: int) -> float:
    """
    Returns the chance that at least one of `k` answers is right, drawn from `n` answers of which `c` are right. Raises
    `ValueError` unless `k` is from 1 to `n` and `c` from 0 to `n`.
    """
    if not 1 <= k <= n or not 0 <= c <= n:
        raise ValueError(f"pass@k of `n`={n}, `c`={c}, `k`={k}: `k` must be from 1 to `n`, `c` from 0 to `n`.")
    return 1 - comb(n - c, k) / comb(n, k)


def wilson(right: int, n: int) -> tuple[float, float]:
    """Returns Wilson's interval for a share, given `right` of `n` in a sample."""
    z, p = NormalDist().inv_cdf((1 + LEVEL) / 2), right / n
    center, width = p + z**2 / (2 * n), z * sqrt(p * (1 - p) / n + z**2 / (4 * n**2))
    return max(0.0, (center - width) / (1 + z**2 / n)), min(1.0, (center + width) / (1 + z**2 / n))


def bootstrap(values: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """Returns the bootstrap interval for a mean, given a sample of `values`."""
    generator, values = torch.Generator().manual_seed(seed), torch.tensor(values, dtype=torch.float64)
    shape = (RESAMPLES // 100, len(values))  # a hundredth at a time, which bounds the memory
    means = torch.cat([values[torch.randint(len(values), shape, generator=generator)].mean(-1) for _ in range(100)])
    return tuple(means.quantile(torch.tensor([1 - LEVEL, 1 + LEVEL], dtype=torch.float64) / 2).tolist())


def estimate(values: Sequence[float]) -> dict[str, float]:
    """Returns the mean over questions with its interval: Wilson's if each is right or wrong, else by bootstrap."""
    mean = fmean(values)
    low, high = wilson(sum(values), len(values)) if set(values) <= {0.0, 1.0} else bootstrap(values)
    return {"value": mean, "low": low, "high": high}


def estimates(right: Sequence[int], n: int) -> dict[str, dict[str, float]]:
    """
    Estimates all metrics from `n` answers to each question.

    Args:
        right (`Sequence[int]`): Number of right answers to each question.
        n (`int`): Answers to each question. One gives `accuracy`, several `avg@n` and pass@k for k = 2, 4, 8 ... n.

    Returns:
        `dict[str, dict[str, float]]`: `value`, `low` and `high` by metric.
    """
    if n == 1:
        return {"accuracy": estimate([float(c) for c in right])}
    found = {f"avg@{n}": estimate([c / n for c in right])}
    for k in sorted({n, *(2**i for i in range(1, n.bit_length()) if 2**i <= n)}):
        found[f"pass@{k}"] = estimate([pass_at_k(n, c, k) for c in right])
    return found
