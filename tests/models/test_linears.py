"""The map from a model to its quantizable linear layers: against the models themselves, their checkpoints, and vLLM."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import FAMILIES, MIXTURES, norms_of, save_tiny_vision, tiny_model
from torch import nn
from transformers import Blip2ForConditionalGeneration, DeepseekV3Config, DeepseekV3ForCausalLM

from trl_quant.models import families
from trl_quant.models.linears import (
    FusedGroups,
    fused_layer,
    fused_with,
    is_quantizable,
    linears,
    sampled_linears,
    unquantized_linears,
)
from trl_quant.models.names import place_in_layer


# path of a decoder layer's linear layer -> the layers that an engine fuses with it, the norm that feeds it
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
OTHERS = {path: ((path,), None) for path in ("self_attn.o_proj", "mlp.down_proj")}
JOINED = {"phi3": (("self_attn.qkv_proj",), ("mlp.gate_up_proj",))}


def expected(family: str) -> dict[str, tuple]:
    found = dict(OTHERS)
    for group, norm in zip(JOINED.get(family, (QKV, GATE_UP)), norms_of(family), strict=True):
        found |= dict.fromkeys(group, (group, norm))
    return found


def adapted(model: nn.Module, **settings) -> nn.Module:
    return get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", **settings)).get_base_model()


@pytest.mark.parametrize("with_adapter", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_map_of_each_family(family, with_adapter):
    plain = tiny_model(family, tied=False)
    weights = {name: tuple(param.shape) for name, param in plain.named_parameters()}
    model = adapted(plain) if with_adapter else plain
    found = linears(model)
    assert found == sampled_linears(model)
    assert {layer.name: (layer.fused, layer.norm) for layer in found.values()} == {
        f"model.layers.{i}.{path}": (
            tuple(f"model.layers.{i}.{other}" for other in fused),
            norm and f"model.layers.{i}.{norm}",
        )
        for i in range(2)
        for path, (fused, norm) in expected(family).items()
    }
    for place, layer in found.items():
        assert model.get_submodule(place).weight.shape == layer.shape == weights[f"{layer.name}.weight"]
        assert place == (f"{layer.name}.base_layer" if with_adapter else layer.name)
        assert not layer.is_expert
    assert unquantized_linears(model) == ["lm_head"] and unquantized_linears(model, head=False) == []


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_checkpoints_are_read_as_models_are(family, tied):
    model = tiny_model(family, tied=tied)
    ignore = unquantized_linears(model)
    by_name = {name for name, tensor in model.state_dict().items() if is_quantizable(name, tensor, ignore)}
    assert by_name == {f"{layer.name}.weight" for layer in linears(model).values()}


def test_a_layer_that_is_trained_whole_keeps_its_name():
    model = adapted(tiny_model(tied=False), modules_to_save=["lm_head", "model.layers.0.self_attn.q_proj"])
    place = "model.layers.0.self_attn.q_proj.modules_to_save.default"
    assert linears(model)[place].name == "model.layers.0.self_attn.q_proj"
    assert "lm_head" in unquantized_linears(model) and unquantized_linears(model, head=False) == []


def test_a_vision_tower_and_the_head_are_left(tmp_path):
    model = Blip2ForConditionalGeneration.from_pretrained(save_tiny_vision(tmp_path / "model"))
    assert model.get_output_embeddings() in model.get_decoder().modules()
    inside = {name for name, module in model.language_model.model.named_modules() if isinstance(module, nn.Linear)}
    assert {layer.name for layer in linears(model).values()} == {f"language_model.model.{x}" for x in inside}
    query, *_ = linears(model).values()
    assert len(query.fused) == 3 and query.norm is None  # OPT's norms are not RMSNorms
    outside = unquantized_linears(model, head=False)
    assert "vision_model.encoder.layers.0.mlp.fc1" in outside
    assert unquantized_linears(model) == [*outside, "language_model.lm_head"]


@pytest.mark.parametrize("family", MIXTURES)
def test_experts_are_described(family):
    model = tiny_model(family)
    width = getattr(model.config, "moe_intermediate_size", model.config.intermediate_size)
    of_model = linears(model)
    assert sampled_linears(model) == of_model
    found = {name.removeprefix("model.layers.1."): layer for name, layer in of_model.items() if ".1." in name}
    experts = {name: layer.shape for name, layer in found.items() if layer.is_expert}
    assert experts == {"mlp.experts.gate_up_proj": (4, 2 * width, 128), "mlp.experts.down_proj": (4, 128, width)}
    shared = {"qwen2_moe": "mlp.shared_expert", "glm4_moe": "mlp.shared_experts"}.get(family)
    others = [f"{shared}.{leaf}_proj" for leaf in ("gate", "up", "down")] if shared else []
    assert found.keys() - experts == {*QKV, "self_attn.o_proj", *others}  # and no router
    assert all(model.get_parameter(layer.weight).shape == layer.shape for layer in of_model.values())
    norms = dict.fromkeys(QKV, "model.layers.1.input_layernorm")
    fed = ("mlp.experts.gate_up_proj", *others[:2])
    norms |= dict.fromkeys(fed, "model.layers.1.post_attention_layernorm")
    assert {path: layer.norm for path, layer in found.items() if layer.norm} == norms


def test_experts_of_other_families_or_layouts_are_sampled_from_nowhere():
    sizes = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "n_routed_experts": 4}
    sizes |= {"num_hidden_layers": 1, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1, "vocab_size": 320}
    other = DeepseekV3ForCausalLM(DeepseekV3Config(**sizes, num_attention_heads=4, num_experts_per_tok=2))
    apart = tiny_model("qwen3_moe", num_hidden_layers=1)
    mlp = apart.model.layers[0].mlp
    mlp.experts = nn.ModuleList([type(tiny_model().model.layers[0].mlp)(apart.config)])
    for model in (other, apart):
        assert linears(model)
        with pytest.raises(ValueError, match=r"these experts cannot be quantized\. Supported are .*qwen3_moe"):
            sampled_linears(model)


def test_experts_that_are_modules_of_their_own():
    model = tiny_model(num_hidden_layers=1)
    mlp = model.model.layers[0].mlp
    mlp.gate, mlp.experts = nn.Linear(128, 2), nn.ModuleList([type(mlp)(model.config)])
    expert = linears(model)["model.layers.0.mlp.experts.0.up_proj"]
    assert expert.is_expert and expert.shape == (256, 128)
    assert expert.fused == tuple(f"model.layers.0.mlp.experts.0.{x}_proj" for x in ("gate", "up"))
    assert unquantized_linears(model) == ["model.layers.0.mlp.gate", "lm_head"]


# Fused layers


def test_no_two_families_fuse_one_name_otherwise():
    """Names alone tell what is fused, so that a name can stand in one group only."""
    names = [name for group in families.FUSED for name in group]
    assert len(names) == len(set(names))


@pytest.mark.vllm
@pytest.mark.parametrize("family", FAMILIES)
def test_fused_layers_are_those_of_vllm(family):
    pytest.importorskip("vllm")
    from vllm import ModelRegistry

    model = tiny_model(family)
    vllms = ModelRegistry.models[type(model).__name__].load_model_cls()
    joined = {tuple(parts) for parts in vllms.packed_modules_mapping.values() if len(parts) > 1}
    assert set(families.family_of(model.config.model_type).fused) == joined


def test_fused_names():
    assert fused_with("a.k_proj") == ("a.q_proj", "a.k_proj", "a.v_proj")
    assert fused_with("q_proj") == ("q_proj", "k_proj", "v_proj")
    assert fused_with("a.o_proj") == ("a.o_proj",)
    assert {fused_layer(f"a.{x}_proj.weight_scale") for x in "qkv"} == {"a.q_proj+k_proj+v_proj"}
    assert fused_layer("a.o_proj.weight") == "a.o_proj"
    assert place_in_layer("model.norm.weight") is None


def test_fused_layers_wait_for_each_other():
    groups, weights = FusedGroups(), {f"a.{x}_proj": torch.tensor(i) for i, x in enumerate("qokvq")}
    done = [groups.add(name, weight) for name, weight in weights.items()]
    assert [list(group) for group in done] == [[], ["a.o_proj"], [], ["a.q_proj", "a.k_proj", "a.v_proj"]]
    assert groups.add("b.v_proj", weights["a.v_proj"]) == groups.add("c.up_proj", weights["a.v_proj"]) == {}
    assert [list(group) for group in groups.rest()] == [["b.v_proj"], ["c.up_proj"]]
    assert list(groups.rest()) == []
    without_values = FusedGroups({"a.q": ("a.q", "a.k"), "a.k": ("a.q", "a.k")}.__getitem__)
    assert not without_values.add("a.k", weights["a.k_proj"])
    assert list(without_values.add("a.q", weights["a.q_proj"])) == ["a.k", "a.q"]
