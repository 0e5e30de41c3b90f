"""GRPO that trains all weights in 4 bits: trainer, sampler and the saved model hold the same codes."""

import json
from itertools import cycle

import pytest
import torch
from frozen_layers import same_codes
from long_tests import rest_is_long
from tiny import save_tiny, tiny_model
from trained import layers_of, mismatches, trainer_of
from training import config, lora, make, parameters
from transformers import AutoModelForCausalLM, TrainerCallback

from trl_quant import QuantGRPOConfig, QuantGRPOTrainer
from trl_quant.cli import main as command
from trl_quant.config.checks import RULES
from trl_quant.formats import QuantizedTensor
from trl_quant.layers import FrozenLinear
from trl_quant.policy.frozen import FrozenBaseConfig, freeze
from trl_quant.precisions import PRECISIONS, frozen_bases, qat_precisions
from trl_quant.report.memory import Shape, estimate
from trl_quant.report.trained import Trained
from trl_quant.rollout import TransformersEngine
from trl_quant.storage.files import read_heads, read_tensors, weight_files
from trl_quant.storage.layout import checkpoint_stream, checkpoint_tensors, read_quantized


pytestmark = pytest.mark.isa

every_precision = pytest.mark.parametrize("precision", qat_precisions())
IDS = list(range(20, 60))


def stored(trainer) -> dict[str, torch.Tensor]:
    """What a 4-bit checkpoint of the master weights holds, quantized by the function that writes checkpoints."""
    named = [(name, param.detach().clone()) for name, param in trainer.model.named_parameters()]
    return dict(checkpoint_stream(named, PRECISIONS[trainer.args.train_precision].format))


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model.eval()(input_ids=torch.tensor([IDS]), use_cache=False).logits


class Compare(TrainerCallback):
    """Compares, when a step begins, what trainer and sampler hold with a checkpoint of the weights of that moment."""

    def __init__(self):
        self.trainer, self.steps, self.codes = None, 0, []

    def on_step_begin(self, args, state, control, **kwargs):
        expected, seen = stored(self.trainer), {}
        copies = dict(self.trainer.vllm_generation.engine.copy.named_modules())
        for name, layer in layers_of(self.trainer.model).items():
            assert copies[name] is layer  # the sampler multiplies with the trainer's own layer
            for part, tensor in checkpoint_tensors(f"{name}.weight", layer.codes()).items():
                assert torch.equal(expected[part], tensor), (state.global_step, part)
            seen[name] = layer.codes().values.clone()
        self.codes.append(seen)


@every_precision
def test_trainer_and_sampler_hold_the_same_codes_at_every_step(tmp_path, precision):
    compare = Compare()
    trainer = trainer_of(tmp_path, precision, callbacks=[compare], max_steps=4)
    compare.trainer = trainer
    trainer.train()
    assert len(compare.codes) == 4 and len(compare.codes[0]) == 14
    for before, after in zip(compare.codes, compare.codes[1:], strict=False):
        assert all(not torch.equal(before[name], after[name]) for name in before)


@every_precision
def test_live_equals_fresh(tmp_path, precision):
    """A trained run's engine scores as one that starts on the saved model, bit for bit; a BF16 one is far from both."""
    source = save_tiny(tmp_path / "model", tied=False)
    trainer = trainer_of(tmp_path / "out", precision, model=source)
    trainer.train()
    trainer.save_model(tmp_path / "saved")
    live, fresh = trainer, trainer_of(tmp_path / "fresh", precision, model=str(tmp_path / "saved"))
    scores = []
    for run in (live, fresh):
        run.vllm_generation.sync_weights()
        scores.append(run.vllm_generation.engine.score([IDS])[0])
    assert scores[0] == scores[1]
    plain = trainer_of(tmp_path / "plain", None, model=str(tmp_path / "saved"), rollout_precision="bf16")
    plain.vllm_generation.sync_weights()
    other = torch.tensor(plain.vllm_generation.engine.score([IDS])[0])
    assert (other - torch.tensor(scores[0])).abs().mean() > 0.05


