"""The wiring: what the loss becomes under each correction, what is logged, what is refused before a model is loaded."""

import math

import pytest
import torch
from datasets import Dataset
from long_tests import rest_is_long
from reference import ACTING, DROPPING, OBJECTIVES
from tiny import tiny_model
from training import assert_same_run, config, dataset, generation, lora, make, metrics, parameters, spread
from trl import GRPOConfig, GRPOTrainer

from trl_quant import AISGRPOConfig, AISGRPOTrainer, QuantGRPOConfig, QuantGRPOTrainer
from trl_quant.corrections import CORRECTIONS, CorrectionInputs
from trl_quant.noise import norm_noise, sigma
from trl_quant.scaling import apply_uaq, uaq_applied


pytestmark = pytest.mark.isa

MISMATCH = [
    "kl_k1",
    "kl_k3",
    "abs_logp_diff",
    "abs_prob_diff",
    "max_weight",
    "ess_ratio",
    "chi_square",
    "cap_fraction",
]


CAPPED = [name for name, kind in CORRECTIONS.items() if kind.aliases.get("cap") == "is_cap" and name not in DROPPING]


def quantized(trainer_class, output_dir, model=None, config_class=QuantGRPOConfig, peft=False, **overrides):
    overrides = {"rollout_precision": "int4", **overrides}
    trainer = make(
        trainer_class, config(config_class, output_dir, **overrides), model=model, peft_config=lora() if peft else None
    )
    return trainer


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_the_loss_is_the_papers_objective(tmp_path, correction):
    """One step after the policy has moved, on a real batch, against the slow loops of `reference.py`."""
    settings = {"loss_type": "bnpo", "scale_rewards": "group", "epsilon_high": 0.3, "num_iterations": 2}
    settings |= {"is_cap": 1.05} if correction in CAPPED else ACTING.get(correction, {})
    trainer = quantized(QuantGRPOTrainer, tmp_path, is_correction=correction, **settings)
    batch = generation(trainer)
    rollout = batch["sampling_per_token_logps"]
    with torch.no_grad():
        for param in trainer.model.parameters():
            param.add_(torch.randn_like(param), alpha=0.01)
    loss = trainer._compute_loss(trainer.model, batch)
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
    attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
    keep = batch["completion_ids"].shape[1]
    logps, _, _ = trainer._get_per_token_logps_and_entropies(trainer.model, ids, attention, keep)

    fresh = quantized(QuantGRPOTrainer, tmp_path, is_correction="none")
    old, _, _ = fresh._get_per_token_logps_and_entropies(fresh.model, ids, attention, keep)
    objectives = {
        name: -OBJECTIVES[name](
            logps=logps.detach(),
            old_logps=old.detach(),
            rollout_logps=rollout,
            advantages=batch["advantages"],
            mask=batch["completion_mask"],
            epsilon_low=0.2,
            epsilon_high=0.3,
            **({"cap": 1.05} if name in CAPPED else {}),
            **{field.removeprefix(f"{name}_"): value for field, value in ACTING.get(name, {}).items()},
        )
        for name in CORRECTIONS
    }
    assert loss.item() == pytest.approx(float(objectives[correction]), rel=1e-4, abs=1e-6)
    for other, value in objectives.items():
        if other != correction:
            assert abs(loss.item() - float(value)) > 1e-5, other
    assert (trainer.epsilon_low, trainer.epsilon_high) == (0.2, 0.3)  # restored


