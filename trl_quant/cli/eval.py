"""`trl-quant eval`: evaluates a model on a benchmark, or a run on its own data, sampled as in training.

trl-quant eval runs/int8-acr
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
    options.add_argument("--task", choices=choices("task"), help="the benchmark (default: the run's reward and data)")
    options.add_argument("--data", help="file or directory with the questions (default: the run's, else the task's)")
    options.add_argument("--num_questions", type=int, help="number of questions: the first ones, or generated ones")
    options.add_argument("--instruction", help="text after each question (default: the run's or the task's)")
    options.add_argument("--task_kwargs", help="difficulty of the task's generated problems, a JSON object")
    options.add_argument("--num_samples", type=int, help="answers to each question (default: one, greedy)")
    own = "(only for masked diffusion; default: the run's, else that of training)"
    options.add_argument("--block_length", type=int, help=f"tokens of a block {own}")
    options.add_argument("--tokens_per_step", type=int, help=f"tokens that a denoising step writes {own}")
    options.add_argument("--mask_token_id", type=int, help=f"the mask token {own}")
    options.add_argument(
        "--cache_finished_blocks", action=argparse.BooleanOptionalAction, help=f"an approximation; faster {own}"
    )
    options.add_argument("--batch_size", type=int, default=256, help="answers sampled together (default: %(default)s)")
    options.add_argument(
        "--reward_timeout", type=float, help="seconds that scoring them may take (default: as in training)"
    )
    options.add_argument(
        "--seed", type=int, default=0, help="of sampling and generated problems (default: %(default)s)"
    )
    told = {name: f"{default}; only with --num_samples" for name, default in sampling().items()}
    told |= {"dtype": "bfloat16", "max_completion_length": "2048, or 256 for masked diffusion"}
    add_engine_options(options, told)
    options.add_argument("--output", metavar="FILE.json", help="file for the result (default: eval-TASK.json)")
    return options


def main(argv: list[str] | None = None) -> None:
    """Evaluates the model named on the command line, and prints the result."""
    args = parser().parse_args(argv)

    from ..report.evaluation import EvaluationOptions, evaluate
    from ..report.terminal import show

    show(evaluate(EvaluationOptions(**vars(args))))
