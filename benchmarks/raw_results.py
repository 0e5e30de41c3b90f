"""Reads and writes raw results: JSON, compressed by xz where the file's name ends with `.xz`.

`xz -dc FILE` prints such a file. The same results always give the same bytes: xz stores no time and no name.
"""

import json
import lzma
from pathlib import Path

from trl_quant.storage.whole import write_whole


def read_results(path: Path) -> dict:
    data = path.read_bytes()
    return json.loads(lzma.decompress(data) if path.suffix == ".xz" else data)


def write_results(path: Path, results: dict, **options) -> None:
    """Writes the file in one step. `options` are those of `json.dumps`."""
    data = (json.dumps(results, **options) + "\n").encode()
    write_whole(path, lzma.compress(data, preset=9 | lzma.PRESET_EXTREME) if path.suffix == ".xz" else data)
