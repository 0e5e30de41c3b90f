"""Dream's checkpoints become Qwen2s without a causal mask, whose logits stand one place before the token.

The checkpoint is made here, with the names, shapes and config of Dream-org/Dream-v0-Instruct-7B. Dream's forward pass
and its shift are slow loops.
"""

import json
import re

import pytest
import torch
from long_tests import rest_is_long
from masked_policy import LENGTH, MASK_ID, policy, tokenizer, trainer, uneven_rows
from reference_diffusion import denoised, dream_logits, one_step_logps, prefix_held, under_lladas_names
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from trl_quant.policy.masked import PromptMasks
from trl_quant.rollout.embedded.diffusion import Schedule, denoise
from trl_quant.storage import dream


CONFIG = {
    "architectures": ["DreamModel"],
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_dream.DreamConfig", "AutoModel": "modeling_dream.DreamModel"},
    "bos_token_id": 257,
    "eos_token_id": 257,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "mask_token_id": MASK_ID,
    "max_window_layers": 28,
    "model_type": "Dream",
    "pad_token_id": 256,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "torch_dtype": "float32",
    "transformers_version": "4.46.2",
    "use_cache": True,
    "use_mrope": False,
    "use_sliding_window": False,
}
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
SIZES += ("rms_norm_eps", "max_position_embeddings", "vocab_size", "tie_word_embeddings")
TOKENS = [10, 250, 3, MASK_ID, 77, 12, 199]


def save(path, **changes):
    """Writes a checkpoint, and returns its tensors and its config."""
    path.mkdir()
    model = policy("qwen2", tied=False)
    own = model.config.to_dict()
    config = CONFIG | {name: own[name] for name in SIZES} | changes
    config = {name: value for name, value in config.items() if value != "absent"}
    (path / "config.json").write_text(json.dumps(config))
    (path / "modeling_dream.py").write_text("raise RuntimeError('this must not run')\n")
    tokenizer().save_pretrained(path)
    texts = path / "tokenizer_config.json"
    own_class = {"tokenizer_class": "DreamTokenizer", "auto_map": {"AutoTokenizer": ["tokenization_dream.X", None]}}
    texts.write_text(json.dumps(json.loads(texts.read_text()) | own_class))
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_file(tensors, path / "model.safetensors")
    return tensors, config


@pytest.fixture
def converted(tmp_path):
    tensors, config = save(tmp_path / "dream")
    assert dream.convert(str(tmp_path / "dream"), tmp_path / "qwen2") == tmp_path / "qwen2"
    return tmp_path / "qwen2", tensors, config


def test_it_computes_what_dream_does(converted):
    path, tensors, config = converted
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert type(model).__name__ == "Qwen2ForCausalLM" and not (path / "modeling_dream.py").exists()
    assert any(name.endswith("q_proj.bias") for name in tensors)
    expected = dream_logits(tensors, config, TOKENS)
    with torch.no_grad():
        found = model(input_ids=torch.tensor([TOKENS])).logits[0].double()
        assert (found[:-1] - expected[1:]).abs().max() < 1e-4 < 0.1 < (found[1:] - expected[1:]).abs().max()
        model.config.is_causal = True
        causal = model(input_ids=torch.tensor([TOKENS])).logits[0].double()
        assert (causal[:-1] - expected[1:]).abs().max() > 0.1
    written = load_file(path / "model.safetensors")
    assert written.keys() == tensors.keys() and all(torch.equal(written[name], tensors[name]) for name in tensors)
    texts = json.loads((path / "tokenizer_config.json").read_text())
    assert texts["tokenizer_class"] == "Qwen2Tokenizer" and "auto_map" not in texts


