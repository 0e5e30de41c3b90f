"""The notebooks run from start to end, and what they claim holds."""

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient


ROOT = Path(__file__).parents[1]
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


def test_every_notebook_is_tested():
    assert {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")} == set(CLAIMS)


@pytest.mark.slow
@pytest.mark.parametrize("name", CLAIMS)
def test_notebook(name, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
    notebook = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell(CLAIMS[name]))
    resources = {"metadata": {"path": str(ROOT / "notebooks")}}
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources).execute()


@pytest.mark.parametrize("name", CLAIMS)
def test_stored_outputs_are_small_and_clean(name):
    path = ROOT / "notebooks" / f"{name}.ipynb"
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert path.stat().st_size < 50_000
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert outputs and all(output.output_type == "stream" and output.name == "stdout" for output in outputs)
