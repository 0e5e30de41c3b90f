"""LLaDA's checkpoints become Llamas without a causal mask that compute the same, against LLaDA's forward in slow loops.

The checkpoint is made here, with the names, shapes and config of GSAI-ML/LLaDA-8B.
"""

import json
import re

import pytest
import torch
from masked_policy import MASK_ID, tokenizer, trainer
from reference_diffusion import llada_logits
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from trl_quant.models.llada import llama_name
from trl_quant.storage import llada


CONFIG = {
    "activation_type": "silu",
    "alibi": False,
    "alibi_bias_max": 8.0,
    "architectures": ["LLaDAModelLM"],
    "attention_dropout": 0.0,
    "attention_layer_norm": False,
    "attention_layer_norm_with_affine": True,
    "auto_map": {
        "AutoConfig": "configuration_llada.LLaDAConfig",
        "AutoModelForCausalLM": "modeling_llada.LLaDAModelLM",
        "AutoModel": "modeling_llada.LLaDAModelLM",
    },
    "bias_for_layer_norm": False,
    "block_group_size": 1,
    "block_type": "llama",
    "d_model": 64,
    "embedding_dropout": 0.0,
    "embedding_size": 320,
    "eos_token_id": 257,
    "flash_attention": False,
    "include_bias": False,
    "include_qkv_bias": False,
    "init_cutoff_factor": None,
    "init_device": "meta",
    "init_fn": "mitchell",
    "init_std": 0.02,
    "input_emb_norm": False,
    "layer_norm_type": "rms",
    "layer_norm_with_affine": True,
    "mask_token_id": MASK_ID,
    "max_sequence_length": 128,
    "mlp_hidden_size": 96,
    "mlp_ratio": 4,
    "model_type": "llada",
    "multi_query_attention": None,
    "n_heads": 4,
    "n_kv_heads": 4,
    "n_layers": 2,
    "pad_token_id": 256,
    "precision": "amp_bf16",
    "residual_dropout": 0.0,
    "rms_norm_eps": 1e-05,
    "rope": True,
    "rope_full_precision": True,
    "rope_theta": 500000.0,
    "scale_logits": False,
    "torch_dtype": "float32",
    "use_cache": False,
    "vocab_size": 318,
    "weight_tying": False,
}
BIAS = "model.transformer.ff_out.bias"  # Llama's head has none
TOKENS = [10, 250, 3, MASK_ID, 77, 12, 199]


def tensors_of(config) -> dict[str, torch.Tensor]:
    width, hidden, heads = config["d_model"], config["mlp_hidden_size"], config["n_heads"]
    kv = width // heads * config["n_kv_heads"]
    shapes = {"wte": (config["embedding_size"], width), "ln_f": (width,)}
    if not config["weight_tying"]:
        shapes["ff_out"] = (config["embedding_size"], width)
    for block in range(config["n_layers"]):
        parts = {"attn_norm": (width,), "ff_norm": (width,), "q_proj": (width, width), "k_proj": (kv, width)}
        parts |= {"v_proj": (kv, width), "attn_out": (width, width)}
        parts |= {"ff_proj": (hidden, width), "up_proj": (hidden, width), "ff_out": (width, hidden)}
        shapes |= {f"blocks.{block}.{name}": shape for name, shape in parts.items()}
    generator, tensors = torch.Generator().manual_seed(0), {}
    for name, shape in shapes.items():
        drawn = torch.randn(shape, generator=generator)
        tensors[f"model.transformer.{name}.weight"] = 1 + 0.2 * drawn if len(shape) == 1 else 0.3 * drawn
    return tensors


