"""
The micro-batches of the asynchronous trainer, each made when the trainer asks for it.

TRL hands its queue to a loader of accelerate's, which fetches one micro-batch ahead, and TRL's planner holds back the
sample that did not fit. Both may be trained on after the next sync, one version older than when they were counted. Here
a micro-batch is made when it is trained on, and a sample is looked at again whenever it is taken:

    age of token t = version at the update - v(t),    a sample is dropped if one of its tokens is older than M

| symbol | here |
|---|---|
| `v(t)` | `AgedSample.versions`; for a worker of TRL's, the `model_version` of the whole sample |
| `M` | `max_staleness` |

Planning and packing are TRL's: [`MicroBatches`] gives its planner samples, and its collator what it has planned. TRL's
planner drops samples above its `token_budget`; here they are dropped before it, as those that are too old.

With `proximal_pass`, those of all updates until the next sync are made together, when the first of these begins, and
the policy, which is then the one that was synced, scores them:

    sync | made, scored | update | update | sync | made, scored | update | update
"""

import logging
import queue
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor
from trl.experimental.async_grpo.async_grpo_trainer import (
    DataCollatorForRollout,
    FixedCountBatcher,
    TokenBudgetBatcher,
)
from trl.trainer.utils import pad

from ...config.lengths import is_stored, measured
from ...corrections.diagnostics import turns as turns_of
from ...runs.agreement import on_every_rank


logger = logging.getLogger(__name__)

POLL = 0.5  # seconds to wait for a sample before the worker's health is looked at


class Made(NamedTuple):
    """
    A micro-batch of all ranks, and what TRL's collator found out about it.

    Attributes:
        batch (`dict[str, torch.Tensor]`): Its tensors, with a row for each rank.
        metrics (`dict[str, list]`): To be logged when it is trained on.
        groups (`set[int]`): The groups of its samples.
    """

    batch: dict[str, Tensor]
    metrics: dict[str, list]
    groups: set[int]


