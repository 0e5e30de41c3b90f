"""Converts a checkpoint of Dream to the standard architecture, which transformers and this package run as they are.

    python -m trl_quant.storage.dream Dream-org/Dream-v0-Instruct-7B dream-7b

The result is a Qwen2 with `is_causal=False` and `shifted_logits=True` ([`~models.dream`] says what that means). Its
weights are Dream's, bit for bit. Dream's own Python is neither run nor copied. Its tokenizer is Qwen2's with further
tokens, and its files are copied.
"""

from pathlib import Path

from ..models.dream import qwen2_config, qwen2_name
from .standard import convert_from_command_line, write_standard


def convert(source: str, target: str | Path, revision: str | None = None) -> Path:
    """
    Writes a checkpoint of Dream as one of Qwen2. The target appears complete or not at all.

    Args:
        source (`str`): Hub id or directory of a checkpoint in safetensors, such as `Dream-org/Dream-v0-Instruct-7B`.
        target (`str` or `Path`): Directory to create, which must not exist.
        revision (`str`, *optional*): Branch, tag or commit on the hub.

    Returns:
        `Path`: The target.

    Raises:
        ValueError: `target` exists, or the source is not a Dream that Qwen2 can compute.
    """
    return write_standard(source, target, revision, qwen2_config, qwen2_name, tokenizer_class="Qwen2Tokenizer")


if __name__ == "__main__":
    convert_from_command_line("dream", convert)
