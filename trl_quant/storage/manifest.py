"""
The manifest of a checkpoint, which ties its files together: a checksum of each, and the identity of its run.

A file's checksum is XXH3 of 64 bits, which misses damage once in 10^19. Nobody forges a checkpoint of his own, so a
cryptographic hash would only cost time. Several threads compute it at once, on blocks of a file.

    manifest.json = {"checksum": of the contents, "contents": {"files": {name: [bytes, checksum]}, "run": {...}}}
"""

import json
import os
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path

from xxhash import xxh3_64_digest, xxh3_64_hexdigest

from ..reading import DamagedFile, read_json, reading
from .lock import OUTPUT_LOCK
from .whole import write_whole


MANIFEST = "manifest.json"
AT_ONCE = 16 << 20  # bytes that a thread reads at a time
THREADS = 8
RECENT = 2.0  # seconds for which a change may leave a file's time as it is
# Files that are read in the place of others, or beside them, if they are there
READ_IF_FOUND = (
    *("model*.safetensors", "pytorch_model*.bin", "*.index.json", "*adapter_model.*", "critic/*.safetensors"),
    *("optimizer*", "scheduler*", "scaler*", "*_weights.pt", "rng_state*"),
)
_known: dict[tuple, str] = {}  # a file at a time -> its checksum

Checksums = dict[str, list]  # name of a file -> its bytes and its checksum


def signature(file: Path) -> list[int]:
    """Returns a file's size, and the times of the last change of its contents and of its entry, in ns."""
    found = file.stat()
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def checksums(files: Iterable[Path]) -> list[str]:
    """Computes the checksum of each file. Files that this process has read before are read again if they changed."""
    keys = {file: (os.path.realpath(file), *signature(file)) for file in files}
    unread = [file for file, key in keys.items() if key not in _known]
    blocks = [(file, start) for file in unread for start in range(0, max(keys[file][1], 1), AT_ONCE)]
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1)) as pool:
        of_blocks = pool.map(_of_block, blocks) if len(blocks) > len(unread) else map(_of_block, blocks)
        sums = dict(zip(blocks, of_blocks, strict=True))
    found = []
    for file, key in keys.items():
        if key in _known:
            found.append(_known[key])
            continue
        whole = b"".join(sums[block] for block in blocks if block[0] is file)
        found.append(xxh3_64_hexdigest(whole))
        if time.time() - key[2] / 1e9 > RECENT:
            _known[key] = found[-1]
    return found


def _of_block(block: tuple[Path, int]) -> bytes:
    path, start = block
    with reading(path), path.open("rb", buffering=0) as file:
        file.seek(start)
        return xxh3_64_digest(file.read(AT_ONCE))


def described(directory: str | Path, names: Iterable[str]) -> Checksums:
    """Returns the bytes and the checksum of some files of a directory."""
    files = {name: Path(directory, name) for name in names}
    return {
        name: [file.stat().st_size, checksum]
        for (name, file), checksum in zip(files.items(), checksums(files.values()), strict=True)
    }


def names_in(directory: str | Path, patterns: Iterable[str] = ("*",)) -> list[str]:
    """Returns the names of the files in a checkpoint and in its directories that match, but for its manifest."""
    found = (path for path in Path(directory).rglob("*") if path.is_file())
    names = (path.relative_to(directory).as_posix() for path in found)
    return sorted(name for name in names if name not in (MANIFEST, OUTPUT_LOCK) and matches(name, patterns))


def write_manifest(directory: str | Path, files: Checksums, run: dict) -> None:
    """Writes the manifest of a checkpoint: the checksums of its files, and the identity of its run, as JSON."""
    contents = json.loads(json.dumps({"files": files, "run": run}))
    write_whole(Path(directory, MANIFEST), json.dumps({"checksum": _of_contents(contents), "contents": contents}))


def _of_contents(contents: dict) -> str:
    return xxh3_64_hexdigest(json.dumps(contents, sort_keys=True).encode())


def read_manifest(directory: str | Path) -> dict | None:
    """Reads a manifest's `contents`; `None` if a checkpoint has none. Raises `DamagedFile` if it is damaged."""
    path = Path(directory, MANIFEST)
    if not path.is_file():
        return None
    found = read_json(path)
    contents = found.get("contents")
    if not isinstance(contents, dict) or found.get("checksum") != _of_contents(contents):
        raise DamagedFile(f"{path} is damaged or incomplete: it does not have its own checksum.")
    return contents


def run_of(directory: str | Path) -> dict | None:
    """Returns the identity of a checkpoint's run from its manifest; `None` without one."""
    manifest = read_manifest(directory)
    return None if manifest is None else manifest["run"]


def damage(directory: str | Path, reads: Iterable[str] | None = None) -> str | None:
    """
    Compares a checkpoint with its manifest, if it has one.

    Args:
        directory (`str` or `Path`): The checkpoint; with `reads` also a directory inside it, such as its critic.
        reads (`Iterable[str]`, *optional*): Patterns of the names that matter, of files that exist. If not given, all
            files must be there, and no other that a resumed run would read.

    Returns:
        `str` or `None`: What is wrong with the first file that is not as it was saved, with its name.
    """
    root, inside = Path(directory), ""
    if reads is not None and not (root / MANIFEST).is_file() and (root.parent / MANIFEST).is_file():
        root, inside = root.parent, f"{root.name}/"
    try:
        manifest = read_manifest(root)
    except DamagedFile as error:
        return str(error)
    if manifest is None:
        return None
    files = {name: saved for name, saved in manifest["files"].items() if name.startswith(inside)}
    if reads is not None:
        files = {name: saved for name, saved in files.items() if matches(name.removeprefix(inside), reads)}
        files = {name: saved for name, saved in files.items() if (root / name).is_file()}
    elsewhere = manifest["run"].get("ranks", {}).get("elsewhere", ())
    for name, (size, _) in list(files.items()):
        if not (root / name).is_file():
            if name not in elsewhere:
                return f"{root / name} is missing."
            del files[name]
        elif (root / name).stat().st_size != size:
            found = (root / name).stat().st_size
            return (
                f"{root / name} is not whole, or not of this checkpoint: it has {found} bytes, and {size} were saved."
            )
    for (name, (_, saved)), found in zip(files.items(), checksums(root / name for name in files), strict=True):
        if found != saved:
            return f"{root / name} is damaged, or not of this checkpoint: its checksum is not that of {MANIFEST}."
    added = [] if reads is not None else [n for n in names_in(root, READ_IF_FOUND) if n not in manifest["files"]]
    return f"{root / added[0]} is not of this checkpoint: {MANIFEST} does not list it." if added else None


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a file's name matches one of some patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def check_read(directory: str | Path, reads: Iterable[str], option: str) -> None:
    """Raises `ValueError` if a file of a checkpoint that matches `reads` is damaged. `option` names the checkpoint."""
    found = damage(directory, reads)
    if found is not None:
        raise ValueError(
            f"{option}: {found} Name another checkpoint. If the file was changed on purpose, delete {MANIFEST} beside "
            "it."
        )
