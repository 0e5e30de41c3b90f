"""Implements `rollout_precision="auto"`: measures each precision on this device and chooses the fastest, or, among
several that are about as fast, the one nearest to the policy.

Every precision that the device and vLLM support is measured when TRL builds the run's engine, with the arguments that
TRL gives for it, in separate processes that leave nothing behind (`trial`). The policy is already loaded then, as it is
when the run samples. The main process measures, and the others take its choice.
"""

from collections.abc import Iterable
from datetime import timedelta

import torch
from accelerate import Accelerator
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import AutoConfig

from ...precisions import PRECISIONS
from ...reading import reading
from ...storage.quantization import prepared_precisions
from ..stream import PolicyWeights
from .engine import VLLMEngine
from .support import adapter_arguments, check_architecture, supported_precisions
from .trial import Speed, Trial, measure


WORTHWHILE = 1.05  # the factor by which a precision must be faster than one that is nearer to the policy
PATIENCE = timedelta(hours=4)  # how long the other ranks wait for the choice


def fastest_engine(model: nn.Module, accelerator: Accelerator, processing_class, **settings) -> VLLMEngine:
    """
    Builds the run's engine in the fastest precision. All ranks must call it.

    Args:
        model (`nn.Module`): The policy.
        accelerator ([`~accelerate.Accelerator`]): The trainer's accelerator.
        processing_class: The trainer's tokenizer or processor.
        settings: Further arguments of [`VLLMEngine`], without the precision.
    """
    precision = choose_precision(model, accelerator, settings)
    return VLLMEngine(model, accelerator, processing_class, precision=precision, **settings)


def choose_precision(
    model: nn.Module, accelerator: Accelerator, settings: dict, candidates: Iterable[str] | None = None
) -> str:
    """
    Chooses the precision of an engine. All ranks must call it; the main process prints a table.

    Args:
        model (`nn.Module`): The policy. Only its shape matters.
        accelerator ([`~accelerate.Accelerator`]): The trainer's accelerator.
        settings (`dict`): The arguments of the run's [`VLLMEngine`], without the precision.
        candidates (`Iterable[str]`, *optional*): The precisions to measure. If `None`, all that run here.

    Returns:
        `str`: Among the precisions that no other beats by 5% in tokens per second, the one nearest to the policy.

    Raises:
        `ValueError`: vLLM does not know the architecture, or does not run the adapter.
        `RuntimeError`: No engine started.
    """
    given = settings.get("engine_kwargs") or {}
    start = given.get("model", model.name_or_path)
    with reading(start):
        config = AutoConfig.from_pretrained(start, trust_remote_code=settings.get("trust_remote_code", False))
    check_architecture(config, settings.get("model_impl", "auto"))
    if settings.get("lora_sync") == "adapter":
        adapter_arguments(model, given)
    if candidates is None:
        candidates = [name for name, missing in supported_precisions().items() if missing is None]
    prepared = prepared_precisions(config)
    if prepared is not None:  # a quantized checkpoint runs only in its own precision
        candidates = [name for name in candidates if name in prepared]

    choice: list = [None, {}]
    if accelerator.is_main_process:
        trial = Trial.of(model, accelerator, settings)
        measured = {name: measure(trial, name) for name in candidates}
        rates = rates_of(measured, trial.batch, trial.length)
        choice = [choice_of(rates), rates]
        print_table(measured, rates, choice[0], trial, uncounted(model, accelerator, settings))
    chosen, rates = from_main_process(choice)
    if chosen is None:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in rates.items())
        raise RuntimeError(f"`rollout_precision`='auto': no engine of {start} started. {reasons}")
    return chosen


def rates_of(measured: dict[str, Speed | str], batch: int, length: int) -> dict[str, float | str]:
    """Returns each precision's tokens per second over a whole generation, or the reason why it failed."""
    rates = {}
    for name, speed in measured.items():
        rates[name] = speed if isinstance(speed, str) else speed.rate(batch, length)
    return rates


def choice_of(rates: dict[str, float | str]) -> str | None:
    """Returns the choice for the result of [`rates_of`]; `None` if all precisions failed."""
    speeds = {name: rate for name, rate in rates.items() if not isinstance(rate, str)}
    for name in PRECISIONS:  # the nearest to the policy comes first
        if name in speeds and speeds[name] * WORTHWHILE >= max(speeds.values()):
            return name
    return None


def from_main_process(values: list) -> list:
    """Returns the main process's `values` on all processes. The others wait on their CPUs, so their GPUs stay free."""
    if torch.distributed.is_initialized():
        group = torch.distributed.new_group(timeout=PATIENCE, backend="gloo")
        torch.distributed.broadcast_object_list(values, src=0, group=group)
        torch.distributed.destroy_process_group(group)
    return values


def uncounted(model: nn.Module, accelerator: Accelerator, settings: dict) -> list[str]:
    """Returns the parts of a step that take time in this run but are not measured."""
    parts = {
        "reading prompts": True,
        "gathering the sharded policy": PolicyWeights(model, accelerator).is_sharded,
        "dequantizing the policy's base": any(not param.is_floating_point() for param in model.parameters()),
        "putting the engine to sleep": settings.get("enable_sleep_mode", False),
    }
    return [part for part, happens in parts.items() if happens]


def print_table(
    measured: dict[str, Speed | str],
    rates: dict[str, float | str],
    chosen: str | None,
    trial: Trial,
    uncounted: list[str],
) -> None:
    """Prints the speed of each precision, and why the others failed; `rates` are those of [`rates_of`]."""
    title = f"Sampling {trial.batch} completions of {trial.length} tokens after each sync"
    table = Table("precision", "decoding, tokens/s", "sync, s", "tokens/s", "of bf16", title=title)
    table.caption = f"Not counted: {', '.join(uncounted)}."
    base = rates.get("bf16")
    failed = {name: reason for name, reason in measured.items() if isinstance(reason, str)}
    for name, speed in measured.items():
        if name in failed:
            table.add_row(name, *"----")
        else:
            ratio = "-" if isinstance(base, str | None) else f"{rates[name] / base:.2f}"
            row = (f"{trial.batch / speed.step:.0f}", f"{speed.sync:.3f}", f"{rates[name]:.0f}", ratio)
            table.add_row(name, *row, style="bold" if name == chosen else None)
    console = Console()
    console.print(table)
    lines = [f"{name}: {reason}" for name, reason in failed.items()]
    console.print(*lines, f"rollout_precision: {chosen}", sep="\n", soft_wrap=True, markup=False)
