"""Texts: each source says what it is, none is long, and none leans on what the repository lacks."""

import ast
import re

from places import ROOT
from sources import (
    Sources,
    Violations,
    none,
    parsed,
)


MAX_LINES = 500


def undocumented(sources: Sources) -> Violations:
    return [path for path, text in sources.items() if not (ast.get_docstring(parsed(text)) or "").strip()]


def too_long(sources: Sources) -> Violations:
    lengths = {path: len(text.splitlines()) for path, text in sources.items() if not path.startswith("tests/")}
    return [f"{path} has {n} lines, more than {MAX_LINES}" for path, n in lengths.items() if n > MAX_LINES]


def texts_that_lean_on_others(texts: Sources) -> Violations:
    """Paths of one machine, numbers of issues, documents that the repository lacks, what is unfinished."""
    found = []
    for path, text in texts.items():
        words = re.findall(r"/(?:work|home|root|mnt)/\w+|\bissues? #?\d+|#\d+\b|\b(?:TODO|FIXME|XXX|HACK)\b", text)
        words += [name for name in re.findall(r"\b[A-Z]{3,}\.md\b", text) if not (ROOT / name).is_file()]
        found += [f"{path} mentions {word}" for word in words]
    return found


def test_every_source_says_what_it_is(sources):
    none([f"{path} has no docstring" for path in undocumented(sources)])
    assert undocumented({"a.py": "x = 1\n", "b.py": '""""""\n', "c.py": '"""What it is."""\n'}) == ["a.py", "b.py"]


def test_no_long_sources(sources):
    none(too_long(sources))
    lengths = {"trl_quant/a.py": 501, "examples/b.py": 500, "tests/c.py": 501}
    made_up = {path: "x = 1\n" * length for path, length in lengths.items()}
    assert too_long(made_up) == ["trl_quant/a.py has 501 lines, more than 500"]


def test_texts_stand_alone(sources):
    others = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "Makefile", ROOT / "setup.cfg"]
    texts = sources | {path.relative_to(ROOT).as_posix(): path.read_text() for path in others}
    del texts["tests/pages/test_texts.py"]  # which names what it forbids
    none(texts_that_lean_on_others(texts))
    made_up = {"a.py": "see /home/me/x, issue 12 and PLAN.md\n", "b.py": "# TODO: #7\n", "c.md": "CONTRIBUTING.md\n"}
    found = [line.partition(" mentions ")[2] for line in texts_that_lean_on_others(made_up)]
    assert found == ["/home/me", "issue 12", "PLAN.md", "TODO", "#7"]
