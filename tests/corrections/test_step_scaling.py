"""The effective sample size of a step's completions, against exact fractions, and where floats would overflow."""

from fractions import Fraction

import pytest
import torch

from trl_quant.corrections.step_scaling import effective_share, sequence_log_weights, step_factor


def test_it_is_the_papers_fraction():
    """Of weights that are powers of two, whose fraction is exact; of three tokens a completion, one of them masked."""
    powers = torch.tensor([[1, -2, 5], [0, 0, 7], [3, 1, 0], [-4, 2, 1]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 0], [1, 1, 1], [1, 1, 1]])
    log_w = sequence_log_weights(powers * torch.tensor(2.0).log(), torch.zeros(4, 3), mask)
    w = [Fraction(2) ** int(power) for power in (powers * mask).sum(1)]
    assert w == [Fraction(1, 2), 1, 16, Fraction(1, 2)]
    expected = sum(w) ** 2 / (len(w) * sum(x * x for x in w))
    assert effective_share(log_w) == pytest.approx(float(expected), rel=1e-6)
    assert effective_share(log_w.clamp(max=torch.tensor(2.0).log())) > 1.5 * float(expected)  # with a cap of 2
    assert effective_share((powers * mask).sum(1) / 3 * torch.tensor(2.0).log()) > 1.3 * float(expected)  # of means


def test_it_has_no_bounds_of_floats():
    """One completion of weight e^4000 beside others of e^-4000: it alone counts."""
    logps = torch.zeros(5, 40)
    logps[0], logps[1:] = 100.0, -100.0
    log_w = sequence_log_weights(logps, torch.zeros(5, 40), torch.ones(5, 40))
    assert effective_share(log_w) == pytest.approx(1 / 5, rel=1e-12)
    assert effective_share(log_w + 1e5) == pytest.approx(1 / 5, rel=1e-9)  # a common factor changes nothing


def test_unscored_tokens_count_as_agreeing_and_empty_rows_not_at_all():
    rollout = torch.tensor([[0.0, torch.nan], [-torch.inf, -1.0], [torch.nan, torch.nan], [0.0, 0.0]])
    mask = torch.tensor([[1, 1], [1, 1], [1, 1], [0, 0]])
    log_w = sequence_log_weights(torch.tensor([[-0.5, -9.0]] * 4), rollout, mask)
    assert log_w[:2].tolist() == [-0.5, -8.0] and log_w[2:].isnan().all()
    assert effective_share(log_w) == effective_share(log_w[:2]) < 0.51
    assert effective_share(log_w[2:]) == 1.0


def test_a_step_is_made_smaller_only():
    assert step_factor(0.25, 1.0) == 0.5
    assert step_factor(0.9, 0.4) == step_factor(0.4, 0.4) == 1.0
