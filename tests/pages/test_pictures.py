"""The pictures of the pages: few colours, none that no page shows, and drawn from the raw results as they are."""

import ast
import base64
import io
import json
import posixpath
import re
import sys
from statistics import fmean

import numpy as np
from figures import H200, middle, read
from matplotlib.figure import Figure
from pages import ROOT, TEXTS
from PIL import Image


sys.path += [str(ROOT / "benchmarks"), str(ROOT / "docs")]
import palette
import pictures


STORED = {path.relative_to(ROOT).as_posix() for top in ("docs", "benchmarks") for path in (ROOT / top).rglob("*.png")}


def shares_apart(one: Image.Image, other: Image.Image) -> float:
    """The share of pixels that look different."""
    distance = np.asarray(one.convert("RGB"), int) - np.asarray(other.convert("RGB"), int)
    return float((np.abs(distance).max(2) > 24).mean())


def test_every_picture_is_shown_by_a_page_and_has_a_palette():
    shown = set()
    for name, text in TEXTS.items():
        folder = posixpath.dirname(name)
        shown |= {
            posixpath.normpath(posixpath.join(folder, link)) for link in re.findall(r"!\[[^\]]+\]\(([^)]+)\)", text)
        }
    assert shown == STORED
    for name in STORED:
        with Image.open(ROOT / name) as picture:
            assert picture.mode == "P" and len(picture.getcolors()) <= 64, name


COLORS = ("#4124df", "#e06314", "#1e8f5d")


def drawn(*colors: str) -> Image.Image:
    figure = Figure(figsize=(6, 3))
    axis = figure.subplots()
    for i, color in enumerate(colors):
        axis.fill_between([0, 1], [i, i], [i + 1, i + 2], color=color, alpha=0.16)
        axis.plot([0, 1], [i, i + 1], color=color)
    axis.set_title("a title")
    figure.savefig(file := io.BytesIO())
    return Image.open(file)


def test_a_palette_changes_no_look_and_saves_bytes():
    """Bands keep their tints, which a palette of the farthest colours loses."""
    picture = drawn(*COLORS)
    few = Image.open(io.BytesIO(palette.with_palette(picture)))
    assert shares_apart(few, picture) < 0.005 < shares_apart(few, drawn(*COLORS[::-1]))
    picture.save(file := io.BytesIO(), format="PNG")
    assert 2 * len(palette.with_palette(picture)) < len(file.getvalue())
    farthest = picture.convert("RGB").quantize(8, Image.Quantize.MAXCOVERAGE)
    assert shares_apart(farthest, picture) > 0.02


def test_a_notebooks_pictures_get_a_palette_and_its_text_stays(monkeypatch, tmp_path):
    drawn(*COLORS).save(file := io.BytesIO(), format="PNG")
    output = {"data": {"image/png": base64.b64encode(file.getvalue()).decode(), "text/plain": ["<é>"]}}
    notebook = {"cells": [{"source": ["a\n"]}, {"outputs": [{"text": ["b"]}, output]}], "nbformat": 4}
    path = tmp_path / "x.ipynb"
    path.write_text(json.dumps(notebook))
    monkeypatch.setattr(sys, "argv", ["palette.py", str(path)])
    palette.main()
    found = json.loads(path.read_text())
    picture = found["cells"][1]["outputs"][1]["data"].pop("image/png")
    output["data"].pop("image/png")
    assert found == notebook
    few = Image.open(io.BytesIO(base64.b64decode(picture)))
    assert few.mode == "P" and shares_apart(few, drawn(*COLORS)) < 0.005


# What they show


def stored(name: str) -> Image.Image:
    return Image.open(ROOT / f"docs/{name}.png")


def redrawn(figure: Figure) -> Image.Image:
    figure.savefig(file := io.BytesIO(), dpi=100)
    return Image.open(file)


def test_the_seconds_of_a_step():
    """Bars and labels are the medians of the raw file, and the stored picture has them."""
    runs = {run["trainer"]: run["results"]["64x4096 lognormal"] for run in read(f"step-7b-all-{H200}")["runs"]}
    figure = pictures.draw_seconds(pictures.seconds_by_phase())
    (axis,) = figure.axes
    texts = [text.get_text() for text in axis.texts]
    trainers = ("trl", "trl-control", "bf16", "fp8/fp8")
    for i, trainer in enumerate(trainers):
        bars = [bar for bar in axis.patches if round(bar.get_y() + bar.get_height() / 2) == i]
        whole = middle(runs[trainer], "step")
        for bar, phase in zip(bars, ("sampling", "scoring", "update")):
            assert bar.get_width() == middle(runs[trainer], phase)
        assert len(bars) == 4 and abs(sum(bar.get_width() for bar in bars) - whole) < 0.05 * whole
        gain = "" if i == 0 else f"  ({middle(runs['trl'], 'step') / whole:.2f}x)"
        assert f"{whole:.1f} s{gain}" in texts
    assert shares_apart(stored("seconds"), redrawn(figure)) < 0.005
    slower = pictures.seconds_by_phase()
    slower["fp8/fp8"]["sampling"] += 3
    assert shares_apart(stored("seconds"), redrawn(pictures.draw_seconds(slower))) > 0.005


