"""Corrections: the papers' objectives and gradients, exactly; then what must hold for every input."""

import math
from dataclasses import replace
from functools import cache

import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_quant.corrections import CORRECTIONS, CorrectionInputs
from trl_quant.corrections.diagnostics import LOG_RATIO_BOUND


CAPPED = [name for name, kind in CORRECTIONS.items() if "cap" in kind.__dataclass_fields__]
CLIP = {"epsilon_low": 0.1, "epsilon_high": 0.3}


def batch(seed=0, shape=(4, 7), mismatch=0.7, dtype=torch.float32, unscored=True):
    """A batch with masked tokens, unscored tokens, and a mismatch large enough for a cap of 1.5."""
    g = torch.Generator().manual_seed(seed)
    old = -torch.rand(shape, generator=g, dtype=dtype) * 3
    rollout = old + mismatch * torch.randn(shape, generator=g, dtype=dtype)
    logps = old + 0.4 * torch.randn(shape, generator=g, dtype=dtype)
    advantages = torch.randn(shape[0], generator=g, dtype=dtype)
    mask = (torch.rand(shape, generator=g) > 0.25).long()
    if unscored:
        mask[0, :2] = 1
        rollout[0, 0], rollout[0, 1] = math.nan, -math.inf
    return CorrectionInputs(rollout, old, advantages, mask), logps


def loss_of(output, inputs, logps, epsilon_low, epsilon_high):
    """How a trainer uses a correction's output: the mean over unmasked tokens, to be maximised."""
    a = inputs.advantages[:, None] if inputs.advantages.dim() == 1 else inputs.advantages
    old = inputs.old_logps if output.old_logps is None else output.old_logps
    low = torch.full_like(logps, 1 - epsilon_low) if output.clip_low is None else output.clip_low
    high = torch.full_like(logps, 1 + epsilon_high) if output.clip_high is None else output.clip_high
    ratio = torch.exp(logps - old)
    terms = output.weights * torch.min(ratio * a, torch.clamp(ratio, low, high) * a)
    return terms[inputs.mask.bool()].mean()


def diagnostics(name, inputs, **hyperparameters):
    """Every `mismatch/` metric of a correction, from the slow loops."""
    fields = (inputs.rollout_logps, inputs.old_logps)
    cap = hyperparameters.get("cap", getattr(CORRECTIONS[name](), "cap", math.inf))
    cap = reference.cis_cap(inputs.old_logps, **hyperparameters) if name == "cis" else cap
    gone = reference.dropped(name, *fields[::-1], inputs.advantages, inputs.mask, **hyperparameters)
    return reference.diagnostics(*fields, inputs.mask, cap) | gone


def close(metrics, expected, rel=1e-6):
    assert set(metrics) == set(expected)
    for name, value in expected.items():
        assert type(metrics[name]) is float
        assert metrics[name] == pytest.approx(value, rel=rel, abs=1e-9), name


@pytest.mark.parametrize("name", CORRECTIONS)
def test_a_trait_says_whether_sequences_weigh_otherwise_than_tokens(name):
    inputs, _ = batch(seed=2)
    kind, given = CORRECTIONS[name], reference.HYPERPARAMETERS.get(name, {})
    if kind.token_only:
        return
    tokens, sequences = (kind(**given)(replace(inputs, level=level)).weights for level in ("token", "sequence"))
    assert kind.has_levels == (not torch.equal(tokens, sequences))


# The papers' equations


