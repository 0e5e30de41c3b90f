"""A vLLM server stops once enough completions have ended, and goes on with the others in a later call."""

import os
import re
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from ended_early import at_least


pytest.importorskip("vllm", reason="vLLM is not installed")
import requests
from accelerate import Accelerator
from remembering import assert_goes_on, in_flight, returned
from servers import serving, trainer_of
from tiny import save_tiny, tiny_tokenizer
from training import Killed, killing, metrics
from transformers import AutoModelForCausalLM
from vllm_sampling import PROMPTS

from trl_quant.rollout import VLLMServerEngine
from trl_quant.rollout.engine import Request, requests_for
from trl_quant.rollout.vllm import separate
from trl_quant.rollout.vllm.client import Client


pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.long]
MOST = 250  # tokens of a completion, for which the server takes seconds
COMPARED = 30  # tokens
VARIED = {"stop_token_ids": list(range(0, 250, 50)), "seed": 3}  # many lengths; a seed makes samples repeatable
GREEDY = {"temperature": 0.0, "ignore_eos": True}
SOON = Request(PROMPTS[-1], sampled=[5] * (MOST - 1))  # ends with its next token


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    model = str(save_tiny(tmp_path_factory.mktemp("early") / "model", dtype=torch.bfloat16))
    with serving(model) as (url, pid):
        yield SimpleNamespace(model=model, url=url, pid=pid)


@pytest.fixture
def engine(server, monkeypatch) -> VLLMServerEngine:
    policy = AutoModelForCausalLM.from_pretrained(server.model, dtype=torch.bfloat16)
    settings = {"mode": "server", "server_base_url": server.url, "max_completion_length": MOST}
    checks = {"sync_check_steps": 0, "request_timeout": 60.0}
    built = VLLMServerEngine(policy, Accelerator(cpu=True), tiny_tokenizer(), precision="bf16", **settings, **checks)
    built.sync()
    return built


def drawn(engine, given, enough=None, **options):
    engine.settings = replace(engine.settings, generation_kwargs=options)
    return engine.draw(given, enough=enough)


def left_on(server) -> float:
    """Number of requests that the server has. It counts them after a step of the model, so it is asked for one."""
    request = {"model": server.model, "prompt": [[1, 2]], "max_tokens": 1}
    requests.post(f"{server.url}/v1/completions", json=request, timeout=10).raise_for_status()
    time.sleep(0.1)
    return counted(server, "num_requests_(?:running|waiting)")


def counted(server, name: str) -> float:
    """The sum of the server's metrics of this name."""
    text = requests.get(f"{server.url}/metrics", timeout=10).text
    return sum(map(float, re.findall(rf"^vllm:{name}\{{.*\}} (.*)$", text, re.MULTILINE)))


def agree(samples, whole, starts=None) -> None:
    """
    Each completion is a part of the whole one, as far as it is compared. Other batches may round otherwise, so that
    another of two tokens that are nearly as likely is sampled; then the rest is another.
    """
    starts, same = starts or [0] * len(samples.token_ids), []
    rows = zip(starts, samples.token_ids, samples.logps, whole.token_ids, whole.logps, strict=True)
    for start, ids, logps, all_ids, all_logps in rows:
        assert len(ids) == len(logps)
        count = min(len(ids), COMPARED)
        end = start + count
        same.append(ids[:count] == all_ids[start:end])
        if same[-1]:
            found, expected = torch.tensor(logps[:count]), torch.tensor(all_logps[start:end])
            torch.testing.assert_close(found, expected, rtol=0, atol=0.05)
    assert sum(same) > len(same) / 2


def test_unfinished_completions_have_their_first_tokens(server, engine):
    given = requests_for(PROMPTS, copies=4)
    whole = drawn(engine, given, **VARIED)
    assert whole.ended is None and len(set(map(tuple, whole.token_ids))) == len(PROMPTS)
    early = drawn(engine, given, at_least(3), **VARIED)
    assert 3 <= sum(early.ended) < len(PROMPTS) and max(map(len, early.token_ids)) > 5
    agree(early, whole)
    assert left_on(server) == 0
    never = drawn(engine, given, lambda ended: False, **VARIED)
    assert never.ended is None
    for samples in (never, drawn(engine, given, **VARIED)):  # a plain call after all of that
        agree(samples, whole)


