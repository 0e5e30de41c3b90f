"""Describes LLaDA as a Llama: its decoder is Llama's without the causal mask, under other names.

LLaDA's checkpoints bring their own Python code, which follows OLMo's. Every tensor has a counterpart in Llama, of the
same shape and with the same meaning, so a checkpoint is converted by renaming its tensors:

    x + attn_out(attention(q_proj, k_proj, v_proj of attn_norm(x)))     both directions, rotary embeddings by halves
    x + ff_out(silu(ff_proj(y)) * up_proj(y)),  y = ff_norm(x)

| LLaDA, after `model.transformer.` | Llama |
|---|---|
| `wte`, `ln_f`, `ff_out` | `model.embed_tokens`, `model.norm`, `lm_head` |
| `blocks.N.attn_norm`, `blocks.N.ff_norm` | `input_layernorm`, `post_attention_layernorm` of `model.layers.N` |
| `blocks.N.q_proj`, `k_proj`, `v_proj`, `attn_out` | `self_attn.q_proj`, `k_proj`, `v_proj`, `o_proj` |
| `blocks.N.ff_proj`, `up_proj`, `ff_out` | `mlp.gate_proj`, `up_proj`, `down_proj` |
"""

import re


TOP = {"wte": "model.embed_tokens", "ln_f": "model.norm", "ff_out": "lm_head"}
IN_BLOCK = {
    "attn_norm": "input_layernorm",
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "attn_out": "self_attn.o_proj",
    "ff_norm": "post_attention_layernorm",
    "ff_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "ff_out": "mlp.down_proj",
}
PARAMETER = re.compile(r"model\.transformer\.(?:blocks\.(\d+)\.)?(\w+)\.weight")

# Fields of LLaDA's config for which Llama has no counterpart -> the only values that Llama supports
FIXED = {
    "block_type": ("llama",),
    "activation_type": ("silu",),
    "layer_norm_type": ("rms",),
    "alibi": (False,),
    "rope": (True,),
    "attention_layer_norm": (False,),
    "input_emb_norm": (False,),
    "scale_logits": (False,),
    "layer_norm_with_affine": (True,),
    "bias_for_layer_norm": (False, None),
    "include_bias": (False,),
    "include_qkv_bias": (False,),
    "block_group_size": (1,),
    "multi_query_attention": (False, None),
    "residual_dropout": (0.0,),
    "embedding_dropout": (0.0,),
}
# Fields of Llama's config -> LLaDA's
FIELDS_OF_LLAMA = {
    "hidden_size": "d_model",
    "intermediate_size": "mlp_hidden_size",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "rms_norm_eps": "rms_norm_eps",
    "max_position_embeddings": "max_sequence_length",
    "attention_dropout": "attention_dropout",
    "tie_word_embeddings": "weight_tying",
    "eos_token_id": "eos_token_id",
    "pad_token_id": "pad_token_id",
    "mask_token_id": "mask_token_id",
}


def llama_name(name: str) -> str:
    """
    Returns Llama's name of one of LLaDA's tensors.

    Raises:
        `ValueError`: LLaDA has no such tensor.
    """
    found = PARAMETER.fullmatch(name)
    block, part = found.groups() if found else (None, None)
    names = TOP if block is None else IN_BLOCK
    if part not in names:
        raise ValueError(f"source: `{name}` is not a tensor of LLaDA's that Llama has a counterpart for.")
    return f"{names[part]}.weight" if block is None else f"model.layers.{block}.{names[part]}.weight"


def llama_config(config: dict) -> dict:
    """
    Returns the config.json of the Llama, without causal mask, that computes what a LLaDA with this `config` does.

    Raises:
        `ValueError`: The config is not LLaDA's, lacks a field, or describes what Llama does not compute.
    """
    if config.get("model_type") != "llada":
        raise ValueError(f"source: its `model_type` is {config.get('model_type')!r}, and not 'llada'.")
    for name, allowed in FIXED.items():
        value = config.get(name, allowed[0])
        if value not in allowed:
            raise ValueError(
                f"source: its config has `{name}`={value!r}, which Llama does not compute. It must be {allowed[0]!r}."
            )
    needed = ("d_model", "mlp_hidden_size", "n_layers", "n_heads", "rms_norm_eps", "rope_theta", "vocab_size")
    missing = [name for name in needed if config.get(name) is None]
    if missing:
        raise ValueError(f"source: its config lacks {', '.join(missing)}.")
    found = {llama: config[llada] for llama, llada in FIELDS_OF_LLAMA.items() if config.get(llada) is not None}
    return found | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "is_causal": False,
        "vocab_size": config.get("embedding_size") or config["vocab_size"],
        "rope_parameters": {"rope_type": "default", "rope_theta": config["rope_theta"]},
        "hidden_act": "silu",
        "dtype": str(config.get("torch_dtype") or config.get("dtype") or "bfloat16"),
    }