@cache
def papers(seed):
    """Each paper's objective on a batch, and its gradient."""
    inputs, logps = batch(seed, shape=(8, 30), dtype=torch.float64)
    logps.requires_grad_()
    fields = (inputs.old_logps, inputs.rollout_logps, inputs.advantages, inputs.mask)
    found = {}
    for name, objective in reference.OBJECTIVES.items():
        hyperparameters = {k: v for k, v in reference.HYPERPARAMETERS.get(name, {}).items() if k not in CLIP}
        value = objective(logps, *fields, **CLIP, **hyperparameters)
        found[name] = value.detach(), *torch.autograd.grad(value, logps)
    return found


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CORRECTIONS)
def test_objective_and_gradient_are_the_papers(name, seed):
    """Each equals its own equation, in value and gradient, and no other's."""
    inputs, logps = batch(seed, shape=(8, 30), dtype=torch.float64)
    logps.requires_grad_()
    correction = CORRECTIONS[name](**reference.HYPERPARAMETERS.get(name, {}))
    given = replace(inputs, old_logps=logps.detach()) if getattr(correction, "every_update", False) else inputs
    output = correction(given)
    mine = loss_of(output, given, logps, **CLIP)
    (my_gradient,) = torch.autograd.grad(mine, logps)
    assert set(papers(seed)) == set(CORRECTIONS)
    for other, (theirs, their_gradient) in papers(seed).items():
        if other == name:
            torch.testing.assert_close(mine.detach(), theirs, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(my_gradient, their_gradient, rtol=1e-12, atol=1e-12)
        else:
            assert abs(mine - theirs) > 1e-4, other
            assert (my_gradient - their_gradient).abs().max() > 1e-4, other


@pytest.mark.parametrize("dims", ["(B,)", "(B, 1)", "(B, T)"])
def test_ais_alpha_and_its_parts(dims):
    parts = set()
    for seed in range(20):
        inputs, _ = batch(seed, mismatch=[0.01, 0.3, 1.5][seed % 3])
        a = inputs.advantages
        if dims == "(B, 1)":
            a = a[:, None]
        elif dims == "(B, T)":
            a = a[:, None] * torch.linspace(0.5, 2, inputs.mask.shape[1])
        inputs = CorrectionInputs(inputs.rollout_logps, inputs.old_logps, a, inputs.mask)
        output = CORRECTIONS["ais"](cap=4.0)(inputs)
        expected = reference.ais_alpha(inputs.rollout_logps, inputs.old_logps, a, inputs.mask, cap=4.0)
        close({k: v for k, v in output.metrics.items() if k.startswith("ais/")}, expected, rel=1e-5)
        parts |= {k for k, v in expected.items() if v not in (0.0, 1.0)}
    assert parts == set(expected)  # each part was seen strictly inside its range


@pytest.mark.parametrize("name", CORRECTIONS)
def test_diagnostics(name):
    inputs, _ = batch(seed=1)
    output = CORRECTIONS[name](**reference.HYPERPARAMETERS.get(name, {}))(inputs)
    expected = diagnostics(name, inputs, **reference.HYPERPARAMETERS.get(name, {}))
    close({k: v for k, v in output.metrics.items() if k.startswith("mismatch/")}, expected, rel=1e-5)
    assert all(0 < expected[k] < 1 for k in expected if "dropped" in k)
    assert (expected["mismatch/cap_fraction"] > 0) == (name in (*CAPPED, "cis"))
    assert 0 < expected["mismatch/unscored_fraction"] < 1


@pytest.mark.parametrize("size", [1e-7, 1e-6, 1e-5])
def test_the_kl_of_samplers_that_nearly_agree(size):
    """It is the small number that it is, and not the rounding of the weights, which is as large as 1e-8 here."""
    generator = torch.Generator().manual_seed(0)
    old = -3 * torch.rand(8, 64, generator=generator)
    rollout = old + size * torch.randn(8, 64, generator=generator)
    found = CORRECTIONS["none"]()(CorrectionInputs(rollout, old, torch.zeros(8), torch.ones(8, 64))).metrics
    log_w = [(a - b).item() for a, b in zip(old.flatten(), rollout.flatten(), strict=True)]
    expected = sum(math.expm1(x) - x for x in log_w) / len(log_w)
    assert found["mismatch/kl_k3"] == pytest.approx(expected, rel=1e-6) and expected > 0
    by_weights = ((old - rollout).exp().double() - 1 - (old - rollout).double()).mean().item()
    assert by_weights != pytest.approx(expected, rel=0.1)


def test_kl_estimators_find_the_kl_of_the_behaviour_policy_to_the_proximal():
    """On tokens from a known behaviour policy, both estimators are near KL(behaviour || proximal), not the reverse."""
    g = torch.Generator().manual_seed(0)
    behaviour, proximal = torch.tensor([0.6, 0.3, 0.1]), torch.tensor([0.2, 0.3, 0.5])
    tokens = torch.multinomial(behaviour, 200_000, replacement=True, generator=g).view(200, 1000)
    inputs = CorrectionInputs(
        behaviour.log()[tokens], proximal.log()[tokens], torch.zeros(200), torch.ones_like(tokens)
    )
    metrics = CORRECTIONS["none"]()(inputs).metrics
    forward = (behaviour * (behaviour / proximal).log()).sum().item()
    backward = (proximal * (proximal / behaviour).log()).sum().item()
    chi_square = ((proximal - behaviour) ** 2 / behaviour).sum().item()
    for estimator in ("kl_k1", "kl_k3"):
        assert abs(metrics[f"mismatch/{estimator}"] - forward) < 0.02 < abs(forward - backward)
    assert metrics["mismatch/chi_square"] == pytest.approx(chi_square, rel=0.03)
    assert metrics["mismatch/ess_ratio"] == pytest.approx(1 / (1 + chi_square), rel=0.03)
    assert metrics["mismatch/weight_mean"] == pytest.approx(1, abs=0.02)


def test_k3_is_too_low_where_the_sampler_leaves_tokens_out():
    """By the probability of what it leaves out; k1 still is the KL. So it is in top-p sampling of the policy itself."""
    policy, kept = torch.tensor([0.5, 0.3, 0.1, 0.06, 0.04]), 3
    behaviour = policy[:kept] / policy[:kept].sum()
    tokens = torch.arange(kept).repeat(4, 10)
    inputs = CorrectionInputs(behaviour.log()[tokens], policy.log()[tokens], torch.zeros(4), torch.ones_like(tokens))
    metrics = CORRECTIONS["none"]()(inputs).metrics
    kl = (behaviour * (behaviour / policy[:kept]).log()).sum().item()
    assert metrics["mismatch/kl_k1"] == pytest.approx(kl, rel=1e-4)
    assert metrics["mismatch/kl_k3"] == pytest.approx(kl - policy[kept:].sum().item(), rel=1e-3)
    assert 0 < 10 * metrics["mismatch/kl_k3"] < kl


def test_decoupled_is_unbiased_and_none_is_not():
    """Only with the weights is the mean advantage over the sampler's tokens the trainer's expectation."""
    g = torch.Generator().manual_seed(0)
    behaviour, proximal = torch.tensor([0.6, 0.3, 0.1]), torch.tensor([0.2, 0.3, 0.5])
    reward = torch.tensor([0.0, 0.0, 1.0])
    tokens = torch.multinomial(behaviour, 100_000, replacement=True, generator=g).view(100, 1000)
    inputs = CorrectionInputs(behaviour.log()[tokens], proximal.log()[tokens], reward[tokens], torch.ones_like(tokens))
    hyperparameters = {"ais": {"beta_var": 0}}  # its default trades this bias for a variance that is large here
    estimate = {}
    for name in CORRECTIONS:
        output = CORRECTIONS[name](**hyperparameters.get(name, {}))(inputs)
        estimate[name] = (output.weights * reward[tokens]).mean().item()
    assert estimate["decoupled"] == pytest.approx(0.5, abs=0.01)
    assert estimate["none"] == pytest.approx(0.1, abs=0.01)
    assert estimate["tis"] == pytest.approx(2 * 0.1, abs=0.01)  # the bias that the cap of 2 leaves
    assert estimate["none"] < estimate["ais"] < estimate["decoupled"]


def test_acr_is_tis_where_the_cap_does_not_bite_and_wider_where_it_does():
    inputs, logps = batch(seed=2)
    acr, tis = CORRECTIONS["acr"](cap=1.5)(inputs), CORRECTIONS["tis"](cap=1.5)(inputs)
    w = torch.exp(inputs.old_logps - inputs.rollout_logps)
    bites = (w > 1.5) & inputs.mask.bool() & inputs.rollout_logps.isfinite()
    assert 0 < bites.sum() < inputs.mask.sum()
    assert torch.equal(acr.weights, tis.weights)
    plain = torch.clamp(torch.tensor(100.0), 1 - 0.2, 1 + 0.2)  # the bound in TRL's own arithmetic
    assert (acr.clip_high[~bites] == plain).all()
    torch.testing.assert_close(acr.clip_high[bites], 1.2 * w[bites] / 1.5)
    assert (acr.clip_low == torch.clamp(torch.tensor(0.0), 1 - 0.2, 1 + 0.2)).all()
    # A token that tis clips and acr does not: its gradient is zero with tis and nonzero with acr.
    ratio = torch.tensor(1.3)
    assert (ratio > plain) and (ratio < acr.clip_high[bites].max())
    assert not torch.isclose(loss_of(acr, inputs, logps + 0.3, 0.2, 0.2), loss_of(tis, inputs, logps + 0.3, 0.2, 0.2))


# What must hold for every input


def logps_matrix(n):
    return st.lists(st.floats(-30, 0, width=32), min_size=n, max_size=n)


@st.composite
def inputs_of(draw, mismatch=True):
    rows, columns = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    n = rows * columns
    old = torch.tensor(draw(logps_matrix(n))).view(rows, columns)
    rollout = torch.tensor(draw(logps_matrix(n))).view(rows, columns) if mismatch else old.clone()
    advantages = torch.tensor(draw(st.lists(st.floats(-5, 5, width=32), min_size=rows, max_size=rows)))
    mask = torch.tensor(draw(st.lists(st.integers(0, 1), min_size=n, max_size=n))).view(rows, columns)
    if mismatch:
        lost = torch.tensor(draw(st.lists(st.integers(0, 5), min_size=n, max_size=n))).view(rows, columns) == 0
        rollout = rollout.masked_fill(lost, draw(st.sampled_from([math.nan, -math.inf])))
    return CorrectionInputs(rollout, old, advantages, mask)


def same(one, other, order=slice(None)):
    for field in ("weights", "clip_low", "clip_high", "old_logps"):
        a, b = getattr(one, field), getattr(other, field)
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a[order], b, rtol=1e-6, atol=0, equal_nan=True)
    close(one.metrics, other.metrics)


