"""The notebooks run from top to bottom, and show what their text says."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient


NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(path, tmp_path):
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    printed = "".join(
        output.get("text", "")
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if output.name == "stdout"
    )
    if path.stem == "start":
        rows = {line.split()[0]: line.split()[1:] for line in printed.splitlines() if "/" in line.split(" ")[0]}
        assert len(rows["mismatch/kl_k3"]) == 3 and min(map(float, rows["mismatch/kl_k3"])) > 0
        # what the closing text claims
        assert max(map(float, rows["weights/normalized_update"])) < min(
            map(float, rows["weights/normalized_quantization_error"])
        )
