"""`rollout_precision="auto"`: the precision that samples fastest on this device, found by measuring each; of those that
are about as fast, the one nearest to the policy.

Every precision that device and vLLM support gets an engine of the policy's shape with dummy weights, in a process of
its own that leaves nothing behind, and decodes a few tokens at the run's own batch size. The main process measures
before any of them has loaded a model, and the others take its choice.
"""

import json
import os
import subprocess
import sys
import time
from functools import partial

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, PreTrainedConfig

from ...precisions import PRECISIONS
from .support import (
    check_architecture,
    layout_arguments,
    prepared_precisions,
    skeleton,
    supported_precisions,
    unquantized_layers,
)


PROMPT_TOKENS = 64
NEW_TOKENS = 64
WORTHWHILE = 1.05  # a precision must beat a nearer one by as much: below that, less mismatch is the better bargain
LAUNCHERS = ("TORCHELASTIC_", "ACCELERATE_", "FSDP_", "MASTER_", "LOCAL_", "GROUP_", "ROLE_", "RANK", "WORLD_SIZE")
RESULT = "tokens per second: "


def choose_precision(args, model: str) -> str:
    """
    The fastest precision for a run's rollouts. Collective; prints a table on the main process.

    Args:
        args ([`QuantGRPOConfig`]): The run's configuration.
        model (`str`): Name or path of the policy.

    Returns:
        `str`: The nearest to the policy of those precisions that no other beats by 5% in tokens per second.

    Raises:
        `ValueError`: for an architecture that vLLM does not know.
        `RuntimeError`: if no engine started.
    """
    model = (args.vllm_engine_kwargs or {}).get("model", model)
    config = AutoConfig.from_pretrained(model, trust_remote_code=args.trust_remote_code)
    check_architecture(config, args.vllm_model_impl)
    candidates = [name for name, missing in supported_precisions().items() if missing is None]
    prepared = prepared_precisions(config)
    if prepared is not None:  # a quantized checkpoint runs in its own precision alone
        candidates = [name for name in candidates if name in prepared]
    choice: list = [None]
    if PartialState().is_main_process:
        measured = {name: measure(engine_arguments(args, model, config, name)) for name in candidates}
        print_table(measured, choice_of(measured), batch_size(args))
        choice = [(choice_of(measured), measured)]
    broadcast_object_list(choice, from_process=0)
    chosen, measured = choice[0]
    if chosen is None:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in measured.items())
        raise RuntimeError(f"`rollout_precision`='auto': no engine of {model} started. {reasons}")
    return chosen


def choice_of(measured: dict[str, float | str]) -> str | None:
    """The choice among precisions with their tokens per second, or why they have none; `None` if all failed."""
    speeds = {name: speed for name, speed in measured.items() if not isinstance(speed, str)}
    fastest = max(speeds.values(), default=None)
    return next((name for name in PRECISIONS if name in speeds and speeds[name] * WORTHWHILE >= fastest), None)


def batch_size(args) -> int:
    """Completions that one engine samples at a time."""
    return args.per_device_train_batch_size * args.steps_per_generation * args.vllm_tensor_parallel_size


def engine_arguments(args, model: str, config: PreTrainedConfig, precision: str) -> dict:
    """vLLM's arguments for an engine like the run's own, with dummy weights."""
    arguments = {
        "model": model,
        "dtype": "bfloat16",
        "quantization": PRECISIONS[precision].vllm.online,
        "tensor_parallel_size": args.vllm_tensor_parallel_size,
        "gpu_memory_utilization": args.vllm_gpu_memory_utilization,
        "model_impl": args.vllm_model_impl,
        "trust_remote_code": args.trust_remote_code,
        "max_num_seqs": batch_size(args),
        "max_model_len": PROMPT_TOKENS + NEW_TOKENS + 1,
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        **(args.vllm_engine_kwargs or {}),
        "load_format": "dummy",
    }
    prepared = prepared_precisions(config) is not None
    if prepared or PRECISIONS[precision].travels_quantized:
        ignore = unquantized_layers(skeleton(config, args.trust_remote_code))
        arguments |= layout_arguments(PRECISIONS[precision].format, ignore, "cpu", prepared, arguments)
    return {"precision": precision, "batch": batch_size(args), "engine": arguments}


def measure(arguments: dict) -> float | str:
    """Tokens per second of an engine of its own, or what went wrong."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    environment |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    if arguments["engine"]["tensor_parallel_size"] == 1:
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    command = [sys.executable, "-m", __name__, json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    for line in reversed(done.stdout.splitlines()):
        if line.startswith(RESULT):
            return float(line.removeprefix(RESULT))
    errors = [line for line in done.stderr.splitlines() if "Error" in line]
    return (errors or done.stderr.splitlines() or [f"ended with code {done.returncode}"])[-1].strip()


def decode(precision: str, batch: int, engine: dict) -> float:
    """What the process of [`measure`] does: tokens per second of decoding alone."""
    from vllm import LLM, SamplingParams

    from .worker import check_kernels

    llm = LLM(**engine)
    llm.apply_model(partial(check_kernels, precision=precision))
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(10, 200, (batch, PROMPT_TOKENS), generator=generator).tolist()
    inputs = [{"prompt_token_ids": ids} for ids in prompts]

    def seconds(new_tokens: int) -> float:
        sampling = SamplingParams(max_tokens=new_tokens, ignore_eos=True, logprobs=0, detokenize=False)
        start = time.perf_counter()
        llm.generate(inputs, sampling, use_tqdm=False)
        return time.perf_counter() - start

    for new_tokens in (4, 1):  # warms up the kernels, which some formats compile for each shape, and the prefix cache
        seconds(new_tokens)
    long, short = (min(seconds(n) for _ in range(2)) for n in (NEW_TOKENS, 1))
    return batch * (NEW_TOKENS - 1) / (long - short)


def print_table(measured: dict[str, float | str], chosen: str | None, batch: int) -> None:
    table = Table("precision", "tokens/s", "of bf16", title=f"Sampling {batch} completions at a time")
    base = measured.get("bf16")
    for name, speed in measured.items():
        if isinstance(speed, str):
            table.add_row(name, "-", speed)
        else:
            ratio = "-" if isinstance(base, str | None) else f"{speed / base:.2f}"
            table.add_row(name, f"{speed:.0f}", ratio, style="bold" if name == chosen else None)
    Console().print(table, f"rollout_precision: {chosen}")


if __name__ == "__main__":
    print(f"{RESULT}{decode(**json.loads(sys.argv[1]))}", flush=True)