@pytest.mark.parametrize("name", CORRECTIONS)
@settings(max_examples=40, deadline=None)
@given(inputs_of(mismatch=False))
def test_no_mismatch_changes_nothing(name, inputs):
    output = CORRECTIONS[name]()(inputs)
    assert (output.weights == 1).all()
    if name == "acr":
        assert (output.clip_low == torch.tensor(1 - 0.2)).all() and (output.clip_high == torch.tensor(1 + 0.2)).all()
    else:
        assert output.clip_low is None and output.clip_high is None
    if name == "coupled":
        assert torch.equal(output.old_logps, inputs.old_logps)
    expected = {"weight_mean": 1.0, "max_weight": 1.0, "ess_ratio": 1.0, "same_fraction": 1.0}
    for key, value in output.metrics.items():
        if key.startswith("mismatch/") and key != "mismatch/entropy":
            assert value == expected.get(key.removeprefix("mismatch/"), 0.0), key
    assert output.metrics.get("ais/alpha", 0.0) == 0.0


@pytest.mark.parametrize("name", CORRECTIONS)
@settings(max_examples=40, deadline=None)
@given(inputs_of(), st.data())
def test_masked_tokens_are_never_read(name, inputs, data):
    junk = st.sampled_from([math.nan, math.inf, -math.inf, 1e30, 0.0])
    masked = inputs.mask == 0
    advantages = inputs.advantages[:, None].expand(masked.shape)
    fields = {"rollout_logps": inputs.rollout_logps, "old_logps": inputs.old_logps, "advantages": advantages}
    changed = {k: v.masked_fill(masked, data.draw(junk, label=k)) for k, v in fields.items()}
    before = CORRECTIONS[name]()(inputs)
    after = CORRECTIONS[name]()(CorrectionInputs(mask=inputs.mask, **changed))
    assert torch.equal(before.weights, after.weights) and (after.weights[masked] == 1).all()
    for field in ("clip_low", "clip_high"):
        if getattr(before, field) is not None:
            assert torch.equal(getattr(before, field), getattr(after, field))
    if name == "coupled":
        assert torch.equal(before.old_logps[~masked], after.old_logps[~masked])
    assert before.metrics == after.metrics


