"""Mixtures of experts on disk: `trl-quant prepare` and `export` write what the embedded engine multiplies with."""

import importlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from embedded import engine
from long_tests import rest_is_long
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tiny import MIXTURES, tiny_model, tiny_tokenizer
from torch import nn
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from trl_quant.cli import main as command
from trl_quant.formats import FORMATS, quantize
from trl_quant.models.families import HEAD, ROUTER, ROUTERS
from trl_quant.scaling import apply_uaq
from trl_quant.storage.experts import NamesOnDisk
from trl_quant.storage.layout import checkpoint_stream, quantize_checkpoint, storable
from trl_quant.storage.perplexity import become_quantized


STORED = [format for format in storable() if format != "fp8_tensor"]
READ_BY_TRANSFORMERS = ["fp8", "int4", "mxfp4"]
IDS = torch.randint(0, 256, (1, 24), generator=torch.Generator().manual_seed(0))
# Names on disk of an expert's gate, up and down
LEAVES = dict.fromkeys(MIXTURES, ("mlp", "gate_proj", "up_proj", "down_proj"))
LEAVES["mixtral"] = ("block_sparse_moe", "w1", "w3", "w2")


def mixture(family: str, seed: int = 0, **settings):
    """Experts, gates and ups that differ in size, so that a scale that is shared wrongly shows."""
    model = tiny_model(family, tied=False, dtype=torch.bfloat16, seed=seed, **settings)
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            module.gate_up_proj.data *= 2.0 ** torch.arange(-2, 2)[:, None, None]
            module.gate_up_proj.data[:, : module.gate_up_proj.shape[1] // 2] *= 3
            module.down_proj.data *= 2.0 ** torch.arange(2, -2, -1)[:, None, None]
    return model


def saved(path: Path, model) -> str:
    model.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return str(path)


def prepared(tmp_path: Path, model, format: str) -> Path:
    source = saved(tmp_path / "bf16", model)
    command(["prepare", "--model", source, "--format", format, "--output", str(tmp_path / format)])
    return tmp_path / format


def refusal(*arguments) -> str:
    with pytest.raises(SystemExit) as error:
        command([str(argument) for argument in arguments])
    return str(error.value)


class Compressed(nn.Module):
    """The tensors of one matrix in a checkpoint, for compressed-tensors to read."""

    def __init__(self, weights: dict, name: str, scheme: QuantizationScheme):
        super().__init__()
        self.quantization_scheme = scheme
        for key, tensor in weights.items():
            if key.startswith(f"{name}.weight"):
                leaf = key.removeprefix(f"{name}.")
                self.register_parameter(leaf, nn.Parameter(tensor, requires_grad=False))


def read_by_compressed_tensors(path: Path, name: str) -> torch.Tensor:
    """The matrix (out, in) called `name` in a checkpoint, in BF16."""
    config = json.loads((path / "config.json").read_text())["quantization_config"]
    scheme = QuantizationScheme.model_validate(config["config_groups"]["group_0"])
    module = Compressed(load_file(path / "model.safetensors"), name, scheme)
    BaseCompressor.get_value_from_registry(config["format"]).decompress_module(module)
    return module.weight.data.bfloat16()


def multiplied(copy, place: str) -> torch.Tensor:
    """The matrices (experts, out, in) that an embedded engine multiplies with, rounded once to BF16."""
    weight = copy.copy.get_submodule(place).weight
    values = weight.values.float()
    return (values if weight.scale is None else values * weight.scale[..., None]).bfloat16()


@pytest.mark.parametrize("format", STORED)
@pytest.mark.parametrize("family", rest_is_long(MIXTURES, "qwen2_moe", "glm4_moe"))
def test_each_stored_expert_is_what_the_embedded_engine_multiplies_with(family, format, tmp_path):
    model = mixture(family)
    path = prepared(tmp_path, model, format)
    copy = engine(model, format)
    copy.sync()
    block, *leaves = LEAVES[family]
    layers = [layer for layer in (0, 1) if family != "glm4_moe" or layer]  # GLM-4's first is dense
    for layer in layers:
        gate_up, down = (
            multiplied(copy, f"model.layers.{layer}.mlp.experts.{leaf}") for leaf in ("gate_up_proj", "down_proj")
        )
        expected = [*gate_up.chunk(2, dim=1), down]
        for leaf, matrices in zip(leaves, expected, strict=True):
            for expert, matrix in enumerate(matrices):
                name = f"model.layers.{layer}.{block}.experts.{expert}.{leaf}"
                read = read_by_compressed_tensors(path, name)
                assert torch.equal(read, matrix), name
                assert not torch.equal(read, matrices[expert - 1])  # another expert's
    names = load_file(path / "model.safetensors")
    original = load_file(tmp_path / "bf16/model.safetensors")
    routers = [name for name in original if ROUTER.fullmatch(name)]
    assert len(routers) == len(layers) * (2 if family == "qwen2_moe" else 1)
    assert all(torch.equal(names[name], original[name]) for name in routers)
    ignore = json.loads((path / "config.json").read_text())["quantization_config"]["ignore"]
    assert {"lm_head", *(name.removesuffix(".weight") for name in routers)} == set(ignore)


@pytest.mark.parametrize("format", READ_BY_TRANSFORMERS)
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_transformers_reads_them(family, format, tmp_path):
    path = prepared(tmp_path, mixture(family), format)
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "bf16", dtype=torch.bfloat16)
    become_quantized(ours, path, format)
    config = CompressedTensorsConfig(dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, quantization_config=config)
    for layer in (0, 1):
        for leaf in ("gate_up_proj", "down_proj"):
            place = f"model.layers.{layer}.mlp.experts.{leaf}"
            read, held = theirs.get_parameter(place).data, ours.get_parameter(place).data
            assert torch.equal(read, held) and not torch.equal(read, held.roll(1, 0))


