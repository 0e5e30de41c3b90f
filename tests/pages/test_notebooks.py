"""The notebooks run from start to end, and what they claim holds."""

import base64
import copy
import io
import linecache
import sys

import matplotlib.pyplot as plt
import pytest
import transformers
from long_tests import rest_is_long
from matplotlib import image
from places import ROOT


nbformat = pytest.importorskip("nbformat")
NOTEBOOKS = ROOT / "notebooks"

# notebook -> what must hold in its namespace when it has run
CLAIMS = {
    "start": """
assert all(sqnr["int8"] > value for name, value in sqnr.items() if name != "int8") and sqnr["fp8"] > sqnr["nvfp4"] + 6
assert kl["int4"] > kl["fp8"] > kl["int8"] > 0
assert [entry["step"] for entry in history] == [1, 2, 3]
assert all(entry["mismatch/kl_k3"] > 1e-5 and 0 < entry["ais/alpha"] <= 1 for entry in history)
assert history[-1]["reward"] > history[0]["reward"]
""",
    "mismatch": """
assert len(samples["nvfp4"].mask) == len(prompts) and all(inputs.mask.all() for inputs in samples.values())
assert kl["nvfp4"] > kl["int4"] > 1.5 * kl["fp8"] > 3 * kl["int8"] > 10 * kl["bf16"] > 0
assert all(more > 1.5 for more in late.values())
assert 0.3 < ess["nvfp4"][0] < ess["int4"][0] < ess["fp8"][0] < ess["int8"][0] < 1
assert all(token > 0.98 for _, token in ess.values())
w = log_w("nvfp4").exp()
assert weights["decoupled"].equal(w) and w.max() > 2
assert weights["tis"].equal(w.clamp(max=2)) and weights["none"].equal(w**0)
dropped = {name: (value == 0).double().mean() for name, value in weights.items()}
assert 0.5 < dropped["trm"] < 1 and 0.05 < dropped["geometric"] < 0.5 and dropped["tis"] == dropped["ais"] == 0
assert 0 < dropped["icepop"] < 0.01 and 0 < dropped["dppo"] < 0.01
assert "first operator that differs is layers.0.self_attn.q_proj" in " ".join(result["summary"])
assert result["sampled"]["mismatch/kl_k3"] > 5e-4 and len(shown) == 1
""",
    "noise": """
assert all(values[0] == 0 and values[60] == 1e-2 and values[-1] == 5e-4 for values in curves.values())
assert len({tuple(values) for values in curves.values()}) == 4
assert all(abs(arrived[True, value] / value - 1) < 0.05 for value in sigmas)
assert arrived[False, 5e-4] < 5e-5 and abs(arrived[False, 1e-2] / 1e-2 - 1) < 0.05
mean = {value: sum(rows) / len(rows) for value, rows in kl.items()}
assert mean[4e-1] > 2 * mean[1e-1] > 4 * mean[0.0] > 0 and mean[1e-2] < 1.2 * mean[0.0]
assert min(kl[4e-1]) > mean[0.0] and sum(entropy[4e-1]) > draws * entropy[0.0][0]
assert corrected[0.1, "none"] == (1, 0) and corrected[0.1, "acr"][0] < 0.95 and corrected[0.1, "acr"][1] == 0
assert corrected[0.1, "coupled"][1] > corrected[0.0, "coupled"][1] > 0 and corrected[0.1, "coupled"][0] == 1
assert corrected[0.1, "acr"][0] <= corrected[0.1, "ais"][0] < 1
""",
    "study": """
from table import METRICS, cells_of
drawn = {name for name in found if QUESTIONS[name].panels}
sweeps = {name for name in drawn if all(len(row["runs"]) == 1 for row in found[name][0])}
assert "regimes" in sweeps and len(drawn - sweeps) > 5
assert [value for value in shown if isinstance(value, dict)] == [
    {"text/markdown": dense(markdown(question, rows) + compared(question, groups, brief=True))}
    for name, (rows, groups) in found.items()
    if name not in sweeps and (question := QUESTIONS[name])
]
pictures = [value for value in shown if not isinstance(value, dict)]
assert len(pictures) == len(drawn) and len(shown) == len(found) - len(sweeps) + len(drawn)
assert all(value.width >= 900 and value.convert("L").getextrema()[0] < 100 for value in pictures)  # as wide as a page
for name, (rows, groups) in found.items():
    asked = {cell.name: cell.settings() for cell in QUESTIONS[name].cells}
    for row, again in zip(rows, cells_of(groups, METRICS), strict=True):
        # What was run is what its command runs, `--seeds` and `--steps` aside
        same = row["settings"].keys() & asked[row["name"]].keys() - {"seed", "max_steps"}
        assert len(same) > 20 and {k: row["settings"][k] for k in same} == {k: asked[row["name"]][k] for k in same}
        assert (row["gain"], row["differs"]) == (again["gain"], again["differs"])
        assert row["metrics"]["reward"] == again["metrics"]["reward"]
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
    plt.close("all")


def test_every_notebook_is_tested():
    assert {path.stem for path in NOTEBOOKS.glob("*.ipynb")} == set(CLAIMS)


@pytest.mark.isa
@pytest.mark.slow
@pytest.mark.parametrize("name", rest_is_long(CLAIMS, "noise", "start"))
def test_notebook(name, in_notebooks):
    """The cells are plain Python: no magics, and of Jupyter's names `display` alone."""
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    cells = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    shown = []
    namespace = {"__name__": "__main__", "shown": shown, "display": lambda value, raw=False: shown.append(value)}
    for number, source in enumerate([*cells, CLAIMS[name]], start=1):
        title = f"<cell {number} of {name}.ipynb>"
        linecache.cache[title] = len(source), None, source.splitlines(keepends=True), title  # for tracebacks
        exec(compile(source, title, "exec"), namespace)


@pytest.mark.parametrize("name", CLAIMS)
def test_stored_outputs_are_small_and_clean(name):
    path = NOTEBOOKS / f"{name}.ipynb"
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    printed = [output for output in outputs if output.output_type == "stream"]
    assert printed and all(output.name == "stdout" for output in printed)
    shown = [output.data for output in outputs if output.output_type == "display_data"]
    assert len(printed) + len(shown) == len(outputs)
    pictures = [data["image/png"] for data in shown if "image/png" in data]
    assert all(image.imread(io.BytesIO(base64.b64decode(picture))).std() > 0.01 for picture in pictures)
    draws = any("plt." in cell.source or "display(" in cell.source for cell in notebook.cells)
    assert bool(pictures) == (draws and name != "study")  # of which only the tables are stored
    size = path.stat().st_size
    assert size < 300_000 and size - sum(map(len, pictures)) < 62_000


def test_the_study_shows_its_results_as_they_are(in_notebooks, capsys):
    """
    What the notebook printed and its tables are those of the files of now. A table of another accuracy is not among
    them. Its pictures are drawn when it runs, and not stored.
    """
    notebook = nbformat.read(NOTEBOOKS / "study.ipynb", as_version=4)
    first, drawing, last = [cell for cell in notebook.cells if cell.cell_type == "code"]
    namespace = {"__name__": "__main__"}
    for cell in (first, last):
        exec(compile(cell.source, "<study.ipynb>", "exec"), namespace)
        assert capsys.readouterr().out == "".join(output.text for output in cell.outputs)
    shown = [output.data for output in drawing.outputs]
    tables = [cells_in(data["text/markdown"]) for data in shown if "text/markdown" in data]
    found, questions, markdown = (namespace[name] for name in ("found", "QUESTIONS", "markdown"))
    expected = {
        name: cells_in(markdown(questions[name], rows) + namespace["compared"](questions[name], groups, brief=True))
        for name, (rows, groups) in found.items()
    }
    assert tables == [expected[name] for name in found if expected[name] in tables] and len(tables) > 10
    sweeps = found.keys() - {name for name in found if expected[name] in tables}
    assert all(questions[name].panels and len(row["runs"]) == 1 for name in sweeps for row in found[name][0])
    other = copy.deepcopy(found["uaq"][0])
    other[0]["metrics"]["accuracy"]["mean"] += 0.1
    assert expected["uaq"] in tables and cells_in(markdown(questions["uaq"], other)) not in tables
    assert len(shown) == len(tables)


def cells_in(table: str) -> list[list[str]]:
    """By line, however wide they are."""
    return [[cell.strip() for cell in line.split("|")] for line in table.splitlines()]


def test_the_study_shows_the_primary_comparisons_with_their_intervals_and_holms_p(in_notebooks):
    """And its text says that these decide where there are some, and where the others are."""
    notebook = nbformat.read(NOTEBOOKS / "study.ipynb", as_version=4)
    first, drawing, _ = [cell for cell in notebook.cells if cell.cell_type == "code"]
    exec(compile(first.source, "<study.ipynb>", "exec"), namespace := {"__name__": "__main__"})
    from paired import differences

    shown, wanted = [], []
    for output in drawing.outputs:
        compared = output.data["text/markdown"].partition("|comparisons|")[2].partition("\n\n")[0].splitlines()
        for _, family, *row, _ in (line.split("|") for line in compared[2:]):
            shown.append([family or shown[-1][0], *row])
    for name, (_, groups) in namespace["found"].items():
        rows = differences(namespace["QUESTIONS"][name], groups)
        for row in (row for row in rows if row["family"] == rows[0]["family"]):
            apart, low, high = (f"{row[value]:+.3f}" for value in ("mean", "low", "high"))
            numbers = str(row["pairs"]), apart, f"{low} to {high}", f"{row['holm']:.2g}"
            wanted.append([row["family"], row["cell"], row["against"], *numbers])
    assert shown == wanted and len(shown) > 30 and all(family.startswith("primary: ") for family, *_ in shown)
    assert 2 < sum(float(row[-1]) < 0.05 for row in shown) < 10
    told = " ".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    assert "the comparisons below its table decide, and `*` does not" in told and "each `.md` file" in told
    assert "Holm's p of 0.05 or more" in told
