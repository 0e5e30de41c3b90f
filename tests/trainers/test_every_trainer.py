"""What holds for each of our trainers alike: TRL's bits, its own sampler, the embedded copy, vLLM, a resumed run."""

import math
import runpy
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch
import trl.trainer.distillation_trainer as distillation_trainer
import trl.trainer.grpo_trainer as grpo_trainer
import trl.trainer.rloo_trainer as rloo_trainer
from long_tests import rest_is_long
from places import ROOT
from tiny import save_tiny
from training import (
    MadeUpSampler,
    assert_same_run,
    config,
    dataset,
    lora,
    make,
    metrics,
    parameters,
    spread,
    trainer_for,
)
from trl import DistillationConfig, DistillationTrainer, GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from trl_quant import QuantDistillationTrainer, QuantGRPOTrainer, QuantRLOOTrainer
from trl_quant.config.checks import RULES
from trl_quant.rollout import TransformersEngine
from trl_quant.trainers.sampling import QuantSampling


pytestmark = pytest.mark.isa


@dataclass(frozen=True)
class Kind:
    ours: type
    theirs: type
    their_config: type
    module: ModuleType

    @property
    def config(self) -> type:
        return self.ours.config_class


KINDS = {
    "GRPO": Kind(QuantGRPOTrainer, GRPOTrainer, GRPOConfig, grpo_trainer),
    "RLOO": Kind(QuantRLOOTrainer, RLOOTrainer, RLOOConfig, rloo_trainer),
    "distillation": Kind(QuantDistillationTrainer, DistillationTrainer, DistillationConfig, distillation_trainer),
}
# RLOO and distillation. The same is tested of GRPO in its own files
others = pytest.mark.parametrize("kind", ["RLOO", "distillation"])


def run_of(path, name: str, model=None, **given):
    """A trainer with two steps of INT4 samples. Its default correction is RLOO's `tis`, and none in distillation."""
    settings = {"rollout_precision": "int4", "max_steps": 2} | ({"beta": 0.0} if name == "RLOO" else {})
    return trainer_for(path / "out", model, **{"kind": KINDS[name].ours} | settings | given)


