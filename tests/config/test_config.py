"""Bad input is refused when the configuration is built: the error names the field, the value and what is allowed."""

import dataclasses

import pytest
from trl import GRPOConfig, TrlParser

from trl_quant import AISGRPOConfig, QuantGRPOConfig
from trl_quant.corrections import CORRECTIONS
from trl_quant.formats import FORMATS


OWN = [f for f in dataclasses.fields(QuantGRPOConfig) if f.name not in {g.name for g in dataclasses.fields(GRPOConfig)}]
OF_SEQUENCES = ", ".join(repr(name) for name, kind in CORRECTIONS.items() if not kind.token_only) + " or 'trl'"


def build(config_class=QuantGRPOConfig, **kwargs):
    return config_class(output_dir="unused", use_cpu=True, bf16=False, report_to=[], **kwargs)


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"rollout_precision": "fp7"}, ["rollout_precision", "'fp7'", "'nvfp4'"]),
        ({"is_correction": "ppo"}, ["is_correction", "'ppo'", "'decoupled'"]),
        ({"noise_schedule": "step", "rollout_precision": "int8"}, ["noise_schedule", "'step'", "'cosine'"]),
        ({"is_cap": 0.5}, ["is_cap", "0.5", ">= 1"]),
        ({"is_cap": float("nan")}, ["is_cap", "nan"]),
        ({"noise_stages": 2}, ["noise_stages", "2", ">= 3"]),
        ({"noise_sigma_start": 1e-4}, ["noise_sigma_start", "0.0001", "noise_sigma_end", "0.0005"]),
        ({"noise_sigma_end": 0.0}, ["noise_sigma_end", "> 0"]),
        ({"uaq_scale": 0.0}, ["uaq_scale", "0.0", "256"]),
        ({"uaq_scale": -1.5}, ["uaq_scale", "-1.5"]),
        ({"ais_delta": 0.0}, ["ais_delta", "> 0"]),
        ({"ais_gamma": -1.0}, ["ais_gamma", "> 0"]),
        ({"ais_beta_var": -0.1}, ["ais_beta_var", ">= 0"]),
        ({"icepop_low": 1.5}, ["icepop_low", "1.5", "<= 1"]),
        ({"icepop_high": 0.5}, ["icepop_high", "0.5", ">= 1"]),
        ({"geometric_epsilon": 0.0}, ["geometric_epsilon", "0.0", "> 0"]),
        ({"trm_delta": None}, ["trm_delta", "None", "a finite number"]),
        ({"trm_delta": -1.0}, ["trm_delta", "-1.0", "> 0"]),
        ({"dppo_delta": 2.0}, ["dppo_delta", "2.0", "<= 1"]),
        ({"rollout_precision": "nf4", "use_vllm": True}, ["rollout_precision", "'nf4'", "use_vllm", "'fp8'"]),
        ({"noise_schedule": "linear"}, ["noise_schedule", "rollout_precision", "'bf16'"]),
        (
            {"rollout_precision": "int8", "use_transformers_continuous_batching": True},
            ["rollout_precision", "use_transformers_continuous_batching"],
        ),
        (
            {"is_correction": "tis", "use_vllm": True, "vllm_importance_sampling_correction": False},
            ["'tis' compares", "vllm_importance_sampling_correction", "and use `is_correction='none'` to ignore"],
        ),
        (
            {"is_correction": "none", "use_vllm": True, "vllm_importance_sampling_correction": False},
            ["'none' compares", "vllm_importance_sampling_correction", "Leave that at True: the comparison is only"],
        ),
        *[
            ({"is_correction": "acr", "loss_type": loss}, ["is_correction", "'acr'", "loss_type", f"'{loss}'", "dapo"])
            for loss in ("vespo", "sapo", "cispo")
        ],
        (
            {"is_correction": "acr", "rollout_precision": "int8", "loss_type": "vespo"},
            ["'acr'", "'vespo'", "'tis'"],
        ),
        *[
            (
                {"is_correction": name, "importance_sampling_level": "sequence"},
                [f"`is_correction`='{name}'", "importance_sampling_level", "'sequence'", OF_SEQUENCES],
            )
            for name, kind in CORRECTIONS.items()
            if kind.token_only
        ],
    ],
)
def test_refused(kwargs, words):
    with pytest.raises(ValueError) as error:
        build(**kwargs)
    missing = [word for word in words if word not in str(error.value)]
    assert not missing, str(error.value)


