"""The fields of this package stand beside any config of TRL's, and corrections take from them only what is meant."""

import io
import pickle
import re
from dataclasses import dataclass, field, fields
from typing import Annotated, ClassVar

import pytest
import torch
from trl import GRPOConfig, RLOOConfig, TrlParser

from trl_quant import AISGRPOConfig, QuantGRPOConfig
from trl_quant.config.fields import SECTIONS, QuantFields
from trl_quant.config.hyperparameters import setting_fields
from trl_quant.corrections import ACR, ALL_CORRECTIONS, CORRECTIONS, TIS, NoCorrection
from trl_quant.corrections.base import Range, check_ranges, ranges_of


@dataclass
class QuantRLOOConfig(QuantFields, RLOOConfig):
    """A made-up config on one of TRL's that has no `loss_type`, `scale_rewards` or `importance_sampling_level`."""

    trl_config: ClassVar[type] = RLOOConfig


@dataclass
class CorrectedRLOOConfig(QuantRLOOConfig):
    """The same, for a trainer whose loss takes the weights of a correction."""

    has_correction: ClassVar[bool] = True


def build(config_class=QuantGRPOConfig, **kwargs):
    return config_class("unused", use_cpu=True, bf16=False, report_to=[], **kwargs)


# The config of another trainer


def test_another_trainers_config_has_its_own_fields_and_ours():
    args = build(CorrectedRLOOConfig, rollout_precision="int8", normalize_advantages=True, is_cap=3.0)
    assert isinstance(args, RLOOConfig) and not isinstance(args, GRPOConfig)
    assert (args.output_dir, args.beta, args.num_generations) == ("unused", 0.05, 2)  # RLOO's own defaults
    assert args.is_correction == "tis" and args.correction() == TIS(cap=3.0)
    assert not {"loss_type", "scale_rewards", "importance_sampling_level"} & {f.name for f in fields(args)}
    assert {f.name for f in fields(args)} == {f.name for c in (QuantFields, RLOOConfig) for f in fields(c)}
    assert args.noise_sigma(1, 10) == 0.0 and args.one_update_per_generation and args.fsdp_version is None
    assert args.training_settings()["rollout_precision"] == "int8"
    assert args.training_settings().keys() == build().training_settings().keys()
    assert args.inherited_settings()["normalize_advantages"] is True
    assert build(QuantRLOOConfig).correction() is None
    assert build(CorrectedRLOOConfig, rollout_precision="fp8", is_correction="acr", epsilon=0.3).correction() == ACR(
        epsilon_low=0.3
    )


