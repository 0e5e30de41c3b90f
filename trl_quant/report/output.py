"""Reports on runs: returns tables and findings to print, and writes the page (`.html`) or its charts."""

import io
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from matplotlib.figure import Figure
from rich.table import Table

from ..storage.identity import MODEL_FILES
from ..storage.manifest import matches
from ..storage.whole import write_whole
from .findings import findings, verdict
from .page import page
from .panels import chart
from .runs import TRAINER_STATE, Run, find_runs, grouped, named, read_run
from .table import speed_table, table


def report(directories: Sequence[str], outputs: Sequence[str]) -> Iterator[Table | str]:
    """Returns the tables and lines to print for the runs in and below some directories, and writes the `outputs`."""
    for path in outputs:
        check_output(path, "html")
    paths, without = find_runs(directories)
    given, runs, skipped = set(map(Path, directories)), [], [f"{path} holds no run." for path in without]
    for path, name in zip(paths, named(paths), strict=True):
        try:
            runs.append(read_run(path, name))
        except ValueError as error:
            if path in given:
                raise
            skipped.append(str(error))
    if not runs:
        raise ValueError(f"`runs`={', '.join(directories)!r} holds no run that can be read. {' '.join(skipped)}")
    for line in skipped:
        yield f"skipped: {line}"
    yield speed_table(runs)
    yield table(runs)
    for group in grouped(runs):
        for line in findings(group) or [verdict(group)]:
            yield f"{group.name}: {line}"
    for path in outputs:
        plot(runs, path)
        yield f"report: {path}"


def plot(runs: Sequence[Run], path: str | Path, titles: Collection[str] = ()) -> None:
    """Writes the page, or [`~panels.chart`] (of the panels with `titles`), in the format of `path`'s suffix."""
    if Path(path).suffix == ".html":
        write_whole(path, page(runs))
    else:
        write_figure(path, chart(runs, titles))


def write_figure(path: str | Path, figure: Figure) -> None:
    """Writes a figure in one step, in the format of `path`'s suffix."""
    file = io.BytesIO()
    figure.savefig(file, format=Path(path).suffix.removeprefix("."), dpi=120)
    write_whole(path, file.getvalue())


def check_output(path: str, *others: str) -> None:
    """Raises `ValueError` for a directory, or a file whose suffix is neither a chart's nor one of `others`."""
    if Path(path).is_dir():
        raise ValueError(f"`--output`={path!r} is a directory. Name a file.")
    if Path(path).exists() and matches(Path(path).name, (*MODEL_FILES, TRAINER_STATE)):
        raise ValueError(f"`--output`={path!r} is a file of a model or of a run. Name another file.")
    suffix, known = Path(path).suffix.removeprefix("."), [*Figure().canvas.get_supported_filetypes(), *others]
    if suffix not in known:
        raise ValueError(f"`--output`={path!r}: charts are written as {', '.join(sorted(known))}.")
