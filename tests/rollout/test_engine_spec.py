"""`EngineSpec`: which engine a configuration means, decided from plain values, and built by everyone alike."""

from dataclasses import FrozenInstanceError, fields
from inspect import signature

import pytest
from training import config, lora, make

from trl_quant import (
    DiffusionGRPOConfig,
    QuantAsyncGRPOConfig,
    QuantDistillationConfig,
    QuantGRPOConfig,
    QuantGRPOTrainer,
    QuantRLOOConfig,
    rollout,
)
from trl_quant.rollout import ENGINES, EngineSpec
from trl_quant.run_spec import (
    RunSpec,
    Training,
    default_correction,
    default_lora_sync,
    default_precision,
    engine_kind,
)


COLOCATE = {"use_vllm": True, "vllm_mode": "colocate"}
SERVER = {"use_vllm": True, "vllm_mode": "server"}

IN_VLLM = {"returns_kept": False}  # vLLM is asked for it by `truncation_replay=True` alone

# settings -> the fields of the spec that differ from the plain embedded engine's
MEANINGS = [
    ({"rollout_precision": "int8"}, {}),
    ({"rollout_precision": "int8", "noise_schedule": "linear"}, {"wide_norms": True}),
    ({"rollout_precision": "int8", "uaq_scale": 1.5}, {"uaq_scale": 1.5}),
    ({"rollout_precision": "int8", "router_replay": False}, {"returns_routing": False}),
    ({"rollout_precision": "int8", "cache_implementation": "static"}, {"cache_implementation": "static"}),
    ({"train_precision": "int8"}, {"kind": "shared"}),
    ({"train_precision": "int8", "rollout_precision": "int8"}, {"kind": "shared"}),
    ({"train_precision": "fp8", "rollout_precision": "int8"}, {}),
    ({"rollout_precision": "int8", **COLOCATE}, {**IN_VLLM, "kind": "colocate"}),
    (
        {"rollout_precision": "int8", "vllm_sleep_level": 1, **COLOCATE},
        {**IN_VLLM, "kind": "colocate"},
    ),  # it never sleeps
    (
        {"rollout_precision": "int8", "vllm_enable_sleep_mode": True, **COLOCATE},
        {**IN_VLLM, "kind": "colocate", "sleep_level": 2},
    ),
    (
        {"rollout_precision": "int8", "vllm_enable_sleep_mode": True, "lora_sync": "adapter", **COLOCATE},
        {**IN_VLLM, "kind": "colocate", "sleep_level": 1, "lora_sync": "adapter"},
    ),
    (
        {"train_precision": "nvfp4", **COLOCATE},
        {**IN_VLLM, "kind": "colocate", "precision": "nvfp4", "lora_sync": "adapter"},
    ),
    ({"train_precision": "nvfp4"}, {"kind": "shared", "precision": "nvfp4"}),
    (
        {"rollout_precision": "int8", "vllm_engine_kwargs": {"enforce_eager": True}, **COLOCATE},
        {**IN_VLLM, "kind": "colocate", "engine_kwargs": {"enforce_eager": True}},
    ),
    (
        {"rollout_precision": "int8", "sync_check_steps": 7, **COLOCATE},
        {**IN_VLLM, "kind": "colocate", "sync_check_steps": 7},
    ),
    (
        {"rollout_precision": "int8", "vllm_request_timeout": 60.0, **SERVER},
        {**IN_VLLM, "kind": "server", "request_timeout": 60.0},
    ),
]
PLAIN = EngineSpec(
    "embedded", "int8", sync_check_steps=50, returns_routing=True, returns_kept=True, request_timeout=1800.0
)


@pytest.mark.parametrize(("settings", "expected"), MEANINGS)
def test_what_a_configuration_means(tmp_path, settings, expected):
    spec = EngineSpec.from_config(config(QuantGRPOConfig, tmp_path, **settings))
    found = {f.name: getattr(spec, f.name) for f in fields(spec) if getattr(spec, f.name) != getattr(PLAIN, f.name)}
    assert found == expected
    assert spec.is_vllm == (settings.get("use_vllm") is True)


