"""Attention along the paths of a trie: what each sample alone has, forward and backward."""

import pytest
import torch
from packed_rows import WINDOWS
from tiny import tiny_model
from transformers import AttentionInterface, Gemma2Config, GptOssConfig, Qwen3NextConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from tree_rows import CAN_GROW, alone, apart, model_of, samples, together

from trl_quant.policy.trees import TREES, why_no_tree


@pytest.mark.parametrize("family", CAN_GROW)
def test_a_trie_is_each_sample_alone(family):
    reference = alone(model_of(family, "eager"))
    assert apart(together(model_of(family, TREES)), reference) < 1e-4
    assert apart(alone(model_of(family, TREES)), reference) < 1e-4  # rows with a mask, as an engine's copy computes


@pytest.mark.parametrize("family", WINDOWS)
def test_a_window_is_as_wide_as_transformers(family):
    reference = alone(model_of(family, "eager"))
    wider = dict(WINDOWS[family], sliding_window=WINDOWS[family]["sliding_window"] + 1)
    assert apart(together(model_of(family, TREES, **wider)), reference) > 1e-2


@pytest.mark.parametrize("family", ["qwen3", *WINDOWS])
def test_rows_without_a_trie_or_a_mask(family):
    """As checks of an engine ask a policy: they have one row, without padding."""
    ids = torch.tensor(samples()[1])[None]
    expected = model_of(family, "eager")(ids, attention_mask=torch.ones_like(ids)).logits
    assert (model_of(family, TREES)(ids).logits - expected).abs().max() < 1e-4


def test_checkpointed_layers_compute_the_same_trie():
    reference = alone(model_of("mistral", "eager"))
    model = model_of("mistral", TREES)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert apart(together(model), reference) < 1e-4


def test_what_ignores_the_trie_is_found():
    """SDPA along the row mixes samples; the comparison sees it."""
    AttentionInterface.register(
        "ignores", lambda *args, **given: sdpa_attention_forward(*args, scaling=given["scaling"])
    )
    model = model_of("qwen3", TREES)
    model.config._attn_implementation = "ignores"
    assert apart(together(model), alone(model_of("qwen3", "eager"))) > 0.1


def test_policies_that_are_refused_by_name():
    assert "linear_attention layers" in why_no_tree(Qwen3NextConfig())
    assert "caps the logits" in why_no_tree(Gemma2Config())
    assert why_no_tree(GptOssConfig()) == "has attention sinks"
    assert "hybrid layers" in why_no_tree(tiny_model("falcon_h1").config)
    assert "dropout" in why_no_tree(tiny_model("qwen2", attention_dropout=0.1).config)
    assert why_no_tree(tiny_model("gemma3").config) is None
