"""The checks of [`before_loading`] on tools, environments and `rollout_func`. Those on rewards are in [`data`]."""

import inspect
from collections.abc import Callable
from types import MethodType

from datasets import Dataset
from transformers.utils import get_json_schema
from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException
from trl.trainer.utils import is_async_callable

from ..tasks.data import check_conversation
from .data import evaluated


def check_callables(args, given: dict, train_dataset, eval_dataset) -> None:
    """
    Raises `ValueError` for functions that TRL cannot call.

    Args:
        args ([`~config.fields.QuantFields`]): The trainer's configuration.
        given (`dict`): The arguments of TRL's trainer.
        train_dataset, eval_dataset: The datasets, whose column 'environment' chooses an environment.
    """
    if given.get("tools"):
        _check_tools(given["tools"], takes_async=args.has_rewards)  # TRL's distillation awaits no tools
    if given.get("rollout_func") is not None:
        _check_call("rollout_func", given["rollout_func"], "prompts", "trainer")
    factory = given.get("environment_factory")
    if factory is None:
        return
    if factory == {}:
        raise ValueError("`environment_factory`={} has no environment.")
    factories = factory if isinstance(factory, dict) else {None: factory}
    for name, one in factories.items():
        _check_environment("environment_factory" if name is None else f"environment_factory[{name!r}]", one)
    if train_dataset is None and (isinstance(factory, dict) or args.max_steps <= 0):
        needed = "a `train_dataset` with a column 'environment'" if isinstance(factory, dict) else "`max_steps`"
        raise ValueError(f"`environment_factory` without a `train_dataset` needs {needed}.")
    if isinstance(factory, dict):
        for name, dataset in {"train_dataset": train_dataset, **evaluated(eval_dataset)}.items():
            _check_chosen(name, dataset, factories)


def check_conversations(datasets: dict) -> None:
    """
    Raises `ValueError` for prompts that are plain text, in which the model would not be told of its tools.

    Args:
        datasets (`dict`): The datasets of a run by their names in messages. Streams are not read.
    """
    for name, dataset in datasets.items():
        if isinstance(dataset, Dataset) and len(dataset):
            check_conversation(f"`{name}`", dataset[0])


def _check_tools(tools, takes_async: bool) -> None:
    if not isinstance(tools, list | tuple):
        raise ValueError(f"`tools` is a {type(tools).__name__}. It must be a list of functions.")
    for tool in tools:
        _check_schema("tools", tool)
        if is_async_callable(tool) and not takes_async:
            raise ValueError(f"`tools`: {tool.__name__!r} is asynchronous, and TRL's distillation awaits no tools.")
    names = [tool.__name__ for tool in tools]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ValueError(f"`tools` has several functions named {twice[0]!r}. The model calls them by their names.")


def _check_schema(field: str, tool: Callable) -> None:
    """Raises `ValueError` unless the model can be told what a function takes."""
    if not callable(tool) or not hasattr(tool, "__name__"):
        raise ValueError(f"`{field}` has a {type(tool).__name__}, {tool!r:.80}. A tool is a function with a name.")
    try:
        get_json_schema(tool)
    except (DocstringParsingException, TypeHintParsingException) as error:
        raise ValueError(f"`{field}`: the model cannot be told what {tool.__name__!r} takes. {error}") from error


def _check_call(field: str, function: Callable, *arguments: str) -> None:
    """Raises `ValueError` unless TRL can call a function with these arguments, and need not await it."""
    if not callable(function):
        raise ValueError(f"`{field}`={function!r:.80} is a {type(function).__name__}. It must be a function.")
    if is_async_callable(function) and not inspect.isclass(function):
        raise ValueError(f"`{field}` is asynchronous, and TRL does not await it. Pass a function that is not.")
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        raise ValueError(f"`{field}` cannot be called with ({', '.join(arguments)}): {error}.") from error
    except ValueError:  # a builtin without a signature
        return


def _check_environment(field: str, factory: Callable) -> None:
    """Raises `ValueError` unless a factory, and the class that it may be, can make environments for TRL."""
    _check_call(field, factory)
    if not inspect.isclass(factory):
        return
    methods = dict(inspect.getmembers(factory, inspect.isfunction))
    if "reset" not in methods:
        raise ValueError(f"`{field}`: {factory.__name__} has no method `reset`.")
    if is_async_callable(methods["reset"]):
        raise ValueError(f"`{field}`: `{factory.__name__}.reset` is asynchronous, and TRL does not await it.")
    for name, method in methods.items():
        if not name.startswith("_") and name not in ("reset", "get_reward"):
            is_static = isinstance(inspect.getattr_static(factory, name), staticmethod)
            _check_schema(field, method if is_static else MethodType(method, factory))


def _check_chosen(name: str, dataset, factories: dict) -> None:
    """Raises `ValueError` for rows of a dataset whose environment has no factory. Streams are checked by TRL."""
    if not isinstance(dataset, Dataset) or dataset.format["type"] == "custom":
        return
    column = dataset.unique("environment") if "environment" in dataset.column_names else [None]
    unknown = sorted({repr(chosen) for chosen in column if chosen not in factories})
    if unknown:
        raise ValueError(
            f"`{name}` needs a column 'environment' with keys of `environment_factory`, {[*factories]}. It has "
            f"{', '.join(unknown)}."
        )
