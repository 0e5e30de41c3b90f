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
from copies import contents, dying
from places import HELPERS
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tiny import save_tiny, tiny_model
from transformers import AutoModelForCausalLM

from trl_quant.formats import FORMATS, global_scale, quantize
from trl_quant.storage.files import fingerprint, unfinished
from trl_quant.storage.layout import (
    check_files,
    checkpoint_tensors,
    dense,
    quantization_config,
    quantize_checkpoint,
    read_quantized,
    rounded,
    storable,
    stored_format,
)


SHARD = 100_000  # bytes, several files for a tiny model


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> str:
    return save_tiny(tmp_path_factory.mktemp("source") / "model", dtype=torch.bfloat16)


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
    assert f"Finished files stay in {work}: the same command continues from there." in caplog.text
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
        f"sys.path.insert(0, {str(HELPERS)!r})\n"
        "from copies import dying\n"
        "from trl_quant.storage.layout import quantize_checkpoint\n"
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
    with pytest.raises(ValueError, match=r"\.q\.part was left by a run with other settings \((scheme|source)"):
        quantize_checkpoint(mine, tmp_path / "q", **arguments)
    assert contents(tmp_path / ".q.part") == before and not (tmp_path / "q").exists()


def test_two_processes_do_not_write_one_target(source, tmp_path):
    with unfinished(tmp_path / "q", {}) as result:
        (result / "x").write_text("mine")
        code = f"from trl_quant.storage.files import unfinished\nwith unfinished({str(tmp_path / 'q')!r}, {{}}): pass"
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
    with pytest.raises(ValueError, match="`trl-quant prepare` does not write its quantization_config"):
        stored_format(config)
    with pytest.raises(ValueError, match=r"\(gptq, None\)"):
        stored_format({"quantization_config": {"quant_method": "gptq"}})


# What another left


def broken_off(source, target: Path, format: str = "int8") -> Path:
    """What a copy leaves that died after some of its files."""
    quantizer, _ = dying(9, burn)
    with pytest.raises(RuntimeError, match="on fire"):
        quantize_checkpoint(source, target, format, quantizer=quantizer, max_shard_bytes=SHARD)
    return target.with_name(f".{target.name}.part")


@pytest.mark.parametrize("state", [None, "", "{", "[]", "7"])
def test_files_of_an_unknown_run_are_not_published(source, state, tmp_path):
    """They may be of another format, or planted. Those of a run that is known are used."""
    target = tmp_path / "q"
    work = broken_off(source, target)
    told = (work / "run.json").read_text()
    (work / "run.json").unlink() if state is None else (work / "run.json").write_text(state)
    before = contents(work / "result")
    for format in ("int8", "fp8"):
        with pytest.raises(ValueError, match=r"\.q\.part holds result/.*, but no complete run\.json"):
            quantize_checkpoint(source, target, format, max_shard_bytes=SHARD)
    assert contents(work / "result") == before and not target.exists()
    (work / "run.json").write_text(told)
    quantize_checkpoint(source, target, "int8", max_shard_bytes=SHARD)
    assert contents(target) == contents(quantize_checkpoint(source, tmp_path / "whole", "int8", max_shard_bytes=SHARD))


@pytest.mark.parametrize("state", [None, "", "{"])
def test_a_run_that_died_before_its_first_file_goes_on(source, state, tmp_path):
    (tmp_path / ".q.part/result").mkdir(parents=True)
    if state is not None:
        (tmp_path / ".q.part/run.json").write_text(state)
    assert load_file(quantize_checkpoint(source, tmp_path / "q", "int8") / "model.safetensors")


@pytest.mark.parametrize(
    "planted", ["run.sh", "chat_template.jinja", "model-00009-of-00009.safetensors", "sub/x", "link"]
)
def test_nothing_planted_is_published(source, planted, tmp_path):
    whole = quantize_checkpoint(source, tmp_path / "whole", "int8", max_shard_bytes=SHARD)
    result = broken_off(source, tmp_path / "q") / "result"
    if planted == "link":
        (tmp_path / "secret").write_text("mine")
        (result / "model-00009-of-00099.safetensors").symlink_to(tmp_path / "secret")
    else:
        (result / planted).parent.mkdir(exist_ok=True)
        save_file({"x": torch.ones(1)}, result / planted)
    quantize_checkpoint(source, tmp_path / "q", "int8", max_shard_bytes=SHARD)
    assert contents(tmp_path / "q") == contents(whole)
    assert planted != "link" or (tmp_path / "secret").read_text() == "mine"