@pytest.mark.parametrize("settings", [{}, COLOCATE, SERVER])
def test_without_a_precision_there_is_no_engine(tmp_path, settings):
    assert EngineSpec.from_config(config(QuantGRPOConfig, tmp_path, **settings)) is None


def test_a_sharded_policy_has_a_copy_of_its_own(tmp_path, monkeypatch):
    args = config(QuantGRPOConfig, tmp_path, train_precision="int8")
    assert EngineSpec.from_config(args).kind == "shared"
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert EngineSpec.from_config(args).kind == "embedded"
    assert engine_kind("colocate", "int8", "int8", is_apart=True) == "colocate"


def test_beside_its_training_only_a_frozen_base_samples(tmp_path):
    """With an adapter of its own; codes of weights that train are copied, and so is a base for another precision."""
    for training, sampled, kind in (
        ("nvfp4", "nvfp4", "beside"),
        ("nvfp4", "int8", "embedded"),
        ("int8", "int8", "embedded"),
    ):
        settings = {"train_precision": training, "rollout_precision": sampled, "use_vllm": False}
        assert EngineSpec.from_config(config(QuantAsyncGRPOConfig, tmp_path, **settings)).kind == kind
        assert engine_kind("server", sampled, training, is_apart=True, freezes_base=True) == "server"
    args = config(QuantAsyncGRPOConfig, tmp_path, train_precision="nvfp4", use_vllm=False)
    args.resolve_for(adapted=False)
    assert args.spec.sampler.kind == "embedded"


def test_only_a_frozen_base_in_the_engines_precision_is_left_where_it_is():
    assert default_lora_sync("colocate", "nvfp4", "nvfp4") == "adapter"
    others = [("server", "nvfp4", "nvfp4"), ("embedded", "nvfp4", "nvfp4"), ("colocate", "int8", "int8")]
    others += [("colocate", "int8", "nvfp4"), ("colocate", None, None)]
    assert {default_lora_sync(*each) for each in others} == {"merge"}


def test_the_defaults_of_the_precision_and_the_correction(tmp_path):
    """Each config takes them from the one home, also where only some of its fields are set."""
    assert [default_precision(*each) for each in [(None, False), (None, True), ("int8", True)]] == [
        None,
        "bf16",
        "int8",
    ]
    assert [default_correction(None, weighs) for weighs in (True, False)] == ["trl", "trl"]
    assert [default_correction("int8", weighs) for weighs in (True, False)] == ["tis", "none"]
    found = {
        (kind, trains): (args.rollout_precision, args.is_correction)
        for kind in (QuantGRPOConfig, QuantRLOOConfig, QuantDistillationConfig, DiffusionGRPOConfig)
        for trains in (None, "int8")
        if (args := kind(str(tmp_path), bf16=False, use_cpu=True, train_precision=trains))
    }
    assert found == {
        (QuantGRPOConfig, None): (None, "trl"),
        (QuantGRPOConfig, "int8"): ("int8", "tis"),
        (QuantRLOOConfig, None): (None, "trl"),
        (QuantRLOOConfig, "int8"): ("int8", "tis"),
        (QuantDistillationConfig, None): (None, "trl"),
        (QuantDistillationConfig, "int8"): ("int8", "none"),
        (DiffusionGRPOConfig, None): ("bf16", "tis"),
        (DiffusionGRPOConfig, "int8"): ("int8", "tis"),
    }


# settings, whether the policy has an adapter -> what it computes with
TRAININGS = [
    ({}, True, "none"),
    ({"rollout_precision": "int8"}, False, "none"),
    ({"train_precision": "nvfp4"}, True, "frozen"),
    ({"train_precision": "nvfp4"}, False, "qat"),
    ({"train_precision": "nf4"}, True, "frozen"),
    ({"train_precision": "int4"}, False, "qat"),
    ({"train_precision": "fp8"}, True, "unified"),
    ({"train_precision": "fp8"}, False, "unified"),
    ({"train_precision": "fp8", "lora_sync": "adapter", **COLOCATE}, True, "frozen"),
    ({"train_precision": "fp8", "lora_sync": "adapter", **COLOCATE}, False, "unified"),
]


