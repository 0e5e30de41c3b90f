"""Temporary files are private: none has a name that another user of the machine can guess."""

import ast
import importlib.util
import re
import stat
from pathlib import Path

import pytest
from places import ROOT
from sources import all_sources, nodes


def guessable_names(sources: dict[str, str]) -> list[str]:
    """Places where a file gets a name of our choice in the temporary directory that everyone writes to."""
    shared = ("tempfile.gettempdir", "tempfile.mktemp", "gettempdir", "mktemp")
    calls = re.compile(r"gettempdir|mktemp|/tmp\b")
    return [
        f"{path}:{node.lineno}"
        for path, text in sources.items()
        if calls.search(text)
        for node in nodes(text)
        if (isinstance(node, ast.Call) and ast.unparse(node.func) in shared)
        or (isinstance(node, ast.Constant) and isinstance(node.value, str) and re.match(r"/(var/)?tmp\b", node.value))
    ]


@pytest.mark.slow
def test_no_guessable_temporary_names():
    own = Path(__file__).relative_to(ROOT).as_posix()
    assert not guessable_names({path: text for path, text in all_sources().items() if path != own})
    made_up = "tempfile.gettempdir()\nPath('/tmp/x')\nmktemp()\ntempfile.mkdtemp()\n'/tmpfile'\nfactory.mktemp('x')"
    assert guessable_names({"a.py": made_up}) == ["a.py:1", "a.py:3", "a.py:2"]


def test_benchmarks_work_in_private_directories(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    spec = importlib.util.spec_from_file_location("bench_engines", ROOT / "benchmarks/engines.py")
    engines = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(engines)
    one, two = (Path(engines.model_directory("tiny")) for _ in range(2))
    assert one != two and all((path / "config.json").is_file() for path in (one, two))
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o700 for path in (one, two))
