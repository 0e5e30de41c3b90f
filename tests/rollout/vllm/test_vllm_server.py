"""Real vLLM servers on this machine's CPU: which of them are refused, and what they sample from after each sync.

Trainer and server share memory for the weights, as they are on one device. NCCL needs GPUs (gpu/test_two_gpus.py).
"""

import json
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import pytest
import requests
import torch
from accelerate import Accelerator
from long_tests import rest_is_long
from tampering import sync_changed
from tiny import save_tiny, tiny_model, tiny_tokenizer
from training import lora, trainer_for


pytest.importorskip("vllm", reason="vLLM is not installed")
from servers import CACHE, PROCESSED, TRANSFER, WIDE, behind, serve, trainer_of, wait_for
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.serve.dev.server_info.api_router import PydanticVllmConfig
from vllm_engines import FP8_CACHE, fresh, one_by_one, served

from trl_quant import QuantDistillationTrainer, QuantPPOTrainer, QuantRLOOTrainer
from trl_quant.rollout.vllm import (
    client,
    kernel_checks,
    loading,  # noqa: F401, registers a loader
)
from trl_quant.rollout.vllm import server as vllm_server
from trl_quant.rollout.vllm.client import NotFiniteError
from trl_quant.rollout.vllm.serving import serve_command
from trl_quant.storage.layout import quantize_checkpoint


pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("server") / "model", dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def int8_model(model):
    return str(quantize_checkpoint(model, f"{model}-int8", "int8"))


