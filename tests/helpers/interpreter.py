"""
Tests of Triton kernels, on a GPU or in the interpreter.

Triton decides at import whether to compile kernels or interpret them on a CPU, so without a GPU `test_interpreted.py`
reruns the files of such tests in a process with TRITON_INTERPRET=1. With a GPU, `pytest -m gpu` runs them on it.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import cycle, product

import pytest
import torch
from places import ROOT


triton = pytest.importorskip("triton")

INTERPRETED = triton.knobs.runtime.interpret
if INTERPRETED:
    DEVICES = ["cpu"]
else:
    no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
    DEVICES = [pytest.param("cuda", marks=[pytest.mark.gpu, no_gpu])]
on_devices = pytest.mark.parametrize("device", DEVICES)
reruns = pytest.mark.skipif(
    INTERPRETED or torch.cuda.is_available(), reason="for a process with neither interpreter nor GPU"
)


def rerun(files: Sequence[str], marks: str) -> dict[str, int]:
    """
    Runs the tests on devices of files below `tests` that have these marks (pytest's `-m`) in the interpreter, in one
    process; how many of each passed.
    """
    paths = {file: f"tests/{file}" for file in files}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-vv", "-k", "cpu"]
    command += ["-m", marks, *paths.values()]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    passed = [line for line in done.stdout.splitlines() if " PASSED " in line]
    return {file: sum(line.startswith(f"{path}::") for line in passed) for file, path in paths.items()}


def in_types(dtypes: list[torch.dtype], shapes: list[tuple]) -> list[tuple[torch.dtype, tuple]]:
    """Each shape in each type; in the interpreter, which is slow, in one type, all of them in turn."""
    return [*zip(cycle(dtypes), shapes)] if INTERPRETED else [*product(dtypes, shapes)]


def ptx_of(kernel, types: str, constants: dict, **options) -> str:
    """What a kernel is compiled to for sm_90, of its arguments' types (`-` for `None`) and constants."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    given = dict(zip(kernel.arg_names, types.split()))
    constants = constants | {name: None for name, kind in given.items() if kind == "-"}
    divisible = [i for i, name in enumerate(given) if name not in constants and given[name] != "fp32"]
    source = ASTSource(
        fn=kernel,
        signature=given | dict.fromkeys(constants, "constexpr"),
        constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in divisible},
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