COMPOSED = {
    "GRPO": {
        "cispo": {"loss_type": "cispo", "epsilon_high": 5.0, "is_correction": "tis"},
        "sapo": {"loss_type": "sapo", "is_correction": "ais"},
        "vespo": {"loss_type": "vespo", "is_correction": "tis"},
        "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "is_correction": "decoupled"},
        "iterations": {"num_iterations": 2},
        "accumulation": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
        "steps_per_generation": {"per_device_train_batch_size": 4, "steps_per_generation": 2},
        "two_sided_clip": {"delta": 1.5, "is_correction": "tis"},
        "off_policy_mask": {"off_policy_mask_threshold": 0.5},
        "reference": {"beta": 0.05},
        "entropy_quantile": {"top_entropy_quantile": 0.5},
        "truncated": {"mask_truncated_completions": True},
        "eval": {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4},
        "mixed_precision": {"bf16": True, "gradient_checkpointing": True},
        "noise": {"noise_schedule": "exponential"},
        "uaq": {"uaq_scale": 1.5},
        **{loss: {"loss_type": loss} for loss in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")},
    },
    "RLOO": {
        "iterations": {"num_iterations": 2, "is_correction": "dppo"},
        "steps_per_generation": {"per_device_train_batch_size": 4, "steps_per_generation": 2, "is_correction": "ais"},
        "reference": {"beta": 0.1, "is_correction": "coupled"},
        "normalized": {"normalize_advantages": True, "reward_clip_range": (0.1, 0.9)},
        "truncated": {"mask_truncated_completions": True},
        "multiple": {"pad_to_multiple_of": 5},
        "padded": {"pack_sequences": False},
        "eval": {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4},
        "mixed_precision": {"bf16": True, "gradient_checkpointing": True},
        "uaq": {"uaq_scale": 1.5},
        "trained": {"rollout_precision": None, "train_precision": "int8"},
        "lora": {"rollout_precision": "nf4"},
        "frozen": {"rollout_precision": None, "train_precision": "nvfp4"},
    },
    "distillation": {
        "forward": {"beta": 0.0, "is_correction": "icepop"},
        "multiple": {"pad_to_multiple_of": 5, "is_correction": "tis"},
        "eval": {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4, "is_correction": "tis"},
        "mixed_precision": {"bf16": True, "gradient_checkpointing": True, "is_correction": "decoupled"},
        "uaq": {"uaq_scale": 1.5},
        "trained": {"rollout_precision": None, "train_precision": "int8"},
        "lora": {"rollout_precision": "nf4", "is_correction": "tis"},
        "frozen": {"rollout_precision": None, "train_precision": "nvfp4", "teacher_precision": "mxfp4"},
    },
}

# One of each kind of rows, of weights, of precision; the others differ from these in a loss, a constant or the trainer
BRIEFLY = (
    *(("GRPO", option) for option in ("gspo", "off_policy_mask", "reference")),
    *(("RLOO", option) for option in ("steps_per_generation", "padded", "frozen")),
    *(("distillation", option) for option in ("eval", "lora")),
)


@pytest.mark.parametrize(
    ("kind", "option"), rest_is_long([(kind, option) for kind in KINDS for option in COMPOSED[kind]], *BRIEFLY)
)
def test_composes_with_trl(tmp_path, kind, option):
    """Two steps, in GRPO and RLOO with groups of two; in GRPO with a second reward."""
    second = []

    def length(completions, **kwargs):
        second.append(len(completions))
        return [float(len(text)) for text in completions]

    given = {"max_steps": 2, "num_generations": 2, "rollout_precision": "fp8" if kind == "GRPO" else "int8"}
    given |= COMPOSED[kind][option] | {"peft_config": lora() if option in ("lora", "frozen") else None}
    given["eval_dataset"] = dataset(4 if kind == "distillation" else 2) if option == "eval" else None
    if kind == "GRPO":
        given["reward_funcs"] = [spread, length]
    if kind == "distillation" and option == "frozen":
        given["teacher_model"] = save_tiny(tmp_path / "teacher", seed=4)
    trainer = trainer_for(tmp_path / "out", save_tiny(tmp_path / "model", seed=3), KINDS[kind].ours, **given)
    before = parameters(trainer)
    trainer.train()
    logs = [entry for entry in metrics(trainer) if "loss" in entry]
    assert len(logs) == 2 and all(math.isfinite(entry["loss"]) for entry in logs)
    if option != "truncated":  # every completion of a random model is cut, and then nothing counts
        moved = {name for name, value in parameters(trainer).items() if not torch.equal(value, before[name])}
        assert moved and all("lora_" in name for name in moved) == (option in ("lora", "frozen"))
        assert all(entry["mismatch/abs_logp_diff"] >= 0 for entry in logs if "mismatch/kl_k3" in entry)
        assert "mismatch/kl_k3" in logs[0] and (logs[0]["mismatch/kl_k3"] > 0 or option in ("frozen", "trained"))
    if kind == "distillation":
        assert all(0 < entry["loss"] < 20 and 0 <= entry["mismatch/kl_k3"] < 0.5 for entry in logs)
    if kind == "GRPO":
        assert second and any("rewards/length/mean" in entry for entry in logs)
    if option == "eval":
        assert any(entry.get("eval_mismatch/kl_k3", 0) > 0 for entry in metrics(trainer))


@others
def test_without_a_precision_it_is_trls(tmp_path, kind):
    path, found, runs = save_tiny(tmp_path / "model", seed=3), KINDS[kind], []
    given = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4, "eval_dataset": dataset(4)}
    given |= {"beta": 0.5} if kind == "distillation" else {"num_iterations": 2}
    for trainer, arguments in (
        (found.theirs, found.their_config),
        (found.ours, found.their_config),
        (found.ours, found.config),
    ):
        runs.append(trainer_for(tmp_path, path, trainer, arguments, max_steps=2, **given))
        runs[-1].train()
    assert_same_run(*runs[:2])
    assert_same_run(*runs[1:])
    assert not any("mismatch" in name for entry in metrics(runs[2]) for name in entry)


