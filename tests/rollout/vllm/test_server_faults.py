"""vLLM servers that stop, trickle, break off, start again or are none: the run ends in time and says what was wrong.

Most faults are those of a proxy before a real server: it asks the server and spoils what comes back.
"""

import json
import os
import signal
import socket
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import pytest
from long_tests import rest_is_long


pytest.importorskip("vllm", reason="vLLM is not installed")
import requests
import torch
from servers import PROCESSED, TRANSFER, serve, trainer_of, wait_for
from tiny import save_tiny
from training import metrics
from trl.generation.vllm_client import VLLMClient
from urllib3.util.retry import Retry
from vllm.utils.network_utils import get_ip

from trl_quant.rollout.engine import RolloutNoise
from trl_quant.rollout.vllm import client as vllm_client
from trl_quant.rollout.vllm import server as vllm_server
from trl_quant.rollout.vllm import serving
from trl_quant.rollout.vllm.client import Client


pytestmark = [pytest.mark.vllm, pytest.mark.slow]
SAMPLES, WORKERS = "/v1/completions", "/collective_rpc"
LIMIT = 1.0  # seconds for requests that are answered late; a machine with other load may need as many for others


class Server:
    """A real one, which can be killed and started again at its address."""

    def __init__(self, model: str):
        self.model = model
        self.process, self.url = self.started()
        wait_for(self.process, self.url)

    def started(self, port: int = 0):
        return serve(self.model, *PROCESSED, *TRANSFER, port=port)

    def send(self, number: int) -> None:
        os.killpg(self.process.pid, number)  # its engine is a process of the same group

    def restart(self) -> None:
        self.send(signal.SIGKILL)
        self.process.wait(30)
        for _ in range(50):
            try:
                self.process, _ = self.started(urlsplit(self.url).port)
                break
            except OSError:  # the port is not free yet
                time.sleep(0.2)
        wait_for(self.process, self.url)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = Server(str(save_tiny(tmp_path_factory.mktemp("faults") / "model", dtype=torch.bfloat16)))
    yield server
    server.send(signal.SIGKILL)
    server.process.wait(30)