@pytest.mark.parametrize("name", CORRECTIONS)
@settings(max_examples=30, deadline=None)
@given(inputs_of(), st.randoms())
def test_the_order_of_rows_does_not_matter(name, inputs, random):
    order = list(range(len(inputs.mask)))
    random.shuffle(order)
    fields = (inputs.rollout_logps, inputs.old_logps, inputs.advantages, inputs.mask)
    permuted = CorrectionInputs(*(x[order] for x in fields))
    same(CORRECTIONS[name]()(inputs), CORRECTIONS[name]()(permuted), order)


@pytest.mark.parametrize("name", CORRECTIONS)
@settings(max_examples=60, deadline=None)
@given(inputs_of())
def test_ranges(name, inputs):
    output = CORRECTIONS[name]()(inputs)
    assert output.weights.dtype == torch.float32 and output.weights.isfinite().all() and (output.weights >= 0).all()
    if name in CAPPED:
        assert (output.weights <= CORRECTIONS[name]().cap * (1 + 1e-6)).all()
    m = output.metrics
    assert all(math.isfinite(v) for v in m.values())
    for key in ("mismatch/ess_ratio", "mismatch/cap_fraction", "mismatch/unscored_fraction", "mismatch/abs_prob_diff"):
        assert 0 <= m[key] <= 1 + 1e-12
    assert m["mismatch/kl_k3"] >= -1e-6 and m["mismatch/max_weight"] >= m["mismatch/weight_mean"] * (1 - 1e-9)
    if name == "ais":
        assert all(0 <= m[k] <= 1 for k in ("ais/alpha", "ais/alpha_ess", "ais/alpha_mis")) and m["ais/alpha_var"] >= 0


