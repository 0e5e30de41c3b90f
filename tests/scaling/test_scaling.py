"""Invariant scaling (UAQ): the model's function is unchanged, and the weights become finer."""

import copy
import math

import pytest
import reference
import torch
from long_tests import rest_is_long
from peft import AdaLoraConfig, IA3Config, LoraConfig, PeftModel, get_peft_model
from scaled import IDS, logits, same_bytes, state
from tiny import FAMILIES, MIXTURES, tiny_model
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
)

from trl_quant.formats import quantize
from trl_quant.models.families import family_of
from trl_quant.models.norms import feeding_norms
from trl_quant.scaling import apply_uaq, uaq_applied
from trl_quant.scaling.uaq import scale_norms


def fed(model):
    """Feeding norm -> its linear layers, by parameter name."""
    names = [name for name, _ in model.named_parameters()]
    feeds = feeding_norms(model.config.get_text_config().model_type, names)
    return {norm: [x if x in names else f"{x}.weight" for x in linears] for norm, linears in feeds.items()}


# The function is unchanged


@pytest.mark.parametrize("family", [*FAMILIES, *MIXTURES])
def test_scale_one_changes_nothing(family):
    model = tiny_model(family)
    before = state(model)
    assert apply_uaq(model, 1) == 4 and uaq_applied(model) == 1
    assert same_bytes(before, state(model))


@pytest.mark.parametrize("scale", [2.0, 0.25])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", [*FAMILIES, *MIXTURES])
def test_a_power_of_two_keeps_every_bit_of_the_output(family, dtype, scale):
    """For Gemma only while the exact 1 + w can be stored as w: not in bfloat16, and not for a gain below 1/2."""
    model = tiny_model(family, dtype=dtype)
    before, weights = logits(model), state(model)
    apply_uaq(model, scale)
    assert not same_bytes(weights, state(model))
    if family_of(model.config.model_type).offset and (dtype == torch.bfloat16 or scale < 1):
        difference = (logits(model) - before).float().norm() / before.float().norm()
        assert difference < (0.02 if dtype == torch.bfloat16 else 1e-6)
    else:
        assert torch.equal(logits(model), before)


@pytest.mark.parametrize("scale", [1.5, 0.7, 3.0])
@pytest.mark.parametrize("family", [*FAMILIES, *MIXTURES])
def test_the_output_is_kept_to_float32_rounding(family, scale):
    model = tiny_model(family)
    before = logits(model)
    if family in MIXTURES:
        model.set_experts_implementation("eager")  # the grouped products have no float64
    exact = logits(model.double())
    rounding = (before - exact).abs().max()  # what float32 itself loses
    model = tiny_model(family)
    assert apply_uaq(model, scale) == 4
    assert (logits(model) - exact).abs().max() < 8 * rounding


@pytest.mark.parametrize("family", FAMILIES)  # routers compute in float32
def test_the_output_is_kept_to_float64_rounding(family):
    """The same algebra without the rounding: the remaining error is 1e-7 of any real mistake."""
    model = tiny_model(family, tied=False).double()
    offset = family_of(model.config.model_type).offset
    for module in model.modules():  # their forward computes in float32
        if "RMSNorm" in type(module).__name__:
            module.forward = lambda x, m=module: (
                (m.weight + offset) * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + _epsilon(m))
            )
    before = logits(model)
    apply_uaq(model, 1.5)
    assert (logits(model) - before).abs().max() < 1e-11 * before.abs().max()


def _epsilon(norm):
    return getattr(norm, "variance_epsilon", None) or norm.eps


@pytest.mark.parametrize("family", [*FAMILIES, *MIXTURES])
def test_anything_else_breaks_the_output(family):
    """The negative of the tests above: every wrong pairing is far outside float32 rounding."""
    model = tiny_model(family)
    before = logits(model)
    offset = family_of(model.config.model_type).offset
    norm, linears = list(fed(model).items())[1]

    def broken(change):
        wrong = tiny_model(family)
        apply_uaq(wrong, 1.5)
        with torch.no_grad():
            change(dict(wrong.named_parameters()))
        return (logits(wrong) - before).abs().max() / before.abs().max()

    original = dict(model.named_parameters())
    assert broken(lambda p: None) < 1e-5
    assert broken(lambda p: p[norm].copy_(original[norm])) > 1e-3  # a norm left out
    for linear in linears[:1] if offset else linears:  # Gemma's post norm takes out the scale of the up projection
        assert broken(lambda p, linear=linear: p[linear].copy_(original[linear])) > 1e-3  # a linear left out
    other = "model.layers.1." + ("post_attention_layernorm.weight" if offset else "self_attn.o_proj.weight")
    assert broken(lambda p: p[other].mul_(1.5)) > 1e-3  # one too many; above all Gemma's post norm
    if offset:
        assert broken(lambda p: p[norm].copy_(1.5 * original[norm])) > 1e-3  # w taken for the gain
    else:
        assert broken(lambda p: p[norm].copy_(1.5 * (1 + original[norm]) - 1)) > 1e-3


