"""Dense families beyond those that every test builds: what the table of families says of each, and that it holds."""

import pytest
import torch
import transformers
from long_tests import rest_is_long
from packed_rows import PROMPT, batch, gradients, model_of
from places import ROOT
from tiny import FAMILIES, FURTHER, SCALED, SIZES, START, tiny_model, tiny_tokenizer
from torch import nn
from training import parameters, trainer_for

from trl_quant.models import page
from trl_quant.models.families import FAMILIES as TABLE
from trl_quant.models.linears import is_quantizable, linears, unquantized_linears
from trl_quant.models.norms import feeding_norms
from trl_quant.policy.frozen import freeze
from trl_quant.policy.packed import PackedRows, accept_packed_rows
from trl_quant.policy.unified import unify
from trl_quant.precisions import bitsandbytes_bases, frozen_bases, qat_precisions, unified_flows
from trl_quant.scaling import apply_uaq
from trl_quant.storage.layout import checkpoint_stream


IDS = torch.arange(24).view(2, 12) + 40
FED = [family for family in FURTHER if TABLE[family].feeds]


def outputs(model) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


# Linear layers and norms


def readers(model) -> dict[str, set[str]]:
    """Each norm of a decoder layer that has a weight and no bias -> the linear layers that read what it returns."""
    written, read = {}, {}
    for name, module in model.named_modules():
        if "norm" in name.rpartition(".")[2] and [key for key, _ in module.named_parameters()] == ["weight"]:
            module.register_forward_hook(lambda m, x, y, name=name: written.setdefault(name, y))
        elif isinstance(module, nn.Linear) and name != "lm_head":
            module.register_forward_pre_hook(lambda m, x, name=name: read.setdefault(name, x[0]))
    model(IDS)
    return {
        norm: {name for name, x in read.items() if x.shape == y.shape and torch.equal(x, y)}
        for norm, y in written.items()
    }


@pytest.mark.parametrize("family", FURTHER)
def test_what_feeds_what(family):
    """In the model itself a norm feeds just the layers of the table; where that has none, no norm feeds any."""
    model = tiny_model(family)
    found = {f"{norm}.weight": fed for norm, fed in readers(model).items() if fed}
    named = feeding_norms(family, dict(model.named_parameters())) if family in FED else {}
    assert found == {norm: {*fed} for norm, fed in named.items()}
    assert bool(found) == (family in FED)


@pytest.mark.parametrize("family", FURTHER)
def test_what_is_quantized(family):
    """Each linear layer of the decoder, in a model and in its checkpoint; the head and the embeddings are not."""
    model = tiny_model(family, tied=False)
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and ".layers." in name]
    found, ignore = linears(model), unquantized_linears(model)
    heads = [f"{name}.self_attn.{x}_norm" for name in ("model.layers.0", "model.layers.1") for x in "qk"]
    assert [*found] == layers and ignore == [*(heads if family == "cohere" else ()), "lm_head"]
    assert {f"{name}.weight" for name in layers} == {
        n for n, p in model.named_parameters() if is_quantizable(n, p, ignore)
    }
    fused = {tuple(name.rpartition(".")[2] for name in layer.fused) for layer in found.values() if len(layer.fused) > 1}
    assert fused == {*TABLE[family].fused} & fused and ("q_proj", "k_proj", "v_proj") in fused


@pytest.mark.parametrize("family", FED)
def test_scaling_keeps_the_function(family):
    """UAQ changes no output beyond rounding, and its two halves each change it."""
    model = tiny_model(family)
    before, norms = outputs(model), [*feeding_norms(family, dict(model.named_parameters()))]
    assert apply_uaq(model, 1.5) == len(norms)
    assert (outputs(model) - before).abs().max() < 1e-4 * before.abs().max()
    gains, plain = dict(model.named_parameters()), dict(tiny_model(family).named_parameters())
    with torch.no_grad():
        for norm in norms:
            assert not torch.equal(gains[norm], plain[norm])
            gains[norm].copy_(plain[norm])
    assert (outputs(model) - before).abs().max() > 1e-2 * before.abs().max()