def test_a_later_call_goes_on(engine):
    """Sampling is greedy, so the rest is known. The limit counts the tokens of both calls."""
    whole = drawn(engine, requests_for(PROMPTS), **GREEDY)
    first = Request(PROMPTS[-1], sampled=[5] * (MOST - COMPARED))
    early = drawn(engine, [first, *requests_for(PROMPTS)], at_least(1), **GREEDY)
    parts = early.token_ids[1:]
    assert early.ended == [True] + [False] * len(PROMPTS) and len(early.token_ids[0]) == COMPARED
    assert max(map(len, parts)) > COMPARED / 2 and max(map(len, parts)) < MOST
    rest = drawn(engine, [Request(prompt, sampled=ids) for prompt, ids in zip(PROMPTS, parts)], **GREEDY)
    assert rest.ended is None
    assert [len(first) + len(second) for first, second in zip(parts, rest.token_ids)] == [MOST] * len(PROMPTS)
    agree(rest, whole, [*map(len, parts)])


def test_completions_that_have_not_begun(engine, monkeypatch):
    """Some wait in the server when enough have ended, and others have not been sent."""
    early = drawn(engine, [SOON, *requests_for(PROMPTS)], at_least(1), **GREEDY)
    assert [] in early.token_ids and early.ended == [True] + [False] * len(PROMPTS)
    sent, generate = [], Client.generate_unguarded
    monkeypatch.setattr(Client, "generate_unguarded", lambda *a, **k: sent.append(k["prompts"]) or generate(*a, **k))
    monkeypatch.setattr(separate, "REQUESTS_AT_ONCE", 2)
    early = drawn(engine, [SOON, *requests_for(PROMPTS)], at_least(1), **GREEDY)
    assert len(sent) <= 3 and early.token_ids[3:] == [[]] * (len(PROMPTS) - 2) and early.ended.count(True) == 1


def test_a_request_that_arrives_late_is_ended(server, engine, monkeypatch):
    """When the others are ended, the server does not know it yet."""
    named, is_late = Client.named, threading.Event()

    def later(self, name, adapter, is_ending):
        if not is_late.is_set():
            is_late.set()
            is_ending.wait(10)
            time.sleep(0.2)
        return named(self, name, adapter, is_ending)

    monkeypatch.setattr(Client, "named", later)
    monkeypatch.setattr(separate, "ROUND", 0.02)
    early = drawn(engine, [Request(PROMPTS[0]), SOON], at_least(1), **GREEDY)
    assert is_late.is_set() and early.ended == [False, True] and len(early.token_ids[0]) < MOST
    assert left_on(server) == 0


def test_other_clients_go_on(server, engine):
    request = {"model": engine.vllm_client.model, "prompt": [[1, 2]], "max_tokens": 400, "ignore_eos": True}
    with ThreadPoolExecutor() as others:
        asked = others.submit(requests.post, f"{server.url}/v1/completions", json=request, timeout=60)
        time.sleep(0.1)
        early = drawn(engine, [SOON, Request(PROMPTS[0])], at_least(1), **GREEDY)
        assert early.ended == [True, False] and not asked.done()
        (choice,) = asked.result().json()["choices"]
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_an_error_leaves_nothing_on_the_server(server, engine, error):
    def enough(ended):
        raise error

    short = GREEDY | {"max_tokens": COMPARED}
    before, tokens = drawn(engine, requests_for(PROMPTS[:1]), **short), counted(server, "generation_tokens_total")
    with pytest.raises(error):
        drawn(engine, [SOON, *requests_for(PROMPTS)], enough, **GREEDY)
    assert left_on(server) == 0
    assert counted(server, "generation_tokens_total") - tokens < len(PROMPTS) * MOST / 2
    agree(drawn(engine, requests_for(PROMPTS[:1]), **short), before)


def test_an_end_that_nobody_asked_for_is_an_error(server, engine):
    def enough(ended):
        requests.post(f"{server.url}/abort_requests", json={}, timeout=10).raise_for_status()
        return False

    with pytest.raises(RuntimeError, match=r"not whole \(finish_reason 'abort'\)"):
        drawn(engine, [SOON, *requests_for(PROMPTS)], enough, **GREEDY)
    assert left_on(server) == 0


