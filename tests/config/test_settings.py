"""Settings act as their names say, or are refused, or it is said: corrections, resumes, metrics, TRL's own trainer."""

import json
import math

import pytest
import torch
from accelerate import Accelerator
from long_tests import rest_is_long
from tiny import FAMILIES, save_tiny, tiny_model, tiny_tokenizer
from training import config, dataset, generation, lora, make, metrics
from trl import GRPOConfig, GRPOTrainer

from trl_quant import AISGRPOConfig, AISGRPOTrainer, QuantGRPOConfig, QuantGRPOTrainer
from trl_quant.corrections import CORRECTIONS, CorrectionInputs
from trl_quant.corrections.trl import TRL
from trl_quant.rollout import RolloutNoise, TransformersEngine
from trl_quant.runs.checkpoints import SAMPLED_WEIGHTS, read_sampled_weights
from trl_quant.storage.run_checkpoints import read_rollout_state


def build(config_class=QuantGRPOConfig, **kwargs):
    return config_class(output_dir="unused", use_cpu=True, bf16=False, report_to=[], **kwargs)


NOISY = {
    "a `peft_config`": ({"peft_config": {"lora_dropout": 0.05}}, "`dropout`=0.05: the trainer scores"),
    "the model": ({"model": {"attention_dropout": 0.1}}, "`attention_dropout`=0.1: the trainer scores"),
    "the embeddings": ({"settings": {"neftune_noise_alpha": 5.0}}, "`neftune_noise_alpha`=5.0: the trainer scores"),
    "none": ({}, None),
    "switched off": ({"peft_config": {"lora_dropout": 0.05}, "settings": {"disable_dropout": True}}, None),
    "TRL's sampler": ({"peft_config": {"lora_dropout": 0.05}, "settings": {"rollout_precision": None}}, None),
}


@pytest.mark.parametrize("where", NOISY)
def test_noise_of_the_trainer_alone_is_told(tmp_path, where, caplog):
    given, says = NOISY[where]
    args = config(QuantGRPOConfig, tmp_path, **{"rollout_precision": "int8"} | given.get("settings", {}))
    adapter = lora(**given["peft_config"]) if "peft_config" in given else None
    make(QuantGRPOTrainer, args, tiny_model(seed=3, **given.get("model", {})), peft_config=adapter)
    assert says in caplog.text if says else "the trainer scores with this noise" not in caplog.text


def test_arguments_of_the_model_replace_fields_of_its_config_before_it_is_loaded(tmp_path):
    path = save_tiny(tmp_path / "model", "seed_oss", attention_dropout=0.1)  # with which rows are not packed
    given = {"rollout_precision": "int8", "pack_sequences": True}
    with pytest.raises(ValueError, match=r"`pack_sequences`=True.*`attention_dropout`=0.1"):
        make(QuantGRPOTrainer, config(QuantGRPOConfig, tmp_path, **given), path)
    given["model_init_kwargs"] = {"attention_dropout": 0.0}
    assert make(QuantGRPOTrainer, config(QuantGRPOConfig, tmp_path, **given), path).packs


# The trainer's class and its config


def test_a_config_that_contradicts_the_class_is_refused(tmp_path):
    for given in (config(QuantGRPOConfig, tmp_path), config(QuantGRPOConfig, tmp_path, rollout_precision="int8")):
        with pytest.raises(ValueError, match=r"`is_correction`='(trl|tis)', but AISGRPOTrainer runs 'ais'"):
            make(AISGRPOTrainer, given)
    trainer = make(AISGRPOTrainer, config(QuantGRPOConfig, tmp_path, rollout_precision="int8", is_correction="ais"))
    assert (trainer.scale_rewards, trainer.loss_type) == ("none", "grpo")
    trainer = make(QuantGRPOTrainer, config(AISGRPOConfig, tmp_path, rollout_precision="int8"))
    assert (trainer.scale_rewards, trainer.loss_type) == ("none", "grpo")


