"""A policy on a frozen 4-bit base: it loads what an engine loads, and policy and sampler are the same numbers."""

import copy
import shutil
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from long_tests import rest_is_long
from peft import LNTuningConfig, LoHaConfig, PeftModel, get_peft_model
from tiny import FAMILIES, save_tiny, tiny_model
from torch import nn
from training import assert_same_run, config, lora, make, metrics, parameters
from transformers import AutoModelForCausalLM

from trl_quant import QuantGRPOConfig, QuantGRPOTrainer
from trl_quant.formats import global_scale
from trl_quant.layers import FrozenLinear
from trl_quant.models.linears import fused_with
from trl_quant.policy.frozen import FrozenBaseConfig, Packer, freeze
from trl_quant.precisions import bitsandbytes_bases, frozen_bases, train_precisions
from trl_quant.rollout.verify.self_check import EngineLayer, Reference, mean_difference, policy_logps
from trl_quant.rollout.weights import PolicyWeights
from trl_quant.storage.layout import checkpoint_stream, quantize_checkpoint


pytestmark = pytest.mark.isa

PRECISIONS = [name for name in frozen_bases() if name not in bitsandbytes_bases()]


def load(path, precision, **options):
    return AutoModelForCausalLM.from_pretrained(path, quantization_config=FrozenBaseConfig(precision, **options))


def stored(model, precision) -> dict[str, torch.Tensor]:
    """What a checkpoint of a 16- or 32-bit model holds in this precision, by name."""
    return dict(checkpoint_stream(model.named_parameters(), precision))


def assert_holds(model, expected) -> None:
    found = dict(model.named_parameters())
    assert found.keys() == expected.keys()
    different = [name for name, tensor in expected.items() if not torch.equal(found[name].data, tensor.data)]
    assert not different


# Loading


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_16_bit_checkpoint_is_packed_as_engines_pack_it(tmp_path, family, precision):
    path = save_tiny(tmp_path, family, tied=False, dtype=torch.bfloat16)
    expected = stored(tiny_model(family, tied=False, dtype=torch.bfloat16), precision)
    assert_holds(load(path, precision).to(torch.bfloat16), expected)


def test_fused_layers_share_a_scale(tmp_path):
    layer = load(save_tiny(tmp_path, dtype=torch.bfloat16), "nvfp4").model.layers[0]
    attention, mlp = layer.self_attn, layer.mlp
    scales = [x.weight_global_scale.item() for x in (attention.q_proj, attention.k_proj, attention.v_proj)]
    assert len(set(scales)) == 1
    assert mlp.gate_proj.weight_global_scale == mlp.up_proj.weight_global_scale
    own = tiny_model(dtype=torch.bfloat16).model.layers[0].self_attn
    alone = [FrozenLinear.from_linear(x, "nvfp4").weight_global_scale for x in (own.q_proj, own.k_proj, own.v_proj)]
    assert len({scale.item() for scale in alone}) > 1


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_prepared_checkpoint_is_taken_as_it_is(tmp_path, precision):
    source = save_tiny(tmp_path / "wide", tied=False, dtype=torch.bfloat16)
    target = quantize_checkpoint(source, tmp_path / "packed", precision)
    args = config(QuantGRPOConfig, tmp_path / "run", train_precision=precision)
    trainer = make(QuantGRPOTrainer, args, model=str(target), peft_config=lora())
    base, expected = trainer.model.get_base_model(), stored(tiny_model(tied=False, dtype=torch.bfloat16), precision)
    found = {name.replace(".base_layer", ""): p for name, p in base.named_parameters() if ".lora_" not in name}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name].data.to(tensor.dtype), tensor.data) for name, tensor in expected.items())
    with pytest.raises(ValueError, match=f"`train_precision`='{other(precision)}', but the model is a checkpoint"):
        args = config(QuantGRPOConfig, tmp_path / "run", train_precision=other(precision))
        make(QuantGRPOTrainer, args, model=str(target), peft_config=lora())


def other(precision: str) -> str:
    return next(name for name in PRECISIONS if name != precision)


@pytest.mark.parametrize("adapted", [False, True])
def test_a_loaded_model_is_packed_in_place(adapted):
    model, expected = tiny_model(tied=False), stored(tiny_model(tied=False).bfloat16(), "nvfp4")
    wide = {name: param.clone() for name, param in model.named_parameters()}
    if adapted:
        model = get_peft_model(model, lora())
    freeze(model, "nvfp4")
    base = model.get_base_model() if adapted else model
    found = {name.replace(".base_layer", ""): p for name, p in base.named_parameters() if ".lora_" not in name}
    for name, tensor in expected.items():
        packed = name.endswith(("_packed", "_scale"))
        assert torch.equal(found[name].data, tensor.data if packed else wide[name])


