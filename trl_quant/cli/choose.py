"""`trl-quant choose MODEL`: measures how fast vLLM samples in each precision, and names the one to train with.

    trl-quant choose Qwen/Qwen2.5-7B-Instruct --config run.yaml --write run.yaml

It runs on the machine that is to train, and measures with the run's batch, lengths, tensor parallelism and adapter: the
options are those of `trl-quant train`, on the command line or in `--config`. `--model_name_or_path` may replace MODEL.
Among the precisions within 5% of the fastest, it takes the one nearest to the policy.
"""

import argparse

from . import plain_errors
from .options import check_train, given, with_model


@plain_errors()
def main(argv: list[str] | None = None) -> None:
    """Measures, prints the table and the line for the config, and with `--write` puts that line into a file."""
    parser = argparse.ArgumentParser(
        prog="trl-quant choose",
        usage="%(prog)s MODEL [--config FILE.yaml] [--write FILE.yaml] [--processes N] [options of trl-quant train]",
        description=__doc__.partition("\n")[0],
        epilog="MODEL is a hub id or a directory, and comes before the options that `trl-quant train --help` lists.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE.yaml", help="the run's options (default: the file of `--write`)")
    parser.add_argument("--write", metavar="FILE.yaml", help="the file in which to set `rollout_precision`")
    text = "processes of the run, which share its `generation_batch_size` (default: %(default)s)"
    parser.add_argument("--processes", metavar="N", type=int, default=1, help=text)
    args, options = parser.parse_known_args(argv)
    if args.processes < 1:
        raise ValueError(f"`--processes`={args.processes} is out of range. It must be >= 1.")
    if any(part.partition("=")[0].replace("-", "_") == "__rollout_precision" for part in options):
        parser.error("--rollout_precision is what is chosen: leave it out")
    options = with_model(parser, options)
    config = args.config or args.write
    if config is not None:
        options = ["--config", config, *options]
    check_train(options, parser.prog, parser.usage)

    import torch

    from ..precisions import in_vllm
    from ..storage.settings_file import check_setting, write_setting
    from ..trainers.choice import check_here, choose_precision
    from ..trainers.launch import TRAINERS, model_arguments
    from ..trl_seams import configured_for
    from .train import parse_args

    check_here()  # before anything else is read
    if args.write is not None:
        check_setting(args.write, "rollout_precision")
    if not torch.accelerator.is_available() and given(options, "use_cpu") is None:
        options = ["--use_cpu", "true", *options]  # without it transformers refuses BF16 where there is no GPU
    # A config is checked with a precision, which `choose_precision` exchanges
    stand_in = given(options, "train_precision") or next(iter(in_vllm()))
    with configured_for(args.processes):
        defaults = {} if config is not None else {"use_vllm": True}
        script_args, training_args, model_args = parse_args([*options, "--rollout_precision", str(stand_in)], defaults)
    choice = choose_precision(TRAINERS[script_args.trainer], **model_arguments(training_args, model_args))
    choice.print()
    if args.write is not None:
        write_setting(args.write, "rollout_precision", choice.precision)
        print(f"Written into {args.write}.")
