"""The notebooks run from start to end, and what they claim holds."""

import linecache
import sys
from pathlib import Path

import nbformat
import pytest
import transformers


NOTEBOOKS = Path(__file__).parents[1] / "notebooks"
# notebook -> what must hold in its namespace when it has run
CLAIMS = {
    "start": """
assert all(sqnr["int8"] > value for name, value in sqnr.items() if name != "int8") and sqnr["fp8"] > sqnr["nvfp4"] + 6
assert kl["int4"] > kl["fp8"] > kl["int8"] > 0
assert [entry["step"] for entry in history] == [1, 2, 3]
assert all(entry["mismatch/kl_k3"] > 1e-5 and 0 < entry["ais/alpha"] <= 1 for entry in history)
assert history[-1]["reward"] > history[0]["reward"]
""",
}


@pytest.fixture
def in_notebooks(monkeypatch):
    """Cells run in this process, which has imported everything; what they set for a process is undone."""
    monkeypatch.chdir(NOTEBOOKS)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    verbosity = transformers.logging.get_verbosity()
    yield
    transformers.logging.set_verbosity(verbosity)


def test_every_notebook_is_tested():
    assert {path.stem for path in NOTEBOOKS.glob("*.ipynb")} == set(CLAIMS)


@pytest.mark.slow
@pytest.mark.parametrize("name", CLAIMS)
def test_notebook(name, in_notebooks):
    """The cells are plain Python: no magics."""
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    cells = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    namespace = {"__name__": "__main__"}
    for number, source in enumerate([*cells, CLAIMS[name]], start=1):
        title = f"<cell {number} of {name}.ipynb>"
        linecache.cache[title] = len(source), None, source.splitlines(keepends=True), title  # for tracebacks
        exec(compile(source, title, "exec"), namespace)


@pytest.mark.parametrize("name", CLAIMS)
def test_stored_outputs_are_small_and_clean(name):
    path = NOTEBOOKS / f"{name}.ipynb"
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert path.stat().st_size < 50_000
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert outputs and all(output.output_type == "stream" and output.name == "stdout" for output in outputs)
