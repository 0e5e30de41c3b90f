"""
The `trl-quant` command. This package parses arguments, and each command calls the package that does its work.

A command imports that package after parsing, so that help and wrong arguments are answered before a heavy library
loads.
"""

import argparse
import errno
import importlib
import linecache
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from trl_quant import __version__, blamed

from .options import check_train


COMMANDS = {
    "prepare": "write a quantized copy of a checkpoint, for vLLM servers in INT8, NVFP4 or MXFP4",
    "export": "merge an adapter, or undo UAQ, for serving; in 16 bits or quantized",
    "plan": "check a training run and show its steps, memory and cost, without loading the model",
    "choose": "measure how fast vLLM samples in each precision here, and name the one to train with",
    "train": "train with quantized rollouts: GRPO, PPO, RLOO, distillation, diffusion (also: examples/train_grpo.py)",
    "eval": "answer benchmarks and score them: greedy, avg@k, pass@k; resumable",
    "report": "show training runs as one HTML page; with --mismatch, where trainer and engine differ",
}
# Errors of writing, for which the system does not name the file
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EPIPE)
FORESEEN = (ValueError, ImportError, OSError, RuntimeError)
# Libraries whose own errors are messages for the user
LIBRARIES = ("trl_quant", "trl", "transformers", "datasets", "huggingface_hub", "accelerate", "peft")


def main(argv: list[str] | None = None) -> None:
    """Runs `trl_quant.cli.<command>.main` with the arguments that follow the command."""
    _make_writable()
    parser = argparse.ArgumentParser(
        prog="trl-quant",
        description="Reinforcement learning for language models with quantized rollouts.",
        epilog="\n".join(f"  {name:8}{text}" for name, text in COMMANDS.items())
        + "\n\n`trl-quant COMMAND --help` lists a command's options.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="one of those listed below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="options of the command")
    args = parser.parse_args(argv)
    with plain_errors():
        if args.command == "train":
            check_train(args.arguments)
        importlib.import_module(f"trl_quant.cli.{args.command}").main(args.arguments)


@contextmanager
def plain_errors() -> Iterator[None]:
    """Context that ends the process with `error: ...` and code 1 on a foreseen error. Others keep their traceback."""
    try:
        yield
    except Exception as error:
        # huggingface_hub's error for a config.json that contradicts itself has no base class in `FORESEEN`
        if not isinstance(error, FORESEEN) and type(error).__module__ != "huggingface_hub.errors":
            raise
        # A failed import is an ImportError, or a RuntimeError of TRL's or of the library that was imported
        told = blamed(error) if isinstance(error, ImportError | RuntimeError) else error
        if told is error and not _is_foreseen(error):
            raise
        _drop_lost_output()
        from ..report.terminal import printable

        sys.exit("error: " + "\n".join(printable(line) for line in str(told).split("\n")))


def _make_writable() -> None:
    """Makes standard output accept any text. It may be missing or closed, or encode only ASCII."""
    if sys.stdout is None or sys.stdout.closed:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    elif hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")


def _drop_lost_output() -> None:
    """Discards output that cannot be written (full disk, closed pipe), which would raise again when Python exits."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _is_foreseen(error: Exception) -> bool:
    """Whether one of `LIBRARIES` raised the error on purpose, or the system raised it for a file."""
    if isinstance(error, OSError) and (error.filename is not None or error.errno in UNWRITABLE):
        return True
    trace = error.__traceback__
    while trace.tb_next is not None:
        trace = trace.tb_next
    frame = trace.tb_frame
    raised = (linecache.getline(frame.f_code.co_filename, trace.tb_lineno).split() or [""])[0] == "raise"
    return raised and frame.f_globals.get("__name__", "").partition(".")[0] in LIBRARIES
