"""Short runs of distillation for the tests, and their loss in slow loops."""

import math

import torch
from training import trainer_for

from trl_quant import QuantDistillationConfig, QuantDistillationTrainer


def distil(path, model=None, kind=QuantDistillationTrainer, **given):
    """A trainer with two steps of INT4 samples."""
    given = {"config_class": QuantDistillationConfig, "rollout_precision": "int4", "max_steps": 2} | given
    return trainer_for(path / "out", model, kind, **given)


def divergence(student, other, beta):
    """The divergence of two distributions, given as log-probabilities (V,), which GKD calls D_JSD(beta)."""
    if beta == 0:
        return (other.exp() * (other - student)).sum()
    if beta == 1:
        return (student.exp() * (student - other)).sum()
    mixture = ((1 - beta) * student.exp() + beta * other.exp()).log()
    of_teacher, of_student = other.exp() * (other - mixture), student.exp() * (student - mixture)
    return beta * of_teacher.sum() + (1 - beta) * of_student.sum()


def bounded(name, ratio, cap=2.0, low=0.5, high=5.0):
    if name == "none" or (name == "icepop" and not low <= ratio <= high):
        return float(name == "none")
    return min(ratio, cap) if name == "tis" else ratio


def weights_of(name, pi, mu, mask, before="prefix", **hyperparameters) -> list[list[float]]:
    """
    The weight of each place, from the ratios of the drawn tokens: of those before it (`"prefix"`), of those up to it
    (`"inclusive"`), of its own (`"token"`) or of all (`"sequence"`).
    """
    weights = []
    for b in range(mask.shape[0]):
        tokens = [t for t in range(mask.shape[1]) if mask[b, t]]
        ratios = {t: math.exp(pi[b, t] - mu[b, t]) if math.isfinite(mu[b, t]) else 1.0 for t in tokens}
        row = [0.0] * mask.shape[1]
        for t in tokens:
            chosen = {
                "prefix": [ratios[s] for s in tokens if s < t],
                "inclusive": [ratios[s] for s in tokens if s <= t],
                "token": [ratios[t]],
                "sequence": [*ratios.values()],
            }[before]
            row[t] = bounded(name, math.prod(chosen), **hyperparameters)
        weights.append(row)
    return weights


def slow_loss(student, other, weights, mask, beta, temperature=1.0) -> torch.Tensor:
    """The weighted divergences of the counted places, over their number; of logits `(B, T, V)`."""
    total, count = torch.zeros(()).double(), 0
    for b in range(mask.shape[0]):
        for t in range(mask.shape[1]):
            if mask[b, t]:
                mine = (student[b, t].double() / temperature).log_softmax(-1)
                theirs = (other[b, t].double() / temperature).log_softmax(-1)
                total = total + weights[b][t] * divergence(mine, theirs, beta)
                count += 1
    return total / count