def test_no_more_than_one_fused_layer_is_held_in_full(tmp_path, monkeypatch):
    """At each weight that arrives, the decoder's other layers are packed, or not there yet."""
    path = save_tiny(tmp_path, dtype=torch.bfloat16, num_hidden_layers=4)
    take, held = Packer.take, []

    def counted(self, model, place, weight):
        linears = [m for m in model.model.layers.modules() if isinstance(m, nn.Linear) and hasattr(m, "weight")]
        full = sum(not m.weight.is_meta for m in linears)
        held.append(full + sum(len(group) for group in self.groups.waiting.values()))
        take(self, model, place, weight)

    monkeypatch.setattr(Packer, "take", counted)
    load(path, "nvfp4")
    assert len(held) == 4 * 7 and max(held) == 2  # k and q wait for v


# Training


def trainer_of(path, output, model=None, steps=3, adapter=None, **overrides):
    settings = {"train_precision": "nvfp4", "max_steps": steps, "is_correction": "none", **overrides}
    args = config(QuantGRPOConfig, output, **settings)
    adapter = None if isinstance(model, PeftModel) else lora(**adapter or {})
    return make(QuantGRPOTrainer, args, model=model or str(path), peft_config=adapter)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("policy"), dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "options", rest_is_long([{}, {"gradient_checkpointing": True}, {"bf16": True}, {"beta": 0.1}], {}, {"bf16": True})
)
def test_policy_and_sampler_are_the_same(path, tmp_path, options):
    """Q(W) + BA in both: what is left of the mismatch is that of sums, and merging leaves a thousand times more."""
    trainer = trainer_of(path, tmp_path / "a", **options)
    before = parameters(trainer)
    trainer.train()
    after = parameters(trainer)
    moved = {name for name in after if not torch.equal(before[name], after[name])}
    assert moved and all(".lora_" in name for name in moved)
    packed = [name for name in after if name.endswith("weight_packed")]
    assert len(packed) == 14 and trainer.args.rollout_precision == "nvfp4"
    kl = max(abs(entry["mismatch/kl_k3"]) for entry in metrics(trainer) if "loss" in entry)
    assert kl < (1e-3 if "bf16" in options else 1e-9)
    if not options:
        merged = trainer_of(path, tmp_path / "b", train_precision=None, rollout_precision="nvfp4")
        merged.train()
        assert min(entry["mismatch/kl_k3"] for entry in metrics(merged) if "loss" in entry) > 1e-4


@pytest.mark.parametrize("precision", rest_is_long(frozen_bases()))
@pytest.mark.parametrize("adapter", rest_is_long([{"lora_dropout": 0.2}, {"target_modules": ["q_proj", "v_proj"]}]))
def test_layers_without_a_fused_adapter_under_activation_checkpoints(path, tmp_path, precision, adapter):
    """Bare layers, and those whose adapter has dropout, train as without checkpoints, bit for bit."""
    ends = []
    for checkpointing in (False, True):
        options = {"train_precision": precision, "gradient_checkpointing": checkpointing}
        trainer = trainer_of(path, tmp_path / str(checkpointing), adapter=adapter, steps=2, **options)
        before = parameters(trainer)
        trainer.train()
        ends.append(parameters(trainer))
        assert any(not torch.equal(before[name], ends[-1][name]) for name in before)
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_the_copy_holds_nothing_but_norms_of_its_own(path, tmp_path):
    trainer = trainer_of(path, tmp_path, noise_schedule="exponential", noise_stages=3, noise_sigma_start=0.5)
    trainer.train()
    theirs = dict(trainer.model.get_base_model().named_parameters())
    own = {name for name, p in trainer.vllm_generation.engine.copy.named_parameters() if p is not theirs[name]}
    assert own == {f"model.layers.{i}.{name}.weight" for i in (0, 1) for name in NORMS}
    noised = [entry for entry in metrics(trainer) if entry.get("noise/sigma")]
    assert noised and all(
        entry["noise/effective_sigma"] == pytest.approx(entry["noise/sigma"], rel=0.1) for entry in noised
    )
    assert all(torch.equal(theirs[name], wide) for name, wide in tiny_norms().items())
    engine = trainer.vllm_generation.engine
    assert not any(torch.equal(engine.copy.get_parameter(name), theirs[name]) for name in own)
    engine.sync()  # clean ones come back, lest noise lie on noise
    assert all(torch.equal(engine.copy.get_parameter(name), theirs[name]) for name in own)