def test_ais_with_trls_config_is_ais(tmp_path, caplog):
    trainer = make(AISGRPOTrainer, config(GRPOConfig, tmp_path))
    assert (trainer.scale_rewards, trainer.loss_type, trainer.args.is_correction) == ("none", "grpo", "ais")
    assert "`scale_rewards` is set to 'none'" in caplog.text and "`loss_type` is set to 'grpo'" in caplog.text
    trainer = make(AISGRPOTrainer, config(GRPOConfig, tmp_path, loss_type="dr_grpo", scale_rewards="batch"))
    assert (trainer.scale_rewards, trainer.loss_type) == ("batch", "dr_grpo")  # what was chosen stays


def test_fields_that_are_assigned_later_count_as_given(tmp_path):
    def assigned(**values):
        args = config(QuantGRPOConfig, tmp_path)
        for name, value in values.items():
            setattr(args, name, value)
        return make(QuantGRPOTrainer, args).args

    given = (
        {"rollout_precision": "int8"},
        {"train_precision": "int8"},
        {"rollout_precision": "fp8", "is_correction": "ais"},
    )
    for settings in given:
        built = make(QuantGRPOTrainer, config(QuantGRPOConfig, tmp_path, **settings)).args
        assert assigned(**settings).to_dict() == built.to_dict() and built.is_correction != "trl"
    for wrong, says in (({"rollout_precision": "int9"}, "int9"), ({"is_correction": "tis", "dppo_delta": 0.1}, "dppo")):
        with pytest.raises(ValueError, match=says):
            assigned(**wrong)
    several = {"rollout_precision": "int8", "is_correction": "acr", "num_iterations": 2}
    args = config(QuantGRPOConfig, tmp_path, **several)
    assert make(QuantGRPOTrainer, args).args.delta is None
    for name, wrong, says in (("delta", 2.0, "`delta`=2.0"), ("temperature", -1.0, "out of range")):  # fields of TRL's
        args = config(QuantGRPOConfig, tmp_path, **several)
        setattr(args, name, wrong)
        with pytest.raises(ValueError, match=says):
            make(QuantGRPOTrainer, args)
    again = assigned(rollout_precision="int8", is_correction="tis")
    again.rollout_precision = None
    assert make(QuantGRPOTrainer, again).args.is_correction == "tis"  # which was given


def test_trls_trainer_with_our_config_is_told(tmp_path, caplog):
    make(GRPOTrainer, config(QuantGRPOConfig, tmp_path, rollout_precision="int8"))
    assert "`rollout_precision`='int8' acts only with `QuantGRPOTrainer`" in caplog.text
    caplog.clear()
    make(GRPOTrainer, config(QuantGRPOConfig, tmp_path))
    make(QuantGRPOTrainer, config(QuantGRPOConfig, tmp_path, rollout_precision="int8"))
    assert "acts only with" not in caplog.text


# Corrections that cannot act


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        (
            {"is_correction": "decoupled", "rollout_precision": "int8", "is_cap": 3.0},
            ["`is_cap`=3.0", "'tis'", "'acr'"],
        ),
        (
            {"is_correction": "tis", "rollout_precision": "int8", "ais_delta": 0.1},
            ["`ais_delta`=0.1", "'ais'", "'tis'"],
        ),
        (
            {"is_correction": "icepop", "rollout_precision": "int8", "dppo_delta": 0.1},
            ["`dppo_delta`=0.1", "'dppo'", "'icepop'"],
        ),
        ({"rollout_precision": "int8", "noise_stages": 5}, ["`noise_stages`=5", "`noise_schedule`"]),
        ({"is_correction": "acr", "rollout_precision": "int8", "delta": 2.0}, ["'acr'", "`delta`=2.0", "'tis'"]),
        ({"lora_sync": "adapter", "use_vllm": True}, ["`lora_sync`='adapter'", "`rollout_precision`"]),
        ({"vllm_engine_kwargs": {"enforce_eager": True}, "use_vllm": True}, ["`vllm_engine_kwargs`"]),
        ({"sync_check_steps": 5, "rollout_precision": "int8"}, ["`sync_check_steps`=5", "use_vllm"]),
        ({"uaq_scale": 1.5, "sync_ref_model": True, "beta": 0.1}, ["`uaq_scale`=1.5", "`sync_ref_model=True`"]),
    ],
)
def test_options_that_cannot_act_are_refused(kwargs, words):
    with pytest.raises(ValueError) as error:
        build(**kwargs)
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize(
    "kwargs",
    [
        {"is_correction": "tis", "rollout_precision": "int8", "is_cap": 3.0},
        {"is_correction": "ais", "rollout_precision": "int8", "ais_delta": 0.1, "is_cap": 3.0},
        {"rollout_precision": "int8", "noise_stages": 5, "noise_schedule": "linear"},
        {"is_correction": "tis", "rollout_precision": "int8", "delta": 2.0},
        {"uaq_scale": 1.5, "beta": 0.1},
        {"is_correction": "none"},
    ],
)
def test_their_neighbours_are_accepted(kwargs):
    build(**kwargs)