def test_the_weights_are_asked_for_once(engine, monkeypatch):
    asked, ask = [], Client.ask_workers
    monkeypatch.setattr(Client, "ask_workers", lambda self, method, **k: asked.append(method) or ask(self, method, **k))
    drawn(engine, [SOON, *requests_for(PROMPTS)], at_least(1), **GREEDY)
    assert asked == ["get_sync_token"]
    asked.clear()

    def another_run_syncs(ended):
        ask(engine.vllm_client, "set_sync_token", token="of another run")
        return True

    with pytest.raises(RuntimeError, match="or another run has sent it weights"):
        drawn(engine, [SOON, *requests_for(PROMPTS)], another_run_syncs, **GREEDY)
    assert asked == ["get_sync_token"]


def test_a_server_that_stops_ends_the_call_in_time(server, engine, monkeypatch):
    monkeypatch.setattr(separate, "LAST_WAIT", 0.5)
    engine.vllm_client.seconds = 1.0

    def stops(ended):
        os.killpg(server.pid, signal.SIGSTOP)
        return False

    start = time.monotonic()
    try:
        with pytest.raises(TimeoutError, match=r"did not answer `POST /v1/completions` within .*=1 seconds"):
            drawn(engine, [SOON, *requests_for(PROMPTS)], stops, **GREEDY)
        assert time.monotonic() - start < 10
        assert len([thread for thread in threading.enumerate() if thread.name.startswith("completions")]) < 20
    finally:
        os.killpg(server.pid, signal.SIGCONT)
    engine.vllm_client.seconds = 60.0
    assert len(drawn(engine, [SOON], **GREEDY).token_ids[0]) == 1


def test_the_end_of_no_request_is_not_asked_for():
    """vLLM takes an empty list for all requests."""
    Client.end(None, [])


def test_a_run_with_rollouts_in_flight(tmp_path, server, monkeypatch):
    """Groups go on in the next generation; each prompt is sampled once, and the server keeps nothing of them."""
    seen = []

    def reward(prompts, completion_ids, **kwargs):
        seen.extend(zip(prompts, map(tuple, completion_ids), strict=True))
        return [float(sum(ids) % 5) for ids in completion_ids]

    settings = {"rollouts_in_flight": 2.0, "num_generations": 2, "per_device_train_batch_size": 4, "max_steps": 4}
    settings |= {"max_completion_length": 40, "generation_kwargs": {"stop_token_ids": list(range(0, 250, 13))}}
    settings |= {"sync_check_steps": 0, "reward_funcs": reward}
    trainer = trainer_of(tmp_path, server.url, server.model, "bf16", **settings)
    trainer.train()
    logs = [log for log in metrics(trainer) if "loss" in log]
    assert len(logs) == 4 and sum(log["rollouts/carried"] for log in logs) > 0 and not trainer.pool.groups
    assert len({prompt for prompt, _ in seen}) == 8 and len(seen) == 16
    young = [log["mismatch/by_age/0"] for log in logs if "mismatch/by_age/0" in log]
    assert young and max(young) < 1e-3


def test_a_killed_run_goes_on_with_its_tokens(tmp_path, server, monkeypatch):
    """What was in flight keeps its tokens and versions, and each prompt is sampled once. New samples may differ."""
    settings = {"rollouts_in_flight": 3.0, "num_generations": 2, "per_device_train_batch_size": 4, "max_steps": 4}
    settings |= {"max_completion_length": 40, "generation_kwargs": {"stop_token_ids": list(range(0, 250, 13))}}
    settings |= {"sync_check_steps": 0, "save_strategy": "steps", "save_steps": 1}

    def built(kill_at=None):
        trainer = trainer_of(tmp_path, server.url, server.model, "bf16", reward_funcs=killing(kill_at), **settings)
        return trainer, returned(trainer)

    broken, before = built(kill_at=3)
    with pytest.raises(Killed):
        broken.train()
    resumed, after = built()
    resumed.train(resume_from_checkpoint=True)
    assert_goes_on(in_flight(tmp_path / "out" / "checkpoint-2"), after)
    order = [resumed.train_dataset[resumed.pool.order[place]]["prompt"] for place in range(8)]
    expected = Counter(dict.fromkeys(map(tuple, resumed._tokenize_prompts(order)[0]), 2))
    assert Counter(tuple(prompt) for prompt, *_ in before + after) == expected
    assert len([log for log in metrics(resumed) if "loss" in log]) == 4 and not resumed.pool.groups
