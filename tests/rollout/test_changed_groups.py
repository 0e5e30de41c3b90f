"""
What a sync leaves out: a group of tensors counts as unchanged only if the stream's tensors are the same, bit for bit,
whatever has changed the policy. The reference streams all tensors before and after each change.
"""

import pytest
import torch
from embedded import engine
from peft import LoraConfig, get_peft_model
from tiny import tiny_model
from training import lora

from trl_quant.models.linears import sent_with
from trl_quant.rollout.fingerprint import fingerprint


EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
ATTENTION = ["q_proj", "v_proj"]
LAYER = "model.layers.1"


def find(model, path: str):
    """The module or parameter at the end of a path of the policy, without PEFT's wrappers."""
    return next(
        x for kind in ("modules", "parameters") for n, x in getattr(model, f"named_{kind}")() if n.endswith(path)
    )


def add(path: str):
    def change(model):
        find(model, path).data.view(-1)[5] += 0.25

    return change


def scaled(model) -> None:
    find(model, "layers.1.self_attn.q_proj").set_scale("default", 3.0)


def exchanged(model) -> None:
    experts = find(model, f"layers.1.{EXPERTS[1]}").data
    experts.copy_(experts[[1, 0, 2, 3]])


def other_adapter(model) -> None:
    model.add_adapter("other", lora(target_modules=ATTENTION))


ATTENDS, MLP, OF_EXPERTS = f"{LAYER}.self_attn", f"{LAYER}.mlp", f"{LAYER}.mlp.experts"
BOTH = {f"model.layers.{n}.self_attn" for n in range(2)}
# change -> the groups that a sync must send after it
CHANGES = {
    "A of one layer": (add("layers.1.self_attn.q_proj.lora_A.default.weight"), {ATTENDS}),
    "B of another": (add("layers.0.self_attn.v_proj.lora_B.default.weight"), {"model.layers.0.self_attn"}),
    "the base under an adapter": (add("layers.1.self_attn.q_proj.base_layer.weight"), {ATTENDS}),
    "an adapter's scale": (scaled, {ATTENDS}),
    "no adapter": (lambda model: model.base_model.disable_adapter_layers(), BOTH),
    "a merged adapter": (lambda model: model.merge_adapter(), BOTH),
    "a frozen layer": (add("layers.1.self_attn.o_proj.weight"), {ATTENDS}),
    "a norm": (add("layers.1.input_layernorm.weight"), {LAYER}),
    "a head's norm": (add("layers.1.self_attn.k_norm.weight"), {ATTENDS}),
    "the embeddings": (add("embed_tokens.weight"), {"model"}),
    "a router": (add("layers.1.mlp.gate.weight"), {MLP}),
    "one expert": (add(f"layers.1.{EXPERTS[0]}"), {OF_EXPERTS}),
    "two experts exchanged": (exchanged, {OF_EXPERTS}),
    "the module that is trained whole": (add("lm_head.modules_to_save.default.weight"), {""}),
    "its original": (add("lm_head.original_module.weight"), {"lm_head"}),
    "nothing": (lambda model: None, set()),
    "one more adapter": (other_adapter, None),
    "another type": (lambda model: find(model, "layers.1.mlp.gate").bfloat16(), None),
}


def adapted(family: str = "qwen3_moe", **given):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return get_peft_model(tiny_model(family, tied=False), LoraConfig(r=4, init_lora_weights=False, **given))


@pytest.mark.parametrize("change", CHANGES)
def test_groups_are_those_whose_tensors_differ(change):
    saved = None if change == "no adapter" else ["lm_head"]
    model = adapted(target_modules=ATTENTION, modules_to_save=saved)
    weights = engine(model, "bf16").weights
    before, held = {name: tensor.clone() for name, tensor in weights}, fingerprint(model)
    assert weights.changed_groups(held, held) == set() and weights.changed_groups(None, held) is None
    made, expected = CHANGES[change]
    made(model)
    found, now = weights.changed_groups(held, fingerprint(model)), dict(weights)
    differing = {sent_with(name) for name, tensor in now.items() if not torch.equal(tensor, before[name])}
    assert found == expected
    if change == "its original":  # its copy alone is sampled from; an engine does not know the group, and sends all
        assert not differing
    elif change == "a merged adapter":  # the sum is the same, up to rounding
        assert differing <= found
    elif expected is not None:
        assert differing == found
    streamed = dict(weights.stream(groups=found))
    assert streamed.keys() == {name for name in now if found is None or sent_with(name) in found}
    assert all(torch.equal(tensor, now[name]) for name, tensor in streamed.items())


@pytest.mark.parametrize("leaf", ["gate_up_proj", "down_proj"])
def test_adapters_of_experts(leaf):
    """PEFT puts one wrapper into the other; either changes the experts, and nothing else."""
    model = adapted(target_modules=[], target_parameters=EXPERTS)
    weights = engine(model, "bf16").weights
    wrappers = {module.parameter_name: module for module in model.modules() if hasattr(module, "parameter_name")}
    assert set(wrappers) == {"gate_up_proj", "down_proj"}
    for change in (
        lambda: wrappers[leaf].lora_B["default"].weight.data.add_(0.1),
        lambda: wrappers[leaf].scaling.update(default=0.5),
    ):
        before, held = {name: tensor.clone() for name, tensor in weights}, fingerprint(model)
        change()
        found = weights.changed_groups(held, fingerprint(model))
        differing = [name for name, tensor in weights if not torch.equal(tensor, before[name])]
        assert differing == [f"model.layers.1.mlp.experts.{leaf}"] and found == {OF_EXPERTS}


def test_a_tied_head():
    """Streamed once, by the name of the embeddings."""
    model = tiny_model("qwen3", tied=True)
    weights, held = engine(model, "bf16").weights, fingerprint(model)
    model.lm_head.weight.data[3] *= 2
    assert weights.changed_groups(held, fingerprint(model)) == {"model"}
    assert [name for name, _ in weights.stream(groups={"model"})] == ["model.embed_tokens.weight", "model.norm.weight"]


def test_every_layer_that_an_engine_fuses_is_in_one_group():
    for group in (("q", "k", "v", "o"), ("gate", "up", "down")):
        parent = f"{LAYER}.self_attn" if "q" in group else f"{LAYER}.mlp"
        assert {sent_with(f"{parent}.{leaf}_proj.{kind}") for leaf in group for kind in ("weight", "bias")} == {parent}
    assert sent_with(f"{OF_EXPERTS}.gate_up_proj") == sent_with(f"{OF_EXPERTS}.down_proj_scale") == OF_EXPERTS
    assert sent_with(f"{MLP}.gate.weight") == sent_with(f"{MLP}.gate.e_score_correction_bias") == MLP
    assert sent_with(f"{MLP}.shared_experts.up_proj.weight") == f"{MLP}.shared_experts"