# The weights, one by one


@pytest.mark.parametrize("dtype", rest_is_long([torch.float32, torch.bfloat16, torch.float16], torch.bfloat16))
@pytest.mark.parametrize("family", [*FAMILIES, *MIXTURES])
def test_weights_equal_the_equation_rounded_once(family, dtype):
    model = tiny_model(family, dtype=dtype)
    before, feeds = state(model), fed(model)
    offset = family_of(model.config.model_type).offset
    apply_uaq(model, 1.5)
    after = state(model)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for norm, linears in feeds.items() for name in (norm, *linears)}
    for norm, linears in feeds.items():
        gain, weights = reference.scaled_layer(before[norm], [before[x].flatten(0, -2) for x in linears], 1.5, offset)
        ulp = torch.finfo(dtype).eps
        # Half a unit in the last place of the result; for Gemma, where w is a difference, also the gain's in float32.
        float32 = 2e-7 if offset else 0.0
        torch.testing.assert_close(after[norm].float(), gain.float(), rtol=0.51 * ulp, atol=float32)
        for name, weight in zip(linears, weights):
            weight = weight.view_as(after[name])
            if dtype == torch.float32:
                assert torch.equal(after[name], weight.float())
            torch.testing.assert_close(after[name].float(), weight.float(), rtol=0.51 * ulp, atol=4e-8)


@pytest.mark.parametrize("scale", [1.5, 0.8])
def test_scales_multiply_and_are_recorded(scale, tmp_path):
    model = tiny_model()
    before = logits(model)
    assert uaq_applied(model) is None
    apply_uaq(model, scale)
    assert uaq_applied(model) == scale
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert uaq_applied(loaded) == scale  # what stops a second scaling after a resume
    assert same_bytes(state(loaded), state(model))
    apply_uaq(model, 2)
    assert uaq_applied(model) == 2 * scale
    apply_uaq(model, 1 / uaq_applied(model))
    assert uaq_applied(model) == pytest.approx(1)
    torch.testing.assert_close(logits(model), before, rtol=1e-5, atol=1e-5)
    for one, other in zip(state(model).values(), state(tiny_model()).values()):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_the_text_tower_of_a_multimodal_model():
    text = {**FAMILIES["gemma3"][1], "vocab_size": 320, "hidden_size": 64, "intermediate_size": 128}
    text |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.1}
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=5)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Gemma3ForConditionalGeneration(config).float().eval()
        for parameter in model.parameters():
            if parameter.ndim == 1:
                nn.init.normal_(parameter, std=0.1)
    assert model.config.model_type == "gemma3"
    inputs = {
        "input_ids": torch.tensor([[5, 5, 5, 5, 9, 10, 11, 12]]),
        "token_type_ids": torch.tensor([[1, 1, 1, 1, 0, 0, 0, 0]]),
        "pixel_values": torch.randn(1, 3, 28, 28, generator=torch.Generator().manual_seed(0)),
    }
    before, weights = logits(model, **inputs), state(model)
    assert apply_uaq(model, 1.5) == 4
    changed = {name for name, tensor in state(model).items() if not torch.equal(tensor, weights[name])}
    assert len(changed) == 2 * 7 and all("language_model.layers" in name for name in changed)
    after = logits(model, **inputs)
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5 * before.abs().max().item())


# Adapters


def adapted(family="qwen3", seed=1, **options):
    """A model with trained adapters: both LoRA matrices are random."""
    targets = ["qkv_proj", "gate_up_proj"] if family == "phi3" else ["q_proj", "v_proj", "up_proj", "down_proj"]
    model = get_peft_model(tiny_model(family), LoraConfig(r=4, target_modules=targets, **options)).eval()
    g = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=g)
    return model


@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"use_rslora": True}], ids=["lora", "dora", "rslora"])
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "phi3"])
def test_adapted_models_keep_their_function(family, options):
    model = adapted(family, **options)
    before = logits(model)
    with model.disable_adapter():
        base = logits(model)
    assert (before - base).abs().max() > 0.05  # the adapters do something
    assert apply_uaq(model, 1.5) == 4 and uaq_applied(model) == uaq_applied(model.get_base_model()) == 1.5
    torch.testing.assert_close(logits(model), before, rtol=1e-4, atol=1e-4)
    with model.disable_adapter():
        torch.testing.assert_close(logits(model), base, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits(model.merge_and_unload()), before, rtol=1e-4, atol=1e-4)


