"""`trl-quant prepare`: writes a quantized copy of a checkpoint."""

import argparse

from .options import choices


def parser() -> argparse.ArgumentParser:
    """Defines the options."""
    options = argparse.ArgumentParser(
        prog="trl-quant prepare",
        usage="%(prog)s --model MODEL --format FORMAT --output DIR [options]",
        description=__doc__,
    )
    options.add_argument("--model", required=True, help="hub id or directory of a 16-bit safetensors checkpoint")
    options.add_argument(
        "--format", required=True, choices=choices("format"), help="number format of the linear layers"
    )
    options.add_argument("--output", required=True, help="directory to write, which must not exist")
    options.add_argument("--revision", help="branch, tag or commit on the hub")
    options.add_argument(
        "--trust_remote_code", action="store_true", help="run the checkpoint's own Python, and copy it"
    )
    options.add_argument(
        "--awq", action="store_true", help="scale the weights on calibration data first (weight-only formats)"
    )
    text = "a .txt, .jsonl, .parquet or .csv file, or a dataset on the hub"
    options.add_argument("--calibration", help=f"data to calibrate `--awq` on: {text}")
    options.add_argument("--calibration_samples", type=int, default=256, help="sequences (default: %(default)s)")
    options.add_argument("--calibration_length", type=int, default=2048, help="tokens of each (default: %(default)s)")
    options.add_argument(
        "--perplexity",
        help=f"data for perplexity, before and after: {text} (default: the rest of `--calibration`)",
    )
    options.add_argument(
        "--perplexity_samples", type=int, default=8, help="sequences of that length, 0 for none (default: %(default)s)"
    )
    return options


def main(argv: list[str] | None = None) -> None:
    """Quantizes the checkpoint named on the command line."""
    args = parser().parse_args(argv)

    from ..storage.prepared import PrepareOptions, prepare

    for line in prepare(PrepareOptions(**vars(args))):
        print(line)
