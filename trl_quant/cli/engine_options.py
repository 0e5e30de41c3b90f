"""Defines the options of the commands that build an engine: `eval` and `report --mismatch`."""

import argparse

from .options import choices


def add_engine_options(parser: argparse.ArgumentParser, dtype: str) -> None:
    """Adds the fields of `trl_quant.report.trained.EngineOptions` with the same description in both commands."""
    default = "(default: the run's, else bf16)"
    parser.add_argument(
        "--rollout_precision", choices=choices("rollout_precision"), help=f"what the engine samples in {default}"
    )
    parser.add_argument(
        "--train_precision", choices=choices("train_precision"), help=f"what the policy is trained in {default}"
    )
    parser.add_argument(
        "--engine", choices=choices("engine"), default="embedded", help="what samples (default: %(default)s)"
    )
    parser.add_argument("--vllm_engine_kwargs", default="{}", help="further arguments of vLLM's `LLM`, a JSON object")
    parser.add_argument("--vllm_gpu_memory_utilization", type=float, default=0.3, help="share (default: %(default)s)")
    parser.add_argument(
        "--dtype",
        choices=choices("dtype"),
        default=dtype,
        help="types of the trainer's forward: 'mixed' is 32-bit weights under BF16 autocast (default: %(default)s)",
    )
    parser.add_argument("--trust_remote_code", action="store_true", help="run the model's own Python")