def test_the_base_inside_adapters_is_the_scaled_base_bit_for_bit():
    model, plain = adapted(), tiny_model()
    apply_uaq(model, 1.5)
    apply_uaq(plain, 1.5)
    assert same_bytes(state(model.unload()), state(plain))


def test_a_trained_adapter_leaves_by_undoing_the_scale(tmp_path):
    """A saved adapter has no base weights: it fits the original base only after the scale is undone."""
    model = adapted()
    before = logits(model)
    apply_uaq(model, 1.5)
    model.save_pretrained(tmp_path / "scaled")
    apply_uaq(model, 1 / uaq_applied(model))
    model.save_pretrained(tmp_path / "undone")
    wrong = logits(PeftModel.from_pretrained(tiny_model(), tmp_path / "scaled").eval())
    right = logits(PeftModel.from_pretrained(tiny_model(), tmp_path / "undone").eval())
    torch.testing.assert_close(right, before, rtol=1e-4, atol=1e-4)
    assert (wrong - before).abs().max() > 1e-2


def test_other_adapters_are_refused():
    model = get_peft_model(tiny_model(), IA3Config(target_modules=["k_proj"], feedforward_modules=[]))
    with pytest.raises(ValueError, match=r"layers.0.self_attn.k_proj is wrapped by Linear; only LoRA adapters"):
        apply_uaq(model, 1.5)
    model = get_peft_model(tiny_model(), AdaLoraConfig(target_modules=["k_proj"], total_step=9))
    with pytest.raises(ValueError, match=r"layers.0.self_attn.k_proj is wrapped by SVDLinear; only LoRA adapters"):
        apply_uaq(model, 1.5)


@pytest.mark.parametrize(
    ("family", "saved"),
    [("qwen3", "input_layernorm"), ("qwen3", "k_proj"), ("qwen3", "mlp"), ("qwen3_moe", "mlp.gate")],
)
def test_copies_that_are_trained_are_refused(family, saved):
    """Of two modules one would be scaled, and the base without the adapter would compute another function."""
    model = get_peft_model(tiny_model(family), LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=[saved]))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=rf"layers.0.*{saved}.* is trained as a copy .* before it is wrapped"):
        apply_uaq(model, 1.5)
    assert same_bytes(model.state_dict(), before)


@pytest.mark.parametrize("tensor", ["gate_up_proj", "down_proj"])
def test_adapted_experts(tensor):
    """A norm feeds the first tensor of the experts, and not the second."""
    options = {"r": 4, "target_modules": ["q_proj"], "target_parameters": [f"mlp.experts.{tensor}"]}
    model = get_peft_model(tiny_model("qwen3_moe"), LoraConfig(**options, init_lora_weights=False)).eval()
    if tensor == "gate_up_proj":
        with pytest.raises(ValueError, match=r"mlp.experts.gate_up_proj is a tensor with an adapter. Scale the model"):
            apply_uaq(model, 1.5)
        return
    before = logits(model)
    with model.disable_adapter():
        base = logits(model)
    assert apply_uaq(model, 1.5) == 4 and (before - base).abs().max() > 0.01
    torch.testing.assert_close(logits(model), before, rtol=1e-4, atol=1e-4)
    with model.disable_adapter():
        torch.testing.assert_close(logits(model), base, rtol=1e-4, atol=1e-4)


# Refused, before anything is changed


@pytest.mark.parametrize("scale", [0, -1.5, 2**-9, 257, 1e300, math.nan, math.inf, "1.5", None, True])
def test_bad_scales(scale):
    model = tiny_model()
    before = state(model)
    with pytest.raises(ValueError, match=r"`scale`=.* must be a number from 0\.00390625 to 256") as error:
        apply_uaq(model, scale)
    assert repr(scale) in str(error.value)
    assert same_bytes(before, state(model)) and uaq_applied(model) is None


def test_unknown_architectures():
    gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=32))
    unknown = tiny_model(num_hidden_layers=1)
    unknown.config.model_type = "made_up"
    for model, name in ((gpt2, "gpt2"), (unknown, "made_up")):
        before = state(model)
        with pytest.raises(ValueError, match=rf"model_type '{name}' is not supported.*Supported are qwen2, qwen3"):
            apply_uaq(model, 1.5)
        assert same_bytes(before, state(model))


