r"""
Computes layers that train in the precision of their sampler and share an input, such as q, k and v, as one product, as
an engine does. A layer that shares its input with no other is a product of one operand.

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
| `Q(W_i)` | codes of an [`Operand`] | (out_i, in) |
| `Y_i`, `dY_i` | | (..., out_i) |
| `b_i`, `A_i`, `B_i`, `s_i` | bias and adapter of an [`Operand`] | (out_i,), (rank_i, in), (out_i, rank_i), a number |

For the backward pass, all layers together save X once: as codes of one byte each, or as X itself if an adapter beside
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
from .operand import Operand
from .products import dequantize, input_and_weight_gradient, input_gradient, joint_bias, product
from .traced import traced


def compute(x: Tensor, operands: Sequence[Operand], weight: Callable[[], QuantizedTensor]) -> tuple[Tensor, ...]:
    """
    Computes layers that share an input.

    Args:
        x (`torch.Tensor`): (..., in).
        operands (`Sequence[Operand]`):
            The layers. Either weights get gradients or there are adapters, not both, and either all adapters are merged
            or none.
        weight (`Callable`): Returns the codes of all layers, concatenated along the outputs: (sum of out, in).

    Returns:
        `tuple[torch.Tensor, ...]`: (..., out) of each layer, in the type of `x` or autocast's. A result with at least
        half of all outputs is a view of the joint matrix. None may be written to in place.

    Raises:
        ValueError: `x` has another number of features.
    """
    dtype = autocast_dtype(x, operands[0].layer.in_features)
    tensors = []
    for operand in operands:
        bias = operand.layer.bias
        tensors += operand.weight, None if bias is None else bias.to(dtype), operand.a, operand.b
    adapted = [i for i, operand in enumerate(operands) if operand.a is not None]
    constants = _Constants(
        dtype,
        weight,
        operands,
        adapted,
        trains=any(operand.trains for operand in operands),
        unmerged=any(not operands[i].merged for i in adapted),
        sizes=[operand.layer.out_features for operand in operands],
    )
    return _Joint.apply(x, constants, *tensors)


class _Constants(NamedTuple):
    """
    The arguments of a joint product that are not tensors, as in [`compute`]. `adapted` are the indices of the operands
    with an adapter; `trains` says whether weights get gradients, `unmerged` whether there are adapters that are not
    merged.
    """

    dtype: torch.dtype
    weight: Callable[[], QuantizedTensor]
    operands: Sequence[Operand]
    adapted: Sequence[int]
    trains: bool
    unmerged: bool
    sizes: Sequence[int]


class _Joint(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, constants, *tensors):
        w = constants.weight()
        q, for_backward = quantized(x, constants.dtype, w.format, both=constants.trains)
        # Y (T, sum of out) = Q(X) (T, in) @ Q(W)^T (in, sum of out) + b
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
        columns = (column if 2 * column.shape[1] >= y.shape[1] else column.contiguous() for column in columns)
        return tuple(column.view(*x.shape[:-1], column.shape[1]) for column in columns)

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
            # dX (T, in) = dY (T, sum of out) @ Q(W) (sum of out, in); dW (sum of out, in) = dY^T @ Q(X)
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
        for i, column in enumerate(dys):
            wants_weight, wants_bias, wants_a, wants_b = wants[4 * i : 4 * i + 4]
            da, db = adapter_gradients.get(i, (None, None))
            gradients += (
                dw[i] if wants_weight else None,
                column.sum(0) if wants_bias else None,
                da if wants_a else None,
                db if wants_b else None,
            )
        return tuple(gradients)


def _adapters(constants: _Constants, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Returns, in `dtype`, the concatenated s A of all adapters, (sum of ranks, in), and then each B."""
    a, b = [constants.operands[i].a for i in constants.adapted], [constants.operands[i].b for i in constants.adapted]
    scaling = _scaling(constants, tuple(map(len, a)), a[0].device)
    a = a[0] if len(a) == 1 else torch.cat(a)
    return (a * scaling).to(a.dtype).to(dtype), *(matrix.to(dtype) for matrix in b)


