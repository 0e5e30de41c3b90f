"""`rollout_precision="auto"` and `trl-quant prepare`: the choice, and what comes of it in real vLLM engines."""

import json

import pytest
import torch
from tiny import save_tiny
from training import config, make
from transformers import AutoConfig, AutoModelForCausalLM


pytest.importorskip("vllm", reason="vLLM is not installed")
from vllm_engines import SMALL, greedy, keep

from trl_quant import QuantGRPOConfig, QuantGRPOTrainer
from trl_quant.cli import main as command
from trl_quant.formats import quantize
from trl_quant.rollout.vllm import auto
from trl_quant.rollout.vllm.support import supported_precisions


pytestmark = pytest.mark.vllm


@pytest.mark.parametrize(
    ("measured", "choice"),
    [
        ({"bf16": 100.0, "int8": 150.0, "fp8": 149.0}, "int8"),
        ({"bf16": 100.0, "int8": 104.0}, "bf16"),  # not worth a mismatch
        ({"bf16": 100.0, "fp8": 140.0, "int8": 130.0, "mxfp4": 142.0}, "fp8"),  # as fast as MXFP4, and much nearer
        ({"bf16": 100.0, "fp8": 130.0, "mxfp4": 142.0}, "mxfp4"),
        ({"bf16": "no memory", "int8": 10.0}, "int8"),
        ({"int8": 10.0, "fp8": "RuntimeError: no kernel"}, "int8"),
        ({"bf16": "a", "int8": "b"}, None),
        ({}, None),
    ],
)
def test_choice(measured, choice):
    assert auto.choice_of(measured) == choice


def settings(tmp_path, **overrides):
    options = {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "rollout_precision": "auto",
        "vllm_engine_kwargs": SMALL,
        "vllm_max_model_length": 512,
        "max_steps": 2,
        "save_strategy": "steps",
        "save_steps": 1,
    }
    return config(QuantGRPOConfig, tmp_path / "out", **options | overrides)


def test_the_fastest_is_kept(tmp_path, monkeypatch, capfd):
    """Real engines are measured; the run trains with the choice, and a resumed one keeps it without measuring again."""
    model = save_tiny(tmp_path / "model", dtype=torch.bfloat16)
    measure, measured = auto.measure, {}

    def remember(arguments):
        measured[arguments["precision"]] = (arguments["engine"], measure(arguments))
        return measured[arguments["precision"]][1]

    monkeypatch.setattr(auto, "measure", remember)
    trainer = make(QuantGRPOTrainer, settings(tmp_path), model=model)
    keep(trainer)
    assert list(measured) == [name for name, missing in supported_precisions().items() if missing is None]
    assert all(engine["max_num_seqs"] == 8 and engine["enforce_eager"] for engine, _ in measured.values())
    speeds = {name: speed for name, (_, speed) in measured.items()}
    assert all(isinstance(speed, float) and speed > 0 for speed in speeds.values()), speeds
    chosen = auto.choice_of(speeds)
    assert trainer.args.rollout_precision == trainer.vllm_generation.precision == chosen
    printed = capfd.readouterr().out
    assert all(f"{speed:.0f}" in printed for speed in speeds.values()) and f"rollout_precision: {chosen}" in printed
    trainer.train()

    # What is in the checkpoint counts, also where another precision would be chosen now.
    other = next(name for name in speeds if name != chosen)
    state = tmp_path / "out/checkpoint-2/rollout_state.json"
    recorded = json.loads(state.read_text())
    recorded["settings"]["rollout_precision"] = other
    state.write_text(json.dumps(recorded))
    measured.clear()
    again = make(QuantGRPOTrainer, settings(tmp_path, max_steps=3, resume_from_checkpoint="true"), model=model)
    keep(again)
    assert again.args.rollout_precision == again.vllm_generation.precision == other and not measured
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 3


def test_why_nothing_was_chosen(tmp_path, monkeypatch):
    model = save_tiny(tmp_path / "model", dtype=torch.bfloat16)
    monkeypatch.setattr(auto, "supported_precisions", lambda: {"int8": None, "fp8": "no kernel"})
    impossible = settings(tmp_path, vllm_engine_kwargs=SMALL | {"kv_cache_memory_bytes": 1})
    with pytest.raises(RuntimeError, match=r"'auto'.*no engine.*int8: .*memory"):
        make(QuantGRPOTrainer, impossible, model=model)


@pytest.mark.parametrize("options", [{"use_vllm": False, "vllm_engine_kwargs": None}, {"vllm_mode": "server"}])
def test_only_colocated_engines_are_measured(tmp_path, options):
    with pytest.raises(ValueError, match=r"`rollout_precision`='auto'.*`vllm_mode='colocate'`"):
        settings(tmp_path, **options)


def test_prepared_checkpoint(tmp_path, capfd):
    """The copy holds `formats`' codes, "auto" knows what it is, and an engine started on it equals one from 16 bits."""
    model = save_tiny(tmp_path / "model", dtype=torch.bfloat16)
    command(["prepare", "--model", str(model), "--format", "int8", "--output", str(tmp_path / "int8")])
    assert "int8" in capfd.readouterr().out
    prepared = AutoConfig.from_pretrained(tmp_path / "int8")
    policy = AutoModelForCausalLM.from_pretrained(model)
    engine = auto.engine_arguments(settings(tmp_path), str(tmp_path / "int8"), prepared, "int8")["engine"]
    assert engine["quantization"] is None and "hf_overrides" not in engine

    from safetensors.torch import load_file

    weights = load_file(next((tmp_path / "int8").glob("*.safetensors")))
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(weights[name], quantize(policy.get_parameter(name).data, "int8").values)

    engines = []
    for start in ({}, {"model": str(tmp_path / "int8")}):
        args = settings(tmp_path, rollout_precision="int8", vllm_engine_kwargs=SMALL | start)
        trainer = make(QuantGRPOTrainer, args, model=str(model))
        keep(trainer)
        assert trainer.vllm_generation.llm.llm_engine.model_config.model == start.get("model", str(model))
        engines.append(greedy(trainer.vllm_generation.llm))
    assert engines[0] == engines[1]

    with pytest.raises(SystemExit, match="exists"):
        command(["prepare", "--model", str(model), "--format", "int8", "--output", str(tmp_path / "int8")])
    with pytest.raises(SystemExit, match="already quantized"):
        command(["prepare", "--model", str(tmp_path / "int8"), "--format", "fp8", "--output", str(tmp_path / "x")])