def test_a_stream_shares_scales_as_the_engine_fuses():
    """An engine may fuse other layers than the table says; the table stands for an engine that cannot be asked."""
    weights = [(f"a.{x}_proj.weight", (i + 1) * torch.eye(32)) for i, x in enumerate("qkv")]

    def scales(**siblings) -> list[float]:
        stored = dict(checkpoint_stream(weights, "nvfp4", **siblings))
        return [stored[f"{name}_global_scale"].item() for name, _ in weights]

    alone = scales(siblings=lambda name: (name,))
    assert len({*alone}) == 3 and {*scales()} == {alone[2]}
    pair = ("a.q_proj", "a.k_proj")
    assert scales(siblings=lambda name: pair if name in pair else (name,)) == [alone[1], alone[1], alone[2]]


# Attention


def of_rows_alone(model, given) -> tuple:
    """As [`gradients`], of each row by itself and without its padding."""
    kept, logps = {}, torch.zeros(len(given["input_ids"]), given["input_ids"].shape[1] - 1)
    weights = torch.linspace(-1, 1, logps.numel()).view_as(logps)
    for row, mask in enumerate(given["attention_mask"].bool()):
        alone = {name: tensor[row][mask][None] for name, tensor in given.items()}
        scores = model(**alone, fused_lm_head=True).log_probs[0]
        places = mask.nonzero()[1:, 0] - 1
        counts = alone["labels"][0, 1:] != -100
        logps[row, places] = (scores * counts).detach()
        model_loss = (scores * weights[row, places] * counts).sum()
        for name, grad in zip(
            kept or dict(model.named_parameters()), torch.autograd.grad(model_loss, [*model.parameters()])
        ):
            kept[name] = kept.get(name, 0) + grad
    return logps, kept


@pytest.mark.parametrize("family", [family for family in FURTHER if TABLE[family].packs])
def test_packed_rows_are_the_rows_alone(family):
    """
    And padded rows are these too, but in a family of which the table says that they are not, and in Ministral 3 where
    rows are longer than the steps in which it scales queries.
    """
    is_placed = family == "ministral3"
    model, given = model_of(family, **{"rope_parameters": SCALED} if is_placed else {}), batch()
    logps, exact = of_rows_alone(model, given)
    padded = gradients(model, model, given)
    accept_packed_rows(model)
    found = {"padded": padded} | {
        shares: gradients(model, PackedRows(model, PROMPT, shares), given) for shares in (True, False)
    }
    for way, (found_logps, _, grads) in found.items():
        is_same = (found_logps - logps).abs().max() < 1e-4
        near = max((grads[name] - grad).norm() / grad.norm() for name, grad in exact.items()) < 3e-5
        assert is_same == near == (way != "padded" or (TABLE[family].pads and not is_placed)), way


@pytest.mark.parametrize("family", [family for family in FURTHER if TABLE[family].both_ways])
@pytest.mark.parametrize("is_causal", [True, False])
def test_both_directions(family, is_causal):
    """Each token sees the last one, padded or not, and with the causal mask none does."""
    model, other = tiny_model(family, is_causal=is_causal), IDS.clone()
    mask = torch.ones_like(IDS)
    mask[1, :2] = 0
    other[:, -1] = 99
    with torch.no_grad():
        moved = [model(input_ids=ids, attention_mask=mask).logits[:, 2:-1] for ids in (IDS, other)]
    difference = (moved[0] - moved[1]).abs().amax(-1)
    assert (difference == 0).all() if is_causal else (difference > 0.02).all()


# Training


def unified(model, precision: str) -> None:
    unify(model, precision)


BRIEFLY = ("cohere2", "glm4", "granite", "olmo2", "smollm3", "starcoder2")  # of which each block is built otherwise
WAYS = [(unified, name) for name in (*unified_flows(), *qat_precisions())]
WAYS += [(freeze, name) for name in frozen_bases() if name not in bitsandbytes_bases()]