@settings(max_examples=60, deadline=None)
@given(inputs_of(), st.floats(1, 20))
def test_ais_lies_between_none_and_tis(inputs, cap):
    ais, tis = CORRECTIONS["ais"](cap=cap)(inputs).weights, CORRECTIONS["tis"](cap=cap)(inputs).weights
    assert (ais >= tis.clamp(max=1) - 1e-6 * cap).all() and (ais <= tis.clamp(min=1) + 1e-6 * cap).all()


@settings(max_examples=60, deadline=None)
@given(inputs_of(), st.floats(1, 10), st.floats(1, 10))
def test_monotone_in_the_cap(inputs, a, b):
    low, high = sorted((a, b))
    for name in ("tis", "acr"):
        tight, loose = CORRECTIONS[name](cap=low)(inputs), CORRECTIONS[name](cap=high)(inputs)
        assert (tight.weights <= loose.weights).all()
        assert tight.metrics["mismatch/cap_fraction"] >= loose.metrics["mismatch/cap_fraction"]
        if name == "acr":  # a tighter cap clips the weight more, and the ratio less
            assert (tight.clip_high >= loose.clip_high).all()
    assert torch.equal(CORRECTIONS["tis"](cap=math.inf)(inputs).weights, CORRECTIONS["decoupled"]()(inputs).weights)


@settings(max_examples=60, deadline=None)
@given(inputs_of(), st.floats(0.01, 2), st.floats(0.01, 2), st.sampled_from(["delta", "gamma", "beta_var"]))
def test_alpha_is_monotone_in_its_thresholds(inputs, a, b, threshold):
    low, high = sorted((a, b))
    alphas = [CORRECTIONS["ais"](**{threshold: x})(inputs).metrics["ais/alpha"] for x in (low, high)]
    assert alphas[0] <= alphas[1] if threshold == "gamma" else alphas[0] >= alphas[1]


def test_alpha_grows_with_the_mismatch_and_falls_with_the_variance():
    """More divergence below the threshold opens the necessity gate; heavier tails close the reliability gate."""
    inputs, _ = batch(unscored=False)
    base = inputs.old_logps - inputs.rollout_logps

    def alpha(factor):
        scaled = CorrectionInputs(inputs.old_logps - factor * base, inputs.old_logps, inputs.advantages, inputs.mask)
        return CORRECTIONS["ais"](cap=1e9)(scaled).metrics["ais/alpha"]

    rising = [alpha(f) for f in (0.001, 0.005, 0.01, 0.02)]
    falling = [alpha(f) for f in (0.5, 1.0, 2.0, 4.0)]
    assert rising == sorted(rising) and rising[0] < rising[-1]
    assert falling == sorted(falling, reverse=True) and falling[0] > falling[-1]


