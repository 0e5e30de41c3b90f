"""
`trl-quant export`: PEFT's own merge bit for bit, from 16-bit and prepared bases, UAQ undone, what is refused, and what
a killed run leaves.
"""

import json
import math
import signal
import sys
from pathlib import Path

import pytest
import torch
import warm
from copies import contents
from long_tests import rest_is_long
from peft import LoraConfig, PeftModel, get_peft_model
from readers import READERS, save_reader
from safetensors.torch import load_file, save_file
from tiny import FAMILIES, save_tiny, tiny_model, tiny_tokenizer
from training import config, dataset, lora, make
from transformers import AutoModelForCausalLM

from trl_quant import QuantGRPOConfig, QuantGRPOTrainer
from trl_quant.cli import main as command
from trl_quant.formats import FORMATS, global_scale, quantize
from trl_quant.scaling import apply_uaq, scalings
from trl_quant.storage.layout import dense, quantize_checkpoint
from trl_quant.storage.source import load_whole


BF16 = torch.bfloat16
ADAPTERS = {
    "plain": {},
    "rslora": {"use_rslora": True, "lora_alpha": 3},
    "patterns": {"rank_pattern": {"q_proj": 8, "layers.1.mlp.up_proj": 2}, "alpha_pattern": {"v_proj": 3}},
    "few": {"target_modules": ["q_proj", "down_proj"]},
    "whole modules": {"modules_to_save": ["lm_head", "input_layernorm"]},
}


def save_adapter(base: str, path: Path, scale: float = 1.0, **options) -> Path:
    """An adapter with random weights, B times `scale`, for a saved model."""
    model = load_whole(base, {}, dtype="auto")
    settings = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "init_lora_weights": False}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = get_peft_model(model, LoraConfig(**settings | options))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.mul_(scale)
                elif "modules_to_save" in name:
                    parameter.add_(1)
    model.save_pretrained(path)
    return path


def merged(base: str, adapter: Path) -> dict[str, torch.Tensor]:
    """PEFT's own merge, of the whole model in memory."""
    model = load_whole(base, {}, dtype="auto")
    return PeftModel.from_pretrained(model, adapter).merge_and_unload().state_dict()


def export(output: Path, *options) -> str:
    command(["export", "--output", str(output), *map(str, options)])
    return str(output)


def refusal(output: Path, *options) -> str:
    before = sorted(output.parent.iterdir())
    with pytest.raises(SystemExit) as error:
        export(output, *options)
    assert sorted(output.parent.iterdir()) == before
    return str(error.value)


def weights(checkpoint) -> dict[str, torch.Tensor]:
    return load_whole(checkpoint, {}, dtype="auto").state_dict()


def assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert not [name for name in ours if ours[name].dtype != theirs[name].dtype]
    assert not [name for name in ours if not torch.equal(ours[name], theirs[name])]


def logits(model) -> torch.Tensor:
    ids = torch.arange(48).view(2, 24)
    with torch.no_grad():
        return model(ids).logits.float()


# Merging


@pytest.mark.parametrize("dtype", rest_is_long([BF16, torch.float32]))
@pytest.mark.parametrize("adapter", rest_is_long(ADAPTERS, "plain", "rslora", "patterns"))
def test_equals_pefts_merge(adapter, dtype, tmp_path):
    base = save_tiny(tmp_path / "base", tied=False, dtype=dtype)
    path = save_adapter(base, tmp_path / "adapter", **ADAPTERS[adapter])
    exported = weights(export(tmp_path / "out", "--adapter", path))
    assert_equal(exported, merged(base, path))
    name = "model.layers.0.mlp.down_proj.weight"
    assert not torch.equal(exported[name], weights(base)[name])


@pytest.mark.parametrize("family", ["phi3", "gemma2"])
def test_families(family, tmp_path):
    base = save_tiny(tmp_path / "base", family)
    path = save_adapter(base, tmp_path / "adapter")
    assert_equal(weights(export(tmp_path / "out", "--adapter", path)), merged(base, path))


