"""Mixtures of experts in the trainer that samples while it trains."""

import math

import pytest
import trl.experimental.async_grpo.async_grpo_trainer as trls
from asynchronous import asynchronous
from long_tests import rest_is_long
from tiny import MIXTURES, save_tiny
from training import lora

from trl_quant.layers import SampledExperts
from trl_quant.trl_seams import flops_if_known


KNOWN = ("qwen3_moe",)  # of which TRL counts the FLOPs


@pytest.mark.parametrize("family", rest_is_long(MIXTURES, "mixtral", "qwen2_moe"))
def test_each_family_trains(tmp_path, family):
    """Though TRL cannot count the FLOPs of most."""
    trainer = asynchronous(tmp_path, model=save_tiny(tmp_path / "model", family, seed=3), max_steps=2)
    before = trls.compute_flops_per_token
    trainer.train()
    assert trls.compute_flops_per_token is before
    logs = [log for log in trainer.state.log_history if "mismatch/kl_k3" in log]
    assert len(logs) == 2
    for log in logs:
        assert math.isfinite(log["loss"]) and log["perf/forwarded_tok_s_fwd_bwd"] > 0


def test_only_a_missing_field_leaves_the_figure_out():
    """A count that TRL can make stays. When it can for all families, the seam has no use."""
    configs = {family: kind(**settings) for family, (kind, settings) in MIXTURES.items()}
    count = trls.compute_flops_per_token
    expected = count(configs["qwen3_moe"], 16)
    for family in MIXTURES.keys() - KNOWN:
        with pytest.raises(AttributeError):
            count(configs[family], 16)
    with flops_if_known():
        found = {family: trls.compute_flops_per_token(config, 16) for family, config in configs.items()}
        with pytest.raises(TypeError):
            trls.compute_flops_per_token(configs["qwen3_moe"], None)
    assert found["qwen3_moe"] == expected > 0
    assert math.isnan(trls.compute_mfu(found["mixtral"], 10.0, 1, 1e12))  # TRL's `log` leaves NaN out
    assert all(math.isnan(found[family]) for family in MIXTURES.keys() - KNOWN)


@pytest.mark.parametrize("adapted", rest_is_long([True, False]))
def test_it_samples_with_the_codes_of_experts_that_train_in_fp8(tmp_path, adapted):
    """From a copy that holds them, which is checked against the policy before it samples."""
    given = {"peft_config": lora(target_modules=["q_proj", "v_proj"])} if adapted else {}
    model = save_tiny(tmp_path / "model", "qwen3_moe", seed=3)
    precisions = {"train_precision": "fp8", "rollout_precision": "fp8"}
    first = {}
    for name, each in {"same": precisions, "other": {"rollout_precision": "fp8"}}.items():
        trainer = asynchronous(tmp_path / name, model=model, max_steps=2, **each, **given)
        trainer.train()
        experts = trainer.sampling_thread.engine.copy.get_decoder().layers[1].mlp.experts
        assert isinstance(experts, SampledExperts) == (name == "same")
        first[name], _ = (log["mismatch/kl_k3"] for log in trainer.state.log_history if "mismatch/kl_k3" in log)
    assert first["same"] < 1e-3 * first["other"]  # the second step's samples are a step older than the policy
