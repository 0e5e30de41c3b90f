"""
A quantized vLLM server beside an asynchronous training: what it samples from after syncs under load, and its faults.

Weights travel in files, as in test_vllm_server.py.
"""

import copy
import os
import shutil
import signal
import time
from contextlib import ExitStack
from itertools import pairwise
from urllib.parse import urlsplit

import pytest
import torch


pytest.importorskip("vllm", reason="vLLM is not installed")
from asynchronous import asynchronous, logps_of, noted
from ranks import on_two_ranks, results
from servers import WIDE, serving
from tiny import save_tiny
from training import lora
from transformers import AutoModelForCausalLM, TrainerCallback
from turns import calling_tokenizer, conversations, note, spread_of_messages
from urllib3.util.retry import Retry
from vllm_engines import fresh, one_by_one, served

from trl_quant.rollout.vllm import (
    kernel_checks,
    loading,  # noqa: F401, registers a loader
)
from trl_quant.rollout.vllm.client import Client
from trl_quant.storage.layout import quantize_checkpoint


pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.long]


class Server:
    """A real one, which can be killed and started again at its address."""

    def __init__(self, model):
        self.model, self.running = model, ExitStack()
        self.prepared = str(quantize_checkpoint(model, f"{model}-int8", "int8"))
        self.start()

    def start(self, port: int = 0) -> None:
        self.url, self.group = self.running.enter_context(serving(self.prepared, *WIDE[:2], port=port))

    def send(self, number: int) -> None:
        os.killpg(self.group, number)

    def restart(self) -> None:
        self.running.close()
        for _ in range(50):
            try:
                return self.start(urlsplit(self.url).port)
            except OSError:  # the port is not free yet
                time.sleep(0.2)
        raise TimeoutError(self.url)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """For all tests, in their order: the last one kills it."""
    server = Server(save_tiny(tmp_path_factory.mktemp("beside") / "model", dtype=torch.bfloat16))
    yield server
    server.running.close()


def beside(server, path, **settings):
    given = {"use_vllm": True, "vllm_server_base_url": server.url, "token_budget": 0, "dtype": "bfloat16"}
    return asynchronous(path, model=server.model, **given | settings)


def test_a_server_in_another_precision_is_refused_with_the_command(tmp_path, server):
    with pytest.raises(ValueError, match="the precision 'int8', and `rollout_precision`='bf16'") as refused:
        beside(server, tmp_path, rollout_precision="bf16")
    assert "VLLM_SERVER_DEV_MODE=1 " in str(refused.value)


def compared(trainer, path) -> list[tuple]:
    """After each sync, what the server samples, and what an engine does that starts on the policy's weights."""
    engine, found = trainer.sampling_thread.engine, []
    sync = engine.sync

    def synced():
        sync()
        own = fresh(trainer.model, "int8", path / f"fresh-{len(found)}", load_format="trl_quant")
        found.append((served(engine.vllm_client), one_by_one(own)))

    engine.sync = synced
    return found


@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_live_equals_fresh_after_each_sync_under_load(tmp_path, server, tuning):
    """
    Ten updates, whose syncs end what is being sampled: tokens of several versions in one completion. Every fifth sync
    is followed by the self-check. An adapter is merged, which a few updates show.
    """
    settings = {"max_completion_length": 60, "max_steps": 10, "learning_rate": 1e-3, "max_staleness": 4}
    if tuning == "lora":
        settings |= {"max_steps": 3, "learning_rate": 1e-2, "peft_config": lora()}
    trainer, steps = beside(server, tmp_path, sync_check_steps=5, **settings), settings["max_steps"]
    (products,) = fresh(trainer.model, "int8", tmp_path / "before").apply_model(kernel_checks.int8_errors)
    trainer.sampling_thread.engine.product_errors = products  # of this CPU; a server cannot be asked for them
    samples, syncs = noted(trainer.sampling_thread.rollout_buffer), compared(trainer, tmp_path)
    trainer.train()
    assert len(syncs) == trainer.model_version == steps + 1
    assert [number for number, (live, own) in enumerate(syncs) if live != own] == []
    assert all(live != later for (live, _), (later, _) in pairwise(syncs))
    mixed = [sample for sample in samples if len(set(sample.versions[sample.completion_mask > 0])) > 1]
    history = [entry for entry in trainer.state.log_history if "rollouts/age" in entry]
    assert len(history) == steps and max(entry["rollouts/age_max"] for entry in history) <= 4 and mixed
    checked = [entry for entry in trainer.state.log_history if "sync_check/bound" in entry]
    assert checked and all(entry["sync_check/logp_difference"] < entry["sync_check/bound"] for entry in checked)


