"""Defines the options of the commands that build an engine: `eval` and `report --mismatch`."""

import argparse

from .options import choices


def add_engine_options(parser: argparse.ArgumentParser, defaults: dict[str, str]) -> None:
    """
    Adds the fields of `trl_quant.report.trained.EngineOptions`. `defaults` says in words what a model that is no run
    gets, for the options in which the commands differ.
    """

    def add(name: str, what: str, otherwise: str, **options) -> None:
        parser.add_argument(f"--{name}", help=f"{what} (default: the run's, else {otherwise})", **options)

    add("rollout_precision", "what the engine samples in", "bf16", choices=choices("rollout_precision"))
    add("train_precision", "what the policy is trained in", "bf16", choices=choices("train_precision"))
    add("engine", "what samples", "embedded", choices=choices("engine"))
    add("vllm_engine_kwargs", "further arguments of vLLM's `LLM`, a JSON object", "none")
    parser.add_argument("--vllm_gpu_memory_utilization", type=float, default=0.3, help="share (default: %(default)s)")
    types = "types of the trainer's forward: 'mixed' is BF16 autocast over 32-bit weights, 'mixed_bfloat16' over 16-bit"
    add("dtype", types, defaults["dtype"], choices=choices("dtype"))
    parser.add_argument("--trust_remote_code", action="store_true", help="run the model's own Python")
    add("max_completion_length", "tokens", defaults["max_completion_length"], type=int)
    add("temperature", "of sampling", defaults["temperature"], type=float)
    add("top_p", "of sampling", defaults["top_p"], type=float)
    add("top_k", "of sampling", "all tokens", type=int)
    add("min_p", "of sampling", "none", type=float)
    add("repetition_penalty", "of sampling", "none", type=float)
    add("generation_kwargs", "further sampling options, a JSON object", "none")