def test_a_correction_without_a_sampler(tmp_path, caplog):
    def rollout(prompts, trainer):
        raise AssertionError("nothing is generated")

    with pytest.raises(ValueError, match=r"`is_correction`='tis' with a `rollout_func` needs `use_vllm=True`"):
        make(QuantGRPOTrainer, config(QuantGRPOConfig, tmp_path, is_correction="tis"), rollout_func=rollout)
    make(QuantGRPOTrainer, config(QuantGRPOConfig, tmp_path, is_correction="none"), rollout_func=rollout)
    assert "does nothing" not in caplog.text
    make(QuantGRPOTrainer, config(QuantGRPOConfig, tmp_path, is_correction="tis"))
    assert "`is_correction`='tis' does nothing in this run" in caplog.text


def test_trls_correction_switched_off(tmp_path, caplog):
    """A quantized sampler, neither corrected nor measured: it trains, and says so."""
    settings = {"rollout_precision": "int4", "is_correction": "trl", "vllm_importance_sampling_correction": False}
    trainer = make(QuantGRPOTrainer, config(QuantGRPOConfig, tmp_path, **settings, max_steps=1))
    assert "neither corrected nor measured" in caplog.text
    trainer.train()
    logged = metrics(trainer)[0]
    assert "weights/normalized_quantization_error" in logged and not any(k.startswith("mismatch/") for k in logged)


@pytest.mark.parametrize(
    ("given", "of_model", "longest"),
    [({}, None, 20), ({"max_new_tokens": 5}, None, 5), ({}, 40, None), ({"max_new_tokens": 5}, 40, 5)],
    ids=str,
)
def test_without_a_length_the_embedded_engine_samples_as_many_tokens_as_trl(tmp_path, given, of_model, longest):
    """Those of `generation_kwargs`, else up to the length that the model's generation config has, else 20."""
    found = []
    for trainer_class, precision in ((GRPOTrainer, None), (QuantGRPOTrainer, None), (QuantGRPOTrainer, "int8")):
        model = tiny_model(seed=3)
        model.generation_config.max_length = of_model
        settings = {"max_completion_length": None, "generation_kwargs": {"suppress_tokens": [257]} | given}
        kind = GRPOConfig if trainer_class is GRPOTrainer else QuantGRPOConfig
        settings |= {} if precision is None else {"rollout_precision": precision}
        trainer = make(trainer_class, config(kind, tmp_path, max_steps=1, **settings), model=model)
        trainer.train()
        found.append(metrics(trainer)[0]["completions/max_length"])
    assert len(set(found)) == 1 and found[0] == (longest or found[0])
    assert longest is not None or 20 != found[0] < 40  # the prompts are part of that length


def test_when_acr_is_tis_is_said(caplog):
    build(rollout_precision="int8", is_correction="acr")
    assert "`is_correction='acr'` is 'tis'" in caplog.text
    caplog.clear()
    build(rollout_precision="int8", is_correction="acr", num_iterations=2)
    build(rollout_precision="int8", is_correction="tis")
    assert "is 'tis'" not in caplog.text


def test_bounds_that_trl_ignores_are_said(caplog):
    build(rollout_precision="int8", vllm_importance_sampling_clip_min=0.5)
    assert "vllm_importance_sampling_clip_min" in caplog.text


# Sequences