class Proxy(BaseHTTPRequestHandler):
    """Passes requests on to `url`; the answers to the paths in `faults` it gives to what stands there."""

    url, faults = "", {}

    def passed_on(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        answer = requests.request(
            self.command, self.url + self.path, data=body or None, headers={"Content-Type": "application/json"}
        )
        fault = self.faults.get(urlsplit(self.path).path)
        try:
            if fault is None:
                self.give(answer.content, answer.status_code)
            else:
                fault(self, answer)
        except OSError:  # nobody waits for it any more
            pass

    def give(self, body: bytes, status: int = 200, length: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = passed_on

    def log_message(self, *args):
        pass


@pytest.fixture
def proxy(server, monkeypatch):
    monkeypatch.setattr(Proxy, "url", server.url)
    monkeypatch.setattr(Proxy, "faults", {})
    front = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
    front.daemon_threads = True
    threading.Thread(target=front.serve_forever, args=[0.05], daemon=True).start()
    yield f"http://127.0.0.1:{front.server_port}"
    front.shutdown()


def silent(handler, answer):
    time.sleep(60)


def trickling(handler, answer):
    """Each byte comes long before a limit on silence would be over."""
    handler.send_response(200)
    handler.end_headers()
    for byte in answer.content:
        handler.wfile.write(bytes([byte]))
        time.sleep(LIMIT / 8)


def trickling_headers(handler, answer):
    for byte in b"HTTP/1.1 200 OK\r\nX-Long: " + b"x" * 1000:
        handler.wfile.write(bytes([byte]))
        time.sleep(LIMIT / 8)


def broken_off(handler, answer):
    handler.give(answer.content[: len(answer.content) // 2], length=len(answer.content))
    handler.connection.close()


def half(handler, answer):
    handler.give(answer.content[: len(answer.content) // 2])


def page(handler, answer):
    handler.give(b"<html>It works!</html>")


def error(handler, answer):
    handler.give(b'{"error": "out of memory"}', 500)


def changed(change):
    def fault(handler, answer):
        content = answer.json()
        change(content)
        handler.give(json.dumps(content).encode())

    return fault


def without(name):
    return changed(lambda content: content.pop(name))


def refused(tmp_path, url, server, faults, seconds=60.0, **options) -> str:
    """The error of a run whose server is faulty from the first sample on; spoilt requests have these seconds."""
    trainer = trainer_of(tmp_path, url, server.model, "bf16", max_steps=2, **options)
    client, Proxy.faults = trainer.vllm_generation.vllm_client, faults
    send = client.session.send

    def limited(request, **settings):
        client.seconds = seconds if urlsplit(request.url).path in faults else 60.0
        return send(request, **settings)

    client.session.send = limited
    with pytest.raises(RuntimeError) as error:
        trainer.train()
    return str(error.value)


LATE = [silent, *(pytest.param(fault, marks=pytest.mark.long) for fault in (trickling, trickling_headers))]


@pytest.mark.parametrize("fault", LATE)
@pytest.mark.parametrize("path", [SAMPLES, WORKERS, "/update_weights", "/reset_prefix_cache"])
def test_a_server_that_does_not_answer_in_time(tmp_path, server, proxy, fault, path):
    text = refused(tmp_path, proxy, server, {path: fault}, LIMIT)
    assert f"The vLLM server at {proxy} did not answer `POST {path}` within `vllm_request_timeout`=1 seconds" in text
    assert "failed at step 0" in text and "start again" in text
    assert ("in the middle of an update: restart it" in text) is (path == "/update_weights")
    for end in ("finish_weight_update", "resume") if path == "/update_weights" else ():
        requests.post(f"{server.url}/{end}").raise_for_status()


NOT_WHOLE = [
    (SAMPLES, broken_off, "did not answer `POST /v1/completions`: "),
    (SAMPLES, half, "answered `POST /v1/completions` with incomplete or invalid JSON: '{"),
    (SAMPLES, page, "with incomplete or invalid JSON: '<html>It works!"),
    (SAMPLES, error, "500 error responses"),
    (SAMPLES, without("choices"), "not as `vllm serve` does (KeyError: 'choices')"),
    (
        SAMPLES,
        changed(lambda c: c["choices"].pop()),
        "7 completions were returned, and 8 were asked for",
    ),
    (SAMPLES, changed(lambda c: c["choices"].clear()), "(IndexError"),
    (SAMPLES, changed(lambda c: c["choices"].reverse()), "they complete other prompts"),
    (SAMPLES, changed(lambda c: c["choices"][3]["token_ids"].clear()), "completion 3 has no token"),
    (
        SAMPLES,
        changed(lambda c: c["choices"][3]["token_ids"].pop()),
        "completions and log-probabilities have different lengths",
    ),
    (
        SAMPLES,
        changed(lambda c: [choice.update(logprobs=None) for choice in c["choices"]]),
        "they have no log-probabilities",
    ),
    (SAMPLES, changed(lambda c: c["choices"][3].update(finish_reason="abort")), "(finish_reason 'abort')"),
    (WORKERS, without("results"), "answered a call of `open_memory`, but not as `vllm serve` does"),
]


@pytest.mark.parametrize(
    ("path", "fault", "words"),
    # One of each kind: no answer, no JSON, wrong numbers of completions, orders and lengths, a call of workers
    rest_is_long(NOT_WHOLE, NOT_WHOLE[0], *NOT_WHOLE[1::2], NOT_WHOLE[-1]),
)
def test_answers_that_are_not_whole(tmp_path, server, proxy, monkeypatch, path, fault, words):
    monkeypatch.setattr(Retry, "get_backoff_time", lambda self: 0.0)  # TRL asks again after 4 and after 8 seconds
    text = refused(tmp_path, proxy, server, {path: fault}, sync_check_steps=0)
    assert words in text and proxy.removeprefix("http://127.0.0.1:") in text and "failed at step 0" in text


@pytest.mark.parametrize(("fault", "reason"), [(silent, "ReadTimeout|it did not"), (trickling_headers, "it did not")])
def test_waiting_for_a_server_ends(tmp_path, server, proxy, monkeypatch, fault, reason):
    monkeypatch.setattr(serving, "PATIENCE", 1.0)
    Proxy.faults = {"/health": fault}
    with pytest.raises(ConnectionError, match=rf"reached, after `vllm_server_timeout`=1 seconds: ({reason})"):
        trainer_of(tmp_path, proxy, server.model, "bf16", vllm_server_timeout=1.0)


@pytest.mark.long
def test_without_a_limit_a_slow_server_is_waited_for(tmp_path, server, proxy):
    def slow(handler, answer):
        time.sleep(1.5 * LIMIT)
        handler.give(answer.content)

    assert "within `vllm_request_timeout`=1" in refused(tmp_path, proxy, server, {SAMPLES: slow}, LIMIT)
    Proxy.faults = {}
    trainer = trainer_of(tmp_path, proxy, server.model, "bf16", max_steps=1, vllm_request_timeout=None)
    assert trainer.vllm_generation.vllm_client.seconds is None
    Proxy.faults = {SAMPLES: slow}
    trainer.train()
    assert len([log for log in metrics(trainer) if "loss" in log]) == 1


def test_a_slash_at_the_end_of_the_address(tmp_path, server):
    """vLLM answers `//health` with 404, for which the trainer would wait."""
    trainer = trainer_of(tmp_path, f"{server.url}/", server.model, "bf16", vllm_server_timeout=1.0)
    assert trainer.vllm_generation.vllm_client.base_url == server.url
    trainer.check_sync()


def test_an_empty_address(tmp_path, server):
    """As a variable of the environment that is not set gives one; TRL's client would ask `http:///health`."""
    port = {"vllm_server_host": "127.0.0.1", "vllm_server_port": urlsplit(server.url).port, "vllm_server_timeout": 1.0}
    with pytest.raises(ValueError, match="`vllm_server_base_url`='' is not a server's address"):
        trainer_of(tmp_path, "", server.model, "bf16", **port)


def test_a_port_for_the_transfer_that_is_taken(tmp_path, server, monkeypatch):
    """TRL's client would first wait for the server, which waits for the client on this port."""
    monkeypatch.setattr(vllm_client, "place_of", lambda device: "another device")
    with socket.create_server((get_ip(), 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ValueError, match=f"`vllm_group_port`={port} cannot be opened on this machine: .*in use"):
            trainer_of(tmp_path, server.url, server.model, "bf16", vllm_group_port=port)


# A server that changes between sync and sampling


def after_the_third_sync(monkeypatch, happens) -> None:
    syncs, mark = [], Client.mark_sync

    def marked(self):
        mark(self)
        syncs.append(1)
        if len(syncs) == 3:
            happens()

    monkeypatch.setattr(Client, "mark_sync", marked)


SAVING = {"save_strategy": "steps", "save_steps": 1, "max_steps": 4, "learning_rate": 0.02, "sync_check_steps": 0}


def test_a_stopped_server_and_a_resume(tmp_path, server, monkeypatch):
    trainer = trainer_of(tmp_path, server.url, server.model, "bf16", **SAVING)
    assert trainer.vllm_generation.vllm_client.seconds == 1800  # as the field says

    def stop():
        trainer.vllm_generation.vllm_client.seconds = 3.0
        server.send(signal.SIGSTOP)

    after_the_third_sync(monkeypatch, stop)
    try:
        with pytest.raises(RuntimeError) as error:
            trainer.train()
    finally:
        server.send(signal.SIGCONT)
    assert f"at {server.url} did not answer `POST {SAMPLES}` within `vllm_request_timeout`=3" in str(error.value)
    assert "failed at step 2" in str(error.value) and "checkpoint-2; continue with" in str(error.value)
    resumed = trainer_of(tmp_path, server.url, server.model, "bf16", **SAVING)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 4
    assert all(abs(log["mismatch/kl_k3"]) < 0.01 for log in metrics(resumed) if "loss" in log)


@pytest.mark.long
def test_a_server_that_started_again_is_not_sampled_from(tmp_path, server, monkeypatch):
    """By the time of the samples it has its checkpoint's weights, by which the self-check knows it."""
    after_the_third_sync(monkeypatch, server.restart)
    trainer = trainer_of(tmp_path, server.url, server.model, "bf16", **SAVING)
    with pytest.raises(RuntimeError, match="no longer holds the weights of this run's last sync: it was") as error:
        trainer.train()
    assert "failed at step 2" in str(error.value) and "checkpoint-2; continue with" in str(error.value)
    assert len([log for log in metrics(trainer) if "loss" in log]) == 2  # nothing was trained on its samples
    with pytest.raises(RuntimeError, match="no longer holds the weights"):
        trainer.vllm_generation.engine.write_norms({})  # nor does anything reach it but a whole sync
    monkeypatch.setattr(Client, "require_token", lambda self: None)
    with pytest.raises(RuntimeError, match="does not sample from the policy"):
        trainer.vllm_generation.check_sync()
    monkeypatch.undo()
    monkeypatch.setattr(vllm_server, "BACKEND", "files")


def test_a_server_that_another_run_syncs(tmp_path, server, monkeypatch):
    first = trainer_of(tmp_path / "first", server.url, server.model, "bf16", max_steps=1)
    other = trainer_of(tmp_path / "other", server.url, server.model, "bf16", max_steps=2)
    first.train()
    other.train()
    with pytest.raises(RuntimeError, match="or another run has sent it weights"):
        first.evaluate(first.train_dataset.select(range(2)))


def test_a_server_that_a_trainer_of_trl_syncs(tmp_path, server):
    """TRL's client sends no token with its weights, which it sends over NCCL."""
    trainer = trainer_of(tmp_path, server.url, server.model, "bf16", max_steps=1)
    trainer.train()
    with VLLMClient(base_url=server.url).weight_update():
        pass
    with pytest.raises(RuntimeError, match="or another run has sent it weights"):
        trainer.vllm_generation.vllm_client.generate([[1, 2, 3]])


@pytest.mark.long
def test_a_failed_update_of_norms(tmp_path, server, proxy):
    """The engine does not know which norms the server holds, and an evaluation, without noise, would write none."""
    trainer = trainer_of(tmp_path, proxy, server.model, "bf16")
    trainer.check_sync()
    client, Proxy.faults = trainer.vllm_generation.vllm_client, {"/finish_weight_update": silent}
    client.seconds, trainer.vllm_generation.engine.noise = 5 * LIMIT, RolloutNoise(sigma=0.5)
    with pytest.raises(RuntimeError, match="in the middle of an update: restart it"):
        trainer.vllm_generation.engine.prepare()
    client.seconds, Proxy.faults = 60.0, {}
    requests.post(f"{server.url}/resume").raise_for_status()
    with pytest.raises(RuntimeError, match="no longer holds the weights"):
        trainer.evaluate(trainer.train_dataset.select(range(2)))


@pytest.mark.long
def test_a_sync_while_other_clients_wait_for_samples(tmp_path, server):
    """The server keeps the other clients' requests, and no keys and values from before the sync."""
    trainer = trainer_of(tmp_path, server.url, server.model, "bf16", vllm_request_timeout=60.0)
    trainer.check_sync()
    client, prompt = trainer.vllm_generation.vllm_client, [1 + i % 20 for i in range(200)]
    with torch.no_grad():
        for param in trainer.model.parameters():
            param.add_(0.05 * torch.randn(param.shape, generator=torch.Generator().manual_seed(0)))
    request = {"model": client.model, "prompt": [prompt[:50]], "n": 8, "max_tokens": 80, "ignore_eos": True}
    enough, answers = threading.Event(), []

    def ask() -> None:
        while not enough.is_set():
            answers.append(requests.post(f"{server.url}{SAMPLES}", json=request, timeout=120))

    with ThreadPoolExecutor() as others:
        asking = [others.submit(ask) for _ in range(2)]  # two, so that one waits for samples at any moment
        time.sleep(0.3)
        try:
            trainer.vllm_generation.sync_weights()
            sampled = client.generate([prompt], max_tokens=8, temperature=0.0, logprobs=0)
        finally:
            enough.set()
    assert not any(each.exception() for each in asking)
    assert {(answer.status_code, len(answer.json()["choices"])) for answer in answers} == {(200, 8)}
    client.reset_prefix_cache()
    assert sampled == client.generate([prompt], max_tokens=8, temperature=0.0, logprobs=0)
    trainer.vllm_generation.check_sync()


# Something else at the address


def answers(status: int, body: bytes, headers: dict | None = None):
    class Other(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status if self.path != "/health" else 200)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    return Other


OTHERS = {
    "a page": (answers(200, b"<html>It works!</html>"), "got no list of models from .*It works!"),
    "ok": (answers(200, b'{"status": "ok"}'), "got no list of models"),
    "nothing": (answers(200, b""), "got no list of models"),
    "no models": (answers(200, b'{"data": []}'), "got no list of models"),
    "not found": (answers(404, b"Not Found"), "got status 404 from .*'Not Found'"),  # as `trl vllm-serve` does
    "key": (answers(401, b'{"error": "Unauthorized"}'), "got status 401"),
    "sglang": (answers(200, b'{"data": [{"id": "m", "owned_by": "sglang"}]}'), "got a model of 'sglang'"),
    "llama.cpp": (answers(200, b'{"data": [{"id": "m", "owned_by": "llamacpp"}]}'), "got a model of 'llamacpp'"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_another_service_at_the_address(tmp_path, server, other):
    handler, words = OTHERS[other]
    front = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=front.serve_forever, args=[0.05], daemon=True).start()
    url = f"http://127.0.0.1:{front.server_port}"
    try:
        with pytest.raises(
            ValueError, match=f"`vllm_server_base_url`='{url}' is not the address of a `vllm serve`: .*{words}"
        ) as error:
            trainer_of(tmp_path, url, server.model, "bf16")
    finally:
        front.shutdown()
    assert "or start it with:\n\n" in str(error.value) and f"vllm serve {server.model}" in str(error.value).replace(
        "python -m vllm.entrypoints.openai.api_server --model", "vllm serve"
    )


def test_a_real_server_is_none_of_those(server):
    assert vllm_client.not_vllm(server.url, 5.0) is None
    assert urllib.request.urlopen(f"{server.url}/health", timeout=5).status == 200
