"""
Tools and environments beside an asynchronous training.

An engine whose texts are chosen stands in for a policy that calls tools: it scores them with its own copy. What comes
out is compared with the tokens of a conversation written by hand, with the policy's own forward pass at each version,
and with TRL's worker on the same turns.
"""

import asyncio
import copy
import json
import queue
import re
import threading
import time

import numpy as np
import pytest
import torch
from asynchronous import asynchronous, gradient_of_batch, logps_of, noted
from datasets import Dataset
from tiny import tiny_tokenizer
from trl.experimental.async_grpo.async_rollout_worker import _AsyncRolloutLoop
from turns import calling_tokenizer, conversations, note

from trl_quant.rollout.engine import Samples


END, OPEN, ASKS = (
    "<|im_end|>",
    "<|im_start|>assistant\n",
    "<|im_start|>user\nHow much?<|im_end|>\n<|im_start|>assistant\n",
)
CALL, ANSWER = 'add({"a": 1, "b": 2})', "It is 3."
# A call stands in a message as the model writes it. Thoughts are shown in the last message alone, if at all
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['tool_calls'] %}{% for call in message['tool_calls'] %}{{ call['function']['name'] }}"
    "({{ call['function']['arguments'] | tojson }}){% endfor %}{% endif %}"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FAST = {"per_device_train_batch_size": 4, "max_inflight_tasks": 4, "max_completion_length": 400, "max_staleness": 9}
FAST |= {"rollout_precision": "bf16"}
LIMIT = 30.0  # seconds for what must happen


def add(a: int, b: int) -> int:
    """
    Adds two numbers.

    Args:
        a: The first one.
        b: The second one.
    """
    return a + b