NORMS = ("input_layernorm", "post_attention_layernorm")


def tiny_norms() -> dict[str, torch.Tensor]:
    named = tiny_model(dtype=torch.bfloat16).float().named_parameters()
    return {name: param for name, param in named if name.rpartition(".")[0].endswith(NORMS)}


def test_several_updates_and_accumulation(path, tmp_path):
    options = {"num_iterations": 2, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 4, "steps": 4}
    left = trainer_of(path, tmp_path / "a", **options)
    left.train()
    right = trainer_of(path, tmp_path / "b", **options)
    right.train()
    assert_same_run(left, right)


def test_a_model_that_is_loaded_already(path, tmp_path):
    """It trains as the one that was packed while it loaded."""
    left = trainer_of(path, tmp_path / "a")
    left.train()
    right = trainer_of(path, tmp_path / "b", model=AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32))
    right.train()
    assert_same_run(left, right)


def test_a_loaded_model_whose_files_are_gone(path, tmp_path):
    moved = shutil.copytree(path, tmp_path / "moved")
    model = AutoModelForCausalLM.from_pretrained(moved)
    shutil.rmtree(moved)
    left, right = trainer_of(path, tmp_path / "a"), trainer_of(path, tmp_path / "b", model=model)
    packed = [{name: x for name, x in parameters(trainer).items() if "weight_" in name} for trainer in (left, right)]
    assert len(packed[0]) >= 28 and packed[0].keys() == packed[1].keys()
    assert all(torch.equal(x, packed[1][name]) for name, x in packed[0].items())


def test_biases_that_an_adapter_trains_are_trained_on_a_base_that_is_packed_later(tmp_path):
    model = get_peft_model(tiny_model("qwen2", dtype=torch.bfloat16), lora(bias="all"))
    biases = {name for name, param in model.named_parameters() if name.endswith(".bias") and param.requires_grad}
    trainer = trainer_of(None, tmp_path, model=model, learning_rate=0.1)
    before = parameters(trainer)
    trainer.train()
    moved = {name for name, value in parameters(trainer).items() if not torch.equal(value, before[name])}
    assert len(biases) == 6 and biases <= moved


@pytest.mark.parametrize("form", ["name", "loaded", "adapted"])
def test_a_copy_of_a_packed_layer_is_refused(path, tmp_path, form):
    """But not one of other layers."""
    for copied, is_refused in (("down_proj", True), ("mlp", True), ("input_layernorm", False)):
        adapter = {"modules_to_save": [copied], "target_modules": ["q_proj"]}
        model = path if form == "name" else tiny_model(dtype=torch.bfloat16)
        if form == "adapted":
            model, adapter = get_peft_model(model, lora(**adapter)), None
        refused = pytest.raises(ValueError, match=rf"`modules_to_save` has '{copied}', which trains a copy of `model")
        with refused if is_refused else nullcontext():
            trainer_of(path, tmp_path, model=model, adapter=adapter)


def test_nf4_is_bitsandbytes(path, tmp_path):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    trainer = trainer_of(path, tmp_path, train_precision="nf4")
    trainer.train()
    layers = [m for m in trainer.model.modules() if isinstance(m, bitsandbytes.nn.Linear4bit)]
    assert len(layers) == 14 and {layer.weight.quant_type for layer in layers} == {"nf4"}
    shared = trainer.vllm_generation.engine.copy.modules()
    assert {id(m) for m in layers} <= {id(m) for m in shared}


def test_another_precision_samples_the_sum(path, tmp_path):
    """INT8 of Q(W) + BA, which the policy is: the mismatch is that of INT8, as on a base of 16 bits."""
    trainer = trainer_of(path, tmp_path, rollout_precision="int8")
    trainer.train()
    assert trainer.args.lora_sync == "merge"
    kl = [entry["mismatch/kl_k3"] for entry in metrics(trainer) if "loss" in entry]
    assert all(1e-6 < value < 1e-2 for value in kl)
    layer = trainer.model.get_base_model().model.layers[0].mlp.up_proj
    merged = layer.base_layer.dequantize().float() + layer.get_delta_weight("default")
    held = trainer.vllm_generation.engine.copy.model.layers[0].mlp.up_proj
    trainer.vllm_generation.sync_weights()
    x = torch.eye(128)
    assert (held(x) - x @ merged.t()).norm() < 0.02 * merged.norm()
    assert (held(x) - x @ layer.base_layer.dequantize().float().t()).norm() > 0.1 * merged.norm()