def _scaling(constants: _Constants, ranks: tuple[int, ...], device: torch.device) -> Tensor:
    """Returns the factor s of each row of the first tensor of [`_adapters`], (sum of ranks, 1), in FP32."""
    return _column(tuple(constants.operands[i].scaling for i in constants.adapted), ranks, device)


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
    h = x @ a.t()  # H (T, sum of ranks) = X (T, in) @ (s A)^T (in, sum of ranks)
    for y, branch, matrix in zip(ys, h.split([matrix.shape[1] for matrix in b], 1), b, strict=True):
        y.addmm_(branch, matrix.t())  # Y_i (T, out_i) += H_i (T, rank_i) @ B_i^T (rank_i, out_i)
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
    Returns dA and dB by the index of the operand. If `dx` is given, adds to it the gradient that reaches X through the
    adapters. All of them share the products with X; `h` is X (s A)^T if it is known.
    """
    a, *b = adapters
    # dH_i (T, rank_i) = dY_i (T, out_i) @ B_i (out_i, rank_i)
    dh = [dys[i] @ matrix for i, matrix in zip(constants.adapted, b, strict=True)]
    dh = dh[0] if len(dh) == 1 else torch.cat(dh, 1)
    if dx is not None:
        dx.addmm_(dh, a)  # dX (T, in) += dH (T, sum of ranks) @ s A (sum of ranks, in)
    if h is None:
        x = dequantize(x, dh.dtype)
        h = x @ a.t()
    ranks = tuple(matrix.shape[1] for matrix in b)
    # dA (sum of ranks, in) = s dH^T @ X; dB_i (out_i, rank_i) = dY_i^T @ H_i
    da = (dh.t() @ x * _scaling(constants, ranks, x.device)).split_with_sizes(ranks)
    return {
        i: (da_i.to(constants.operands[i].a.dtype), (dys[i].t() @ h_i).to(constants.operands[i].b.dtype))
        for i, da_i, h_i in zip(constants.adapted, da, h.split_with_sizes(ranks, 1), strict=True)
    }


@cache
def _column(numbers: tuple[float, ...], times: tuple[int, ...], device: torch.device) -> Tensor:
    """Returns each number, repeated by its entry of `times`, as a column (sum of times, 1) in FP32."""
    repeated = [number for number, n in zip(numbers, times, strict=True) for _ in range(n)]
    return torch.tensor(repeated, dtype=torch.float32, device=device)[:, None]


def side_by_side(matrices: list[Tensor]) -> Tensor:
    """
    Concatenates matrices (T, n_i) to (T, sum of n_i). Nothing is copied if they already are adjacent columns of one
    matrix, in this order.
    """
    first, width, at = matrices[0], sum(matrix.shape[1] for matrix in matrices), matrices[0].storage_offset()
    for matrix in matrices:
        is_next = matrix.storage_offset() == at and matrix.stride() == (width, 1)
        if not is_next or matrix.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return matrices[0] if len(matrices) == 1 else torch.cat(matrices, 1)
        at += matrix.shape[1]
    return first.as_strided((len(first), width), (width, 1))


def below_each_other(matrices: Sequence[Tensor]) -> Tensor:
    """
    Concatenates matrices (n_i, in) to (sum of n_i, in). Nothing is copied if they already are adjacent rows of one
    contiguous matrix, in this order.
    """
    first, at, rows = matrices[0], matrices[0].storage_offset(), sum(map(len, matrices))
    for matrix in matrices:
        is_next = matrix.storage_offset() == at and matrix.is_contiguous()
        if not is_next or matrix.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            bits = torch.uint8 if first.itemsize == 1 else first.dtype  # `cat` does not take FP8 everywhere
            return torch.cat([matrix.view(bits) for matrix in matrices]).view(first.dtype)
        at += matrix.numel()
    return first.as_strided((rows, first.shape[1]), (first.shape[1], 1))


def in_groups(w: QuantizedTensor) -> bool:
    """Whether the scales of a weight have groups along the inner dimension."""
    return not FORMATS[w.format].per_row


def output(x: Tensor, operand: Operand, number: Tensor) -> Tensor:
    """
    Returns the output (..., out) of one layer for `x` (..., in). If its inputs are quantized, it is computed together
    with the layers that share its input. `number` belongs to the layer that returned the operand: see
    [`operators.Numbered`].
    """
    if not operand.layer.quantizes_inputs:
        return weight_only.output(x, operand, number)
    if torch.compiler.is_compiling():
        return traced(x, operand, number)
    joint = operand.layer.joint
    return compute(x, [operand], operand.codes)[0] if joint is None else joint.output(x, operand)


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
        layers (`Sequence[nn.Module]`): In the order in which an engine joins them. Each has a method `operand`, which
            returns an [`Operand`].
    """

    def __init__(self, layers: Sequence[nn.Module]):
        self.layers = list(layers)
        self.forget()

    @staticmethod
    def can(layers: Sequence[nn.Module]) -> bool:
        """Whether every block of scales would lie within one of these layers."""
        bases = [layer.operand().layer for layer in layers]
        return not any(FORMATS[base.format].grouped and base.out_features % BLOCK for base in bases[:-1])

    def forget(self) -> None:
        """Drops the joint codes and the waiting outputs."""
        self._held: list[QuantizedTensor] = []
        self._joint: QuantizedTensor | None = None
        self.waiting: _Waiting | None = None

    def output(self, x: Tensor, operand: Operand) -> Tensor:
        """As [`output`], of an operand of these layers."""
        if not counts_writes(x):
            return compute(x, [operand], operand.codes)[0]
        call = x._version, autocast_dtype(x, operand.layer.in_features), torch.is_grad_enabled()
        waiting = self.waiting
        if waiting is not None and waiting.x() is x and waiting.call == call and operand.layer in waiting.outputs:
            made_of, y = waiting.outputs.pop(operand.layer)
            if operand.made_of(operand.codes()) == made_of:
                return y
        self.waiting = None
        operands = self.together(operand)
        if len(operands) == 1:
            return compute(x, operands, operand.codes)[0]
        outputs = compute(x, operands, partial(self.codes, operands))
        made = {p.layer: (p.made_of(q), y) for p, q, y in zip(operands, self._held, outputs, strict=True)}
        y = made.pop(operand.layer)[1]
        self.waiting = _Waiting(weakref.ref(x, self._drop), call, made)
        return y

    def together(self, operand: Operand) -> list[Operand]:
        """Returns the operands of all layers, or `operand` alone if its layer must be computed alone."""
        operands = [layer.operand() for layer in self.layers] if all(map(_is_free, self.layers)) else []
        own = [other for other in operands if other.layer is operand.layer and other.a is operand.a]
        return [operand] if not own or _mixed(operands) else operands

    def codes(self, operands: Sequence[Operand]) -> QuantizedTensor:
        """
        Returns the concatenated quantized weights of `operands`. The layers then keep views of their rows instead of
        their own codes.
        """
        held = [operand.codes() for operand in operands]
        if self._joint is None or any(one is not other for one, other in zip(held, self._held, strict=True)):
            self._joint = None  # frees the old codes first
            values = below_each_other([q.values for q in held])
            with torch.autocast(values.device.type, enabled=False):  # which refuses to join scales in FP16
                scale = torch.cat([q.scale for q in held])
            shape = torch.Size((len(values), held[0].shape[1]))
            self._joint = QuantizedTensor(held[0].format, values, scale, shape, held[0].dtype)
            rows = values.split([len(q.values) for q in held]), scale.split([len(q.scale) for q in held])
            self._held = [replace(q, values=v, scale=s) for q, v, s in zip(held, *rows, strict=True)]
            for operand, q in zip(operands, self._held, strict=True):
                operand.layer.hold(q)
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
    return hasattr(base, "operand") and not base.moves_unseen and not hooked


def _mixed(operands: Sequence[Operand]) -> bool:
    """Whether a joint product cannot compute these operands."""
    merged = {operand.merged for operand in operands if operand.a is not None}
    return len(merged) > 1 or (len(merged) > 0 and any(operand.trains for operand in operands))
