"""`trl-quant export`: writes a trained policy as one checkpoint to serve."""

import argparse

from .options import choices


def parser() -> argparse.ArgumentParser:
    """Defines the options."""
    options = argparse.ArgumentParser(
        prog="trl-quant export",
        usage="%(prog)s --adapter RUN --output DIR [options]",
        description=__doc__,
    )
    options.add_argument("--adapter", help="directory of a run or a checkpoint, with a LoRA adapter or a whole model")
    options.add_argument("--model", help="hub id or directory of the base, 16-bit or prepared (default: the adapter's)")
    options.add_argument("--output", required=True, help="directory to write, which must not exist")
    options.add_argument(
        "--format",
        default="none",
        choices=["none", *choices("format")],
        help="to quantize to (default: none, as many bits as the base had: 16 or 32)",
    )
    options.add_argument(
        "--base_format",
        choices=choices("base_format"),
        help="format to which training rounded a 16-bit base: its `train_precision` (default: the run's)",
    )
    options.add_argument("--revision", help="branch, tag or commit of the base on the hub")
    options.add_argument("--trust_remote_code", action="store_true", help="run the base's own Python, and copy it")
    return options


def main(argv: list[str] | None = None) -> None:
    """Exports the policy named on the command line."""
    args = parser().parse_args(argv)

    from ..storage.export import ExportOptions, export

    for line in export(ExportOptions(**vars(args))):
        print(line)
