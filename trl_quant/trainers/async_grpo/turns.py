"""
Completions of several turns beside a training: tools and environments.

TRL's worker leads each conversation in a coroutine: it renders the messages with the chat template, waits for a turn,
parses it, calls the tools, and adds their results as messages. [`Conversations`] is that worker, with turns from the
engine of the [`~trainers.async_grpo.sampling_thread.SamplingThread`], which draws those of all conversations together:

    sampling | run the conversations | draw the turns that they wait for | run | draw ...
    tools    |                ------ each in a thread of its own ------

The conversations run in the sampling thread, between two of its draws. Tools, `reset` and `get_reward` run in other
threads, so neither a draw nor a sync waits for them.

A [`Turn`] has a prompt x_k and drawn tokens y_k. TRL renders all messages anew for each turn, and [`rows_of`] lets it
join the turns to rows of training:

| x_(k+1) begins with | y_k |
|---|---|
| x_k y_k | stays in its row, which goes on with the rest of x_(k+1), untrained, and y_(k+1) |
| all but the last d tokens of this, d at most those of y_k and below `fork_threshold_tokens` | loses these d tokens |
| neither | stays in its row. Another row begins with x_(k+1), untrained, and y_(k+1) |

So each drawn token is trained on at most once, after the tokens that it was drawn after. It has the version that drew
it; tokens that a template, a tool or an environment wrote have none.

`max_completion_length` limits all tokens after x_1, as in the other trainers: a turn k may have at most
`max_completion_length` - (|x_k| - |x_1|) tokens. If none is left, the conversation ends with the turn before, and the
results of the tools that this one called are left out.
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial

from trl.experimental.async_grpo.async_rollout_worker import (
    TrainingSequence,
    TurnRecord,
    _AsyncRolloutLoop,
    _chain_to_sequences,
)

from ...config.lengths import Context
from ...rollout.engine import Request
from ...rollout.limits import leave_threads_at_exit
from ...runs.reward_calls import rewards_of
from ...runs.user_calls import UserCalls
from ...trl_seams import is_async
from ..groups import Completion, Group


BETWEEN_DRAWS = 0.02  # seconds for which a draw waits for conversations that are between two turns
SHORTLY = 0.001  # seconds between two looks at them


@dataclass
class Turn(Completion):
    """
    What is drawn after one prompt: a whole completion, or a turn of it.

    Parameters:
        prompt (`list[int]`): Token ids of the prompt, with all turns before.
        number (`int`): The number of the completion in its group.
        first (`int` or `None`): Tokens of the prompt of the completion's first turn; `None` if this is the first one.
        answer (`asyncio.Future` or `None`): What a conversation waits for.
    """

    prompt: list[int] = field(default_factory=list)
    number: int = 0
    first: int | None = None
    answer: asyncio.Future | None = None

    def add(self, *sampled) -> None:
        super().add(*sampled)
        if self.has_ended and self.answer is not None:
            self.answer.set_result(None)

    def request(self) -> Request:
        """Returns the request for the rest of the turn. All tokens after the first turn's prompt count as sampled."""
        first = len(self.prompt) if self.first is None else self.first
        return Request(self.prompt[:first], copies=1, sampled=[*self.prompt[first:], *self.token_ids])


@dataclass
class Spoken:
    """
    A completion that has ended.

    Parameters:
        prompt (`str` or `list[dict]`): The prompt, with what an environment's `reset` has added.
        completion (`str` or `list[dict]`): The text, or the messages of the model and of tools.
        turns (`list[Turn]`): Its turns.
        calls (`int`), failures (`int`): Number of calls of tools, and of those that failed.
        own (`dict[type, float | None]`): The reward that its environment gave, by the environment's class.
    """

    prompt: str | list[dict]
    completion: str | list[dict]
    turns: list[Turn]
    calls: int = 0
    failures: int = 0
    own: dict[type, float | None] = field(default_factory=dict)

    @property
    def token_ids(self) -> list[int]:
        """The tokens of all turns, which are what the policy wrote."""
        return [token for turn in self.turns for token in turn.token_ids]


def rows_of(turns: list[Turn], fork_threshold_tokens: int) -> list[tuple[TrainingSequence, list[int], list[int]]]:
    """
    Joins the turns of a completion to rows of training, as TRL's worker does.

    Returns:
        `list[tuple]`: Each row; of each of its tokens the version that drew it, and its turn in the completion, from
        1. Both are 0 where the completion mask is 0.
    """

    def joined(numbers: list[list[float]]) -> list[TrainingSequence]:
        records = [TurnRecord(turn.prompt, turn.token_ids, own) for turn, own in zip(turns, numbers, strict=True)]
        return _chain_to_sequences(records, "", fork_threshold_tokens)[0]

    def carried(numbers: list[list[int]]) -> list[list[int]]:
        return [[int(number) for number in row.old_log_probs] for row in joined(numbers)]

    # TRL carries a number with each token: its log-probability, then its version, then its turn
    rows, versions = joined([turn.logps for turn in turns]), carried([turn.versions for turn in turns])
    places = carried([[place] * len(turn.token_ids) for place, turn in enumerate(turns, 1)])
    return list(zip(rows, versions, places, strict=True))


