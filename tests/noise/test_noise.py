"""Adaptive quantization noise: the schedule, the noise, and the norms it is added to."""

import itertools
import math
import subprocess
import sys

import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from places import ROOT
from tiny import FAMILIES, norms_of, tiny_model

from trl_quant.models.families import families_with, family_of
from trl_quant.models.norms import feeding_norms
from trl_quant.noise import SCHEDULES, noised_norms, norm_noise, sigma


PAPER = {"stages": 10, "sigma_start": 1e-2, "sigma_end": 5e-4}


# The schedule


@pytest.mark.parametrize("stages", [3, 4, 10])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedule_equals_algorithm_1(schedule, stages):
    total = 12 * stages
    for step in range(total):
        expected = reference.noise_sigma(step, total, schedule, stages, 1e-2, 5e-4)
        assert sigma(step, total, schedule, stages, 1e-2, 5e-4) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_first_stage_is_silent_and_the_ends_are_exact(schedule):
    values = [sigma(step, 600, schedule, **PAPER) for step in range(600)]
    assert values[:60] == [0.0] * 60
    assert values[60] == 1e-2 and values[119] == 1e-2  # constant within a stage
    assert values[540] == 5e-4 and values[599] == 5e-4  # reached, unlike with the paper's divisor K - 1
    assert (1e-2) * (5e-4 / 1e-2) ** (8 / 9) > 1.3 * 5e-4
    assert sigma(600, 600, schedule, **PAPER) == sigma(10_000, 600, schedule, **PAPER) == 5e-4
    assert len(set(values)) == 10 and values[60:] == sorted(values[60:], reverse=True)


def test_schedules_have_the_shapes_of_figure_15():
    """Exponential and logarithmic fall first, linear evenly, cosine late."""
    early = {s: sigma(120, 600, s, **PAPER) for s in SCHEDULES}  # the second noisy stage
    middle = {s: sigma(330, 600, s, **PAPER) for s in SCHEDULES}
    late = {s: sigma(480, 600, s, **PAPER) for s in SCHEDULES}
    assert early["exponential"] < early["logarithmic"] < early["linear"] < early["cosine"]
    assert middle["exponential"] < middle["logarithmic"] < middle["linear"]
    assert late["cosine"] < late["linear"] and late["exponential"] == min(late.values())
    steps = [sigma(60 * k, 600, "linear", **PAPER) for k in range(1, 10)]
    assert [a - b for a, b in itertools.pairwise(steps)] == pytest.approx([(1e-2 - 5e-4) / 8] * 8)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(sorted(SCHEDULES)),
    st.integers(3, 30),
    st.integers(1, 2000),
    st.floats(1e-6, 1),
    st.floats(1e-6, 1),
)
def test_schedule_decays_between_its_ends(schedule, stages, total, a, b):
    """Also when the steps do not divide evenly into stages, or are fewer than the stages."""
    end, start = sorted((a, b))
    values = [sigma(step, total, schedule, stages, start, end) for step in range(0, total, max(1, total // 50))]
    noisy = [v for v in values if v]
    assert values == [0.0] * (len(values) - len(noisy)) + noisy
    assert all(after <= before * (1 + 1e-12) for before, after in itertools.pairwise(noisy))
    assert all(end * (1 - 1e-9) <= v <= start * (1 + 1e-9) for v in noisy)
    assert sigma(total, total, schedule, stages, start, end) == end


def test_stages_are_equal_even_if_steps_do_not_divide():
    values = [sigma(step, 25, "linear", **PAPER) for step in range(25)]
    lengths = [values.count(v) for v in dict.fromkeys(values)]
    assert len(lengths) == 10 and set(lengths) == {2, 3}


def test_constant_and_zero_ends():
    assert sigma(300, 600, "exponential", 10, 1e-2, 1e-2) == pytest.approx(1e-2, rel=1e-12)
    assert sigma(599, 600, "linear", 10, 1e-2, 0.0) == 0.0


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"schedule": "step"}, "schedule must be one of exponential, linear, cosine, logarithmic, got 'step'"),
        ({"stages": 2}, "stages must be at least 3, got 2"),
        ({"sigma_start": 1e-4}, "sigma_start must be finite and at least sigma_end=0.0005, got 0.0001"),
        ({"sigma_start": math.inf}, "sigma_start must be finite.*got inf"),
        ({"sigma_start": math.nan}, "sigma_start must be finite.*got nan"),
        ({"sigma_end": 0.0}, "sigma_end must be > 0 with schedule 'exponential', got 0.0"),
        ({"sigma_end": math.nan}, "sigma_end must be > 0.*got nan"),
        ({"schedule": "linear", "sigma_end": -1e-4}, "sigma_end must be >= 0 with schedule 'linear', got -0.0001"),
        ({"step": -1}, "step must be at least 0, got -1"),
        ({"total_steps": 0}, "total_steps must be at least 1, got 0"),
    ],
)
def test_bad_schedules_name_the_field_and_the_value(changed, message):
    arguments = {"step": 0, "total_steps": 600, "schedule": "exponential", **PAPER}  # also in the silent stage
    with pytest.raises(ValueError, match=message):
        sigma(**arguments | changed)


