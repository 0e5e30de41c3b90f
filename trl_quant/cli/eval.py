"""`trl-quant eval`: evaluates a model on a benchmark, sampled as in training.

trl-quant eval Qwen/Qwen2.5-0.5B-Instruct --task gsm8k
trl-quant eval runs/int8-acr --task aime24 --num_samples 32 --engine vllm --output aime24.json
"""

import argparse

from .engine_options import add_engine_options
from .options import choices, sampling


def parser() -> argparse.ArgumentParser:
    """Defines the options."""
    options = argparse.ArgumentParser(prog="trl-quant eval", description=__doc__.partition("\n")[0])
    options.add_argument("model", metavar="MODEL", help="hub id, directory or run")
    options.add_argument("--task", required=True, choices=choices("task"), help="the benchmark")
    options.add_argument("--data", help="file or directory with the questions (default: the task's on the hub)")
    options.add_argument("--num_questions", type=int, help="number of questions: the first ones, or generated ones")
    options.add_argument("--instruction", help="text after each question (default: the task's)")
    options.add_argument("--task_kwargs", default="{}", help="difficulty of generated problems, a JSON object")
    options.add_argument("--num_samples", type=int, help="answers to each question (default: one, greedy)")
    for name, default in sampling().items():
        options.add_argument(f"--{name}", type=float, help=f"of sampling (default with --num_samples: {default})")
    length = "tokens (default: 2048; for masked diffusion the run's, else 256)"
    options.add_argument("--max_completion_length", type=int, help=length)
    own = "(only for masked diffusion; default: the run's, else that of training)"
    options.add_argument("--block_length", type=int, help=f"tokens of a block {own}")
    options.add_argument("--tokens_per_step", type=int, help=f"tokens that a denoising step writes {own}")
    options.add_argument("--mask_token_id", type=int, help=f"the mask token {own}")
    options.add_argument(
        "--cache_finished_blocks", action=argparse.BooleanOptionalAction, help=f"an approximation; faster {own}"
    )
    options.add_argument("--batch_size", type=int, default=256, help="answers sampled together (default: %(default)s)")
    options.add_argument(
        "--seed", type=int, default=0, help="of sampling and generated problems (default: %(default)s)"
    )
    add_engine_options(options, dtype="bfloat16")
    options.add_argument("--output", metavar="FILE.json", help="file for the result (default: eval-TASK.json)")
    return options


def main(argv: list[str] | None = None) -> None:
    """Evaluates the model named on the command line, and prints the result."""
    args = parser().parse_args(argv)

    from ..report.evaluation import EvaluationOptions, evaluate
    from ..report.terminal import show

    show(evaluate(EvaluationOptions(**vars(args))))
