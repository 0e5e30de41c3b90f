"""`rollout_precision="auto"` and `trl-quant prepare`: the choice, and what comes of it in real vLLM engines."""

import json
import os
import sys
import tempfile
from functools import partial
from pathlib import Path

import pytest
import torch
import warm
from accelerate import Accelerator
from tiny import save_tiny, tiny_model
from training import config, make
from transformers import AutoModelForCausalLM


pytest.importorskip("vllm", reason="vLLM is not installed")
from vllm_engines import GPU, SMALL, greedy, keep

from trl_quant import QuantGRPOConfig, QuantGRPOTrainer
from trl_quant.cli import main as command
from trl_quant.formats import quantize
from trl_quant.rollout.vllm import auto, trial
from trl_quant.rollout.vllm.support import supported_precisions
from trl_quant.rollout.vllm.trial import Speed, Trial


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


SLOW_SYNC, FAST_SYNC = Speed(step=0.004, sync=0.5), Speed(step=0.006, sync=0.1)  # as fast at 200 tokens


@pytest.mark.parametrize(
    ("bf16", "nvfp4", "length", "choice"),
    [
        (FAST_SYNC, SLOW_SYNC, 64, "bf16"),
        (FAST_SYNC, SLOW_SYNC, 220, "bf16"),  # not worth a mismatch
        (FAST_SYNC, SLOW_SYNC, 2000, "nvfp4"),
        (SLOW_SYNC, FAST_SYNC, 64, "nvfp4"),
        (SLOW_SYNC, FAST_SYNC, 2000, "bf16"),
    ],
)
def test_the_sync_counts(bf16, nvfp4, length, choice, tmp_path, monkeypatch, capsys):
    """Fast decoding and a slow sync win where completions are long, and lose where they are short."""
    policy = AutoModelForCausalLM.from_pretrained(save_tiny(tmp_path))
    no_kernel = f"RuntimeError: no kernel{' at all' * 20}"
    speeds = {"bf16": bf16, "nvfp4": nvfp4, "int4": no_kernel}
    monkeypatch.setattr(auto, "measure", lambda trial, precision: speeds[precision])
    options = {"max_num_seqs": 8, "max_completion_length": length}
    assert auto.choose_precision(policy, Accelerator(cpu=True), options, candidates=speeds) == choice

    printed = capsys.readouterr().out
    bf16_seconds, nvfp4_seconds = (speed.sync + length * speed.step for speed in (bf16, nvfp4))
    expected = (
        f"{8 / nvfp4.step:.0f} {nvfp4.sync:.3f} {8 * length / nvfp4_seconds:.0f} {bf16_seconds / nvfp4_seconds:.2f}"
    )
    row = next(line for line in printed.splitlines() if "nvfp4" in line)
    assert row.replace("│", " ").split() == ["nvfp4", *expected.split()]
    assert f"8 completions of {length} tokens" in printed and f"\nint4: {no_kernel}\n" in printed


def test_the_length_of_completions():
    """`max_tokens` among the arguments of generation takes the place of `max_completion_length` in TRL."""
    of = partial(Trial, "model", torch.float32, torch.float32, {}, True)
    assert of({"max_completion_length": 8}).length == 8
    assert of({"max_completion_length": 8, "generation_kwargs": {"max_tokens": 4}}).length == 4


def test_what_is_not_counted(tmp_path):
    """The table says so."""
    policy, accelerator = tiny_model(), Accelerator(cpu=True)
    assert auto.uncounted(policy, accelerator, {}) == ["reading prompts"]
    assert auto.uncounted(policy, accelerator, {"enable_sleep_mode": True})[1:] == ["putting the engine to sleep"]
    policy.model.norm.weight = torch.nn.Parameter(torch.zeros(4, dtype=torch.uint8), requires_grad=False)
    assert auto.uncounted(policy, accelerator, {})[1:] == ["dequantizing the policy's base"]


def test_all_ranks_take_one_choice(tmp_path):
    (script := tmp_path / "rank.py").write_text(
        "import os, torch\n"
        "from trl_quant.rollout.vllm import auto\n"
        "torch.distributed.init_process_group('gloo')\n"
        "os.write(1, f\"{auto.from_main_process(['of rank ' + os.environ['RANK']])}\\n\".encode())\n"  # in one piece
        "torch.distributed.destroy_process_group()\n"
    )
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    assert warm.run([*launcher, script], capture_output=True).stdout == "['of rank 0']\n" * 2
    assert auto.from_main_process(["alone"]) == ["alone"]


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


