"""`trl-quant prepare`: what it quantizes and says, what it refuses, what it downloads and what it copies.

Models whose layers nothing quantizes are refused by the engines as well.
"""

import json
import logging
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tiny import gpt2, save_tiny, tiny_model, tiny_tokenizer
from training import config, make
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from trl_quant import QuantGRPOConfig, QuantGRPOTrainer
from trl_quant.cli import main as command
from trl_quant.formats import global_scale, quantize
from trl_quant.report.runs import read_run
from trl_quant.storage.identity import MODEL_FILES
from trl_quant.storage.layout import check_files, checkpoint_stream, linear_layers, quantize_checkpoint
from trl_quant.storage.manifest import MANIFEST, check_read


ATTENTION, MLP = {"q_proj", "k_proj", "v_proj", "o_proj"}, {"gate_proj", "up_proj", "down_proj"}


def prepare(model, output, *options: str, format: str = "int8") -> None:
    command(["prepare", "--model", str(model), "--format", format, "--output", str(output), *options])


def refusal(model, output, *options: str) -> str:
    """What it says, in one line, leaving nothing behind."""
    before = sorted(output.parent.iterdir())
    with pytest.raises(SystemExit) as error:
        prepare(model, output, *options)
    assert sorted(output.parent.iterdir()) == before
    text = str(error.value)
    assert text.startswith("error: ") and "\n" not in text
    return text


# What is quantized


@pytest.mark.parametrize("tied", [True, False])
def test_counts_and_names(tied, tmp_path, capsys):
    prepare(save_tiny(tmp_path / "model", tied=tied), tmp_path / "int8")
    line = capsys.readouterr().out.splitlines()[-1]
    said, _, left = line.partition("; left as they are: ")
    assert said.startswith(f"{tmp_path / 'int8'}: 14 of {14 if tied else 15} linear layers in int8: ")
    assert set(said.rpartition(": ")[2].split(", ")) == ATTENTION | MLP
    assert left == ("" if tied else "lm_head")
    weights = load_file(tmp_path / "int8/model.safetensors")
    assert sum(weight.dtype == torch.int8 for weight in weights.values()) == 14


def test_linear_layers_are_those_that_are_quantized(tmp_path):
    model = save_tiny(tmp_path / "model", tied=False)
    ignore = ["lm_head", r"re:.*down_proj"]
    quantized, left = linear_layers(model, ignore)
    weights = load_file(quantize_checkpoint(model, tmp_path / "int8", "int8", ignore) / "model.safetensors")
    assert {f"{name}.weight" for name in quantized} == {n for n, w in weights.items() if w.dtype == torch.int8}
    assert set(left) == {"lm_head", "model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"}
    with pytest.raises(ValueError, match=r"source: .*model has no linear layers to quantize"):
        quantize_checkpoint(model, tmp_path / "none", "int8", ["lm_head", r"re:model\."])
    assert not (tmp_path / "none").exists()


def test_nothing_to_quantize(tmp_path):
    """GPT-2's weights look like those of linear layers, and are the transposes."""
    gpt2().save_pretrained(tmp_path / "gpt2")
    text = refusal(tmp_path / "gpt2", tmp_path / "int8")
    assert "has no linear layers to quantize" in text and "transformer.h.0.mlp.c_fc" in text


def test_layers_that_the_decoder_does_not_have(tmp_path):
    """Such as a vision tower under another name than the one that its config leaves out."""
    model = Path(save_tiny(tmp_path / "model"))
    weights = load_file(model / "model.safetensors")
    save_file(weights | {"visual.blocks.0.attn.qkv.weight": torch.ones(128, 128)}, model / "model.safetensors")
    text = refusal(model, tmp_path / "int8")
    assert "`visual.blocks.0.attn.qkv` (1 such) is not a linear layer in the decoder of Qwen3ForCausalLM" in text
    save_file(weights, model / "model.safetensors")
    prepare(model, tmp_path / "int8")


