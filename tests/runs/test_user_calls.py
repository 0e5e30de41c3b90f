"""
What TRL's trainers call of a user's: rewards, tools, environments and `rollout_func`, found in their signatures. Each
must end in time, in every thread, and may not end the process.
"""

import asyncio
import collections.abc
import inspect
import sys
import threading
import time
import typing
from types import MethodType

import pytest
from long_tests import rest_is_long
from turns import answer, build, conversations, spread_of_messages

from trl_quant.trainers.launch import TRAINERS


# What a user's function does instead of its work


def hangs():
    time.sleep(60)


def exits():
    sys.exit(0)


async def waits():
    await asyncio.Event().wait()


async def blocks_the_loop():
    time.sleep(60)


async def exits_later():
    sys.exit(0)


# Where a user's function stands: name -> the arguments of the trainer with one that calls `act`, and whether its error
# ends the run. `await_` makes it asynchronous


def rewards(act, await_):
    def reward(completions, **kwargs):
        act()
        return spread_of_messages(completions)

    async def later(completions, **kwargs):
        await act()
        return spread_of_messages(completions)

    return {"reward_funcs": later if await_ else reward}


def tools(act, await_):
    def note() -> str:
        """Takes a note."""
        act()
        return "ok"

    async def later() -> str:
        """Takes a note."""
        await act()
        return "ok"

    later.__name__ = "note"
    return {"tools": [later if await_ else note]}


def rollouts(act, await_):
    def rollout(prompts, trainer):
        act()
        return answer(prompts)

    return {"rollout_func": rollout}


class Environment:
    """Takes notes."""

    __slots__ = ()

    def reset(self, **kwargs) -> None: ...

    def note(self) -> str:
        """Takes a note."""
        return "ok"


def environments(method):
    """Environments whose `method` calls `act`; `__init__` is the factory."""

    def given(act, await_):
        def call(self, **kwargs):
            act()
            return 1.0 if method == "get_reward" else None

        async def later(self, **kwargs):
            await act()
            return 1.0 if method == "get_reward" else None

        body = later if await_ else call
        if method == "note":  # the model must know what it takes
            body = _noting(body)
        body.__name__, body.__doc__ = method, "Takes a note."
        return {"environment_factory": type("Shop", (Environment,), {method: body}), "tools": None}

    return given


def _noting(body):
    async def later(self):
        return await body(self)

    def call(self):
        return body(self)

    return later if inspect.iscoroutinefunction(body) else call


PLACES = {
    "reward_funcs": {"rewards": (rewards, True, True)},
    "tools": {"tools": (tools, False, True)},
    "rollout_func": {"rollouts": (rollouts, True, False)},
    "environment_factory": {  # ends the run, may be asynchronous
        "__init__": (environments("__init__"), True, False),
        "reset": (environments("reset"), True, False),
        "note": (environments("note"), False, True),
        "get_reward": (environments("get_reward"), True, True),
    },
}


def takes_calls(hint) -> bool:
    """Whether an annotation allows a function."""
    if getattr(hint, "_is_protocol", False):
        return "__call__" in vars(hint)
    is_function = collections.abc.Callable in (hint, typing.get_origin(hint))
    return is_function or any(map(takes_calls, typing.get_args(hint)))


def callables() -> dict[str, list[str]]:
    """The parameters of each of our trainers, as TRL annotates them, that take functions."""
    found = {}
    for name, trainer in TRAINERS.items():
        of_trl = next(kind for kind in trainer.__mro__ if kind.__module__.startswith("trl."))
        hints = typing.get_type_hints(of_trl.__init__)
        found[name] = [parameter for parameter, hint in hints.items() if takes_calls(hint)]
        ours = inspect.signature(trainer).parameters
        assert set(inspect.signature(of_trl).parameters) <= set(ours) or "given" in ours or "kwargs" in ours
    return found


def test_functions_are_found_in_signatures():
    assert callables()["grpo"] == ["reward_funcs", "tools", "rollout_func", "environment_factory"]
    assert not takes_calls(typing.get_type_hints(lambda: ...).get("return"))
    assert not takes_calls(list[int] | None) and takes_calls(dict[str, list[collections.abc.Callable]] | None)


def cases(*kinds: str) -> list[tuple]:
    """Every place of a function in these trainers; a parameter that is not among `PLACES` is an error."""
    found = callables()
    assert {name for names in found.values() for name in names} == {*PLACES}
    return [(kind, *place) for kind in kinds for name in found[kind] for place in PLACES[name].items()]