def test_the_self_check_knows_the_shared_base(path, tmp_path):
    """Its reference is the policy's own Q(W) + BA in BF16, with the scales that the base came with."""
    trainer = trainer_of(path, tmp_path)
    weights = PolicyWeights(trainer.model, trainer.accelerator)
    engine = SimpleNamespace(
        model=trainer.model,
        weights=weights,
        accelerator=trainer.accelerator,
        precision="nvfp4",
        lora_sync="adapter",
        travels_quantized=True,
        checkpoint_dtype=torch.bfloat16,
        product_errors={},
        caches={},
        fused_in_engine=fused_with,
    )
    sequences = [list(range(20, 60)), list(range(100, 140))]
    reference = Reference(engine).logps(sequences)
    own = policy_logps(trainer.model, sequences, torch.device("cpu"))
    jittered = Reference(engine).logps(sequences, jitter=True)
    assert mean_difference(reference, own) <= mean_difference(reference, jittered)
    plain, x = nn.Linear(128, 64, bias=False, dtype=torch.bfloat16), torch.randn(4, 128, dtype=torch.bfloat16)
    layer = FrozenLinear.from_linear(plain, "nvfp4", 0.7 * global_scale(plain.weight))  # as some calibration chose it
    expected = nn.functional.linear(x, layer.dequantize())
    assert torch.equal(EngineLayer(engine, [layer], 0, None)(x), expected)
    again = FrozenLinear.from_linear(copy.copy(plain), "nvfp4")
    assert not torch.equal(nn.functional.linear(x, again.dequantize()), expected)

    engine.precision = "mxfp4"  # Q(W) once more, in another format
    assert mean_difference(Reference(engine).logps(sequences), own) > 5 * mean_difference(reference, jittered)
    assert mean_difference(Reference(engine).logps(sequences, adapted=False), own) > 0.1


# Errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"train_precision": "fp4"},
            f"'fp4' is unknown. Allowed: {', '.join(map(repr, train_precisions()))}.",
        ),
        (
            {"use_vllm": True, "rollout_precision": "int8", "lora_sync": "adapter"},
            "`lora_sync`='adapter' leaves vLLM's base in 'int8'",
        ),
        (
            {"use_vllm": True, "train_precision": "nf4"},
            "`rollout_precision`='nf4' is not available with `use_vllm=True`",
        ),
    ],
)
def test_settings_that_contradict(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        config(QuantGRPOConfig, tmp_path, **{"train_precision": "nvfp4"} | options)


def test_a_frozen_base_needs_an_adapter(path, tmp_path):
    """Where all weights could not be trained: NF4 is bitsandbytes'."""
    args = config(QuantGRPOConfig, tmp_path, train_precision="nf4")
    message = "freezes the policy's base, and there is no adapter to train: .* train all weights in 'nvfp4', 'int4', "
    with pytest.raises(ValueError, match=message):
        make(QuantGRPOTrainer, args, model=path)


@pytest.mark.parametrize("precision", ["nf4", "nvfp4", "int8"])
@pytest.mark.parametrize("method", [LoHaConfig, LNTuningConfig])
def test_another_method_than_lora_is_refused_before_loading(path, tmp_path, monkeypatch, precision, method):
    """With a base in codes, and with one that is quantized as trained."""
    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", None)
    peft_config = method(target_modules=["input_layernorm"] if method is LNTuningConfig else ["q_proj"])
    args = config(QuantGRPOConfig, tmp_path, train_precision=precision)
    with pytest.raises(
        ValueError, match=f"{method.__name__} cannot adapt a frozen base|more than a product of B and A"
    ):
        make(QuantGRPOTrainer, args, model=path, peft_config=peft_config)


def test_a_frozen_base_is_not_scaled(path, tmp_path):
    with pytest.raises(ValueError, match=r"`uaq_scale`=1\.5 scales 16-bit weights"):
        trainer_of(path, tmp_path, uaq_scale=1.5)


def test_two_ways_to_quantize(path, tmp_path):
    from transformers import BitsAndBytesConfig

    args = config(QuantGRPOConfig, tmp_path, train_precision="nvfp4")
    with pytest.raises(ValueError, match="both set the base's format"):
        given = {"quantization_config": BitsAndBytesConfig(load_in_4bit=True), "peft_config": lora()}
        make(QuantGRPOTrainer, args, model=path, **given)


def test_a_base_in_another_precision(path, tmp_path):
    model = copy.deepcopy(load(path, "mxfp4"))
    args = config(QuantGRPOConfig, tmp_path, train_precision="nvfp4")
    with pytest.raises(ValueError, match="the policy's base is held in 'mxfp4'"):
        make(QuantGRPOTrainer, args, model=model, peft_config=lora())
