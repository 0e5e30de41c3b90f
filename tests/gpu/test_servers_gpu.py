"""
vLLM behind `vllm serve`, through the trainer: on the trainer's own GPU, where they share the weights' memory, and on
another one, to which the weights go over NCCL.

    python3 -m pytest -m gpu -s tests/gpu/test_servers_gpu.py

Each case trains in a process of its own (this file is its script too), about a minute each.
"""

import faulthandler
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import torch


sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
sys.path.insert(0, str(Path(__file__).parents[2]))

pytest.importorskip("vllm", reason="vLLM is not installed")
from asynchronous import asynchronous
from tiny import save_tiny
from training import config, dataset, make
from vllm_engines import GPU_MIXTURE, GPU_MODEL, SMALL, fresh, one_by_one, served

from trl_quant import QuantGRPOConfig, QuantGRPOTrainer
from trl_quant.config.checks.rule import refusal
from trl_quant.layers import UnifiedLinear
from trl_quant.models.families import HEAD, ROUTERS
from trl_quant.precisions import PRECISIONS, in_vllm, qat_precisions
from trl_quant.rollout.vllm.support import check_experts_here
from trl_quant.storage.layout import quantize_checkpoint


pytestmark = [pytest.mark.gpu, pytest.mark.vllm]
SERVED = ("bf16", "fp8", "int8", "nvfp4")
TRAINED = [name for name in qat_precisions() if name in in_vllm()]  # all weights, in four bits


def trainer_of(path: Path, precision: str, **options) -> QuantGRPOTrainer:
    settings = {
        "bf16": True,
        "use_cpu": False,
        "use_vllm": True,
        "rollout_precision": precision,
        "max_steps": 3,
        "learning_rate": 1e-3,
        "sync_check_steps": 1,
        "ddp_find_unused_parameters": False,
    }
    args = config(QuantGRPOConfig, path / "out", **settings | options)
    return make(QuantGRPOTrainer, args, model=str(path / "model"), train_dataset=dataset(32))


def sample_while_training(precision: str, path: Path, url: str) -> None:
    """Eight updates of the asynchronous trainer with syncs under load; then the server equals a fresh engine."""
    settings = {
        "use_vllm": True,
        "vllm_server_base_url": url,
        "vllm_group_port": free(),
        "rollout_precision": precision,
    }
    settings |= {"use_cpu": False, "bf16": True, "dtype": "bfloat16", "token_budget": 0, "max_completion_length": 200}
    settings |= {"max_steps": 8, "learning_rate": 1e-3, "max_staleness": 4, "sync_check_steps": 4}
    trainer = asynchronous(path / "out", model=str(path / "model"), **settings)
    first = one_by_one(fresh(trainer.model, precision, path / "first"))
    trainer.train()
    ours = served(trainer.sampling_thread.engine.vllm_client)
    last = one_by_one(fresh(trainer.model, precision, path / "last"))
    history = trainer.state.log_history
    checks = [log["sync_check/logp_difference"] for log in history if "sync_check/bound" in log]
    ages = [log["rollouts/age_max"] for log in history if "rollouts/age_max" in log]
    print(f"RESULT async {precision}: same {ours == last}, unmoved {ours == first}, checks {checks}, ages {ages}")
    right = ours == last != first and checks and len(ages) == 8 and max(ages) <= 4 and trainer.model_version == 9
    sys.stdout.flush()
    os._exit(not right)


def sample_from_server(precision: str, path: Path, url: str, kind: str) -> None:
    """
    Three steps, on weights that are trained in the server's precision, or with noise on the way; then the server equals
    an engine that vLLM starts on the trained weights. A mixture of experts gets codes and scales.
    """
    trains, given = kind == "trained", {"prepared": precision != "bf16", "device": "cuda"} if kind == "experts" else {}
    noise = {"noise_schedule": "exponential", "noise_sigma_start": 0.05, "noise_sigma_end": 0.01, "noise_stages": 3}
    options = {"train_precision": precision} if trains else noise
    server = {"vllm_mode": "server", "vllm_server_base_url": url, "vllm_group_port": free()}
    trainer = trainer_of(path, precision, **server, **options)
    first = one_by_one(fresh(trainer.model, precision, path / "first", **given))
    trainer.train()
    found = trainer.check_sync()
    ours = served(trainer.vllm_generation.vllm_client)
    last = one_by_one(fresh(trainer.model, precision, path / "last", **given))
    checks = [log["sync_check/logp_difference"] for log in trainer.state.log_history if "sync_check/bound" in log]
    layers = sum(isinstance(layer, UnifiedLinear) for layer in trainer.model.modules())
    print(f"RESULT server {precision}, {layers} layers in four bits: same {ours == last}, unmoved {ours == first}")
    print(f"RESULT checks {checks}, {found}", flush=True)
    right = layers == (7 * trainer.model.config.num_hidden_layers if trains else 0)
    os._exit(not (ours == last != first and len(checks) == 3 and right))