def test_the_estimate_stands_one_place_before(converted, tmp_path):
    """In trainer and copy: the prompt's last place predicts the completion's first token."""
    path, tensors, config = converted
    made = trainer(tmp_path / "run", model=str(path), rollout_precision="int4", is_correction="ais", max_steps=1)
    engine, (prompts, completions) = made.vllm_generation.engine, uneven_rows()
    engine.sync()
    width, length = max(map(len, prompts)), max(map(len, completions))
    ids, mask = [], []
    for prompt, completion in zip(prompts, completions, strict=True):
        left, right = width - len(prompt), length - len(completion)
        ids.append([256] * left + prompt + completion + [256] * right)
        mask.append([0] * left + [1] * (len(prompt) + len(completion)) + [0] * right)
    masks = made.prompt_masks.masks["train"] = engine.masks = PromptMasks(0.3)
    made.model.train()
    made.prompt_masks.in_loss = 0
    logps, *_ = made._get_per_token_logps_and_entropies(made.model, torch.tensor(ids), torch.tensor(mask), length)
    made.prompt_masks.in_loss = None
    of_copy = engine.estimate(prompts, completions)
    quantized = {name: tensor for name, tensor in engine.copy.state_dict().items() if name in tensors}
    for name, layer in engine.copy.named_modules():
        if getattr(layer, "format", None) == "int4":
            quantized[f"{name}.weight"] = layer.weight.values
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        is_masked = masks.of(prompt, completion, 0).tolist()
        estimates = [
            one_step_logps(None, prompt, is_masked, completion, LENGTH, MASK_ID, logits_of=of)
            for of in (
                lambda tokens: dream_logits(tensors, config, tokens),
                lambda tokens: dream_logits(quantized, config, tokens),
            )
        ]
        assert torch.allclose(logps[row, : len(completion)].double(), estimates[0], atol=1e-4)
        assert torch.allclose(torch.tensor(of_copy[row], dtype=torch.float64), estimates[1], atol=1e-4)
        in_place = one_step_logps(made.model, prompt, is_masked, completion, LENGTH, MASK_ID)
        assert (in_place - estimates[0]).abs().max() > 0.05
    made.train()
    assert made.state.log_history[0]["mismatch/kl_k3"] > 0


@pytest.mark.parametrize("cached", rest_is_long([False, True], True))
def test_it_is_denoised_from_one_place_before(converted, cached):
    path, tensors, config = converted
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    prompts = [[72, 101, 108], [49, 43, 49, 61, 32], [120]]
    slow = prefix_held(*under_lladas_names(tensors, config), shift=1)
    if not cached:
        slow = lambda row, tokens, before, step: dream_logits(tensors, config, tokens)  # noqa: E731
    expected, _ = denoised(model, prompts, LENGTH, 4, 1, MASK_ID, 1.0, logits_of=slow)
    ids = torch.tensor([[256] * (5 - len(row)) + row for row in prompts])
    found = {}
    for shifted in (True, False):
        model.config.shifted_logits = shifted
        torch.manual_seed(0)
        schedule = Schedule(LENGTH, 4, 1, 1.0, cache_finished_blocks=cached)
        found[shifted] = denoise(model, ids, (ids != 256).long(), schedule, MASK_ID, []).tolist()
    assert found[True] == expected != found[False]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "qwen2"}, "its `model_type` is 'qwen2', and not 'Dream'"),
        ({"hidden_act": "gelu"}, "its config has `hidden_act`='gelu', which is not Dream-7B's. It must be 'silu'"),
        ({"use_sliding_window": True}, "`use_sliding_window`=True"),
        ({"rope_scaling": {"factor": 2}}, "`rope_scaling`={'factor': 2}"),
        ({"rope_theta": "absent", "mask_token_id": "absent"}, "its config lacks mask_token_id, rope_theta"),
    ],
)
def test_what_qwen2_does_not_compute_is_refused(tmp_path, changes, says):
    save(tmp_path / "dream", **changes)
    with pytest.raises(ValueError, match=re.escape(says)):
        dream.convert(str(tmp_path / "dream"), tmp_path / "qwen2")
    assert not (tmp_path / "qwen2").exists()


def test_unknown_tensors_are_refused(tmp_path):
    tensors, _ = save(tmp_path / "dream")
    for name in ("model.layers.0.self_attn.o_proj.bias", "lm_head.bias", "model.layers.0.self_attn.q_norm.weight"):
        save_file(tensors | {name: torch.zeros(2)}, tmp_path / "dream" / "model.safetensors")
        with pytest.raises(ValueError, match=f"`{re.escape(name)}` is not a tensor of Dream's"):
            dream.convert(str(tmp_path / "dream"), tmp_path / "qwen2")
