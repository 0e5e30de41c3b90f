"""
Samples in a thread of the first rank's process while the main thread trains: from an embedded engine, which shares the
device with the training, or from a vLLM server on devices of its own.

[`SamplingThread`] is TRL's rollout worker and its weight transfer in one. The two threads share an engine:

    main     | update | update | pause, sync, resume | update ...
    sampling | draw ...........|                     | draw ...

All ranks sync together. The engine holds one version of the weights at a time. A sync asks the call that draws to end
at its next token (`enough`, see [`~rollout.engine.Engine`]), and waits for it. Afterwards the call is made again with
the tokens so far as part of the prompt, whose keys the new weights compute, as in partial rollouts
([`~trainers.pool`]). So each token knows the one version v(t) that sampled it.

A group ends when all its completions have. It is then scored, and each completion becomes a sample on TRL's queue:

    A_i = (r_i - mean r) / (std r + 1e-8)      as in TRL's worker
    A_i = r_i - mean r                         for a correction that needs advantages as they are, such as `ais`

Groups start while what is in flight and in the queue can still be trained on: of more, `max_staleness` would drop the
rest. A group in flight whose oldest token exceeds `max_staleness` after a sync starts again.
"""

import asyncio
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
from datasets import Dataset
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from ...rollout.base import RolloutEngine
from ...rollout.engine import Request
from ...runs.agreement import on_every_rank
from ...runs.reward_calls import checked_rewards
from ...runs.user_calls import UserCalls
from ...trl_seams import is_async
from ..groups import Completion, Group


logger = logging.getLogger(__name__)

STOPPING = 15.0  # seconds to wait for the thread at the end of a training
IDLE = 0.02  # seconds between two looks at whether there is something to do
NOT_FOR_REWARDS = ("prompt", "completion", "completion_ids")  # columns of the data that rewards get otherwise


@dataclass
class AgedSample(RolloutSample):
    """
    A sample of TRL's queue whose tokens know their versions. Its `model_version` is the version of its oldest token.

    Parameters:
        versions (`np.ndarray`): The version of the weights that sampled each token; 0 for the prompt's.
    """

    versions: np.ndarray | None = None


def advantages_of(rewards: np.ndarray, standardizes: bool) -> tuple[np.ndarray, np.ndarray]:
    """
    Computes the advantages of a group.

    Args:
        rewards (`np.ndarray` of shape `(functions, completions)`): NaN where a function does not apply.
        standardizes (`bool`): Whether they are divided by the standard deviation of the group's rewards.

    Returns:
        `tuple[np.ndarray, np.ndarray]`: The sum of each completion's rewards, NaN for one that nobody scored, and its
        advantage, which is 0 for such a one.
    """
    summed = np.where(np.isnan(rewards).all(0), np.nan, np.nansum(rewards, 0))
    scored = ~np.isnan(summed)
    advantages = np.zeros_like(summed)
    if scored.any():
        advantages[scored] = summed[scored] - summed[scored].mean()
    if scored.any() and standardizes:
        advantages[scored] /= summed[scored].std() + 1e-8
    return summed, advantages