def reading_tokenizer():
    """A tokenizer that reads `name(arguments)`, also several of them, after a thought in parentheses, as calls."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template, tokenizer.response_schema = TEMPLATE, {}

    def parse_response(ids, **given):
        text = re.sub(r"^\(.*\) ", "", tokenizer.decode(ids, skip_special_tokens=True))
        found = re.findall(r"(\w+)\((\{.*?\})\)", text)
        calls = [{"type": "function", "function": {"name": n, "arguments": json.loads(a)}} for n, a in found]
        message = {"role": "assistant", "content": "" if calls else text}
        return message | ({"tool_calls": calls} if calls else {})

    tokenizer.parse_response = parse_response
    return tokenizer


def by_index(completions, **columns) -> list[float]:
    return [float(i) for i in range(len(completions))]


def asking(n: int = 8, **columns) -> Dataset:
    return Dataset.from_dict({"prompt": [[{"role": "user", "content": "How much?"}]] * n} | columns)


def speaking(path, rewards=by_index, **given):
    """A trainer whose completions have turns."""
    options = {"data": asking(), "processing_class": reading_tokenizer()} | given
    return asynchronous(path, rewards=rewards, **FAST | options)


class Chosen:
    """
    Replaces what an engine draws: `reply` maps the number of turns so far, from 0, to the text of the next.

    Attributes:
        holds (`int`): The number of the draw that goes on, after two tokens, until it must end; from 0.
        held (`threading.Event`): Set while it does.
        requests (`list`): All requests.
    """

    def __init__(self, trainer, reply, holds=-1):
        self.engine, self.reply, self.holds = trainer.sampling_thread.engine, reply, holds
        self.held, self.draws, self.requests = threading.Event(), 0, []
        self.engine.sample = self.sample

    def sample(self, requests, enough=None):
        tokenizer, rows = self.engine.tokenizer, []
        for request in requests:
            before, _, part = tokenizer.decode(request.given).rpartition(OPEN)
            rest = (self.reply(before.count(OPEN)) + END)[len(part) :]
            rows.append(tokenizer(rest)["input_ids"][: self.most - len(request.sampled)])
        ended = [True] * len(rows)
        if self.draws == self.holds:
            rows, ended = [row[:2] for row in rows], [False] * len(rows)
            self.held.set()
            while not enough(ended):
                time.sleep(0.001)
        self.draws += 1
        self.requests += requests
        scored = self.engine.score([[*request.given, *row] for request, row in zip(requests, rows, strict=True)])
        return Samples(rows, [logps[-len(row) :] for logps, row in zip(scored, rows, strict=True)], ended)

    @property
    def most(self) -> int:
        return self.engine.settings.most_tokens


def begun(trainer) -> dict[int, dict]:
    """Starts the thread, and returns the weights of its version."""
    trainer.state.max_steps = 1
    trainer.model.train()
    trainer._sync_weight()
    trainer.sampling_thread.start()
    return {1: copy.deepcopy(trainer.model.state_dict())}


def moved(trainer, weights) -> None:
    """Syncs other weights, and adds them to `weights`."""
    for param in trainer.model.parameters():
        param.data.add_(0.05 * torch.randn_like(param))
    trainer._sync_weight()
    weights[trainer.model_version] = copy.deepcopy(trainer.model.state_dict())


def taken(trainer, count: int = 4) -> list:
    """The first samples of the thread, which ends."""
    found, thread = [], trainer.sampling_thread
    while len(found) < count:
        try:
            found.append(thread.rollout_buffer.get(timeout=0.1))
        except queue.Empty:
            thread.check_health(60)
    thread.stop()
    return found


def logged(trainer) -> dict[str, list]:
    found = {}
    while not trainer.sampling_thread.metrics_queue.empty():
        for name, value in trainer.sampling_thread.metrics_queue.get().items():
            found.setdefault(name, []).append(value)
    return found


def by_hand(*pieces: tuple[str, int]) -> tuple[list[int], list[int]]:
    """The tokens of pieces of text, and of each token the number that stands beside its piece."""
    tokenizer = tiny_tokenizer()
    ids = [(token, number) for text, number in pieces for token in tokenizer(text)["input_ids"]]
    return [token for token, _ in ids], [number for _, number in ids]


def trls(tokenizer, replies: list[str], **given):
    """The rows that TRL's own worker makes of a conversation with the tool [`add`], and its messages."""
    turns = iter(replies)

    class Replayed(_AsyncRolloutLoop):
        async def _generate_one_turn(self, prompt_ids):
            ids = tokenizer(next(turns) + END)["input_ids"]
            return ids, [-1.0] * len(ids)

    unused = ("rollout_buffer", "model_version_value", "heartbeat_value", "failed_event", "exception_info_queue")
    given |= dict.fromkeys(unused) | {"model_name": "", "dataset": [], "reward_funcs": [by_index], "tools": [add]}
    loop = Replayed(processing_class=tokenizer, eos_token_ids=[257], metrics_queue=queue.Queue(), **given)
    prompt = asking(1)[0]["prompt"]
    completion, _, rows, *_ = asyncio.run(loop._generate_one(prompt, tool_dict={"add": add}, tools=[add]))
    loop._loop.close()
    return rows, completion


def same_rows(samples, rows) -> bool:
    pairs = list(zip(samples, rows, strict=True))
    return all(
        sample.input_ids.tolist() == row.input_ids and sample.completion_mask.tolist() == row.completion_mask
        for sample, row in pairs
    )


# Tokens, masks, versions, log-probabilities


