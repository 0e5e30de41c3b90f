"""`QuantRLOOTrainer`: what is refused and what it says of itself, and its example."""

import math
import re
import runpy

import pytest
from places import ROOT
from rloo import quantized
from training import config, metrics

from trl_quant import QuantRLOOConfig
from trl_quant.trainers.sampling import QuantSampling


pytestmark = pytest.mark.isa


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"rollout_precision": "int8", "is_correction": "acr"},
            "`is_correction`='acr' moves the upper clip bound of a token, and RLOO clips the ratio of a whole "
            "completion. Use 'none', 'coupled'",
        ),
        (
            {"rollout_precision": "int8", "is_correction": "trl"},
            "`is_correction`='trl' is TRL's own, and TRL's RLOOTrainer",
        ),
        (
            {"rollout_precision": "int8", "importance_sampling_level": "word"},
            "`importance_sampling_level`='word' is unknown. Allowed: 'token', 'sequence'",
        ),
        (
            {"importance_sampling_level": "sequence"},
            "`importance_sampling_level`='sequence' acts only with a correction whose weights differ between the "
            "levels, and `is_correction` is 'trl'",
        ),
        *(
            (
                {"rollout_precision": "int8", "is_correction": name, "importance_sampling_level": "sequence"},
                f"differ between the levels, and `is_correction` is '{name}'",
            )
            for name in ("none", "coupled", "geometric")
        ),
        (
            {"rollout_precision": "int8", "is_correction": "dppo", "importance_sampling_level": "sequence"},
            "`is_correction`='dppo' judges the ratio of each token",
        ),
        ({"dynamic_sampling_rounds": 1}, "`dynamic_sampling_rounds`=1 acts only with a trainer that has"),
        ({"is_cap": 3.0}, "`is_cap`=3.0 acts only with `is_correction` 'tis'"),
        *(
            ({"reward_clip_range": given}, f"`reward_clip_range`={given!r} must be None or two numbers, of which the")
            for given in ((1.0, 0.0), (1.0, 1.0), (1.0,), (), 3.0, ("0", "1"), (float("nan"), 1.0), {0.0: 1, 1.0: 2})
        ),
        ({"epsilon_high": -0.3}, "`epsilon_high`=-0.3 is out of range. It must be >= 0"),
        ({"sync_ref_model": True, "beta": 0.0}, "`sync_ref_model`=True with `beta`=0.0"),
    ],
    ids=str,
)
def test_what_cannot_act_is_refused(settings, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        config(QuantRLOOConfig, "unused", **settings)


@pytest.mark.parametrize("clip", [None, (-1.0, 1), [0, 1.0], (-math.inf, 5.0)], ids=str)
def test_bounds_of_a_reward_are_accepted(clip):
    args = config(QuantRLOOConfig, "unused", reward_clip_range=clip, sync_ref_model=True, beta=0.1)
    assert args.reward_clip_range == clip


def test_its_rewards_must_be_finite(tmp_path):
    def infinite(completions, **kwargs):
        return [float("inf")] * len(completions)

    trainer = quantized(tmp_path)
    trainer.reward_funcs = [infinite]
    with pytest.raises(ValueError, match="not finite"):
        trainer.train()


def test_a_class_without_an_engine_is_refused():
    """`QuantSampling` needs a trainer of TRL's beside it."""
    from transformers import Trainer

    from trl_quant.trl_seams import trainer_builds

    class Plain(QuantSampling, Trainer): ...

    with pytest.raises(TypeError, match="Plain inherits from no trainer"), trainer_builds(Plain, None, None):
        pass


def test_the_example_trains(tmp_path, monkeypatch):
    """Two steps of what a user runs, on the model that comes with the repository, which is right on a third."""
    monkeypatch.chdir(tmp_path)
    script = runpy.run_path(str(ROOT / "examples/rloo.py"))
    trainer = script["main"](max_steps=2, logging_steps=1, per_device_train_batch_size=64, disable_tqdm=True)
    logs = metrics(trainer)[:2]
    assert all(0.1 < log["reward"] < 0.8 and 0 < log["mismatch/kl_k3"] < 0.01 and log["grad_norm"] > 0 for log in logs)
