"""The few exchanges of TRL's and vLLM's names, each for the duration of one call.

| exchanged | for | because |
|---|---|---|
| `grpo_trainer.VLLMGeneration` | the construction of a trainer | TRL looks its engine up there |
| fields of the trainer's arguments | the same | TRL corrects for its sampler only where `use_vllm` holds |
| `vllm_generation.LLM` | the construction of an engine | TRL leaves no room for further arguments of vLLM |
| `vllm_generation.VLLMClient` | the same | a server is checked before its workers are joined, and its answers after |
| `profiling.ProfilingContext` | a training | TRL tells its times to trackers alone |
| `vllm_generation.extract_logprobs` | a generation | vLLM hands out log-probabilities as numbers, not as objects |
| `utils._ChunkedLogProbFunction` | a forward pass | the engine's log-probabilities, with the gradients of TRL's |
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from time import perf_counter
from typing import Any

import trl.extras.profiling as profiling
import trl.generation.vllm_generation as vllm_generation
import trl.trainer.grpo_trainer as grpo_trainer
import trl.trainer.utils as trl_utils
from trl.kernels import ChunkedLogProbFunction

from .layers.exact import log_probs


@contextmanager
def exchanged(owner: Any, **values: Any) -> Iterator[None]:
    """Context in which attributes of `owner` have other values."""
    saved = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in saved.items():
            setattr(owner, name, value)


@contextmanager
def trainer_builds(engine: Callable | None, args: Any, **fields: Any) -> Iterator[None]:
    """Context in which `GRPOTrainer.__init__` builds `engine` in place of TRL's own, and sees `fields` in `args`."""
    with exchanged(grpo_trainer, VLLMGeneration=engine or grpo_trainer.VLLMGeneration), exchanged(args, **fields):
        yield


@contextmanager
def llm_with(**arguments: Any) -> Iterator[None]:
    """Context in which TRL's generation builds vLLM's `LLM` with `arguments` over its own."""
    original = vllm_generation.LLM
    with exchanged(vllm_generation, LLM=lambda **own: original(**own | arguments)):
        yield


def client_built(client: Callable) -> AbstractContextManager:
    """Context in which TRL's generation builds `client` in place of its own client of a server."""
    return exchanged(vllm_generation, VLLMClient=client)


def extracting_with(extract: Callable) -> AbstractContextManager:
    """Context in which TRL reads log-probabilities and their token ids out of vLLM's outputs with `extract`."""
    return exchanged(vllm_generation, extract_logprobs=extract)


def exact_log_probs(score: Callable) -> type:
    """TRL's fused head, whose log-probabilities are those of [`~layers.exact.log_probs`], with TRL's gradients."""

    class ExactLogProbs(ChunkedLogProbFunction):
        @staticmethod
        def forward(ctx, hidden, weight, bias, targets, temperature, *others):
            _, *outputs = ChunkedLogProbFunction.forward(ctx, hidden, weight, bias, targets, temperature, *others)
            return log_probs(hidden.to(ctx.compute_dtype), weight, bias, targets, temperature, score), *outputs

    return ExactLogProbs


def scoring_with(function: type) -> AbstractContextManager:
    """Context in which models with TRL's fused head compute their log-probabilities in `function`."""
    return exchanged(trl_utils, _ChunkedLogProbFunction=function)


@contextmanager
def phases_timed(add: Callable[[str, float], None]) -> Iterator[None]:
    """Context in which the name and the seconds of each phase that TRL times go to `add`, too."""

    class Timed(profiling.ProfilingContext):
        def __enter__(self):
            self.began = perf_counter()
            return super().__enter__()

        def __exit__(self, *error):
            add(self.name.partition(".")[2], perf_counter() - self.began)  # "QuantGRPOTrainer.compute_loss"
            return super().__exit__(*error)

    with exchanged(profiling, ProfilingContext=Timed):
        yield


def empty_cache() -> None:
    """TRL's: gives memory that torch holds for later back to the device."""
    vllm_generation.empty_cache()


def is_async(function: Callable) -> bool:
    """TRL's: whether a call of a reward function or a tool is to be awaited."""
    return trl_utils.is_async_callable(function)
