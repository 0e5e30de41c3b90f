"""Converts a checkpoint that brings its own Python code to the names of a standard architecture that computes the same.

The Python code is neither run nor copied. The files of the tokenizer are copied.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

from ..reading import read_json
from .files import Tensors, check_target, fingerprint, read_config, unfinished
from .layout import rewrite_checkpoint
from .progress import progress_bar
from .source import find_source


TOKENIZER_CONFIG = "tokenizer_config.json"


def write_standard(
    source: str,
    target: str | Path,
    revision: str | None,
    config_of: Callable[[dict], dict],
    name_of: Callable[[str], str],
    tokenizer_class: str | None = None,
) -> Path:
    """
    Writes a copy of a checkpoint with other names and another config. Its weights are the same, bit for bit. The target
    appears complete or not at all.

    Args:
        source (`str`): Hub id or directory of a checkpoint in safetensors.
        target (`str` or `Path`): Directory to create, which must not exist.
        revision (`str` or `None`): Branch, tag or commit on the hub.
        config_of (`Callable`): Maps the checkpoint's config.json to the copy's. May raise `ValueError`.
        name_of (`Callable`): Maps a tensor's name to its name in the copy. Raises `ValueError` for an unknown tensor.
        tokenizer_class (`str`, *optional*): Class of transformers that replaces the tokenizer's own.

    Returns:
        `Path`: The target.

    Raises:
        ValueError: `target` exists, or what `config_of` and `name_of` raise.
    """
    check_target(target)
    found = find_source(source, revision, trust=False, option="revision")
    config = config_of(read_config(found.path))
    for name in found.heads:
        name_of(name)  # refuses an unknown tensor before the first file is written

    def renamed(tensors: Tensors) -> Tensors:
        return {name_of(name): tensor for name, tensor in tensors.items()}

    settings = {"source": fingerprint(found.path), "config": config}
    with unfinished(target, settings) as result, progress_bar("converting", found.nbytes) as progress:
        rewrite_checkpoint(found.path, result, renamed, config, progress=progress)
        tokenizer = result / TOKENIZER_CONFIG
        if tokenizer_class is not None and tokenizer.is_file():
            kept = read_json(tokenizer) | {"tokenizer_class": tokenizer_class}
            kept.pop("auto_map", None)
            tokenizer.unlink()  # it may be a link to the source's
            tokenizer.write_text(json.dumps(kept, indent=2) + "\n")
    return Path(target)


def convert_from_command_line(module: str, convert: Callable[[str, str], Path]) -> None:
    """Runs `convert` with the arguments of `python -m trl_quant.storage.<module> SOURCE TARGET`."""
    if len(sys.argv) != 3:
        sys.exit(f"usage: python -m trl_quant.storage.{module} SOURCE TARGET")
    print(convert(*sys.argv[1:]))
