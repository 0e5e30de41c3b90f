"""
Computes a fingerprint of the policy's weights, which tells an engine whether it still holds the current weights.

A sync belongs to an optimizer step, but weights also change between two steps: an evaluation swaps in averaged weights,
`load_state_dict` or `load_best_model_at_end` loads others, an adapter is switched, disabled, merged or scaled. So an
engine stores the fingerprint of the weights at its last sync, and compares it with the policy's before each generation.

| what the stream of weights depends on | what the fingerprint contains |
|---|---|
| the values, however they were written | a checksum of each parameter |
| the tree of modules, and which parameters are tied | names, shapes, types, and where each parameter occurs |
| adapters: active, disabled, merged, scaled | these settings of each adapted layer |

PyTorch's version counters would cost less, but they miss writes through `.data`, which is how weights are usually
averaged and how PEFT merges. The checksums take one pass over the memory; on a GPU one Triton kernel reads all
parameters.

The checksum of the words `x_1, x_2, ...`, 8 bytes each, is

    sum_i fold(x_i) * m_i  mod 2^64,    m_i = fold(i g mod 2^64) or 1,    fold(x) = x xor (x >> 31),

where `g` is 2^64 divided by the golden ratio, rounded to an odd number. `fold` is one-to-one and `m_i` is odd, so a
change of one word always changes the checksum. `m_i` differs from word to word, so the checksum also changes if rows
are exchanged, negated or overwritten with a constant, which would cancel out in a plain sum or an exclusive or. `fold`
shifts by 31 bits, because a shift by 32 would combine the sign bits of the two float32 of a word: if both signs
changed, only the highest bit of `fold(x)` would change, and the changes of two such words would cancel out.
"""

from collections.abc import Hashable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import Tensor, nn

from .tensors import local_part


WORD = 8  # bytes
GOLDEN = -7046029254386353131  # g as a signed integer
LOW = 0x1FFFFFFFF  # the 33 bits that a logical shift by 31 leaves; torch's shift fills the others with the sign
ADAPTED = (BaseTunerLayer, AuxiliaryTrainingWrapper)
PART = 2**16  # words that the PyTorch version of the kernel reads at once; they fit into a CPU's cache


class Fingerprint(NamedTuple):
    """
    What identifies the weights of a model: equal fingerprints mean equal values, tree, ties and settings, up to
    collisions of the checksum.

    Attributes:
        tree (`tuple`): Names of modules and parameters, and which parameter stands at each place.
        shapes (`tuple`): Shape and type of each parameter.
        settings (`tuple`): Settings of each adapted layer.
        sums (`tuple[int, ...]`): The checksum of each parameter.
    """

    tree: tuple[Hashable, ...]
    shapes: tuple[Hashable, ...]
    settings: tuple[Hashable, ...]
    sums: tuple[int, ...]


@torch.no_grad()
def fingerprint(model: nn.Module) -> Fingerprint:
    """
    Computes the fingerprint of a model's parameters and adapter settings. It reads only this rank's shard of a sharded
    parameter, so one rank may find a change that others do not.

    Args:
        model (`nn.Module`): The policy, with or without PEFT's wrapper.
    """
    tree, params, layers = _read(model)
    words = [whole_words(param) for param in params]
    sums_by_device = checksums(words)  # a GPU computes while the host continues
    shapes = tuple((param.shape, param.dtype) for param in params)
    settings = tuple(_settings(layer) for layer in layers)
    sums = {on_device.device: iter(on_device.tolist()) for on_device in sums_by_device}
    return Fingerprint(tuple(tree), shapes, settings, tuple(next(sums[tensor.device]) for tensor in words))


def changed_places(model: nn.Module, before: Fingerprint | None, now: Fingerprint) -> set[str] | None:
    """
    Returns the names of the parameters whose values differ between two fingerprints of a model; `now` is the current
    one. Where the settings of an adapted layer differ, the name of its weight stands for them. Returns `None` if there
    is no fingerprint of before, or if tree, ties, shapes or types differ.
    """
    if before is None or (before.tree, before.shapes) != (now.tree, now.shapes):
        return None
    _, params, layers = _read(model)
    names = {id(param): name for name, param in model.named_parameters()}
    names |= {id(module): f"{name}.weight" for name, module in model.named_modules()}
    pairs = [*zip(params, before.sums, now.sums, strict=True), *zip(layers, before.settings, now.settings, strict=True)]
    return {names[id(owner)] for owner, old, new in pairs if old != new}


def checksum(words: Tensor) -> Tensor:
    """
    Computes the checksum that the module's docstring defines.

    Args:
        words (`Tensor` of shape (words,), int64): The words `x_i`.

    Returns:
        `Tensor` of shape (), int64: The checksum.
    """
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, len(words), PART):
        part = words[start : start + PART]
        place = torch.arange(start + 1, start + 1 + len(part), device=words.device)
        total += (_fold(part) * (_fold(place * GOLDEN) | 1)).sum()
    return total


def _fold(x: Tensor) -> Tensor:
    return x ^ ((x >> 31) & LOW)


def _read(model: nn.Module) -> tuple[list[Hashable], list[nn.Parameter], list[nn.Module]]:
    """
    Reads the tree of a model: the names of each module's children and parameters, followed by the index of the
    parameter at each place. Also returns the parameters, each once, and the adapted layers. `named_parameters` and
    `modules` would take ten times as long.
    """
    tree, places, layers, waiting = [], [], [], [model]
    while waiting:
        module = waiting.pop()
        if module is None:
            continue
        tree += tuple(module._modules), tuple(module._parameters)
        places += module._parameters.values()
        waiting += module._modules.values()
        if isinstance(module, ADAPTED):
            layers.append(module)
    params = {id(param): param for param in places if param is not None}
    indices = {key: index for index, key in enumerate(params)}
    return tree + [indices.get(id(param)) for param in places], list(params.values()), layers


def whole_words(param: nn.Parameter) -> Tensor:
    """
    Returns this rank's shard of a parameter as whole words: contiguous, aligned to `WORD`, and padded with zeros to a
    multiple of it.
    """
    tensor = local_part(param)
    if tensor.is_contiguous() and tensor.nbytes % WORD == 0 and tensor.data_ptr() % WORD == 0:
        return tensor
    data = tensor.contiguous().reshape(-1).view(torch.uint8)
    return F.pad(data, (0, -len(data) % WORD))


def checksums(tensors: list[Tensor]) -> list[Tensor]:
    """Computes the checksums of tensors, in one int64 tensor of shape (tensors,) for each device."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        by_device.setdefault(tensor.device, []).append(tensor)
    return [_on_one_device(on_device) for on_device in by_device.values()]


def _on_one_device(tensors: list[Tensor]) -> Tensor:
    if tensors[0].is_cuda:
        from ..kernels import checksum as kernels

        return kernels.checksums(tensors)
    return torch.stack([checksum(tensor.reshape(-1).view(torch.int64)) for tensor in tensors])


def _settings(layer: BaseTunerLayer | AuxiliaryTrainingWrapper) -> Hashable:
    """Returns the settings of an adapted layer on which the weights of its forward pass depend."""
    scaling = tuple(sorted(getattr(layer, "scaling", {}).items()))
    return tuple(layer.active_adapters), layer.disable_adapters, tuple(layer.merged_adapters), scaling