def test_each_token_of_two_turns_knows_its_version(tmp_path):
    """A sync while the tool runs, for which it does not wait, and one in the middle of the second turn."""
    is_called, may_return = threading.Event(), threading.Event()

    def slow(a: int, b: int) -> int:
        is_called.set()
        assert may_return.wait(LIMIT)
        return a + b

    slow.__name__, slow.__doc__ = "add", add.__doc__
    trainer = speaking(tmp_path, tools=[slow])
    chosen = Chosen(trainer, lambda turns: (CALL, ANSWER)[turns], holds=1)
    weights = begun(trainer)
    assert is_called.wait(LIMIT)
    moved(trainer, weights)
    may_return.set()
    assert chosen.held.wait(LIMIT)
    moved(trainer, weights)
    samples = taken(trainer)

    result = f"\n<|im_start|>tool\n3{END}\n{OPEN}"
    ids, versions = by_hand((ASKS, 0), (CALL + END, 1), (result, 0), (ANSWER[:2], 2), (ANSWER[2:] + END, 3))
    for sample in samples:
        assert sample.input_ids.tolist() == ids and sample.versions.tolist() == versions
        assert sample.completion_mask.tolist() == [int(version > 0) for version in versions]
        assert not sample.old_log_probs[np.array(versions) == 0].any() and sample.model_version == 1
    assert len(samples) == 4 and len({sample.group_id for sample in samples}) == 1
    rows, completion = trls(trainer.processing_class, [CALL, ANSWER])
    assert same_rows(samples[:1], rows) and samples[0].completion == completion
    assert [message["role"] for message in completion] == ["assistant", "tool", "assistant"]

    trained = np.array(versions) > 0
    of_trained, found = np.array(versions)[trained], samples[0].old_log_probs[trained]
    apart = {}
    for version, state in weights.items():
        trainer.model.load_state_dict(state)
        with torch.no_grad():
            apart[version] = np.abs(logps_of(trainer.model.eval() and trainer, samples[:1])[0].numpy() - found)
    for version, differences in apart.items():
        assert differences[of_trained == version].max() < 0.05  # the copy's weights are rounded to BF16
        assert np.median(differences[of_trained != version]) > 0.2
    metrics = logged(trainer)
    assert sum(metrics["tools/add/call_total"]) == 4 and metrics["rollout/turns_max"] == [2.0] * 4
    assert samples[0].metrics["tools/call_frequency"] == 1 and samples[0].metrics["tools/failure_frequency"] == 0


THOUGHT = "(Let me see.) "


@pytest.mark.parametrize("threshold", [1, 1000])
def test_a_template_that_changes_what_was_said(tmp_path, threshold):
    """Thoughts are not shown again: the first turn is a row of its own, or loses what the template changed."""
    trainer = speaking(tmp_path, tools=[add], fork_threshold_tokens=threshold)
    Chosen(trainer, lambda turns: (THOUGHT + CALL, ANSWER)[turns])
    begun(trainer)
    samples = taken(trainer, 8 if threshold == 1 else 4)

    shown, result = CALL + END, f"\n<|im_start|>tool\n3{END}\n{OPEN}"
    if threshold == 1:
        expected = [
            by_hand((ASKS, 0), (THOUGHT + CALL + END, 1)),
            by_hand((ASKS + shown + result, 0), (ANSWER + END, 1)),
        ]
    else:  # "(" begins the thought, and "a" the call
        expected = [by_hand((ASKS + shown + result, 0), (ANSWER + END, 1))]
    first = samples[: len(expected)]
    assert [(s.input_ids.tolist(), s.completion_mask.tolist()) for s in first] == expected
    assert [sample.versions.tolist() for sample in first] == [mask for _, mask in expected]
    assert len({(sample.advantage, sample.group_id) for sample in first}) == 1
    rows, _ = trls(trainer.processing_class, [THOUGHT + CALL, ANSWER], fork_threshold_tokens=threshold)
    assert same_rows(first, rows)