@pytest.mark.parametrize("format", ["int8", "fp8_block", "nvfp4"])
def test_transformers_does_not_read_these_right(format, tmp_path):
    """As docs/mixtures.md says: the stored experts are right, by the test above."""
    path = prepared(tmp_path, mixture("mixtral"), format)
    given = {"dtype": torch.bfloat16, "quantization_config": CompressedTensorsConfig(dequantize=True)}
    if format != "nvfp4":
        with pytest.raises(RuntimeError, match="automatic conversion of the weights"):
            AutoModelForCausalLM.from_pretrained(path, **given)
        return
    theirs = AutoModelForCausalLM.from_pretrained(path, **given)
    place = "block_sparse_moe.experts.2.w2"
    right = read_by_compressed_tensors(path, f"model.layers.1.{place}")
    wrong = theirs.get_parameter("model.layers.1.mlp.experts.down_proj")[2]
    assert wrong.shape == right.shape and (wrong - right).norm() > right.norm()


@pytest.mark.parametrize("format", ["int8", "fp8_block", "mxfp4"])
def test_perplexity_is_that_of_the_embedded_engine(format, tmp_path):
    """`--perplexity` computes with the stored experts, on inputs of the format."""
    model = mixture("qwen3_moe").float()
    path = prepared(tmp_path, model, format)
    measured = mixture("qwen3_moe", seed=1).float()  # all weights come from the file
    become_quantized(measured, path, format)
    copy = engine(model, format)
    copy.sync()
    with torch.no_grad():
        logps, expected, unquantized = (m(IDS).logits.float().log_softmax(-1) for m in (measured, copy.copy, model))
    # Sums in another order may move a code of an input, and a token to another expert: hence the median
    assert (logps - expected).abs().median() < 1e-3 < 0.05 * (unquantized - expected).abs().median()


def test_prepare_measures_a_mixture(tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("some words to measure\n" * 40)
    source = saved(tmp_path / "bf16", mixture("mixtral"))
    options = ["--perplexity", str(text), "--perplexity_samples", "1", "--calibration_length", "32"]
    command(["prepare", "--model", source, "--format", "int4", "--output", str(tmp_path / "int4"), *options])
    said = capsys.readouterr().out
    assert "perplexity: " in said and "32 of 35 linear layers in int4" in said


# What is refused


def test_a_precision_that_no_loader_multiplies_with(tmp_path):
    source = saved(tmp_path / "bf16", mixture("qwen3_moe"))
    text = refusal("prepare", "--model", source, "--format", "fp8_tensor", "--output", tmp_path / "out")
    assert "experts.0.down_proj.weight: 'fp8_tensor' stores no experts, because vLLM has no kernel" in text
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))