# The edges


@pytest.mark.parametrize("name", CORRECTIONS)
@pytest.mark.parametrize("kept", [0, 1])
def test_no_token_and_one_token(name, kept):
    inputs, _ = batch(unscored=False)
    mask = torch.zeros_like(inputs.mask)
    mask[1, 2] = kept
    inputs = replace(inputs, mask=mask)
    output = CORRECTIONS[name]()(inputs)
    assert all(math.isfinite(v) for v in output.metrics.values())
    expected = diagnostics(name, inputs)
    close({k: v for k, v in output.metrics.items() if k.startswith("mismatch/")}, expected, rel=1e-5)
    if name == "ais" and kept:  # no variance to estimate: the gates of reliability are open
        assert output.metrics["ais/alpha"] == output.metrics["ais/alpha_mis"] > 0


def test_zero_variance():
    """The same weight and the same advantage everywhere."""
    old = torch.full((2, 3), -1.0)
    for a in (0.0, 0.3):
        inputs = CorrectionInputs(old - 0.5, old, torch.full((2,), a), torch.ones(2, 3))
        metrics = CORRECTIONS["ais"]()(inputs).metrics
        assert metrics["ais/alpha_ess"] == 1 and metrics["mismatch/ess_ratio"] == 1
        assert metrics["ais/alpha"] == 1 and metrics["ais/alpha_var"] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CORRECTIONS)
def test_a_huge_mismatch_overflows_nothing(name, dtype):
    old = torch.tensor([[0.0, -200.0, -6e4, 0.0, -1.0]], dtype=dtype)
    rollout = torch.tensor([[-200.0, 0.0, 0.0, -6e4, -1.0]], dtype=dtype)
    inputs = CorrectionInputs(rollout, old, torch.tensor([3.0]), torch.ones(1, 5))
    output = CORRECTIONS[name]()(inputs)
    logps = old.float().requires_grad_()
    loss = loss_of(output, inputs, logps, 0.2, 0.2)
    (gradient,) = torch.autograd.grad(loss, logps)
    for tensor in (output.weights, output.clip_low, output.clip_high, output.old_logps):
        assert tensor is None or (tensor.isfinite().all() and not tensor.requires_grad)
    assert all(math.isfinite(v) for v in output.metrics.values())
    if name != "coupled":  # whose own ratio is what overflows, with the sampler as the proximal policy
        assert loss.isfinite() and gradient.isfinite().all()
    if name == "decoupled":
        assert output.weights[0, 0] == pytest.approx(math.exp(LOG_RATIO_BOUND), rel=1e-5)
        assert 0 < output.weights[0, 1] < 1e-30 and output.weights[0, 4] == 1


def test_unscored_tokens_are_left_alone_and_counted():
    inputs, _ = batch()
    clean = CorrectionInputs(inputs.rollout_logps[1:], inputs.old_logps[1:], inputs.advantages[1:], inputs.mask[1:])
    rollout, mask = inputs.rollout_logps.clone(), inputs.mask.clone()
    rollout[0], mask[0] = math.nan, 1
    lost = CorrectionInputs(rollout, inputs.old_logps, inputs.advantages, mask)
    for name in CORRECTIONS:
        output, expected = CORRECTIONS[name]()(lost), CORRECTIONS[name]()(clean)
        assert (output.weights[0] == 1).all() and torch.equal(output.weights[1:], expected.weights)
        assert output.metrics.pop("mismatch/unscored_fraction") == pytest.approx(7 / int(mask.sum()))
        assert expected.metrics.pop("mismatch/unscored_fraction") == 0
        assert output.metrics == pytest.approx(expected.metrics, rel=1e-12, nan_ok=True)
        if name == "coupled":
            assert torch.equal(output.old_logps[0], inputs.old_logps[0])
            keep = inputs.mask[1:].bool()
            assert torch.equal(output.old_logps[1:][keep], inputs.rollout_logps[1:][keep])
        if name == "acr":
            assert (output.clip_high[0] == torch.tensor(1.2)).all()