def batch(tokens: int = 6):
    generator = torch.Generator().manual_seed(0)
    rollout = -torch.rand(3, tokens, generator=generator)
    old = rollout + 0.4 * torch.randn(3, tokens, generator=generator)
    mask = torch.tensor([[1] * tokens, [1] * 4 + [0] * (tokens - 4), [1] * 2 + [0] * (tokens - 2)])
    return rollout, old, torch.tensor([1.0, -1.0, 0.5]), mask


@pytest.mark.parametrize("name", ["tis", "decoupled", "ais"])
def test_the_weight_of_a_sequence_is_the_product_of_its_tokens(name):
    rollout, old, advantages, mask = batch()
    sequence = CORRECTIONS[name]()(CorrectionInputs(rollout, old, advantages, mask, "sequence"))
    token = CORRECTIONS[name]()(CorrectionInputs(rollout, old, advantages, mask))
    for row in range(3):
        n = int(mask[row].sum())
        product = float((old - rollout)[row, :n].sum().exp())
        weight = min(product, getattr(CORRECTIONS[name](), "cap", float("inf")))
        if name == "ais":
            weight = 1 + sequence.metrics["ais/alpha"] * (weight - 1)
        assert sequence.weights[row, :n].tolist() == pytest.approx([weight] * n, rel=1e-5)
        assert (sequence.weights[row, n:] == 1).all()
    assert (token.weights.mean(1) - sequence.weights[:, 0]).abs().max() > 0.05
    assert {k: v for k, v in sequence.metrics.items() if k.startswith("mismatch/kl")} == {
        k: v for k, v in token.metrics.items() if k.startswith("mismatch/kl")
    }


def test_the_loss_of_a_sequence_has_that_weight(tmp_path):
    """GSPO: TRL multiplies a loss for each sequence by a weight for each token, and averages."""
    settings = {"rollout_precision": "int4", "is_correction": "decoupled", "loss_type": "grpo", "num_iterations": 2}
    args = config(QuantGRPOConfig, tmp_path, importance_sampling_level="sequence", **settings)
    trainer = make(QuantGRPOTrainer, args)
    output = generation(trainer)
    mask = output["completion_mask"].bool()
    ratio = (output["old_per_token_logps"] - output["sampling_per_token_logps"]).masked_fill(~mask, 0).sum(1).exp()
    assert torch.allclose(output["importance_sampling_ratio"][:, 0], ratio, rtol=1e-5) and ratio.std() > 1e-3
    loss = trainer._compute_loss(trainer.model, output).item()
    expected = -(ratio * output["advantages"]).mean().item()  # the policy has not moved: R is 1
    assert loss == pytest.approx(expected, rel=1e-3, abs=1e-5)


VESPO = {"loss_type": "vespo", "importance_sampling_level": "sequence"}


@pytest.mark.parametrize("name", [name for name, kind in CORRECTIONS.items() if not getattr(kind, "token_only", False)])
def test_vespo_with_weights_of_sequences_is_refused(name):
    with pytest.raises(ValueError) as error:
        build(rollout_precision="int8", is_correction=name, **VESPO)
    words = ["`loss_type`='vespo'", "`importance_sampling_level`='sequence'", "power T", "'token'"]
    assert all(word in str(error.value) for word in words), error.value
    build(rollout_precision="int8", is_correction=name, loss_type="vespo")
    build(rollout_precision="int8", is_correction=name, importance_sampling_level="sequence")
    build(**VESPO)  # without a correction of ours, whose weights these are, it is TRL's own


