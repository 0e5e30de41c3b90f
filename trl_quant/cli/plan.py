"""`trl-quant plan MODEL`: shows what a run of `trl-quant train` with these options would do and need, on any machine.

    trl-quant plan Qwen/Qwen2.5-7B-Instruct --rollout_precision fp8 --use_vllm true --use_peft true --card 80

The options are `--card` and those of `trl-quant train`; `--model_name_or_path` may replace MODEL. Only the model's
config, its tokenizer and the dataset are loaded. If the run does not fit into the memory, the plan says with which
changes it would, and the command ends with status 1. On the machine that is to train, `trl-quant train ... --dry_run
true` fails if the run would.
"""

import argparse

from . import plain_errors
from .options import check_train, given, with_model


LARGEST_CARD = 1e9  # GB


@plain_errors()
def main(argv: list[str] | None = None) -> None:
    """Prints the plan of a run."""
    parser = argparse.ArgumentParser(
        prog="trl-quant plan",
        usage="%(prog)s MODEL [--card GB] [options of trl-quant train]",
        description=__doc__.partition("\n")[0],
        epilog="MODEL is a hub id or a directory, and comes before the options that `trl-quant train --help` lists.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--card",
        type=float,
        metavar="GB",
        help="of the GPU, 10^9 bytes (default: this machine's, or 80; with --use_cpu this machine's memory)",
    )
    args, options = parser.parse_known_args(argv)
    if args.card is not None and not 0 < args.card <= LARGEST_CARD:
        raise ValueError(f"`--card`={args.card:g} is out of range. It must be > 0 and <= {LARGEST_CARD:g}.")
    options = with_model(parser, options)
    check_train(options, parser.prog, parser.usage)

    import torch

    from ..report.plan import GB, make_plan
    from ..trainers.launch import trainer_arguments
    from .train import parse_args

    on_cpu = None
    if not torch.accelerator.is_available() and given(options, "use_cpu") is None:
        on_cpu = False  # the run is for another machine
        options = ["--use_cpu", "true", *options]  # without it transformers refuses BF16 where there is no GPU
    arguments = trainer_arguments(*parse_args(options))
    arguments["args"].vllm_server_timeout = 0.0  # a plan does not wait for a server to start
    plan = make_plan(**arguments, card=None if args.card is None else round(args.card * GB), on_cpu=on_cpu)
    print("\n".join(plan.lines))
    if not plan.fits:
        raise SystemExit(1)
