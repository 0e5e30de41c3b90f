"""The `trl-quant` command. Heavy libraries are imported by the subcommand that needs them, so that help is instant."""

import argparse
import importlib


COMMANDS = {
    "prepare": "write a quantized copy of a checkpoint, for vLLM servers in INT8, NVFP4 or MXFP4",
    "train": "train with GRPO, quantized rollouts and a correction (also: examples/train_grpo.py)",
    "report": "table and chart of one or several training runs",
}


def main(argv: list[str] | None = None) -> None:
    """Runs `trl_quant.cli.<command>.main` with the arguments that follow the command."""
    parser = argparse.ArgumentParser(
        prog="trl-quant",
        description="Reinforcement learning for language models with quantized rollouts.",
        epilog="\n".join(f"  {name:8}{text}" for name, text in COMMANDS.items())
        + "\n\n`trl-quant COMMAND --help` lists a command's options.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="one of those listed below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="options of the command")
    args = parser.parse_args(argv)
    importlib.import_module(f"trl_quant.cli.{args.command}").main(args.arguments)