def outcome(path, kind: str, given: dict, seconds: float = 0.4) -> tuple[Exception | None, list[str]]:
    """The error that a run ended with, or `None`, and what its model was told."""
    told, error = [], None
    try:
        trainer = build(path, kind, given, reward_timeout=seconds)
        loop = trainer._tool_call_loop if hasattr(trainer, "_tool_call_loop") else None

        def listen(*args, **kwargs):
            result = loop(*args, **kwargs)
            messages = [message for completion in result[1] for message in completion]
            told.extend(message["content"] for message in messages if message["role"] == "tool")
            return result

        if loop is not None:
            trainer._tool_call_loop = listen
        trainer.train()
    except Exception as raised:
        error = raised
    return error, told


def in_another_thread(call, *args):
    results = []
    thread = threading.Thread(target=lambda: results.append(call(*args)))
    thread.start()
    thread.join()
    return results[0]


def here(call, *args):
    return call(*args)


def assert_guarded(found, ends_run: bool, kind: type, says: str) -> None:
    error, told = found
    if ends_run:
        assert type(error) is kind and says in str(error), error
        assert ", at step 0, " in str(error) and "start again" in str(error)
    else:
        assert error is None and told and all(says in one for one in told), (error, told)


@pytest.mark.parametrize("run", rest_is_long([here, in_another_thread]))
def test_a_function_that_hangs(tmp_path, run):
    """Synchronous ones in any thread; in GRPO all of them, in the other trainers those that they take."""
    for kind, name, (given, ends_run, _) in cases(*(TRAINERS if run is here else ["grpo"])):
        if kind in ("diffusion", "async_grpo") or (
            kind == "ppo" and name != "reset"
        ):  # one turn; a thread; the rest is GRPO's
            continue
        found = run(outcome, tmp_path / kind / name, kind, given(hangs, False))
        assert_guarded(found, ends_run, TimeoutError, "did not return within `reward_timeout`=0.4 seconds")


@pytest.mark.long
@pytest.mark.parametrize("act", rest_is_long([waits, blocks_the_loop]))
def test_an_asynchronous_function_that_hangs(tmp_path, act):
    for kind, name, (given, ends_run, may_wait) in cases("grpo"):
        if may_wait:
            found = outcome(tmp_path / name, kind, given(act, True))
            assert_guarded(found, ends_run, TimeoutError, "did not return within `reward_timeout`=0.4 seconds")


@pytest.mark.parametrize("act", rest_is_long([exits_later, exits]))
def test_a_function_that_exits(tmp_path, act):
    for kind, name, (given, ends_run, may_wait) in cases("grpo"):
        if act is exits or may_wait:
            found = outcome(tmp_path / name, kind, given(act, act is exits_later), 60)
            assert_guarded(found, ends_run, RuntimeError, "ended the process: it raised SystemExit(0)")


async def nothing_later(): ...


@pytest.mark.long
def test_functions_that_do_their_work(tmp_path):
    """In both ways, and with nothing left of the guards."""
    before = {name: vars(Environment)[name] for name in ("reset", "note")}
    for kind, name, (given, _, may_wait) in cases("grpo"):
        for act in [int, nothing_later] if may_wait else [int]:
            error, told = outcome(tmp_path / name / act.__name__, kind, given(act, act is nothing_later), 60)
            assert error is None and set(told) <= {"ok", "None"}, error
    assert {name: vars(Environment)[name] for name in before} == before


def test_a_blocked_loop_blocks_no_other_tool(tmp_path):
    """A tool that blocks its loop once; the calls after it are answered in another loop."""
    calls = []

    async def note() -> str:
        """Takes a note."""
        calls.append(1)
        if len(calls) == 1:
            time.sleep(60)
        return "ok"

    error, told = outcome(tmp_path, "grpo", {"tools": [note]})
    assert error is None and len(told) == 2 and told.count("ok") == 1


@pytest.mark.parametrize("returned", [nothing_later(), (i for i in ())], ids=["coroutine", "generator"])
def test_a_tool_that_returns_what_nobody_runs(tmp_path, returned):
    def note():
        """Takes a note."""
        return returned

    error, _ = outcome(tmp_path, "grpo", {"tools": [note]}, 60)
    assert isinstance(error, ValueError) and f"returned a {type(returned).__name__}, which nobody runs" in str(error)


@pytest.mark.parametrize("observation", [3, {"role": "user"}, 0.5])
def test_an_observation_that_is_no_text(tmp_path, observation):
    shop = type("Shop", (Environment,), {"reset": lambda self, **kwargs: observation})
    error, _ = outcome(tmp_path, "grpo", {"environment_factory": shop, "tools": None}, 60)
    assert isinstance(error, ValueError) and "`Shop.reset`, at step 0, returned a" in str(error)


