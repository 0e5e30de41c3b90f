"""Describes Dream as a Qwen2: training continued from Qwen2.5's weights, with the same layers and names.

Dream's checkpoints bring their own Python code. Two things differ from Qwen2:

- Each token attends to all others: `is_causal=False`.
- Its logits are shifted, because Qwen2's were. **The output at position k predicts the token at position k + 1**, as in
  an autoregressive model, even where both are masked. The config says so with `shifted_logits=True`, which is a field
  of this package: [`~policy.masked`] and [`~rollout.embedded.diffusion`] read it, transformers ignores it.
"""

import re


PARAMETER = re.compile(
    r"(model\.embed_tokens|model\.norm|lm_head"
    r"|model\.layers\.\d+\.(input_layernorm|post_attention_layernorm|mlp\.(gate|up|down)_proj|self_attn\.[qkvo]_proj)"
    r")\.weight|model\.layers\.\d+\.self_attn\.[qkv]_proj\.bias"
)
# Fields of Dream's config -> the only values that Qwen2 supports
FIXED = {
    "hidden_act": ("silu",),
    "use_sliding_window": (False, None),
    "use_mrope": (False, None),
    "rope_scaling": (None,),
}
COPIED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
COPIED += ("rms_norm_eps", "max_position_embeddings", "vocab_size", "mask_token_id")
IF_GIVEN = ("attention_dropout", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")


def qwen2_name(name: str) -> str:
    """
    Returns Qwen2's name of one of Dream's tensors, which is the same name.

    Raises:
        `ValueError`: Dream has no such tensor.
    """
    if not PARAMETER.fullmatch(name):
        raise ValueError(f"source: `{name}` is not a tensor of Dream's that Qwen2 has a counterpart for.")
    return name


def qwen2_config(config: dict) -> dict:
    """
    Returns the config.json of the Qwen2, without causal mask, that computes what a Dream with this `config` does.

    Raises:
        `ValueError`: The config is not Dream's, lacks a field, or describes what Qwen2 does not compute.
    """
    if config.get("model_type") != "Dream":
        raise ValueError(f"source: its `model_type` is {config.get('model_type')!r}, and not 'Dream'.")
    for name, allowed in FIXED.items():
        value = config.get(name, allowed[0])
        if value not in allowed:
            raise ValueError(
                f"source: its config has `{name}`={value!r}, which is not Dream-7B's. It must be {allowed[0]!r}."
            )
    missing = [name for name in (*COPIED, "rope_theta") if config.get(name) is None]
    if missing:
        raise ValueError(f"source: its config lacks {', '.join(missing)}.")
    found = {name: config[name] for name in COPIED}
    found |= {name: config[name] for name in IF_GIVEN if config.get(name) is not None}
    return found | {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "is_causal": False,
        "shifted_logits": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": config["rope_theta"]},
        "hidden_act": "silu",
        "use_sliding_window": False,
        "dtype": str(config.get("torch_dtype") or config.get("dtype") or "bfloat16"),
    }