def test_why_vespo_refuses_weights_of_sequences():
    """
    Its factor phi(W) = exp(lambda) W^k exp(-lambda W) is of the sequence's ratio W where the weights are of tokens, and
    of W^T where each of the T weights is W.
    """
    tokens, product = 64, 1.9
    old = torch.full((1, tokens), -1.0)
    inputs = (old - math.log(product) / tokens, old, torch.tensor([1.0]), torch.ones(1, tokens))
    phi = {}
    for level in ("token", "sequence"):
        weights = CORRECTIONS["tis"]()(CorrectionInputs(*inputs, level)).weights
        args = (torch.ones(1, 1), torch.zeros(1, tokens), torch.ones(1, tokens), weights)
        phi[level] = GRPOTrainer.get_gamma_weights(*args).item()
    expected = math.exp(3.0) * product**2 * math.exp(-3.0 * product)  # TRL's lambda and k of a positive advantage
    assert phi["token"] == pytest.approx(expected, rel=1e-4) and expected == pytest.approx(0.2426, abs=1e-4)
    assert phi["sequence"] == 0.0


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_what_trl_caps_and_drops_is_measured(tmp_path, mode, caplog):
    """Against TRL's own weights on a real batch."""
    settings = {"rollout_precision": "int4", "is_correction": "trl", "vllm_importance_sampling_clip_max": 1.05}
    args = config(QuantGRPOConfig, tmp_path, vllm_importance_sampling_mode=mode, **settings)
    trainer = make(QuantGRPOTrainer, args)
    output = generation(trainer)
    mask = output["completion_mask"].bool()
    weights = output["importance_sampling_ratio"].expand(mask.shape)[mask]
    logged = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    capped = (weights == 0) if mode.endswith("mask") else (weights == weights.max())
    assert logged["mismatch/cap_fraction"] == pytest.approx(capped.double().mean().item()) and capped.sum() > 0
    dropped = (weights == 0).double().mean().item()
    assert logged["mismatch/dropped_fraction"] == pytest.approx(dropped)
    assert ("drops" in caplog.text) == (dropped > 0) == mode.endswith("mask")


def test_within_its_bounds_nothing_is_dropped(caplog):
    rollout, old, advantages, mask = batch()
    found = TRL(clip_max=100.0)(CorrectionInputs(rollout, old, advantages, mask)).metrics
    assert found["mismatch/dropped_fraction"] == found["mismatch/cap_fraction"] == 0 and "drops" not in caplog.text


# Metrics


def test_rescued_tokens(tmp_path):
    """Against a loop: A > 0 and the ratio between TRL's bound and the widened one."""
    args = config(
        QuantGRPOConfig, tmp_path, rollout_precision="int4", is_correction="acr", is_cap=1.0, num_iterations=2
    )
    trainer = make(QuantGRPOTrainer, args)
    output = generation(trainer, prompts=64)  # few tokens are rescued: among those of two prompts there may be none
    with torch.no_grad():
        for param in trainer.model.parameters():
            param.add_(torch.randn(param.shape, generator=torch.Generator().manual_seed(1)), alpha=0.03)
    trainer._compute_loss(trainer.model, output)
    ids = torch.cat([output["prompt_ids"], output["completion_ids"]], dim=1)
    attention = torch.cat([output["prompt_mask"], output["completion_mask"]], dim=1)
    length = output["completion_ids"].shape[1]
    logps = trainer._get_per_token_logps_and_entropies(trainer.model, ids, attention, length)[0]
    count = total = 0
    for b, t in output["completion_mask"].nonzero().tolist():
        ratio = (logps[b, t] - output["old_per_token_logps"][b, t]).exp().item()
        w = (output["old_per_token_logps"][b, t] - output["sampling_per_token_logps"][b, t]).exp().item()
        high = 1.2 / min(1.0, 1.0 / w)
        count, total = count + (output["advantages"][b].item() > 0 and 1.2 < ratio <= high), total + 1
    assert trainer._metrics["train"]["mismatch/rescued_fraction"] == [pytest.approx(count / total)]
    assert count > 0


def test_evaluation_leaves_the_syncs_metrics_to_training(tmp_path):
    settings = {"rollout_precision": "int8", "eval_strategy": "steps", "eval_steps": 1, "max_steps": 3}
    args = config(QuantGRPOConfig, tmp_path, per_device_eval_batch_size=8, **settings)
    trainer = make(QuantGRPOTrainer, args, eval_dataset=dataset(2))
    trainer.train()
    logged = [entry for entry in metrics(trainer) if "reward" in entry]
    assert ["weights/codes_changed" in entry for entry in logged] == [False, True, True]
    assert all("weights/normalized_quantization_error" in entry for entry in logged)
    assert not any("eval_weights" in name for entry in metrics(trainer) for name in entry)


# Noise


