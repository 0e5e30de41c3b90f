"""`trl-quant report`: reports on training runs from their logs, as a table and an HTML page or a chart.

    trl-quant report runs --output runs/report.html --output runs/report.png
    trl-quant report --mismatch runs/int4-ais --output runs/mismatch.png

A run is a directory with the files of `trl_quant.report.runs`. Any other directory stands for all runs below it.
Runs whose recorded settings differ only in the seed are drawn as one band. With `--mismatch` the command reports where
the activations of a run's engine differ from its trainer's (`trl_quant.report.mismatch`).
"""

import argparse
import sys

from .engine_options import add_engine_options


def parser() -> argparse.ArgumentParser:
    """Defines the options for runs."""
    options = argparse.ArgumentParser(
        prog="trl-quant report",
        description=__doc__.partition("\n")[0],
        epilog="Instead of runs, `--mismatch MODEL_OR_RUN` reports where the activations of trainer and engine differ, "
        "operator by operator; `trl-quant report --mismatch MODEL --help` lists its options.",
    )
    options.add_argument(
        "runs",
        nargs="+",
        help="output directories, or directories of them; seeds of one setting are drawn as one band",
    )
    options.add_argument(
        "--output",
        action="append",
        help="file for the report: .html for all of it, .png, .svg or .pdf for its charts; may be given several times "
        "(default: report.html)",
    )
    return options


def mismatch_parser() -> argparse.ArgumentParser:
    """Defines the options with `--mismatch`."""
    options = argparse.ArgumentParser(
        prog="trl-quant report",
        description="reports where the engine's activations differ from the trainer's, and the effect on tokens",
    )
    options.add_argument("--mismatch", required=True, metavar="MODEL_OR_RUN", help="hub id, directory or run")
    add_engine_options(
        options, {"dtype": "mixed", "max_completion_length": "128", "temperature": "1", "top_p": "all tokens"}
    )
    prompts = "column 'prompt' or 'question' (default: the run's data, else a few texts)"
    options.add_argument("--prompts", metavar="FILE.jsonl", help=prompts)
    options.add_argument("--num_completions", type=int, default=8, help="how many (default: %(default)s)")
    options.add_argument("--output", default="report.png", help="chart, or all numbers as .json (default: %(default)s)")
    return options


def main(argv: list[str] | None = None) -> None:
    """Reports on the runs named on the command line, or on the mismatch of one of them."""
    argv = sys.argv[1:] if argv is None else argv
    if any(part.partition("=")[0] == "--mismatch" for part in argv):
        args = mismatch_parser().parse_args(argv)

        from ..report.mismatch import MismatchOptions, report_mismatch
        from ..report.terminal import show

        show(report_mismatch(MismatchOptions(**vars(args))))
    else:
        args = parser().parse_args(argv)

        from ..report.output import report
        from ..report.terminal import show

        show(report(args.runs, args.output or ["report.html"]))
