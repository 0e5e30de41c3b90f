"""What a parameter of the policy is called, whatever the policy is wrapped in: by its name in a checkpoint."""

import re


# FSDP, torch.compile, activation checkpointing; then what PEFT inserts where it wraps a layer or saves a whole one.
_INSERTED = re.compile(
    r"_fsdp_wrapped_module\.|_orig_mod\.|_checkpoint_wrapped_module\."
    r"|\.modules_to_save\.[^.]+(?=\.|$)|\.token_adapter(?=\.|$)|\.base_layer(?=\.|$)"
)


def clean_name(name: str) -> str:
    """
    A module's or parameter's name as in the unwrapped model.

    ```python
    >>> clean_name("base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight")
    'model.layers.0.self_attn.q_proj.weight'
    ```
    """
    return _INSERTED.sub("", name).removeprefix("base_model.model.")
