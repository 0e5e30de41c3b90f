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
the base reads it. Weights are not saved: the backward pass reads them again. In `fp8`, a token has
one scale for all of [dY_1 ... dY_n].

Without a compiler, [`eager`] multiplies codes that the layers hold. Under torch.compile, [`traced`] puts operators into
the graph, which ask the layers for their codes when they run.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..formats import FORMATS, QuantizedTensor
from ..formats.fp8 import BLOCK
from . import eager, traced, weight_only
from .inputs import autocast_dtype, counts_writes
from .operand import Operand


def compute(
    x: Tensor, operands: Sequence[Operand], weight: Callable[[], QuantizedTensor] | None, number: Tensor | None = None
) -> tuple[Tensor, ...]:
    """
    Computes layers that share an input.

    Args:
        x (`torch.Tensor`): (..., in).
        operands (`Sequence[Operand]`):
            The layers. Either weights get gradients or there are adapters, not both, and either all adapters are merged
            or none.
        weight (`Callable`, *optional*):
            Returns the codes of all layers, concatenated along the outputs: (sum of out, in). `None` under
            torch.compile.
        number (`torch.Tensor`, *optional*): Under torch.compile, the number of one of the layers.

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
        operands[0].layer.format,
        weight,
        [operand.layer.out_features for operand in operands],
        adapted,
        [operands[i].scaling for i in adapted],
        trains=any(operand.trains for operand in operands),
        merged=all(operands[i].merged for i in adapted),
    )
    return _Joint.apply(x, number, constants, *tensors)


class _Constants(NamedTuple):
    """
    The arguments of a joint product that are not tensors, as in [`compute`]. `adapted` are the indices of the operands
    with an adapter, `scalings` their factors s; `trains` says whether weights get gradients.
    """

    dtype: torch.dtype
    format: str
    weight: Callable[[], QuantizedTensor] | None
    sizes: Sequence[int]
    adapted: Sequence[int]
    scalings: Sequence[float]
    trains: bool
    merged: bool

    def products(self, number: Tensor | None, features: int) -> tuple:
        """Returns the module that multiplies, and the weight (sum of out, in) that its functions take."""
        if number is None:
            return eager, self.weight()
        return traced, traced.Weight(number, len(self.sizes) > 1, self.format, (sum(self.sizes), features))


class _Joint(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, number, constants, *tensors):
        weights, biases, a, b = (tensors[i::4] for i in range(4))
        by, w = constants.products(number, x.shape[-1])
        q, for_backward = by.quantized(x, constants.dtype, constants.format, both=constants.trains)
        # Y (T, sum of out) = Q(X) (T, in) @ Q(W)^T (in, sum of out) + b
        y = by.product(q, w, by.joint_bias(biases, constants.sizes), constants.dtype)
        # The backward pass needs nothing of X, or its codes and scales, or X itself with H = X (s A)^T
        columns, kept = list(y.split_with_sizes(constants.sizes, 1)), ()
        if not constants.merged:
            flat = x.detach().reshape(-1, x.shape[-1]).to(constants.dtype)
            # H (T, sum of ranks) = X (T, in) @ (s A)^T (in, sum of ranks)
            h = flat @ _scaled(a, constants, constants.dtype).t()
            for i, h_i in zip(constants.adapted, h.split_with_sizes(_ranks(a, constants), 1), strict=True):
                # Y_i (T, out_i) += H_i (T, rank_i) @ B_i^T (rank_i, out_i)
                columns[i] = by.add_product(columns[i], h_i, b[i].to(constants.dtype).t())
            kept = flat, h
        elif constants.trains or constants.adapted:
            codes = for_backward if constants.trains else q
            kept = codes.values, codes.scale
        ctx.constants, ctx.shape = constants, x.shape
        ctx.weight_dtypes = [None if weight is None else weight.dtype for weight in weights]
        ctx.save_for_backward(number, *a, *b, *kept)
        # Attention saves v for the backward pass, and a column would keep the memory of q and k too
        columns = (column if 2 * column.shape[1] >= y.shape[1] else column.contiguous() for column in columns)
        return tuple(column.view(*x.shape[:-1], column.shape[1]) for column in columns)

    @staticmethod
    def backward(ctx, *dys):
        constants, (number, *saved), n = ctx.constants, ctx.saved_tensors, len(dys)
        a, b, kept = saved[:n], saved[n : 2 * n], saved[2 * n :]
        by, w = constants.products(number, ctx.shape[-1])
        wants_x, wants = ctx.needs_input_grad[0], ctx.needs_input_grad[3:]
        dys = [dy.reshape(-1, size) for dy, size in zip(dys, constants.sizes, strict=True)]
        dy, dx, dw = by.side_by_side(dys), None, None
        x = h = None  # H = X (s A)^T, if the forward pass kept it
        if not constants.merged:
            x, h = kept
        elif kept:
            x = QuantizedTensor(constants.format, *kept, kept[0].shape, constants.dtype)
        if constants.trains:
            # dX (T, in) = dY (T, sum of out) @ Q(W) (sum of out, in); dW (sum of out, in) = dY^T @ Q(X)
            if FORMATS[w.format].grouped:
                dx, dw = by.input_and_weight_gradient(dy, w, x)
            else:
                dx, dw = by.input_gradient(dy, w) if wants_x else None, dy.t() @ by.dequantize(x, dy.dtype)
            dw = dw.split_with_sizes(constants.sizes)
        elif wants_x:
            dx = by.input_gradient(dy, w)
        adapter_gradients = {}
        if constants.adapted:
            scaled = _scaled(a, constants, dy.dtype)
            # dH_i (T, rank_i) = dY_i (T, out_i) @ B_i (out_i, rank_i)
            dh = [dys[i] @ b[i].to(dy.dtype) for i in constants.adapted]
            dh = dh[0] if len(dh) == 1 else torch.cat(dh, 1)
            if constants.merged:
                x = by.dequantize(x, dy.dtype)
                h = x @ scaled.t()
            elif wants_x:
                dx = by.add_product(dx, dh, scaled)  # dX (T, in) += dH (T, sum of ranks) @ s A (sum of ranks, in)
            ranks = _ranks(a, constants)
            # dA (sum of ranks, in) = s dH^T @ X; dB_i (out_i, rank_i) = dY_i^T @ H_i
            das, hs = (dh.t() @ x).split_with_sizes(ranks), h.split_with_sizes(ranks, 1)
            for i, s, da, h_i in zip(constants.adapted, constants.scalings, das, hs, strict=True):
                adapter_gradients[i] = da.to(a[i].dtype) * s, (dys[i].t() @ h_i).to(b[i].dtype)
        gradients = [dx.view(ctx.shape) if wants_x else None, None, None]
        for i, column in enumerate(dys):
            wants_weight, wants_bias, wants_a, wants_b = wants[4 * i : 4 * i + 4]
            da, db = adapter_gradients.get(i, (None, None))
            gradients += (
                dw[i].to(ctx.weight_dtypes[i]) if wants_weight else None,
                column.sum(0) if wants_bias else None,
                da if wants_a else None,
                db if wants_b else None,
            )
        return tuple(gradients)


def _scaled(a: Sequence[Tensor | None], constants: _Constants, dtype: torch.dtype) -> Tensor:
    """Returns, in `dtype`, the concatenated s A of all adapters: (sum of ranks, in)."""
    scaled = [(a[i] * s).to(dtype) for i, s in zip(constants.adapted, constants.scalings, strict=True)]
    return scaled[0] if len(scaled) == 1 else torch.cat(scaled)


def _ranks(a: Sequence[Tensor | None], constants: _Constants) -> list[int]:
    """Returns the rank of each adapter."""
    return [len(a[i]) for i in constants.adapted]


def output(x: Tensor, operand: Operand, number: Tensor) -> Tensor:
    """
    Returns the output (..., out) of one layer for `x` (..., in). If its inputs are quantized, it is computed together
    with the layers that share its input. `number` belongs to the layer that returned the operand: see
    [`operators.Numbered`].
    """
    if not operand.layer.quantizes_inputs:
        return weight_only.output(x, operand, number)
    joint = operand.layer.joint
    if torch.compiler.is_compiling():
        return compute(x, [operand], None, number)[0] if joint is None else joint.traced_output(x, operand, number)
    return compute(x, [operand], operand.codes)[0] if joint is None else joint.output(x, operand)


WAITING = "_waiting_outputs"  # attribute of an input under torch.compile: outputs whose layers have not been called yet


class _Waiting(NamedTuple):
    """Computed outputs whose layers have not been called yet, each with the codes and the adapter that made it."""

    x: weakref.ref
    call: tuple  # the input's version, the type of the product, whether there are gradients
    outputs: dict[nn.Module, tuple[QuantizedTensor, tuple, Tensor]]


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
            codes, adapter, y = waiting.outputs.pop(operand.layer)
            if operand.codes() is codes and operand.adapter == adapter:
                return y
        self.waiting = None
        operands = self.together(operand)
        if len(operands) == 1:
            return compute(x, operands, operand.codes)[0]
        outputs = compute(x, operands, partial(self.codes, operands))
        made = {p.layer: (q, p.adapter, y) for p, q, y in zip(operands, self._held, outputs, strict=True)}
        *_, y = made.pop(operand.layer)
        self.waiting = _Waiting(weakref.ref(x, self._drop), call, made)
        return y

    def traced_output(self, x: Tensor, operand: Operand, number: Tensor) -> Tensor:
        """
        As [`output`], under torch.compile. The outputs wait in an attribute of `x`: the compiler allows no writes to
        other objects under gradient checkpointing.
        """
        waiting = getattr(x, WAITING, [])
        if all(layer is not operand.layer for layer, _ in waiting):
            operands = self.together(operand)
            outputs = compute(x, operands, None, number)
            waiting = [(each.layer, y) for each, y in zip(operands, outputs, strict=True)]
        setattr(x, WAITING, [(layer, y) for layer, y in waiting if layer is not operand.layer])
        return next(y for layer, y in waiting if layer is operand.layer)

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
            values = eager.below_each_other([q.values for q in held])
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