@every_precision
def test_a_copy_that_is_given_the_codes(tmp_path, precision):
    """As under FSDP2: the copy holds the trainer's codes and computes the same bits."""
    trainer = trainer_of(tmp_path, precision)
    trainer.train()
    shared = trainer.vllm_generation.engine
    copied = TransformersEngine(
        trainer.model, trainer.accelerator, trainer.processing_class, precision=precision, max_completion_length=8
    )
    copied.sync()
    shared.sync()
    held = dict(copied.copy.named_modules())
    for name, layer in layers_of(trainer.model).items():
        assert isinstance(held[name].weight, QuantizedTensor) and same_codes(held[name].weight, layer.codes())
    assert copied.score([IDS]) == shared.score([IDS])


@pytest.mark.parametrize(
    ("precision", "dtype"),
    rest_is_long(
        [("nvfp4", "bfloat16"), *zip(qat_precisions(), cycle(["float32", "bfloat16"]))],
        *(("nvfp4", "bfloat16"), ("nvfp4", "float32")),
    ),
)
def test_save_and_prepare_write_the_model_that_was_trained(tmp_path, precision, dtype):
    """`save_model` writes the master weights, from which `prepare` makes the codes that were trained, bit for bit."""
    source = save_tiny(tmp_path / "model", tied=False, dtype=torch.bfloat16)
    options = {"model_init_kwargs": {"dtype": dtype}, "learning_rate": 1e-2}
    trainer = trainer_of(tmp_path / "out", precision, model=source, **options)
    trainer.train()
    trainer.save_model(tmp_path / "saved")
    settings = json.loads((tmp_path / "saved/config.json").read_text())
    assert "quantization_config" not in settings and settings["dtype"] == dtype
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=getattr(torch, dtype))
    own = parameters(trainer)
    assert all(torch.equal(own[name], tensor) for name, tensor in saved.named_parameters())

    read = Trained.find(str(tmp_path / "saved")).policy(precision, torch.float32, merged=True)  # as reports do
    assert all(same_codes(layers_of(read)[name].codes(), x.codes()) for name, x in layers_of(trainer.model).items())

    packed = str(tmp_path / "packed")
    command(["prepare", "--model", str(tmp_path / "saved"), "--format", precision, "--output", packed])
    heads = read_heads(weight_files(tmp_path / "packed"))
    read = read_quantized(read_tensors(heads, list(heads), "cpu"), PRECISIONS[precision].format, own_dtype(trainer))
    layers = layers_of(trainer.model)
    assert read.keys() == layers.keys()
    for name, layer in layers.items():
        assert torch.equal(read[name].dequantize(), layer.codes().dequantize())
        assert torch.equal(read[name].values, layer.codes().values.view(torch.uint8))
    if precision in frozen_bases():  # transformers loads it with the same layers
        loading = {"config": without_scheme(packed), "dtype": getattr(torch, dtype)}
        served = AutoModelForCausalLM.from_pretrained(
            packed, quantization_config=FrozenBaseConfig(precision, dtype, []), **loading
        )
        assert sum(isinstance(module, FrozenLinear) for module in served.modules()) == len(layers)
        assert torch.equal(logits(served), logits(trainer.model))
        assert not torch.equal(logits(saved), logits(trainer.model))


def own_dtype(trainer) -> torch.dtype:
    return next(iter(layers_of(trainer.model).values())).weight.dtype


def without_scheme(path: str):
    from transformers import AutoConfig

    found = AutoConfig.from_pretrained(path)
    del found.quantization_config
    return found