@pytest.mark.parametrize(
    "correction", rest_is_long(["trl", *CORRECTIONS], "trl", "tis", "acr", "ais", "geometric", "dppo")
)
def test_every_correction_trains_and_says_what_it_saw(tmp_path, correction):
    settings = {"is_correction": correction, **DROPPING.get(correction, {})}
    trainer = quantized(QuantGRPOTrainer, tmp_path, max_steps=2, **settings)
    before = parameters(trainer)
    trainer.train()
    assert any(not torch.equal(before[n], p) for n, p in parameters(trainer).items())
    first, second = metrics(trainer)[:2]
    for name in MISMATCH:
        assert math.isfinite(first[f"mismatch/{name}"])
    assert first["mismatch/kl_k3"] > 1e-4 and first["mismatch/abs_logp_diff"] > 1e-2  # int4 is not the policy
    assert 0 < second["weights/normalized_update"] < first["weights/normalized_quantization_error"]
    assert ("ais/alpha" in first) == (correction == "ais")
    assert ("mismatch/dropped_fraction" in first) == (correction in ("trl", *DROPPING))
    if correction in DROPPING:
        assert 0 < first["mismatch/dropped_fraction"] <= first["mismatch/dropped_sequence_fraction"]
        assert first["mismatch/dropped_fraction"] < 1 and first["sampling/importance_sampling_ratio/min"] == 0
    assert "entropy" in first and "clip_ratio/high_mean" in first
    if correction in ("none", "coupled"):
        assert first["sampling/importance_sampling_ratio/max"] == 1.0
    if correction in ("tis", "acr"):
        assert first["sampling/importance_sampling_ratio/max"] == pytest.approx(min(first["mismatch/max_weight"], 2.0))
    if correction == "decoupled":
        assert first["sampling/importance_sampling_ratio/max"] == pytest.approx(first["mismatch/max_weight"], rel=1e-5)


@pytest.mark.parametrize("precision", ["int8", "nf4"])
def test_lora(tmp_path, precision):
    trainer = quantized(QuantGRPOTrainer, tmp_path, peft=True, rollout_precision=precision, max_steps=3)
    before = parameters(trainer)
    trainer.train()
    after = parameters(trainer)
    for name, param in after.items():
        assert torch.equal(param, before[name]) != ("lora_" in name), name
    assert all(entry["mismatch/kl_k3"] > 0 for entry in metrics(trainer)[:3])


@pytest.mark.parametrize(
    ("setting", "peft"),
    [({"rollout_precision": "int8"}, True), ({"train_precision": "int8"}, True), ({"train_precision": "int8"}, False)],
)
def test_fp16_weights_under_bf16_autocast(tmp_path, setting, peft):
    """TRL computes in BF16 by default, and a checkpoint in FP16 has no more of a mismatch than one in BF16."""
    kl = []
    for dtype in (torch.float16, torch.bfloat16):
        args = config(QuantGRPOConfig, tmp_path, bf16=True, max_steps=1, **setting)
        trainer = make(QuantGRPOTrainer, args, tiny_model(seed=3, dtype=dtype), peft_config=lora() if peft else None)
        trainer.train()
        kl.append(metrics(trainer)[0]["mismatch/kl_k3"])
    assert kl[0] <= 2 * kl[1] < 0.01


def test_a_full_precision_copy_has_no_mismatch_and_trains_as_trl_does(tmp_path):
    """With a bf16 policy and a bf16 copy the sampler is the policy: weights are 1 to rounding, where int4's are not."""
    model = tiny_model(seed=3, dtype=torch.bfloat16)
    trainer = quantized(QuantGRPOTrainer, tmp_path, model=model, rollout_precision="bf16", max_steps=1)
    trainer.train()
    exact = metrics(trainer)[0]
    trainer = quantized(QuantGRPOTrainer, tmp_path, rollout_precision="int4", max_steps=1)
    trainer.train()
    rough = metrics(trainer)[0]
    assert exact["mismatch/kl_k3"] < 1e-3 < 20 * exact["mismatch/kl_k3"] + 1e-3 < rough["mismatch/kl_k3"] * 20
    assert exact["mismatch/kl_k3"] * 20 < rough["mismatch/kl_k3"]


