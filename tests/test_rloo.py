"""The mixin `QuantRollouts` on a trainer that it was not written for: TRL's `RLOOTrainer`, bound here in two lines.

RLOO builds and calls its engine as GRPO does, so the mixin gives it quantized rollouts, noise, metrics of the sync,
checks of rewards and steps, and checkpoints. TRL's RLOO throws the sampler's log-probabilities away and keeps one sum
of the policy's for each completion. So there is no `mismatch/*`, and a config with another `is_correction` than "none"
is refused, since the loss would have to change.
"""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from tiny import save_tiny
from training import assert_same_run, config, make, metrics, parameters
from trl import RLOOConfig, RLOOTrainer

from trl_quant.config.fields import QuantFields
from trl_quant.rollout import TransformersEngine
from trl_quant.trainers.quantized import QuantRollouts


@dataclass
class QuantRLOOConfig(QuantFields, RLOOConfig):
    """TRL's configuration with the fields of this package."""

    trl_config: ClassVar[type] = RLOOConfig


class QuantRLOOTrainer(QuantRollouts, RLOOTrainer):
    """Quantized rollouts for TRL's `RLOOTrainer`."""


def quantized(path, **settings) -> QuantRLOOTrainer:
    settings = {"rollout_precision": "int8", "max_steps": 2} | settings
    return make(QuantRLOOTrainer, config(QuantRLOOConfig, path, **settings), model=save_tiny(path / "model", seed=3))


def starting_with(prefix: str, entry: dict) -> dict[str, float]:
    return {name: value for name, value in entry.items() if name.startswith(prefix)}


def test_a_made_up_trainer_samples_from_the_embedded_int8_copy(tmp_path):
    trainer = quantized(tmp_path)
    engine = trainer.vllm_generation
    assert isinstance(engine, TransformersEngine) and engine.precision == "int8"
    sampled, generate = [], engine.generate
    engine.generate = lambda *args, **kwargs: sampled.append(generate(*args, **kwargs)) or sampled[-1]
    before = parameters(trainer)
    trainer.train()
    assert len(sampled) == 2 and all(len(completions) == 8 for _, completions, _, _ in sampled)
    assert any(not torch.equal(before[name], now) for name, now in parameters(trainer).items())

    first, second = metrics(trainer)[:2]
    errors = starting_with("weights/", first)
    assert 0 < errors["weights/normalized_quantization_error"] < 0.05
    assert second["weights/normalized_update"] > 0
    assert "profiling/sync_weights" in trainer.state.log_history[0]
    # What RLOO cannot have: TRL drops the log-probabilities of the samples
    assert trainer.args.is_correction == "none"
    assert not starting_with("mismatch/", first) and not starting_with("sampling/", first)


def test_its_copy_is_another_policy_than_full_precision(tmp_path):
    """INT4 samples other tokens from the same seed, so the engine's numbers reach the samples."""
    runs = {precision: quantized(tmp_path / precision, rollout_precision=precision) for precision in ("bf16", "int4")}
    for run in runs.values():
        run.train()
    rewards = [metrics(run)[0]["reward"] for run in runs.values()]
    assert rewards[0] != rewards[1]


def test_without_a_precision_it_is_trls(tmp_path):
    path = save_tiny(tmp_path / "model", seed=3)
    runs = []
    for kind, arguments in ((QuantRLOOTrainer, QuantRLOOConfig), (RLOOTrainer, RLOOConfig)):
        runs.append(make(kind, config(arguments, tmp_path, max_steps=2), model=path))
        runs[-1].train()
    assert_same_run(*runs)


def test_noise_checkpoints_and_a_resume(tmp_path):
    """A resumed run is the unbroken one."""
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "noise_schedule": "linear"}
    settings["noise_stages"] = 3
    whole = quantized(tmp_path, **settings)
    whole.train()
    assert any(entry.get("noise/effective_sigma", 0) > 0 for entry in metrics(whole))
    resumed = quantized(tmp_path, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert metrics(resumed)[:4] == metrics(whole)[:4]
    mine, theirs = parameters(resumed), parameters(whole)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    other = quantized(tmp_path, **settings | {"rollout_precision": "fp8"})
    with pytest.raises(ValueError, match="rollout_precision"):
        other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_its_rewards_and_steps_must_be_finite(tmp_path):
    def infinite(completions, **kwargs):
        return [float("inf")] * len(completions)

    trainer = quantized(tmp_path)
    trainer.reward_funcs = [infinite]
    with pytest.raises(ValueError, match="not finite"):
        trainer.train()


def test_a_class_without_an_engine_is_refused():
    """`QuantRollouts` needs a trainer of TRL's beside it."""
    from transformers import Trainer

    from trl_quant.trl_seams import trainer_builds

    class Plain(QuantRollouts, Trainer): ...

    with pytest.raises(TypeError, match="Plain inherits from no trainer"), trainer_builds(Plain, None, None):
        pass
