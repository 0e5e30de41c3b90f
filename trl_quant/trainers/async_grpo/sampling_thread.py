"""
Samples in a thread of the first rank's process while the main thread trains: from an embedded engine, which shares the
device with the training, or from a vLLM server on devices of its own.

[`SamplingThread`] is TRL's rollout worker and its weight transfer in one. The two threads share an engine:

    main     | update | update | pause, sync, resume | update ...
    sampling | draw ...........|                     | draw ...
    scoring  | score a group ................ | score the next ...

All ranks sync together. The engine holds one version of the weights at a time. A sync asks the call that draws to end
at its next token (`enough`, see [`~rollout.engine.Engine`]), and waits for it. Afterwards the call is made again with
the tokens so far as part of the prompt, whose keys the new weights compute, as in partial rollouts
([`~trainers.pool`]). So each token knows the one version v(t) that sampled it.

A group ends when all its completions have. A thread of its own then scores it, one group after the other, so that slow
rewards keep no engine waiting, and each completion becomes a sample on TRL's queue:

    A_i = (r_i - mean r) / (std r + 1e-8)      as in TRL's worker
    A_i = r_i - mean r                         for a correction that needs advantages as they are, such as `ais`

Groups start while what is in flight, scored or in the queue can still be trained on: of more, `max_staleness` would
drop the rest. A group in flight whose oldest token exceeds `max_staleness` after a sync starts again.

With tools or environments, completions are conversations of several turns ([`~trainers.async_grpo.turns`]).
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
import torch
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from ...rollout.base import RolloutEngine
from ...rollout.limits import leave_threads_at_exit
from ...runs.agreement import on_every_rank
from ...runs.reward_calls import rewards_of, tell_zeros
from ...runs.user_calls import UserCalls
from ...storage.run_checkpoints import how_to_go_on
from ...trl_seams import is_async
from ..checks import DrawnPrompts
from ..groups import Group
from .turns import Conversations, Spoken, Turn, lengths_of, rows_of


logger = logging.getLogger(__name__)

THREAD = "Sampling beside the training"  # what messages call it
STOPPING = 15.0  # seconds to wait for the thread at the end of a training
SCORING = 1.0  # seconds to wait then for rewards, which nobody needs any more
IDLE = 0.02  # seconds between two looks at whether there is something to do
NOT_FOR_REWARDS = ("prompt", "completion", "completion_ids")  # columns of the data that rewards get otherwise


@dataclass
class AgedSample(RolloutSample):
    """
    A sample of TRL's queue whose tokens know their versions. Its `model_version` is the version of its oldest token.

    Parameters:
        versions (`np.ndarray`): The version of the weights that sampled each token; 0 for one that was not sampled.
        turns (`np.ndarray`): The turn of its completion that each sampled token belongs to, from 1; 0 for the others.
    """

    versions: np.ndarray | None = None
    turns: np.ndarray | None = None


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
        reward_funcs (`list[Callable]`): The reward functions.
        calls ([`~runs.user_calls.UserCalls`]): Guards their calls.
        speakers: What else speaks in a completion, with guarded calls: `tools` and `environment_factory`, if given.

    Attributes:
        engine ([`~rollout.RolloutEngine`] or `None`): What samples, once the models are loaded.
        tokenizer: Its tokenizer, likewise.
        conversations ([`~trainers.async_grpo.turns.Conversations`] or `None`): The conversations of a run in which
            others speak as well, on the first rank.
        version (`int`): The version of the weights that the engine holds.
        first_row (`int`): The row of the data that the first group has, after a resume.
        groups (`list[Group]`): The groups in flight, oldest first.
        rollout_buffer, metrics_queue (`queue.Queue`): What TRL reads: samples, and metrics.
    """

    def __init__(self, args, reward_funcs: list[Callable], calls: UserCalls, **speakers):
        self.args, self.calls, self.speakers = args, calls, speakers
        self.names = [getattr(function, "__name__", type(function).__name__) for function in reward_funcs]
        self.functions = [
            calls.limited(function, f"The reward function {name!r}", partial(self._checked, name))
            for name, function in zip(self.names, reward_funcs, strict=True)
        ]
        self.engine: RolloutEngine | None = None
        self.tokenizer = None
        self.conversations: Conversations | None = None
        self.version = self.first_row = self.started = 0
        self.groups: list[Group] = []
        self.rows: dict[int, dict] = {}  # of the groups in flight
        self.rollout_buffer: queue.Queue = queue.Queue(args.queue_maxsize)
        self._unscored: queue.Queue = queue.Queue(max(args.generation_batch_size // args.num_generations, 1))
        self._finished = self._sent = 0  # completions that have ended, and those of which the queue has the samples
        self.metrics_queue: queue.Queue = queue.Queue()
        self._rows_from: Callable[[int], Iterator[dict]] | None = None
        self._drawn_prompts: DrawnPrompts | None = None
        self._first_scores: list[tuple[np.ndarray, list]] | None = []  # of an update's samples, with their completions
        self._rows: Iterator[dict] | None = None
        self._generation = ExitStack()  # the engine's, between two syncs
        self._engine_free = threading.Lock()
        self._samples, self._stopped = threading.Event(), threading.Event()
        self._threads: list[threading.Thread] = []
        self._error: BaseException | None = None
        self._beat = math.inf  # when it last drew a token; infinite where nothing is drawn

    def meet(self, engine: RolloutEngine, rows: Callable[[int], Iterator[dict]], drawn_prompts: DrawnPrompts) -> None:
        """
        Takes the engine, the rows that TRL trains on, without end, from one whose number is given, and the check of the
        prompts that are about to be sampled. All ranks must call it. Raises `ValueError` if the chat template is none
        whose calls of tools can be read.
        """
        self.engine, self.tokenizer = engine, engine.tokenizer
        self._rows_from, self._drawn_prompts = rows, drawn_prompts
        speaks = any(self.speakers.values()) and engine.accelerator.is_main_process
        with on_every_rank():
            if speaks:
                given = self.speakers | {"reward_funcs": self.functions, "context": drawn_prompts.context}
                self.conversations = Conversations(self.args, engine, self.metrics_queue, self.calls, **given)

    # What TRL calls

    def start(self) -> None:
        works = {"sampling-while-training": self._run, "scoring-while-training": self._score}
        self._threads = [
            threading.Thread(target=self._noting_errors, args=(work,), daemon=True, name=name)
            for name, work in works.items()
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._samples.set()
        for thread, seconds in zip(self._threads, (STOPPING, SCORING), strict=False):
            thread.join(seconds)
            if thread.is_alive():
                leave_threads_at_exit()
        self._generation.close()

    def check_health(self, stale_after_s: float) -> None:
        """Raises `RuntimeError` if a thread has ended, or none has drawn a token for so long while it could."""
        if self._error is not None:
            raise RuntimeError(self._explained(self._error)) from self._error
        if not self._threads or not all(thread.is_alive() for thread in self._threads):
            raise RuntimeError(f"{THREAD} has ended. Build another trainer to train again.")
        if time.monotonic() - self._beat > stale_after_s:
            hangs = f"hangs: no token for `heartbeat_stale_after_s`={stale_after_s:g} seconds."
            raise RuntimeError(self.calls.at(THREAD, hangs))

    def _explained(self, error: BaseException) -> str:
        """Returns what has failed. Where the error does not say what to do, the step and the checkpoint too."""
        speaks = isinstance(error, ValueError | RuntimeError | OSError)  # others name no more than a key
        cause = f"{'' if speaks else f'{type(error).__name__}: '}{error}".rstrip(".") + "."
        if isinstance(error, ValueError) or how_to_go_on(self.args.output_dir) in cause:
            return f"{THREAD} failed: {cause}"
        return self.calls.at(THREAD, f"failed: {cause}")

    def update_model_version(self, model_version: int) -> None:
        """Takes the version that the engine holds now."""
        self.version = model_version

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
            hangs = f"it did not end for new weights within `heartbeat_stale_after_s`={seconds:g} seconds."
            raise RuntimeError(self.calls.at(THREAD, f"hangs: {hangs}"))

    def _noting_errors(self, work: Callable[[], None]) -> None:
        """Runs a thread's work. Its error ends the other thread too, and is the trainer's at its next look."""
        try:
            work()
        except BaseException as error:
            self._error = self._error or error
            self._stopped.set()
            if not isinstance(error, Exception):
                raise

    def _run(self) -> None:
        try:
            with self.calls.watched():
                while not self._stopped.is_set():
                    finished = self._sample() if self._samples.wait(IDLE) else []
                    for group in finished:
                        row = self.rows.pop(group.place)
                        self._put(self._unscored, (group.place, row, self._spoken(group, row)))
                    self.calls.check()
                    if not finished:
                        time.sleep(IDLE if not self.groups else 0.0)
        finally:
            if self.conversations is not None:
                self.conversations.close(self.groups)

    # Sample

    def _sample(self) -> list[Group]:
        """Draws until the trainer has an update's samples, half of the groups have ended, or the weights change."""
        with self._engine_free:
            if not self._samples.is_set() or self._stopped.is_set():
                return []
            self._start_again()
            self._start_groups()
            self._converse()
            asked = [(group, turn) for group in self.groups for turn in group.completions if not turn.has_ended]
            if asked:
                self._draw(asked)
                self._converse()
            finished = [group for group in self.groups if group.has_finished]
            self.groups = [group for group in self.groups if not group.has_finished]
            self._finished += len(finished) * self.args.num_generations
            return finished

    def _waiting(self) -> int:
        """Returns the number of samples that are scored, or wait for the trainer."""
        unsent = self._finished - self._sent  # first, so that one that is sent meanwhile counts twice, and not never
        return unsent + self.rollout_buffer.qsize()

    def _converse(self) -> None:
        if self.conversations is not None:
            self.conversations.run(self.groups)

    def _start_again(self) -> None:
        """Starts groups again that are too old for the version that the engine holds now."""
        for i, group in enumerate(self.groups):
            versions = [version for turn in group.completions for version in turn.versions]
            if versions and self.version - min(versions) > self.args.max_staleness:
                self.tell_dropped(lengths_of(group))
                if self.conversations is not None:
                    self.conversations.drop(group)
                self.groups[i] = self._begun(group.place)

    def _start_groups(self) -> None:
        args = self.args
        size, ahead = args.num_generations, (args.max_staleness + 1) * args.generation_batch_size
        in_flight, waiting = len(self.groups) * size, self._waiting()
        # Not more than an update's samples wait, so that they are young where sampling is the faster of the two
        while in_flight + size <= max(args.max_inflight_tasks, size) and waiting < args.generation_batch_size:
            if in_flight + waiting >= ahead:
                return
            if self._rows is None:
                self._rows = self._rows_from(self.first_row)
            self.rows[self.started] = next(self._rows)
            self.groups.append(self._begun(self.started))
            self.started += 1
            in_flight += size

    def _begun(self, place: int) -> Group:
        """Returns a group that has just started, of the row that has this place."""
        row = self.rows[place]
        if self.conversations is not None:
            return self.conversations.begun(place, row, self.version)
        prompt = self.prompt(row)
        turns = [Turn(prompt=prompt, number=i) for i in range(self.args.num_generations)]
        return Group(place, place, prompt, self.version, turns)

    def _draw(self, asked: list[tuple[Group, Turn]]) -> None:
        # What ends as a whole, and how many samples this brings: a group; or a turn, after which others may come
        has_turns = self.conversations is not None
        units = [id(turn if has_turns else group) for group, turn in asked]
        begun, needed = len(set(units)), self.args.generation_batch_size
        brings = 0 if has_turns else self.args.num_generations

        def enough(ended: list[bool]) -> bool:
            self._beat = time.monotonic()
            if not self._samples.is_set() or self._stopped.is_set():
                return True
            waiting = self._waiting()
            if waiting >= needed:
                return False
            left = len({unit for unit, has_ended in zip(units, ended, strict=True) if not has_ended})
            # The trainer waits for no more than this, or there is room for others. What is left is computed again
            return waiting + (begun - left) * brings >= needed or left <= begun // 2

        if starting := [turn.prompt for _, turn in asked if turn.first is None and not turn.token_ids]:
            self._drawn_prompts.check(starting)
        self._beat = time.monotonic()
        samples = self.engine.draw([turn.request() for _, turn in asked], enough=enough)
        self._beat = math.inf
        ended = samples.ended or [True] * len(asked)
        for (_, turn), ids, logps, has_ended in zip(asked, samples.token_ids, samples.logps, ended, strict=True):
            turn.add(ids, logps, self.version, has_ended, None)

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
        called = f"The reward function {name!r}"
        return rewards_of(self.calls, called, returned, arguments["prompts"], arguments["completions"])

    def _spoken(self, group: Group, row: dict) -> list[Spoken]:
        """Returns the completions of a group that has finished."""
        if self.conversations is not None:
            return group.spoken
        self._tell_lengths(group)
        texts = self.tokenizer.batch_decode([turn.token_ids for turn in group.completions], skip_special_tokens=True)
        is_text = isinstance(row["prompt"], str)
        completions = texts if is_text else [[{"role": "assistant", "content": text}] for text in texts]
        turns = group.completions
        return [Spoken(row["prompt"], said, [turn]) for said, turn in zip(completions, turns, strict=True)]

    def _score(self) -> None:
        while not self._stopped.is_set():
            try:
                finished = self._unscored.get(timeout=IDLE)
            except queue.Empty:
                continue
            self._send(*finished)

    def _rewards(self, name: str, call: Callable, given: dict) -> list[float | None]:
        try:
            return asyncio.run(call(**given)) if is_async(call) else call(**given)
        except Exception as error:
            called = f"The reward function {name!r}"
            if called in str(error):
                raise
            raise RuntimeError(self.calls.at(called, f"raised {error!r}.")) from error

    def _send(self, place: int, row: dict, spoken: list[Spoken]) -> None:
        """Scores the group of a place and puts its samples on the queue, once there is room."""
        given = {name: [value] * len(spoken) for name, value in row.items() if name not in NOT_FOR_REWARDS}
        given |= {"prompts": [one.prompt for one in spoken], "completions": [one.completion for one in spoken]}
        given["completion_ids"] = [one.token_ids for one in spoken]
        found = [self._rewards(name, call, given) for name, call in zip(self.names, self.functions, strict=True)]
        kinds = [] if self.conversations is None else self.conversations.kinds
        found += [[one.own.get(kind) for one in spoken] for kind in kinds]
        names = [*self.names, *(kind.__name__ for kind in kinds)]
        rewards = np.array([[np.nan if one is None else one for one in scores] for scores in found], dtype=float)
        self._tell_zeros(names, rewards, given["completions"])
        summed, advantages = advantages_of(rewards, self.args.standardizes)
        spread = float(np.nanstd(summed)) if np.isfinite(summed).any() else math.nan
        has_calls = any(one.calls for one in spoken)
        for i, one in enumerate(spoken):
            metrics = {"reward": float(summed[i]), "reward_std": spread}
            metrics |= {f"rewards/{name}": float(scores[i]) for name, scores in zip(names, rewards, strict=True)}
            if has_calls:
                metrics["tools/call_frequency"] = float(one.calls)
                metrics["tools/failure_frequency"] = one.failures / max(one.calls, 1)
            for joined, versions, turns in rows_of(one.turns, self.args.fork_threshold_tokens):
                sample = AgedSample(
                    prompt=one.prompt,
                    completion=one.completion,
                    input_ids=np.asarray(joined.input_ids, dtype=np.int64),
                    completion_mask=np.asarray(joined.completion_mask, dtype=np.int64),
                    old_log_probs=np.asarray(joined.old_log_probs, dtype=np.float32),
                    advantage=float(advantages[i]),
                    model_version=min(version for turn in one.turns for version in turn.versions),
                    group_id=place,
                    metrics=dict(metrics),
                    enqueued_at=time.time(),
                    versions=np.asarray(versions, dtype=np.int64),
                    turns=np.asarray(turns, dtype=np.int64),
                )
                self._put(self.rollout_buffer, sample)
            self._sent += 1

    def _tell_zeros(self, names: list[str], rewards: np.ndarray, completions: list) -> None:
        if self._first_scores is None:
            return
        self._first_scores.append((rewards, completions))
        scores, texts = zip(*self._first_scores, strict=True)
        if sum(map(len, texts)) >= self.args.generation_batch_size:
            tell_zeros(names, torch.from_numpy(np.concatenate(scores, 1)), texts[0])
            self._first_scores = None

    def _put(self, to: queue.Queue, item) -> None:
        while not self._stopped.is_set():
            try:
                to.put(item, timeout=IDLE)
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