@every_precision
def test_the_gradient_is_that_of_the_4_bit_policy(tmp_path, precision):
    """W gets the gradient at Q(W), which a plain model that holds Q(W) has, and not the one at W."""
    ours = trainer_of(tmp_path, precision, model=tiny_model(seed=3, tied=False)).model
    rounded, plain = tiny_model(seed=3, tied=False), tiny_model(seed=3, tied=False)
    with torch.no_grad():
        for name, layer in layers_of(ours).items():
            rounded.get_submodule(name).weight.copy_(layer.codes().dequantize())
    ids, found = torch.tensor([IDS]), []
    for model in (ours, rounded, plain):
        model.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        found.append({name: param.grad for name, param in model.named_parameters()})
    for name, gradient in found[0].items():
        assert (gradient - found[1][name]).norm() < 1e-4 * gradient.norm()
        assert (gradient - found[2][name]).norm() > 0.02 * gradient.norm(), name


def test_scaled_weights(tmp_path):
    scaled = trainer_of(tmp_path, uaq_scale=2.0)
    scaled.train()
    assert max(map(abs, mismatches(scaled))) < 1e-9 and scaled.model.config.uaq_scale == 2.0


def test_an_adapter_still_freezes_the_base(tmp_path):
    """One configuration serves both: with an adapter Q(W) stays, without one W is trained."""
    args = config(QuantGRPOConfig, tmp_path, train_precision="nvfp4", max_steps=1)
    frozen = make(QuantGRPOTrainer, args, model=tiny_model(seed=3), peft_config=lora())
    assert sum(isinstance(m, FrozenLinear) for m in frozen.model.modules()) == 14 and not layers_of(frozen.model)
    whole = make(QuantGRPOTrainer, args, model=tiny_model(seed=3))
    assert len(layers_of(whole.model)) == 14
    again = make(QuantGRPOTrainer, args, model=tiny_model(seed=3), peft_config=lora())
    assert sum(isinstance(m, FrozenLinear) for m in again.model.modules()) == 14


def test_defaults_that_depend_on_the_adapter(tmp_path):
    settings = {"train_precision": "nvfp4", "use_vllm": True, "vllm_mode": "colocate"}
    args = config(QuantGRPOConfig, tmp_path, **settings)
    assert (args.lora_sync, args.vllm_sleep_level, args.spec.training.kind) == ("adapter", 1, "frozen")
    args.resolve_for(adapted=False)
    assert (args.lora_sync, args.vllm_sleep_level, args.spec.training.kind) == ("merge", 2, "qat")
    args.resolve_for(adapted=True)
    assert (args.lora_sync, args.vllm_sleep_level, args.spec.training.kind) == ("adapter", 1, "frozen")
    given = config(QuantGRPOConfig, tmp_path, **settings, vllm_sleep_level=1)
    given.resolve_for(adapted=False)
    assert (given.lora_sync, given.vllm_sleep_level) == ("merge", 1)


def test_memory_is_that_of_all_weights_and_their_codes(tmp_path):
    """As in full precision, with 4.5 bits for each weight of a linear layer beside it; a frozen base replaces them."""
    shape, parts = Shape.of(tiny_model(tied=False).config), {}
    for name, adapted in (("nvfp4", False), ("nvfp4", True), (None, False)):
        args = config(QuantGRPOConfig, tmp_path, train_precision=name)
        args.resolve_for(adapted)
        parts[name, adapted] = estimate(args, shape, torch.float32, prompt=8, card=10**9).held
    whole, frozen, plain = parts.values()
    assert whole["policy"] == plain["policy"] == 4 * shape.parameters and whole["optimizer"] == plain["optimizer"]
    assert whole["codes"] == 4.5 / 8 * shape.linear and "codes" not in {*plain, *frozen}
    assert frozen["policy"] == 4.5 / 8 * shape.linear + 4 * shape.other