@pytest.mark.parametrize("sigma", rest_is_long([1e-2, 1e-3, 5e-4]))
@pytest.mark.parametrize("family", FAMILIES)
def test_noise_arrives_in_a_bf16_copy(family, sigma):
    found = {}
    for wide in (True, False):
        model = tiny_model(family, dtype=torch.bfloat16)
        options = {"precision": "bf16", "wide_norms": wide, "max_completion_length": 4}
        engine = TransformersEngine(model, Accelerator(cpu=True), tiny_tokenizer(), **options)
        engine.sync()
        tokens = torch.arange(3, 120)[None]
        clean = engine.copy(tokens).logits
        engine.lay_noise(RolloutNoise(sigma, 3, 7))
        found[wide] = engine.effective_sigma
        assert engine.copy(tokens).logits.dtype == torch.bfloat16
        assert not wide or not torch.equal(engine.copy(tokens).logits, clean)
        engine.lay_noise(RolloutNoise())
        assert torch.equal(engine.copy(tokens).logits, clean)  # FP32 norms that hold BF16 weights change no bit
    assert found[True] == pytest.approx(sigma, rel=0.15)
    if sigma < 1e-3 and "gemma" not in family:  # Gemma stores the gain minus one, around 0, where BF16 is fine
        assert found[False] < 0.5 * sigma


def test_noise_is_relative_to_the_scaled_norm(tmp_path):
    settings = {"rollout_precision": "bf16", "noise_schedule": "linear", "noise_stages": 3, "max_steps": 3}
    changes = {}
    for scale in (None, 2.0):
        args = config(
            QuantGRPOConfig, tmp_path, uaq_scale=scale, noise_sigma_start=0.1, noise_sigma_end=0.1, **settings
        )
        trainer = make(QuantGRPOTrainer, args)
        engine = trainer.vllm_generation.engine
        engine.sync()
        clean = engine.read_norms()
        engine.lay_noise(RolloutNoise(0.1, 3, 7))
        noised = engine.read_norms()
        changes[scale] = torch.cat([(noised[name] - clean[name]) / clean[name] for name in clean])
        assert engine.effective_sigma == pytest.approx(0.1, rel=0.15)
    torch.testing.assert_close(changes[None], changes[2.0], rtol=1e-3, atol=1e-4)
    trainer.train()
    logged = [entry["noise/effective_sigma"] for entry in metrics(trainer) if "noise/effective_sigma" in entry]
    assert logged == [0, pytest.approx(0.1, rel=0.15), pytest.approx(0.1, rel=0.15)]


# Resume


SAVING = {"rollout_precision": "int4", "max_steps": 2, "save_strategy": "steps", "save_steps": 1}


def run_to_step_2(path, **settings):
    trainer = make(QuantGRPOTrainer, config(QuantGRPOConfig, path, **SAVING | settings))
    trainer.train()


@pytest.mark.parametrize(
    "change",
    [
        {"rollout_precision": "fp8"},
        {"rollout_precision": None},
        {"is_correction": "acr"},
        {"is_cap": 3.0},
        {"noise_schedule": "linear"},
    ],
    ids=str,
)
def test_a_resume_with_other_settings_is_refused_or_said(tmp_path, change, caplog):
    run_to_step_2(tmp_path)
    (name,) = change
    changed = {**SAVING, "max_steps": 3, **change}
    with pytest.raises(ValueError, match=rf"`{name}`: .* -> {change[name]!r}.*resume_with_changes"):
        make(QuantGRPOTrainer, config(QuantGRPOConfig, tmp_path, **changed)).train(resume_from_checkpoint=True)
    allowed = make(QuantGRPOTrainer, config(QuantGRPOConfig, tmp_path, **changed, resume_with_changes=True))
    allowed.train(resume_from_checkpoint=True)
    assert allowed.state.global_step == 3 and f"`{name}`: " in caplog.text and "-> " in caplog.text