@pytest.mark.parametrize("name", CORRECTIONS)
def test_everything_is_detached_and_nothing_is_written(name):
    inputs, _ = batch()
    leaves = [x.clone().requires_grad_() for x in (inputs.rollout_logps, inputs.old_logps, inputs.advantages)]
    copies = [x.detach().clone() for x in leaves]
    output = CORRECTIONS[name]()(CorrectionInputs(*leaves, inputs.mask))
    for tensor in (output.weights, output.clip_low, output.clip_high, output.old_logps):
        assert tensor is None or not tensor.requires_grad
    for leaf, copy in zip(leaves, copies):
        assert torch.equal(leaf.detach().nan_to_num(), copy.nan_to_num())


@pytest.mark.parametrize("mask", [torch.bool, torch.long, torch.float32])
def test_masks_of_any_type(mask):
    inputs, _ = batch()
    fields = (inputs.rollout_logps, inputs.old_logps, inputs.advantages)
    same(CORRECTIONS["ais"]()(CorrectionInputs(*fields, inputs.mask.to(mask))), CORRECTIONS["ais"]()(inputs))


# Bad input


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [(n, "cap", v) for n in CAPPED for v in (0.99, -1, math.nan, "2", None, True)]
    + [("acr", f, v) for f in ("epsilon_low", "epsilon_high") for v in (-0.1, math.nan)]
    + [("acr", "epsilon_low", 1.1)]
    + [("ais", f, v) for f in ("delta", "gamma", "eps") for v in (0, -1, math.nan)]
    + [("ais", "beta_var", -0.5)]
    + [("cis", f, v) for f in ("lam", "kappa") for v in (-0.1, math.nan, None)]
    + [("cis", "kappa", 1.1)]
    + [("icepop", "low", v) for v in (-0.1, 1.1, math.nan)]
    + [("icepop", "high", v) for v in (0.9, math.nan, "5")]
    + [(n, f, v) for n, f in (("geometric", "epsilon"), ("dppo", "delta")) for v in (0, 1.1, math.nan, None)]
    + [("trm", "delta", v) for v in (0, -1, math.nan, True)],
)
def test_bad_hyperparameters_name_the_field_and_the_value(name, field, value):
    with pytest.raises(ValueError, match=f"{field} must be a number >.*got {value!r}"):
        CORRECTIONS[name](**{field: value})


def test_the_edge_of_what_is_allowed():
    for name in CAPPED:
        CORRECTIONS[name](cap=1)
    CORRECTIONS["acr"](epsilon_low=1, epsilon_high=0)
    CORRECTIONS["ais"](beta_var=0)
    CORRECTIONS["cis"](lam=0, kappa=0)
    CORRECTIONS["cis"](kappa=1)
    CORRECTIONS["icepop"](low=0, high=1)
    CORRECTIONS["geometric"](epsilon=1)
    CORRECTIONS["dppo"](delta=1)


@pytest.mark.parametrize("field", ["rollout_logps", "mask", "advantages"])
def test_shapes_that_do_not_fit_are_refused(field):
    inputs, _ = batch()
    fields = {k: getattr(inputs, k) for k in ("rollout_logps", "old_logps", "advantages", "mask")}
    with pytest.raises(ValueError, match=rf"{field} must have.*\(4, 7\).*got \(4, 6\)"):
        CorrectionInputs(**fields | {field: torch.zeros(4, 6)})


@pytest.mark.parametrize("name", CORRECTIONS)
@pytest.mark.parametrize("field", ["old_logps", "advantages"])
def test_nan_where_it_counts_is_refused(name, field):
    inputs, _ = batch(unscored=False)
    fields = {k: getattr(inputs, k).clone() for k in ("rollout_logps", "old_logps", "mask")}
    fields["advantages"] = inputs.advantages[:, None].repeat(1, 7)
    fields["mask"][2, 3] = 1
    fields[field][2, 3] = math.nan
    with pytest.raises(ValueError, match=f"{field} must be numbers where the mask is 1, got 1 NaN"):
        CORRECTIONS[name]()(CorrectionInputs(**fields))
