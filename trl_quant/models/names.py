"""The names of a policy's parameters, in a checkpoint and inside wrappers such as FSDP and PEFT."""

import re


# Inserted by FSDP, torch.compile and activation checkpointing, and by PEFT around an adapted layer or one saved whole
_INSERTED = re.compile(
    r"_fsdp_wrapped_module\.|_orig_mod\.|_checkpoint_wrapped_module\."
    r"|\.modules_to_save\.[^.]+(?=\.|$)|\.token_adapter(?=\.|$)|\.base_layer(?=\.|$)"
)
_IN_LAYER = re.compile(r"(?P<stack>(?:.+\.)?layers)\.(?P<index>\d+)\.(?P<path>.+)")


def clean_name(name: str) -> str:
    """
    Returns the name that a module or parameter has in the unwrapped model.

    ```python
    >>> clean_name("base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight")
    'model.layers.0.self_attn.q_proj.weight'
    ```
    """
    return _INSERTED.sub("", name).removeprefix("base_model.model.")


def place_in_layer(name: str) -> tuple[str, int, str] | None:
    """
    Splits a name into the stack of decoder layers, the index of the layer, and the clean path inside that layer;
    `None` for a name outside of a stack.

    ```python
    >>> place_in_layer("model.layers.3.mlp.up_proj")
    ('model.layers', 3, 'mlp.up_proj')
    ```
    """
    match = _IN_LAYER.fullmatch(name)
    return None if match is None else (match["stack"], int(match["index"]), clean_name(match["path"]))