@pytest.mark.parametrize("family", rest_is_long(FURTHER, *BRIEFLY))
def test_each_training_precision(family):
    """The gradient that reaches the embeddings is near that of 16 bits, by the format's rounding, and not the same."""
    options = {"num_hidden_layers": 1, "tied": False, "dtype": torch.bfloat16}
    if "layer_types" in FURTHER[family][1]:
        options["layer_types"] = ["sliding_attention"]
    layers = linears(tiny_model(family, **options))

    def gradient(change=None, precision=None) -> torch.Tensor:
        model = tiny_model(family, **options)
        if change is not None:
            change(model, precision)
            assert not [name for name in layers if type(model.get_submodule(name)) is nn.Linear]
        model(IDS, labels=IDS).loss.backward()
        return model.get_input_embeddings().weight.grad.float()

    exact = gradient()
    for change, precision in WAYS:
        distance = (gradient(change, precision) - exact).norm() / exact.norm()
        assert 1e-2 < distance < 0.6, (precision, distance)


@pytest.mark.parametrize("family", rest_is_long(FURTHER, *BRIEFLY))
def test_a_step_in_the_embedded_engine(tmp_path, family):
    """The engine samples in INT8, its check finds the policy's function, and the step moves every weight."""
    tokenizer = tiny_tokenizer()
    tokenizer.bos_token = START  # CWM needs one
    settings = {"rollout_precision": "int8", "max_steps": 1}
    trainer = trainer_for(tmp_path, tiny_model(family), processing_class=tokenizer, **settings)
    before = parameters(trainer)
    trainer.train()
    assert trainer.state.log_history[0]["mismatch/kl_k3"] < 5e-3
    assert not [name for name, param in parameters(trainer).items() if torch.equal(param, before[name])]


# The page


def test_the_page_is_made_from_the_table():
    assert (ROOT / "docs/models.md").read_text() == page.markdown()
    assert {*page.dense_families()} == {*FAMILIES, *FURTHER}
    for name in page.dense_families():
        assert (name in page.UNFED) == (not TABLE[name].feeds)


# Outside the table


def outside(**changes) -> nn.Module:
    """A decoder of a family that is not in the table."""
    config = transformers.HeliumConfig(**SIZES | {"head_dim": 32, "num_key_value_heads": 2} | changes)
    return transformers.AutoModelForCausalLM.from_config(config).float()


def test_a_family_outside_the_table_samples_after_the_check(tmp_path, caplog):
    trainer = trainer_for(tmp_path, outside(), rollout_precision="int8", max_steps=2)
    assert "is not among the families" not in caplog.text
    trainer.train()
    assert [entry["mismatch/kl_k3"] < 5e-3 for entry in trainer.state.log_history[:2]] == [True, True]
    said = [line for line in caplog.messages if "`model_type`='helium' is not among the families" in line]
    assert len(said) == 1


@pytest.mark.parametrize("fault", ["hook", "epsilon"])
def test_what_its_policy_does_otherwise_is_found(tmp_path, fault):
    trainer = trainer_for(tmp_path, outside(), rollout_precision="int8", max_steps=1)
    norm = trainer.model.model.layers[1].input_layernorm
    if fault == "hook":
        norm.register_forward_hook(lambda module, args, output: output * 1.5)
    else:
        norm.variance_epsilon = 1.0
    with pytest.raises(RuntimeError, match=r"input_layernorm.*|another function"):
        trainer.train()


REFUSED_OUTSIDE = {
    "noise_schedule": {"noise_schedule": "exponential"},
    "uaq_scale": {"uaq_scale": 1.5},
    "pack_sequences": {"pack_sequences": True},
    "train_precision": {"train_precision": "int8"},
    "exact_rollouts": {"exact_rollouts": True, "train_precision": "int8", "use_vllm": True},
}


@pytest.mark.parametrize("field", REFUSED_OUTSIDE)
def test_what_is_refused_outside_the_table(tmp_path, field):
    settings = {"rollout_precision": None if "train" in str(REFUSED_OUTSIDE[field]) else "int8"}
    if field == "exact_rollouts":
        pytest.importorskip("vllm", reason="vLLM is not installed")
    named = "train_precision" if "train_precision" in REFUSED_OUTSIDE[field] else field  # which exact rollouts need
    with pytest.raises(ValueError, match=f"`{named}`.*helium"):
        trainer_for(tmp_path, outside(), **settings | REFUSED_OUTSIDE[field])