@pytest.mark.parametrize("family", MIXTURES)
def test_a_mixture_without_its_routers_scaled_would_compute_another_function(family):
    model = tiny_model(family)
    before, gates = logits(model), {name: x.data.clone() for name, x in model.named_parameters() if "gate.w" in name}
    apply_uaq(model, 2.0)
    assert torch.equal(logits(model), before) and len(gates) >= (1 if family == "glm4_moe" else 2)
    for name, gate in gates.items():
        model.get_parameter(name).data = gate
        assert (logits(model) - before).abs().max() > 1e-3
        model.get_parameter(name).data = gate / 2


def quantized_weight(layer):
    layer.weight = nn.Parameter(layer.weight.to(torch.float8_e4m3fn), requires_grad=False)


def integer_weight(layer):
    layer.weight = nn.Parameter(layer.weight.to(torch.int8), requires_grad=False)


def sharded_weight(layer):
    layer.weight = nn.Parameter(torch.empty(0))


def absent_weight(layer):
    layer.to("meta")


def packed_weight(layer):
    layer.weight_packed = nn.Parameter(layer.weight.detach())
    del layer.weight


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (quantized_weight, "must be a floating-point weight of 16 bits or more, got torch.float8_e4m3fn"),
        (integer_weight, "must be a floating-point weight of 16 bits or more, got torch.int8"),
        (sharded_weight, r"must be loaded and whole, of shape \(256, 128\), got a tensor of shape \(0,\)"),
        (absent_weight, "must be loaded and whole.*on the meta device"),
        (packed_weight, "must have a dense weight to be scaled, got Linear"),
    ],
)
def test_weights_that_cannot_be_scaled(spoil, message):
    """In the last layer, so that a careless loop would already have changed the others."""
    model = tiny_model()
    before = state(model)
    spoil(model.model.layers[1].mlp.up_proj)
    with pytest.raises(ValueError, match=f"model.layers.1.mlp.up_proj.*{message}"):
        apply_uaq(model, 1.5)
    untouched = {name: tensor for name, tensor in state(model).items() if "1.mlp.up_proj" not in name}
    assert same_bytes(untouched, {name: before[name] for name in untouched}) and uaq_applied(model) is None


# What it is for


@pytest.mark.parametrize("scale", [1.5, 2.0])
@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_the_absolute_rounding_error_falls_by_s(name, scale):
    """QuRL eq. 12, left: exactly by s; the error relative to the weights is unchanged."""
    model = tiny_model()
    names = [x for linears in fed(model).values() for x in linears]

    def error():
        weights = dict(model.named_parameters())
        return [(quantize(weights[x].detach(), name).dequantize() - weights[x]).norm().item() for x in names]

    before = error()
    apply_uaq(model, scale)
    for one, other in zip(before, error()):
        assert one / other == pytest.approx(scale, rel=0.01)


@pytest.mark.parametrize(("optimizer", "power"), [(torch.optim.SGD, 2), (torch.optim.Adam, 1)])
def test_updates_grow_against_the_rounding_error(optimizer, power):
    """QuRL eq. 12, right: the update over the error of INT8 grows by s^2 with SGD, by s with Adam."""

    def update_over_error(scale):
        model = tiny_model().train()
        if scale != 1:
            apply_uaq(model, scale)
        weights = [p for n, p in model.named_parameters() if n.endswith(("q_proj.weight", "up_proj.weight"))]
        before = [w.detach().clone() for w in weights]
        step = optimizer(weights, lr=1e-5)
        model(IDS, labels=IDS).loss.backward()
        step.step()
        updates = [(w.detach() - b).norm() for w, b in zip(weights, before)]
        errors = [(quantize(b, "int8").dequantize() - b).norm() for b in before]
        return torch.stack([u / e for u, e in zip(updates, errors)])

    gain = update_over_error(1.5) / update_over_error(1)
    torch.testing.assert_close(gain, torch.full_like(gain, 1.5**power), rtol=0.03, atol=0)


def test_norms_that_stand_in_hold_the_gain():
    """`oneshot` replaces Gemma's norms: the weight is then the gain, although the family stores w."""

    class Folded(nn.Module):
        def __init__(self, norm):
            super().__init__()
            self.weight = nn.Parameter(1 + norm.weight.detach())

    model = tiny_model("gemma2")
    expected = copy.deepcopy(model)
    apply_uaq(expected, 1.5)
    for layer in model.model.layers:
        for name in ("input_layernorm", "pre_feedforward_layernorm"):
            setattr(layer, name, Folded(getattr(layer, name)))
    scale_norms(model, 1.5, folded=(Folded,))
    for layer, other in zip(model.model.layers, expected.model.layers):
        torch.testing.assert_close(layer.input_layernorm.weight, 1 + other.input_layernorm.weight)