class MicroBatches:
    """
    Iterates over micro-batches without an end. All ranks iterate together; the first makes what all get.

    Args:
        trainer ([`QuantAsyncGRPOTrainer`]): The trainer.
        budget (`int`): Tokens of a rank's row at most; 0 for `per_device_train_batch_size` samples a row.

    Attributes:
        wait_s (`float`): Seconds for which the first rank has waited for samples; TRL logs and clears them.
        held (`deque`): Samples that were taken and did not fit, oldest first.
        dropped_groups (`set[int]`): Groups of which a sample was too old or too long, on the first rank.
    """

    def __init__(self, trainer, budget: int):
        self.trainer, self.wait_s, self.held, self.budget = trainer, 0.0, deque(), budget
        self.dropped_groups: set[int] = set()
        self.metrics = trainer._metrics["train"]
        self.processes = trainer.accelerator.num_processes

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        trainer, rank = self.trainer, self.trainer.accelerator.process_index
        while True:
            made = [self._made_by_first() for _ in range(self._together())]
            batches = [{name: values[rank : rank + 1] for name, values in one.batch.items()} for one in made]
            if trainer.args.proximal_pass:
                for batch in batches:
                    batch["proximal"] = trainer.scores(batch)
            for batch, (_, metrics, groups) in zip(batches, made, strict=True):
                for name, values in metrics.items():
                    self.metrics[name] += values
                trainer._trained_groups.update(groups)
                yield batch

    def _together(self) -> int:
        """Returns the number of micro-batches to make now."""
        args, step = self.trainer.args, self.trainer.state.global_step
        if not args.proximal_pass:
            return 1
        until_sync = args.weight_sync_steps - step % args.weight_sync_steps
        return max(min(until_sync, args.max_steps - step), 1) * args.gradient_accumulation_steps

    def _made_by_first(self) -> Made:
        """Returns the next micro-batch, which the first rank makes, on all ranks. An error of its ends all of them."""
        is_first = self.trainer.accelerator.is_main_process
        with on_every_rank():
            made = [self.made() if is_first else None]
        return broadcast_object_list(made)[0]

    def made(self) -> Made:
        """Plans and packs a micro-batch: TRL's, with the age and the turn of each trained token, both (ranks, M)."""
        rows, metrics, groups = self._planned(), defaultdict(list), set()
        pad_token, given = self.trainer.processing_class.pad_token_id, {"metrics": metrics, "groups_trained": groups}
        batch = DataCollatorForRollout(pad_token, self.processes, token_budget=self.budget, **given)([rows])
        ages = [np.concatenate([self._ages(sample) for sample in row.samples]) for row in rows]
        turns = [np.concatenate([of_trained(sample, "turns") for sample in row.samples]) for row in rows]
        for name, values in (("ages", ages), ("turns", turns)):
            batch[name] = pad([torch.from_numpy(of_row) for of_row in values], padding_value=0)
        every = np.concatenate(ages)
        metrics["rollouts/age"].append((float(every.sum()), len(every)))
        metrics["rollouts/age_max"].append(float(every.max(initial=0)))
        return Made(batch, metrics, groups)

    def _planned(self) -> list:
        args, taken = self.trainer.args, []
        samples = self._samples(taken)
        if self.budget:
            planner = TokenBudgetBatcher(samples, self.processes, self.budget, self.metrics)
        else:
            planner = FixedCountBatcher(samples, self.processes, args.per_device_train_batch_size * self.processes)
        rows = next(iter(planner))
        if not any(taken[-1] is sample for row in rows for sample in row.samples):
            self.held.append(taken[-1])  # it did not fit
        return rows

    def _samples(self, taken: list[dict]) -> Iterator[dict]:
        """Yields samples that are young and short enough, and adds each to `taken`."""
        trainer = self.trainer
        while True:
            sample = self.held.popleft() if self.held else self._next()
            is_too_long = 0 < self.budget < len(sample["input_ids"])
            if is_too_long or self._ages(sample).max(initial=0) > trainer.args.max_staleness:
                if is_too_long:
                    self.metrics["batch/dropped_oversize_total"].append(1.0)  # TRL's
                length = int(sample["completion_mask"].sum())
                self.metrics["rollouts/dropped_total"].append(1.0)
                self.metrics["rollouts/dropped_length"].append((length, 1))
                self.dropped_groups.add(sample["group_id"])
                continue
            taken.append(sample)
            yield sample

    def _next(self) -> dict:
        """Takes a sample off TRL's queue."""
        trainer, began = self.trainer, time.time()
        while True:
            try:
                sample = trainer.rollout_queue.get(timeout=POLL)
                break
            except queue.Empty:
                trainer.rollout_worker.check_health(trainer.args.heartbeat_stale_after_s)
        now = time.time()
        self.wait_s += now - began
        self.metrics["sample/rollout_queue_size"].append(float(trainer.rollout_queue.qsize()))
        if sample.enqueued_at is not None:
            self.metrics["sample/time_in_queue_s"].append(now - sample.enqueued_at)
        versions = getattr(sample, "versions", None)
        if versions is None:
            versions = np.full(len(sample.input_ids), sample.model_version)
        turns = getattr(sample, "turns", None)
        if turns is None:
            turns = turns_of(torch.as_tensor(sample.completion_mask)[None] > 0)[0].numpy()
        names = ("input_ids", "completion_mask", "old_log_probs", "advantage", "group_id", "metrics")
        return {name: getattr(sample, name) for name in names} | {"versions": versions, "turns": turns}

    def _ages(self, sample: dict) -> np.ndarray:
        """Returns the ages of a sample's trained tokens, in the order of TRL's loss."""
        return self.trainer.model_version - of_trained(sample, "versions")


def check_budget(trainer) -> None:
    """
    Warns of prompts whose longest completions do not fit in the `token_budget`. Raises `ValueError` if no completion of
    any prompt does.
    """
    args, budget, dataset = trainer.args, trainer.args.token_budget or 0, trainer.train_dataset
    if budget <= 0 or not is_stored(dataset) or "prompt" not in dataset.column_names:
        return
    tools = None if trainer.sampling_thread is None else trainer.sampling_thread.speakers["tools"]
    lengths = measured("train_dataset", dataset, trainer.processing_class, tools, args.chat_template_kwargs)
    if min(lengths.tokens) >= budget:
        raise ValueError(
            f"`token_budget`={budget} is the longest row that is trained on, prompt included, and the shortest prompt "
            f"of {lengths.source} has {min(lengths.tokens)} tokens: no sample fits. Raise it."
        )
    longest = lengths.longest + args.max_completion_length
    if longest > budget:
        logger.warning(
            "`token_budget`=%d is less than the longest prompt (%d tokens; %s were measured) and "
            "`max_completion_length`=%d together. Longer samples are dropped (`batch/dropped_oversize_total`), so "
            "nothing is learned from long completions. Set at least %d.",
            budget,
            lengths.longest,
            lengths.source,
            args.max_completion_length,
            longest,
        )


def of_trained(sample: dict, name: str) -> np.ndarray:
    """Returns a sample's values of its trained tokens, in the order of TRL's loss. The first token predicts none."""
    return sample[name][1:][sample["completion_mask"][1:] > 0]