@pytest.mark.parametrize("family", rest_is_long(READERS, "gemma3"))
def test_models_that_read_images(family, tmp_path):
    """Text, tower and what joins them, whose tensors have other names on disk; also where the text is quantized."""
    base = save_reader(tmp_path / "base", family)
    path = save_adapter(base, tmp_path / "adapter", modules_to_save=["input_layernorm"])
    out = export(tmp_path / "out", "--adapter", path)
    assert_equal(weights(out), merged(base, path))
    before, after = (load_file(Path(saved) / "model.safetensors") for saved in (base, out))
    assert before.keys() == after.keys()
    moved = [name for name in before if not torch.equal(before[name], after[name])]
    for parts in (("layers.1", "down_proj.weight"), ("layers.1.input_layernorm",), ("vis", ".1.", "weight")):
        assert any(all(part in name for part in parts) for name in moved), parts

    command(["prepare", "--model", base, "--format", "int4", "--output", str(tmp_path / "int4")])
    rounded = export(tmp_path / "rounded", "--model", tmp_path / "int4")
    out = export(tmp_path / "from-int4", "--adapter", path, "--model", tmp_path / "int4")
    assert_equal(weights(out), merged(rounded, path))


@pytest.mark.parametrize(("dtype", "says"), [(torch.float32, "32 bits"), (BF16, "16 bits")])
def test_an_export_tells_the_size_of_its_weights(dtype, says, tmp_path, capsys):
    base = save_tiny(tmp_path / "base", dtype=dtype)
    out = export(tmp_path / "out", "--adapter", save_adapter(base, tmp_path / "adapter"))
    assert {weight.dtype for weight in weights(out).values()} == {dtype}
    assert f"format: {says}\n" in capsys.readouterr().out
    card = Path(out, "README.md").read_text()
    assert f"weights in {says}; by" in card and f"| format | {says} |" in card


def test_what_a_trainer_saved(tmp_path, capsys):
    """The run's directory or its newest checkpoint, with the run's tokenizer."""
    base = save_tiny(tmp_path / "base", tied=False)
    args = config(
        QuantGRPOConfig, tmp_path / "run", rollout_precision="int8", max_steps=2, save_strategy="steps", save_steps=1
    )
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template += "{# the run's own #}"
    trainer = make(
        QuantGRPOTrainer, args, model=base, peft_config=lora(), processing_class=tokenizer, train_dataset=dataset()
    )
    trainer.train()
    layer = trainer.model.get_submodule("base_model.model.model.layers.0.mlp.up_proj")
    expected = layer.get_base_layer().weight + layer.get_delta_weight("default")
    out = export(tmp_path / "out", "--adapter", tmp_path / "run")
    assert "adapter: `checkpoint-2`" in capsys.readouterr().out
    assert torch.equal(weights(out)["model.layers.0.mlp.up_proj.weight"], expected)
    assert "the run's own" in Path(out, "chat_template.jinja").read_text()


@pytest.mark.parametrize(("precision", "rounds"), [("nvfp4", True), ("int8", False)])
@pytest.mark.parametrize("trains", rest_is_long([True, False]))
def test_the_base_is_rounded_where_training_rounded_it_alone(precision, rounds, trains, tmp_path, capsys):
    """Also after `save_model` alone: Q(W) + BA on a frozen base, and W + BA where the sum was rounded."""
    base = save_tiny(tmp_path / "base", tied=False)
    kinds = {"save_strategy": "steps", "save_steps": 1} if trains else {}
    args = config(QuantGRPOConfig, tmp_path / "run", train_precision=precision, max_steps=1, **kinds)
    trainer = make(QuantGRPOTrainer, args, model=base, peft_config=lora())
    if trains:
        trainer.train()
    trainer.save_model()
    for adapter in [tmp_path / "run", *(tmp_path / "run").glob("checkpoint-*")]:
        out = export(tmp_path / f"from-{adapter.name}", "--adapter", adapter)
        assert (f"rounded to {precision}, as in training" in capsys.readouterr().out) == rounds
        if rounds:
            model = AutoModelForCausalLM.from_pretrained(out)
            assert torch.allclose(logits(model), logits(trainer.model.eval()), atol=1e-4)
        else:
            assert_equal(weights(out), merged(base, adapter))


