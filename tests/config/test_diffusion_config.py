"""What the config of masked diffusion takes, sets and refuses, before a model is loaded."""

import re
from dataclasses import fields

import pytest
from masked_policy import MASK_ID, policy, tokenizer, trainer
from tiny import tiny_model, tiny_tokenizer
from training import config, make
from trl import GRPOConfig

from trl_quant import DiffusionGRPOConfig, DiffusionGRPOTrainer, QuantGRPOConfig, QuantGRPOTrainer
from trl_quant.config.diffusion import DENOISING, DenoisingFields
from trl_quant.rollout import EngineSpec


def build(path="unused", **settings):
    return config(DiffusionGRPOConfig, path, **{"max_completion_length": 64} | settings)


def test_the_defaults_are_the_papers():
    args = build(num_iterations=12)
    assert (args.block_length, args.tokens_per_step, args.prompt_mask_probability) == (32, 2, 0.15)
    assert args.mask_token_id is None and args.mask_draws == 12  # d1: a mask for each update
    assert args.rollout_precision == "bf16" and args.pack_sequences is False
    assert build(prompt_mask_draws=1, num_iterations=12).mask_draws == 1
    draws = {p: build(num_iterations=12, prompt_mask_probability=p).mask_draws for p in (0.0, 0.01, 0.99, 1.0)}
    assert draws == {0.0: 1, 0.01: 12, 0.99: 12, 1.0: 1}  # one mask where all would be the same
    assert build(train_precision="int8").rollout_precision == "int8"
    assert (
        DiffusionGRPOConfig.from_trl(
            config(GRPOConfig, "unused", num_iterations=3, max_completion_length=32)
        ).mask_draws
        == 3
    )


def test_its_fields_stand_beside_those_of_grpo():
    own = {f.name for f in fields(DenoisingFields)}
    assert own == {f.name for f in fields(DiffusionGRPOConfig)} - {f.name for f in fields(QuantGRPOConfig)}
    assert own <= build().training_settings().keys() and own <= DiffusionGRPOConfig.plain_settings().keys()
    assert not own & config(QuantGRPOConfig, "unused").training_settings().keys()
    assert list(DENOISING.values()) == [DenoisingFields]
    assert all(name in DiffusionGRPOConfig.__doc__ for name in own)