@pytest.fixture(scope="module")
def servers(model, int8_model):
    """Two that were started as they should be, in BF16 and in INT8."""
    started = {
        "bf16": serve(model, *PROCESSED, *TRANSFER),
        # our loader knows the INT8 layers of CPUs without AMX, and FP32 norms
        "int8": serve(int8_model, *PROCESSED, *TRANSFER, *WIDE, *CACHE),
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


def refusal(*args) -> str:
    with pytest.raises(ValueError) as error:
        trainer_of(*args)
    return str(error.value)


@pytest.mark.long
def test_server_in_another_precision(tmp_path, model, servers):
    text = refusal(tmp_path, servers["bf16"], model, "fp8")
    assert "the precision 'bf16', and `rollout_precision`='fp8'" in text and "logprobs" not in text.split("Start it")[0]
    assert serve_command(str(model), "fp8") in text and f" {model} --quantization fp8_per_channel" in text
    text = refusal(tmp_path, servers["bf16"], model, "nvfp4")
    assert f"trl-quant prepare --model {model} --format nvfp4 --output model-nvfp4" in text
    assert " model-nvfp4 --dtype" in text


def test_server_of_another_model(tmp_path, servers):
    other = save_tiny(tmp_path / "other", dtype=torch.bfloat16, hidden_size=256)
    text = refusal(tmp_path, servers["bf16"], other, "bf16")
    assert "hidden_size (128, not 256)" in text and "precision" not in text.split("Start it")[0]
    assert f" {other} --dtype" in text


class StandIn(BaseHTTPRequestHandler):
    """Answers as a vLLM server does, before the client asks for samples or sends weights."""

    answers = {"/health": {}, "/v1/models": {"data": [{"id": "m"}]}}

    def do_GET(self):
        answer = self.answers.get(self.path)
        self.send_response(404 if answer is None else 200)
        self.end_headers()
        self.wfile.write(json.dumps(answer or {}).encode())

    def log_message(self, *args):
        pass


@pytest.fixture
def stand_in():
    """The address of a server that answers what it is given, and no development endpoint but those."""
    server = HTTPServer(("127.0.0.1", 0), StandIn)
    threading.Thread(target=server.serve_forever, args=[0.05], daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_server_that_reports_raw_logprobs_and_takes_no_weights(tmp_path, model, int8_model, stand_in, monkeypatch):
    """As `vllm serve` does without further flags: the stand-in tells what such a server would, in vLLM's own words."""
    settings = AsyncEngineArgs(model=int8_model, dtype="bfloat16", enforce_eager=True, max_model_len=512)
    info = PydanticVllmConfig.dump_python(settings.create_engine_config(), mode="json", fallback=str)
    assert info["speculative_config"] is None
    info["speculative_config"] = {"method": "ngram"}
    assert info["parallel_config"]["data_parallel_size"] == 1
    info["parallel_config"]["data_parallel_size"] = 2
    info["cache_config"] |= {"cache_dtype": "nvfp4", "calculate_kv_scales": True}
    answers = StandIn.answers | {"/server_info?config_format=json": {"vllm_config": info}}
    monkeypatch.setattr(StandIn, "answers", answers)
    text = refusal(tmp_path, stand_in, model, "int8")
    wrong, command = text.split("Start it")
    assert "`--kv-cache-dtype nvfp4`, and the self-check computes auto, bf" in wrong and "-kv-scales`, whose" in wrong
    assert "`--speculative-config`, whose log-probabilities may be wrong" in wrong
    assert "`--data-parallel-size 2`, of whose engines only the first one's answers arrive" in wrong
    assert "raw_logprobs" in wrong and "no `--weight-transfer-config`" in wrong and "precision" not in wrong
    assert "--logprobs-mode processed_logprobs" in command
    assert "--worker-extension-cls trl_quant.rollout.vllm_server_worker.WorkerExtension" in command
    assert """--weight-transfer-config '{"backend": "trl_quant"}'""" in command
    assert "the precision 'int8', and `rollout_precision`='bf16'" in refusal(tmp_path, stand_in, model, "bf16")
    info["weight_transfer_config"] = {"backend": "nccl"}  # TRL's
    assert "the weight transfer 'nccl', and 'trl_quant' is needed" in refusal(tmp_path, stand_in, model, "int8")
    info["model_config"] |= {"quantization": None, "dtype": "torch.float16"}
    assert "the precision 'torch.float16', and `rollout_p" in refusal(tmp_path, stand_in, model, "bf16")


def test_server_without_development_endpoints(tmp_path, model, stand_in):
    text = refusal(tmp_path, stand_in, model, "bf16")
    assert "development endpoints" in text and "\nVLLM_SERVER_DEV_MODE=1 " in text


def test_no_server(tmp_path, model):
    with pytest.raises(OSError, match="can't be reached"):
        trainer_of(tmp_path, "http://127.0.0.1:9", model, "bf16", vllm_server_timeout=0.1)


def test_options_of_colocated_engines(tmp_path):
    for options in ({"vllm_engine_kwargs": {"enforce_eager": True}}, {"lora_sync": "adapter"}):
        with pytest.raises(ValueError, match=r"vllm_mode='colocate'"):
            trainer_of(tmp_path, "http://127.0.0.1:9", "no/such-model", "bf16", **options)


@pytest.mark.parametrize(("precision", "tuning"), rest_is_long([("int8", "full"), ("bf16", "full"), ("int8", "lora")]))
def test_server_samples_from_the_policy(tmp_path, model, servers, monkeypatch, precision, tuning):
    """
    Three steps, with noise on the way; then the server equals an engine that vLLM starts on the weights. The INT8
    server holds its norms in FP32, as `serve_command` says for a run with noise: all of the noise arrives there. Its KV
    cache is in FP8 where vLLM has one, which the self-check is told.
    """
    last_sigma = 5e-4 if precision == "int8" else 0.1
    noise = {
        "noise_schedule": "exponential",
        "noise_sigma_start": 0.5,
        "noise_sigma_end": last_sigma,
        "noise_stages": 3,
    }
    peft_config = lora() if tuning == "lora" else None
    options = {"sync_check_steps": 1, "max_steps": 3, "peft_config": peft_config, **noise}
    trainer = trainer_of(tmp_path, servers[precision], model, precision, **options)
    (products,) = fresh(trainer.model, precision, tmp_path / "before").apply_model(kernel_checks.int8_errors)
    trainer.vllm_generation.engine.product_errors = products  # of this CPU; a server cannot be asked for them
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert all(log["sync_check/logp_difference"] < log["sync_check/bound"] for log in logs)
    assert [log["noise/sigma"] for log in logs] == [0, 0.5, last_sigma]
    assert [log["noise/effective_sigma"] for log in logs] == pytest.approx([0, 0.5, last_sigma], rel=0.1)
    assert logs[1]["mismatch/kl_k3"] > 5 * logs[0]["mismatch/kl_k3"]
    trainer.check_sync()
    caches = trainer.vllm_generation.engine.caches
    assert sorted(caches) == ([0, 1] if precision == "int8" and FP8_CACHE else [])
    if caches:
        caches[1].scales["_v_scale"] = 0.5
        with pytest.raises(RuntimeError, match=r"stale: in layer 1 the KV cache's `_v_scale` is 1, .* 0\.5"):
            trainer.check_sync()

    wide = {"load_format": "trl_quant", "model_loader_extra_config": {"wide_norms": True}}
    wide |= {"kv_cache_dtype": "fp8"} if FP8_CACHE else {}
    last = fresh(trainer.model, precision, tmp_path / "fresh", **(wide if precision == "int8" else {}))
    assert " ".join(WIDE[:3]) in serve_command("model", precision, wide_norms=True)
    assert (" ".join(WIDE[:2]) in serve_command("model", precision)) == (precision == "int8")
    assert served(trainer.vllm_generation.vllm_client) == one_by_one(last)


@pytest.mark.parametrize("trainer_class", rest_is_long([QuantPPOTrainer, QuantRLOOTrainer, QuantDistillationTrainer]))
def test_each_trainer_samples_from_a_server(tmp_path, model, servers, monkeypatch, trainer_class):
    """Two steps with a correction; then the server equals an engine that vLLM starts on the weights."""
    settings = behind(servers["bf16"], "bf16") | {"is_correction": "tis", "sync_check_steps": 1, "max_steps": 2}
    trainer = trainer_for(tmp_path / "out", str(model), trainer_class, **settings)
    before = served(trainer.vllm_generation.vllm_client)
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert len(logs) == 2 and all(log["sync_check/logp_difference"] < log["sync_check/bound"] for log in logs)
    assert all(0 < log["mismatch/kl_k3"] < 1e-2 for log in logs)  # BF16 against FP32
    trainer.check_sync()
    after = served(trainer.vllm_generation.vllm_client)
    assert before != after == one_by_one(fresh(trainer.model, "bf16", tmp_path / "fresh"))


def test_server_that_misses_a_sync(tmp_path, model, servers, monkeypatch):
    trainer = trainer_of(tmp_path, servers["bf16"], model, "bf16")
    trainer.check_sync()
    with torch.no_grad():
        for param in trainer.model.parameters():
            param.add_(0.05 * torch.randn(param.shape, generator=torch.Generator().manual_seed(0)))
    with pytest.raises(RuntimeError, match="stale: the policy has moved"):
        trainer.vllm_generation.check_sync()
    trainer.state.global_step += 1
    monkeypatch.setattr(client, "filled", lambda memory, stream: [] if list(stream) else None)
    with pytest.raises(RuntimeError, match="stale: the engine computes the same as before"):
        trainer.check_sync()


def test_memory_that_the_server_does_not_see(tmp_path, model, servers, monkeypatch):
    """It is found before a step, and in a sync before the server pauses; the server does not make the file."""
    trainer, share = trainer_of(tmp_path, servers["bf16"], model, "bf16", max_steps=1), client.shared_memory

    def elsewhere(size, device, have_opened):
        return share(size, device, lambda handle: have_opened([f"{handle[0]}-of-another-container"]))

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with monkeypatch.context() as patched:
        patched.setattr(client, "shared_memory", elsewhere)
        with pytest.raises(RuntimeError, match=r"failed at the first tensor: .* FileNotFoundError: ") as error:
            trainer.train()
        assert "one container" in str(error.value) and "in the middle of an update" not in str(error.value)
        text = refusal(tmp_path, servers["bf16"], model, "bf16")
    assert f"server at {servers['bf16']} is on the trainer's device, and its workers cannot read" in text
    assert not list(tmp_path.glob("trl-quant-weights-*"))
    assert served(trainer.vllm_generation.vllm_client)  # not paused
    trainer_of(tmp_path, servers["bf16"], model, "bf16").check_sync()


def test_a_run_that_ends_in_a_sync(tmp_path, model, servers, monkeypatch):
    """The next one is told, where vLLM would answer its sync with a status alone."""

    def ended(memory, stream):
        raise RuntimeError("killed.")

    trainer = trainer_of(tmp_path, servers["bf16"], model, "bf16", max_steps=1)
    with monkeypatch.context() as patched:
        patched.setattr(client, "filled", ended)
        with pytest.raises(RuntimeError, match=r"killed\. The server may wait in the middle of an update: restart it"):
            trainer.train()
    text = refusal(tmp_path, servers["bf16"], model, "bf16")
    assert f"at {servers['bf16']} stands in the middle of an update of a run that has ended" in text
    for end in ("finish_weight_update", "resume"):  # no weights have come, and it has those from before
        requests.post(f"{servers['bf16']}/{end}").raise_for_status()
    trainer_of(tmp_path, servers["bf16"], model, "bf16").check_sync()


def test_a_server_that_computes_nan(tmp_path, model, servers, monkeypatch):
    """Its answers cannot hold NaN: the check says so, and which weight it holds in place of the policy's."""
    trainer = trainer_of(tmp_path, servers["bf16"], model, "bf16")
    sampler, name = trainer.vllm_generation.engine, "model.norm.weight"
    sync_changed(sampler, lambda tensors: tensors | {name: tensors[name] * torch.nan})
    try:
        with pytest.raises(NotFiniteError, match=f"server at {servers['bf16']} computed NaN or infinity"):
            served(trainer.vllm_generation.vllm_client)
        with pytest.raises(RuntimeError, match=f"is not finite, and the engine holds another `{name}`"):
            trainer.check_sync()
    finally:
        sync_changed(sampler, dict)
    assert served(trainer.vllm_generation.vllm_client)


def test_what_was_not_announced_is_not_sent():
    a, b = ("a", torch.zeros(2)), ("b", torch.zeros(3))
    announced = vllm_server.announcement([a, b])
    assert [name for name, _ in vllm_server.as_announced(announced, iter([a, b]))] == ["a", "b"]
    with pytest.raises(RuntimeError, match=r"streams \('b', 'float32', \[3\]\) now, where .* expect \('a', "):
        next(vllm_server.as_announced(announced, iter([b, a])))
    with pytest.raises(ValueError):
        list(vllm_server.as_announced(announced, iter([a])))


def test_a_sync_ends_where_the_order_of_layers_has_changed(monkeypatch):
    """The announcement of the first sync is used again."""
    monkeypatch.setattr(vllm_server.VLLMServerEngine, "start_vllm", lambda self: self.plan_stream(False))
    policy = tiny_model()
    sampler = vllm_server.VLLMServerEngine(
        policy, Accelerator(cpu=True), tiny_tokenizer(), mode="server", precision="bf16"
    )
    sampler.vllm_client = SimpleNamespace(
        update_named_params=lambda announced, stream: list(stream), reset_prefix_cache=list, mark_sync=list
    )
    sampler.sync()
    attention = policy.model.layers[0].self_attn
    attention.q_proj = attention._modules.pop("q_proj")
    sampler.is_current = False
    with pytest.raises(RuntimeError, match=r"streams \('model.layers.0.self_attn.k_proj.weight', .* expect \('model"):
        sampler.sync()
