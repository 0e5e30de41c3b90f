"""RLOO without its scoring pass: where nothing reads the old policy's log-probabilities, each loss scores its own."""

import pytest
import torch
from long_tests import rest_is_long
from plain import plain_logps
from reference import ACTING, cis_cap, diagnostics, hyperparameters, rloo_gradient
from rloo_runs import Counting, quantized
from tiny import save_tiny, tiny_model
from training import metrics, step_and_batch

from trl_quant.corrections import CORRECTIONS


pytestmark = pytest.mark.isa

LOW, HIGH = 0.2, 0.3
CLIP = {"epsilon": LOW, "epsilon_high": HIGH}
SAVING = [name for name, kind in CORRECTIONS.items() if not (kind.moves_clip_bounds or kind.whole_batch)]
EVEN = {"tis": {"is_cap": 1.05}} | ACTING
MICRO = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}


class Scoring(Counting):
    """With the pass that could be saved."""

    def train(self, *args, **kwargs):
        self.one_pass = False
        return super().train(*args, **kwargs)


@pytest.mark.parametrize("correction", rest_is_long(SAVING, "coupled", "tis", "geometric", "dppo"))
def test_the_step_is_that_of_the_slow_reference(tmp_path, correction):
    """
    Without the pass, and with it, over two micro-batches. The gradient of the wrong correction is far away. With the
    pass the first loss of TRL has the same R, up to rounding.
    """
    rate = 0.1
    sgd = {"optim": "sgd", "learning_rate": rate, "max_grad_norm": 0.0, "lr_scheduler_type": "constant"}
    sgd |= {"is_correction": correction, "max_steps": 1, **CLIP, **EVEN.get(correction, {}), **MICRO}
    saved = quantized(tmp_path, kind=Counting, **sgd)
    step, batch = step_and_batch(saved)
    assert saved.passes == []
    pair = [saved]
    if not CORRECTIONS[correction].every_update:
        pair.append(quantized(tmp_path, kind=Scoring, **sgd))
        same, _ = step_and_batch(pair[1])
        assert pair[1].passes == [0]
        assert (step - same).norm() < 2e-5 * step.norm()

    model, mask = tiny_model(seed=3), batch["completion_mask"]
    logps = plain_logps(model, batch)
    old, rollout = logps.detach(), batch["sampling_per_token_logps"]
    given = hyperparameters(correction, EVEN.get(correction, {}))

    def expected(name, **settings):
        factors = rloo_gradient(name, old, old, rollout, batch["advantages"], mask, LOW, HIGH, **settings)
        gradients = torch.autograd.grad((factors * logps).sum(), [*model.parameters()], retain_graph=True)
        return rate * torch.cat([gradient.flatten() for gradient in gradients]).double()

    assert (step - expected(correction, **given)).norm() < 5e-5 * step.norm()
    other = "decoupled" if correction in ("none", "coupled", "geometric", "trm", "dppo") else "none"
    assert (step - expected(other)).norm() > 1e-3 * step.norm()

    cap = given.get("cap", 10.0 if correction == "dppo" else torch.inf)
    cap = cis_cap(old, **given) if correction == "cis" else cap
    slow = diagnostics(rollout, old, mask, cap)
    for log in (metrics(trainer)[0] for trainer in pair):
        for name in ("mismatch/kl_k1", "mismatch/kl_k3", "mismatch/ess_ratio", "mismatch/cap_fraction"):
            assert log[name] == pytest.approx(slow[name], rel=1e-3, abs=1e-6), name
    if len(pair) == 2:
        left, right = (metrics(trainer)[0] for trainer in pair)
        assert left.keys() == right.keys()
        for name in left.keys() - {"grad_norm", "mismatch/same_fraction"}:
            assert left[name] == pytest.approx(right[name], rel=1e-3, abs=1e-5), name


@pytest.mark.parametrize(
    ("settings", "passes"),
    [
        ({"is_correction": "tis"}, []),
        ({"is_correction": "none", **MICRO, "steps_per_generation": 1}, []),
        ({"is_correction": "trm", "num_iterations": 2}, []),  # which compares with the current policy at each update
        ({"is_correction": "tis", "num_iterations": 2}, [0]),
        ({"is_correction": "tis", "per_device_train_batch_size": 4, "steps_per_generation": 2}, [0]),
        ({"is_correction": "ais"}, [0, 1]),  # whose weights need the whole generation
        ({"is_correction": "tis", "beta": 0.1}, [0, 0, 1, 1]),  # for the KL term of the rewards, and the reference's
        ({"rollout_precision": None}, [0, 1]),  # TRL's own
    ],
    ids=str,
)
def test_the_pass_is_made_where_something_reads_it(tmp_path, settings, passes):
    trainer = quantized(tmp_path, save_tiny(tmp_path / "model", seed=3), Counting, **CLIP, **settings)
    trainer.train()
    assert trainer.passes == passes


def test_evaluations_save_it_too(tmp_path):
    trainer = quantized(tmp_path, kind=Counting, **CLIP, max_steps=1, is_correction="tis", per_device_eval_batch_size=4)
    trainer.passes = []
    trainer.model.eval()
    logs = trainer.evaluate(trainer.train_dataset.select(range(2)))
    assert trainer.passes.count(0) == 2  # the losses of two batches, which have no gradients
    assert logs["eval_mismatch/kl_k3"] > 1e-3
