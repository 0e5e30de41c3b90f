"""
Reads files that may be damaged. Readers raise almost anything on damaged bytes, from a bare `KeyError` to a panic of
Rust code. Every read of the package happens inside of [`reading`], which names the file instead.

Needs no torch, so that reports load fast.
"""

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path


AGAIN = "Download or save it again."
ANOTHER = "Resume from another checkpoint, or start again."
# Parts of the messages of errors that come from a device, a disk or another rank, or say that a file is missing
ELSEWHERE = ("CUDA", "No space left", "gloo", "NCCL", "does not appear to have a file")


class DamagedFile(ValueError):
    """A file that is damaged, incomplete, or of another kind than its name says."""


@contextmanager
def reading(*places: str | Path, advice: str = AGAIN) -> Iterator[None]:
    """
    Context that must hold every read of a file, and nothing else. Errors that are not about the contents of a file stay
    what they are: a file that is missing or not permitted, a full disk, memory that is really used up, a package that
    is not installed, and a `ValueError` that names the place itself.

    Args:
        places (`str` or `Path`):
            What is read: files, directories of which any file may be read, or names on the hub. If one of several files
            cannot be read by itself, the error names that one.
        advice (`str`, *optional*): The end of the error's message: what the user can do.

    Raises:
        [`DamagedFile`]: The reader failed on the contents.
    """
    try:
        yield
    except BaseException as error:
        place = _about_contents(error, places) and _blamed(places)
        if not place:
            raise
        wrong = "cannot be read" if os.path.isdir(place) or not os.path.exists(place) else "is damaged or incomplete"
        raise DamagedFile(f"{place} {wrong}: {_in_one_line(error)}. {advice}") from error


def read_json(path: str | Path, advice: str = AGAIN) -> dict:
    """Reads a JSON object. Raises [`DamagedFile`] if the file holds anything else."""
    with reading(path, advice=advice):
        value = json.loads(Path(path).read_text("utf-8"))
        if not isinstance(value, dict):
            raise TypeError(f"it holds a {type(value).__name__}, not a JSON object")
    return value


@contextmanager
def blaming(*directories: str | Path | None) -> Iterator[None]:
    """
    Context for calls of other libraries that do much more than read. It is as [`reading`], but names only a file that
    cannot be read by itself; without such a file, an error stays what it is.
    """
    try:
        yield
    except BaseException as error:
        places = [place for place in directories if place is not None]
        place = _about_contents(error, places) and next(filter(None, map(damaged_file, places)), None)
        if not place:
            raise
        raise DamagedFile(f"{place} is damaged or incomplete: {_in_one_line(error)}. {AGAIN}") from error


def damaged_file(place: str | Path) -> Path | None:
    """Returns the file at a place, or the first one in a directory, that cannot be read by itself, or `None`."""
    path = Path(place)
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return next((file for file in files if file.is_file() and not _is_readable(file)), None)


def _is_readable(file: Path) -> bool:
    """Whether a file holds what its name says. A name of which nothing is known holds anything."""
    try:
        if file.name == "tokenizer.json":
            from tokenizers import Tokenizer

            Tokenizer.from_file(str(file))
        elif file.suffix == ".json":
            found = json.loads(file.read_text("utf-8-sig"))
            if file.name == "config.json" and "auto_map" not in found:
                _build(file.parent)
        elif file.suffix in (".jinja", ".txt", ".py"):
            file.read_text("utf-8")
        elif file.suffix == ".safetensors":
            from safetensors import safe_open

            with safe_open(file, "pt"):
                pass
        elif file.suffix == ".pt" or fnmatch(file.name, "*_model*.bin"):
            import torch

            torch.load(file, "cpu", weights_only=True)
    except BaseException as error:
        if not _about_contents(error, [file]):
            raise
        return False
    return True


def _build(directory: Path) -> None:
    """Builds the model that a config.json describes, without memory, if transformers knows its class."""
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(directory)
    kind = getattr(transformers, (config.architectures or [""])[0], None)
    if kind is not None:
        with torch.device("meta"):
            kind(config)


def _blamed(places: tuple[str | Path, ...]) -> str:
    """Names the file that is to blame, or all places if each can be read by itself."""
    alone = len(places) == 1 and not os.path.isdir(places[0])
    found = None if alone else next(filter(None, map(damaged_file, places)), None)
    return str(found or " or ".join(map(str, places)))


def _about_contents(error: BaseException, places) -> bool:
    """Whether an error comes from the contents of what was read."""
    text = str(error)
    if not isinstance(error, Exception):
        return type(error).__name__ == "PanicException"  # of Rust code, as in tokenizers
    if isinstance(error, ImportError | DamagedFile) or any(words in text for words in ELSEWHERE):
        return False
    if isinstance(error, ValueError) and any(os.fspath(place) in text for place in places):
        return False
    if isinstance(error, MemoryError) or "allocate memory" in text:
        return _fits_in_memory(places)
    for place in places:
        if os.path.isfile(place):
            with open(place, "rb"):  # the system's own error first: safetensors says "missing" for "not permitted"
                pass
    if isinstance(error, OSError):  # transformers raises bare ones, and a damaged offset is an invalid argument
        return type(error) is OSError and error.errno in (None, errno.EINVAL) and any(map(os.path.exists, places))
    return True


def _fits_in_memory(places) -> bool:
    """Whether there is room for the files themselves. If so, a reader that asked for more read a damaged length."""
    files = [path for place in map(Path, places) for path in (place.iterdir() if place.is_dir() else [place])]
    with suppress(MemoryError):
        return bool(bytearray(max(sum(file.stat().st_size for file in files if file.is_file()), 1)))
    return False


def _in_one_line(error: BaseException) -> str:
    """Returns the kind of an error and the start of its reason, without torch's advice to trust the file."""
    reason = " ".join(str(error).rpartition("WeightsUnpickler error: ")[2].split()).rstrip(".")
    return f"{type(error).__name__}: {reason[:300]}"