@pytest.mark.parametrize(("settings", "adapted", "kind"), TRAININGS)
def test_what_the_policy_computes_with(tmp_path, settings, adapted, kind):
    args = config(QuantGRPOConfig, tmp_path, **settings)
    args.resolve_for(adapted=adapted)
    assert args.spec.training == Training(kind, settings.get("train_precision"))
    assert (args.spec.adapter is not None) == adapted


# settings -> what samples, whether its log-probabilities may differ from the policy's, whether rows are packed
SOURCES = [
    ({}, None, False, False),
    (COLOCATE, "colocate", True, False),  # by TRL
    (SERVER, "server", True, False),
    ({"pack_sequences": True}, None, False, True),
    ({"rollout_precision": "bf16"}, "embedded", True, None),
    ({"rollout_precision": "int8", "pack_sequences": False}, "embedded", True, False),
    ({"train_precision": "int8"}, "shared", True, None),
    ({"rollout_precision": "int8", **SERVER}, "server", True, None),
]


@pytest.mark.parametrize(("settings", "source", "has_sampler", "packs"), SOURCES)
def test_what_samples_and_what_is_packed(tmp_path, settings, source, has_sampler, packs):
    spec = config(QuantGRPOConfig, tmp_path, **settings).spec
    assert (spec.source, spec.has_sampler, spec.packs) == (source, has_sampler, packs)
    assert (spec.sampler is None) == (not settings.keys() & {"rollout_precision", "train_precision"})


def test_a_trainer_keeps_the_description_that_it_was_built_with(tmp_path):
    """TRL's constructor must see `use_vllm`, and the arguments may be assigned to later; the description stays."""
    args = config(QuantGRPOConfig, tmp_path / "out", rollout_precision="int8")
    args.resolve_for(adapted=False)
    expected = args.spec
    trainer = make(QuantGRPOTrainer, args)
    assert trainer.spec == expected == RunSpec.from_config(args)
    trainer.args.pack_sequences = False
    assert trainer.spec == expected != trainer.args.spec


def test_a_spec_is_decided_once():
    with pytest.raises(FrozenInstanceError):
        PLAIN.precision = "fp8"


@pytest.mark.parametrize("kind", ENGINES)
def test_each_engine_takes_its_options(kind):
    """And each option of the spec reaches some engine."""
    taken = set()
    for owner in getattr(rollout, ENGINES[kind]).__mro__:
        taken |= set(signature(owner.__init__).parameters)
    given = EngineSpec(kind, "int8").options()
    assert given.keys() <= taken
    every = set().union(*(EngineSpec(each, "int8").options() for each in ENGINES))
    assert every == {f.name for f in fields(EngineSpec)} - {"kind"}


@pytest.mark.parametrize("settings", [{"rollout_precision": "int8"}, {"train_precision": "int8"}])
def test_the_configuration_stays_as_it_was_given(tmp_path, settings):
    """TRL is told that there is an engine; the run's configuration says what the user said."""
    args = config(QuantGRPOConfig, tmp_path, **settings)
    spec = EngineSpec.from_config(args)
    trainer = make(QuantGRPOTrainer, args, peft_config=lora() if "rollout_precision" in settings else None)
    assert trainer.args is args and EngineSpec.from_config(args) == spec
    assert (args.use_vllm, args.vllm_mode) == (False, config(QuantGRPOConfig, tmp_path).vllm_mode)
    assert (trainer.use_vllm, trainer.vllm_mode) == (True, "embedded")
    assert type(trainer.vllm_generation.engine).__name__ == ENGINES[spec.kind]
    assert trainer.vllm_generation.engine.precision == spec.precision