def test_what_is_learned():
    figure = pictures.draw_learning(pictures.accuracies())
    (axis,) = figure.axes
    cells = {row["name"]: row["runs"] for row in read("study/corrections")["cells"]}
    names = ("full precision", "int4 tis", "int4 coupled")
    assert len(axis.lines) == len(names) and all(len(cells[name]) == 3 for name in names)
    for line, name in zip(axis.lines, names, strict=True):
        logs = [run["log"]["eval_accuracy"] for run in cells[name]]
        assert [*line.get_xdata()] == [int(step) for step in logs[0]]
        assert [*line.get_ydata()] == [fmean(log[step] for log in logs) for step in logs[0]]
    assert shares_apart(stored("learning"), redrawn(figure)) < 0.005
    other = pictures.accuracies()
    other["int4 coupled"] = {step: [a + 0.1 for a in seeds] for step, seeds in other["int4 coupled"].items()}
    assert shares_apart(stored("learning"), redrawn(pictures.draw_learning(other))) > 0.005


def test_how_busy_the_card_was():
    (run,) = read(f"async-7b-one-card-watched-{H200}")["runs"]
    cards, ends = pictures.card_and_updates()
    assert cards == run["found"]["cards"] and {row[1] for row in cards} == {0}
    assert all(abs(end - sum(run["found"]["seconds"][:i])) < 1e-9 for i, end in enumerate(ends, 1))
    figure = pictures.draw_card(cards, ends)
    (axis,) = figure.axes
    busy, *updates = axis.lines
    assert [*zip(*busy.get_data())] == [(second, share) for second, _, share, _ in cards]
    assert [line.get_xdata()[0] for line in updates] == ends
    assert shares_apart(stored("card"), redrawn(figure)) < 0.005
    idle = [[second, card, 0, memory] for second, card, _, memory in cards]
    assert shares_apart(stored("card"), redrawn(pictures.draw_card(idle, ends))) > 0.005


def test_the_house_stands():
    """Its rooms are the package's, and each imports only rooms on floors below its own."""
    package = ROOT / "trl_quant"
    floors = {room: floor for floor, rooms in enumerate(pictures.HOUSE) for room in rooms}
    assert set(floors) == {path.name for path in package.iterdir() if path.is_dir() and path.name != "__pycache__"}
    upwards, downwards = set(), set()
    for path in package.rglob("*.py"):
        room = path.relative_to(package).parts[0]
        for node in ast.walk(ast.parse(path.read_text())):
            if room in floors and isinstance(node, ast.ImportFrom):
                inside = [*path.relative_to(package).parts[:-1]]
                inside = inside[: len(inside) - node.level + 1] if node.level else []
                absolute = (node.module or "").removeprefix("trl_quant.").split(".") if node.module else []
                if node.level or (node.module or "").startswith("trl_quant."):
                    names = [[*inside, *absolute]] if node.module else [[*inside, alias.name] for alias in node.names]
                    for other in {name[0] for name in names} & floors.keys() - {room}:
                        (downwards if floors[other] > floors[room] else upwards).add((room, other))
    assert len(downwards) > 20 and not upwards


def test_the_stages_go_around():
    """As its page tells them, in this order, each beside the one before; the picture is the script's."""
    places = list(pictures.STAGES)
    for place, after in zip(places, [*places[1:], places[0]], strict=True):
        assert abs(place[0] - after[0]) + abs(place[1] - after[1]) == 1
    stages = re.findall(r"^\| (\d)\. (\w+) \|", TEXTS["docs/one_step.md"], re.MULTILINE)
    assert [f"{number} {name}" for number, name in stages] == [title for title, _, _ in pictures.STAGES.values()]
    for name, draw in (("one_step", pictures.draw_step), ("house", pictures.draw_house)):
        picture = stored(name)
        blank = Figure(figsize=[pixels / 100 for pixels in picture.size])
        assert shares_apart(picture, redrawn(draw())) < 0.005 < shares_apart(picture, redrawn(blank))