def test_unscored_tokens_weigh_one(tmp_path, monkeypatch):
    trainer = quantized(QuantGRPOTrainer, tmp_path, is_correction="decoupled", num_iterations=2)
    generate = trainer.vllm_generation.generate

    def holes(*args, **kwargs):
        prompts, completions, logprobs, tokens = generate(*args, **kwargs)
        logprobs[0][1], logprobs[1][0] = [None], [float("-inf")]
        return prompts, completions, logprobs, tokens

    monkeypatch.setattr(trainer.vllm_generation, "generate", holes)
    batch = generation(trainer)
    assert batch["importance_sampling_ratio"][0, 1] == 1 and batch["importance_sampling_ratio"][1, 0] == 1
    assert batch["importance_sampling_ratio"].isfinite().all()
    unscored = trainer._metrics["train"]["mismatch/unscored_fraction"][-1]
    assert unscored == pytest.approx(2 / batch["completion_mask"].sum().item())
    assert trainer._compute_loss(trainer.model, batch).isfinite()


def test_metrics_are_those_of_the_batch(tmp_path):
    trainer = quantized(AISGRPOTrainer, tmp_path, config_class=AISGRPOConfig, rollout_precision="int4")
    batch = generation(trainer)
    expected = CORRECTIONS["ais"]()(
        CorrectionInputs(
            batch["sampling_per_token_logps"],
            batch["old_per_token_logps"],
            batch["advantages"],
            batch["completion_mask"],
        )
    )
    assert torch.equal(batch["importance_sampling_ratio"], expected.weights)
    for name, value in expected.metrics.items():
        assert trainer._metrics["train"][name][-1] == pytest.approx(value)
    assert 0 < expected.metrics["ais/alpha"] <= 1


def test_noise_follows_its_schedule_and_spares_evaluation(tmp_path):
    trainer = quantized(
        QuantGRPOTrainer,
        tmp_path,
        rollout_precision="bf16",
        noise_schedule="linear",
        noise_stages=3,
        noise_sigma_start=0.1,
        noise_sigma_end=0.05,
        max_steps=6,
    )
    seen = []
    engine = trainer.vllm_generation.engine
    original = engine.draw
    norm = "model.layers.0.input_layernorm.weight"

    def spy(*args, **kwargs):
        result = original(*args, **kwargs)
        seen.append((engine.noise, dict(engine.copy.named_parameters())[norm].clone(), norm_of(trainer)))
        return result

    def norm_of(trainer):
        return trainer.model.get_parameter(norm).detach().clone()

    engine.draw = spy
    trainer.train()
    assert [noise.step for noise, _, _ in seen if noise.sigma] == [2, 3, 4, 5]
    for step, (noise, used, clean) in enumerate(seen):
        value = sigma(step, 6, "linear", 3, 0.1, 0.05)
        assert noise.sigma == value
        assert torch.equal(used, norm_noise(clean, value, trainer.args.seed, step, norm))
        assert torch.equal(used, clean) == (step < 2)
    logged = [entry["noise/sigma"] for entry in metrics(trainer)[:6]]
    assert logged == [0, 0, pytest.approx(0.1), pytest.approx(0.1), pytest.approx(0.05), pytest.approx(0.05)]
    trainer.model.eval()
    trainer.state.global_step = 3
    assert trainer.rollout_noise().sigma == 0


def test_uaq_is_applied_once(tmp_path):
    trainer = quantized(QuantGRPOTrainer, tmp_path / "a", uaq_scale=1.5, max_steps=1)
    expected = tiny_model(seed=3)
    apply_uaq(expected, 1.5)
    plain = dict(tiny_model(seed=3).named_parameters())
    assert all(torch.equal(p, expected.get_parameter(n)) for n, p in parameters(trainer).items())
    assert any(not torch.equal(p, plain[n]) for n, p in parameters(trainer).items())
    trainer.model.save_pretrained(tmp_path / "scaled")
    trainer.processing_class.save_pretrained(tmp_path / "scaled")
    again = make(
        QuantGRPOTrainer,
        config(QuantGRPOConfig, tmp_path / "b", rollout_precision="int4", uaq_scale=1.5),
        model=str(tmp_path / "scaled"),
    )
    assert uaq_applied(again.model) == 1.5
    assert all(torch.equal(p, expected.get_parameter(n)) for n, p in parameters(again).items())
    with pytest.raises(ValueError, match=r"uaq_scale.*2\.0.*1\.5"):
        make(
            QuantGRPOTrainer,
            config(QuantGRPOConfig, tmp_path / "b", rollout_precision="int4", uaq_scale=2.0),
            model=str(tmp_path / "scaled"),
        )


