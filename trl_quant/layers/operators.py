"""Operators of the compiler's graph: functions that torch.compile calls and does not look into."""

from collections.abc import Callable
from functools import partial

import torch


_library = torch.library.Library("trl_quant", "FRAGMENT")


def operator(name: str, *tags: torch.Tag) -> Callable[[Callable], Callable]:
    """
    Returns a decorator that makes a function the operator `trl_quant::name`. The function writes to no argument, and
    returns new tensors.

    `torch.library.custom_op` does the same. What it does in addition at each call takes the host longer than launching
    a kernel.
    """

    def register(function: Callable) -> Callable:
        schema = torch.library.infer_schema(function, mutates_args=())
        _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
        _library.impl(name, function, "CompositeExplicitAutograd")
        return getattr(torch.ops.trl_quant, name).default

    return register


# Decorates a function that returns empty tensors with the shapes and types of an operator's results
shapes_of = partial(torch.library.register_fake, lib=_library)
