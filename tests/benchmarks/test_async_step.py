"""`benchmarks/async_step.py`: what counts as an update, and which servers it names."""

import json
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from places import BENCHMARKS
from tiny import save_words
from transformers import AutoModelForCausalLM, AutoTokenizer


pytest.importorskip("vllm", reason="vLLM is not installed")
from servers import serving


pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture
def async_step(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import async_step

    return async_step


class Updates:
    """A trainer whose updates train on so many tokens."""

    def __init__(self, tokens: list[int]):
        self.tokens, self.callbacks = tokens, []
        self.state = SimpleNamespace(log_history=[])

    def add_callback(self, callback):
        self.callbacks.append(callback)

    def train(self):
        for number, tokens in enumerate(self.tokens):
            for callback in self.callbacks:
                callback.on_step_end(None, None, None)
            entry = {"loss": 0.0, "batch/samples_per_step": 8.0, "batch/trained_tokens_per_step": float(tokens)}
            entry |= {"perf/rollout_wait_s": 0.25 * number, "rollouts/age": 1.5, "sample/staleness_mean": 2.0}
            self.state.log_history.append(entry)
        self.state.log_history.append({"train_runtime": 1.0})


@pytest.mark.parametrize(("trainer", "age"), [("trl-async", 2.0), ("bf16", 1.5)])
def test_the_first_update_warms_up(async_step, monkeypatch, trainer, age):
    ends = iter([9.0, 10.0, 10.5])
    monkeypatch.setattr(async_step.Clock, "now", lambda clock: next(ends))
    args = SimpleNamespace(trainer=trainer, completions=[(8, 16, "equal")], steps=3)
    found = async_step.measure(args, Updates([128] * 3))
    tokens = {"tokens": [128.0] * 2, "cards": []}
    assert found == {"trainer": trainer, "seconds": [1.0, 0.5], "waited": [0.25, 0.5], "age": [age] * 2} | tokens


def test_the_cards_are_watched_after_the_first_update(async_step, monkeypatch, tmp_path):
    """An `nvidia-smi` that tells of two cards, over and over, is asked until the training ends, and then ends."""
    asked = tmp_path / "nvidia-smi"
    asked.write_text(
        f"#!/bin/sh\necho $$ $@ > {tmp_path}/asked\nwhile :; do echo 0, 97, 1234; echo 1, 0, 8; sleep 0.05; done"
    )
    asked.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(sys.modules["engines"], "CUDA", True)
    monkeypatch.setattr(async_step.Clock, "now", lambda clock: time.perf_counter())
    updates, steps = Updates([128] * 3), async_step.Ends.on_step_end
    monkeypatch.setattr(async_step.Ends, "on_step_end", lambda *given: (steps(*given), time.sleep(0.5)))
    args = SimpleNamespace(trainer="bf16", completions=[(8, 16, "equal")], steps=3)
    found = async_step.measure(args, updates)
    assert {tuple(row[1:]) for row in found["cards"]} == {(0, 97, 1234), (1, 0, 8)}
    times = [row[0] for row in found["cards"]]
    assert times == sorted(times) and times[0] >= 0 and times[-1] <= sum(found["seconds"]) + 0.01
    process, *given = (tmp_path / "asked").read_text().split()
    assert "--loop-ms=200" in given and not Path("/proc", process).exists()


@pytest.mark.parametrize(
    ("lengths", "tokens", "wrong"),
    [
        ("equal", [128, 128, 127], "8.0 samples of 127.0 tokens"),
        ("equal", [128], "1 updates, not 3"),
        ("geometric", [128, 8, 7], "8.0 samples of 7.0 tokens"),
        ("geometric", [9, 129, 9], "8.0 samples of 129.0 tokens"),
    ],
)
def test_an_update_that_lacks_tokens_is_no_update(async_step, lengths, tokens, wrong):
    args = SimpleNamespace(trainer="bf16", completions=[(8, 16, lengths)], steps=3)
    with pytest.raises(AssertionError, match=wrong):
        async_step.measure(args, Updates(tokens))


def test_lengths_that_differ(async_step):
    args = SimpleNamespace(trainer="bf16", completions=[(8, 16, "geometric")], steps=3)
    assert async_step.measure(args, Updates([128, 60, 8]))["tokens"] == [60.0, 8.0]


@pytest.mark.parametrize(("lengths", "chance"), [("equal", 0.0), ("geometric", 1 - 2 ** (-1 / 20))])
def test_how_often_a_token_ends_a_completion(async_step, tmp_path, lengths, chance):
    """On texts of the policy's own words, which it was not set by."""
    given = ["--policy", str(tmp_path / "policy"), "--tokenizer", str(save_words(tmp_path / "words.json"))]
    async_step.main([*given, "--completions", f"8x16:{lengths}", "--median", "20"])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "policy", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "policy")
    generator = torch.Generator().manual_seed(1)
    words = torch.tensor(async_step.words_of(tokenizer))
    texts = words[torch.randint(len(words), (32, 40), generator=generator)]
    with torch.no_grad():
        found = model(texts).logits.softmax(-1)[..., tokenizer.eos_token_id]
    assert abs(found.mean() - chance) <= 0.1 * chance and found.max() < 3 * chance + 1e-12


def test_the_servers_start_from_the_policy_that_was_written(async_step, tmp_path, capsys):
    words, policy = save_words(tmp_path / "words.json"), tmp_path / "policy"
    given = ["--policy", str(policy), "--tokenizer", str(words), "--trainer", "int8"]
    async_step.main([*given, "--lora", "8", "--max_staleness", "3"])
    theirs, ours = capsys.readouterr().out.split("# ours")
    assert f"api_server --model {policy} " in theirs and "--max-lora-rank 8 --max-loras 5" in theirs
    assert f"prepare --model {policy} --format int8" in ours and "--port 8001" in ours
    written = policy.stat().st_mtime_ns, (policy / "model.safetensors").stat().st_mtime_ns
    async_step.main([*given, "--lora", "0"])
    assert '{"backend": "nccl"}' in (out := capsys.readouterr().out) and "--enable-lora" not in out
    assert (policy.stat().st_mtime_ns, (policy / "model.safetensors").stat().st_mtime_ns) == written
    tokenizer = AutoTokenizer.from_pretrained(policy)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False).startswith("<|im_start|>")


@pytest.mark.long
def test_updates_on_samples_of_a_server(async_step, tmp_path, capsys):
    """Ours in BF16."""
    words, policy = save_words(tmp_path / "words.json"), tmp_path / "policy"
    async_step.main(["--policy", str(policy), "--tokenizer", str(words)])
    with serving(policy) as (url, _):
        async_step.main(["--policy", str(policy), "--trainer", "bf16", "--server", url, "--steps", "4"])
    found = json.loads(re.findall(r"\{.*\}", capsys.readouterr().out)[-1])
    assert found["trainer"] == "bf16" and len(found["seconds"]) == len(found["age"]) == 3
    assert all(0 <= waited < seconds for waited, seconds in zip(found["waited"], found["seconds"], strict=True))
    assert all(0 <= age <= 2 for age in found["age"])


def test_lengths_that_trls_worker_cannot_have_are_refused(async_step, tmp_path, capsys):
    with pytest.raises(SystemExit):
        async_step.main(["--policy", str(Path(tmp_path)), "--completions", "8x16:lognormal"])
    assert "TRL's worker has one `max_tokens`, so lengths are equal or geometric" in capsys.readouterr().err
