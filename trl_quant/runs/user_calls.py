"""Guards the calls of functions that a user gives to a trainer: rewards, tools, environments and `rollout_func`.

TRL calls them in the training process. One that hangs on one rank stops the run on all ranks, and one that calls
`sys.exit` ends a run that looks complete. So each is wrapped:

| called | if it takes longer than `reward_timeout`, or exits | what it returns is checked |
|---|---|---|
| a reward, `get_reward` of an environment | the run ends | by [`~runs.reward_calls`] |
| a tool, a method of an environment | the model is told, as TRL tells it of any error | no coroutine, no generator |
| `environment_factory`, `reset` of an environment | the run ends | an observation: `None`, a text or content blocks |
| `rollout_func` | the run ends | by [`~runs.rollout_func`] |

It makes no difference whether a function is asynchronous, nor in which thread the trainer runs. What else a trainer
takes has no such limit: callbacks, optimizers and datasets belong to the training loop, and saving, uploading or
downloading may take any time. Reward models, tokenizers and the policy are modules and libraries that TRL runs itself.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from ..rollout.limits import CoroutineThread, called_within
from ..storage.run_checkpoints import how_to_go_on
from ..trl_seams import is_async
from .rollout_func import CheckedRollout


class UserCalls:
    """
    The calls of the functions that were given to a trainer.

    Args:
        trainer: The trainer, whose step is named in errors.
        args ([`~config.fields.QuantFields`]): Its configuration, with the limit `reward_timeout`.

    Attributes:
        warned (`set[str]`): What has returned NaN as a reward and was warned about.
    """

    def __init__(self, trainer, args):
        self.trainer, self.seconds, self.output_dir = trainer, args.reward_timeout, args.output_dir
        self.warned: set[str] = set()
        self._coroutines = CoroutineThread()
        self._kinds: dict[type, None] = {}  # classes of environments, in the order in which they came
        self._covered: ExitStack | None = None  # restores their methods
        self._fault: ValueError | None = None  # of a tool, which must end the run although TRL handles a tool's errors

    def guarded(self, given: dict) -> dict:
        """Returns the functions among the arguments of TRL's trainer, wrapped, by the names of the arguments."""
        wrapped = {}
        if given.get("tools"):
            wrapped["tools"] = [self.tool(tool, f"The tool {tool.__name__!r}") for tool in given["tools"]]
        if given.get("rollout_func"):
            wrapped["rollout_func"] = self.limited(
                CheckedRollout(given["rollout_func"]), "`rollout_func`", _checked_columns
            )
        factory = given.get("environment_factory")
        if isinstance(factory, dict):
            wrapped["environment_factory"] = {name: self._factory(one, f"[{name!r}]") for name, one in factory.items()}
        elif factory:
            wrapped["environment_factory"] = self._factory(factory)
        return wrapped

    def limited(
        self,
        function: Callable,
        called: str,
        take: Callable[[Any, dict], Any] = lambda returned, arguments: returned,
        ends_run: bool = True,
    ) -> Callable:
        """
        Returns `function`, synchronous or asynchronous as it is, with guarded calls.

        Args:
            function (`Callable`): The function of the user.
            called (`str`): What messages call it.
            take (`Callable`): Maps what it returned, and its keyword arguments, to the result; within the time limit.
            ends_run (`bool`): Whether an error ends the run. If not, the model reads its message.
        """

        def told(message: str) -> str:
            return self.at(called, message) if ends_run else f"{called} {message}"

        return guarded(function, self.seconds, told, self._coroutines, take)

    def at(self, called: str, message: str) -> str:
        """Returns the text of an error that ends the run: what was called, at which step, and how to go on."""
        return f"{self.now(called)} {message} {how_to_go_on(self.output_dir)}"

    def now(self, called: str) -> str:
        """Returns what was called, and at which step."""
        step = self.trainer.state.global_step if hasattr(self.trainer, "state") else 0  # 0 while it is built
        return f"{called}, at step {step},"

    def tool(self, function: Callable, called: str) -> Callable:
        """Returns a tool with guarded calls. TRL passes a tool's errors on to the model."""

        def content(returned, arguments: dict):
            if inspect.isawaitable(returned) or inspect.isgenerator(returned) or inspect.isasyncgen(returned):
                self._fault = ValueError(
                    self.at(
                        called,
                        f"returned a {type(returned).__name__}, which nobody runs: the model would read "
                        f"{str(returned)!r}. Return the result, or make it an `async def`.",
                    )
                )
                raise self._fault
            return returned

        return self.limited(function, called, content, ends_run=False)

    def _factory(self, factory: Callable, key: str = "") -> Callable:
        def take(environment, arguments: dict):
            kind = type(environment)
            if kind not in self._kinds:
                self._kinds[kind] = None
                if self._covered is not None:
                    self._cover(kind)
            return environment

        return self.limited(factory, f"`environment_factory`{key}", take)

    # Environments are the user's own objects, which rewards get as well. So their methods are wrapped in their classes,
    # and only while a generation is sampled and scored

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Context in which TRL samples and scores a generation."""
        before = self._covered
        with ExitStack() as self._covered:
            self._covered.callback(setattr, self, "_covered", before)
            for kind in self._kinds:
                self._cover(kind)
            yield
        self.check()

    def check(self) -> None:
        """Raises the error of a tool that must end the run, which TRL has passed on to the model."""
        if self._fault is not None:
            raise self._fault

    def _cover(self, kind: type) -> None:
        """Wraps the methods of a class of environments that TRL calls, until [`watched`] ends."""
        for name, function in inspect.getmembers(kind, inspect.isfunction):
            called = f"`{kind.__name__}.{name}`"
            if name == "reset":
                wrapped = self.limited(function, called, functools.partial(self._observation, called))
            elif name.startswith("_") or name == "get_reward":  # `get_reward` is among TRL's reward functions
                continue
            else:
                wrapped = self.tool(function, called)
            is_static = isinstance(inspect.getattr_static(kind, name), staticmethod)
            self._covered.enter_context(_replaced(kind, name, staticmethod(wrapped) if is_static else wrapped))

    def _observation(self, called: str, returned, arguments: dict) -> str | list | None:
        if returned is None or isinstance(returned, str | list):
            return returned
        raise ValueError(
            self.at(
                called,
                f"returned a {type(returned).__name__}. TRL appends it to the prompt: it must be a text, a "
                "list of content blocks or None.",
            )
        )


def guarded(
    function: Callable,
    seconds: float | None,
    told: Callable[[str], str],
    coroutines: CoroutineThread,
    take: Callable[[Any, dict], Any],
) -> Callable:
    """
    Returns `function`, synchronous or asynchronous as it is, with calls that neither hang nor end the process.

    Args:
        function (`Callable`): The function of the user.
        seconds (`float` or `None`): The limit of a call, `reward_timeout`; `None` for no limit.
        told (`Callable`): Maps what happened to the text of the error.
        coroutines ([`~rollout.limits.CoroutineThread`]): Runs the calls of an asynchronous function.
        take (`Callable`): Maps what it returned, and its keyword arguments, to the result; within the time limit.

    Raises:
        TimeoutError: In a call, once it has taken longer than `seconds`.
        RuntimeError: In a call that raised `SystemExit`.
    """

    def too_long() -> str:
        return told(f"did not return within `reward_timeout`={seconds:g} seconds.")

    @contextmanager
    def exit_refused() -> Iterator[None]:
        try:
            yield
        except SystemExit as error:
            raise RuntimeError(told(f"ended the process: it raised {error!r}.")) from error

    if is_async(function) and not inspect.isclass(function):

        async def awaited(*args, **kwargs):
            with exit_refused():
                return take(await function(*args, **kwargs), kwargs)

        @functools.wraps(function)
        async def call(*args, **kwargs):
            return await coroutines.finished_within(seconds, too_long, awaited(*args, **kwargs))
    else:

        def taken(*args, **kwargs):
            with exit_refused():
                return take(function(*args, **kwargs), kwargs)

        @functools.wraps(function, updated=())
        def call(*args, **kwargs):
            return called_within(seconds, too_long, taken, *args, **kwargs)

    return call


def _checked_columns(output: dict, arguments: dict) -> dict:
    """Raises `ValueError` for a column for rewards that has no entry for each prompt: TRL would shift or drop some."""
    count = len(output["completion_ids"])
    for name, values in output.items():
        if isinstance(values, list) and len(values) != count:
            raise ValueError(f"`rollout_func` returned {len(values)} entries in {name!r} for {count} prompts.")
    return output


@contextmanager
def _replaced(kind: type, name: str, value) -> Iterator[None]:
    """Context in which a class has another attribute. Afterwards it has or inherits the same one as before."""
    is_own, before = name in vars(kind), inspect.getattr_static(kind, name)
    setattr(kind, name, value)
    try:
        yield
    finally:
        if is_own:
            setattr(kind, name, before)
        else:
            delattr(kind, name)