def test_a_row_is_as_long_as_the_servers_by_default(tmp_path, server):
    """512 tokens, or so many that are trained. The next sample would not have fitted."""
    trainer = beside(server, tmp_path, token_budget=None, max_completion_length=60, sync_check_steps=0, max_steps=2)
    samples, rows, loss = noted(trainer.sampling_thread.rollout_buffer), [], trainer.compute_loss

    def noting(model, inputs, **given):
        rows.append((int(inputs["attention_mask"].sum()), int((inputs["token_index"] >= 0).sum())))
        return loss(model, inputs, **given)

    trainer.compute_loss = noting
    trainer.train()
    longest = max(len(sample.input_ids) for sample in samples)
    assert len(rows) == 2 and all(512 - longest < max(row) <= 512 for row in rows), (rows, longest)


@pytest.mark.parametrize("launch", ["ddp", "fsdp2"])
def test_live_equals_fresh_where_the_first_of_two_ranks_samples(tmp_path, server, monkeypatch, launch):
    """
    All ranks take part in a sync, and the first one's thread asks the server meanwhile. Under FSDP2 they gather the
    weights tensor by tensor, and the first one sends them.
    """
    monkeypatch.setenv("SERVER", server.url)
    (tmp_path / "model").symlink_to(server.model)
    case = "async-server-full"
    left, right = results(tmp_path, case, on_two_ranks(launch, tmp_path, case))
    assert (left["samples"], right["samples"]) == (True, False) and left["weights"] == right["weights"]
    assert left["weights"] != left["start"] and len(left["log"]) == 4
    assert left["sharded"] == right["sharded"] == (launch == "fsdp2")
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / case / "trained", dtype="auto")
    client = beside(server, tmp_path, rollout_precision="int8", sync_check_steps=0).sampling_thread.engine.vllm_client
    assert served(client) == one_by_one(fresh(trained, "int8", tmp_path / "fresh", load_format="trl_quant"))


def test_turns_from_a_server(tmp_path, server):
    """Both turns have the log-probabilities of weights that do not move, behind what was said before."""
    settings = {"tools": [note], "data": conversations(8), "processing_class": calling_tokenizer()}
    settings |= {"max_completion_length": 200, "max_tool_calling_iterations": 1, "fork_threshold_tokens": 1}
    settings |= {"rewards": spread_of_messages, "learning_rate": 0.0, "sync_check_steps": 0, "max_steps": 2}
    trainer = beside(server, tmp_path, rollout_precision="int8", **settings)
    trainer.model.generation_config.eos_token_id = [257, *range(94, 200)]  # short turns
    samples = noted(trainer.sampling_thread.rollout_buffer)
    trainer.train()
    second = [sample for sample in samples if "tool\nok" in trainer.processing_class.decode(sample.input_ids)]
    assert len(samples) >= 16 and len(second) == len(samples) / 2
    cut = copy.deepcopy(second)
    for sample in cut:  # what was said before the turn is missing
        own = slice(int(sample.completion_mask.argmax()) - 1, None)
        sample.input_ids, sample.completion_mask = sample.input_ids[own], sample.completion_mask[own]
        sample.old_log_probs = sample.old_log_probs[own]

    def apart(rows) -> float:
        with torch.no_grad():
            scored = torch.cat(logps_of(trainer, rows))
        drawn = torch.cat([torch.tensor(row.old_log_probs[row.completion_mask > 0]) for row in rows])
        return (scored - drawn).abs().mean().item()

    assert max(apart(samples), apart(second)) < 0.3 < 0.9 < apart(cut), (apart(samples), apart(second), apart(cut))