def test_tokens_of_tools_have_no_gradient(tmp_path):
    trainer = speaking(tmp_path, tools=[add])
    Chosen(trainer, lambda turns: (CALL, ANSWER)[turns])
    begun(trainer)
    samples = taken(trainer)
    for sample, advantage in zip(samples, (1.0, -0.5, 2.0, 0.25), strict=True):
        sample.advantage = advantage

    def found(mask=None):
        settings = {"is_correction": "none", "per_device_train_batch_size": 4, "model": trainer.model.name_or_path}
        learner = asynchronous(tmp_path, copies(samples, mask), **settings)
        learner.model_version = 1
        batch = next(iter(learner.get_train_dataloader()))
        return learner, gradient_of_batch(learner, batch)

    learner, gradient = found()
    logps = logps_of(learner, samples)
    tokens = sum(len(row) for row in logps)
    loss = -sum(sample.advantage * row.sum() for sample, row in zip(samples, logps, strict=True)) / tokens
    learner.model.zero_grad()
    loss.backward()
    grads = [param.grad.flatten() for param in learner.model.parameters() if param.grad is not None]
    expected = torch.cat(grads).double()
    assert (gradient - expected).norm() < 1e-4 * expected.norm()
    after_prompt = [int(i >= len(samples[0].completion_mask) - 70) for i in range(len(samples[0].completion_mask))]
    _, without_mask = found(after_prompt)
    assert (without_mask - expected).norm() > 0.1 * expected.norm()


def copies(samples, mask=None) -> list:
    found = copy.deepcopy(samples)
    for sample in found:
        if mask is not None:
            sample.completion_mask = np.maximum(sample.completion_mask, mask)
    return found


# Limits


def test_the_turns_share_a_length(tmp_path):
    """All tokens after the prompt count. A conversation without room for a turn ends with the call."""
    length = len(by_hand((CALL + END, 1))[0])
    result = len(by_hand((f"\n<|im_start|>tool\n3{END}\n{OPEN}", 0))[0])
    for room, replies in ((5, 2), (0, 1)):
        trainer = speaking(tmp_path, tools=[add], max_completion_length=length + result + room)
        Chosen(trainer, lambda turns: (CALL, ANSWER)[turns])
        begun(trainer)
        (sample, *_) = taken(trainer)
        assert int(sample.completion_mask.sum()) == length + room
        assert len(sample.input_ids) == len(by_hand((ASKS, 0))[0]) + length + (result + room) * (replies - 1)
        roles = [message["role"] for message in sample.completion]
        assert roles == ["assistant", "tool", "assistant"][: 2 * replies - 1]
        if room:
            assert sample.completion[-1]["content"] == ANSWER[:room]


def test_the_calls_have_a_limit(tmp_path):
    trainer = speaking(tmp_path, tools=[add], max_tool_calling_iterations=2)
    Chosen(trainer, lambda turns: CALL)
    begun(trainer)
    (sample, *_) = taken(trainer)
    assert [message["role"] for message in sample.completion] == ["assistant", "tool"] * 2 + ["assistant"]
    assert sample.metrics["tools/call_frequency"] == 2
    assert {cut / ended for cut, ended in logged(trainer)["tools/loop_exhausted_frac"]} == {1}


# Tools that fail


def broken() -> int:
    """Breaks."""
    raise KeyError("nothing there")


def hangs() -> int:
    """Hangs."""
    time.sleep(60)


async def later(a: int, b: int) -> int:
    await asyncio.sleep(0)
    return a + b


later.__doc__ = add.__doc__


async def never() -> int:
    """Never answers."""
    await asyncio.Event().wait()


def test_the_model_reads_the_errors_of_tools(tmp_path):
    """Of one that raises, ones that never return, and one that is not there. Others answer meanwhile."""
    calls = 'broken({}) hangs({}) never({}) missing({}) later({"a": 1, "b": 2})'
    trainer = speaking(tmp_path, tools=[broken, hangs, never, later], reward_timeout=0.3)
    Chosen(trainer, lambda turns: (calls, ANSWER)[turns])
    begun(trainer)
    (sample, *_) = taken(trainer)
    told = [message["content"] for message in sample.completion if message["role"] == "tool"]
    assert "nothing there" in told[0] and "unknown tool missing" in told[3] and told[4] == "3"
    for name, says in zip(("hangs", "never"), told[1:3], strict=True):
        assert f"The tool '{name}' did not return within `reward_timeout`=0.3 seconds" in says
    assert sample.metrics["tools/call_frequency"] == 5 and sample.metrics["tools/failure_frequency"] == 0.8


