"""
Lets a process start one vLLM engine after another, as a notebook does when a cell with a trainer is run again.

Two effects of the first engine would break the second trainer:

- vLLM reads `RANK`, `WORLD_SIZE` and similar variables, which a launcher sets. If they stayed, a later trainer would
  believe that it is one rank of several. Here they are set only while an engine starts.
- All engines of a process share torch's process group and the groups that vLLM derives from it. vLLM destroys them when
  the first engine ends, which may be long after its trainer was replaced. Here the groups stay, and an engine frees its
  memory when nothing refers to its trainer any more (`del trainer; gc.collect()`).
"""

import gc
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

from accelerate import Accelerator

from ...trl_seams import choose_port, empty_cache


LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
START_ATTEMPTS = 5  # to find a port that no other process takes
PORT_TAKEN = "EADDRINUSE"  # in the message of PyTorch's error
_ended: list = []  # vLLM's clients of engines that have ended. If they were collected, they would destroy the groups


def start_on_a_free_port(start: Callable[[], Any], accelerator: Accelerator) -> Any:
    """
    Calls `start`, which starts an engine, with the variables that a launcher sets, and returns the engine. Calls it
    again if another process has taken its port.

    A port is looked for before vLLM listens on it, so another run on the same host may take it meanwhile. With
    `MASTER_PORT` set, none is looked for, and the error is the user's.
    """
    ranks = {
        "RANK": accelerator.process_index,
        "LOCAL_RANK": accelerator.local_process_index,
        "WORLD_SIZE": accelerator.num_processes,
    }
    attempts = 1 if "MASTER_PORT" in os.environ else START_ATTEMPTS
    for attempt in range(1, attempts + 1):
        try:
            with starting():
                os.environ.update({name: str(value) for name, value in ranks.items()})
                choose_port()
                return start()
        except RuntimeError as error:
            if attempt == attempts or PORT_TAKEN not in str(error):
                raise


@contextmanager
def starting() -> Iterator[None]:
    """Context in which an engine starts. Engines of trainers that nothing refers to are ended first."""
    gc.collect()
    before = {name: os.environ.get(name) for name in LAUNCHER_VARIABLES}
    try:
        with _file_as_output():
            yield
    finally:
        gc.unfreeze()  # vLLM froze all existing objects, and a frozen trainer would never be collected
        for name in LAUNCHER_VARIABLES:
            os.environ.pop(name, None)
        os.environ.update({name: value for name, value in before.items() if value is not None})


@contextmanager
def _file_as_output() -> Iterator[None]:
    """Context in which standard output has a file number. vLLM needs one, and a notebook's output may have none."""
    try:
        sys.stdout.fileno()
    except (AttributeError, OSError, ValueError):
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            yield
    else:
        yield


def ends_with(owner: object, llm) -> None:
    """Makes vLLM's `llm` free its memory when `owner` is collected."""
    weakref.finalize(owner, _end, llm).atexit = False


def _end(llm) -> None:
    """Frees the memory of an engine, and leaves the process groups that other engines share."""
    client, config = llm.llm_engine.engine_core, llm.llm_engine.vllm_config
    client.engine_core.model_executor.shutdown()
    client.engine_core.model_executor = None
    config.compilation_config.static_forward_context.clear()  # refers to layers and their KV caches
    _ended.append(client)
    empty_cache()


def start_error(error: Exception, precision: str, model: str) -> Exception:
    """Returns the error for an engine that did not start, with advice."""
    message = f"vLLM did not start {model} with `rollout_precision`={precision!r}: {error}"
    if "'lm_head'" in str(error):
        return ValueError(
            f"{message}\nvLLM's model has no head of its own, but the policy has one (`tie_word_embeddings=False`). "
            "Sample with `use_vllm=False`."
        )
    if "memory" not in str(error).lower() and not isinstance(error, MemoryError):
        return RuntimeError(message)
    return ValueError(
        f"{message}\nThe engine needs more memory than it may use. Raise `vllm_gpu_memory_utilization`, or on a CPU "
        "`kv_cache_memory_bytes` in `vllm_engine_kwargs`; lower `vllm_max_model_length`; set "
        "`vllm_enable_sleep_mode=True`, so that engine and trainer take turns; or take a `rollout_precision` with "
        "fewer bits."
    )