@pytest.mark.parametrize("format", rest_is_long(["nvfp4", "int4", "int8"]))
def test_a_prepared_base(format, tmp_path):
    """Q(W) + BA, where an adapter that was trained on Q(W) belongs, in 16 bits."""
    base = save_tiny(tmp_path / "base", tied=False, dtype=BF16)
    prepared = quantize_checkpoint(base, tmp_path / "prepared", format)
    path = save_adapter(base, tmp_path / "adapter")
    out = weights(export(tmp_path / "out", "--adapter", path, "--model", prepared))
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())

    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    for block in model.model.layers:
        attention, mlp = block.self_attn, block.mlp
        qkv, pair = (attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)
        for fused in (qkv, (attention.o_proj,), pair, (mlp.down_proj,)):
            shared = {"global_scale": global_scale(*(x.weight for x in fused))} if FORMATS[format].shares_scale else {}
            for linear in fused:
                linear.weight.data = quantize(linear.weight, format, **shared).dequantize()
    assert_equal(out, PeftModel.from_pretrained(model, path).merge_and_unload().state_dict())
    assert torch.equal(out["lm_head.weight"], merged(base, path)["lm_head.weight"])
    assert not torch.equal(
        out["model.layers.0.mlp.up_proj.weight"], merged(base, path)["model.layers.0.mlp.up_proj.weight"]
    )
    same = export(tmp_path / "same", "--adapter", path, "--base_format", format)  # from 16 bits, rounded on the way
    assert_equal(weights(same), out)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_sum_has_the_type_in_which_the_run_loaded_the_policy(dtype, tmp_path):
    """As it was sampled: W + BA is rounded to 16 bits before INT8 only where the policy had 16 bits."""
    base = save_tiny(tmp_path / "base", tied=False, dtype=BF16)
    options = {"model_init_kwargs": {"dtype": dtype}, "rollout_precision": "int8", "max_steps": 2}
    args = config(QuantGRPOConfig, tmp_path / "run", learning_rate=1e-2, bf16=dtype == "bfloat16", **options)
    trainer = make(QuantGRPOTrainer, args, model=base, peft_config=lora())
    trainer.train()
    trainer.save_model()
    found = load_file(
        Path(export(tmp_path / "out", "--adapter", tmp_path / "run", "--format", "int8"), "model.safetensors")
    )
    summed = {}
    for name in ("bfloat16", "float32"):
        policy = AutoModelForCausalLM.from_pretrained(base, dtype=getattr(torch, name))
        PeftModel.from_pretrained(policy, tmp_path / "run").merge_and_unload().save_pretrained(tmp_path / name)
        summed[name] = load_file(
            Path(quantize_checkpoint(tmp_path / name, tmp_path / f"{name}-int8", "int8"), "model.safetensors")
        )
    codes = [name for name, tensor in found.items() if tensor.dtype == torch.int8]
    same = {name: all(torch.equal(found[code], tensors[code]) for code in codes) for name, tensors in summed.items()}
    assert len(codes) == 14 and same == {"bfloat16": dtype == "bfloat16", "float32": dtype == "float32"}
    trainer.vllm_generation.sync_weights()
    layers = dict(trainer.vllm_generation.engine.copy.named_modules())
    for code in codes:  # and they are the codes that the engine samples from
        held = layers[code.removesuffix(".weight")].weight
        assert torch.equal(held.values.float(), found[code].float()), code
        assert torch.equal(held.scale.flatten(), found[f"{code}_scale"].float().flatten()), code


@pytest.mark.parametrize("format", ["nvfp4", "int4", "int8"])
def test_a_quantized_export_is_what_was_sampled(format, tmp_path):
    """An FP32 policy on a 16-bit base is sampled as Q(W + BA), rounded once: the export holds these very values."""
    base = save_tiny(tmp_path / "base", tied=False, dtype=BF16)
    path = save_adapter(base, tmp_path / "adapter")
    out = Path(export(tmp_path / "out", "--adapter", path, "--format", format))
    wide = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    policy = PeftModel.from_pretrained(wide, path).merge_and_unload()
    policy.save_pretrained(tmp_path / "wide")
    sampled = load_file(Path(quantize_checkpoint(tmp_path / "wide", tmp_path / "sampled", format), "model.safetensors"))
    exported, layer = load_file(out / "model.safetensors"), "model.layers.0.mlp.up_proj.weight"
    assert exported.keys() == sampled.keys() and f"{layer}_scale" in exported
    for name, tensor in sampled.items():
        is_quantized = f"{name.partition('.weight')[0]}.weight_scale" in sampled
        assert torch.equal(exported[name], tensor if is_quantized else tensor.to(BF16)), name
    policy.to(BF16).save_pretrained(tmp_path / "narrow")  # rounded twice
    narrow = quantize_checkpoint(tmp_path / "narrow", tmp_path / "twice", format)
    twice, suffix = load_file(Path(narrow, "model.safetensors")), "" if format == "int8" else "_packed"
    assert not torch.equal(twice[f"{layer}{suffix}"], exported[f"{layer}{suffix}"])