@pytest.mark.slow
def test_the_fastest_is_kept(tmp_path, monkeypatch, capfd):
    """Real engines are measured; the run trains with the choice, and a resumed one keeps it without measuring again."""
    model = save_tiny(tmp_path / "model", dtype=torch.bfloat16)
    measure, measured = auto.measure, {}
    warm.ensure_running()

    def remember(asked, precision):
        """
        In processes of their own, which leave no files; the first begins with nothing imported and compiles, as a
        user's.
        """
        with monkeypatch.context() as patch:
            patch.setattr("tempfile.tempdir", here := tempfile.mkdtemp())  # sockets have short names
            patch.chdir(here)
            patch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
            if measured:
                patch.setattr(trial, "subprocess", warm)
                patch.setenv("TORCHDYNAMO_DISABLE", "1")
            measured[precision] = measure(asked, precision)
        os.rmdir(here)  # which is empty
        return measured[precision]

    monkeypatch.setattr(auto, "measure", remember)
    trainer = make(QuantGRPOTrainer, settings(tmp_path), model=model)
    keep(trainer)
    assert list(measured) == [name for name, missing in supported_precisions().items() if missing is None]
    assert all(isinstance(speed, Speed) and speed.step > 0 and speed.sync > 0 for speed in measured.values()), measured
    rates = auto.rates_of(measured, 8, 8)
    chosen = auto.choice_of(rates)
    assert trainer.args.rollout_precision == trainer.vllm_generation.precision == chosen
    printed = capfd.readouterr().out
    assert all(f" {rate:.0f} " in printed for rate in rates.values()) and f"rollout_precision: {chosen}" in printed
    trainer.train()

    # What is in the checkpoint counts, also where another precision would be chosen now.
    other = next(name for name in measured if name != chosen)
    state = tmp_path / "out/checkpoint-2/rollout_state.json"
    recorded = json.loads(state.read_text())
    recorded["settings"]["rollout_precision"] = other
    state.write_text(json.dumps(recorded))
    state.with_name("manifest.json").unlink()  # which no longer fits
    measured.clear()
    again = make(QuantGRPOTrainer, settings(tmp_path, max_steps=3, resume_from_checkpoint="true"), model=model)
    keep(again)
    assert again.args.rollout_precision == again.vllm_generation.precision == other and not measured
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 3


def test_why_nothing_was_chosen(tmp_path, monkeypatch):
    model = save_tiny(tmp_path / "model", dtype=torch.bfloat16)
    monkeypatch.setattr(auto, "supported_precisions", lambda: {"int8": None, "fp8": "no kernel"})
    monkeypatch.setattr(trial, "subprocess", warm)
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    impossible = settings(tmp_path, vllm_engine_kwargs=SMALL | {"kv_cache_memory_bytes": 1})
    with pytest.raises(RuntimeError, match=r"'auto'.*no engine.*int8: .*memory"):
        make(QuantGRPOTrainer, impossible, model=model)


@pytest.mark.parametrize("options", [{"use_vllm": False, "vllm_engine_kwargs": None}, {"vllm_mode": "server"}])
def test_only_colocated_engines_are_measured(tmp_path, options):
    with pytest.raises(ValueError, match=r"`rollout_precision`='auto'.*`vllm_mode='colocate'`"):
        settings(tmp_path, **options)


def test_prepared_checkpoint(tmp_path, monkeypatch, capfd):
    """The copy holds `formats`' codes, "auto" knows what it is, and an engine started on it equals one from 16 bits."""
    model = save_tiny(tmp_path / "model", dtype=torch.bfloat16)
    command(["prepare", "--model", str(model), "--format", "int8", "--output", str(tmp_path / "int8")])
    assert "int8" in capfd.readouterr().out
    policy = AutoModelForCausalLM.from_pretrained(model)
    monkeypatch.setattr(auto, "measure", lambda trial, precision: Speed(step=1.0, sync=1.0))
    for start, choice in ({}, "bf16"), ({"engine_kwargs": {"model": str(tmp_path / "int8")}}, "int8"):
        options = {"max_num_seqs": 8, "max_completion_length": 8, **start}
        assert auto.choose_precision(policy, Accelerator(cpu=not GPU), options) == choice

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