@pytest.mark.parametrize("entries", [1, 2, 3])
def test_columns_that_a_rollout_func_adds(tmp_path, entries):
    """TRL gives row i the i-th entry, if there is one."""
    seen = []

    def reward(completions, score, **kwargs):
        seen.append(score)
        return [1.0, 2.0]

    given = {"rollout_func": lambda prompts, trainer: answer(prompts) | {"score": list(range(entries)), "same": "a"}}
    error, _ = outcome(tmp_path, "grpo", given | {"reward_funcs": reward}, 60)
    if entries == 2:
        assert error is None and seen == [[0, 1]]
    else:
        assert isinstance(error, ValueError) and f"returned {entries} entries in 'score' for 2 prompts" in str(error)


class Shelf(Environment):
    """An environment with an inherited method and a static one."""

    @staticmethod
    def count() -> int:
        """Counts."""
        return 3


def test_methods_are_restored(tmp_path):
    kinds = []

    def reward(completions, environments, **kwargs):
        shelf = environments[0]
        kinds.append((type(shelf), shelf.count(), shelf.note(), "note" in vars(Shelf)))
        return spread_of_messages(completions)

    before = inspect.getattr_static(Shelf, "count")
    given = {"environment_factory": {"shelf": Shelf}, "tools": None, "reward_funcs": reward}
    given["train_dataset"] = conversations(64).add_column("environment", ["shelf"] * 64)
    error, _ = outcome(tmp_path, "grpo", given, 60)
    assert error is None and kinds == [(Shelf, 3, "ok", True)], error
    assert inspect.getattr_static(Shelf, "count") is before and not {"note", "reset"} & {*vars(Shelf)}


# Refusals before a model is loaded


def undocumented(a):
    return a


def documented(a: int) -> int:
    """
    Returns a number.

    Args:
        a: The number.
    """
    return a


async def documented_later(a: int) -> int:
    """
    Returns a number.

    Args:
        a: The number.
    """
    return a


class Forgetful:
    def note(self) -> str:
        """Takes a note."""


class Late(Environment):
    async def reset(self, **kwargs): ...


class Silent(Environment):
    def take(self, a): ...


UNUSABLE = [
    ({"tools": documented}, "`tools` is a function. It must be a list"),
    ({"tools": [undocumented]}, "the model cannot be told what 'undocumented' takes"),
    ({"tools": [3]}, "`tools` has a int, 3"),
    ({"tools": [MethodType(lambda self: 1, 3), documented]}, "cannot be told what '<lambda>' takes"),
    ({"tools": [documented, documented]}, "several functions named 'documented'"),
    ({"rollout_func": 3}, "`rollout_func`=3 is a int"),
    ({"rollout_func": documented_later}, "`rollout_func` is asynchronous"),
    ({"rollout_func": lambda prompts: {}}, r"`rollout_func` cannot be called with \(prompts, trainer\)"),
    ({"environment_factory": 3}, "`environment_factory`=3 is a int"),
    ({"environment_factory": {}}, "has no environment"),
    ({"environment_factory": documented}, r"`environment_factory` cannot be called with \(\)"),
    ({"environment_factory": nothing_later}, "`environment_factory` is asynchronous"),
    ({"environment_factory": {"a": Environment, "b": Forgetful}}, r"`environment_factory\['b'\]`: Forgetful has no"),
    ({"environment_factory": Late}, "`Late.reset` is asynchronous"),
    ({"environment_factory": Silent}, "cannot be told what 'take' takes"),
    ({"environment_factory": {"a": Environment}}, "`train_dataset` needs a column 'environment'"),
    ({"environment_factory": {"a": Environment}, "train_dataset": None}, "without a `train_dataset` needs"),
    ({"environment_factory": Environment, "train_dataset": [1]}, "`train_dataset` is a list"),
    ({"environment_factory": Environment, "train_dataset": conversations(0)}, "`train_dataset`"),
    ({"environment_factory": Environment, "eval_dataset": conversations(0)}, "`eval_dataset` is empty"),
]


@pytest.mark.parametrize(("given", "says"), UNUSABLE, ids=[says for _, says in UNUSABLE])
def test_what_nobody_can_call_is_refused(tmp_path, given, says):
    with pytest.raises(ValueError, match=says):
        build(tmp_path, "grpo", given)


def test_distillation_awaits_no_tools(tmp_path):
    with pytest.raises(ValueError, match="'documented_later' is asynchronous, and TRL's distillation"):
        build(tmp_path, "distillation", {"tools": [documented_later]})