@pytest.mark.parametrize(("scale", "arrives"), [(1e-3, False), (1.0, True)])
def test_four_bits_bury_a_small_adapter(scale, arrives, tmp_path, capsys, caplog):
    """The cosine that is printed is that of a computation in memory; in 16 bits the adapter arrives."""
    base = save_tiny(tmp_path / "base", dtype=BF16)
    path = save_adapter(base, tmp_path / "adapter", scale)
    out = export(tmp_path / "out", "--adapter", path, "--format", "nvfp4")
    printed = capsys.readouterr().out
    said = dict(line.split(": ", 1) for line in printed.splitlines())["merged"]
    assert said.replace("|", r"\|") in Path(out, "README.md").read_text()
    size, cosine = float(said.split()[2].rstrip(";")), float(said.split()[-1])

    before = load_file(f"{base}/model.safetensors")
    AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).save_pretrained(tmp_path / "base32")
    quantize_checkpoint(tmp_path / "base32", tmp_path / "plain", "nvfp4")
    wide = dense("nvfp4", torch.float32)
    plain, new = (wide(load_file(f"{d}/model.safetensors")) for d in (tmp_path / "plain", out))
    names = [name for name in before if "proj" in name]
    full = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), path)
    delta = torch.cat(
        [full.get_submodule(f"base_model.model.{n[:-7]}").get_delta_weight("default").flatten() for n in names]
    )
    change = torch.cat([(new[n].float() - plain[n].float()).flatten() for n in names])
    old = torch.cat([before[n].float().flatten() for n in names])
    assert size == pytest.approx((delta.norm() / old.norm()).item(), rel=1e-2)
    assert cosine == pytest.approx(torch.cosine_similarity(change, delta, dim=0).item(), abs=2e-3)
    assert (cosine > 0.9) is arrives and (cosine < 0.2) is not arrives
    assert ("Rounding erased" if not arrives else "can erase a small adapter") in caplog.text
    alone = "model.layers.1.self_attn.o_proj.weight"  # its scale is its own
    exact = before[alone].float() + full.get_submodule(f"base_model.model.{alone[:-7]}").get_delta_weight("default")
    assert torch.equal(new[alone], quantize(exact, "nvfp4").dequantize())

    caplog.clear()
    base = save_tiny(tmp_path / "wide")
    export(tmp_path / "float32", "--adapter", path, "--model", base)
    assert float(capsys.readouterr().out.split("with BA = ")[1].split()[0]) > 0.999 and not caplog.text


# UAQ


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_scalings_are_apply_uaq(family, dtype):
    model, by_name = tiny_model(family, dtype=dtype), tiny_model(family, dtype=dtype)
    apply_uaq(model, 1.5)
    undo = scalings(by_name.config.model_type, [name for name, _ in by_name.named_parameters()], 1.5)
    changed = [
        name
        for name, p in tiny_model(family, dtype=dtype).named_parameters()
        if not torch.equal(p, model.get_parameter(name))
    ]
    assert sorted(undo) == sorted(changed)
    for name, parameter in by_name.named_parameters():
        assert torch.equal(undo[name](parameter.data) if name in undo else parameter, model.get_parameter(name))


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_uaq_is_undone(family, tmp_path):
    """The function is that of the scaled model, and the parameters those of the unscaled one."""
    original, scaled = tiny_model(family), tiny_model(family)
    apply_uaq(scaled, 1.5)
    scaled.save_pretrained(tmp_path / "scaled")
    tiny_tokenizer().save_pretrained(tmp_path / "scaled")
    out = AutoModelForCausalLM.from_pretrained(export(tmp_path / "out", "--adapter", tmp_path / "scaled")).eval()
    assert "uaq_scale" not in json.loads((tmp_path / "out/config.json").read_text())
    torch.testing.assert_close(logits(out), logits(scaled), rtol=1e-4, atol=1e-4)
    for name, parameter in out.named_parameters():
        torch.testing.assert_close(parameter, original.get_parameter(name), rtol=1e-5, atol=1e-6)
    norm = "model.layers.0.input_layernorm.weight"
    assert not torch.allclose(out.get_parameter(norm), scaled.get_parameter(norm), rtol=1e-2)
    again = export(tmp_path / "again", "--model", tmp_path / "scaled")
    assert contents(Path(again))["model.safetensors"] == contents(tmp_path / "out")["model.safetensors"]
    text = refusal(tmp_path / "third", "--model", tmp_path / "out")
    assert "`--model`" in text and "needs no export: it has neither `uaq_scale` nor quantized weights" in text
    assert "prepare" not in text
    text = refusal(tmp_path / "third", "--adapter", tmp_path / "out", "--format", "int8")
    assert "`--adapter`" in text and f"`trl-quant prepare --model {tmp_path / 'out'} --format int8`" in text


