r"""
Computes layers that train in the precision of their sampler and share an input, such as q, k and v, as one product, as
an engine does. A layer that shares its input with no other is a product of one part.

    [Y_1 ... Y_n] = Q(X) [Q(W_1); ...; Q(W_n)]^T + [b_1 ... b_n]
    dX            = [dY_1 ... dY_n] [Q(W_1); ...; Q(W_n)]
    dW_i          = dY_i^T Q(X)

With a LoRA adapter that the engine merges, W_i is W_i + s_i B_i A_i. Instead of dW_i there are

    dA_i = s_i (dY_i B_i)^T Q(X)
    dB_i = dY_i^T (Q(X) (s_i A_i)^T)

An adapter that the engine keeps beside its base multiplies X itself, in 16 bits. Then X stands for Q(X) in these two
gradients, and the adapter adds to Y_i and dX:

    Y_i += X (s_i A_i)^T B_i^T
    dX  += dY_1 B_1 (s_1 A_1) + ... + dY_n B_n (s_n A_n)

| symbol | here | shape |
|---|---|---|
| `X`, `dX` | | (..., in) |
| `Q(W_i)` | codes of a [`Part`] | (out_i, in) |
| `Y_i`, `dY_i` | | (..., out_i) |
| `b_i`, `A_i`, `B_i`, `s_i` | bias and adapter of a [`Part`] | (out_i,), (rank_i, in), (out_i, rank_i), a number |

For the backward pass, all parts together save X once: as codes of one byte each, or as X itself if an adapter beside
the base reads it. Weights and merged adapters are not saved: the backward pass reads them again. In `fp8`, a token has
one scale for all of [dY_1 ... dY_n].
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..formats import FORMATS, QuantizedTensor
from ..formats.fp8 import BLOCK
from . import weight_only
from .inputs import autocast_dtype, counts_writes, quantized
from .part import Part
from .products import dequantize, input_and_weight_gradient, input_gradient, joint_bias, product
from .traced import traced


def compute(x: Tensor, parts: Sequence[Part], weight: Callable[[], QuantizedTensor]) -> tuple[Tensor, ...]:
    """
    Computes layers that share an input.

    Args:
        x (`torch.Tensor`): (..., in).
        parts (`Sequence[Part]`):
            The layers. Either weights get gradients or there are adapters, not both, and either all adapters are merged
            or none.
        weight (`Callable`): Returns the codes of all layers, concatenated along the outputs: (sum of out, in).

    Returns:
        `tuple[torch.Tensor, ...]`: (..., out) of each layer, in the type of `x` or autocast's. A result with at least
        half of all outputs is a view of the joint matrix. None may be written to in place.

    Raises:
        ValueError: `x` has another number of features.
    """
    dtype = autocast_dtype(x, parts[0].layer.in_features)
    tensors = []
    for part in parts:
        bias = part.layer.bias
        tensors += part.weight, None if bias is None else bias.to(dtype), part.a, part.b
    adapted = [i for i, part in enumerate(parts) if part.a is not None]
    constants = _Constants(
        dtype,
        weight,
        parts,
        adapted,
        trains=any(part.trains for part in parts),
        unmerged=any(not parts[i].merged for i in adapted),
        sizes=[part.layer.out_features for part in parts],
    )
    return _Joint.apply(x, constants, *tensors)


class _Constants(NamedTuple):
    """
    The arguments of a joint product that are not tensors, as in [`compute`]. `adapted` are the indices of the parts
    with an adapter; `trains` says whether weights get gradients, `unmerged` whether there are adapters that are not
    merged.
    """

    dtype: torch.dtype
    weight: Callable[[], QuantizedTensor]
    parts: Sequence[Part]
    adapted: Sequence[int]
    trains: bool
    unmerged: bool
    sizes: Sequence[int]


class _Joint(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, constants, *tensors):
        w = constants.weight()
        q, for_backward = quantized(x, constants.dtype, w.format, both=constants.trains)
        y = product(q, w, joint_bias(tensors[1::4], constants.sizes), constants.dtype)
        # The backward pass needs nothing of X, or its codes and scales, or X itself with H = X (s A)^T
        columns, kept, ctx.codes = y.split_with_sizes(constants.sizes, 1), (), None
        if constants.unmerged:
            flat, adapters = (
                x.detach().reshape(-1, x.shape[-1]).to(constants.dtype),
                _adapters(constants, constants.dtype),
            )
            kept = flat, _add_branches([columns[i] for i in constants.adapted], flat, adapters), *adapters
        elif constants.trains or constants.adapted:
            codes = for_backward if constants.trains else q
            kept, ctx.codes = (codes.values, codes.scale), (codes.format, codes.shape, codes.dtype)
        ctx.constants = constants
        ctx.save_for_backward(*kept)
        # Attention saves v for the backward pass, and a column would keep the memory of q and k too
        columns = (part if 2 * part.shape[1] >= y.shape[1] else part.contiguous() for part in columns)
        return tuple(part.view(*x.shape[:-1], part.shape[1]) for part in columns)

    @staticmethod
    def backward(ctx, *dys):
        shape, constants, kept = dys[0].shape[:-1], ctx.constants, ctx.saved_tensors
        w = constants.weight()
        dys = [dy.reshape(-1, size) for dy, size in zip(dys, constants.sizes, strict=True)]
        dy, dx, dw = side_by_side(dys), None, None
        wants_x, wants = ctx.needs_input_grad[0], ctx.needs_input_grad[2:]
        x = h = None  # H = X (s A)^T, if the forward pass kept it
        if constants.unmerged:
            x, h, *adapters = kept
        elif ctx.codes is not None:
            format, *rest = ctx.codes
            x = QuantizedTensor(format, *kept, *rest)
        if constants.trains:
            if in_groups(w):
                dx, dw = input_and_weight_gradient(dy, w, x, dy.dtype)
            else:
                dx, dw = input_gradient(dy, w) if wants_x else None, dy.t() @ dequantize(x, dy.dtype)
            dw = dw.split(constants.sizes)
        elif wants_x:
            dx = input_gradient(dy, w)
        adapter_gradients = {}
        if constants.adapted:
            adapters = adapters if constants.unmerged else _merged_adapters(w, constants, dy.dtype)
            adapter_gradients = _adapter_gradients(dys, x, h, constants, adapters, dx if constants.unmerged else None)
        gradients = [dx.view(*shape, dx.shape[1]) if wants_x else None, None]
        for i, part in enumerate(dys):
            wants_weight, wants_bias, wants_a, wants_b = wants[4 * i : 4 * i + 4]
            da, db = adapter_gradients.get(i, (None, None))
            gradients += (
                dw[i] if wants_weight else None,
                part.sum(0) if wants_bias else None,
                da if wants_a else None,
                db if wants_b else None,
            )
        return tuple(gradients)


def _adapters(constants: _Constants, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Returns, in `dtype`, the concatenated s A of all adapters, (sum of ranks, in), and then each B."""
    a, b = [constants.parts[i].a for i in constants.adapted], [constants.parts[i].b for i in constants.adapted]
    scaling = _scaling(constants, tuple(map(len, a)), a[0].device)
    a = a[0] if len(a) == 1 else torch.cat(a)
    return (a * scaling).to(a.dtype).to(dtype), *(matrix.to(dtype) for matrix in b)