@pytest.mark.parametrize("link", [".q.part", ".q.part/result"])
def test_work_that_is_a_link_is_refused(source, link, tmp_path):
    """It would be published as a link, and files elsewhere would be deleted."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine.txt").write_text("mine")
    (tmp_path / link).parent.mkdir(exist_ok=True)
    (tmp_path / link).symlink_to(elsewhere)
    with pytest.raises(ValueError, match="is a link, which no run leaves"):
        quantize_checkpoint(source, tmp_path / "q", "int8")
    assert contents(elsewhere) == {"mine.txt": b"mine"} and not (tmp_path / "q").exists()


def test_a_target_that_is_a_broken_link_exists(source, tmp_path):
    (tmp_path / "q").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="q exists"):
        quantize_checkpoint(source, tmp_path / "q", "int8")


def test_the_state_is_whole_or_as_it_was(tmp_path, monkeypatch):
    """A disk that is full when a copy goes on must not take from it what says of which run it is."""
    with pytest.raises(RuntimeError), unfinished(tmp_path / "q", {"a": 1}) as result:
        save_file({"x": torch.ones(1)}, result / "model.safetensors")
        raise RuntimeError
    write = Path.write_bytes

    def full(self, data):
        write(self, data[:1])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    said = r"No space left while writing .*\.q\.part.*repeat the command"
    with pytest.raises(OSError, match=said), unfinished(tmp_path / "q", {"a": 1}):
        pytest.fail("nothing can be written")
    monkeypatch.undo()
    assert json.loads((tmp_path / ".q.part/run.json").read_text()) == {"a": 1}
    with unfinished(tmp_path / "q", {"a": 1}) as result:
        assert load_file(result / "model.safetensors").keys() == {"x"}


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("No space left on device")])
def test_a_full_disk_is_one_line_and_nothing_is_published(source, error, tmp_path, monkeypatch):
    import safetensors.torch

    def full(tensors, file, **options):
        Path(file).write_bytes(b"half")
        raise error

    monkeypatch.setattr(safetensors.torch, "save_file", full)
    with pytest.raises(OSError, match=r"No space left while writing .*\.q\.part: [\d.]+ MiB are free") as raised:
        quantize_checkpoint(source, tmp_path / "q", "int8")
    assert "\n" not in str(raised.value) and [*tmp_path.iterdir()] == []
    monkeypatch.undo()
    quantize_checkpoint(source, tmp_path / "q", "int8")


# What leads out of a checkpoint


@pytest.fixture
def sharded(tmp_path) -> Path:
    tiny_model(dtype=torch.bfloat16).save_pretrained(tmp_path / "model", max_shard_size="150KB")
    return tmp_path / "model"


@pytest.mark.parametrize("single_last", [True, False])
def test_a_file_beside_an_index_is_what_transformers_loads(single_last, sharded, tmp_path):
    """transformers leaves an older index, or an older file, where it saves a model again."""
    if single_last:
        tiny_model(dtype=torch.bfloat16, seed=1).save_pretrained(sharded)
    else:
        sharded = tmp_path / "both"
        tiny_model(dtype=torch.bfloat16, seed=1).save_pretrained(sharded)
        tiny_model(dtype=torch.bfloat16).save_pretrained(sharded, max_shard_size="150KB")
    assert (sharded / "model.safetensors.index.json").is_file() and (sharded / "model.safetensors").is_file()
    loaded = AutoModelForCausalLM.from_pretrained(sharded).state_dict()
    copy = quantize_checkpoint(sharded, tmp_path / "copy", "int8")
    norms = {name: tensor for name, tensor in load_file(copy / "model.safetensors").items() if "norm" in name}
    assert norms and all(torch.equal(tensor, loaded[name]) for name, tensor in norms.items())


def reindexed(model: Path, change) -> None:
    file = model / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"] = change(index["weight_map"])
    file.write_text(json.dumps(index))


@pytest.mark.parametrize(
    "name",
    [
        "../other/model.safetensors",
        "{tmp}/other/model.safetensors",
        "sub/model.safetensors",
        "..\\x.safetensors",
        "C:x.safetensors",
        "training_args.bin",
        "..",
        "",
        7,
        None,
    ],
)
def test_an_index_of_files_elsewhere_is_refused(sharded, name, tmp_path):
    save_file({"secret": torch.ones(2)}, (tmp_path / "other").mkdir() or tmp_path / "other/model.safetensors")
    name = name.format(tmp=tmp_path) if isinstance(name, str) else name
    reindexed(sharded, lambda names: names | {"secret": name})
    with pytest.raises(ValueError, match="files of its own directory"):
        quantize_checkpoint(sharded, tmp_path / "q", "int8")
    with pytest.raises(ValueError, match="of its own directory"):
        check_files(sharded)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "other"]
    reindexed(sharded, lambda names: {key: value for key, value in names.items() if key != "secret"})
    assert "secret" not in load_file(quantize_checkpoint(sharded, tmp_path / "q", "int8") / "model.safetensors")


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}'])
@pytest.mark.parametrize("name", ["model.safetensors.index.json", "config.json"])
def test_a_damaged_json_file_is_named(sharded, name, text, tmp_path):
    if name == "config.json" and text not in ("{", "[]"):
        pytest.skip("an object")
    (sharded / name).write_text(text)
    with pytest.raises(ValueError, match=f"{name} (is damaged|holds a list|has no `weight_map`)"):
        quantize_checkpoint(sharded, tmp_path / "q", "int8")


LINKED = ["tokenizer.json", "chat_template.jinja", "README.md", "config.json", "model.safetensors", "modeling.py"]


@pytest.mark.parametrize("name", LINKED)
def test_links_out_of_a_checkpoint_are_refused(name, tmp_path):
    model = Path(save_tiny(tmp_path / "model"))
    secret = tmp_path / "secret"
    (model / name).rename(secret) if (model / name).exists() else secret.write_text("mine")
    (model / name).symlink_to(secret)
    with pytest.raises(ValueError, match=f"{name} is a link to {secret}, outside of the checkpoint"):
        quantize_checkpoint(model, tmp_path / "q", "int8", with_code=True)
    assert not (tmp_path / "q").exists()
    (model / name).unlink()
    inside = model / "own"
    inside.mkdir()
    secret.rename(inside / "file")
    (model / name).symlink_to("own/file")
    quantize_checkpoint(model, tmp_path / "q", "int8", with_code=True)
    if name != "model.safetensors" and name != "config.json":
        assert (tmp_path / "q" / name).read_bytes() == (inside / "file").read_bytes()
        assert not (tmp_path / "q" / name).is_symlink()


@pytest.mark.parametrize("name", ["optimizer.pt", "notes.pdf", "data"])
def test_links_that_no_copy_reads_stay(name, tmp_path):
    model = Path(save_tiny(tmp_path / "model"))
    (model / name).symlink_to(tmp_path)
    quantize_checkpoint(model, tmp_path / "q", "int8")
    assert not (tmp_path / "q" / name).exists()


def test_the_hubs_cache_is_read_through_its_links(tmp_path):
    """Each file is a link from `snapshots` to `blobs`; one to another repository's is refused."""
    model = Path(save_tiny(tmp_path / "model"))
    for repository in ("models--a--b", "models--c--d"):
        snapshot = tmp_path / repository / "snapshots/0123"
        snapshot.mkdir(parents=True)
        (tmp_path / repository / "blobs").mkdir()
        for file in model.iterdir():
            (tmp_path / repository / "blobs" / file.name).write_bytes(file.read_bytes())
            (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    mine = tmp_path / "models--a--b/snapshots/0123"
    copy = quantize_checkpoint(mine, tmp_path / "q", "int8")
    assert contents(copy) == contents(quantize_checkpoint(model, tmp_path / "p", "int8"))
    (mine / "tokenizer.json").unlink()
    (mine / "tokenizer.json").symlink_to("../../../models--c--d/blobs/tokenizer.json")
    with pytest.raises(ValueError, match="outside of the checkpoint"):
        quantize_checkpoint(mine, tmp_path / "r", "int8")


# Numbers that are none


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "name", ["model.norm.weight", "model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight"]
)
def test_what_is_not_finite_is_not_copied(name, value, tmp_path):
    model = Path(save_tiny(tmp_path / "model"))
    weights = load_file(model / "model.safetensors")
    weights[name].view(-1)[3] = value
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"{name}.* holds NaN or infinity"):
        quantize_checkpoint(model, tmp_path / "q", "int8")
    assert not (tmp_path / "q").exists()
    weights[name].view(-1)[3] = torch.finfo(weights[name].dtype).max / 1e6
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    quantize_checkpoint(model, tmp_path / "q", "int8")
