"""The arithmetic of PPO, against slow loops: advantages, their whitening, and the critic's clipped loss."""

import math

import pytest
import reference_ppo as slow
import torch

from trl_quant.trainers.ppo.gae import explained_variance, gae, moments, rewards_of, value_losses, whitened


pytestmark = pytest.mark.isa

# Completions of several lengths; one without actions; one with what a tool wrote in its middle, one at its end
MASK = torch.tensor(
    [
        [1, 1, 1, 1, 1, 1],
        [1, 1, 1, 0, 0, 0],
        [1, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 1, 0],
        [1, 0, 1, 1, 0, 0],
    ]
)
SCORES = torch.tensor([1.0, -2.0, 0.5, 3.0, 1.0, 0.25])


def values() -> torch.Tensor:
    return torch.randn(MASK.shape, generator=torch.Generator().manual_seed(0))


def alone(x):
    """The sum over one rank."""
    return x


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.9, 1.0), (1.0, 0.8), (0.95, 0.7), (0.9, 0.0), (0.0, 1.0)])
def test_advantages_are_those_of_the_definition(gamma, lam):
    rewards = rewards_of(SCORES, MASK)
    found = gae(rewards, values(), MASK, gamma, lam)
    expected = slow.advantages(SCORES, values(), MASK, gamma, lam)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    assert (found[MASK == 0] == 0).all()
    # Not those of every token: what a tool wrote and padding are no actions
    every = slow.advantages(SCORES, values(), torch.ones_like(MASK), gamma, lam)
    if gamma * lam < 1:  # otherwise it is the reward less the value in both cases
        assert ((found.double() - every)[4:] * MASK[4:]).abs().max() > 1e-2
    # Nor those of another discount
    other = slow.advantages(SCORES, values(), MASK, gamma - 0.2 if gamma else 0.5, lam)
    assert (found.double() - other).abs().max() > 1e-2
    # What stands where there is no action is not read
    noise = torch.where(MASK == 0, torch.nan, values())
    torch.testing.assert_close(gae(rewards, noise, MASK, gamma, lam), found, rtol=0, atol=0)


def test_the_reward_comes_with_the_last_action():
    rewards = rewards_of(SCORES, MASK)
    assert rewards.nonzero().tolist() == [[0, 5], [1, 2], [2, 0], [4, 4], [5, 3]]
    assert rewards.sum(1).tolist() == [1.0, -2.0, 0.5, 0.0, 1.0, 0.25]


def test_without_a_critic_it_is_the_reward_to_go():
    """With gamma = lam = 1 and values of 0 each action has the reward; lam = 0 leaves it to the last action."""
    rewards, zero = rewards_of(SCORES, MASK), torch.zeros(MASK.shape)
    assert torch.equal(gae(rewards, zero, MASK, 1.0, 1.0), SCORES[:, None] * MASK)
    assert torch.equal(gae(rewards, zero, MASK, 1.0, 0.0), rewards)
    discounted = gae(rewards, zero, MASK, 0.5, 1.0)
    assert discounted[0].tolist() == [2.0**-k for k in (5, 4, 3, 2, 1, 0)]
    assert discounted[4].tolist() == [0.25, 0.5, 0.0, 0.0, 1.0, 0.0]


def test_a_perfect_critic_leaves_nothing_to_learn():
    rewards = rewards_of(SCORES, MASK)
    known = SCORES[:, None].expand(MASK.shape)
    for lam in (0.0, 0.5, 1.0):
        assert gae(rewards, known, MASK, 1.0, lam).abs().max() < 1e-6


def test_whitening():
    advantages = 3 + 2 * values()
    found = whitened(advantages, MASK, alone)
    torch.testing.assert_close(found.double(), slow.whitened(advantages.double(), MASK), rtol=1e-5, atol=1e-6)
    kept = found[MASK.bool()]
    assert kept.mean().abs() < 1e-6 and abs(kept.std() - 1) < 1e-5 and (found[MASK == 0] == 0).all()
    padded = (advantages - advantages.mean()) / advantages.std()  # over padding too
    assert (found - padded)[MASK.bool()].abs().max() > 1e-2


