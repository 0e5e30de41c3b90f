"""
Operators of the compiler's graph: functions that torch.compile calls and does not look into.

The compiler traces a layer once for all later calls, but a weight must be checked for writes at each call, and
quantized again after them. So an operator does not get codes. It gets the layer's number, and asks that layer for its
codes when it runs. The number is the value of a tensor, which the compiler does not read: it compiles equal layers
once.
"""

import itertools
from collections.abc import Callable
from functools import partial
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from ..formats import QuantizedTensor


_library = torch.library.Library("trl_quant", "FRAGMENT")

UNSAFE = torch.Tag.cudagraph_unsafe  # keeps an operator out of CUDA graphs, whose replays would not ask for codes


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


_layers: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()  # number -> layer
_numbers = itertools.count()


class Numbered:
    """A layer with a number, by which an operator finds it. A copy of the layer gets a number of its own."""

    number: Tensor  # of shape (), int64, on the CPU

    def enroll(self) -> None:
        """Gives the layer its number."""
        number = next(_numbers)
        _layers[number] = self
        object.__setattr__(self, "number", torch.tensor(number, device="cpu"))

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self.enroll()


def codes_of(number: Tensor, joint: bool = False) -> QuantizedTensor:
    """
    Returns the quantized weight (out, in) of the layer with this number or, if `joint`, of all layers that share its
    input.
    """
    operand = _layers[number.item()].operand()
    if not joint:
        return operand.codes()
    return operand.layer.joint.codes([layer.operand() for layer in operand.layer.joint.layers])