# The noise


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_no_noise_is_the_weight_bit_for_bit(dtype):
    weight = torch.randn(33).to(dtype)
    result = norm_noise(weight, 0.0, 1, 2, "a")
    assert torch.equal(result, weight) and result.dtype == dtype and result.data_ptr() != weight.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_noise_is_gaussian_and_added_to_a_copy(dtype):
    weight = (1 + 0.1 * torch.randn(50_000)).to(dtype)
    before = weight.clone()
    z = norm_noise(weight, 0.05, 7, 11, "model.layers.0.input_layernorm.weight").double() - weight.double()
    assert torch.equal(weight, before)
    z = (z / 0.05).sort().values
    assert abs(z.mean()) < 0.02 and abs(z.std() - 1) < 0.02
    normal = torch.distributions.Normal(0.0, 1.0).cdf(z)  # Kolmogorov-Smirnov at 0.1%
    assert (normal - torch.linspace(0, 1, len(z))).abs().max() < 1.95 / math.sqrt(len(z)) + (
        dtype != torch.float32
    ) / 50
    assert norm_noise(weight, 0.05, 7, 11, "a").dtype == dtype


def test_noise_scales_with_sigma_and_is_added_before_rounding():
    zero, weight = torch.zeros(64), torch.ones(64)
    z = norm_noise(zero, 1.0, 1, 2, "a")
    torch.testing.assert_close(norm_noise(zero, 0.03, 1, 2, "a"), 0.03 * z)
    expected = (weight + 0.3 * z).bfloat16()
    assert torch.equal(norm_noise(weight.bfloat16(), 0.3, 1, 2, "a"), expected)
    assert not torch.equal(weight.bfloat16() + (0.3 * z).bfloat16(), expected)  # the shortcut


def test_noise_is_keyed_by_seed_step_and_name():
    zero = torch.zeros(16)
    keys = [(s, t, n) for s in (0, 1, -1, 2**40) for t in (0, 1, 2) for n in ("a.weight", "b.weight")]
    draws = [tuple(norm_noise(zero, 1.0, *key).tolist()) for key in keys]
    assert len(set(draws)) == len(keys)
    assert draws == [tuple(norm_noise(zero, 1.0, *key).tolist()) for key in reversed(keys)][::-1]  # in any order


def test_noise_leaves_the_global_random_state_alone():
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    norm_noise(torch.ones(100), 0.1, 5, 6, "a")
    assert torch.equal(torch.rand(4), expected)
    torch.manual_seed(4)
    one = norm_noise(torch.ones(100), 0.1, 5, 6, "a")
    torch.manual_seed(5)
    assert torch.equal(one, norm_noise(torch.ones(100), 0.1, 5, 6, "a"))


def test_noise_is_the_same_in_another_process():
    """Python salts `hash(str)` in each process."""
    code = """if True:
        import sys, types
        package = sys.modules["trl_quant"] = types.ModuleType("trl_quant")  # noise needs only torch
        package.__path__ = [sys.argv[1]]
        import torch
        from trl_quant.noise import norm_noise
        print(norm_noise(torch.zeros(4), 1.0, 5, 6, "a").tolist(), "transformers" in sys.modules)
    """
    package = str(ROOT / "trl_quant")
    run = subprocess.run([sys.executable, "-c", code, package], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == f"{norm_noise(torch.zeros(4), 1.0, 5, 6, 'a').tolist()} False"


@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf])
def test_bad_sigma(value):
    with pytest.raises(ValueError, match=f"sigma must be finite and >= 0, got {value}"):
        norm_noise(torch.ones(3), value, 0, 0, "a")


@pytest.mark.parametrize("offset", [False, True])
def test_norm_noise_is_multiplicative_noise_on_the_weights(offset):
    """QeRL eq. 11 and 12: a noised norm, then a linear layer = the norm, then the layer with noised columns."""
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(5, 16, generator=g).double(), torch.randn(16, generator=g).double()
    linear = torch.randn(8, 16, generator=g).double()
    noised = norm_noise(w, 0.3, 0, 0, "a")
    z, gain, noised_gain = noised - w, w + offset, noised + offset
    normed = x / x.pow(2).mean(-1, keepdim=True).sqrt()
    torch.testing.assert_close((normed * noised_gain) @ linear.T, (normed * gain) @ (linear * (1 + z / gain)).T)
    assert z.abs().max() > 0.1


# The norms