def unawaited() -> int:
    """Returns what nobody runs."""
    return (i for i in ())


@pytest.mark.parametrize("fault", ["tool", "reset", "get_reward"])
def test_faults_that_end_a_run(tmp_path, fault):
    given = {"tools": [unawaited]}
    if fault != "tool":
        broken_shop = type("Shop", (Shop,), {fault: lambda self, **row: float("inf")})
        given = {"environment_factory": broken_shop, "data": asking(8, customer=[1] * 8)}
    trainer = speaking(tmp_path, **given)
    Chosen(trainer, lambda turns: ("unawaited({})", ANSWER)[turns])
    says = {"tool": "nobody runs", "reset": r"`Shop\.reset`, at step 0, returned a float", "get_reward": "returned inf"}
    begun(trainer)
    with pytest.raises(RuntimeError, match=says[fault]):
        while True:
            trainer.sampling_thread.check_health(LIMIT)
            time.sleep(0.01)
    trainer.sampling_thread.stop()


# Environments


class Shop:
    """Sells apples, and counts those of one conversation."""

    made: list = []

    def __init__(self):
        self.resets, self.sold = [], None
        type(self).made.append(self)

    def reset(self, **row) -> str:
        self.resets.append(row)
        self.sold = 0
        return f" You are customer {row['customer']}."

    def buy(self, count: int) -> int:
        """
        Buys apples.

        Args:
            count: How many.
        """
        self.sold += count
        return self.sold

    async def get_reward(self) -> float:
        return float(self.sold)


class Bank(Shop):
    """Gives no reward."""

    made: list = []
    get_reward = None

    def pay(self) -> str:
        """Pays."""
        return "paid"


BUY = 'buy({"count": 2})'


def test_environments(tmp_path):
    """Each conversation has one, chosen by its row; with its tools, its first words and its reward."""
    Shop.made, Bank.made = [], []
    seen = []

    def reward(prompts, completions, environment, customer, completion_ids):
        seen.append((prompts, environment, customer, completion_ids))
        return [0.5] * len(prompts)

    data = asking(2, environment=["shop", "bank"], customer=[7, 8])
    settings = {"tools": [add], "environment_factory": {"shop": Shop, "bank": Bank}, "max_inflight_tasks": 8}
    trainer = speaking(tmp_path, reward, data=data, per_device_train_batch_size=8, **settings)
    chosen = Chosen(trainer, lambda turns: (BUY, BUY, ANSWER)[turns])
    begun(trainer)
    samples = taken(trainer, 8)
    by_kind = {kind: [s for s in samples if s.group_id == place] for place, kind in enumerate((Shop, Bank))}
    assert [len(of_one) for of_one in by_kind.values()] == [4, 4]
    for (kind, of_one), customer, name in zip(by_kind.items(), (7, 8), ("shop", "bank"), strict=True):
        content = f"How much? You are customer {customer}."
        assert of_one[0].prompt == [{"role": "user", "content": content}]
        assert (
            of_one[0].input_ids.tolist()[: len(content)]
            == by_hand((ASKS.replace("How much?", content), 0))[0][: len(content)]
        )
        told = [message["content"] for message in of_one[0].completion if message["role"] == "tool"]
        assert told == ["2", "4"]
        own = {"rewards/Shop": 4.0} if kind is Shop else {}
        assert {k: v for k, v in of_one[0].metrics.items() if k.startswith("rewards/") and v == v} == own | {
            "rewards/reward": 0.5
        }
        prompts, environment, customers, ids = next(one for one in seen if one[1][0] == name)
        assert prompts == [of_one[0].prompt] * 4 and customers == [customer] * 4 and environment == [name] * 4
        trained = of_one[0].completion_mask > 0
        assert ids[0] == of_one[0].input_ids[trained].tolist()
        assert all(row == {"prompt": asking(1)[0]["prompt"], "customer": customer} for row in kind.made[0].resets)
    assert len(Shop.made) == len(Bank.made) == 4  # the first is asked for its methods before a conversation begins
    assert "get_reward" not in chosen.engine.tokenizer.decode(chosen.requests[0].prompt)