@pytest.mark.parametrize(
    ("settings", "kind"),
    [({"rollout_precision": "int4"}, "diffusion"), ({"train_precision": "int8"}, "shared_diffusion")],
)
def test_its_engine_denoises(settings, kind):
    args = build(block_length=16, tokens_per_step=4, mask_token_id=7, cast_lm_head_to_fp32=True, **settings)
    spec = EngineSpec.from_config(args)
    assert (spec.kind, spec.is_vllm) == (kind, False)
    assert (spec.block_length, spec.tokens_per_step, spec.mask_token_id, spec.wide_head) == (16, 4, 7, True)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"block_length": 0}, "`block_length`=0 is out of range. It must be >= 1"),
        ({"block_length": 2.5}, "`block_length`=2.5 must be an integer"),
        ({"tokens_per_step": 0}, "`tokens_per_step`=0 is out of range. It must be >= 1"),
        ({"tokens_per_step": True}, "`tokens_per_step`=True must be an integer"),
        ({"prompt_mask_probability": 1.5}, "`prompt_mask_probability`=1.5 is out of range. It must be <= 1"),
        ({"prompt_mask_probability": -0.1}, "`prompt_mask_probability`=-0.1 is out of range. It must be >= 0"),
        ({"mask_token_id": -1}, "`mask_token_id`=-1 is out of range. It must be >= 0"),
        ({"mask_token_id": "M"}, "`mask_token_id`='M' must be an integer or None"),
        ({"prompt_mask_draws": 0}, "`prompt_mask_draws`=0 is out of range. It must be >= 1"),
        ({"prompt_mask_draws": 3, "num_iterations": 2}, "`prompt_mask_draws`=3 is more than `num_iterations`=2"),
        (
            {"prompt_mask_draws": 2, "num_iterations": 2, "prompt_mask_probability": 0.0},
            "`prompt_mask_draws`=2 with `prompt_mask_probability`=0.0: all masks are the same",
        ),
        (
            {"prompt_mask_draws": 2, "num_iterations": 2, "prompt_mask_probability": 1},
            "`prompt_mask_draws`=2 with `prompt_mask_probability`=1: all masks are the same",
        ),
        ({"block_length": 48}, "`block_length`=48 does not divide `max_completion_length`=64"),
        ({"block_length": 128}, "`block_length`=128 does not divide `max_completion_length`=64"),
        (
            {"max_completion_length": None},
            "`max_completion_length`=None: a canvas needs a length. Set a multiple of `block_length`=32",
        ),
        ({"cache_finished_blocks": 1}, "`cache_finished_blocks`=1 must be True or False"),
        (
            {"cache_finished_blocks": True, "tokens_per_step": 32},
            "`cache_finished_blocks`=True acts only between the steps of a block",
        ),
        ({"tokens_per_step": 3}, "`tokens_per_step`=3 does not divide `block_length`=32"),
        (
            {"is_correction": "trl", "num_iterations": 2},
            "`is_correction`='trl' is TRL's own, which scores the sampler once",
        ),
        ({"use_vllm": True, "rollout_precision": "fp8"}, "`use_vllm`=True: a masked diffusion model is denoised"),
        ({"exact_rollouts": True, "train_precision": "int8"}, "`exact_rollouts`=True: a masked"),
        ({"pack_sequences": True}, "`pack_sequences`=True: a masked"),
        ({"generation_kwargs": {"top_p": 0.5}}, "`generation_kwargs`={'top_p': 0.5}: a masked"),
        ({"cache_implementation": "static"}, "`cache_implementation`='static': a masked"),
        ({"use_transformers_continuous_batching": True}, "`use_transformers_continuous_batching`=True: a masked"),
        ({"top_p": 0.9, "top_k": 5}, "`top_p`=0.9 and `top_k`=5: a masked"),
        ({"min_p": 0.1}, "`min_p`=0.1: a masked"),
        ({"repetition_penalty": 1.3}, "`repetition_penalty`=1.3: a masked"),
        ({"temperature": 0.0}, "`temperature`=0.0 is out of range"),
        ({"sync_check_steps": 10}, "`sync_check_steps`=10 acts only with vLLM"),
        (
            {"vllm_engine_kwargs": {"enforce_eager": True}},
            "`vllm_engine_kwargs`={'enforce_eager': True} acts only with vLLM",
        ),
    ],
    ids=str,
)
def test_it_refuses_what_it_must(settings, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        build(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "generation_kwargs": {}},
        {"is_correction": "trl", "num_iterations": 2, "prompt_mask_draws": 1},
        {"pack_sequences": False, "block_length": 64, "tokens_per_step": 64},
        {"prompt_mask_probability": 0, "mask_token_id": 0},
        {"prompt_mask_probability": 0.01, "num_iterations": 2, "prompt_mask_draws": 2},
        {"prompt_mask_probability": 0.0, "num_iterations": 2, "prompt_mask_draws": 1},
        {"prompt_mask_probability": 1.0, "num_iterations": 2, "is_correction": "trl"},
    ],
    ids=str,
)
def test_it_takes_what_has_no_such_effect(settings):
    build(**settings)


def length(text: str) -> int:
    """The length of a text.

    Args:
        text: The text.
    """
    return len(text)