@pytest.mark.parametrize("settings", [{}, {"rollout_precision": "int8"}, {"precision": "nvfp4"}])
def test_a_later_run_forgets_how_weights_were_gathered(tmp_path, settings):
    """`trl-quant prepare` rounds as the last run did: here none rounded, while one under FSDP2 had."""
    source = tmp_path / "model"
    save_tiny(source, tied=False)
    written = json.loads((source / "config.json").read_text()) | {"qat_gathered_dtype": "bfloat16"}
    (source / "config.json").write_text(json.dumps(written))
    trainer = trainer_of(tmp_path, **{"precision": None, "model": str(source)} | settings)
    trainer.save_model(tmp_path / "saved")
    assert "qat_gathered_dtype" not in json.loads((tmp_path / "saved/config.json").read_text())
    AutoModelForCausalLM.from_pretrained(source).save_pretrained(tmp_path / "same")
    assert json.loads((tmp_path / "same/config.json").read_text())["qat_gathered_dtype"] == "bfloat16"


# Refused before a model is loaded


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rollout_precision": "int8"}, "`rollout_precision`='int8' with `train_precision`='nvfp4' and no adapter"),
        ({"use_vllm": True, "lora_sync": "adapter", "vllm_mode": "colocate"}, "`lora_sync`='adapter' with `train_pre"),
        ({"train_precision": "int4", "use_vllm": True}, "`rollout_precision`='int4' is not available with `use_vllm"),
        ({"train_precision": "int4", "peft": True}, "'int4' trains all weights, and the policy has an adapter"),
        ({"sharding": "1"}, "`rollout_precision`='nvfp4' with FSDP1, which joins the weights of many layers"),
    ],
)
def test_refused(tmp_path, monkeypatch, options, message):
    monkeypatch.setitem(RULES, "machine", ())
    source = save_tiny(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(b"")
    options = {"train_precision": "nvfp4"} | options
    peft_config = lora() if options.pop("peft", False) else None
    if version := options.pop("sharding", None):
        monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
        monkeypatch.setenv("FSDP_VERSION", version)
    with pytest.raises(ValueError, match=message):
        make(QuantGRPOTrainer, config(QuantGRPOConfig, tmp_path, **options), model=source, peft_config=peft_config)


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize(("precision", "inputs", "group"), [("nvfp4", 264, 16), ("mxfp4", 272, 32), ("int4", 200, 128)])
def test_shapes_that_no_checkpoint_holds(tmp_path, monkeypatch, precision, inputs, group, loaded):
    """Refused before the weights are read, where `trl-quant prepare` would refuse what was trained."""
    monkeypatch.setattr("trl_quant.trainers.sampling.engine_of", None)  # which would load the policy
    source = save_tiny(tmp_path / "model", intermediate_size=inputs)
    says = f"mlp.down_proj.weight: {inputs} inputs, but '{precision}' is stored for multiples of {group} only"
    with pytest.raises(ValueError, match=f"`train_precision`='{precision}' trains for a checkpoint in 4 bits.*{says}"):
        trainer_of(tmp_path, precision, AutoModelForCausalLM.from_pretrained(source) if loaded else source)
    with pytest.raises(SystemExit, match=says):
        command(["prepare", "--model", source, "--format", precision, "--output", str(tmp_path / "prepared")])
    fitting = save_tiny(tmp_path / "fitting", intermediate_size=3 * group)
    for kind in ({"precision": precision, "model": fitting}, {"precision": None, "rollout_precision": "int8"}):
        with pytest.raises(TypeError, match="'NoneType' object is not callable"):  # the engine of a run that begins
            trainer_of(tmp_path, **{"model": source} | kind)


def test_a_base_without_16_bit_weights_is_refused(tmp_path):
    model = tiny_model(tied=False)
    freeze(model, "nvfp4")
    with pytest.raises(ValueError, match="held in 'nvfp4', and its 16-bit weights are gone"):
        trainer_of(tmp_path, model=model)


def test_experts_are_refused(tmp_path):
    with pytest.raises(ValueError, match="the policy is a mixture of 4 experts"):
        trainer_of(tmp_path, model=save_tiny(tmp_path / "model", "qwen3_moe"))