@others
def test_without_a_mismatch_nothing_is_weighted(tmp_path, kind):
    """Weights of 1 leave every bit where it was: `none` trains as the mixin without any correction."""

    class Uncorrected(QuantSampling, KINDS[kind].theirs):
        """Quantized rollouts alone, on padded rows."""

    path, ends = save_tiny(tmp_path / "model", seed=3), []
    given = {"pack_sequences": False} if kind == "distillation" else {"beta": 0.05}
    for correction, trainer in (("none", Uncorrected), ("none", KINDS[kind].ours), ("tis", KINDS[kind].ours)):
        given |= {"config_class": KINDS[kind].config, "is_correction": correction}
        ends.append(run_of(tmp_path, kind, path, **given | {"kind": trainer}))
        ends[-1].train()
    plain, unweighted, weighted = map(parameters, ends)
    assert all(torch.equal(value, unweighted[name]) for name, value in plain.items())
    assert any(not torch.equal(value, plain[name]) for name, value in weighted.items())


@others
def test_trls_own_sampler_can_be_corrected_too(tmp_path, monkeypatch, kind):
    """TRL asks for no log-probabilities; a run with a correction does."""
    monkeypatch.setattr(KINDS[kind].module, "VLLMGeneration", MadeUpSampler)
    monkeypatch.setattr(KINDS[kind].module, "is_vllm_available", lambda: True, raising=False)
    monkeypatch.setitem(RULES, "machine", ())
    ends = {}
    for correction in (None, "none", "tis"):
        trainer = run_of(tmp_path, kind, use_vllm=True, rollout_precision=None, is_correction=correction)
        assert trainer.vllm_generation.asked_when_built == (None if correction is None else 0)
        assert trainer.vllm_generation.logprobs == (None if correction is None else 0)
        trainer.train()
        assert ("mismatch/kl_k1" in metrics(trainer)[0]) == (correction is not None)
        ends[correction] = parameters(trainer)
    same = [torch.equal(value, ends[None][name]) for name, value in ends["none"].items()]
    assert all(same) and any(not torch.equal(value, ends[None][name]) for name, value in ends["tis"].items())


@pytest.mark.parametrize("kind", rest_is_long(["RLOO", "distillation"]))
def test_noise_checkpoints_and_a_resume(tmp_path, kind):
    """A resumed run is the unbroken one."""
    correction, key, changes = {
        "RLOO": ("ais", "ais/alpha", [{"importance_sampling_level": "sequence"}]),
        "distillation": ("tis", "loss", [{"teacher_precision": "nvfp4"}, {"is_correction": "decoupled"}]),
    }[kind]
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "noise_schedule": "linear"}
    settings |= {"noise_stages": 3, "rollout_precision": "int8", "is_correction": correction}
    settings |= {"model": save_tiny(tmp_path / "model", seed=3)}
    checkpoint = str(tmp_path / "out/checkpoint-2")
    whole = run_of(tmp_path, kind, **settings)
    whole.train()
    assert any(entry.get("noise/effective_sigma", 0) > 0 for entry in metrics(whole))
    resumed = run_of(tmp_path, kind, **settings)
    resumed.train(resume_from_checkpoint=checkpoint)
    assert metrics(resumed)[:4] == metrics(whole)[:4] and metrics(whole)[3][key] > 0
    mine, theirs = parameters(resumed), parameters(whole)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    if kind == "distillation":
        settings["teacher_model"] = save_tiny(tmp_path / "teacher", seed=4)
    for change in ({"rollout_precision": "fp8"}, *changes):
        with pytest.raises(ValueError, match=next(iter(change))):
            run_of(tmp_path, kind, **settings | change).train(resume_from_checkpoint=checkpoint)