def _scaling(constants: _Constants, ranks: tuple[int, ...], device: torch.device) -> Tensor:
    """Returns the factor s of each row of the first tensor of [`_adapters`], (sum of ranks, 1), in FP32."""
    return _column(tuple(constants.parts[i].scaling for i in constants.adapted), ranks, device)


# Codes of a sum of weights and adapters -> those adapters, in the type of the last backward pass
_merged: WeakKeyDictionary[QuantizedTensor, tuple[Tensor, ...]] = WeakKeyDictionary()


def _merged_adapters(w: QuantizedTensor, constants: _Constants, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Returns [`_adapters`]. Keeps them until the codes `w`, into which they are merged, are freed."""
    found = _merged.get(w)
    if found is None or found[0].dtype != dtype:
        found = _merged[w] = _adapters(constants, dtype)
    return found


def _add_branches(ys: Sequence[Tensor], x: Tensor, adapters: Sequence[Tensor]) -> Tensor:
    """Adds each adapter's product to its part of `ys`, and returns X (s A)^T of all adapters, (T, sum of ranks)."""
    a, *b = adapters
    h = x @ a.t()
    for y, part, matrix in zip(ys, h.split([matrix.shape[1] for matrix in b], 1), b, strict=True):
        y.addmm_(part, matrix.t())
    return h


def _adapter_gradients(
    dys: Sequence[Tensor],
    x: QuantizedTensor | Tensor,
    h: Tensor | None,
    constants: _Constants,
    adapters: Sequence[Tensor],
    dx: Tensor | None,
) -> dict[int, tuple[Tensor, Tensor]]:
    """
    Returns dA and dB by the index of the part. If `dx` is given, adds to it the gradient that reaches X through the
    adapters. All of them share the products with X; `h` is X (s A)^T if it is known.
    """
    a, *b = adapters
    dh = [dys[i] @ matrix for i, matrix in zip(constants.adapted, b, strict=True)]
    dh = dh[0] if len(dh) == 1 else torch.cat(dh, 1)
    if dx is not None:
        dx.addmm_(dh, a)
    if h is None:
        x = dequantize(x, dh.dtype)
        h = x @ a.t()
    ranks = tuple(matrix.shape[1] for matrix in b)
    da = (dh.t() @ x * _scaling(constants, ranks, x.device)).split_with_sizes(ranks)
    return {
        i: (da_i.to(constants.parts[i].a.dtype), (dys[i].t() @ h_i).to(constants.parts[i].b.dtype))
        for i, da_i, h_i in zip(constants.adapted, da, h.split_with_sizes(ranks, 1), strict=True)
    }


@cache
def _column(numbers: tuple[float, ...], times: tuple[int, ...], device: torch.device) -> Tensor:
    """Returns each number, repeated by its entry of `times`, as a column (sum of times, 1) in FP32."""
    repeated = [number for number, n in zip(numbers, times, strict=True) for _ in range(n)]
    return torch.tensor(repeated, dtype=torch.float32, device=device)[:, None]


def side_by_side(parts: list[Tensor]) -> Tensor:
    """
    Concatenates matrices (T, n_i) to (T, sum of n_i). Nothing is copied if they already are adjacent columns of one
    matrix, in this order.
    """
    first, width, at = parts[0], sum(part.shape[1] for part in parts), parts[0].storage_offset()
    for part in parts:
        is_next = part.storage_offset() == at and part.stride() == (width, 1)
        if not is_next or part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        at += part.shape[1]
    return first.as_strided((len(first), width), (width, 1))


def below_each_other(parts: Sequence[Tensor]) -> Tensor:
    """
    Concatenates matrices (n_i, in) to (sum of n_i, in). Nothing is copied if they already are adjacent rows of one
    contiguous matrix, in this order.
    """
    first, at, rows = parts[0], parts[0].storage_offset(), sum(map(len, parts))
    for part in parts:
        is_next = part.storage_offset() == at and part.is_contiguous()
        if not is_next or part.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            bits = torch.uint8 if first.itemsize == 1 else first.dtype  # `cat` does not take FP8 everywhere
            return torch.cat([part.view(bits) for part in parts]).view(first.dtype)
        at += part.numel()
    return first.as_strided((rows, first.shape[1]), (first.shape[1], 1))


def in_groups(w: QuantizedTensor) -> bool:
    """Whether the scales of a weight have groups along the inner dimension."""
    return not FORMATS[w.format].per_row


def output(x: Tensor, part: Part, number: Tensor) -> Tensor:
    """
    Returns the output (..., out) of one layer for `x` (..., in). If its inputs are quantized, it is computed together
    with the layers that share its input. `number` belongs to the layer that returned the part: see
    [`operators.Numbered`].
    """
    if not part.layer.quantizes_inputs:
        return weight_only.output(x, part, number)
    if torch.compiler.is_compiling():
        return traced(x, part, number)
    joint = part.layer.joint
    return compute(x, [part], part.codes)[0] if joint is None else joint.output(x, part)


class _Waiting(NamedTuple):
    """Computed outputs whose layers have not been called yet, each with what it was computed from."""

    x: weakref.ref
    call: tuple  # the input's version, the type of the product, whether there are gradients
    outputs: dict[nn.Module, tuple[tuple, Tensor]]


class Joint:
    """
    Layers that share their input. The first layer that is called computes the outputs of all. The others return their
    output when they are called with the same tensor, if their weights have not changed since.

    Each layer is computed alone if one of them has a hook (hooks must run around their own layer; FSDP gathers weights
    in them), was replaced, or is quantized at each call, or if some train their weights while others have an adapter.

    Parameters:
        layers (`Sequence[nn.Module]`): In the order in which an engine joins them. Each has a method `part`, which
            returns a [`Part`].
    """

    def __init__(self, layers: Sequence[nn.Module]):
        self.layers = list(layers)
        self.forget()

    @staticmethod
    def can(layers: Sequence[nn.Module]) -> bool:
        """Whether every block of scales would lie within one of these layers."""
        parts = [layer.part().layer for layer in layers]
        return not any(FORMATS[part.format].grouped and part.out_features % BLOCK for part in parts[:-1])

    def forget(self) -> None:
        """Drops the joint codes and the waiting outputs."""
        self._held: list[QuantizedTensor] = []
        self._joint: QuantizedTensor | None = None
        self.waiting: _Waiting | None = None

    def output(self, x: Tensor, part: Part) -> Tensor:
        """As [`output`], of a part of these layers."""
        if not counts_writes(x):
            return compute(x, [part], part.codes)[0]
        call = x._version, autocast_dtype(x, part.layer.in_features), torch.is_grad_enabled()
        waiting = self.waiting
        if waiting is not None and waiting.x() is x and waiting.call == call and part.layer in waiting.outputs:
            made_of, y = waiting.outputs.pop(part.layer)
            if part.made_of(part.codes()) == made_of:
                return y
        self.waiting = None
        parts = self.together(part)
        if len(parts) == 1:
            return compute(x, parts, part.codes)[0]
        outputs = compute(x, parts, partial(self.codes, parts))
        made = {p.layer: (p.made_of(q), y) for p, q, y in zip(parts, self._held, outputs, strict=True)}
        y = made.pop(part.layer)[1]
        self.waiting = _Waiting(weakref.ref(x, self._drop), call, made)
        return y

    def together(self, part: Part) -> list[Part]:
        """Returns the parts of all layers, or `part` alone if its layer must be computed alone."""
        parts = [layer.part() for layer in self.layers] if all(map(_is_free, self.layers)) else []
        own = [other for other in parts if other.layer is part.layer and other.a is part.a]
        return [part] if not own or _mixed(parts) else parts

    def codes(self, parts: Sequence[Part]) -> QuantizedTensor:
        """
        Returns the concatenated quantized weights of `parts`. The layers then keep views of their rows instead of their
        own codes.
        """
        held = [part.codes() for part in parts]
        if self._joint is None or any(one is not other for one, other in zip(held, self._held, strict=True)):
            self._joint = None  # frees the old codes first
            values = below_each_other([q.values for q in held])
            with torch.autocast(values.device.type, enabled=False):  # which refuses to join scales in FP16
                scale = torch.cat([q.scale for q in held])
            shape = torch.Size((len(values), held[0].shape[1]))
            self._joint = QuantizedTensor(held[0].format, values, scale, shape, held[0].dtype)
            rows = values.split([len(q.values) for q in held]), scale.split([len(q.scale) for q in held])
            self._held = [replace(q, values=v, scale=s) for q, v, s in zip(held, *rows, strict=True)]
            for part, q in zip(parts, self._held, strict=True):
                part.layer.hold(q)
        return self._joint

    def _drop(self, x: weakref.ref) -> None:
        """Drops the waiting outputs of an input that was freed."""
        if self.waiting is not None and self.waiting.x is x:
            self.waiting = None

    def __getstate__(self) -> dict:
        # A copied or loaded object starts without codes and outputs
        return {"layers": self.layers, "_held": [], "_joint": None, "waiting": None}


def _is_free(layer: nn.Module) -> bool:
    """
    Whether a layer can be computed before it is called: it has no hooks, no layer of another kind has replaced it or
    its base, and its codes are not computed at each call.
    """
    base = getattr(layer, "base_layer", layer)
    hooked = any(module._forward_hooks or module._forward_pre_hooks for module in {layer, base})
    return hasattr(base, "part") and not base.moves_unseen and not hooked


def _mixed(parts: Sequence[Part]) -> bool:
    """Whether a joint product cannot compute these parts."""
    adapted = [part for part in parts if part.a is not None]
    return len(adapted) > 0 and (any(part.trains for part in parts) or len({part.merged for part in adapted}) > 1)
