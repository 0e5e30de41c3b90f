"""Corrections that drop tokens or whole sequences: what each looks at, what it does not, and their runs."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import DROPPING
from training import config, dataset, make, metrics, parameters

from trl_quant import QuantGRPOConfig, QuantGRPOTrainer
from trl_quant.corrections import CORRECTIONS, CorrectionInputs


def test_a_sequence_is_not_dropped_for_its_length():
    """The same mismatch on each token: the product leaves any bound, the geometric mean and the maximum stay."""
    for length in (1, 10, 1000):
        old = torch.full((2, length), -1.0)
        inputs = CorrectionInputs(old - 0.009, old, torch.ones(2), torch.ones(2, length))
        assert (CORRECTIONS["geometric"]()(inputs).weights == 1).all()
        assert (CORRECTIONS["trm"]()(inputs).weights > 1).all()
        product = CORRECTIONS["icepop"]()(replace(inputs, level="sequence")).weights
        assert product.tolist() == [[pytest.approx(0 if length == 1000 else math.exp(0.009 * length))] * length] * 2
        off = CORRECTIONS["geometric"]()(replace(inputs, rollout_logps=old - 0.011, level="sequence"))
        assert (off.weights == 0).all() and off.metrics["mismatch/dropped_fraction"] == 1


def test_what_cancels_in_the_mean_does_not_in_the_maximum():
    """One token up and one down: `geometric` keeps the sequence, `trm` drops it, `icepop` drops the two tokens."""
    old = torch.full((2, 6), -2.0)
    rollout = old.clone()
    rollout[0, 2], rollout[0, 4] = -4.0, 0.0
    inputs = CorrectionInputs(rollout, old, torch.ones(2), torch.ones(2, 6))
    gone = {name: CORRECTIONS[name]()(inputs) for name in ("geometric", "trm", "icepop")}
    assert (gone["geometric"].weights == 1).all()
    assert (gone["trm"].weights[0] == 0).all() and (gone["trm"].weights[1] == 1).all()
    assert gone["icepop"].weights.eq(0).nonzero().tolist() == [[0, 2], [0, 4]]
    shares = {name: tuple(v for k, v in o.metrics.items() if "dropped" in k) for name, o in gone.items()}
    assert shares == {"geometric": (0, 0), "trm": (0.5, 0.5), "icepop": (pytest.approx(2 / 12), 0.5)}


def test_a_dropped_sequence_takes_its_unscored_tokens_along():
    old = torch.full((2, 3), -1.0)
    rollout = old - 2.0
    rollout[:, 1] = math.nan
    inputs = CorrectionInputs(rollout, old, torch.ones(2), torch.tensor([[1, 1, 1], [1, 1, 0]]))
    for name in ("geometric", "trm"):
        output = CORRECTIONS[name]()(inputs)
        assert output.weights.tolist() == [[0, 0, 0], [0, 0, 1]] and output.metrics["mismatch/dropped_fraction"] == 1
    for name in ("icepop", "dppo"):
        assert (CORRECTIONS[name]()(inputs).weights[:, 1] == 1).all()


@pytest.mark.parametrize("a", [1.0, -1.0])
def test_dppo_looks_at_the_probability_that_moved_and_where_the_advantage_pushes(a):
    """pi - mu of a rare token whose ratio is 8, of a frequent one whose ratio is 1.25 (0.8), and of both back."""
    mu = torch.tensor([[0.001, 0.7, 0.9, 0.008]])
    pi = torch.tensor([[0.008, 0.9, 0.7, 0.001]])
    inputs = CorrectionInputs(mu.log(), pi.log(), torch.tensor([a]), torch.ones(1, 4))
    output = CORRECTIONS["dppo"](delta=0.1)(inputs)
    assert output.weights.eq(0).nonzero().tolist() == [[0, 1 if a > 0 else 2]]
    kept = output.weights[output.weights > 0]
    torch.testing.assert_close(kept, (pi / mu)[output.weights > 0])
    assert (CORRECTIONS["icepop"]()(inputs).weights == 0).tolist() == [[True, False, False, True]]  # by the factor


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1000), st.floats(0.01, 1), st.floats(0.01, 1))
def test_a_looser_bound_drops_no_more(seed, a, b):
    g = torch.Generator().manual_seed(seed)
    old, noise = -3 * torch.rand(4, 7, generator=g), torch.randn(4, 7, generator=g)
    inputs = CorrectionInputs(old + 0.7 * noise, old, torch.randn(4, generator=g), torch.ones(4, 7))
    low, high = sorted((a, b))
    bounds = {"geometric": "epsilon", "trm": "delta", "dppo": "delta"}
    pairs = [(CORRECTIONS[n](**{f: low}), CORRECTIONS[n](**{f: high})) for n, f in bounds.items()]
    pairs.append((CORRECTIONS["icepop"](low=high, high=1 / high), CORRECTIONS["icepop"](low=low, high=1 / low)))
    for tight, loose in pairs:
        assert (tight(inputs).weights <= loose(inputs).weights).all()


# Runs


def trained(path, **settings):
    trainer = make(QuantGRPOTrainer, config(QuantGRPOConfig, path, rollout_precision="int4", max_steps=2, **settings))
    trainer.train()
    return trainer


def test_icepop_is_trls_token_mask(tmp_path):
    """With both of its bounds: the same parameters, bit for bit, and the same share dropped; with one, another run."""
    low, high = DROPPING["icepop"].values()
    mask = {"is_correction": "trl", "vllm_importance_sampling_mode": "token_mask"}
    mask["vllm_importance_sampling_clip_max"] = high
    mine = trained(tmp_path, is_correction="icepop", num_iterations=2, **DROPPING["icepop"])
    theirs = trained(tmp_path, num_iterations=2, vllm_importance_sampling_clip_min=low, **mask)
    one_sided = trained(tmp_path, num_iterations=2, **mask)
    weights = [torch.cat([p.flatten() for p in parameters(run).values()]) for run in (mine, theirs, one_sided)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    for name in ("mismatch/dropped_fraction", "mismatch/dropped_sequence_fraction"):
        assert 0 < metrics(mine)[0][name] == metrics(theirs)[0][name] <= 1


@pytest.mark.parametrize("name", ["trm", "dppo"])
def test_what_judges_the_current_policy_does_so_at_each_update(tmp_path, name):
    """Two updates on one generation: the second is measured where the policy stands then, and no ratio is clipped."""
    twice = {"num_iterations": 2, "learning_rate": 0.02}
    first, second = metrics(trained(tmp_path, is_correction=name, **DROPPING[name], **twice))[:2]
    assert first["mismatch/kl_k3"] != second["mismatch/kl_k3"] > 0
    assert first["mismatch/entropy"] == second["mismatch/entropy"]  # the sampler's: the same tokens
    assert second["clip_ratio/region_mean"] == 0
    decoupled = metrics(trained(tmp_path, is_correction="decoupled", **twice))
    assert "mismatch/kl_k3" not in decoupled[1] and decoupled[1]["clip_ratio/region_mean"] > 0


def test_an_evaluation_between_two_updates_takes_no_metrics(tmp_path):
    """Micro-batches of one generation are measured together, whatever comes between."""
    halves = {"per_device_train_batch_size": 4, "steps_per_generation": 2, "is_correction": "dppo", "max_steps": 2}
    evaluated = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4}
    runs = []
    for path, extra in (("plain", {}), ("evaluated", evaluated)):
        args = config(QuantGRPOConfig, tmp_path / path, rollout_precision="int4", **halves, **extra)
        runs.append(make(QuantGRPOTrainer, args, eval_dataset=dataset(2)))
        runs[-1].train()
    plain, mixed = ([entry for entry in metrics(run) if "loss" in entry] for run in runs)
    assert "mismatch/kl_k3" not in plain[0] and plain[1]["mismatch/kl_k3"] == mixed[1]["mismatch/kl_k3"] > 0
    assert all(entry["eval_mismatch/kl_k3"] > 0 for entry in metrics(runs[1]) if "eval_loss" in entry)
