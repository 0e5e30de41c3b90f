"""
Copies of checkpoints on disk: a killed one goes on where it was and ends in the same bytes, another's work is not taken
for one's own, and what was taken apart is read back.
"""

import json
import os
import signal
import sys
from pathlib import Path

import pytest
import torch
import warm
from safetensors.torch import load_file, save_file
from tiny import save_tiny, tiny_model

from trl_quant.formats import FORMATS, global_scale, quantize
from trl_quant.formats.checkpoint import (
    checkpoint_tensors,
    dense,
    quantization_config,
    quantize_checkpoint,
    read_quantized,
    rounded,
    storable,
    stored_format,
)
from trl_quant.formats.files import fingerprint, unfinished


SHARD = 100_000  # bytes, several files for a tiny model


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> str:
    return save_tiny(tmp_path_factory.mktemp("source") / "model", dtype=torch.bfloat16)


def contents(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


def dying(after: int, how):
    """A quantizer that does `how` instead of its next-to-`after`th weight, and counts."""
    calls = []

    def quantizer(x, name, **kwargs):
        if len(calls) == after:
            how()
        calls.append(x.shape)
        return quantize(x, name, **kwargs)

    return quantizer, calls


def burn():
    raise RuntimeError("disk on fire")


@pytest.mark.parametrize("format", ["int8", "nvfp4"])
def test_a_failed_copy_goes_on(source, format, tmp_path, caplog):
    whole = quantize_checkpoint(source, tmp_path / "whole", format, max_shard_bytes=SHARD)
    target = tmp_path / "out/q"
    quantizer, calls = dying(9, burn)
    with pytest.raises(RuntimeError, match="on fire"):
        quantize_checkpoint(source, target, format, quantizer=quantizer, max_shard_bytes=SHARD)
    work = tmp_path / "out/.q.part"
    assert f"What is finished stays in {work}: the same command goes on from there." in caplog.text
    kept = {path: path.stat().st_mtime_ns for path in work.rglob("*.safetensors")}
    assert kept and not target.exists()

    quantizer, again = dying(99, burn)
    quantize_checkpoint(source, target, format, quantizer=quantizer, max_shard_bytes=SHARD)
    assert 14 - len(calls) <= len(again) < 14, "finished files are not computed again"
    for path, time in kept.items():
        assert (target / path.name).stat().st_mtime_ns == time
    assert contents(target) == contents(whole)
    assert [path.name for path in target.parent.iterdir()] == ["q"]


def test_a_killed_process_leaves_what_the_next_one_goes_on_from(source, tmp_path):
    whole = quantize_checkpoint(source, tmp_path / "whole", "nvfp4", max_shard_bytes=SHARD)
    target = tmp_path / "out/q"
    code = (
        "import os, signal, sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_checkpoint_files import dying\n"
        "from trl_quant.formats.checkpoint import quantize_checkpoint\n"
        "quantizer, _ = dying(10, lambda: os.kill(os.getpid(), signal.SIGKILL))\n"
        f"quantize_checkpoint({source!r}, {str(target)!r}, 'nvfp4', quantizer=quantizer, max_shard_bytes={SHARD})\n"
    )
    assert warm.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL
    work = tmp_path / "out/.q.part"
    finished = sorted((work / "result").glob("*.safetensors"))
    assert finished and not target.exists()
    finished[0].write_bytes(finished[0].read_bytes()[:-8])  # not whole: it is written again
    quantizer, calls = dying(99, burn)
    quantize_checkpoint(source, target, "nvfp4", quantizer=quantizer, max_shard_bytes=SHARD)
    assert len(calls) < 14
    assert contents(target) == contents(whole)
    assert not work.exists()


@pytest.mark.parametrize("change", ["format", "ignore", "source"])
def test_work_of_other_settings_is_not_used(source, change, tmp_path):
    mine = save_tiny(tmp_path / "model", dtype=torch.bfloat16)
    arguments = {"format": "int8", "ignore": ["lm_head"], "max_shard_bytes": SHARD}
    quantizer, _ = dying(9, burn)
    with pytest.raises(RuntimeError):
        quantize_checkpoint(mine, tmp_path / "q", quantizer=quantizer, **arguments)
    before = contents(tmp_path / ".q.part")
    if change == "source":  # trained on: the same shapes, other weights
        tiny_model(dtype=torch.bfloat16, seed=1).save_pretrained(mine)
    else:
        arguments |= {"format": "fp8"} if change == "format" else {"ignore": ["lm_head", "model.layers.0.mlp.up_proj"]}
    with pytest.raises(ValueError, match=r"\.q\.part is what is left of a run with other settings \((scheme|source)"):
        quantize_checkpoint(mine, tmp_path / "q", **arguments)
    assert contents(tmp_path / ".q.part") == before and not (tmp_path / "q").exists()


def test_two_processes_do_not_write_one_target(source, tmp_path):
    with unfinished(tmp_path / "q", {}) as result:
        (result / "x").write_text("mine")
        code = f"from trl_quant.formats.files import unfinished\nwith unfinished({str(tmp_path / 'q')!r}, {{}}): pass"
        done = warm.run([sys.executable, "-c", code], capture_output=True)
        assert "another process is writing" in done.stderr
    assert (tmp_path / "q/x").read_text() == "mine"
    with pytest.raises(ValueError, match="q exists"), unfinished(tmp_path / "q", {}):
        pass


def test_the_fingerprint_sees_what_a_copy_depends_on(source, tmp_path):
    mine = Path(save_tiny(tmp_path / "model"))
    before = fingerprint(mine)
    (mine / "notes.txt").write_text("nothing")
    assert fingerprint(mine) == before
    os.utime(mine / "model.safetensors", ns=(1, 1))
    assert fingerprint(mine) != before


# Reading


@pytest.mark.parametrize("name", storable())
def test_quantized_tensors_are_read_back(name, tmp_path):
    """From a file, bit for bit what was quantized."""
    weights = {f"a.{x}_proj.weight": torch.randn(64, 256, dtype=torch.bfloat16) * (1 + i) for i, x in enumerate("qkv")}
    shared = {"global_scale": global_scale(*weights.values())} if FORMATS[name].shares_scale else {}
    quantized = {n: quantize(w, name, **shared) for n, w in weights.items()}
    stored = {"a.q_proj.bias": torch.ones(64)}
    for n, q in quantized.items():
        stored |= checkpoint_tensors(n, q)
    save_file(stored, tmp_path / "x.safetensors")
    tensors = load_file(tmp_path / "x.safetensors")
    back = read_quantized(tensors, name, torch.bfloat16)
    numbers = dense(name, torch.bfloat16)(tensors)
    assert numbers.keys() == weights.keys() | {"a.q_proj.bias"}
    again = rounded(name)(weights)
    for n, q in quantized.items():
        read = back[n.removesuffix(".weight")]
        assert read.shape == q.shape and read.dtype == q.dtype
        assert torch.equal(read.values.view(torch.uint8), q.values.view(torch.uint8))
        assert torch.equal(numbers[n], q.dequantize()) and torch.equal(again[n], q.dequantize())
        assert not torch.equal(numbers[n], weights[n])
    if shared:
        alone = rounded(name)({n: w for n, w in weights.items() if "q_proj" in n})
        assert not torch.equal(alone["a.q_proj.weight"], again["a.q_proj.weight"])


@pytest.mark.parametrize("name", storable())
def test_the_format_is_told_from_the_config(name):
    config = {"quantization_config": json.loads(json.dumps(quantization_config(name)))}
    assert stored_format(config) == name
    assert stored_format({}) is None
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["symmetric"] = False
    with pytest.raises(ValueError, match="none that `trl-quant prepare` writes"):
        stored_format(config)
    with pytest.raises(ValueError, match=r"\(gptq, None\)"):
        stored_format({"quantization_config": {"quant_method": "gptq"}})
