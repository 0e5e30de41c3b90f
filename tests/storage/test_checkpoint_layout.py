"""
Quantized checkpoints: the same keys, bytes and config as from compressed-tensors and llmcompressor, readable by
transformers, and written tensor by tensor, whole or not at all.
"""

import json

import pytest
import torch
from long_tests import rest_is_long
from readers import READERS, reader
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from trl_quant.formats import FORMATS, fake_quantize_activation, global_scale, quantize
from trl_quant.models.linears import fused_layer, is_quantizable
from trl_quant.storage.experts import NamesOnDisk
from trl_quant.storage.layout import (
    checkpoint_stream,
    checkpoint_tensors,
    quantization_config,
    quantize_checkpoint,
    storable,
)


PRESETS = {  # llmcompressor's names; "FP8" differs in its inputs, whose static scales need calibration
    "fp8": "FP8_DYNAMIC",
    "fp8_tensor": "FP8",
    "fp8_block": "FP8_BLOCK",
    "int8": "INT8",
    "nvfp4": "NVFP4A16",
    "mxfp4": "MXFP4A16",
    "int4": "W4A16",
}


def tiny_model(tied: bool, dtype: torch.dtype = torch.bfloat16):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=96,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        architectures=["Qwen3ForCausalLM"],
    )
    model = Qwen3ForCausalLM(config).to(dtype)
    for i, (name, p) in enumerate(model.named_parameters()):
        if "proj" in name:  # layers of different magnitude, so that a shared global scale shows
            p.data.mul_(1 + i)
    return model.eval()


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def source(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "bf16"
    tiny_model(request.param).save_pretrained(path)
    (path / "tokenizer_config.json").write_text('{"a": 1}')
    return path


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """A checkpoint in three files, with a layer's q, k and v in different files."""
    path = tmp_path_factory.mktemp("sharded") / "bf16"
    tiny_model(False).save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    weight_map = {name: f"model-0000{1 + i % 3}-of-00003.safetensors" for i, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        save_file({n: t for n, t in tensors.items() if weight_map[n] == file}, path / file, metadata={"format": "pt"})
    assert len({weight_map[f"model.layers.0.self_attn.{x}_proj.weight"] for x in "qkv"}) > 1
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


def assert_same_tensors(ours: dict[str, Tensor], theirs: dict[str, Tensor]):
    assert ours.keys() == theirs.keys()
    for name in theirs:
        assert ours[name].dtype == theirs[name].dtype, name
        assert ours[name].shape == theirs[name].shape, name
        assert ours[name].contiguous().view(torch.uint8).equal(theirs[name].contiguous().view(torch.uint8)), name


@pytest.mark.parametrize("name", [n for n in PRESETS if n != "fp8_tensor"])
def test_equals_llmcompressor(source, name, tmp_path, monkeypatch):
    """`oneshot` on the same checkpoint writes the same tensors and the same config."""
    # The process group of an engine of other tests would have it share each tensor with processes that are not there
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    llmcompressor = pytest.importorskip("llmcompressor")
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    llmcompressor.oneshot(
        model=model, recipe=QuantizationModifier(targets="Linear", scheme=PRESETS[name], ignore=["lm_head"])
    )
    model.save_pretrained(tmp_path / "theirs")
    quantize_checkpoint(source, tmp_path / "ours", name)
    assert_same_tensors(*(load_file(tmp_path / w / "model.safetensors") for w in ("ours", "theirs")))
    ours, theirs = (json.loads((tmp_path / w / "config.json").read_text()) for w in ("ours", "theirs"))
    assert ours["quantization_config"] == theirs["quantization_config"]


@pytest.mark.parametrize("name", storable())
def test_equals_compressed_tensors(name, tmp_path):
    """compressed-tensors' own ModelCompressor on a model with our scales: the same tensors and the same config."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    model = tiny_model(False)
    model.save_pretrained(tmp_path / "bf16")
    config = QuantizationConfig(
        config_groups={"group_0": quantization_config(name)["config_groups"]["group_0"]}, ignore=["lm_head"]
    )
    apply_quantization_config(model, config)
    for layer in model.model.layers:
        attn, mlp = layer.self_attn, layer.mlp
        for fused in [
            (attn.q_proj, attn.k_proj, attn.v_proj),
            (attn.o_proj,),
            (mlp.gate_proj, mlp.up_proj),
            (mlp.down_proj,),
        ]:
            g = {"global_scale": global_scale(*(m.weight for m in fused))} if name == "nvfp4" else {}
            for module in fused:
                q = quantize(module.weight, name, **g)
                scale = 2.0 ** (q.scale.float() - 127) if name == "mxfp4" else q.scale
                module.weight_scale.data = scale.to(module.weight_scale.dtype)
                if g:
                    module.weight_global_scale.data = q.global_scale.clone()
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(tmp_path / "theirs")
    compressor.update_config(tmp_path / "theirs")
    quantize_checkpoint(tmp_path / "bf16", tmp_path / "ours", name)
    assert_same_tensors(*(load_file(tmp_path / w / "model.safetensors") for w in ("ours", "theirs")))
    ours, theirs = (json.loads((tmp_path / w / "config.json").read_text()) for w in ("ours", "theirs"))
    assert ours["quantization_config"] == theirs["quantization_config"]


class Quantized(torch.nn.Module):
    """A linear layer in a format, through `trl_quant.formats` alone."""

    def __init__(self, linear, name, g):
        super().__init__()
        self.name, self.weight = name, quantize(linear.weight, name, global_scale=g).dequantize()

    def forward(self, x):
        return torch.nn.functional.linear(fake_quantize_activation(x, self.name), self.weight)


@pytest.mark.parametrize("name", storable())
def test_transformers_reads_it(source, name, tmp_path):
    """transformers loads the result and computes the same, bit for bit, as a model with our quantized layers."""
    from transformers import AutoModelForCausalLM

    quantize_checkpoint(source, tmp_path / "q", name)
    ids = torch.arange(24).view(2, 12)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "q", dtype=torch.bfloat16).eval()
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        full, theirs = model(ids).logits, loaded(ids).logits
        for layer in model.model.layers:
            for parent, fused in (
                (layer.self_attn, "qkv"),
                (layer.self_attn, "o"),
                (layer.mlp, ("gate", "up")),
                (layer.mlp, ("down",)),
            ):
                linears = {f"{n}_proj": getattr(parent, f"{n}_proj") for n in fused}
                g = global_scale(*(m.weight for m in linears.values())) if name == "nvfp4" else None
                for n, linear in linears.items():
                    setattr(parent, n, Quantized(linear, name, g))
        ours = model(ids).logits
    assert torch.equal(ours, theirs)
    assert not torch.equal(ours, full)


@pytest.mark.parametrize("name", ["int8", "nvfp4"])
def test_shards_do_not_matter(sharded, name, tmp_path):
    """Fused layers in different files share their scale, and result files stay within the given size."""
    one = quantize_checkpoint(sharded, tmp_path / "one", name)
    many = quantize_checkpoint(sharded, tmp_path / "many", name, max_shard_bytes=50_000)
    index = json.loads((many / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == sorted(f.name for f in many.glob("*.safetensors"))
    assert len(files) > 3
    together = {}
    for file in files:
        shard = load_file(many / file)
        assert sum(t.nbytes for t in shard.values()) <= 50_000 or len({fused_layer(n) for n in shard}) == 1
        assert {n for n, f in index["weight_map"].items() if f == file} == shard.keys()
        together |= shard
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in together.values())
    assert_same_tensors(together, load_file(one / "model.safetensors"))
    if name == "nvfp4":
        scales = [together[f"model.layers.0.self_attn.{x}_proj.weight_global_scale"] for x in "qkvo"]
        assert torch.equal(scales[0], scales[1])
        assert torch.equal(scales[0], scales[2])
        assert not torch.equal(scales[0], scales[3])


def test_unquantized_tensors_pass_unchanged(source, tmp_path):
    quantize_checkpoint(
        source, tmp_path / "q", "int8", ignore=["lm_head", r"re:model\.layers\.0\.", "model.layers.1.mlp.up_proj"]
    )
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "q/model.safetensors")
    kept = {n for n in before if n in after and torch.equal(before[n].view(torch.uint8), after[n].view(torch.uint8))}
    changed = {n for n in before if "layers.1" in n and "_proj" in n and "up_proj" not in n}
    assert len(changed) == 6
    assert kept == before.keys() - changed
    assert (tmp_path / "q/tokenizer_config.json").read_text() == '{"a": 1}'
    config = json.loads((tmp_path / "q/config.json").read_text())
    assert config.pop("quantization_config")["ignore"][1] == r"re:model\.layers\.0\."
    assert config == json.loads((source / "config.json").read_text())


def test_which_tensors_are_weights_of_linear_layers():
    matrix = torch.ones(2, 2)
    assert is_quantizable("model.layers.0.mlp.up_proj.weight", matrix)
    assert is_quantizable("transformer.h.0.attn.c_attn.weight", matrix)
    for name in ("model.embed_tokens.weight", "embed_tokens.weight", "transformer.wte.weight", "lm_head.weight"):
        assert not is_quantizable(name, matrix), name
    assert not is_quantizable("model.layers.0.mlp.up_proj.bias", matrix)
    assert not is_quantizable("model.norm.weight", matrix[0])
    assert not is_quantizable("vision.patch.weight", matrix[None, None])
    assert not is_quantizable("model.layers.0.mlp.up_proj.weight", matrix.int())
    assert is_quantizable("lm_head.weight", matrix, ignore=())
    assert not is_quantizable("model.layers.0.mlp.gate.weight", matrix, ignore=["re:.*mlp.gate$"])
    assert is_quantizable("model.layers.0.mlp.gate_proj.weight", matrix, ignore=["re:.*mlp.gate$"])


def test_the_stream_is_lazy_and_keeps_order():
    seen = []

    def stream():
        for layer in ("o_proj", "q_proj", "k_proj", "input_layernorm", "v_proj", "down_proj"):
            seen.append(layer)
            shape = (64,) if "norm" in layer else (32, 64)
            yield f"model.layers.0.{layer}.weight", torch.randn(shape)

    out = checkpoint_stream(stream(), "mxfp4")
    for i, layer in enumerate(["o_proj", "q_proj", "k_proj", "input_layernorm", "v_proj", "down_proj"]):
        name, _ = next(out)
        assert layer in name
        assert len(seen) == i + 1, "one tensor at a time"
        if "proj" in layer:
            next(out)
    seen.clear()
    names = [name.split(".")[3] for name, _ in checkpoint_stream(stream(), "nvfp4") if not name.endswith("scale")]
    assert names == ["o_proj", "input_layernorm", "q_proj", "k_proj", "v_proj", "down_proj"]


def test_an_unfinished_fused_layer_is_not_lost():
    weights = {f"a.{x}_proj.weight": torch.randn(16, 16) for x in "qk"}
    out = dict(checkpoint_stream(weights.items(), "nvfp4"))
    for name, weight in weights.items():
        alone = checkpoint_tensors(name, quantize(weight, "nvfp4", global_scale=global_scale(*weights.values())))
        assert_same_tensors({n: out[n] for n in alone}, alone)


def test_nothing_is_left_when_nothing_was_finished(source, tmp_path):
    def failing(x, name, **kwargs):
        raise RuntimeError("disk on fire")

    with pytest.raises(RuntimeError, match="on fire"):
        quantize_checkpoint(source, tmp_path / "a/q", "int8", quantizer=failing)
    assert list((tmp_path / "a").iterdir()) == []
    quantize_checkpoint(source, tmp_path / "a/q", "int8")
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["q"]


def test_bad_checkpoints_are_refused(source, tmp_path):
    done = quantize_checkpoint(source, tmp_path / "q", "int8")
    with pytest.raises(ValueError, match=r"source: .* is already quantized \(compressed-tensors\)"):
        quantize_checkpoint(done, tmp_path / "r", "fp8")
    config = json.loads((done / "config.json").read_text())
    del config["quantization_config"]
    (done / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"weight_scale, so it is already quantized"):
        quantize_checkpoint(done, tmp_path / "r", "fp8")
    with pytest.raises(ValueError, match=r"target: .*q exists"):
        quantize_checkpoint(source, done, "int8")
    with pytest.raises(ValueError, match=r"source: .*nowhere has no config.json"):
        quantize_checkpoint(tmp_path / "nowhere", tmp_path / "r", "int8")
    with pytest.raises(ValueError, match=r"format: 'nf4' has no layout in compressed-tensors; allowed: fp8, "):
        quantize_checkpoint(source, tmp_path / "r", "nf4")
    with pytest.raises(ValueError, match=r"format: 'fp4' is not a format"):
        quantization_config("fp4")
    (done / "model.safetensors").rename(done / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"lacks model.safetensors; only safetensors"):
        quantize_checkpoint(done, tmp_path / "r", "int8")
    assert not (tmp_path / "r").exists()


def test_bad_tensors_are_named():
    nan = torch.full((16, 16), float("nan"))
    with pytest.raises(ValueError, match=r"a\.up_proj\.weight: x: holds NaN"):
        list(checkpoint_stream([("a.up_proj.weight", nan)], "nvfp4"))
    for name, group in (("nvfp4", 16), ("mxfp4", 32), ("int4", 128)):
        with pytest.raises(ValueError, match=rf"a\.up_proj\.weight: 40 inputs, but '{name}' .* multiples of {group}"):
            list(checkpoint_stream([("a.up_proj.weight", torch.ones(16, 40))], name))
    q = quantize(torch.ones(2, 2), "int8")
    with pytest.raises(ValueError, match=r"name: 'a\.bias'"):
        checkpoint_tensors("a.bias", q)
    with pytest.raises(ValueError, match=r"shape \(1, 2, 2\)"):
        checkpoint_tensors("a.weight", quantize(torch.ones(1, 2, 2), "int8"))


@pytest.mark.vllm
@pytest.mark.parametrize("name", storable())
def test_vllm_accepts_the_config(name):
    pytest.importorskip("vllm")
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig

    config = CompressedTensorsConfig.from_config(quantization_config(name))
    weights = config.target_scheme_map["Linear"]["weights"]
    scheme = FORMATS[name].scheme.weights
    assert (weights.num_bits, weights.type) == (scheme["num_bits"], scheme["type"])
    assert config.ignore == ["lm_head"]


@pytest.mark.parametrize("family", rest_is_long(READERS, "qwen3_5"))
def test_a_stream_in_nvfp4_leaves_what_sees_images(family, tmp_path):
    """The text's linear layers alone have codes, with one global scale where an engine joins them."""
    policy, _ = reader(family)
    text = {name for name, layer in policy.model.language_model.named_modules() if isinstance(layer, nn.Linear)}
    text = {f"model.language_model.{name}" for name in text if not name.endswith(("in_proj_a", "in_proj_b"))}
    names, state = NamesOnDisk(policy), policy.state_dict()

    def coded(ignore) -> set[str]:
        stream = checkpoint_stream(state.items(), "nvfp4", ignore)
        return {name.removesuffix(".weight_packed") for name, _ in stream if name.endswith(".weight_packed")}

    assert coded(names.kept()) == text and {name for name in coded(["lm_head"]) if "vis" in name}
    sent = dict(names.stream(checkpoint_stream(state.items(), "nvfp4", names.kept())))
    policy.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    plain = {name: tensor for name, tensor in saved.items() if f"{name}_packed" not in sent}
    assert len(saved) == len(plain) + len(text)
    assert_same_tensors(plain, {name: sent[name] for name in plain})

    leaves = ("in_proj_qkv", "in_proj_z", "out_proj") if family == "qwen3_5" else ("q_proj", "k_proj", "o_proj")
    scales = [next(t for n, t in sent.items() if n.endswith(f"{leaf}.weight_global_scale")) for leaf in leaves]
    assert torch.equal(scales[0], scales[1]) and not torch.equal(scales[0], scales[2])