def test_what_is_no_checkpoint(tmp_path):
    """An adapter is told how to become one, and a name is repeated where nothing was found under it."""
    run = tmp_path / "run"
    get_peft_model(tiny_model(), LoraConfig(r=4, target_modules="all-linear")).save_pretrained(run)
    assert f"{run} holds an adapter. `trl-quant export --adapter {run} --output" in refusal(run, tmp_path / "int8")
    (tmp_path / "empty").mkdir()
    assert f"{tmp_path / 'empty'} has no config.json" in refusal(tmp_path / "empty", tmp_path / "int8")
    refused = refusal(tmp_path / "nowhere", tmp_path / "int8")
    assert f"`source`='{tmp_path / 'nowhere'}' is neither a directory here" in refused


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.mlp.gate",
        "model.layers.0.mlp.shared_expert_gate",
        "model.layers.0.mlp.router",
        "model.layers.0.feed_forward.router",
        "transformer.blocks.0.ffn.router.layer",
        "model.layers.0.block_sparse_moe.gate",
    ],
)
def test_routers_are_never_quantized(name):
    """No stream takes one, be it to a checkpoint or an engine."""
    weight = torch.ones(128, 128)
    ((_, left),) = checkpoint_stream([(f"{name}.weight", weight)], "int8")
    assert left is weight


@pytest.mark.parametrize(
    "name",
    ["block_sparse_moe.experts.3.w1", "mlp.gate_proj", "mlp.gate_up_proj", "self_attn.gate_proj", "mlp.experts_proj"],
)
def test_other_gates_are_quantized(name):
    stream = dict(checkpoint_stream([(f"model.layers.0.{name}.weight", torch.ones(128, 128))], "int8"))
    assert stream[f"model.layers.0.{name}.weight"].dtype == torch.int8


# Hybrids


KEPT = {
    "qwen3_5_text": {"in_proj_a", "in_proj_b"},
    "qwen3_next": {"in_proj_ba", "gate", "shared_expert_gate", "fc", "up_proj"},
    "falcon_h1": set(),
}
ONE_SCALE = (("in_proj_qkv", "in_proj_z"), ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # in NVFP4


@pytest.mark.parametrize(
    ("family", "format", "quantized"),
    [
        ("qwen3_5_text", "int8", 13),
        ("qwen3_5_text", "nvfp4", 13),
        ("qwen3_next", "fp8", 12),
        ("falcon_h1", "fp8_block", 18),
    ],
)
def test_a_hybrid_on_disk(family, format, quantized, tmp_path, capsys):
    """transformers reads the projections on the grid; gates, convolutions, decays and norms have the policy's bits."""
    model = tiny_model(family, tied=False, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "model")
    if family == "qwen3_next":  # as published, with a layer for speculative decoding that transformers leaves out
        file, more = tmp_path / "model/model.safetensors", ("mtp.fc", "mtp.layers.0.mlp.experts.3.up_proj")
        save_file(load_file(file) | {f"{name}.weight": torch.ones(128, 128) for name in more}, file)
    prepare(tmp_path / "model", tmp_path / "out", format=format)
    left = capsys.readouterr().out.rpartition("left as they are: ")[2].strip().split(", ")
    assert {*left} == {"lm_head"} | KEPT[family]
    settings = CompressedTensorsConfig(dequantize=True)
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16, quantization_config=settings)
    changed = []
    for name, own in model.named_parameters():
        found, (parent, _, leaf) = read.get_parameter(name), name.removesuffix(".weight").rpartition(".")
        if torch.equal(found, own):
            continue
        changed.append(name)
        parts = next((parts for parts in ONE_SCALE if leaf in parts), (leaf,))
        of_group = [model.get_parameter(f"{parent}.{part}.weight") for part in parts] if format == "nvfp4" else []
        shared = {"global_scale": global_scale(*of_group)} if of_group else {}
        assert torch.equal(found, quantize(own, format, **shared).dequantize(torch.bfloat16)), name
    assert len([name for name in changed if ".experts." not in name]) == quantized
    assert len(changed) - quantized == (4 if family == "qwen3_next" else 0)


# Damaged files


@pytest.mark.parametrize("damage", ["truncated", "no header", "empty"])
def test_damaged_files_are_named(damage, tmp_path):
    model = Path(save_tiny(tmp_path / "model"))
    file = model / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes({"truncated": whole[:-1000], "no header": b"version https://git-lfs" * 9, "empty": b""}[damage])
    assert f"{file} is damaged or incomplete: " in refusal(model, tmp_path / "int8")
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged or incomplete.*Download or save it again"):
        make(QuantGRPOTrainer, config(QuantGRPOConfig, tmp_path / "out", rollout_precision="int8"), str(model))
    file.write_bytes(whole)
    check_files(model)
    make(QuantGRPOTrainer, config(QuantGRPOConfig, tmp_path / "out", rollout_precision="int8"), str(model))


