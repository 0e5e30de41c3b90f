"""Our sources as texts and as trees, for the tests of rules that can be read from them."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import PurePosixPath

from places import ROOT


PACKAGE = "trl_quant"
FOLDERS = (PACKAGE, "examples", "benchmarks", "tests")

# Where precisions may be listed: the table, and what has a file or a kernel for each of them anyway
LISTS_OF_PRECISIONS = ("precisions.py", "formats/...", "kernels/quantize.py")

Sources = dict[str, str]  # path from the root -> text
Violations = list[str]


@cache
def all_sources() -> Sources:
    paths = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths}


@cache
def parsed(text: str) -> ast.Module:
    return ast.parse(text)


@cache
def nodes(text: str) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(parsed(text)))


def modules(sources: Sources) -> dict[str, str]:
    """The sources of the package, by their paths in it."""
    return {path.removeprefix(f"{PACKAGE}/"): text for path, text in sources.items() if path.startswith(f"{PACKAGE}/")}


def matches(module: str, patterns) -> bool:
    return any(module == p or (p.endswith("...") and module.startswith(p[:-3])) for p in patterns)


def called(node: ast.AST) -> str | None:
    """Name of the function that a node calls."""
    return getattr(node.func, "attr", getattr(node.func, "id", None)) if isinstance(node, ast.Call) else None


def strings(nodes: list[ast.AST | None]) -> list[str]:
    """The literal strings among some nodes."""
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def none(violations: Violations) -> None:
    assert not violations, "\n" + "\n".join(violations)


def imports(module: str, text: str) -> Iterator[tuple[str, bool, int]]:
    """`(dotted name in full, whether at import time, line)` of all that a file of the package imports."""
    parents = [PACKAGE, *PurePosixPath(module).parent.parts]
    functions = [node for node in nodes(text) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    lazy = {child for function in functions for child in ast.walk(function)}
    for node in nodes(text):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = parents[: len(parents) - node.level + 1] if node.level else []
            name = ".".join([*base, *filter(None, [node.module])])
            packages = node.module is None or name == PACKAGE
            names = [f"{name}.{alias.name}" for alias in node.names] if packages else [name]
        elif called(node) in ("import_module", "__import__"):
            names = strings(node.args[:1])
        for name in names:
            yield name, node not in lazy, node.lineno


def is_private(name: str) -> bool:
    return name.startswith("_") and name.strip("_") != "" and not (name.startswith("__") and name.endswith("__"))