def test_a_trainer_without_a_correction_is_given_none():
    assert [build(QuantRLOOConfig, rollout_precision=name).is_correction for name in (None, "int8")] == ["trl", "none"]
    assert build(QuantRLOOConfig, rollout_precision="int8", is_correction="none").correction() == NoCorrection()
    assert build(QuantRLOOConfig, is_correction="trl").correction() is None
    for name in ALL_CORRECTIONS.keys() - {"none"}:
        says = rf"`is_correction`='{name}' acts only with a trainer .*QuantGRPOTrainer, .* or use 'none'"
        with pytest.raises(ValueError, match=says):
            build(QuantRLOOConfig, rollout_precision="int8", is_correction=name)
    for name in CORRECTIONS.keys() - {"none"}:  # TRL's own sampler is corrected no more than ours
        with pytest.raises(ValueError, match=f"`is_correction`='{name}' acts only with a trainer"):
            build(QuantRLOOConfig, use_vllm=True, is_correction=name)
    for name in ALL_CORRECTIONS:
        build(CorrectedRLOOConfig, rollout_precision="int8", is_correction=name)
        build(rollout_precision="int8", is_correction=name)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"rollout_precision": "fp7"}, "`rollout_precision`='fp7' is unknown"),
        ({"train_precision": "int7"}, "`train_precision`='int7' is unknown"),
        ({"is_correction": "ppo"}, "`is_correction`='ppo' is unknown"),
        ({"is_cap": "2"}, "`is_cap`='2' must be a finite number or None"),
        ({"is_cap": 0.5}, "`is_cap`=0.5 is out of range. It must be >= 1"),
        ({"dppo_delta": 2.0}, "`dppo_delta`=2.0 is out of range. It must be <= 1"),
        ({"noise_stages": 2}, "`noise_stages`=2 is out of range. It must be >= 3"),
        ({"reward_timeout": 0.0}, "`reward_timeout`=0.0 is out of range. It must be > 0"),
        ({"temperature": 0.0}, "`temperature`=0.0 is out of range"),
        ({"noise_schedule": "linear"}, "`noise_schedule`='linear' needs a copy of the policy"),
        ({"lora_sync": "adapter"}, "`lora_sync`='adapter' acts only with a `rollout_precision`"),
        (
            {"rollout_precision": "int8", "ais_delta": 0.1},
            "`ais_delta`=0.1 acts only with `is_correction` 'ais', and it is 'none'",
        ),
        ({"rollout_precision": "int8", "generation_kwargs": {"num_beams": 2}}, "`generation_kwargs` has ['num_beams']"),
        ({"rollout_precision": "int8", "is_cap": 3.0}, "`is_cap`=3.0 acts only with `is_correction` 'tis', 'acr'"),
        ({"dynamic_sampling_rounds": 2}, "`dynamic_sampling_rounds`=2 acts only with a trainer that has"),
        ({"uaq_scale": 1.5, "sync_ref_model": True}, "`uaq_scale`=1.5 cannot be combined with `sync_ref_model=True`"),
        ({"train_precision": "int8", "exact_rollouts": True}, "`exact_rollouts`=True needs `use_vllm=True`"),
        ({"vllm_engine_kwargs": "{eager}"}, "`vllm_engine_kwargs`='{eager}' is not a JSON object"),
        ({"num_generations": 1, "per_device_train_batch_size": 1}, "RLOO requires at least 2 generations"),  # TRL's own
    ],
    ids=str,
)
def test_it_refuses_what_it_must(settings, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        build(QuantRLOOConfig, **settings)


def test_it_is_parsed_copied_and_told_of(caplog):
    options = {
        "output_dir": "unused",
        "use_cpu": "true",
        "bf16": "false",
        "rollout_precision": "int4",
        "noise_schedule": "linear",
        "noise_stages": "5",
        "is_cap": "3",
        "normalize_advantages": "true",
    }
    argv = [part for name, value in options.items() for part in (f"--{name}", value)]
    (parsed,) = TrlParser(CorrectedRLOOConfig).parse_args_and_config(argv)
    assert (parsed.noise_stages, parsed.is_cap, parsed.normalize_advantages) == (5, 3.0, True)
    copied = QuantRLOOConfig.from_trl(build(RLOOConfig, beta=0.2))
    assert type(copied) is QuantRLOOConfig and copied.beta == 0.2 and copied.is_correction == "trl"
    with pytest.raises(
        ValueError, match=r"`args` is a GRPOConfig. It must be a `QuantRLOOConfig` or TRL's `RLOOConfig`"
    ):
        QuantRLOOConfig.from_trl(build(GRPOConfig))
    with pytest.raises(ValueError, match=r"`temperature`=0.0 is out of range"):
        QuantRLOOConfig.from_trl(build(RLOOConfig, temperature=0.0))
    parsed.get_process_log_level()
    assert "`rollout_precision`='int4' acts only with `QuantRLOOTrainer`" in caplog.text


def test_our_fields_have_no_base_class_of_trls():
    inherited = [base for base in QuantFields.__mro__ if base.__module__.partition(".")[0] in ("trl", "transformers")]
    assert inherited == []
    names = [f.name for section in SECTIONS.values() for f in fields(section)]
    assert sorted(names) == sorted(f.name for f in fields(QuantFields)) and len(names) == len(set(names))
    assert all(name in QuantGRPOConfig.__doc__ for name in names)


def test_what_was_pickled_under_the_earlier_name_is_read():
    """`training_args.bin` of earlier checkpoints names `trl_quant.config.QuantGRPOConfig`."""
    for config_class in (QuantGRPOConfig, AISGRPOConfig):
        buffer = io.BytesIO()
        torch.save(build(config_class, rollout_precision="int8", is_cap=3.0), buffer)
        assert torch.load(io.BytesIO(buffer.getvalue()), weights_only=False).is_cap == 3.0
        now, earlier = f"c{config_class.__module__}\n".encode(), b"ctrl_quant.config\n"
        pickled = pickle.dumps(build(config_class, rollout_precision="int8", is_cap=3.0), protocol=2)
        assert now == b"ctrl_quant.config.grpo\n" and pickled.count(now) == 1
        read = pickle.loads(pickled.replace(now, earlier))
        assert (
            type(read) is config_class
            and read.to_dict() == build(config_class, **{"rollout_precision": "int8", "is_cap": 3.0}).to_dict()
        )


# Hyperparameters of corrections


@dataclass(frozen=True)
class MadeUp(TIS):
    """A correction with fields that are named like TRL's, and one that ours sets."""

    beta: Annotated[float, Range(0, 1)] = 0.5
    epsilon: float = 0.25
    delta: float = 7.0
    eps: float = 1e-3


@dataclass(frozen=True)
class Borrowing(MadeUp):
    """The same, which says that it means TRL's `epsilon`."""

    epsilon: Annotated[float, Range(0, 0.9)] = 0.25

    aliases: ClassVar[dict[str, str]] = {"cap": "is_cap", "epsilon": "epsilon"}


@dataclass
class MadeUpConfig(QuantGRPOConfig):
    made_up_beta: float = field(default=0.75, metadata={"help": "Of `made_up`."})


SETTINGS = {"is_correction": "made_up", "rollout_precision": "int8", "beta": 0.04, "epsilon": 0.3, "is_cap": 3.0}


def test_a_hyperparameter_takes_nothing_by_its_bare_name(monkeypatch):
    monkeypatch.setitem(CORRECTIONS, "made_up", MadeUp)
    assert setting_fields("made_up", QuantGRPOConfig) == {"cap": "is_cap"}
    assert build(**SETTINGS).correction() == MadeUp(cap=3.0)  # and TRL's `beta` and `epsilon` are not its own
    monkeypatch.setitem(CORRECTIONS, "made_up", Borrowing)
    assert build(**SETTINGS).correction() == Borrowing(cap=3.0, epsilon=0.3)


def test_a_hyperparameter_takes_its_full_name(monkeypatch):
    monkeypatch.setitem(CORRECTIONS, "made_up", MadeUp)
    assert build(MadeUpConfig, **SETTINGS).correction() == MadeUp(cap=3.0, beta=0.75)
    assert build(MadeUpConfig, **SETTINGS, made_up_beta=0.1).correction().beta == 0.1


def test_a_range_on_the_correction_is_the_configs(monkeypatch):
    monkeypatch.setitem(CORRECTIONS, "made_up", Borrowing)
    for settings in (SETTINGS, {}):
        with pytest.raises(ValueError, match=r"`made_up_beta`=1.5 is out of range. It must be <= 1"):
            build(MadeUpConfig, **settings, made_up_beta=1.5)
    with pytest.raises(ValueError, match=r"`made_up_beta`=0.1 acts only with `is_correction` 'made_up', and it is"):
        build(MadeUpConfig, made_up_beta=0.1)
    with pytest.raises(ValueError, match=r"`epsilon`=0.95 is out of range. It must be <= 0.9"):
        build(**SETTINGS | {"epsilon": 0.95})
    assert build(epsilon=0.95).epsilon == 0.95  # TRL's field, of which another correction says nothing
    with pytest.raises(ValueError, match=r"`epsilon`=1.5 is out of range. It must be <= 1"):
        build(is_correction="acr", rollout_precision="int8", epsilon=1.5)


@pytest.mark.parametrize("name", ALL_CORRECTIONS)
def test_every_alias_and_every_field_of_a_correction_exists(name):
    aliases = ALL_CORRECTIONS[name].aliases
    assert aliases.keys() <= {f.name for f in fields(ALL_CORRECTIONS[name])}
    assert {*aliases.values()} <= QuantGRPOConfig.__dataclass_fields__.keys()
    bound = setting_fields(name, QuantGRPOConfig)
    assert {f.name for f in fields(ALL_CORRECTIONS[name])} - bound.keys() <= {"eps"}  # a guard against 0


def test_ranges():
    @dataclass(frozen=True)
    class Numbers:
        a: Annotated[float, Range(0, 2, open_low=True)] = 1.0
        b: Annotated[int | None, Range(3)] = None
        c: float = -1.0

        def __post_init__(self):
            check_ranges(self)

    assert ranges_of(Numbers) == {"a": Range(0, 2, open_low=True), "b": Range(3)}
    assert [str(allowed) for allowed in ranges_of(Numbers).values()] == ["> 0 and <= 2", ">= 3"]
    assert [Range(0, 2, True).broken_bound(x) for x in (0, 1e-9, 2, 2.1, float("nan"))] == [
        "> 0",
        None,
        None,
        "<= 2",
        "> 0",
    ]
    for right in ({"a": 2}, {"a": 1e-9}, {"b": 3}, {"b": None}, {"c": None}):
        Numbers(**right)
    for wrong in ({"a": 0}, {"a": 2.1}, {"a": None}, {"a": True}, {"a": "1"}, {"a": float("nan")}, {"b": 2}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be a number >"):
            Numbers(**wrong)