def test_whitening_is_over_all_ranks():
    """Two ranks, one after the other: the sums of both are known to each."""
    advantages, halves = values(), (slice(0, 3), slice(3, 6))
    expected = whitened(advantages, MASK, alone)
    for mine, other in (halves, halves[::-1]):
        seen = iter([True, False])

        def total(x, mine=mine, other=other, seen=seen):
            counted = advantages[other].double()[MASK[other].bool()]
            if next(seen):
                return x + torch.stack([counted.sum(), torch.tensor(len(counted), dtype=torch.float64)])
            mean = advantages.double()[MASK.bool()].mean()
            return x + (counted - mean).square().sum()

        found = whitened(advantages[mine], MASK[mine], total)
        torch.testing.assert_close(found, expected[mine], rtol=1e-6, atol=1e-7)
        assert (found - whitened(advantages[mine], MASK[mine], alone)).abs().max() > 1e-2


def test_whitening_of_little():
    """A single action, equal advantages, and none at all stay finite."""
    one = torch.zeros_like(MASK)
    one[0, 0] = 1
    assert torch.equal(whitened(values(), one, alone), torch.zeros(MASK.shape))
    assert torch.equal(whitened(torch.full(MASK.shape, 0.5), MASK, alone), torch.zeros(MASK.shape))
    assert torch.equal(whitened(values(), torch.zeros_like(MASK), alone), torch.zeros(MASK.shape))
    mean, variance = moments(values(), torch.zeros_like(MASK), alone)
    assert mean.isnan() and variance == 0


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
@pytest.mark.parametrize("reward", [-0.3, 0.0, 1.0, 7e3])
@pytest.mark.parametrize("length", [2, 700])
def test_equal_returns_have_no_explained_variance(reward, scale, length):
    """
    Returns that are equal except for rounding, at any size of the values: the plain quotient of the variances is far
    below -1e6. A difference between two returns that is a hundred times the rounding is a variance, and is explained.
    """
    generator, mask = torch.Generator().manual_seed(0), torch.ones(4, length)
    mask[1, length // 2 :] = 0
    old = scale * torch.randn(mask.shape, generator=generator)

    def explained(scores):
        advantages = gae(rewards_of(scores, mask), old, mask, 1.0, 1.0)
        found = [moments(x, mask, alone) for x in (old, advantages, old + advantages)]
        return explained_variance(*found, old.dtype), found

    found, (_, advantages, returns) = explained(torch.full((4,), reward))
    assert found is None
    if returns.variance > 0:
        assert 1 - advantages.variance / returns.variance < -1e6
    scores = torch.full((4,), reward, dtype=torch.float64)
    scores[2] += 1e-5 * (scale + abs(reward))
    found, _ = explained(scores.float())
    known = slow.advantages(scores.float(), old, mask, 1.0, 1.0)[mask.bool()], old.double()[mask.bool()]
    assert 1 - found == pytest.approx((known[0].var() / sum(known).var()).item(), rel=2e-2)


def test_no_tokens_have_no_explained_variance():
    nothing = moments(values(), torch.zeros_like(MASK), alone)
    assert explained_variance(nothing, nothing, nothing, torch.float32) is None


@pytest.mark.parametrize("cliprange", [0.1, 0.5, None])
def test_the_value_loss(cliprange):
    old, returns = values(), values().flip(0)
    new = (old + 0.8 * values().flip(1)).requires_grad_()
    losses, is_clipped = value_losses(new, old, returns, cliprange)
    loss = (losses * MASK).sum() / MASK.sum()
    (gradient,) = torch.autograd.grad(loss, new)
    expected, share = slow.value_loss(new, old, returns, MASK, cliprange)
    (expected_gradient,) = torch.autograd.grad(expected, new)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-7)
    unclipped, _ = slow.value_loss(new, old, returns, MASK, None)
    if cliprange is None:
        assert is_clipped is None
    else:
        assert (is_clipped * MASK).sum().item() / MASK.sum().item() == pytest.approx(share) and 0 < share < 1
        assert loss.item() > 1.001 * unclipped.item()
        assert (gradient[is_clipped & MASK.bool()] == 0).all()  # a clipped value learns nothing


def test_a_value_that_has_not_moved_is_not_clipped():
    losses, is_clipped = value_losses(values(), values(), torch.full(MASK.shape, 9.0), 1e-3)
    assert not is_clipped.any()
    assert losses.mean().item() == pytest.approx(((values() - 9.0) ** 2 / 2).mean().item())
    assert math.isfinite(losses.sum().item())
