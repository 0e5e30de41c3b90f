"""The help of fields, for the docstrings of configs."""

import textwrap
from dataclasses import fields

from .fields import SECTIONS


def documentation(sections: dict[str, type] = SECTIONS) -> str:
    """Returns the help of all fields of some sections, for the docstring of a config."""
    lines = ["", "    Parameters:"]
    for title, section in sections.items():
        lines += [f"        > Parameters that control {title}", ""]
        for f in fields(section):
            lines += [f"        {f.name} (*optional*, defaults to `{f.default!r}`):"]
            lines += textwrap.wrap(f.metadata["help"], 120, initial_indent=" " * 12, subsequent_indent=" " * 12)
        lines += [""]
    return "\n".join(lines)