@pytest.mark.vllm
def test_a_damaged_checkpoint_of_an_engine(tmp_path):
    pytest.importorskip("vllm")
    model = save_tiny(tmp_path / "model", dtype=torch.bfloat16)
    start = quantize_checkpoint(model, tmp_path / "int8", "int8")
    (start / "model.safetensors").write_bytes((start / "model.safetensors").read_bytes()[:-1])
    options = {"use_vllm": True, "vllm_mode": "colocate", "vllm_engine_kwargs": {"model": str(start)}}
    with pytest.raises(ValueError, match=r"int8/model\.safetensors is damaged or incomplete"):
        make(QuantGRPOTrainer, config(QuantGRPOConfig, tmp_path / "out", rollout_precision="int8", **options), model)


def test_the_damaged_shard_is_named(tmp_path):
    tiny_model().save_pretrained(tmp_path / "model", max_shard_size="300KB")
    shards = sorted((tmp_path / "model").glob("model-*.safetensors"))
    assert len(shards) > 2
    shards[1].write_bytes(shards[1].read_bytes()[:-8])
    text = refusal(tmp_path / "model", tmp_path / "int8")
    assert shards[1].name in text and shards[0].name not in text


# What belongs to a checkpoint


OWN = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
OWN += ["chat_template.jinja", "merges.txt", "tokenizer.model", "README.md", "LICENSE"]
CODE = ["modeling.py", "README.py"]
NOT_OWN = ["train.jsonl", "data.csv", "training_args.bin", "optimizer.pt", "rng_state.pth", "x.pkl", "old.safetensors"]
NOT_OWN += ["pytorch_model.bin.index.json", "events.out.tfevents.1", "model.gguf", ".env"]


@pytest.fixture
def littered(tmp_path) -> Path:
    """A checkpoint among other files."""
    model = Path(save_tiny(tmp_path / "model"))
    for name in {*OWN, *CODE, *NOT_OWN} - {path.name for path in model.iterdir()}:
        (model / name).write_text("{}")
    (model / "original").mkdir()
    (model / "original/params.json").write_text("{}")
    return model


@pytest.mark.parametrize("trust", [False, True])
def test_what_is_copied(littered, trust, tmp_path):
    prepare(littered, tmp_path / "int8", *(["--trust_remote_code"] if trust else []))
    assert {path.name for path in (tmp_path / "int8").iterdir()} == {*OWN, *(CODE if trust else [])}
    assert (tmp_path / "int8/tokenizer.json").read_bytes() == (littered / "tokenizer.json").read_bytes()
    AutoModelForCausalLM.from_pretrained(tmp_path / "int8")


def test_a_copy_of_what_a_run_saved(tmp_path):
    """It is whole by itself and no run, be it copied once or twice: the run's records stay behind."""
    settings = {"rollout_precision": "int8", "uaq_scale": 2.0, "max_steps": 1, "save_strategy": "steps"}
    args = config(QuantGRPOConfig, tmp_path / "run", save_steps=1, **settings)
    trainer = make(QuantGRPOTrainer, args, save_tiny(tmp_path / "base"))
    trainer.train()
    trainer.save_model(tmp_path / "saved")
    for source in (tmp_path / "saved", tmp_path / "run/checkpoint-1"):
        copies = {kind: tmp_path / f"{source.name}-{kind}" for kind in ("int8", "unscaled", "dense", "again")}
        records = {MANIFEST, "rollout_state.json", "trainer_state.json"}
        assert len(records & {path.name for path in source.iterdir()}) == (2 if source.name == "saved" else 3)
        prepare(source, copies["int8"])
        command(["export", "--model", str(source), "--output", str(copies["unscaled"])])
        command(["export", "--model", str(copies["int8"]), "--output", str(copies["dense"])])
        prepare(copies["unscaled"], copies["again"])
        for copy in copies.values():
            check_read(copy, MODEL_FILES, "model")
            assert not records & {path.name for path in copy.iterdir()}
            with pytest.raises(ValueError, match="holds no run"):
                read_run(copy)
        args = config(QuantGRPOConfig, tmp_path / "out", rollout_precision="int8")
        make(QuantGRPOTrainer, args, str(copies["unscaled"]))


