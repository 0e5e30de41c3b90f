"""`QuantRLOOTrainer`: the gradient that each correction trains with, what is logged, and a saved scoring pass.

The loss takes no weights and its value has none in it, so these tests compare gradients. The reference multiplies the
slow loops of `reference.py`, one number at a time, with the gradients of a plain forward pass of another model.
"""

import math

import pytest
import torch
from changes import move
from plain import plain_logps
from reference import ACTING, diagnostics, hyperparameters, rloo_gradient
from rloo_runs import Counting, quantized
from tiny import save_tiny, tiny_model
from training import generation, gradient_of, leave_holes, metrics, parameters, scored_batches

from trl_quant import QuantRLOOTrainer
from trl_quant.corrections import CORRECTIONS
from trl_quant.rollout.engine import Samples


pytestmark = pytest.mark.isa

USABLE = [name for name, kind in CORRECTIONS.items() if not kind.moves_clip_bounds]
LOW, HIGH = 0.2, 0.3
MOVED = {"size": 0.004, "seed": 5}  # as updates would move the policy, so that some completions are clipped
EVEN = {"tis": {"is_cap": 1.05}, "ais": {"is_cap": 1.5, "ais_gamma": 0.8}} | ACTING  # caps that int4 reaches


def scored(trainer) -> dict[str, torch.Tensor]:
    """The scored batch that the next step trains on, with what the engine itself returned."""
    generate, samples = trainer.vllm_generation.generate, []
    trainer.vllm_generation.generate = lambda *args, **kwargs: samples.append(generate(*args, **kwargs)) or samples[-1]
    batch = generation(trainer)
    del trainer.vllm_generation.generate
    _, completions, logps, _ = samples[0]
    sampled = torch.full(batch["completion_ids"].shape, math.nan)
    for row, (ids, drawn) in enumerate(zip(completions, logps, strict=True)):
        assert batch["completion_ids"][row, : len(ids)].tolist() == list(ids)
        sampled[row, : len(ids)] = torch.tensor([logp for (logp,) in drawn])
    return batch, sampled


# The gradient


EVERY = [*((name, "token") for name in USABLE), ("tis", "sequence"), ("decoupled", "sequence")]


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    """By correction and level, the expected gradient and its factors on each log-probability; and their batch."""
    batch, rollout = scored(quantized(tmp_path_factory.mktemp("everything"), is_correction="none"))
    before, other, results = tiny_model(seed=3), tiny_model(seed=3), {}
    move(other, **MOVED)
    for name, level in EVERY:
        logps = plain_logps(other, batch)
        inputs = logps.detach(), plain_logps(before, batch).detach(), rollout
        of_batch = batch["advantages"], batch["completion_mask"], LOW, HIGH
        factors = rloo_gradient(name, *inputs, *of_batch, level=level, **hyperparameters(name, EVEN.get(name, {})))
        results[name, level] = gradient_of(-(factors * logps).sum(), other), factors
    return results, batch


@pytest.mark.parametrize(("correction", "level"), EVERY)
def test_the_gradient_is_the_weighted_one(tmp_path, everything, correction, level):
    """After the policy has moved, on a real batch; it is no other correction's, and not that of weighted losses."""
    given = EVEN.get(correction, {}) | ({"importance_sampling_level": level} if level == "sequence" else {})
    given |= {"num_iterations": 2}  # a later update, whose policy has moved
    trainer = quantized(tmp_path, is_correction=correction, epsilon=LOW, epsilon_high=HIGH, **given)
    batch, rollout = scored(trainer)
    with torch.no_grad():
        old = plain_logps(tiny_model(seed=3), batch)
    move(trainer.model, **MOVED)
    loss = trainer._compute_loss(trainer.model, dict(batch))
    trained = gradient_of(loss, trainer.model)

    results, expected = everything
    assert torch.equal(batch["completion_ids"], expected["completion_ids"])
    other, a, mask = tiny_model(seed=3), batch["advantages"], batch["completion_mask"]
    move(other, **MOVED)
    logps = plain_logps(other, batch)

    def distance(gradient):
        return ((trained - gradient).norm() / trained.norm()).item()

    right, factors = results[correction, level]
    assert distance(right) < 2e-5
    assert min(distance(gradient) for key, (gradient, _) in results.items() if key != (correction, level)) > 1e-3
    if correction not in ("trm", "dppo"):  # whose ratio is 1
        clipped = (factors == 0).all(1) & (results["none", "token"][1] == 0).all(1)
        assert 0 < clipped.sum() < len(clipped)

    # The shortcut: the mean weight of its tokens on each completion's loss
    means = factors.sum(1, keepdim=True) / mask.sum(1, keepdim=True)
    shortcut = gradient_of(-(means * mask * logps).sum(), other)
    if level == "token" and correction not in ("none", "coupled", "geometric"):
        assert distance(shortcut) > 1e-3
    # The value is RLOO's, without a weight
    proximal = {"coupled": rollout, "trm": logps.detach(), "dppo": logps.detach()}.get(correction, old)
    ratio = ((logps.detach() - proximal) * mask).nan_to_num().sum(1).exp()
    value = -torch.min(ratio * a, ratio.clamp(1 - LOW, 1 + HIGH) * a).mean()
    assert loss.item() == pytest.approx(value.item(), rel=1e-4, abs=1e-5)