def save(path, shards=1, **changes) -> dict[str, torch.Tensor]:
    path.mkdir()
    config = CONFIG | changes
    (path / "config.json").write_text(json.dumps({name: value for name, value in config.items() if value != "absent"}))
    (path / "modeling_llada.py").write_text("raise RuntimeError('this must not run')\n")
    tokenizer().save_pretrained(path)
    tensors = tensors_of(CONFIG | {name: value for name, value in changes.items() if name in CONFIG})
    names = list(tensors)
    files = {f"model-0000{i + 1}-of-0000{shards}.safetensors": names[i::shards] for i in range(shards)}
    if shards == 1:
        files = {"model.safetensors": names}
    else:
        index = {name: file for file, held in files.items() for name in held}
        (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    for file, held in files.items():
        save_file({name: tensors[name] for name in held}, path / file)
    return tensors


@pytest.mark.parametrize(
    ("changes", "shards"), [({}, 1), ({"n_kv_heads": 2, "rope_theta": 10000.0}, 2), ({"weight_tying": True}, 1)]
)
def test_it_computes_what_llada_does(tmp_path, changes, shards):
    tensors = save(tmp_path / "llada", shards, **changes)
    assert llada.convert(str(tmp_path / "llada"), tmp_path / "llama") == tmp_path / "llama"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "llama", dtype=torch.float32)
    assert type(model).__name__ == "LlamaForCausalLM" and not (tmp_path / "llama" / "modeling_llada.py").exists()
    expected = llada_logits(tensors, CONFIG | changes, TOKENS)
    with torch.no_grad():
        found = model(input_ids=torch.tensor([TOKENS])).logits[0].double()
        assert (found - expected).abs().max() < 1e-4 < 0.1 < expected.abs().max()
        model.config.is_causal = True
        causal = model(input_ids=torch.tensor([TOKENS])).logits[0].double()
        assert (causal - expected).abs().max() > 0.1  # the mask matters
    if changes:
        other = llada_logits(tensors, CONFIG | changes | {"rope_theta": 77.0}, TOKENS)
        assert (other - expected).abs().max() > 0.01  # and so do the angles


def test_the_weights_are_kept_bit_for_bit(tmp_path):
    tensors = save(tmp_path / "llada")
    llada.convert(str(tmp_path / "llada"), tmp_path / "llama")
    written = load_file(tmp_path / "llama" / "model.safetensors")
    assert len(written) == len(tensors)
    assert all(torch.equal(written[llama_name(name)], tensor) for name, tensor in tensors.items())
    config = json.loads((tmp_path / "llama" / "config.json").read_text())
    assert (config["mask_token_id"], config["vocab_size"], config["is_causal"]) == (MASK_ID, 320, False)
    assert "auto_map" not in config


def test_the_result_is_trained(tmp_path):
    """Its config names the mask token where the tokenizer does not, as with LLaDA-8B."""
    save(tmp_path / "llada")
    llada.convert(str(tmp_path / "llada"), tmp_path / "llama")
    plain = tokenizer()
    plain.mask_token = None
    settings = {"rollout_precision": "int4", "is_correction": "ais", "max_steps": 1}
    made = trainer(tmp_path / "run", model=str(tmp_path / "llama"), given={"processing_class": plain}, **settings)
    assert made.vllm_generation.engine.mask_token_id == MASK_ID
    made.train()
    assert made.state.log_history[0]["mismatch/kl_k3"] > 0


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "llama"}, "its `model_type` is 'llama', and not 'llada'"),
        ({"block_type": "sequential"}, "its config has `block_type`='sequential', which Llama does not compute"),
        ({"activation_type": "gelu"}, "`activation_type`='gelu'"),
        ({"layer_norm_type": "default"}, "`layer_norm_type`='default'"),
        ({"alibi": True}, "`alibi`=True"),
        ({"rope": False}, "`rope`=False"),
        ({"attention_layer_norm": True}, "`attention_layer_norm`=True"),
        ({"scale_logits": True}, "`scale_logits`=True"),
        ({"include_bias": True}, "`include_bias`=True"),
        ({"include_qkv_bias": True}, "`include_qkv_bias`=True"),
        ({"rope_theta": "absent"}, "its config lacks rope_theta"),
    ],
)
def test_what_llama_does_not_compute_is_refused(tmp_path, changes, says):
    save(tmp_path / "llada", **changes)
    with pytest.raises(ValueError, match=re.escape(says)):
        llada.convert(str(tmp_path / "llada"), tmp_path / "llama")
    assert not (tmp_path / "llama").exists() and not (tmp_path / ".llama.part").exists()


def test_unknown_tensors_and_targets_are_refused(tmp_path):
    tensors = save(tmp_path / "llada")
    for name in ("model.transformer.blocks.0.att_proj.weight", "model.transformer.wpe.weight", "lm_head.weight", BIAS):
        save_file(tensors | {name: torch.zeros(2)}, tmp_path / "llada" / "model.safetensors")
        with pytest.raises(ValueError, match=f"`{re.escape(name)}` is not a tensor of LLaDA's"):
            llada.convert(str(tmp_path / "llada"), tmp_path / "llama")
    (tmp_path / "llama").mkdir()
    with pytest.raises(ValueError, match="llama exists"):
        llada.convert(str(tmp_path / "llada"), tmp_path / "llama")