@pytest.mark.parametrize("format, width", [("fp8_block", 96), ("int4", 96), ("nvfp4", 40), ("mxfp4", 48)])
def test_widths_that_do_not_fill_groups(format, width, tmp_path):
    source = saved(tmp_path / "bf16", mixture("qwen3_moe", moe_intermediate_size=width))
    text = refusal("prepare", "--model", source, "--format", format, "--output", tmp_path / "out")
    if format == "fp8_block":
        assert f"gate_proj.weight: an expert's gate and up of {width} rows each are one matrix in an engine" in text
    else:
        assert f"down_proj.weight: {width} inputs, but {format!r} is stored for multiples of" in text
    assert not list(tmp_path.glob(".out*"))


def test_calibration(tmp_path):
    source = saved(tmp_path / "bf16", mixture("qwen3_moe"))
    (tmp_path / "text.txt").write_text("some words\n")
    awq = ["--awq", "--calibration", tmp_path / "text.txt"]
    text = refusal("prepare", "--model", source, "--format", "int4", "--output", tmp_path / "out", *awq)
    assert "`--awq` scales linear layers, and not the experts of a mixture" in text


def test_experts_in_one_tensor_or_of_another_family(tmp_path):
    """Left as they are they would be experts in 16 bits in a checkpoint that says otherwise."""
    saved(tmp_path / "bf16", mixture("qwen3_moe"))
    weights = load_file(tmp_path / "bf16/model.safetensors")
    config = json.loads((tmp_path / "bf16/config.json").read_text())
    joined = {name: tensor for name, tensor in weights.items() if ".experts." not in name}
    joined["model.layers.0.mlp.experts.gate_up_proj"] = torch.ones(4, 256, 128)
    save_file(joined, tmp_path / "bf16/model.safetensors")
    for family in ("qwen3_moe", "deepseek_v3"):
        (tmp_path / "bf16/config.json").write_text(json.dumps(config | {"model_type": family}))
        with pytest.raises(ValueError, match=r"belongs to a mixture of experts, and only those of qwen2_moe, .* can"):
            quantize_checkpoint(tmp_path / "bf16", tmp_path / "int8", "int8")
        save_file(weights, tmp_path / "bf16/model.safetensors")


# Export


