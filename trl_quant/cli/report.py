"""`trl-quant report`: what the logs of training runs say, as one HTML page or a chart, and a table.

    trl-quant report runs/int4-none runs/int4-ais --output runs/report.html --output runs/report.png
    trl-quant report --mismatch runs/int4-ais --output runs/mismatch.png

A run is a directory with the files of `trl_quant.report.runs`; runs whose recorded settings differ in the seed alone
are drawn as one band. With `--mismatch` it reports where the activations of one run's trainer and engine part
(`trl_quant.cli.mismatch`).
"""

import argparse
import io
import os
import sys
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from statistics import fmean

from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table

from ..report.findings import findings, verdict
from ..report.panels import chart
from ..report.runs import ENDS, KL, REWARD, Run, directory_name, grouped, read_run
from . import plain


# TRL's name for the weight that multiplies a token's loss, after caps and interpolation; 1 without correction.
WEIGHT = "sampling/importance_sampling_ratio/mean"
HELD_OUT = ("eval_accuracy", "eval_reward")
HEADER = ("run", "reward", "held-out", "KL mean", "last", "weight", "s", "status")


def row(run: Run) -> list[str]:
    """A run's row below `HEADER`; first and last rewards and the last KL are means over `ENDS` logged steps."""
    reward, kl, weight = run.values(REWARD), run.values(KL), run.values(WEIGHT)
    held_out = next(filter(None, map(run.values, HELD_OUT)), [])
    seconds = run.values("train_runtime")
    cells = [
        f"{fmean(reward[:ENDS]):.2f}→{fmean(reward[-ENDS:]):.2f}" if reward else "",
        "→".join(f"{value:.2f}" for value in (held_out[:1] + held_out[1:][-1:])),
        f"{fmean(kl):.1e}" if kl else "",
        f"{fmean(kl[-ENDS:]):.1e}" if kl else "",
        f"{fmean(weight):.3f}" if weight else "",
        f"{seconds[-1]:.0f}" if seconds else "",
    ]
    return [run.name, *(cell or "-" for cell in cells), run.status]


def table(runs: Sequence[Run]) -> Table:
    """One row per run."""
    result = Table(*HEADER)
    result.box, result.padding, result.pad_edge = box.SIMPLE_HEAD, (0, 1, 0, 0), False  # fits 80 columns
    for column in result.columns[1:-1]:
        column.justify = "right"
    for run in runs:
        result.add_row(*map(plain, row(run)))
    return result


def plot(runs: Sequence[Run], path: str | Path, titles: Collection[str] = ()) -> None:
    """Writes the page, or [`~panels.chart`] (of panels with `titles`) as what `path` ends in."""
    if Path(path).suffix == ".html":
        from ..report.page import page

        write_whole(path, page(runs, HEADER, [row(run) for run in runs]).encode())
    else:
        write_figure(path, chart(runs, titles))


def write_figure(path: str | Path, figure: Figure) -> None:
    """Writes a figure as what `path` ends in, in one step."""
    file = io.BytesIO()
    figure.savefig(file, format=Path(path).suffix.removeprefix("."), dpi=120)
    write_whole(path, file.getvalue())


def write_whole(path: str | Path, data: bytes) -> None:
    """
    Writes a file in one step: who looks meanwhile, or after a failure, finds the one before.

    Raises:
        OSError: The file cannot be written; it names `path`, also where a full disk's own error names no file.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        half.write_bytes(data)
        half.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        half.unlink(missing_ok=True)


def check_output(path: str, *others: str) -> None:
    """Raises `ValueError` for a file to write that is no chart and not one of the `others`, or a directory."""
    if Path(path).is_dir():
        raise ValueError(f"`--output`={path!r} is a directory. Name a file.")
    suffix, known = Path(path).suffix.removeprefix("."), [*Figure().canvas.get_supported_filetypes(), *others]
    if suffix not in known:
        raise ValueError(f"`--output`={path!r}: charts are written as {', '.join(sorted(known))}.")


def named(directories: Sequence[str]) -> list[str]:
    """Names of the runs: of their directories, or whole paths where two would be the same."""
    names = [directory_name(directory) for directory in directories]
    count = Counter(names)
    return [name if count[name] == 1 else directory for name, directory in zip(names, directories, strict=True)]


def main(argv: list[str] | None = None) -> None:
    """Prints the table and the findings of the runs named on the command line, and writes their report."""
    argv = sys.argv[1:] if argv is None else argv
    if any(part.partition("=")[0] == "--mismatch" for part in argv):
        from . import mismatch

        return mismatch.main(argv)
    parser = argparse.ArgumentParser(
        prog="trl-quant report",
        description=__doc__.partition("\n")[0],
        epilog="Instead of runs, `--mismatch MODEL_OR_RUN` reports where the activations of trainer and engine part, "
        "operator by operator; `trl-quant report --mismatch MODEL --help` lists its options.",
    )
    parser.add_argument("runs", nargs="+", help="output directories; seeds of one setting are drawn as one band")
    parser.add_argument(
        "--output",
        action="append",
        help="where the report goes: .html is the whole, .png, .svg or .pdf its charts; may be given several times "
        "(default: report.html)",
    )
    args = parser.parse_args(argv)
    outputs = args.output or ["report.html"]
    for path in outputs:
        check_output(path, "html")
    runs = [read_run(*pair) for pair in zip(args.runs, named(args.runs), strict=True)]
    console = Console()
    console.print(table(runs))
    for group in grouped(runs):
        for line in findings(group) or [verdict(group)]:
            console.print(plain(f"{group.name}: {line}"))
    for path in outputs:
        plot(runs, path)
        console.print(plain(f"report: {path}"))
