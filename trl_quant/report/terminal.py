"""Prints text on a terminal. Names of runs and metrics come from files, so control characters are escaped."""

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text


def printable(text: str) -> str:
    """Escapes each character that controls a terminal, or that a reader cannot see, such as `\\x1b`."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def plain(text: str) -> Text:
    """Converts text for rich, so that rich does not read parts of it as markup or emoji codes."""
    return Text(printable(text))


def show(parts: Iterable[Table | str]) -> None:
    """Prints tables and lines, each as soon as it is available."""
    console = Console()
    for part in parts:
        console.print(plain(part) if isinstance(part, str) else part)
