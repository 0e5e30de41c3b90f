"""The rules of CONTRIBUTING.md on who may import what, kept by reading the sources, and some on the sources."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "trl_quant"
MODULES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))
SOURCES = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in ("trl_quant", "examples", "benchmarks", "tests")
    for path in (ROOT / folder).rglob("*.py")
)
TEXTS = sorted(
    path
    for path in [*SOURCES, *(p.relative_to(ROOT).as_posix() for p in ROOT.glob("*.md")), *("Makefile", "setup.cfg")]
    if (ROOT / path).is_file() and path != "tests/test_house_rules.py"
)

# Rooms of pure torch: what they may import beyond the standard library and each other. `...` stands for any file.
PURE = {
    "formats/...": {"torch"},
    "corrections/...": {"torch"},
    "noise/...": {"torch"},
    "norms.py": {"torch"},
    "kernels/...": {"torch", "triton"},
}
# What a file may import inside a function on top of that, for those who call it.
LAZY = {"formats/checkpoint.py": {"safetensors"}}
# Who may import what not everyone may.
RESTRICTED = {
    "trl": ("trainer.py", "config.py", "rollout/...", "cli/..."),
    "vllm": ("rollout/...",),
    "triton": ("kernels/...",),
    "llmcompressor": ("scaling/modifier.py",),
}
MAX_LINES = 500


def matches(module: str, pattern: str) -> bool:
    return module == pattern or (pattern.endswith("...") and module.startswith(pattern[:-3]))


def imports(module: str) -> Iterator[tuple[str, bool]]:
    """`(dotted name, whether at import time)` of all that a file of the package imports; relative ones in full."""
    tree = ast.parse((PACKAGE / module).read_text())
    parents = ["trl_quant", *Path(module).parent.parts]
    lazy = {
        child
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node not in lazy
        elif isinstance(node, ast.ImportFrom):
            base = parents[: len(parents) - node.level + 1] if node.level else []
            name = ".".join([*base, *filter(None, [node.module])])
            for alias in node.names if node.level and node.module is None else [None]:
                yield f"{name}.{alias.name}" if alias else name, node not in lazy


def in_fresh_interpreter(code: str) -> set[str]:
    """The top-level modules that are loaded after `code`."""
    code += "; import sys; print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("module", MODULES)
def test_restricted_imports(module):
    for name, _ in imports(module):
        allowed = RESTRICTED.get(name.partition(".")[0])
        assert allowed is None or any(matches(module, pattern) for pattern in allowed), (
            f"{module} imports {name}; only {', '.join(allowed)} may"
        )


@pytest.mark.parametrize("module", [m for m in MODULES if any(matches(m, pattern) for pattern in PURE)])
def test_pure_rooms_import_torch_alone(module):
    allowed = next(names for pattern, names in PURE.items() if matches(module, pattern))
    for name, at_import in imports(module):
        top, _, inside = name.partition(".")
        if top == "trl_quant":
            path = inside.replace(".", "/")
            assert any(matches(path + end, pattern) for pattern in PURE for end in ("/", ".py", "")), (
                f"{module} imports {name}, which is not a pure room"
            )
        elif top not in sys.stdlib_module_names:
            extra = set() if at_import else LAZY.get(module, set())
            assert top in allowed | extra, f"{module} imports {name}; it may import {sorted(allowed | extra)}"


def test_rules_are_of_files_that_exist():
    """A rule on a room that was renamed guards nothing."""
    patterns = [*PURE, *LAZY, *(pattern for allowed in RESTRICTED.values() for pattern in allowed)]
    gone = {pattern for pattern in patterns if not any(matches(module, pattern) for module in MODULES)}
    assert gone <= {"kernels/..."}


def test_reader_of_imports_sees_every_kind(tmp_path, monkeypatch):
    (tmp_path / "formats").mkdir()
    (tmp_path / "formats/x.py").write_text(
        "import os, trl.core\nfrom torch import nn\nfrom . import fp8\nfrom ..config import C\nfrom .int8 import q\n"
        "if os:\n    import vllm\ndef f():\n    from safetensors import y\n"
    )
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path)
    assert sorted(imports("formats/x.py")) == sorted(
        [(name, True) for name in ("os", "trl.core", "torch", "trl_quant.formats.fp8", "trl_quant.config")]
        + [("trl_quant.formats.int8", True), ("vllm", True), ("safetensors", False)]
    )


def test_import_loads_neither_vllm_nor_triton():
    """TRL's trainer loads vLLM where it is installed, so our public names are loaded when they are asked for."""
    loaded = in_fresh_interpreter("import trl_quant")
    assert "trl_quant" in loaded and not loaded & {"vllm", "triton"}


def test_pure_rooms_load_neither_trl_nor_transformers():
    """What is said to be pure torch works where only torch is installed."""
    loaded = in_fresh_interpreter("import trl_quant.formats, trl_quant.corrections, trl_quant.noise")
    assert "torch" in loaded and not loaded & {"trl", "transformers", "vllm"}


@pytest.mark.parametrize("source", SOURCES)
def test_every_source_says_what_it_is(source):
    assert (ast.get_docstring(ast.parse((ROOT / source).read_text())) or "").strip(), f"{source} has no docstring"


@pytest.mark.parametrize("source", [source for source in SOURCES if not source.startswith("tests/")])
def test_no_long_sources(source):
    lines = len((ROOT / source).read_text().splitlines())
    assert lines <= MAX_LINES, f"{source} has {lines} lines, more than {MAX_LINES}"


@pytest.mark.parametrize("text", TEXTS)
def test_texts_stand_alone(text):
    """No paths of one machine, no numbers of issues, no documents that the repository lacks, nothing unfinished."""
    content = (ROOT / text).read_text()
    found = re.findall(r"/(?:work|home|root|mnt)/\w+|\bissues? #?\d+|#\d+\b|\b(?:TODO|FIXME|XXX|HACK)\b", content)
    documents = {name for name in re.findall(r"\b[A-Z]{3,}\.md\b", content) if not (ROOT / name).is_file()}
    assert not found and not documents, f"{text} mentions {found or documents}"