@pytest.mark.parametrize("trainer_class", [GRPOTrainer, QuantGRPOTrainer])
def test_what_trl_refuses_stays_refused(tmp_path, trainer_class):
    config_class = GRPOConfig if trainer_class is GRPOTrainer else QuantGRPOConfig
    with pytest.raises(ValueError, match="divisible"):
        config(config_class, tmp_path, num_generations=3)


def test_refused_before_a_model_is_loaded(tmp_path, monkeypatch):
    """The model's path does not exist: the error that comes is ours, so nothing was loaded."""
    nowhere = str(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"train_dataset.*question.*prompt"):
        QuantGRPOTrainer(
            nowhere, spread, config(QuantGRPOConfig, tmp_path), train_dataset=Dataset.from_dict({"question": ["1"]})
        )
    monkeypatch.setattr("trl_quant.rollout.vllm.support.is_vllm_available", lambda: False)
    args = config(QuantGRPOConfig, tmp_path, use_vllm=True, rollout_precision="int8")
    with pytest.raises(ImportError, match=r"`use_vllm`=True.*not installed.*use_vllm=False"):
        QuantGRPOTrainer(nowhere, spread, args, train_dataset=dataset())


@pytest.mark.parametrize("feature", [{"noise_schedule": "linear"}, {"uaq_scale": 1.5}])
def test_unknown_norms_are_refused_before_loading(tmp_path, feature):
    from transformers import GPT2Config

    GPT2Config(n_layer=1).save_pretrained(tmp_path / "gpt2")  # a config and no weights
    args = config(QuantGRPOConfig, tmp_path, rollout_precision="int8", **feature)
    with pytest.raises(ValueError, match=r"gpt2.*qwen3"):
        QuantGRPOTrainer(str(tmp_path / "gpt2"), spread, args, train_dataset=dataset())


def test_uaq_refuses_adapters(tmp_path):
    with pytest.raises(ValueError, match=r"uaq_scale.*adapter"):
        quantized(QuantGRPOTrainer, tmp_path, peft=True, uaq_scale=1.5)


def test_two_runs_with_one_seed_are_one(tmp_path):
    runs = []
    for seed in (7, 7, 8):
        runs.append(quantized(QuantGRPOTrainer, tmp_path, max_steps=3, noise_schedule="linear", seed=seed))
        runs[-1].train()
    assert_same_run(runs[0], runs[1])
    assert metrics(runs[2]) != metrics(runs[0])


def test_each_generation_of_a_step_has_its_own_noise(tmp_path):
    """Two generations make a step; each draws its own noise, and a step's are those of the next run too."""
    settings = {"gradient_accumulation_steps": 2, "steps_per_generation": 1, "max_steps": 2, "noise_stages": 3}
    seen = []
    for run in "ab":
        trainer = quantized(QuantGRPOTrainer, tmp_path / run, noise_schedule="linear", **settings)
        trainer.args.noise_sigma = lambda step, steps: 0.1
        engine = trainer.vllm_generation.engine
        lay, noises = engine.lay_noise, []

        def laid(noise, engine=engine, lay=lay, noises=noises):
            lay(noise)
            models = (engine.copy, engine.model)
            norms = [model.get_parameter("model.layers.0.input_layernorm.weight") for model in models]
            if (noise.step, noise.draw) not in [(before.step, before.draw) for before, _ in noises]:
                noises.append((noise, torch.sub(*norms)))  # the check of the copy takes it away and lays it again

        engine.lay_noise = laid
        trainer.train()
        assert [(noise.step, noise.draw) for noise, _ in noises] == [(0, 0), (0, 1), (1, 0), (1, 1)]
        assert [entry["noise/norms"] for entry in metrics(trainer)[:2]] == [4, 4]
        seen.append([z for _, z in noises])
    assert all(not torch.allclose(a, b) for i, a in enumerate(seen[0]) for b in seen[0][:i])
    torch.testing.assert_close(seen[0][:2], seen[1][:2])
