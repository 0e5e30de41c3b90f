"""What the configs and the trainers of RLOO, distillation and PPO refuse, in their own words."""

import math
import re

import pytest
from rloo_runs import quantized
from training import config

from trl_quant import QuantDistillationConfig, QuantPPOConfig, QuantRLOOConfig
from trl_quant.corrections import CORRECTIONS
from trl_quant.trainers.sampling import QuantSampling


pytestmark = pytest.mark.isa

OF_DISTILLATION = ("none", "decoupled", "tis", "icepop")
# Config -> settings and what is said of them
REFUSED = {
    QuantRLOOConfig: [
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
    QuantDistillationConfig: [
        *(
            (
                {"rollout_precision": "int8", "is_correction": name},
                f"`is_correction`={name!r} acts on advantages, on a clipped ratio, or on single tokens and whole "
                "completions. Distillation has a divergence for each token, which depends on the tokens before it: "
                "only their weight corrects it. Use 'none', 'decoupled', 'tis' or 'icepop'.",
            )
            for name in CORRECTIONS
            if name not in OF_DISTILLATION
        ),
        (
            {"rollout_precision": "int8", "is_correction": "trl"},
            "`is_correction`='trl' is TRL's own, and TRL's DistillationTrainer has none. Use 'none'",
        ),
        ({"teacher_precision": "fp8"}, "`teacher_precision`='fp8' is unknown. Allowed: 'nf4', 'nvfp4', 'mxfp4'."),
        (
            {"teacher_precision": "nvfp4", "teacher_model_init_kwargs": {"quantization_config": {}}},
            "`teacher_precision`='nvfp4' and 'quantization_config' in `teacher_model_init_kwargs` both set the",
        ),
        (
            {"teacher_model_init_kwargs": "x"},
            "`teacher_model_init_kwargs`='x' must be a dict (or a JSON object)",
        ),
        ({"dynamic_sampling_rounds": 1}, "`dynamic_sampling_rounds`=1 acts only with a trainer that has"),
        ({"is_cap": 3.0}, "`is_cap`=3.0 acts only with `is_correction` 'tis'"),
        ({"noise_schedule": "linear"}, "`noise_schedule`='linear' needs a copy of the policy to add noise to"),
        ({"temperature": 0.0}, "`temperature`=0.0 is out of range. It must be > 0.0."),
        ({"beta": 1.5}, "beta must be in [0.0, 1.0], got 1.5."),  # TRL's own
    ],
    QuantPPOConfig: [
        ({"scale_rewards": "group"}, "`scale_rewards`='group' compares the completions"),
        ({"scale_rewards": "batch"}, "`scale_rewards`='batch' compares"),
        ({"loss_type": "cispo"}, "`loss_type`='cispo' does not clip the ratio of each token"),
        ({"loss_type": "luspo"}, "`loss_type`='luspo' does not clip"),
        ({"importance_sampling_level": "sequence"}, "`importance_sampling_level`='sequence' has one ratio"),
        ({"multi_objective_aggregation": "normalize_then_sum"}, "`multi_objective_aggregation`='normalize_then_sum'"),
        (
            {"dynamic_sampling_rounds": 1},
            "`dynamic_sampling_rounds`=1 acts only with a trainer that has dynamic sampling",
        ),
        (
            {"optim": "adalomo"},
            "PPO's critic cannot be trained with `optim`='adalomo', which is built around one model",
        ),
        ({"optim": "schedule_free_adamw"}, "into training mode for the policy alone. Use"),
        (
            {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 1},
            "PPO's critic cannot be trained with `lr_scheduler_type`=",
        ),
        ({"num_generations": 0}, "`num_generations`=0 is out of range"),
        ({"num_generations": 3}, "generation_batch_size (8) must be divisible by num_generations (3)"),
        ({"num_generations": "1"}, "`num_generations`='1' must be an integer"),
        ({"gamma": 1.5}, "`gamma`=1.5 is out of range"),
        ({"lam": -0.1}, "`lam`=-0.1 is out of range"),
        ({"cliprange_value": 0.0}, "`cliprange_value`=0.0 is out of range"),
        ({"value_learning_rate": -1.0}, "`value_learning_rate`=-1.0 is out of range"),
        ({"value_model_name_or_path": 3}, "`value_model_name_or_path`=3 must be a string or None"),
        ({"vf_coef": 0.5}, "`vf_coef`=0.5 acts only with `vf_share_layers=True`"),
        ({"vf_coef": 0.0, "vf_share_layers": True}, "`vf_coef`=0.0 is out of range"),
        ({"vf_share_layers": 1}, "`vf_share_layers`=1 must be True or False"),
        (
            {"vf_share_layers": True, "value_model_name_or_path": "x"},
            "`value_model_name_or_path`='x' is a critic of its own",
        ),
        (
            {"vf_share_layers": True, "torch_compile": True},
            "a policy compiled with `torch_compile` does not expose them",
        ),
    ],
}


@pytest.mark.parametrize(
    ("kind", "settings", "says"),
    [pytest.param(kind, *case, id=f"{kind.__name__}-{case[0]}") for kind, cases in REFUSED.items() for case in cases],
)
def test_what_cannot_act_is_refused(settings, says, kind):
    """When the config is built. PPO's has one completion a prompt, which its default groups would hide."""
    settings = ({"num_generations": 1} if kind is QuantPPOConfig else {}) | settings
    with pytest.raises(ValueError, match=re.escape(says)):
        config(kind, "unused", **settings)


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