def test_weights_move_with_their_rows(tmp_path):
    """Two micro-batches of a shuffled generation add up to the step of one."""
    ends = []
    for size in (8, 4):
        settings = {"per_device_train_batch_size": size, "gradient_accumulation_steps": 8 // size}
        settings |= {"optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0, "max_steps": 1}
        trainer = quantized(tmp_path / str(size), is_correction="decoupled", **settings)
        trainer.train()
        ends.append(torch.cat([value.flatten() for value in parameters(trainer).values()]))
    start = torch.cat([value.detach().flatten() for value in tiny_model(seed=3).parameters()])
    assert (ends[0] - ends[1]).norm() < 1e-4 * (ends[0] - start).norm()


def test_tokens_that_the_sampler_did_not_score_weigh_one(tmp_path):
    trainer = quantized(tmp_path, is_correction="decoupled", num_iterations=2)  # scored before the first loss
    leave_holes(trainer)
    batch = generation(trainer)
    weights = batch["importance_sampling_ratio"]
    assert weights[0, 1] == weights[1, 0] == 1 != weights[0, 0] and weights.isfinite().all()
    unscored = trainer._metrics["train"]["mismatch/unscored_fraction"][-1]
    assert unscored == pytest.approx(2 / batch["completion_mask"].sum().item())

    class Silent:
        def sync(self): ...

        def sample(self, requests):
            return Samples([[70, 71, 72] for _ in requests])

    class FromSilence(QuantRLOOTrainer):
        def build_engine(self, *args, **settings):
            return Silent()

    silent = quantized(tmp_path, kind=FromSilence, rollout_precision="bf16", max_steps=1)
    silent.train()
    assert metrics(silent)[0]["mismatch/unscored_fraction"] == 1.0


# What is logged


@pytest.mark.parametrize("correction", ["tis", "trm"])
def test_the_mismatch_is_that_of_the_generation(tmp_path, correction):
    """Against slow loops; `trm` measures in the losses, of two micro-batches here."""
    settings = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "is_cap": 1.05}
    settings = settings if correction == "tis" else settings | {"is_cap": None, "trm_delta": 0.5}
    trainer = quantized(tmp_path, is_correction=correction, max_steps=1, **settings)
    batches = scored_batches(trainer)
    trainer.train()
    (log, *_), (batch,) = metrics(trainer), batches
    with torch.no_grad():
        old = plain_logps(tiny_model(seed=3), batch)
    cap = 1.05 if correction == "tis" else math.inf
    expected = diagnostics(batch["sampling_per_token_logps"], old, batch["completion_mask"], cap)
    del expected["mismatch/same_fraction"]  # of bits, which two forward passes do not share
    for name, value in expected.items():
        assert log[name] == pytest.approx(value, rel=1e-3, abs=1e-6), name
    assert log["mismatch/kl_k3"] > 1e-3
    assert ("mismatch/dropped_fraction" in log) == (correction == "trm")
    assert log["sampling/sampling_logp_difference/mean"] == pytest.approx(expected["mismatch/abs_logp_diff"], rel=1e-3)
    least = 0 if correction == "trm" else log["sampling/importance_sampling_ratio/min"]
    assert log["sampling/importance_sampling_ratio/min"] == least < 1
    assert log["weights/normalized_quantization_error"] > 0 and "profiling/sync_weights" in trainer.state.log_history[0]


# A sampler with the same numbers


class SameBits(Counting):
    """Its sampler has the log-probabilities of the policy, as an exact engine."""

    def __init__(self, *args, same_bits: bool, **kwargs):
        super().__init__(*args, **kwargs)
        self.correction_step.same_bits = same_bits

    def _generate(self, prompts):
        generated = super()._generate(prompts)
        logps = []
        for prompt, completion in zip(*generated[:2], strict=True):
            parts = {"prompt": torch.tensor([prompt]), "completion": torch.tensor([completion])}
            ids = {f"{name}_ids": part for name, part in parts.items()}
            with torch.no_grad():
                logps += plain_logps(
                    self.model, ids | {f"{name}_mask": torch.ones_like(part) for name, part in parts.items()}
                )
        self.correction_step.samples = [row.tolist() for row in logps]
        return generated


@pytest.mark.parametrize("correction", ["decoupled", "trm"])
def test_a_sampler_with_the_trainers_bits_saves_the_scoring_pass(tmp_path, correction):
    """Its log-probabilities are the old policy's, also in the KL term of the rewards; the reference's pass stays."""
    path, runs = save_tiny(tmp_path / "model", seed=3), []
    for same_bits in (False, True):
        settings = {"num_iterations": 2, "beta": 0.1, "optim": "sgd", "pack_sequences": False}
        given = {"kind": SameBits, "same_bits": same_bits, "is_correction": correction}
        runs.append(quantized(tmp_path, path, **given, **settings))
        runs[-1].train()
    two, one = runs
    assert two.passes == [0, 0] and one.passes == [0]
    for left, right in zip(metrics(one)[:2], metrics(two)[:2], strict=True):
        assert left.keys() == right.keys()
        for name in {"loss", "reward", "kl", "mismatch/kl_k3", "mismatch/weight_mean"} & left.keys():
            assert left[name] == pytest.approx(right[name], rel=1e-3, abs=1e-5), name
    theirs = parameters(two)
    assert all(torch.allclose(value, theirs[name], atol=1e-6) for name, value in parameters(one).items())
