"""Attention along the paths of a trie: what each sample alone has, forward and backward."""

import pytest
import torch
from packed_rows import WINDOWS
from tiny import SIZES, tiny_model
from torch import nn
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    Gemma2Config,
    GptOssConfig,
    Qwen3NextConfig,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from tree_rows import CAN_GROW, alone, apart, model_of, samples, together
from trl.trainer.utils import add_fused_lm_head

from trl_quant.policy.trees import IGNORE_TRIES, TREES, attend_tree, check_tree, why_no_tree


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


class InPlace(nn.Module):
    """A model that takes positions from a token's place in its row."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, position_ids=None, **row):
        return self.model(**row)


def other(family: str, **settings):
    """A model of a family that is not in the table, with weights large enough for its attention to matter."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES | settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for param in model.parameters():
        param.data += 0.1 * torch.randn_like(param)
    add_fused_lm_head(model, temperature=0.9)
    return model.train()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", CAN_GROW)
def test_families_pass_the_check(family, dtype):
    model = model_of(family, "sdpa").to(dtype)
    model.lm_head.eval()
    before = {name: module.training for name, module in model.named_modules()}
    check_tree(model, model)
    assert {name: module.training for name, module in model.named_modules()} == before
    assert model.config._attn_implementation == TREES


@pytest.mark.parametrize("autocast", [False, True])
def test_log_probabilities_of_millions_are_as_exact_as_their_dtype(autocast):
    """Of a policy that gives most tokens no probability, as those of `benchmarks/async_step.py`; 20 of them."""
    for seed in range(20):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model("qwen3", **SIZES | {"initializer_range": 0.02}), dtype=torch.bfloat16
        )
        model.get_input_embeddings().weight.data.normal_()[:, 0] = 8
        model.lm_head.weight.data[::2, 0] = -(2.0**20)
        model.to(torch.float32 if autocast else torch.bfloat16)
        add_fused_lm_head(model, temperature=1.0)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            check_tree(model, model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["stablelm", "nemotron"])
def test_layers_that_drop_the_trie_are_found(family, dtype):
    """Plain SDPA over the whole row, as if no trie were given."""
    model = other(family, max_position_embeddings=128).to(dtype)
    with pytest.raises(ValueError, match=rf"{type(model).__name__}, does .* nats off .* with QuantGRPOTrainer\.$"):
        check_tree(model, model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_positions_by_place_are_found(dtype):
    model = model_of("qwen3", "sdpa").to(dtype)
    with pytest.raises(ValueError, match="Qwen3ForCausalLM, does not compute samples that share a row"):
        check_tree(InPlace(model), model)


def test_arguments_that_a_model_does_not_take_are_told():
    class Strict(InPlace):
        def forward(self, input_ids, shift_labels, fused_lm_head, attention_mask=None):
            return self.model(
                input_ids=input_ids,
                attention_mask=attention_mask,
                shift_labels=shift_labels,
                fused_lm_head=fused_lm_head,
            )

    model = model_of("qwen3", "sdpa")
    with pytest.raises(ValueError, match=r"Qwen3ForCausalLM, .*TypeError: .*position_ids.*QuantGRPOTrainer"):
        check_tree(Strict(model), model)


def test_sinks_are_refused_where_they_arrive():
    q = torch.randn(1, 4, 3, 16)
    with pytest.raises(ValueError, match=r"Linear has attention sinks \(`s_aux`\)"):
        attend_tree(nn.Linear(1, 1), q, q, q, None, scaling=0.25, s_aux=torch.zeros(4))


ROPES = {
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [3.0] * 8,
        "original_max_position_embeddings": 16,
    },
}


@pytest.mark.parametrize("kind", ROPES)
def test_positions_of_the_longest_row_are_refused(kind):
    """A row of several samples is longer than each of them."""
    config = tiny_model("llama").config
    assert why_no_tree(config) is None
    config.rope_parameters = ROPES[kind]
    assert f"has `rope_type`={kind!r}, which changes where a row is longer than" in why_no_tree(config)


def test_policies_that_are_refused_by_name():
    for family in IGNORE_TRIES:
        assert f"`model_type`={family!r}" in why_no_tree(AutoConfig.for_model(family))
    assert "linear_attention layers" in why_no_tree(Qwen3NextConfig())
    assert "caps the logits" in why_no_tree(Gemma2Config())
    assert why_no_tree(GptOssConfig()) == "has attention sinks"
    assert "hybrid layers" in why_no_tree(tiny_model("falcon_h1").config)
    assert "dropout" in why_no_tree(tiny_model("qwen2", attention_dropout=0.1).config)
    assert why_no_tree(tiny_model("gemma3").config) is None