def causal(**settings):
    return {"model": tiny_model("llama", **settings)}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (causal(), "The policy attends only to earlier tokens"),
        (causal(is_causal=True), "The policy attends only to earlier tokens"),
        ({"model": tiny_model("mixtral", is_causal=False)}, "`model_type`='mixtral' is not among those that are known"),
        ({"given": {"processing_class": tiny_tokenizer()}}, "`mask_token_id`=None: neither the tokenizer nor"),
        ({"mask_token_id": 320}, "`mask_token_id`=320 is not a token of the model. It must be at least 0 and below 3"),
        ({"mask_token_id": 256}, "`mask_token_id`=256 is also the tokenizer's token for the end of a text"),
        ({"given": {"tools": [length]}}, "`tools` with a masked diffusion model, whose completions have one turn"),
        ({"given": {"rollout_func": print}}, "`rollout_func` with a masked diffusion model"),
        ({"given": {"environment_factory": print}}, "`environment_factory` with a masked diffusion model"),
    ],
    ids=[f"{number}" for number in range(9)],
)
def test_the_trainer_refuses_what_it_must(tmp_path, given, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        trainer(tmp_path, **given)


@pytest.mark.parametrize("ends", [MASK_ID, [257, MASK_ID]], ids=str)
@pytest.mark.parametrize("stored", ["loaded", "a generation config", "a model config"])
def test_a_mask_token_that_ends_completions_is_refused(tmp_path, monkeypatch, stored, ends):
    """Before anything is loaded. The tokenizer has another end and knows nothing of this one."""
    model, place = policy(), tmp_path / "model"
    model.generation_config.eos_token_id = model.config.eos_token_id = ends
    if stored != "loaded":
        model.save_pretrained(place)
        tokenizer().save_pretrained(place)
    if stored == "a model config":
        (place / "generation_config.json").unlink()
    given = {"processing_class": tokenizer()} if stored == "loaded" else {"processing_class": None}
    settings = {"model": model if stored == "loaded" else str(place), "given": given}
    assert trainer(tmp_path, mask_token_id=5, **settings).vllm_generation.engine.mask_token_id == 5
    monkeypatch.setattr("trl.trainer.grpo_trainer.create_model_from_path", None)  # loads nothing
    with pytest.raises(ValueError, match=f"`mask_token_id`={MASK_ID} ends a completion"):
        trainer(tmp_path, mask_token_id=MASK_ID, **settings)


def test_a_tokenizer_that_is_loaded_is_checked_too(tmp_path):
    """It is not known before the engine is built."""
    policy().save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="`mask_token_id`=None: neither the tokenizer nor the model's config"):
        trainer(tmp_path, model=str(tmp_path / "model"), given={"processing_class": None})
    tokenizer().save_pretrained(tmp_path / "model")
    made = trainer(tmp_path, model=str(tmp_path / "model"), given={"processing_class": None})
    assert made.vllm_generation.engine.mask_token_id == MASK_ID


def test_config_and_trainer_belong_together(tmp_path):
    with pytest.raises(ValueError, match="`args` is a DiffusionGRPOConfig, but QuantGRPOTrainer takes"):
        make(QuantGRPOTrainer, build(tmp_path), model=policy(), processing_class=tokenizer())
    with pytest.raises(ValueError, match="`args` is a QuantGRPOConfig, but DiffusionGRPOTrainer takes"):
        make(DiffusionGRPOTrainer, config(QuantGRPOConfig, tmp_path), model=policy(), processing_class=tokenizer())


def test_other_trainers_refuse_a_masked_diffusion_model(tmp_path):
    with pytest.raises(ValueError, match="The policy attends in both directions"):
        make(QuantGRPOTrainer, config(QuantGRPOConfig, tmp_path, rollout_precision="int8"), model=policy())
    policy().save_pretrained(tmp_path / "model")
    given = {"model": str(tmp_path / "model"), "processing_class": tokenizer()}
    with pytest.raises(ValueError, match="Train it with `DiffusionGRPOTrainer`"):
        make(QuantGRPOTrainer, config(QuantGRPOConfig, tmp_path, rollout_precision="int4"), **given)


def test_an_engine_without_estimates_is_refused(tmp_path):
    class Autoregressive:
        def sync(self): ...

        def sample(self, requests): ...

    class Left(DiffusionGRPOTrainer):
        def build_engine(self, spec, *args, **settings):
            return Autoregressive()

    with pytest.raises(ValueError, match=r"`build_engine` returned a Autoregressive\. A masked diffusion model needs"):
        trainer(tmp_path, trainer_class=Left)
