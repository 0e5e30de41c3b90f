"""
The meaning of each field stands in the source directly below the field.

[`explain`] hands it to the field, where transformers' parser looks for the help of an option, and [`documentation`]
puts it into the docstring of a config. A meaning names the values of [`NAMED`] in braces, as in `{precisions}`.
"""

import ast
import inspect
import textwrap
from dataclasses import fields
from itertools import pairwise
from types import MappingProxyType

from ..corrections import ACR, AIS, CORRECTIONS, DPPO, TIS
from ..noise import SCHEDULES
from ..noise.schedules import LEAST_STAGES
from ..precisions import PRECISIONS, exact_flows, frozen_bases, qat_precisions, train_precisions, unified_flows
from .values import listed


# what a meaning names in braces -> its text
NAMED = {
    "precisions": listed(PRECISIONS),
    "train_precisions": listed(train_precisions()),
    "frozen_bases": listed(frozen_bases()),
    "qat_precisions": listed(qat_precisions()),
    "unified_flows": listed(unified_flows()),
    "exact_flows": listed(exact_flows()),
    "corrections": listed(CORRECTIONS),
    "schedules": listed(SCHEDULES),
    "least_stages": str(LEAST_STAGES),
    **{f"{kind.__name__.lower()}_cap": f"{kind.cap:g}" for kind in (TIS, ACR, AIS, DPPO)},
}


def meanings(section: type) -> dict[str, str]:
    """Returns field -> meaning, for the fields of a class that its own source explains."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(section))).body
    found = {}
    for field, below in pairwise(tree.body):
        text = below.value if isinstance(below, ast.Expr) else None
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Constant):
            found[field.target.id] = " ".join(text.value.split())
            for name, value in NAMED.items():
                found[field.target.id] = found[field.target.id].replace(f"{{{name}}}", value)
    return found


def explain(section: type) -> type:
    """Gives the fields of a dataclass their meanings as help, and returns the class."""
    for name, meaning in meanings(section).items():
        section.__dataclass_fields__[name].metadata = MappingProxyType({"help": meaning})
    return section


def documentation(sections: dict[str, type]) -> str:
    """Returns the help of all fields of some sections, for the docstring of a config."""
    lines = ["", "    Parameters:"]
    for title, section in sections.items():
        lines += [f"        > Parameters that control {title}", ""]
        for f in fields(section):
            lines += [f"        {f.name} (*optional*, defaults to `{f.default!r}`):"]
            lines += textwrap.wrap(f.metadata["help"], 120, initial_indent=" " * 12, subsequent_indent=" " * 12)
        lines += [""]
    return "\n".join(lines)