def test_a_conversation_that_became_too_old_starts_again(tmp_path):
    """While its tool runs. The environment is reset, and what the first one bought is forgotten."""
    Shop.made, is_called, may_return = [], threading.Event(), threading.Event()

    class Slow(Shop):
        def buy(self, count: int) -> int:
            """
            Buys apples.

            Args:
                count: How many.
            """
            is_called.set()
            assert may_return.wait(LIMIT)
            return super().buy(count)

    trainer = speaking(tmp_path, None, environment_factory=Slow, data=asking(8, customer=[1] * 8), max_staleness=0)
    Chosen(trainer, lambda turns: (BUY, ANSWER)[turns])
    weights = begun(trainer)
    assert is_called.wait(LIMIT)
    moved(trainer, weights)
    may_return.set()
    samples = taken(trainer)
    for sample in samples:
        assert set(sample.versions[sample.completion_mask > 0]) == {2}
        assert sample.metrics["rewards/Slow"] == sample.metrics["reward"] == 2
    metrics = logged(trainer)
    assert metrics["rollouts/dropped_total"] == [4.0]
    assert metrics["rollouts/dropped_length"] == [(4 * len(by_hand((BUY + END, 1))[0]), 4)]
    assert sum(len(environment.resets) for environment in Slow.made) >= 8


# Whole runs


def test_a_run_with_tools_resumes(tmp_path):
    """Without a stand-in: every completion calls the tool, whatever the policy writes."""
    settings = {"save_strategy": "steps", "save_steps": 2, "learning_rate": 1e-4}
    settings |= {"data": conversations(8), "max_tool_calling_iterations": 1, "fork_threshold_tokens": 1}
    settings |= {"processing_class": calling_tokenizer(), "tools": [note]}

    def run(steps, **given):
        trainer = speaking(tmp_path, max_steps=steps, **settings | given)
        trainer.model.generation_config.eos_token_id = [257, *range(94, 200)]  # short turns
        samples = noted(trainer.sampling_thread.rollout_buffer)
        trainer.train(resume_from_checkpoint=bool(given))
        return trainer, samples

    first, samples = run(2)
    again, later = run(3, model=first.model.name_or_path)
    entries = [entry for entry in again.state.log_history if "rollouts/age" in entry]
    assert [entry["step"] for entry in entries] == [1, 2, 3]
    assert all(entry["tools/call_frequency"] == 1 and entry["tools/failure_frequency"] == 0 for entry in entries)
    assert all(entry["mismatch/kl_k3"] < 0.02 for entry in entries)
    assert again.sampling_thread.first_row == len(first._trained_groups) > 0
    assert later[0].prompt == conversations(8)[again.sampling_thread.first_row]["prompt"] != samples[0].prompt
    second = [sample for sample in samples if "tool\nok" in first.processing_class.decode(sample.input_ids)]
    assert len(second) == len(samples) / 2  # TRL's message of a call is not what was drawn


# Refusals before a model is loaded


def test_a_template_that_shows_no_calls(tmp_path):
    with pytest.raises(ValueError, match="shows the model no call of a tool"):
        speaking(tmp_path, tools=[add], processing_class=tiny_tokenizer())
    unknown = reading_tokenizer()
    del unknown.response_schema
    with pytest.raises(ValueError, match="Unrecognized chat template"):
        speaking(tmp_path, tools=[add], processing_class=unknown)