def cards() -> list[str]:
    """Returns the GPUs of this process, as `CUDA_VISIBLE_DEVICES` names them."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")


def free() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def run(command: list, **environment) -> None:
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    print("\n".join(line for line in done.stdout.splitlines() if line.startswith("RESULT")))
    assert done.returncode == 0, done.stdout[-3000:]


CASES = [(precision, "dense") for precision in SERVED] + [(precision, "trained") for precision in TRAINED]
CASES += [(precision, "experts") for precision in ("bf16", "int8", "fp8", "nvfp4")]
CASES += [(precision, "async") for precision in ("bf16", "fp8", "int8")]


@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize(("precision", "kind"), CASES)
def test_server(tmp_path, precision, kind, gpus):
    if torch.cuda.device_count() < gpus:
        pytest.skip("needs two GPUs")
    if kind == "experts" and (missing := refusal(check_experts_here, precision)):
        pytest.skip(missing)
    family = {"family": "qwen3_moe", "tied": False, **GPU_MIXTURE} if kind == "experts" else GPU_MODEL
    model = save_tiny(tmp_path / "model", dtype=torch.bfloat16, **family)
    flags = ["--dtype", "bfloat16", "--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"]
    flags += ["--worker-extension-cls", "trl_quant.rollout.vllm_server_worker.WorkerExtension"]
    flags += ["--weight-transfer-config", '{"backend": "trl_quant"}', "--max-model-len", "512", "--host", "127.0.0.1"]
    flags += ["--gpu-memory-utilization", "0.1", "--kv-cache-memory-bytes", str(256 << 20), "--max-num-seqs", "8"]
    flags += ["--compilation-config", json.dumps(SMALL["compilation_config"])]
    online = PRECISIONS[precision].vllm.online
    if kind == "experts" and precision != "bf16":  # vLLM would quantize routers too
        model = quantize_checkpoint(model, tmp_path / "prepared", precision, [*HEAD, ROUTERS], device="cuda")
    elif online:
        flags += ["--quantization", online]
    elif precision != "bf16":
        model = quantize_checkpoint(model, tmp_path / "prepared", precision)
    chosen = PRECISIONS[precision].vllm.for_experts if kind == "experts" else {}
    flags += [word for name, value in chosen.items() for word in (f"--{name.replace('_', '-')}", value)]
    port = free()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)]
    with (tmp_path / "server.log").open("w") as log:
        environment = os.environ | {
            "CUDA_VISIBLE_DEVICES": cards()[gpus - 1],
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_HOST_IP": "127.0.0.1",
        }
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
        server = subprocess.Popen(
            [*command, *flags], env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        for _ in range(120):
            assert server.poll() is None, (tmp_path / "server.log").read_text()[-3000:]
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(1)
        run(
            [__file__, precision, tmp_path, f"http://127.0.0.1:{port}", kind],
            CUDA_VISIBLE_DEVICES=cards()[0],
            VLLM_HOST_IP="127.0.0.1",
        )
    finally:
        errors = [line for line in (tmp_path / "server.log").read_text().splitlines() if "Error" in line]
        print("\n".join(errors))
        os.killpg(server.pid, signal.SIGKILL)  # its engine is a process of the same group, which holds the GPU's memory
        server.wait(30)


if __name__ == "__main__":
    faulthandler.dump_traceback_later(240, exit=True)  # before pytest's limit, so a hang says where it is
    precision, directory, url, kind = sys.argv[1:]
    if kind == "async":
        sample_while_training(precision, Path(directory), url)
    sample_from_server(precision, Path(directory), url, kind)
