"""What is quantized in a hybrid, and what feeds what: its gates, convolutions and states keep their type."""

import pytest
import torch
from tiny import HYBRIDS, tiny_model

from trl_quant.models.linears import gates_of, is_quantizable, keeps_type, linears, sent_with, unquantized_linears
from trl_quant.models.norms import feeding_norms
from trl_quant.scaling import apply_uaq


every_hybrid = pytest.mark.parametrize("family", HYBRIDS)
ATTENTION = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
DENSE = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
SHARED = [f"mlp.shared_expert.{leaf}" for leaf in ("gate_proj", "up_proj", "down_proj")]
ROUTED = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", *SHARED]
MAMBA = ["mamba.in_proj", "mamba.out_proj", *(f"feed_forward.{leaf}_proj" for leaf in ("gate", "up", "down"))]
# The quantized layers of the first decoder layer and of the second
QUANTIZED = {
    "qwen3_5_text": (
        [*(f"linear_attn.{leaf}" for leaf in ("in_proj_qkv", "in_proj_z", "out_proj")), *DENSE],
        [*ATTENTION, *DENSE],
    ),
    "qwen3_next": (["linear_attn.in_proj_qkvz", "linear_attn.out_proj", *ROUTED], [*ATTENTION, *ROUTED]),
    "falcon_h1": ([*ATTENTION, *MAMBA], [*ATTENTION, *MAMBA]),
}
# The gates of a model, and of other layers those that an engine computes as one matrix
GATES = {"qwen3_5_text": ["in_proj_b", "in_proj_a"], "qwen3_next": ["in_proj_ba"], "falcon_h1": []}
JOINED = {"qwen3_5_text": ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z")}
MLP_NORM = {"falcon_h1": "pre_ff_layernorm"}


def of_layer(index: int, names: list[str]) -> list[str]:
    return [f"model.layers.{index}.{name}" for name in names]


@every_hybrid
def test_the_quantized_layers(family):
    model = tiny_model(family, tied=False)
    found = linears(model)
    assert set(found) == {name for index in (0, 1) for name in of_layer(index, QUANTIZED[family][index])}
    gates = of_layer(0, [f"linear_attn.{leaf}" for leaf in GATES[family]])
    assert sorted(gates_of(model)) == sorted(gates) and set(gates) <= set(unquantized_linears(model))
    for name, tensor in model.state_dict().items():  # a checkpoint's reader sees names and shapes alone
        is_matrix = name.removesuffix(".weight") in found and name.endswith(".weight")
        assert is_quantizable(name, tensor) == is_matrix, name
    assert all(keeps_type(f"{name}.weight") for name in gates)
    if family in JOINED:
        joined = tuple(of_layer(0, JOINED[family]))
        assert [found[name].fused for name in joined] == [joined, joined]
        assert {sent_with(f"{name}.weight") for name in (*joined, *gates)} == {"model.layers.0.linear_attn"}


@every_hybrid
def test_one_norm_feeds_all_that_reads_a_layers_input(family):
    """A norm's factor scales the inputs of the layers in the table, as hooks see them, and of no other matrix."""
    model = tiny_model(family)
    feeds = feeding_norms(model.config.model_type, dict(model.named_parameters()))
    norms = ["input_layernorm", MLP_NORM.get(family, "post_attention_layernorm")]
    assert list(feeds) == [f"{name}.weight" for index in (0, 1) for name in of_layer(index, norms)]
    ids = torch.randint(3, 250, (1, 12), generator=torch.Generator().manual_seed(0))
    seen: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda _, args, output, name=name: seen.update({name: args[0].clone()}))
    with torch.no_grad():
        model(ids)
        before = dict(seen)
        norm = model.get_parameter("model.layers.0.input_layernorm.weight")
        norm.copy_(2 * norm if family == "falcon_h1" else 2 * (1 + norm) - 1)
        model(ids)
    first = {name for name in before if name.startswith("model.layers.0.")}
    doubled = {name for name in first if (seen[name] - 2 * before[name]).norm() < 1e-4 * before[name].norm()}
    assert doubled == set(feeds["model.layers.0.input_layernorm.weight"])
    assert len(first) > len(doubled)


@every_hybrid
def test_uaq_keeps_the_output_and_needs_each_layer(family):
    ids = torch.randint(3, 250, (2, 24), generator=torch.Generator().manual_seed(0))

    @torch.no_grad()
    def logits(model):
        return model(ids).logits

    model = tiny_model(family)
    before, original = logits(model), {name: param.clone() for name, param in model.named_parameters()}
    assert apply_uaq(model, 1.5) == 4
    assert (logits(model) - before).abs().max() < 2e-5 * before.abs().max()
    params = dict(model.named_parameters())
    fed = feeding_norms(model.config.model_type, params)["model.layers.0.input_layernorm.weight"]
    assert not [name for name in fed if torch.equal(params[f"{name}.weight"], original[f"{name}.weight"])]
    for name in fed:  # such as a gate, which is not quantized and is scaled all the same
        kept = params[f"{name}.weight"].detach().clone()
        params[f"{name}.weight"].data.copy_(original[f"{name}.weight"])
        assert (logits(model) - before).abs().max() > 1e-3 * before.abs().max(), name
        params[f"{name}.weight"].data.copy_(kept)
