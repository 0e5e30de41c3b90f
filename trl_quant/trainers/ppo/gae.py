"""The arithmetic of PPO on completions: advantages by GAE, their whitening, and the critic's clipped loss.

A completion is an episode, and each of its tokens an action. The state before token t is the prompt with the tokens
before t, and the critic gives it a value V_t. The completion's reward comes with its last action. Generalized advantage
estimation (GAE, arXiv 1506.02438, eq. 16) computes, from the last action to the first,

    delta_t = r_t + gamma V_t+1 - V_t
    A_t     = delta_t + gamma lam A_t+1,        return_t = A_t + V_t

and PPO (arXiv 1707.06347) whitens the advantages and trains the critic to predict the returns,

    L_t = max((V_t - return_t)^2, (clip(V_t, V_old_t - c, V_old_t + c) - return_t)^2) / 2

| symbol | here | meaning |
|---|---|---|
| `r_t` | `rewards` | the completion's reward at its last action, 0 elsewhere |
| `V_t`, `V_old_t` | `values`, `old_values` | the value of the state before token t, now and at generation time |
| `gamma`, `lam` | `gamma`, `lam` | the discount of a reward per action; how far GAE looks ahead |
| `c` | `cliprange` | how far a value may move from the old one before it is clipped |

Tokens that a tool wrote are not actions. The index t + 1 means the next action, which may be many tokens later. After
the last action the value is 0, even if the completion was cut off at its maximum length.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


EPSILON = 1e-8  # keeps whitened advantages finite where all are equal


class Moments(NamedTuple):
    """
    The moments of a quantity over the N tokens that count. `mean` is NaN for N = 0. `variance` is the sample variance
    (N - 1), 0 for N = 0 and N = 1.
    """

    mean: Tensor
    variance: Tensor

    @property
    def square(self) -> Tensor:
        """The mean square, or a little more, since `variance` is divided by N - 1."""
        return self.mean.square() + self.variance


def rewards_of(scores: Tensor, mask: Tensor) -> Tensor:
    """
    Puts the reward of each completion at its last action.

    Args:
        scores (`torch.Tensor` of shape `(B,)`): The rewards.
        mask (`torch.Tensor` of shape `(B, T)`): 1 on actions.

    Returns:
        `torch.Tensor` of shape `(B, T)`: `r_t`. A completion without actions gets no reward.
    """
    is_last = mask.bool() & (mask.flip(1).cumsum(1).flip(1) == 1)
    return torch.where(is_last, scores[:, None], 0.0)


@torch.no_grad()
def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> Tensor:
    """
    Computes the advantage of each action.

    Args:
        rewards, values (`torch.Tensor` of shape `(B, T)`): `r_t` and `V_t`.
        mask (`torch.Tensor` of shape `(B, T)`): 1 on actions. Other entries of `rewards` and `values` are not read.
        gamma, lam (`float`): See the module's docstring.

    Returns:
        `torch.Tensor` of shape `(B, T)`: `A_t`, and 0 where there is no action.
    """
    is_action, dtype = mask.bool(), values.dtype
    # In float64, so that rounding does not add up along a completion
    rewards, values = rewards.double(), values.double()
    advantages = torch.zeros_like(values)
    next_value = next_advantage = values.new_zeros(len(values))
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * lam * next_advantage
        next_value = torch.where(is_action[:, t], values[:, t], next_value)
        next_advantage = torch.where(is_action[:, t], advantage, next_advantage)
        advantages[:, t] = torch.where(is_action[:, t], advantage, 0.0)
    return advantages.to(dtype)


def explained_variance(values: Moments, advantages: Moments, returns: Moments, dtype: torch.dtype) -> float | None:
    """
    Computes the share of the returns' variance that the values explain, `1 - var(A) / var(return)`.

    A return is the rounded sum of a value and a rounded advantage. With eps, the spacing of floats at 1, its error is
    at most eps (|V| + 2 |return|) / 2. The variance of such errors is at most eps^2 (E[V^2] + 4 E[return^2]).

    Args:
        values, advantages, returns ([`Moments`]): Moments of `V_t`, `A_t` and `return_t`, over the same tokens.
        dtype (`torch.dtype`): The type of `V_t` and `A_t`.

    Returns:
        `float` or `None`: `None` if no token counts, or if the returns do not differ by more than rounding explains.
    """
    rounding = torch.finfo(dtype).eps ** 2 * (values.square + 4 * returns.square)
    if not returns.variance > rounding:
        return None
    return 1 - (advantages.variance / returns.variance).item()


def moments(x: Tensor, mask: Tensor, total: Callable[[Tensor], Tensor]) -> Moments:
    """
    Computes the moments of `x` over the tokens of all ranks that count, in float64. All ranks must call it.

    Args:
        x, mask (`torch.Tensor` of shape `(B, T)`): The quantity on this rank, and 1 on the tokens that count.
        total (`Callable`): Adds up a tensor over all ranks.
    """
    counted = x.double()[mask.bool()]
    summed, count = total(torch.stack([counted.sum(), counted.new_tensor(len(counted))]))
    mean = summed / count
    return Moments(mean, total((counted - mean).square().sum()) / (count - 1).clamp(min=1))


def whitened(advantages: Tensor, mask: Tensor, total: Callable[[Tensor], Tensor]) -> Tensor:
    """
    Returns the advantages `(B, T)` with mean 0 and variance 1 over the actions of all ranks, and 0 elsewhere. The
    arguments are those of [`moments`]. All ranks must call it.
    """
    mean, variance = moments(advantages, mask, total)
    scaled = (advantages.double() - mean) * torch.rsqrt(variance + EPSILON)
    return torch.where(mask.bool(), scaled, 0.0).to(advantages.dtype)


def value_losses(
    values: Tensor, old_values: Tensor, returns: Tensor, cliprange: float | None
) -> tuple[Tensor, Tensor | None]:
    """
    Computes the critic's loss for each token.

    Args:
        values, old_values, returns (`torch.Tensor` of shape `(B, T)`): See the module's docstring.
        cliprange (`float` or `None`): `c`; `None` clips nothing.

    Returns:
        The losses `(B, T)`, and booleans `(B, T)`, true where the clipped value gave the loss; `None` without a
        `cliprange`.
    """
    losses = (values - returns).square()
    if cliprange is None:
        return losses / 2, None
    clipped = torch.clamp(values, old_values - cliprange, old_values + cliprange)
    clipped_losses = (clipped - returns).square()
    return torch.max(losses, clipped_losses) / 2, clipped_losses > losses
