"""Compares configs: says whether two checkpoints are of one model."""

# Fields of a config that determine what a model computes. All checkpoints of a model agree in them, quantized or not
ARCHITECTURE = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "hidden_act",
    "rms_norm_eps",
    "rope_parameters",
    "sliding_window",
    "layer_types",
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_value_head_dim",
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "final_logit_softcapping",
)


def differences(mine, theirs) -> str:
    """
    Lists the fields in which two configs describe different models, as `name (theirs, not mine)`.

    Args:
        mine, theirs ([`~transformers.PreTrainedConfig`]): The configs, with or without a text config inside.
    """
    mine, theirs = mine.get_text_config(), theirs.get_text_config()
    values = {name: (getattr(mine, name, None), getattr(theirs, name, None)) for name in ARCHITECTURE}
    return ", ".join(f"{name} ({theirs}, not {mine})" for name, (mine, theirs) in values.items() if mine != theirs)
