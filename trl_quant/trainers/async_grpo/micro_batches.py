"""
The micro-batches of the asynchronous trainer, each made when the trainer asks for it.

TRL hands its queue to a loader of accelerate's, which fetches one micro-batch ahead, and TRL's planner holds back the
sample that did not fit. Both may be trained on after the next sync, one version older than when they were counted. Here
the micro-batches of an update are made when it begins, and a sample is looked at again whenever it is taken:

    age of token t = version at the update - v(t),    a sample is dropped if one of its tokens is older than M

| symbol | here |
|---|---|
| `v(t)` | `AgedSample.versions`; for a worker of TRL's, the `model_version` of the whole sample |
| `M` | `max_staleness` |

Planning and packing are TRL's: [`MicroBatches`] gives its planner samples, and its collator what it has planned.
"""

import queue
import time
from collections import deque
from collections.abc import Iterator

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


POLL = 0.5  # seconds to wait for a sample before the worker's health is looked at


class MicroBatches:
    """
    Iterates over micro-batches without an end. All ranks iterate together; the first makes what all get.

    Args:
        trainer ([`QuantAsyncGRPOTrainer`]): The trainer.
        budget (`int`): Tokens of a rank's row at most; 0 for `per_device_train_batch_size` samples a row.

    Attributes:
        wait_s (`float`): Seconds for which the first rank has waited for samples; TRL logs and clears them.
        held (`deque`): Samples that were taken and did not fit, oldest first.
    """

    def __init__(self, trainer, budget: int):
        self.trainer, self.wait_s, self.held = trainer, 0.0, deque()
        self.metrics = trainer._metrics["train"]
        self.processes = trainer.accelerator.num_processes
        self.collate = DataCollatorForRollout(
            trainer.processing_class.pad_token_id,
            self.processes,
            groups_trained=trainer._trained_groups,
            metrics=self.metrics,
            token_budget=budget,
        )

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        accelerator = self.trainer.accelerator
        while True:
            made = [self.made() if accelerator.is_main_process else None]
            batch = broadcast_object_list(made)[0] if self.processes > 1 else made[0]
            rank = accelerator.process_index
            yield {name: values[rank : rank + 1] for name, values in batch.items()}

    def made(self) -> dict[str, Tensor]:
        """Plans and packs a micro-batch: TRL's, with `ages` (ranks, M), the age of each trained token."""
        rows = self._planned()
        batch = self.collate([rows])
        ages = [np.concatenate([self._ages(sample) for sample in row.samples]) for row in rows]
        batch["ages"] = pad([torch.from_numpy(of_row) for of_row in ages], padding_value=0)
        every = np.concatenate(ages)
        self.metrics["rollouts/age"].append((float(every.sum()), len(every)))
        self.metrics["rollouts/age_max"].append(float(every.max(initial=0)))
        return batch

    def _planned(self) -> list:
        args, taken = self.trainer.args, []
        samples = self._samples(taken)
        if self.collate.token_budget:
            planner = TokenBudgetBatcher(samples, self.processes, self.collate.token_budget, self.metrics)
        else:
            planner = FixedCountBatcher(samples, self.processes, args.per_device_train_batch_size * self.processes)
        rows = next(iter(planner))
        if not any(taken[-1] is sample for row in rows for sample in row.samples):
            self.held.append(taken[-1])  # it did not fit
        return rows

    def _samples(self, taken: list[dict]) -> Iterator[dict]:
        """Yields samples that are young enough, and adds each to `taken`."""
        trainer = self.trainer
        while True:
            sample = self.held.popleft() if self.held else self._next()
            if self._ages(sample).max(initial=0) > trainer.args.max_staleness:
                length = int(sample["completion_mask"].sum())
                self.metrics["rollouts/dropped_total"].append(1.0)
                self.metrics["rollouts/dropped_length"].append((length, 1))
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
        names = ("input_ids", "completion_mask", "old_log_probs", "advantage", "group_id", "metrics")
        return {name: getattr(sample, name) for name in names} | {"versions": versions}

    def _ages(self, sample: dict) -> np.ndarray:
        """Returns the ages of a sample's trained tokens, in the order of TRL's loss. The first token predicts none."""
        trained = sample["completion_mask"][1:] > 0
        return self.trainer.model_version - sample["versions"][1:][trained]