class After(TrainerCallback):
    def __init__(self, step, call):
        self.step, self.call = step, call

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.call()


SAVING = {"save_strategy": "steps", "save_steps": 1, "learning_rate": 0.02, "sync_check_steps": 0}


def assert_resumes(server, path) -> None:
    """A run that failed after its second step goes on from there, and samples from its own weights."""
    resumed = beside(server, path, max_steps=4, **SAVING)
    syncs = compared(resumed, path)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 4 and resumed.model_version == 6  # three were synced before
    assert len(syncs) == 3 and all(live == own for live, own in syncs)
    logs = [entry for entry in resumed.state.log_history if "rollouts/age" in entry]
    assert [entry["step"] for entry in logs] == [1, 2, 3, 4]
    assert all(abs(entry["mismatch/by_age/0"]) < 0.1 for entry in logs[2:] if "mismatch/by_age/0" in entry)


def test_a_server_that_hangs_is_named_and_the_run_resumes(tmp_path, server):
    trainer = beside(server, tmp_path, max_steps=100, **SAVING)

    def stop():
        # `vllm_request_timeout`; the first requests took longer
        trainer.sampling_thread.engine.vllm_client.seconds = 3.0
        server.send(signal.SIGSTOP)

    trainer.add_callback(After(2, stop))
    try:
        with pytest.raises((RuntimeError, ConnectionError), match="did not answer"):
            trainer.train()
    finally:
        server.send(signal.SIGCONT)
    assert 2 <= trainer.state.global_step < 100
    for number in range(3, trainer.state.global_step + 1):  # of samples that were there
        shutil.rmtree(tmp_path / f"checkpoint-{number}", ignore_errors=True)
    assert_resumes(server, tmp_path)


def test_a_server_that_started_again_is_not_sampled_from_and_the_run_resumes(tmp_path, server, monkeypatch):
    """It has its checkpoint's weights when the third sync has ended."""
    trainer, mark, marked = beside(server, tmp_path, max_steps=100, **SAVING), Client.mark_sync, []
    samples = noted(trainer.sampling_thread.rollout_buffer)

    def mark_and_restart(client):
        mark(client)
        marked.append(client)
        if len(marked) == 3:
            server.restart()
            marked.append(len(samples))

    monkeypatch.setattr(Client, "mark_sync", mark_and_restart)
    with pytest.raises(RuntimeError, match="no longer holds the weights of this run's last sync: it was restarted"):
        trainer.train()
    assert 2 <= trainer.state.global_step < 100 and len(samples) == marked[3]  # nothing of it was put on the queue
    monkeypatch.undo()
    for number in range(3, trainer.state.global_step + 1):
        shutil.rmtree(tmp_path / f"checkpoint-{number}", ignore_errors=True)
    assert_resumes(server, tmp_path)


def test_a_server_that_dies_is_named(tmp_path, server, monkeypatch):
    monkeypatch.setattr(Retry, "get_backoff_time", lambda self: 0.0)  # TRL asks again, for two minutes in all
    trainer = beside(server, tmp_path, sync_check_steps=0, max_completion_length=60, max_steps=100)
    trainer.add_callback(After(2, lambda: server.send(signal.SIGKILL)))
    began = time.monotonic()
    with pytest.raises((RuntimeError, ConnectionError), match=f"The vLLM server at {server.url} "):
        trainer.train()
    assert trainer.state.global_step < 100 and time.monotonic() - began < 300