@pytest.mark.parametrize("family", ["qwen2_moe", "mixtral"])
def test_an_adapter_is_merged_and_experts_are_quantized(family, tmp_path):
    source = saved(tmp_path / "bf16", mixture(family))
    config = LoraConfig(r=4, target_modules=["q_proj", "o_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16), config)
    adapted.save_pretrained(tmp_path / "run")
    options = ["--adapter", str(tmp_path / "run"), "--model", source, "--output"]
    command(["export", *options, str(tmp_path / "int8"), "--format", "int8"])
    command(["export", *options, str(tmp_path / "whole")])
    exported, whole, base = (load_file(tmp_path / x / "model.safetensors") for x in ("int8", "whole", "bf16"))
    experts = [name for name in whole if ".experts." in name]
    for name in experts:  # in 32 bits, as no run has recorded another type
        q = quantize(whole[name].float(), "int8")
        assert torch.equal(exported[name], q.values) and torch.equal(exported[f"{name}_scale"], q.scale)
    query = "model.layers.1.self_attn.q_proj"
    sum_ = adapted.merge_and_unload().get_submodule(query).weight.data
    assert torch.equal(whole[f"{query}.weight"], sum_)
    assert not torch.equal(whole[f"{query}.weight"], base[f"{query}.weight"])
    assert len(experts) >= 12 and all(torch.equal(whole[name], base[name]) for name in experts)


@pytest.mark.parametrize("targets", ["experts", "all-linear"])
@pytest.mark.parametrize("family", MIXTURES)
def test_an_adapter_of_experts_is_merged(family, targets, tmp_path):
    """As PEFT merges it, in 32 bits; and quantized, it is the quantized sum. Each expert has its own."""
    model = mixture(family).float()
    source = saved(tmp_path / "base", model)
    given = {"target_modules": targets}
    if targets == "experts":
        given = {"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
    torch.manual_seed(0)
    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=12, init_lora_weights=False, **given))
    adapted.save_pretrained(tmp_path / "run")
    options = ["--adapter", str(tmp_path / "run"), "--model", source, "--output"]
    command(["export", *options, str(tmp_path / "whole")])
    command(["export", *options, str(tmp_path / "int8"), "--format", "int8"])
    saved(tmp_path / "merged", adapted.merge_and_unload())
    base, whole, merged, int8 = (
        load_file(tmp_path / x / "model.safetensors") for x in ("base", "whole", "merged", "int8")
    )
    assert whole.keys() == merged.keys()
    for name in merged:
        torch.testing.assert_close(whole[name], merged[name], rtol=1e-5, atol=1e-6)
    moved = {name for name in whole if (whole[name] - base[name]).abs().max() > 1e-3}
    experts = {name for name in whole if ".experts." in name}
    if targets == "experts":
        assert moved == experts
    else:
        routers = {name for name in whole if ROUTER.fullmatch(name)}
        assert family == "qwen2_moe" or experts | routers <= moved  # PEFT leaves out Qwen2's
    for name in experts:
        q = quantize(whole[name], "int8")
        assert torch.equal(int8[name], q.values) and torch.equal(int8[f"{name}_scale"], q.scale)
        other = name.replace(".experts.0.", ".experts.1.")
        if name != other and name in moved:
            changes = [whole[x] - base[x] for x in (name, other)]
            assert (changes[0] - changes[1]).norm() > 0.5 * changes[0].norm()


@pytest.mark.parametrize("family", MIXTURES)
def test_uaq_is_undone_for_experts_and_routers(family, tmp_path):
    """By a scale that is a power of two, so that nothing is rounded."""
    model = mixture(family)
    saved(tmp_path / "bf16", model)
    apply_uaq(model, 4.0)
    saved(tmp_path / "scaled", model)
    command(["export", "--model", str(tmp_path / "scaled"), "--output", str(tmp_path / "policy")])
    original, scaled, exported = (load_file(tmp_path / x / "model.safetensors") for x in ("bf16", "scaled", "policy"))
    assert original.keys() == exported.keys() and all(torch.equal(original[n], exported[n]) for n in original)
    moved = {name for name in original if not torch.equal(original[name], scaled[name])}
    block, gate, up, _ = LEAVES[family]
    fed = {f"model.layers.1.{block}.experts.3.{leaf}.weight" for leaf in (gate, up)}
    assert {*fed, f"model.layers.1.{block}.gate.weight"} <= moved


# vLLM


@pytest.mark.vllm
@pytest.mark.parametrize("format", STORED)
def test_vllm_asks_for_these_names_shapes_and_types(format, tmp_path, monkeypatch):
    """What vLLM's loader of experts makes room for, without the kernel, which a CPU has for none of them."""
    pytest.importorskip("vllm")
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors, compressed_tensors_moe

    chosen = {
        "w8a8_fp8": ("select_fp8_moe_backend", "validate_fp8_block_shape_moe"),
        "w8a8_int8": ("select_int8_moe_backend",),
        "w4a4_nvfp4": ("select_nvfp4_moe_backend", "is_global_sf_supported_for_nvfp4_backend"),
        "wna16": ("select_wna16_moe_backend",),
    }
    for file, names in chosen.items():
        module = importlib.import_module(f"{compressed_tensors_moe.__name__}.compressed_tensors_moe_{file}")
        for name in names:
            monkeypatch.setattr(module, name, lambda *_, **__: (None, None), raising=False)  # 0.27 has not all of them
        monkeypatch.setattr(
            module, "get_tensor_model_parallel_world_size", lambda: 1, raising=False
        )  # 0.27 asks for it
    path = prepared(tmp_path, mixture("mixtral", intermediate_size=256), format)
    config = json.loads((path / "config.json").read_text())["quantization_config"]
    layer = type("RoutedExperts", (nn.Module,), {})()  # vLLM finds the scheme by this name
    layer.moe_config = SimpleNamespace(is_act_and_mul=True, w13_num_shards=2, has_bias=False, moe_backend="auto")
    layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name = "w1", "w3", "w2"
    with set_current_vllm_config(VllmConfig()):
        method = compressed_tensors_moe.CompressedTensorsMoEMethod.get_moe_method(
            compressed_tensors.CompressedTensorsConfig.from_config(config), layer, "model.layers.1.mlp.experts"
        )
        sizes = {"num_experts": 4, "hidden_size": 128, "intermediate_size_per_partition": 256}
        sizes |= {"intermediate_size_full": 256} if format == "int4" else {}  # 0.27 asks for it
        method.create_weights(layer, **sizes, params_dtype=torch.bfloat16)
    stored, place = load_file(path / "model.safetensors"), "model.layers.1.block_sparse_moe.experts"
    found = set()
    for name, held in layer.named_parameters():
        joined, _, suffix = name.partition("_weight")
        if "input_global_scale" in name or "g_idx" in name:
            continue  # not read: inputs stay in 16 bits, and 0.27's order of columns is the stored one
        leaves = ("w1", "w3") if joined == "w13" else ("w2",)
        keys = {leaf: f"{place}.{{}}.{leaf}.weight{suffix}" for leaf in leaves}
        found |= {key.format(expert) for key in keys.values() for expert in range(4)}
        for expert in range(4):
            parts = [stored[key.format(expert)] for key in keys.values()]
            whole = torch.cat(parts) if suffix != "_shape" else parts[0]
            room = held[expert].T if getattr(held, "is_transposed", False) else held[expert]  # in 0.27
            assert whole.numel() == room.numel() and whole.shape[-1:] in (room.shape[-1:], (1,)), name
            if suffix in ("", "_packed"):  # scales are converted
                assert whole.dtype == room.dtype and whole.shape == room.shape
    assert found == {name for name in stored if name.startswith(f"{place}.")}


IN_VLLM = [format for format in STORED if format != "int4"]


@pytest.mark.parametrize("format", IN_VLLM)
@pytest.mark.parametrize("family", MIXTURES)
def test_experts_quantized_whole_are_those_quantized_one_by_one(family, format):
    """Codes and scales of each expert, bit for bit, under the same names and in the same order of experts."""
    model, given = mixture(family), {"format": format, "ignore": [*HEAD, ROUTERS]}
    names, weights = NamesOnDisk(model), [(name, param.data) for name, param in model.named_parameters()]
    singly = dict(checkpoint_stream(names.stream(weights), **given))
    whole = list(checkpoint_stream(weights, **given))
    split = dict(names.stream(whole))
    assert split.keys() == singly.keys() and len(whole) < len(split)
    assert all(same_bits(split[name], tensor) for name, tensor in singly.items())
    scales = [tensor for name, tensor in split.items() if ".experts.2." in name and name.endswith(".weight_scale")]
    assert len(scales) % 3 == 0 and not same_bits(*scales[:2])
    if FORMATS[format].shares_scale:  # an expert's gate and up share a scale, which is not that of either alone
        place, gate, up, _ = LEAVES[family]
        shared = {leaf: split[f"model.layers.1.{place}.experts.2.{leaf}.weight_global_scale"] for leaf in (gate, up)}
        assert torch.equal(shared[gate], shared[up])
        up_alone = model.model.layers[1].mlp.experts.gate_up_proj[2].data.chunk(2)[1]
        assert not torch.equal(shared[up], quantize(up_alone, format).global_scale)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(*(x.view(torch.uint8) if x.itemsize == 1 else x for x in (a, b)))


def test_whole_experts_that_cannot_be_stored_are_refused():
    name, experts = "model.layers.0.mlp.experts.gate_up_proj", torch.ones(2, 384, 128)
    for format, message in {"fp8_tensor": "stores no experts", "fp8_block": "gate and up of 192 rows each"}.items():
        with pytest.raises(ValueError, match=f"{name}: .*{message}"):
            dict(checkpoint_stream([(name, experts)], format))
    with pytest.raises(ValueError, match=f"{name}: x: holds NaN"):
        dict(checkpoint_stream([(name, experts * float("nan"))], "int8"))
    assert dict(checkpoint_stream([("a.experts.bias", experts)], "int8"))["a.experts.bias"] is experts
