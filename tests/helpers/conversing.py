"""
Conversations beside an asynchronous training, for the tests: an engine whose texts are chosen stands in for a policy
that calls tools, and scores them with its own copy. What comes out is compared with tokens written by hand, and with
those of TRL's worker on the same turns.
"""

import asyncio
import copy
import json
import queue
import re
import threading
import time

import pytest
import torch
from asynchronous import asynchronous
from datasets import Dataset
from tiny import tiny_tokenizer
from trl.experimental.async_grpo.async_rollout_worker import _AsyncRolloutLoop

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


def fails(trainer, says: str) -> None:
    """Starts the thread, which must end with this error."""
    begun(trainer)
    with pytest.raises(RuntimeError, match=says):
        while True:
            trainer.sampling_thread.check_health(LIMIT)
            time.sleep(0.01)
    trainer.sampling_thread.stop()


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
