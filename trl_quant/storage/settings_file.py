"""Changes one setting in a YAML file of settings, and leaves every other character as it is."""

import os
from pathlib import Path

import yaml

from ..reading import reading
from .whole import write_whole


def check_setting(path: str | Path, name: str) -> None:
    """Raises `ValueError` or `OSError` if [`write_setting`] could not write this setting into a file."""
    _with_setting(path, name, "value")
    if not os.access(Path(path).resolve().parent, os.W_OK):
        raise ValueError(f"{path} cannot be written: its directory is read-only.")


def write_setting(path: str | Path, name: str, value: str) -> None:
    """
    Gives a setting a value in a YAML file: in its place if the file has it, else in a new last line. The file is
    written whole or not at all.

    Raises:
        `OSError`: The file is not there, or cannot be written.
        `ValueError`: It is no YAML file of settings, or of a form in which the setting has no line of its own.
    """
    write_whole(Path(path).resolve(), _with_setting(path, name, value).encode("utf-8"))  # of a link, the file


def _with_setting(path: str | Path, name: str, value: str) -> str:
    """Returns the text of a file with a setting."""
    with reading(path, advice="Correct it."):
        text = Path(path).read_bytes().decode("utf-8")  # with its own ends of lines
        before, node = yaml.safe_load(text), yaml.compose(text, Loader=yaml.SafeLoader)
    if not isinstance(before, dict | None):
        raise ValueError(f"{path} must contain a YAML mapping, of options to their values.")
    values = [found for key, found in node.value if key.value == name] if node is not None else []
    if values:
        start, end = values[-1].start_mark.index, values[-1].end_mark.index
        space = "" if text[start - 1].isspace() else " "
        changed = f"{text[:start]}{space}{value}{text[end:]}"
    else:
        line_end = "\r\n" if "\r\n" in text else "\n"
        gap = line_end if text and not text.endswith("\n") else ""
        changed = f"{text}{gap}{name}: {value}{line_end}"
    if _loaded(path, changed) != (before or {}) | {name: value}:
        raise ValueError(f"{path} is written in a way that takes no further line. Add `{name}: {value}` by hand.")
    return changed


def _loaded(path: str | Path, text: str):
    """Returns what a YAML file of this text would hold; `None` if it is not YAML."""
    try:
        with reading(path):
            return yaml.safe_load(text)
    except ValueError:
        return None