@pytest.mark.parametrize("trust", [False, True])
def test_what_is_downloaded(littered, trust, tmp_path, monkeypatch, capsys):
    """What is needed, at the revision that is named."""
    asked = []

    def snapshot_download(repository, **options):
        asked.append((repository, options.pop("revision")))
        files = [path.relative_to(littered).as_posix() for path in littered.rglob("*") if path.is_file()]
        files += ["model-00001-of-00002.safetensors", "model.safetensors.index.json", "consolidated.safetensors"]
        asked.append(set(filter_repo_objects(files, **options)))
        return str(littered)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    monkeypatch.setattr("trl_quant.storage.source.check_named", lambda *given: None)  # asks the hub
    options = ["--trust_remote_code"] if trust else []
    prepare("someone/model", tmp_path / "int8", "--revision", "v1", *options)
    weights = {"model-00001-of-00002.safetensors", "model.safetensors.index.json", "pytorch_model.bin.index.json"}
    assert asked == [("someone/model", "v1"), {*OWN, *weights, *(CODE if trust else [])}]

    asked.clear()
    prepare("someone/model", tmp_path / "again")
    assert asked[0] == ("someone/model", None)
    with pytest.raises(SystemExit, match="again exists"):  # before anything is downloaded
        asked.clear()
        prepare("someone/model", tmp_path / "again")
    assert not asked
    assert "a directory, which has no revisions" in refusal(littered, tmp_path / "new", "--revision", "v1")


# Engines


def test_the_embedded_engine_refuses_what_it_would_not_quantize(tmp_path):
    args = config(QuantGRPOConfig, tmp_path / "out", rollout_precision="int4")
    with pytest.raises(ValueError, match=r"'int4': GPT2LMHeadModel has no linear layers in its decoder"):
        make(QuantGRPOTrainer, args, gpt2())
    make(QuantGRPOTrainer, config(QuantGRPOConfig, tmp_path / "out"), gpt2())  # TRL's own generation


def test_the_embedded_engine_tells_how_many_layers_it_quantizes(tmp_path, caplog):
    args = config(QuantGRPOConfig, tmp_path / "out", rollout_precision="int4")
    with caplog.at_level(logging.INFO, "trl_quant"):
        make(QuantGRPOTrainer, args, tiny_model(num_hidden_layers=3))
    assert "The embedded engine samples in int4: 21 linear layers." in caplog.text


@pytest.mark.vllm
def test_vllm_refuses_what_it_would_not_quantize(tmp_path):
    pytest.importorskip("vllm")
    from vllm_engines import engine, policy

    from trl_quant.models.linears import linears
    from trl_quant.rollout.vllm import kernel_checks
    from trl_quant.rollout.vllm.kernel_checks import check_kernels

    gpt2().to(torch.bfloat16).save_pretrained(tmp_path / "gpt2")
    tiny_tokenizer().save_pretrained(tmp_path / "gpt2")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "gpt2", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"'int8': GPT2LMHeadModel has no linear layers in its decoder"):
        engine(model, "int8")

    sampler = engine(policy(tmp_path / "policy"), "bf16")
    layers = list(linears(sampler.model))

    def elsewhere(model):
        """As GPT-2's are, where the check does not find them."""
        found = {name.replace("layers.", "h."): layer for name, layer in kernel_checks.linear_layers(model).items()}
        with patch.object(kernel_checks, "linear_layers", lambda model: found):
            return check_kernels(model, "bf16", layers)

    kernels = sampler.llm.apply_model(lambda model: check_kernels(model, "bf16", layers))
    assert kernels == ["8 x UnquantizedLinearMethod"]
    with pytest.raises(RuntimeError, match=r"'bf16': vLLM's Qwen3ForCausalLM has no linear layers in 'model.lay"):
        sampler.llm.apply_model(elsewhere)
    assert json.loads((tmp_path / "gpt2/config.json").read_text())["architectures"] == ["GPT2LMHeadModel"]