def test_an_adapter_of_a_scaled_base(tmp_path):
    """Merged, then unscaled: the function of the adapted scaled model."""
    scaled = tiny_model()
    apply_uaq(scaled, 1.5)
    scaled.save_pretrained(tmp_path / "scaled")
    path = save_adapter(str(tmp_path / "scaled"), tmp_path / "adapter")
    out = AutoModelForCausalLM.from_pretrained(export(tmp_path / "out", "--adapter", path)).eval()
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "scaled"), path).eval()
    torch.testing.assert_close(logits(out), logits(adapted), rtol=1e-3, atol=1e-3)
    card = (tmp_path / "out/README.md").read_text()
    assert "| UAQ | scale 1.5, undone |" in card
    cosine = float(card.split("with BA = ")[1].split()[0])
    assert cosine == pytest.approx(1, abs=1e-3)


# Refusals


def broken(path: Path, **fields) -> Path:
    file = path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return path


def test_what_is_refused(tmp_path):
    base = save_tiny(tmp_path / "base", tied=False)
    out, adapter = tmp_path / "out", save_adapter(base, tmp_path / "adapter")
    assert "give the directory of a run" in refusal(out)
    assert "is not a directory" in refusal(out, "--adapter", tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "has no adapter_config.json" in refusal(out, "--adapter", tmp_path / "empty")
    assert "which has no base" in refusal(out, "--adapter", base, "--model", base)
    assert "base exists" in refusal(Path(base), "--adapter", adapter)
    for fields, says in (
        ({"use_dora": True}, "`use_dora`=True"),
        ({"fan_in_fan_out": True}, "`fan_in_fan_out`=True"),
        ({"init_lora_weights": "pissa"}, "`init_lora_weights`='pissa' changed the base"),
        ({"peft_type": "IA3"}, "only LoRA can be exported"),
        ({"base_model_name_or_path": None}, "does not name its base"),
        ({"r": 8}, "lora_A of model.layers.0.self_attn.q_proj has shape (4, 128), and (8, 128) is needed"),
        ({"target_modules": ["nothing"]}, "does not fit the base Qwen3ForCausalLM"),
    ):
        before = (adapter / "adapter_config.json").read_text()
        assert says in refusal(out, "--adapter", broken(adapter, **fields)), says
        (adapter / "adapter_config.json").write_text(before)
    small = save_tiny(tmp_path / "small", tied=False, intermediate_size=128)
    assert "does not fit the base" in refusal(out, "--adapter", adapter, "--model", small)
    prepared = quantize_checkpoint(base, tmp_path / "int8", "int8")
    assert "leave it out here" in refusal(out, "--adapter", adapter, "--model", prepared, "--base_format", "nvfp4")
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file({n: t for n, t in tensors.items() if "layers.1.mlp.up_proj.lora_B" not in n}, file)
    assert "lora_B of model.layers.1.mlp.up_proj is missing" in refusal(out, "--adapter", adapter)
    file.unlink()
    assert "neither adapter_model.safetensors nor" in refusal(out, "--adapter", adapter)


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "qwen2_5_vl"])
def test_shared_heads_are_refused(family, tmp_path):
    """Of Qwen2.5-VL, the outer config alone says that they are shared."""
    base = save_reader(tmp_path / "base", family) if family in READERS else save_tiny(tmp_path / "base", tied=True)
    if family == "qwen2_5_vl":
        config, weights = Path(base, "config.json"), Path(base, "model.safetensors")
        config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": True}))
        save_file({n: w for n, w in load_file(weights).items() if n != "lm_head.weight"}, weights, {"format": "pt"})
    path = save_adapter(base, tmp_path / "adapter", modules_to_save=["embed_tokens"])
    assert "embed_tokens.weight, which the base shares between" in refusal(tmp_path / "out", "--adapter", path)


# Killed runs


KILLED = """
import os, signal, sys
from trl_quant.cli import main
from trl_quant.storage.adapter import Adapter
from trl_quant.storage import files

files.SHARD_BYTES = 100_000
whole, seen = Adapter.delta, []

def delta(self, name):
    seen.append(name)
    if len(seen) == 9:
        os.kill(os.getpid(), signal.SIGKILL)
    return whole(self, name)

if sys.argv[1] == "kill":
    Adapter.delta = delta
main(sys.argv[2:])
"""


