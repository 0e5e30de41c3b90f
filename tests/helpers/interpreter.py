"""
Tests of Triton kernels, on a GPU or in the interpreter.

Triton decides at import whether to compile kernels or interpret them on a CPU, so without a GPU a file of such tests
reruns itself in a process with TRITON_INTERPRET=1. With a GPU, `pytest -m gpu` runs the same tests on it.
"""

import os
import re
import subprocess
import sys

import pytest
import torch


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


def rerun(file: str) -> int:
    """Runs a file's tests in the interpreter; how many passed."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", file]
    done = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    return int(re.search(r"(\d+) passed", done.stdout)[1])


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
