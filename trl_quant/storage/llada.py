"""Converts a checkpoint of LLaDA to the standard architecture, which transformers and this package run as they are.

    python -m trl_quant.storage.llada GSAI-ML/LLaDA-8B-Instruct llada-8b

The result is a Llama with `is_causal=False` ([`~models.llada`] has the names). Its weights are LLaDA's, bit for bit.
LLaDA's own Python is neither run nor copied. The other files, those of the tokenizer among them, are copied.
"""

import sys
from pathlib import Path

from ..models.llada import llama_config, llama_name
from .files import Tensors, check_target, fingerprint, read_config, unfinished
from .layout import rewrite_checkpoint
from .progress import progress_bar
from .source import find_source


def convert(source: str, target: str | Path, revision: str | None = None) -> Path:
    """
    Writes a checkpoint of LLaDA under Llama's names. The target appears whole or not at all.

    Args:
        source (`str`): Hub id or directory of a checkpoint in safetensors, such as `GSAI-ML/LLaDA-8B-Instruct`.
        target (`str` or `Path`): Directory to create, which must not exist.
        revision (`str`, *optional*): Branch, tag or commit on the hub.

    Returns:
        `Path`: The target.

    Raises:
        ValueError: `target` exists, or the source is no LLaDA that Llama can compute.
    """
    check_target(target)
    found = find_source(source, revision, trust=False, option="revision")
    config = llama_config(read_config(found.path))
    for name in found.heads:
        llama_name(name)  # refuses an unknown tensor before the first file is written
    settings = {"source": fingerprint(found.path), "config": config}
    with unfinished(target, settings) as result, progress_bar("converting", found.nbytes) as progress:
        rewrite_checkpoint(found.path, result, renamed, config, progress=progress)
    return Path(target)


def renamed(tensors: Tensors) -> Tensors:
    """Returns tensors of LLaDA's under Llama's names."""
    return {llama_name(name): tensor for name, tensor in tensors.items()}


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python -m trl_quant.storage.llada SOURCE TARGET")
    print(convert(*sys.argv[1:]))