MATCHED = {family: norms_of(family) for family in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
def test_two_norms_of_each_layer(family):
    model = tiny_model(family, num_hidden_layers=3)
    names = [name for name, _ in model.named_parameters()]
    found = noised_norms(model.config.model_type, names)
    assert found == [f"model.layers.{i}.{norm}.weight" for i in range(3) for norm in MATCHED[family]]
    others = [n for n in names if "norm" in n and n not in found]
    assert "model.norm.weight" in others  # and q/k norms, and Gemma's post norms


@pytest.mark.parametrize("family", FAMILIES)
def test_the_norms_found_feed_exactly_the_layers_named(family):
    """In the model itself, the input of each named layer is its norm's output; no other layer reads that output."""
    model = tiny_model(family)
    outputs, inputs = {}, {}
    for name, module in model.named_modules():
        if "norm" in name.rpartition(".")[2]:
            module.register_forward_hook(lambda m, a, out, name=name: outputs.setdefault(name, out))
        elif isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda m, a, name=name: inputs.setdefault(name, a[0]))
    model(torch.arange(6)[None])
    feeds = feeding_norms(model.config.model_type, dict(model.named_parameters()))
    for name, linears in feeds.items():
        norm = outputs[name.removesuffix(".weight")]
        assert {n for n, x in inputs.items() if x.shape == norm.shape and torch.equal(x, norm)} == set(linears)


PREFIXES = {
    "plain": "model.layers",
    "multimodal": "model.language_model.layers",
    "multimodal, older": "language_model.model.layers",
    "adapted": "base_model.model.model.layers",
    "bare": "layers",
}


@pytest.mark.parametrize("prefix", PREFIXES.values(), ids=PREFIXES)
def test_names_with_any_prefix(prefix):
    norms = [f"{prefix}.{i}.{n}.weight" for i in (0, 1, 10) for n in MATCHED["gemma3"]]
    others = [
        f"{prefix}.0.self_attn.q_proj.base_layer.weight",
        f"{prefix}.0.self_attn.q_proj.lora_A.default.weight",
        f"{prefix}.0.self_attn.q_norm.weight",
        f"{prefix}.0.post_attention_layernorm.weight",
        "model.vision_tower.vision_model.encoder.layers.0.layer_norm1.weight",
        "model.norm.weight",
    ]
    assert noised_norms("gemma3", others + norms) == norms
    assert feeding_norms("gemma3", others + norms)[norms[0]] == tuple(f"{prefix}.0.self_attn.{x}_proj" for x in "qkv")


def test_fused_layers_of_an_engine_do_not_matter():
    """vLLM keeps the norms' names and fuses the linear layers."""
    names = [
        f"model.layers.0.{n}.weight" for n in ("input_layernorm", "post_attention_layernorm", "self_attn.qkv_proj")
    ]
    assert noised_norms("qwen3", names) == names[:2]


def test_unknown_family():
    with pytest.raises(ValueError, match=r"model_type 'mamba2' is not supported.*Supported are qwen2, qwen3, llama"):
        noised_norms("mamba2", ["backbone.layers.0.norm.weight"])
    for family in families_with("feeds"):
        assert family_of(family).feeds


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "found none"),  # would be a silent no-op
        (["model.layers.0.self_attn.qkv_proj.weight"], "found none"),
        (["transformer.h.0.input_layernorm.weight"], "found none"),
        (["model.layers.0.input_layernorm.bias"], "found none"),
        (
            ["model.layers.0.input_layernorm.weight"],
            r"model.layers.0 must have exactly one post_attention_layernorm.weight in a llama model, found \[\]",
        ),
        (  # a layer without norms between layers with norms
            [f"model.layers.{i}.{n}.weight" for i in (0, 2) for n in MATCHED["llama"]]
            + ["model.layers.1.mlp.up_proj.weight"],
            r"model.layers.1 must have exactly one input_layernorm",
        ),
        (
            [f"{p}.layers.0.{n}.weight" for p in ("policy", "reference") for n in MATCHED["llama"]],
            r"one stack.*found \['policy.layers', 'reference.layers'\]",
        ),
        (
            [f"model.layers.0.{n}.weight" for n in (*MATCHED["llama"], "input_layernorm.base_layer")],
            "found .'model.layers.0.input_layernorm.weight', 'model.layers.0.input_layernorm.base_layer.weight'",
        ),
    ],
)
def test_missing_and_unexpected_norms_are_errors(names, message):
    with pytest.raises(ValueError, match=message):
        noised_norms("llama", names)


@pytest.mark.parametrize("family", FAMILIES)
def test_noise_on_these_norms_changes_what_is_sampled_and_restores(family):
    model, ids = tiny_model(family), torch.arange(12)[None]
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        clean = model(ids).logits
        saved = {n: parameters[n].clone() for n in noised_norms(model.config.model_type, parameters)}
        distance = []
        for value in (0.0, 1e-3, 1e-2, 1e-1):
            for name, weight in saved.items():  # from the clean weight each time: noise never accumulates
                parameters[name].copy_(norm_noise(weight, value, 0, 1, name))
            distance.append((model(ids).logits - clean).norm().item())
        for name, weight in saved.items():
            parameters[name].copy_(weight)
        assert torch.equal(model(ids).logits, clean)
    assert distance[0] == 0 and distance == sorted(distance)
    assert distance[2] == pytest.approx(10 * distance[1], rel=0.3)  # linear in sigma while it is small
