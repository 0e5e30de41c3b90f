"""
One vLLM engine after another in a process, as in a notebook where a cell with a trainer is run again.

Two things of the first engine would break the second trainer:

- TRL sets `RANK`, `WORLD_SIZE` and their like for vLLM, as a launcher does. By them a trainer that is made later takes
  itself for one rank of several, which talk through torch's process group. Here they are set while an engine starts.
- All engines of a process share that group and those that vLLM makes of it. vLLM destroys them with the first engine
  that ends, which may be long after its trainer was replaced. Here an engine gives its memory back when nothing holds
  its trainer any more (`del trainer; gc.collect()`), and the groups stay.
"""

import gc
import os
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

from ...trl_seams import empty_cache


OF_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_ended: list = []  # vLLM's clients of engines that gave their memory back; collected, they would destroy the groups


@contextmanager
def starting() -> Iterator[None]:
    """Context in which an engine starts, after those that nothing holds any more have ended."""
    gc.collect()
    before = {name: os.environ.get(name) for name in OF_LAUNCHERS}
    try:
        with _file_as_output():
            yield
    finally:
        gc.unfreeze()  # vLLM froze what exists now, and a frozen trainer would never be collected
        for name in OF_LAUNCHERS:
            os.environ.pop(name, None)
        os.environ.update({name: value for name, value in before.items() if value is not None})


@contextmanager
def _file_as_output() -> Iterator[None]:
    """Context with a file as standard output: vLLM asks for its number, and a notebook's or a test's may have none."""
    try:
        sys.stdout.fileno()
    except (AttributeError, OSError, ValueError):
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            yield
    else:
        yield


def ends_with(owner: object, llm) -> None:
    """Has vLLM's `llm` give its memory back when `owner` is collected."""
    weakref.finalize(owner, _end, llm).atexit = False


def _end(llm) -> None:
    client, config = llm.llm_engine.engine_core, llm.llm_engine.vllm_config
    client.engine_core.model_executor.shutdown()
    client.engine_core.model_executor = None
    config.compilation_config.static_forward_context.clear()  # holds layers with their caches
    _ended.append(client)
    empty_cache()
