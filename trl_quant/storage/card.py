"""The model card (README.md) of a checkpoint that `trl-quant` wrote: its source, and what was done to it."""

import re
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

from trl_quant import __version__

from ..reading import reading
from .layout import LAYOUT_VERSION
from .source import Source


FRONT_MATTER = re.compile(r"---\n.*?\n---\n", re.DOTALL)


def describe(source: Source) -> str:
    """Returns a checkpoint's name and revision, in Markdown."""
    return f"`{source.name}`" + (f", revision `{source.revision}`" if source.revision else "")


def versions() -> str:
    """Returns the versions of the libraries that computed the checkpoint."""
    return (
        f"trl_quant {__version__}, torch {torch.__version__}, transformers {transformers.__version__}; layout of "
        f"compressed-tensors {LAYOUT_VERSION}"
    )


def write_card(result: Path, name: str, source: Source, summary: str, rows: Sequence[tuple[str, str]]) -> None:
    """
    Writes README.md: the source's metadata, a summary, a table, the command that serves the checkpoint, and the
    source's card.

    Args:
        result (`Path`): The checkpoint's directory.
        name (`str`): The checkpoint's name.
        source ([`~storage.source.Source`]): The checkpoint from which it was made.
        summary (`str`): One or more sentences.
        rows (`Sequence[tuple[str, str]]`): The rows of the table.
    """
    card = source.path / "README.md"
    with reading(card):
        old = card.read_text(errors="replace") if card.is_file() else ""
    found = FRONT_MATTER.match(old)
    metadata = found[0] if found else ""
    if not found and source.revision is not None:  # a directory's name means nothing on the hub
        metadata = f"---\nbase_model: {source.name}\n---\n"
    body = old[len(found[0]) :].strip() if found else old.strip()
    cells = [(key, value.replace("|", r"\|")) for key, value in rows]
    table = "\n".join(f"| {key} | {value} |" for key, value in cells)
    text = f"""{metadata}# {name}

{summary}

| | |
|---|---|
{table}
| versions | {versions()} |

```bash
vllm serve {name} --host 127.0.0.1 --dtype bfloat16
```
"""
    if body:
        text += f"\n---\n\nThe card of {source.name}:\n\n{body}\n"
    (result / "README.md").write_text(text)
