"""Environments beside an asynchronous training: which one a conversation has, and what becomes of it."""

import threading
import time

import pytest
from conversing import (
    ANSWER,
    ASKS,
    END,
    LIMIT,
    Chosen,
    add,
    asking,
    begun,
    by_hand,
    fails,
    logged,
    moved,
    speaking,
    taken,
)


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


class Waiting(Shop):
    """Sells once it may."""

    is_called: threading.Event
    may_sell: threading.Event

    def buy(self, count: int) -> int:
        """
        Buys apples.

        Args:
            count: How many.
        """
        self.is_called.set()
        assert self.may_sell.wait(LIMIT)
        return super().buy(count)


@pytest.mark.parametrize("moment", ["turn", "tool"])
def test_a_conversation_that_became_too_old_starts_again(tmp_path, moment):
    """
    In the middle of its second turn, or while its tool runs. The one before ends, and gives its environment back: at
    once, to the one that replaces it, or when the tool has returned. What it bought is forgotten.
    """
    Waiting.made, Waiting.is_called, Waiting.may_sell = [], threading.Event(), threading.Event()
    in_tool = moment == "tool"
    options = {"environment_factory": Waiting, "data": asking(8, customer=[1] * 8), "max_staleness": 0}
    trainer = speaking(tmp_path, None, **options)
    chosen = Chosen(trainer, lambda turns: (BUY, ANSWER)[turns], holds=-1 if in_tool else 1)
    if not in_tool:
        Waiting.may_sell.set()
    weights = begun(trainer)
    assert (Waiting.is_called if in_tool else chosen.held).wait(LIMIT)
    (old,) = trainer.sampling_thread.groups
    moved(trainer, weights)
    Waiting.may_sell.set()
    ends_by = time.monotonic() + LIMIT
    while not old.has_finished and time.monotonic() < ends_by:
        time.sleep(0.001)
    assert old.has_finished and old.spoken == [None] * 4
    samples = taken(trainer)
    for sample in samples:
        assert set(sample.versions[sample.completion_mask > 0]) == {2}
        assert sample.metrics["rewards/Waiting"] == sample.metrics["reward"] == 2
    metrics = logged(trainer)
    assert metrics["rollouts/dropped_total"] == [4.0]
    tokens = len(by_hand((BUY + END, 1))[0]) + (0 if in_tool else 2)
    assert metrics["rollouts/dropped_length"] == [(4 * tokens, 4)]
    resets = [len(environment.resets) for environment in Waiting.made]
    assert len(resets) == (8 if in_tool else 4) and sum(resets) >= 8


@pytest.mark.parametrize(
    ("fault", "says"), [("reset", r"`Shop\.reset`, at step 0, returned a float"), ("get_reward", "returned inf")]
)
def test_faults_that_end_a_run(tmp_path, fault, says):
    shop = type("Shop", (Shop,), {fault: lambda self, **row: float("inf")})
    trainer = speaking(tmp_path, environment_factory=shop, data=asking(8, customer=[1] * 8))
    Chosen(trainer, lambda turns: ANSWER)
    fails(trainer, says)