def lengths_of(group: Group) -> list[int]:
    """Returns the number of tokens that were drawn of each completion of a group."""
    lengths = Counter()
    for turn in group.completions:
        lengths[turn.number] += len(turn.token_ids)
    return list(lengths.values())


@dataclass
class Conversing(Group):
    """
    A group of conversations. Its `completions` are the turns of all of them so far, and it has no prompt of its own.

    Parameters:
        tasks (`list[asyncio.Task]`): The conversations.
        is_dropped (`bool`): Whether nobody will train on them.
    """

    tasks: list[asyncio.Task] = field(default_factory=list)
    is_dropped: bool = False

    @property
    def has_finished(self) -> bool:
        return all(task.done() for task in self.tasks)

    @property
    def spoken(self) -> list[Spoken]:
        """The completions, once all have ended."""
        return [task.result() for task in self.tasks]


@dataclass
class Conversation:
    """
    Parameters:
        group (`Conversing`): Its group.
        number (`int`): Its number in the group.
        turns (`list[Turn]`): Its turns so far.
        is_full (`bool`): Whether there is no room for another turn.
    """

    group: Conversing
    number: int
    turns: list[Turn] = field(default_factory=list)
    is_full: bool = False


CURRENT: ContextVar[Conversation] = ContextVar("conversation")


class Dropped(Exception):
    """Ends a conversation that nobody will train on."""


