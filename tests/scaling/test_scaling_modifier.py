"""The llmcompressor modifier gives the same bytes as `apply_uaq`, and composes with llmcompressor's own modifiers."""

import math
import sys

import pytest
import torch
from long_tests import rest_is_long
from scaled import logits, same_bytes, state
from tiny import FAMILIES, save_tiny, tiny_model
from transformers import AutoModelForCausalLM

from trl_quant.scaling import apply_uaq, uaq_applied


@pytest.fixture
def modifier(monkeypatch):
    pytest.importorskip("llmcompressor")
    from trl_quant.scaling import UpdateAwareQuantizationModifier

    return UpdateAwareQuantizationModifier


def without_llmcompressor(monkeypatch):
    for name in list(sys.modules):
        if name == "trl_quant.scaling.modifier":
            monkeypatch.delitem(sys.modules, name)
        elif name.partition(".")[0] == "llmcompressor":
            monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "llmcompressor", None)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_modifier_leaves_the_bytes_of_the_function(family, modifier):
    """And leaves llmcompressor's own session unchanged."""
    from llmcompressor.core import CompressionSession, active_session, reset_session

    reset_session()
    active, own = active_session(), CompressionSession()
    through, direct = tiny_model(family), tiny_model(family)
    own.initialize(model=through, recipe=modifier(scale=1.5))
    own.finalize()
    assert apply_uaq(direct, 1.5) == 4
    assert same_bytes(state(through), state(direct))
    assert uaq_applied(through) == uaq_applied(direct) == 1.5
    assert active_session() is active and not active.lifecycle.initialized_


def test_modifier_without_llmcompressor(monkeypatch):
    import trl_quant.scaling

    without_llmcompressor(monkeypatch)
    with pytest.raises(ImportError, match="llmcompressor"):
        trl_quant.scaling.UpdateAwareQuantizationModifier  # noqa: B018
    with pytest.raises(AttributeError):
        trl_quant.scaling.nothing  # noqa: B018


YAML = """
scaling_stage:
  uaq_modifiers:
    UpdateAwareQuantizationModifier:
      scale: 1.5
  quantization_modifiers:
    QuantizationModifier:
      targets: [Linear]
      ignore: [lm_head]
      scheme: {scheme}
"""


@pytest.mark.parametrize("order", rest_is_long(["first", "last", "yaml"], "last", "yaml"))
@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "W8A8"])
@pytest.mark.parametrize("family", rest_is_long(["gemma3", "qwen3"]))
def test_modifier_composes_in_a_recipe(family, scheme, order, modifier, tmp_path):
    """`oneshot` with the modifier and a quantization equals `apply_uaq`, then `oneshot` with the quantization."""
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier

    path = save_tiny(tmp_path, family, tied=False)

    def quantized(model, recipe):
        oneshot(model=model, recipe=recipe, pipeline="datafree")
        return model

    def load():
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    def quantization():
        return QuantizationModifier(targets="Linear", scheme=scheme, ignore=["lm_head"])

    recipe = {
        "first": [modifier(scale=1.5), quantization()],
        "last": [quantization(), modifier(scale=1.5)],  # it always acts before anything is observed
        "yaml": YAML.format(scheme=scheme),
    }[order]
    mine = quantized(load(), recipe)
    by_hand = load()
    apply_uaq(by_hand, 1.5)
    by_hand = quantized(by_hand, [quantization()])
    assert uaq_applied(mine) == uaq_applied(by_hand) == 1.5
    assert same_bytes(state(mine), state(by_hand))
    assert torch.equal(logits(mine), logits(by_hand))
    assert any("weight_scale" in name for name in state(mine))
    plain = quantized(load(), [quantization()])
    assert not same_bytes(state(plain), state(mine))
    name = "model.layers.0.self_attn.q_proj.weight_scale"
    torch.testing.assert_close(state(plain)[name] / state(mine)[name], torch.full_like(state(mine)[name], 1.5))


@pytest.mark.parametrize("scale", [0, -1, math.nan])
def test_modifier_refuses_a_bad_scale(modifier, scale):
    with pytest.raises(ValueError, match="must be a number from"):
        modifier(scale=scale)