@pytest.mark.parametrize("format", rest_is_long(["nvfp4", "none"]))
def test_a_killed_export_goes_on(format, tmp_path):
    base = save_tiny(tmp_path / "base", dtype=BF16)
    path = save_adapter(base, tmp_path / "adapter")

    def run(how: str, output: Path) -> int:
        argv = ["export", "--adapter", str(path), "--format", format, "--output", str(output)]
        return warm.run([sys.executable, "-c", KILLED, how, *argv]).returncode

    target, whole = tmp_path / "a/policy", tmp_path / "b/policy"
    assert run("finish", whole) == 0
    assert run("kill", target) == -signal.SIGKILL
    kept = {file.name: file.stat().st_mtime_ns for file in (tmp_path / "a/.policy.part").rglob("*.safetensors")}
    assert kept and not target.exists()
    assert run("finish", target) == 0
    assert {name: (target / name).stat().st_mtime_ns for name in kept} == kept
    assert contents(target) == contents(whole)
    assert [file.name for file in target.parent.iterdir()] == ["policy"]
    assert not math.isnan(float((target / "README.md").read_text().split("with BA = ")[1].split()[0]))


# What changes nothing, what is not finite, and what leads elsewhere


def test_an_adapter_that_was_not_trained_is_told(tmp_path, capsys, caplog):
    """Its B is 0, so that no cosine says anything; the result is the base."""
    base = save_tiny(tmp_path / "base", tied=False, dtype=BF16)
    path = save_adapter(base, tmp_path / "adapter", scale=0.0)
    exported = weights(export(tmp_path / "out", "--adapter", path))
    assert_equal(exported, weights(base))
    said = capsys.readouterr().out
    assert "merged: nothing, since BA is 0 in every layer" in said and "nan" not in said + caplog.text
    assert "changes no layer: BA is 0 in all of them" in caplog.text
    assert "nan" not in Path(tmp_path / "out/README.md").read_text().partition("versions")[0]


def test_an_adapter_of_which_rounding_leaves_nothing_is_told(tmp_path, capsys, caplog):
    base = save_tiny(tmp_path / "base", tied=False, dtype=BF16)
    path = save_adapter(base, tmp_path / "adapter", scale=1e-9)
    export(tmp_path / "out", "--adapter", path)
    said = capsys.readouterr().out
    assert "rounding left nothing of BA in the checkpoint" in said and "cosine" not in said
    assert "Rounding erased most of the adapter" in caplog.text and "nan" not in caplog.text


@pytest.mark.parametrize("where", ["norm", "adapter", "head"])
@pytest.mark.parametrize("format", ["none", "int8"])
def test_a_policy_that_is_not_finite_is_not_exported(where, format, tmp_path):
    base = save_tiny(tmp_path / "base", tied=False)
    path = save_adapter(base, tmp_path / "adapter")
    file, name = Path(base) / "model.safetensors", {"norm": "model.norm.weight", "head": "lm_head.weight"}.get(where)
    if where == "adapter":
        file = path / "adapter_model.safetensors"
        name = next(name for name in load_file(file) if "down_proj.lora_B" in name)
    tensors = load_file(file)
    tensors[name].view(-1)[1] = math.nan
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(SystemExit, match=r"down_proj|norm|lm_head") as error:
        export(tmp_path / "out", "--adapter", path, "--format", format)
    assert "holds NaN or infinity" in str(error.value) and not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja", "adapter_config.json"])
def test_links_out_of_a_run_are_refused(name, tmp_path):
    base = save_tiny(tmp_path / "base", tied=False)
    path = save_adapter(base, tmp_path / "adapter")
    secret = tmp_path / "secret"
    secret.write_text('{"token": "mine"}')
    (path / name).unlink(missing_ok=True)
    (path / name).symlink_to(secret)
    said = refusal(tmp_path / "out", "--adapter", path)
    assert f"{path / name} is a link to {secret}, outside of the checkpoint" in said


def test_a_base_whose_index_leads_elsewhere_is_refused(tmp_path):
    base = Path(save_tiny(tmp_path / "base", tied=False))
    path = save_adapter(str(base), tmp_path / "adapter")
    names = dict.fromkeys(load_file(base / "model.safetensors"), "model.safetensors")
    index = {"metadata": {}, "weight_map": names | {"secret": "../other/model.safetensors"}}
    (base / "model.safetensors.index.json").write_text(json.dumps(index))
    said = refusal(tmp_path / "out", "--adapter", path)
    assert "names '../other/model.safetensors'. It may only name .safetensors files of its own directory" in said
