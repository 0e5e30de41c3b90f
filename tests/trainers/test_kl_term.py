"""TRL's KL term (`beta`) under each correction: which ratio multiplies it, in the gradient and in the logged `kl`."""

import pytest
import torch
from tiny import save_tiny
from training import config, make
from trl import GRPOConfig, GRPOTrainer

from trl_quant import QuantGRPOConfig, QuantGRPOTrainer
from trl_quant.corrections import CORRECTIONS


BETA, ROWS, TOKENS = 0.3, 8, 8
# Whose probability the term's ratio divides by, where that is not the old policy's, as in TRL's own trainer
ANCHORS = {"coupled": "rollout", "trm": "current", "dppo": "current"}


def drawn(seed: int, size: float) -> torch.Tensor:
    return size * torch.randn(ROWS, TOKENS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


OLD = -2 + drawn(0, 0.5)
POLICIES = {
    "old": OLD,
    "rollout": OLD + drawn(1, 0.1),
    "current": OLD + drawn(2, 0.1),
    "reference": OLD + drawn(3, 0.5),
}
MASK = torch.ones(ROWS, TOKENS, dtype=torch.long)
MASK[0, 5:] = 0


def batch() -> dict:
    ids = torch.ones(ROWS, TOKENS, dtype=torch.long)
    return {
        "prompt_ids": ids,
        "prompt_mask": ids,
        "completion_ids": ids,
        "completion_mask": MASK,
        "advantages": torch.linspace(-1, 1, ROWS, dtype=torch.float64),
        "num_items_in_batch": MASK.sum(),
        "old_per_token_logps": POLICIES["old"].clone(),
        "sampling_per_token_logps": POLICIES["rollout"].clone(),
        "ref_per_token_logps": POLICIES["reference"].clone(),
        "importance_sampling_ratio": torch.ones(ROWS, TOKENS, dtype=torch.float64),
    }


@pytest.fixture
def scores(monkeypatch):
    """TRL's trainer samples the batch above, and its model gives it these log-probabilities, a leaf of the graph."""
    logps = POLICIES["current"].clone().requires_grad_()
    monkeypatch.setattr(GRPOTrainer, "_generate_and_score_completions", lambda self, inputs: batch())
    scored = lambda self, *args, **kwargs: (logps, torch.zeros(ROWS, TOKENS), None)  # noqa: E731
    monkeypatch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies", scored)
    return logps


def kl_term(trainer, logps: torch.Tensor) -> tuple[torch.Tensor, float]:
    """The gradient that `beta` adds to the loss's, and the `kl` that is logged."""
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    gradients = []
    for trainer.beta in (BETA, 0.0):
        loss = trainer._compute_loss(trainer.model, trainer._generate_and_score_completions([{"prompt": "x"}]))
        gradients.append(torch.autograd.grad(loss, logps)[0])
    return gradients[0] - gradients[1], trainer._metrics["train"]["kl"][-1]


def expected_term(anchor: str | None) -> tuple[torch.Tensor, float]:
    """The same of k3, times pi / anchor where there is an anchor, a mean over the tokens that count."""
    logps = POLICIES["current"].clone().requires_grad_()
    difference = POLICIES["reference"] - logps
    term = difference.exp() - difference - 1
    if anchor is not None:
        term = term * (logps - POLICIES[anchor]).exp()
    mean = (term * MASK).sum() / MASK.sum()
    return BETA * torch.autograd.grad(mean, logps)[0], mean.item()


def build(path, name: str | None, bias_correction: bool):
    """A trainer in which a generation serves several updates."""
    args = {"beta": BETA, "loss_type": "bnpo", "num_iterations": 2, "use_bias_correction_kl": bias_correction}
    model = save_tiny(path / "model")
    if name is None:
        return make(GRPOTrainer, config(GRPOConfig, path, **args), model)
    args |= {"rollout_precision": "int4", "is_correction": name}
    return make(QuantGRPOTrainer, config(QuantGRPOConfig, path, **args), model)


def test_bias_correction_is_trls_default():
    assert GRPOConfig.__dataclass_fields__["use_bias_correction_kl"].default is True


@pytest.mark.parametrize("name", [None, *CORRECTIONS, "trl"], ids=str)
def test_which_ratio_multiplies_the_kl_term(tmp_path, name, scores):
    """No weight does. With the bias correction the loss's ratio R does, and three corrections divide by another."""
    gradient, logged = kl_term(build(tmp_path, name, bias_correction=True), scores)
    anchor = ANCHORS.get(name, "old")
    for candidate in ("old", "rollout", "current", None):
        expected, mean = expected_term(candidate)
        same = torch.allclose(gradient, expected, rtol=1e-6, atol=1e-9)
        assert same == (candidate == anchor), candidate
        # at the current policy the ratio is 1, and acts on the gradient alone
        assert (logged == pytest.approx(mean, rel=1e-5)) == (same or {candidate, anchor} == {"current", None})


@pytest.mark.parametrize("name", [None, *CORRECTIONS, "trl"], ids=str)
def test_without_the_bias_correction_nothing_does(tmp_path, name, scores):
    """The plain k3 estimator, as QuRL writes it."""
    gradient, logged = kl_term(build(tmp_path, name, bias_correction=False), scores)
    expected, mean = expected_term(None)
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-9)
    assert logged == pytest.approx(mean, rel=1e-5)