def test_none_means_trl_without_a_quantized_rollout_and_tis_with_one():
    assert build().is_correction == "trl"
    assert build(use_vllm=True).is_correction == "trl"
    for precision in ("bf16", *FORMATS):
        assert build(rollout_precision=precision).is_correction == "tis"
    assert build(rollout_precision="int8", is_correction="trl").is_correction == "trl"
    # It takes every option of TRL's that `acr` refuses
    for setting in ({"loss_type": "vespo"}, {"delta": 2.0}, {"importance_sampling_level": "sequence"}):
        assert build(rollout_precision="int8", **setting).is_correction == "tis"
        with pytest.raises(ValueError, match=f"'acr'.*`{next(iter(setting))}`"):
            build(rollout_precision="int8", is_correction="acr", **setting)


@pytest.mark.parametrize("correction", ["trl", *CORRECTIONS])
@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo"])
def test_which_losses_each_correction_takes(correction, loss_type):
    clips = loss_type in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
    if correction == "acr" and not clips:
        with pytest.raises(ValueError, match="acr"):
            build(is_correction=correction, loss_type=loss_type, rollout_precision="int8")
    elif correction == "trl" and loss_type == "vespo":  # TRL's default mode weighs sequences
        with pytest.raises(ValueError, match="`vllm_importance_sampling_mode`='sequence_mask' with `loss_type`"):
            build(is_correction=correction, loss_type=loss_type, rollout_precision="int8")
    else:
        build(is_correction=correction, loss_type=loss_type, rollout_precision="int8")


def test_ais_config_differs_in_defaults_only():
    mine, base = dataclasses.fields(AISGRPOConfig), dataclasses.fields(QuantGRPOConfig)
    assert [f.name for f in mine] == [f.name for f in base]
    changed = {f.name: f.default for f, g in zip(mine, base) if f.default != g.default}
    assert changed == {"is_correction": "ais"}


def test_every_field_is_on_the_command_line_with_help():
    assert all(f.metadata.get("help") for f in OWN)
    flags = {
        "rollout_precision": "int4",
        "is_correction": "ais",
        "is_cap": "3.5",
        "ais_delta": "0.03",
        "ais_gamma": "1.5",
        "ais_beta_var": "0.5",
        "noise_schedule": "cosine",
        "noise_sigma_start": "0.02",
        "noise_sigma_end": "0.001",
        "noise_stages": "5",
        "uaq_scale": "1.5",
    }
    argv = ["--output_dir", "unused", "--use_cpu", "true", "--bf16", "false", "--report_to", "none"]
    for name, value in flags.items():
        argv += [f"--{name}", value]
    (parsed,) = TrlParser(QuantGRPOConfig).parse_args_and_config(argv)
    for name, value in flags.items():
        assert getattr(parsed, name) == (value if not value[0].isdigit() else pytest.approx(float(value)))


def test_a_configuration_survives_a_round_trip():
    config = build(rollout_precision="fp8_block", noise_schedule="linear", uaq_scale=1.5, max_steps=10)
    values = {f.name: getattr(config, f.name) for f in OWN}
    again = build(**values, max_steps=10)
    assert {f.name: getattr(again, f.name) for f in OWN} == values


def test_a_trl_option_that_no_longer_acts_is_said(caplog):
    build(rollout_precision="int8", vllm_importance_sampling_mode="token_mask")
    assert "vllm_importance_sampling_mode" in caplog.text
    caplog.clear()
    build(rollout_precision="int8", is_correction="trl", vllm_importance_sampling_mode="token_mask")
    assert "vllm_importance_sampling_mode" not in caplog.text
