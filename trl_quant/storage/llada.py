"""Converts a checkpoint of LLaDA to the standard architecture, which transformers and this package run as they are.

    python -m trl_quant.storage.llada GSAI-ML/LLaDA-8B-Instruct llada-8b

The result is a Llama with `is_causal=False` ([`~models.llada`] has the names). Its weights are LLaDA's, bit for bit.
LLaDA's own Python is neither run nor copied. The other files, those of the tokenizer among them, are copied.
"""

from pathlib import Path

from ..models.llada import llama_config, llama_name
from .standard import convert_from_command_line, write_standard


def convert(source: str, target: str | Path, revision: str | None = None) -> Path:
    """
    Writes a checkpoint of LLaDA under Llama's names. The target appears complete or not at all.

    Args:
        source (`str`): Hub id or directory of a checkpoint in safetensors, such as `GSAI-ML/LLaDA-8B-Instruct`.
        target (`str` or `Path`): Directory to create, which must not exist.
        revision (`str`, *optional*): Branch, tag or commit on the hub.

    Returns:
        `Path`: The target.

    Raises:
        ValueError: `target` exists, or the source is not a LLaDA that Llama can compute.
    """
    return write_standard(source, target, revision, llama_config, llama_name)


if __name__ == "__main__":
    convert_from_command_line("llada", convert)