class SamplingThread:
    """
    The thread that samples, with the methods that TRL calls on its rollout worker and on its weight transfer. TRL
    starts it on the first rank alone. The others have one for [`paused`], and their engines sync with the first one's.

    Args:
        args ([`~config.QuantAsyncGRPOConfig`]): The run's configuration.
        dataset: The rows, with a column `prompt`.
        reward_funcs (`list[Callable]`): The reward functions.
        calls ([`~runs.user_calls.UserCalls`]): Guards their calls.

    Attributes:
        engine ([`~rollout.RolloutEngine`] or `None`): What samples, once the models are loaded.
        tokenizer: Its tokenizer, likewise.
        version (`int`): The version of the weights that the engine holds.
        first_row (`int`): The row of the data that the first group has, after a resume.
        groups (`list[Group]`): The groups in flight, oldest first.
        rollout_buffer, metrics_queue (`queue.Queue`): What TRL reads: samples, and metrics.
    """

    def __init__(self, args, dataset, reward_funcs: list[Callable], calls: UserCalls):
        self.args, self.dataset, self.calls = args, dataset, calls
        self.names = [getattr(function, "__name__", type(function).__name__) for function in reward_funcs]
        self.functions = [
            calls.limited(function, f"The reward function {name!r}", partial(self._checked, name))
            for name, function in zip(self.names, reward_funcs, strict=True)
        ]
        self.engine: RolloutEngine | None = None
        self.tokenizer = None
        self.version = self.first_row = self.started = 0
        self.groups: list[Group] = []
        self.rows: dict[int, dict] = {}  # of the groups in flight
        self.rollout_buffer: queue.Queue = queue.Queue(args.queue_maxsize)
        self.metrics_queue: queue.Queue = queue.Queue()
        self._rows: Iterator[dict] | None = None
        self._generation = ExitStack()  # the engine's, between two syncs
        self._engine_free = threading.Lock()
        self._samples, self._stopped = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._beat = math.inf  # when it last drew a token; infinite where nothing is drawn

    # What TRL calls

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, daemon=True, name="sampling-while-training")
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._samples.set()
        if self._thread is not None:
            self._thread.join(STOPPING)
        self._generation.close()

    def check_health(self, stale_after_s: float) -> None:
        """Raises `RuntimeError` if the thread has ended, or has drawn no token for so long while it could."""
        if self._error is not None:
            raise RuntimeError(f"Sampling beside the training failed: {self._error}") from self._error
        if self._thread is None or not self._thread.is_alive():
            raise RuntimeError("Sampling beside the training has ended. Build another trainer to train again.")
        if time.monotonic() - self._beat > stale_after_s:
            raise RuntimeError(
                f"Sampling beside the training hangs: no token for `heartbeat_stale_after_s`={stale_after_s:g} seconds."
            )

    def update_model_version(self, model_version: int) -> None:
        """Takes the version that the engine holds now. Groups that became too old start again."""
        self.version = model_version
        for group in self.groups:
            versions = [version for c in group.completions for version in c.versions]
            if versions and self.version - min(versions) > self.args.max_staleness:
                self.tell_dropped([len(c.token_ids) for c in group.completions])
                group.completions[:] = [Completion() for _ in group.completions]

    def init_weight_transfer(self) -> None: ...

    pause = resume = destroy = init_weight_transfer  # TRL's own sync would call them; see `paused`

    def send_weights(self, iterator) -> None:
        raise RuntimeError("The engine reads the policy's weights by itself, in `QuantAsyncGRPOTrainer`.")

    # The engine belongs to one thread at a time

    @contextmanager
    def paused(self) -> Iterator[RolloutEngine]:
        """
        Context in which nothing is sampled. When it ends, the engine is made ready with its noise, and goes on. All
        ranks must enter it. Raises `RuntimeError` on all of them if the first one's thread does not pause.
        """
        self._samples.clear()
        with on_every_rank():
            self._take_engine()
        try:
            self._generation.close()
            yield self.engine
            self._generation.enter_context(self.engine.generation())
            self._samples.set()
        finally:
            self._engine_free.release()

    def _take_engine(self) -> None:
        seconds = self.args.heartbeat_stale_after_s
        if not self._engine_free.acquire(timeout=seconds):
            self.check_health(math.inf)
            raise RuntimeError(
                f"Sampling beside the training hangs: it did not end for new weights within `heartbeat_stale_after_s`="
                f"{seconds:g} seconds."
            )

    def _run(self) -> None:
        try:
            while not self._stopped.is_set():
                finished = self._sample() if self._samples.wait(IDLE) else []
                for group in finished:
                    self._send(group)
                if not finished:
                    time.sleep(IDLE if not self.groups else 0.0)
        except BaseException as error:
            self._error = error
            if not isinstance(error, Exception):
                raise

    # Sample

    def _sample(self) -> list[Group]:
        """Draws until the trainer has an update's samples, half of the groups have ended, or the weights change."""
        with self._engine_free:
            if not self._samples.is_set() or self._stopped.is_set():
                return []
            self._start_groups()
            asked = [(group, c) for group in self.groups for c in group.completions if not c.has_ended]
            if asked:
                self._draw(asked)
            finished = [group for group in self.groups if group.has_finished]
            self.groups = [group for group in self.groups if not group.has_finished]
            return finished

    def _start_groups(self) -> None:
        args = self.args
        size, ahead = args.num_generations, (args.max_staleness + 1) * args.generation_batch_size
        in_flight, waiting = len(self.groups) * size, self.rollout_buffer.qsize()
        # Not more than an update's samples wait, so that they are young where sampling is the faster of the two
        while in_flight + size <= max(args.max_inflight_tasks, size) and waiting < args.generation_batch_size:
            if in_flight + waiting >= ahead:
                return
            row = self._next_row()
            completions = [Completion() for _ in range(size)]
            self.groups.append(Group(self.started, self.started, self.prompt(row), self.version, completions))
            self.rows[self.started] = row
            self.started += 1
            in_flight += size

    def _draw(self, asked: list[tuple[Group, Completion]]) -> None:
        size, needed = self.args.num_generations, self.args.generation_batch_size
        groups = len({id(group) for group, _ in asked})

        def enough(ended: list[bool]) -> bool:
            self._beat = time.monotonic()
            if not self._samples.is_set() or self._stopped.is_set():
                return True
            waiting = self.rollout_buffer.qsize()
            if waiting >= needed:
                return False
            left = len({id(group) for (group, _), has_ended in zip(asked, ended, strict=True) if not has_ended})
            # The trainer waits for no more than this, or there is room for other groups. What is left is computed again
            return waiting + (groups - left) * size >= needed or left <= groups // 2

        self._beat = time.monotonic()
        requests = [Request(group.prompt, copies=1, sampled=list(c.token_ids)) for group, c in asked]
        samples = self.engine.draw(requests, enough=enough)
        self._beat = math.inf
        ended = samples.ended or [True] * len(asked)
        for (_, completion), ids, logps, has_ended in zip(asked, samples.token_ids, samples.logps, ended, strict=True):
            completion.add(ids, logps, self.version, has_ended, None)

    def _next_row(self) -> dict:
        if self._rows is None:
            dataset = self.dataset
            if self.first_row and isinstance(dataset, Dataset):
                dataset = dataset.select(range(self.first_row % len(dataset), len(dataset)))
            self._rows = iter(dataset)
        row = next(self._rows, None)
        if row is None:
            self._rows = iter(self.dataset)
            row = next(self._rows)
        return row

    def prompt(self, row: dict) -> list[int]:
        """Returns the token ids of a row's prompt, a text or messages."""
        if isinstance(row["prompt"], str):
            return list(self.tokenizer(text=row["prompt"])["input_ids"])
        template = self.args.chat_template_kwargs or {}
        return list(
            self.tokenizer.apply_chat_template(row["prompt"], return_dict=False, add_generation_prompt=True, **template)
        )

    # Score

    def _checked(self, name: str, returned, arguments: dict) -> list[float | None]:
        try:
            return checked_rewards(returned, arguments["prompts"], arguments["completions"])
        except ValueError as error:
            raise ValueError(self.calls.at(f"The reward function {name!r}", str(error))) from error

    def _send(self, group: Group) -> None:
        """Scores a group and puts its samples on the queue, once there is room."""
        row = self.rows.pop(group.place)
        ids = [c.token_ids for c in group.completions]
        texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        is_text = isinstance(row["prompt"], str)
        completions = texts if is_text else [[{"role": "assistant", "content": text}] for text in texts]
        columns = {name: [value] * len(ids) for name, value in row.items() if name not in NOT_FOR_REWARDS}
        given = {"prompts": [row["prompt"]] * len(ids), "completions": completions, "completion_ids": ids, **columns}
        found = [asyncio.run(call(**given)) if is_async(call) else call(**given) for call in self.functions]
        rewards = np.array([[np.nan if one is None else one for one in scores] for scores in found], dtype=float)
        summed, advantages = advantages_of(rewards, self.args.standardizes)
        spread = float(np.nanstd(summed)) if np.isfinite(summed).any() else math.nan
        self._tell_lengths(group)
        for i, completion in enumerate(group.completions):
            of_each = {f"rewards/{name}": float(scores[i]) for name, scores in zip(self.names, rewards, strict=True)}
            before = [0] * len(group.prompt)
            sample = AgedSample(
                prompt=row["prompt"],
                completion=completions[i],
                input_ids=np.asarray(group.prompt + completion.token_ids, dtype=np.int64),
                completion_mask=np.asarray(before + [1] * len(completion.token_ids), dtype=np.int64),
                old_log_probs=np.asarray([*before, *completion.logps], dtype=np.float32),
                advantage=float(advantages[i]),
                model_version=min(completion.versions),
                group_id=group.place,
                metrics={"reward": float(summed[i]), "reward_std": spread, **of_each},
                enqueued_at=time.time(),
                versions=np.asarray(before + completion.versions, dtype=np.int64),
            )
            self._put(sample)

    def _put(self, sample: AgedSample) -> None:
        while not self._stopped.is_set():
            try:
                self.rollout_buffer.put(sample, timeout=IDLE)
                return
            except queue.Full:
                continue

    def _tell_lengths(self, group: Group) -> None:
        ends = {*self.engine.eos_token_ids, self.tokenizer.pad_token_id}
        lengths = [len(c.token_ids) for c in group.completions]
        cut = sum(c.token_ids[-1] not in ends for c in group.completions)
        self.metrics_queue.put(
            {
                "completions/mean_length": (sum(lengths), len(lengths)),
                "completions/max_length": float(max(lengths)),
                "completions/min_length": float(min(lengths)),
                "completions/clipped_ratio": (cut, len(lengths)),
            }
        )

    def tell_dropped(self, lengths: list[int]) -> None:
        """Logs samples that nobody trains on, by the lengths of their completions."""
        counts = {
            "rollouts/dropped_total": float(len(lengths)),
            "rollouts/dropped_length": (sum(lengths), len(lengths)),
        }
        self.metrics_queue.put(counts)