@others
def test_it_samples_from_the_embedded_copy(tmp_path, kind):
    """INT4 samples other tokens from the same seed than BF16, so the engine's numbers reach the samples."""
    found = []
    for precision in ("bf16", "int4"):
        trainer = run_of(tmp_path / precision, kind, rollout_precision=precision, max_steps=1)
        engine = trainer.vllm_generation.engine
        assert isinstance(engine, TransformersEngine) and engine.precision == precision
        trainer.train()
        found.append(metrics(trainer)[0]["loss" if kind == "distillation" else "reward"])
    assert found[0] != found[1]


@others
def test_another_config_is_refused(tmp_path, kind):
    name = KINDS[kind].config.__name__
    with pytest.raises(ValueError, match=rf"`args` is a GRPOConfig\. It must be a `{name}`"):
        make(KINDS[kind].ours, config(GRPOConfig, tmp_path))


@others
def test_what_it_says_of_itself(tmp_path, capsys, kind):
    lines = []
    for settings in ({"is_correction": "tis"}, {"is_correction": "none"}, {"rollout_precision": None}, {}):
        run_of(tmp_path, kind, **settings)
        lines.append(capsys.readouterr().out)
    assert "correction tis, cap 2" in lines[0] and "INT4, embedded" in lines[0]
    assert "no correction" in lines[1] and "no correction" in lines[2]
    assert ("correction tis, cap 2" if kind == "RLOO" else "no correction") in lines[3]


@pytest.mark.long
@others
def test_the_example_trains(tmp_path, monkeypatch, kind):
    """A few steps of what a user runs, on the repository's model, which is right on a third; a student comes nearer."""
    monkeypatch.chdir(tmp_path)
    script = runpy.run_path(str(ROOT / f"examples/{kind.lower()}.py"))
    steps, rows = (2, 64) if kind == "RLOO" else (6, 32)
    trainer = script["main"](max_steps=steps, logging_steps=1, per_device_train_batch_size=rows, disable_tqdm=True)
    logs = [log for log in metrics(trainer) if "loss" in log]
    assert len(logs) == steps and all(0 < log["mismatch/kl_k3"] < 0.01 for log in logs)
    if kind == "RLOO":
        assert all(0.1 < log["reward"] < 0.8 and log["grad_norm"] > 0 for log in logs)
    else:
        assert logs[-1]["loss"] < 0.6 * logs[0]["loss"]


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("kind", "family"), rest_is_long([("distillation", "qwen3"), ("RLOO", "qwen3"), ("distillation", "qwen3_5_text")])
)
def test_vllm_ends_as_a_fresh_engine(tmp_path, kind, family):
    """Three steps with a correction, in INT8; the log-probabilities that TRL leaves out arrive."""
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from vllm_engines import SMALL, fresh, greedy, keep

    vllm = {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 512, "vllm_engine_kwargs": SMALL}
    settings = {"rollout_precision": "int8", "max_steps": 3, "is_correction": "tis", "is_cap": 1.1, **vllm}
    model = save_tiny(tmp_path / "model", family, dtype=torch.bfloat16)
    trainer = run_of(tmp_path, kind, model, sync_check_steps=2, **settings)
    keep(trainer)
    before = greedy(trainer.vllm_generation.llm)
    trainer.train()
    logs = metrics(trainer)[:3]
    assert all(log["mismatch/kl_k3"] > 0 and log["mismatch/unscored_fraction"] == 0 for log in logs)
    assert all(log["sampling/importance_sampling_ratio/max"] <= 1.1 + 1e-6 for log in logs)
    assert [log["step"] for log in logs if "sync_check/bound" in log] == [1, 3]
    trainer.check_sync()
    after = greedy(trainer.vllm_generation.llm)
    assert before != after == greedy(fresh(trainer.model, "int8", tmp_path / "fresh"))