def test_a_resume_is_checked_however_the_checkpoint_is_loaded(tmp_path, monkeypatch):
    """DeepSpeed's are not loaded by `_load_from_checkpoint`: the check comes before TRL's `train`."""
    run_to_step_2(tmp_path)
    trained = []
    monkeypatch.setattr(GRPOTrainer, "train", lambda self, *args, **kwargs: trained.append(args))
    changed = make(QuantGRPOTrainer, config(QuantGRPOConfig, tmp_path, **SAVING | {"rollout_precision": "fp8"}))
    for checkpoint in (True, str(tmp_path / "checkpoint-1")):
        with pytest.raises(ValueError, match=r"`rollout_precision`: 'int4' -> 'fp8'"):
            changed.train(resume_from_checkpoint=checkpoint)
    assert not trained
    make(QuantGRPOTrainer, config(QuantGRPOConfig, tmp_path, **SAVING)).train(resume_from_checkpoint=True)
    assert trained == [(str(tmp_path / "checkpoint-2"),)]


def test_a_resume_with_the_same_settings_and_from_trl(tmp_path):
    run_to_step_2(tmp_path / "ours")
    again = make(QuantGRPOTrainer, config(QuantGRPOConfig, tmp_path / "ours", **SAVING | {"max_steps": 3}))
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 3

    plain = {name: value for name, value in SAVING.items() if name != "rollout_precision"}
    make(GRPOTrainer, config(GRPOConfig, tmp_path / "trl", **plain)).train()
    quantized = config(QuantGRPOConfig, tmp_path / "trl", **SAVING | {"max_steps": 3})
    with pytest.raises(ValueError, match=r"`rollout_precision`: None -> 'int4'"):
        make(QuantGRPOTrainer, quantized).train(resume_from_checkpoint=True)
    resumed = make(QuantGRPOTrainer, config(QuantGRPOConfig, tmp_path / "trl", **plain | {"max_steps": 3}))
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 3


def test_auto_is_refused_with_the_precision_of_the_checkpoint_to_resume(tmp_path):
    """Earlier versions chose it when the run began, and recorded the choice. A run of that name resumes."""
    run_to_step_2(tmp_path)
    generic = r"`trl-quant choose MODEL .*, name the precision that its checkpoints record"
    for resume in (None, "false", str(tmp_path / "nowhere")):
        with pytest.raises(ValueError, match=generic):
            config(QuantGRPOConfig, tmp_path, rollout_precision="auto", resume_from_checkpoint=resume)
    for resume, step in (("true", 2), ("True", 2), (str(tmp_path / "checkpoint-1"), 1)):
        named = rf"`trl-quant choose MODEL .* To resume .*checkpoint-{step}, set `rollout_precision`='int4'"
        with pytest.raises(ValueError, match=named):
            config(QuantGRPOConfig, tmp_path, rollout_precision="auto", resume_from_checkpoint=resume)
    (tmp_path / "checkpoint-2/rollout_state.json").write_text("{")
    with pytest.raises(ValueError, match=generic):
        config(QuantGRPOConfig, tmp_path, rollout_precision="auto", resume_from_checkpoint="true")
    args = config(QuantGRPOConfig, tmp_path)
    args.rollout_precision = "auto"
    with pytest.raises(ValueError, match=generic):
        make(QuantGRPOTrainer, args)
    assert read_rollout_state(tmp_path / "nothing") == {}


def test_what_a_checkpoint_records(tmp_path):
    path = save_tiny(tmp_path / "model")
    trainer = make(QuantGRPOTrainer, config(QuantGRPOConfig, tmp_path / "out", **SAVING), model=path)
    trainer.train()
    state = read_rollout_state(tmp_path / "out/checkpoint-2")
    recorded = trainer.args.training_settings() | {"config": "QuantGRPOConfig"}
    assert state["settings"] == json.loads(json.dumps(recorded))
    initial, synced = (read_sampled_weights(tmp_path / "out/checkpoint-2", name) for name in SAMPLED_WEIGHTS)
    start, last = dict(tiny_model().named_parameters()), trainer.vllm_generation.engine.drift.previous
    assert initial and all(torch.equal(rows, start[name][: len(rows)]) for name, rows in initial.items())
    assert synced.keys() == initial.keys() and all(torch.equal(rows, last[n].weight) for n, rows in synced.items())
    assert not all(torch.equal(rows, initial[name]) for name, rows in synced.items())
    assert state["micro_steps"] == 2
    assert any(not torch.equal(rows, trainer.model.get_parameter(name)[: len(rows)]) for name, rows in initial.items())