class Conversations(_AsyncRolloutLoop):
    """
    The conversations of a run. All methods belong to the sampling thread.

    Args:
        args ([`~config.QuantAsyncGRPOConfig`]): The run's configuration.
        engine ([`~rollout.RolloutEngine`]): What draws the turns. Its tokenizer renders and parses them.
        metrics_queue (`queue.Queue`): Gets the metrics of TRL's worker.
        calls ([`~runs.user_calls.UserCalls`]): Guards the calls of `get_reward`.
        context ([`~config.lengths.Context`] or `None`): What the sampler takes at most.
        given: `reward_funcs`, and with guarded calls `tools` and `environment_factory`.
    """

    def __init__(self, args, engine, metrics_queue, calls: UserCalls, context: Context | None, **given):
        of_its_process = ("rollout_buffer", "model_version_value", "heartbeat_value", "failed_event")
        super().__init__(
            **dict.fromkeys(("model_name", *of_its_process, "exception_info_queue")),
            dataset=(),
            processing_class=engine.tokenizer,
            eos_token_ids=engine.eos_token_ids,
            metrics_queue=metrics_queue,
            num_generations=args.num_generations,
            max_inflight_tasks=max(args.max_inflight_tasks, args.num_generations),
            max_tokens=args.max_completion_length,
            chat_template_kwargs=args.chat_template_kwargs,
            max_tool_calling_iterations=args.max_tool_calling_iterations,
            fork_threshold_tokens=args.fork_threshold_tokens,
            **given,
        )
        self.calls = calls
        self.longest = context.tokens if context is not None and context.ends else math.inf
        self._running: list[asyncio.Task] = []

    @property
    def kinds(self) -> list[type]:
        """The classes of environments that give rewards."""
        return self._env_reward_types

    def begun(self, place: int, row: dict, version: int) -> Conversing:
        """Starts the conversations of a row of the data, in the group of this place."""
        group = Conversing(place, place, [], version, [])
        numbers = range(self.num_generations)
        group.tasks = [self._loop.create_task(self._converse(Conversation(group, i), row)) for i in numbers]
        self._running += group.tasks
        return group

    def drop(self, group: Conversing) -> None:
        """Ends the conversations of a group: one that waits for a turn at once, another when its tools have ended."""
        group.is_dropped = True
        for turn in group.completions:
            if not turn.has_ended:
                turn.answer.set_exception(Dropped())

    def run(self, groups: list[Conversing]) -> None:
        """
        Runs the conversations until each has ended or waits for a turn, but no longer than `BETWEEN_DRAWS`: tools go on
        meanwhile. Raises the error of one that has failed.

        Args:
            groups (`list[Conversing]`): The groups in flight.
        """
        self._loop.run_until_complete(self._run_shortly(groups))

    async def _run_shortly(self, groups: list[Conversing]) -> None:
        deadline = time.monotonic() + BETWEEN_DRAWS
        while True:
            await asyncio.sleep(SHORTLY)
            for task in self._running:
                if task.done():
                    task.result()
            self._running = [task for task in self._running if not task.done()]
            if not self._between_turns(groups) or time.monotonic() >= deadline:
                return

    def _between_turns(self, groups: list[Conversing]) -> int:
        """Returns the number of conversations that have not ended and wait for no turn."""
        return len(self._running) - sum(not turn.has_ended for group in groups for turn in group.completions)

    def close(self, groups: list[Conversing]) -> None:
        """Ends all conversations, of which `groups` are in flight. Tools that have not returned are left behind."""
        if self._between_turns(groups):
            leave_threads_at_exit()
        for task in self._running:
            task.cancel()
        self._loop.run_until_complete(self._ended())
        self._loop.close()
        self._tool_pool.shutdown(wait=False, cancel_futures=True)

    async def _ended(self) -> None:
        await asyncio.gather(*self._running, return_exceptions=True)

    # A conversation

    async def _converse(self, conversation: Conversation, row: dict) -> Spoken | None:
        """Returns a completion of a row of the data; `None` if its group was dropped."""
        CURRENT.set(conversation)
        try:
            async with self._opened(row) as (environment, tools, prompt):
                by_name = {tool.__name__: tool for tool in self._standalone_tools}
                for method in tools[len(by_name) :]:
                    by_name[method.__name__] = getattr(environment, method.__name__)
                completion, _, _, calls, failures, _ = await self._generate_one(prompt, tool_dict=by_name, tools=tools)
                if conversation.is_full:  # leave out the turn without tokens, and the results that it does not answer
                    completion.pop()
                    while completion[-1]["role"] == "tool":
                        completion.pop()
                own = await self._own_reward(environment, prompt, completion)
                return Spoken(prompt, completion, conversation.turns, calls, failures, own)
        except Dropped:
            return None

    async def _generate_one_turn(self, prompt_ids: list[int]) -> tuple[list[int], list[float]]:
        """Waits for a turn, and returns its tokens with their log-probabilities, in nats; none if there is no room."""
        conversation = CURRENT.get()
        turns = conversation.turns
        if conversation.group.is_dropped:
            raise Dropped
        if conversation.is_full:
            raise ValueError("The tokenizer's `parse_response` has read a call of a tool in a turn without tokens.")
        first = len(turns[0].prompt) if turns else None
        if turns and (len(prompt_ids) - first >= self.max_tokens or len(prompt_ids) >= self.longest):
            conversation.is_full = True
            return [], []
        answer = self._loop.create_future()
        turn = Turn(prompt=prompt_ids, number=conversation.number, first=first, answer=answer)
        turns.append(turn)
        conversation.group.completions.append(turn)
        await turn.answer
        return turn.token_ids, turn.logps

    @asynccontextmanager
    async def _opened(self, row: dict) -> AsyncIterator[tuple[object, list[Callable], list[dict]]]:
        """Context of the environment of a row, if there is one: with its tools and the prompt that it has completed."""
        if self.environment_factories is None:
            yield None, self.tools, row["prompt"]
            return
        name = row.get("environment") if self._multi_environment else None
        if name not in self.environment_factories:
            known = [*self.environment_factories]
            raise ValueError(f"A row has the environment {name!r}, and `environment_factory` has {known}.")
        pool = self._environment_pool[name]
        make = self.environment_factories[name]
        environment = pool.pop() if pool else await self._loop.run_in_executor(self._tool_pool, make)
        try:
            columns = {key: value for key, value in row.items() if key != "environment" or not self._multi_environment}
            observation = await self._timed("env/reset_s", environment.reset, **columns)
            prompt = row.get("prompt") or [{"role": "user", "content": ""}]
            yield environment, self._env_tools[name], observed(prompt, observation)
        finally:
            pool.append(environment)

    async def _own_reward(self, environment, prompt: list[dict], completion: list[dict]) -> dict[type, float | None]:
        """Returns the reward of an environment that gives one, by its class."""
        kind = type(environment)
        if kind not in self._env_reward_types:
            return {}
        called = f"`{kind.__name__}.get_reward`"

        def checked(returned, arguments: dict) -> float | None:
            return rewards_of(self.calls, called, [returned], [prompt], [completion])[0]

        get_reward = self.calls.limited(environment.get_reward, called, checked)
        return {kind: await self._timed("env/reward_s", get_reward)}

    async def _timed(self, metric: str, function: Callable, /, **arguments):
        """Calls a function of an environment, in another thread unless it is asynchronous, and logs its seconds."""
        began = time.monotonic()
        if is_async(function):
            returned = await function(**arguments)
        else:
            returned = await self._loop.run_in_executor(self._tool_pool, partial(function, **arguments))
        self._push_metrics({metric: (time.monotonic() - began, 1)})
        return returned


def observed(prompt: list[dict], observation: str | list[dict] | None) -> list[dict]:
    """Returns a prompt whose last message goes on with what an environment's `reset` has returned."""
    if observation is None:
        return prompt
    content = prompt[-1]["content"]
    if type(content) is not type(observation):
        content, observation = (
            [{"type": "text", "text": part}] if isinstance(part, str) else part for part in (content, observation)
        )
    return [*prompt[:-1], {**prompt[-1], "content": content + observation}]
