"""
Describes the function that a model computes, as far as that can be seen beside its weights: the classes of its modules,
their plain attributes, and their hooks. An engine has none of what is changed in the policy after it was loaded: a
forward hook, another activation, a scaling or an epsilon. So where the description changes, the engine is compared with
the policy again.
"""

from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn


PLAIN = (bool, int, float, str, type(None))
# Set by every `train` and `eval`; DeepSpeed's count of backward passes
NOT_OF_THE_FUNCTION = ("training", "applied_pre_backward_ref_cnt")


def function_of(model: nn.Module) -> dict[str, tuple]:
    """
    Returns what can be seen of a model's function, without its weights.

    Returns:
        `dict[str, tuple]`: For each module by its name, its class, its plain attributes and functions, and its hooks.
        The model itself, named `""`, also has its config.
    """
    found = {}
    for name, module in model.named_modules():
        counted = {key: value for key, value in vars(module).items() if _counts(key, value)}
        attributes = {key: _seen(value) for key, value in counted.items() if not _is_of_class(module, key, value)}
        hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        found[name] = type(module), attributes, tuple(_seen(hook) for hook in hooks if not _is_of_library(hook))
    config = getattr(model, "config", None)
    found[""] += (config.to_dict() if config is not None else None,)
    return found


def _is_of_library(hook: Callable) -> bool:
    """
    Whether a hook is transformers' or DeepSpeed's own: those of gradient checkpointing and of ZeRO-3 are registered
    again in each step.
    """
    return isinstance(hook, FunctionType) and hook.__module__.startswith(("transformers.", "deepspeed."))


def _is_of_class(module: nn.Module, name: str, value: Any) -> bool:
    """
    Whether an attribute is the method that the module's class has under this name, or what a decorator there wraps.
    accelerate stores it on a model when it takes its own wrapper off.
    """
    method = getattr(type(module), name, None)
    while method is not None:
        if getattr(value, "__func__", value) is method:
            return True
        method = getattr(method, "__wrapped__", None)
    return False


def _counts(name: str, value: Any) -> bool:
    if name.startswith(("_", "ds_")) or name in NOT_OF_THE_FUNCTION:  # `ds_`: where ZeRO-3 has the weights
        return False
    if str(getattr(value, "__module__", "")).startswith("deepspeed."):
        return False
    return isinstance(value, PLAIN) or (isinstance(value, Callable) and not isinstance(value, nn.Module | Tensor))


def _seen(value: Any) -> Any:
    """
    Returns a value that equals that of a copy. Methods are compared without the module that they are bound to, and
    functions by their code and what it refers to, since transformers makes some of them anew in each step.
    """
    if isinstance(value, MethodType):
        value = value.__func__
    if not isinstance(value, FunctionType):
        return value
    given = [*(value.__defaults__ or ()), *(cell.cell_contents for cell in value.__closure__ or ())]
    return value.__code__, *(one if isinstance(one, PLAIN) else id(one) for one in given)


def first_change(before: dict[str, tuple], now: dict[str, tuple]) -> str | None:
    """Returns the name of the innermost module at which two descriptions first differ; `None` if they are equal."""
    changed = [name for name in (*now, *(before.keys() - now.keys())) if before.get(name) != now.get(name)]
    return max(changed, key=lambda name: name.count("."), default=None)
