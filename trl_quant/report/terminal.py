"""Text for a terminal. Names of runs and of metrics come from files, so nothing in them may act on a terminal."""

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text


def printable(text: str) -> str:
    """`text` with an escape such as `\\x1b` for each character that acts on a terminal or that a reader cannot see."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def plain(text: str) -> Text:
    """`text` for rich, which then reads neither markup nor emoji codes in it."""
    return Text(printable(text))


def show(parts: Iterable[Table | str]) -> None:
    """Prints tables and lines as they come."""
    console = Console()
    for part in parts:
        console.print(plain(part) if isinstance(part, str) else part)
