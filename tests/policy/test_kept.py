"""Log-probabilities over what truncation left, and their gradients, against autograd on whole logits, one by one."""

import numpy as np
import pytest
import torch

from trl_quant.policy import kept as kept_module
from trl_quant.policy.kept import Truncation, log_probs_over
from trl_quant.rollout.kept import Kept


VOCABULARY, ROWS, FEATURES, TOKENS = 150, 160, 24, 12  # the head has rows that no token has


def case(bias: bool):
    """The head's arguments, and what was left for each token; `None` for two that have no entry."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, FEATURES, generator=generator, requires_grad=True)
    weight = torch.randn(ROWS, FEATURES, generator=generator, requires_grad=True)
    bias = torch.randn(ROWS, generator=generator, requires_grad=True) if bias else None
    random, left, targets = np.random.default_rng(0), [], []
    for size in (1, 2, 4, 5, 6, 40, 149, 150, 3, 100):  # from five on as a bit mask; of 150 all
        left.append(random.permutation(VOCABULARY)[:size])
        targets.append(int(left[-1][0]))
    left, targets = [*left[:4], None, *left[4:], None], [*targets[:4], 7, *targets[4:], 155]
    return hidden, weight, bias, torch.tensor(targets), left


def truncation(left) -> Truncation:
    """The entries in another order than the tokens."""
    known = [place for place, ids in enumerate(left) if ids is not None][::-1]
    kept = Kept.of([left[place] for place in known], VOCABULARY)
    places = torch.full((len(left),), -1)
    places[known] = torch.arange(len(known))
    starts = torch.cat([torch.zeros(1, dtype=torch.long), kept.counts.long().cumsum(0)])
    return Truncation(kept.words, starts, places, VOCABULARY)


def slowly(hidden, weight, bias, targets, left, temperature, cap, scale):
    """log pi over K, one token after the other."""
    found = []
    for x, target, ids in zip(hidden, targets, left, strict=True):
        logits = (weight @ x + (0 if bias is None else bias)) * scale
        logits = (logits if cap is None else cap * torch.tanh(logits / cap)) / temperature
        among = logits if ids is None else logits[torch.from_numpy(np.sort(ids)).long()]
        if ids is not None and len(ids) == VOCABULARY:
            among = logits[:VOCABULARY]
        found.append(logits[target] - torch.log(torch.exp(among - logits.max()).sum()) - logits.max())
    return torch.stack(found)


@pytest.mark.parametrize("at_once", [2**25, 3 * ROWS])
@pytest.mark.parametrize(("cap", "scale", "bias"), [(None, 1.0, False), (None, 0.5, True), (20.0, 2.0, True)])
def test_values_and_gradients_are_those_of_whole_logits(monkeypatch, at_once, cap, scale, bias):
    monkeypatch.setattr(kept_module, "LOGITS_AT_ONCE", at_once)
    *head, left = case(bias)
    targets = head.pop()
    found, gradients = [], []
    parameters = [tensor for tensor in head if tensor is not None]
    along = torch.randn(TOKENS, generator=torch.Generator().manual_seed(1))
    how = {"temperature": 0.7, "cap": cap, "scale": scale}
    for over in (left, [None] * TOKENS):
        found.append(log_probs_over(*head, targets, truncation(over), **how))
        expected = slowly(*head, targets, over, **how)
        assert torch.allclose(found[-1], expected, atol=2e-6, rtol=1e-6)
        gradients.append(torch.autograd.grad(found[-1] @ along, parameters))
        for ours, theirs in zip(gradients[-1], torch.autograd.grad(expected @ along, parameters), strict=True):
            assert (ours - theirs).norm() < 1e-5 * theirs.norm()
    assert (found[0] - found[1]).max() > 1.0 and (found[0] >= found[1]).all()
    for over, among_all in zip(*gradients, strict=True):
        assert (over - among_all).norm() > 0.1 * among_all.norm()
    assert not gradients[0][1][150:].equal(torch.zeros(10, FEATURES))  # of the tokens without an entry


def test_a_single_token_has_no_gradient():
    """Where one token was left, the policy has no choice."""
    hidden, weight, _, targets, left = case(False)
    logps = log_probs_over(hidden, weight, None, targets, truncation(left))
    assert logps[0] == 0
    (gradient,) = torch.autograd.grad(logps.sum(), [hidden])
    assert not gradient[0].any() and gradient[1:].any(1).all()
