r"""
The experts of a mixture that trains in the precision of its sampler: what [`unified`] does for linear layers.

    y_t = sum over the k experts e of t:  g_te  down_e(act(gate_e(x_t)) * up_e(x_t))

    Y_e  = Q(X_e) Q(W_e)^T          gate and up as one matrix, and down
    dX_e = dY_e Q(W_e)              straight through the roundings
    dW_e = dY_e^T Q(X_e)

| symbol | here | shape |
|---|---|---|
| `x_t`, `g_te` | a token, and the router's weight of one of its experts | (H,), a number |
| `W_e` | gate over up, a master weight in `gate_up_proj`; down, in `down_proj` | (2 I, H); (H, I) |
| `Q(W_e)` | codes, with scales of the expert's own | |
| `X_e`, `Y_e` | inputs and outputs of the tokens that reach the expert | |

Tokens are quantized once, whatever the number of their experts. Then their codes are sorted by expert, so that
[`grouped`] can multiply all experts in one call. Each token adds up its experts' outputs in the order in which its
router chose them.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..formats import QuantizedTensor
from ..precisions import PRECISIONS, experts_flows
from . import eager
from .gated import silu_mul
from .grouped import grouped_input_gradient, grouped_product, grouped_weight_gradient
from .inputs import autocast_dtype, state_of
from .unified import quantize_weight


class QuantExperts(nn.Module):
    """
    The experts of one layer, which compute as an engine's do. A subclass says where their codes come from.

    Parameters:
        experts (`nn.Module`): transformers' experts: gated MLPs without biases, in tensors (experts, out, in).
        precision (`str`): Key of `PRECISIONS`, one of [`~precisions.experts_flows`].
        is_silu (`bool`, *optional*, defaults to `False`):
            Whether the activation is SiLU, which is then computed in one pass with the quantizer that follows.

    Attributes:
        leaves (`tuple[str, str]`): The names of the two tensors: gate over up, and down.

    Raises:
        ValueError: Another precision.
    """

    def __init__(self, experts: nn.Module, precision: str, is_silu: bool = False):
        super().__init__()
        allowed = experts_flows()
        if precision not in allowed:
            raise ValueError(f"precision: {precision!r} cannot be that of experts; allowed: {', '.join(allowed)}.")
        self.precision, self.format = precision, PRECISIONS[precision].format
        self.config, self.num_experts = experts.config, experts.num_experts
        self.act_fn, self.is_silu = experts.act_fn, is_silu
        self.leaves = tuple(name for name, _ in experts.named_parameters(recurse=False))
        object.__setattr__(self, "replaced", experts)  # not as a child
        self.train(experts.training)

    def codes(self, leaf: str) -> QuantizedTensor:
        """Returns the quantized weight (experts, out, in) of the tensor called `leaf`."""
        raise NotImplementedError

    def master(self, leaf: str) -> Tensor | None:
        """Returns the weight that may get a gradient; `None` if there is none."""
        return None

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """
        Maps tokens (T, H) to the sums (T, H) of their experts' outputs.

        Args:
            hidden_states (`torch.Tensor`): (T, H).
            top_k_index, top_k_weights (`torch.Tensor`): (T, k), the experts of each token and their weights.
        """
        if any(isinstance(getattr(self, leaf, None), nn.Module) for leaf in self.leaves):
            # A check has put an engine's experts in the place of the tensors
            return type(self.replaced).forward(self, hidden_states, top_k_index, top_k_weights)
        (first, last), sorting = self.leaves, Sorting.by_expert(top_k_index, self.num_experts)
        gate, up = self._product(hidden_states, first, sorting, parts=2, gathers=True)
        if self.is_silu:
            y = silu_mul(gate, up, self.precision, self._trains(last))
        else:
            y = self.act_fn(gate) * up
        (y,) = self._product(y, last, sorting)
        return _WeightedSum.apply(y, top_k_weights, *sorting).to(hidden_states.dtype)

    def _product(
        self, x: Tensor, leaf: str, sorting: "Sorting", parts: int = 1, gathers: bool = False
    ) -> tuple[Tensor, ...]:
        """
        Multiplies rows that are sorted by expert, or with `gathers` tokens that are not, with the tensor called `leaf`.
        Returns the outputs of each of the `parts` that its matrices join.
        """
        weight, dtype = partial(self.codes, leaf), autocast_dtype(x, x.shape[-1])
        constants = _Constants(dtype, self.format, weight, parts, self._trains(leaf), gathers)
        return _Experts.apply(x, self.master(leaf), constants, *sorting)

    def _trains(self, leaf: str) -> bool:
        weight = self.master(leaf)
        return weight is not None and weight.requires_grad and torch.is_grad_enabled()

    def extra_repr(self) -> str:
        return f"{self.num_experts}, precision={self.precision!r}"


class UnifiedExperts(QuantExperts):
    """
    Experts that train. The master weights are the parameters of the module that this one replaces: their names, types
    and places in checkpoints are the same, and the optimizer updates them.

    As in [`~layers.UnifiedLinear`], a weight is quantized again after a write, and code that writes past torch's
    version counter must call [`~UnifiedExperts.forget`]. Codes are freed with the tensor from which they were computed.

    Parameters:
        args, kwargs: As in [`QuantExperts`]. The replaced module gives up its tensors.

    Attributes:
        rounds_to (`torch.dtype` or `None`): As in [`~layers.UnifiedLinear`].
        moves_unseen (`bool`): As in [`~layers.QuantLinear`].
        held (`dict`): The codes of each tensor, with what they were made of.
    """

    rounds_to: torch.dtype | None = None
    moves_unseen = False

    def __init__(self, experts: nn.Module, *args, **kwargs):
        super().__init__(experts, *args, **kwargs)
        for leaf in self.leaves:
            setattr(self, leaf, getattr(experts, leaf))
            setattr(experts, leaf, None)  # FSDP2 shards the tensor, and the whole one must not live on
        self.forget()

    def plain(self) -> nn.Module:
        """Returns the experts that this module replaces, with the present weights."""
        for leaf in self.leaves:
            setattr(self.replaced, leaf, getattr(self, leaf))
        return self.replaced.train(self.training)

    def codes(self, leaf: str) -> QuantizedTensor:
        """As [`QuantExperts.codes`]. The codes are computed once, and again after a write."""
        weight = getattr(self, leaf)
        made_of = state_of(weight)
        held, held_of = self.held.get(leaf, (None, None))
        if held is None or made_of != held_of or self.moves_unseen:
            held = None
            self.held.pop(leaf, None)  # frees the old codes before the new ones take memory
            with torch.no_grad(), torch.autocast(weight.device.type, enabled=False):
                held = quantize_weight(weight.detach().to(self.rounds_to or weight.dtype), self.format)
            self.held[leaf] = held, made_of
        return held

    def master(self, leaf: str) -> Tensor:
        return getattr(self, leaf)

    def forget(self) -> None:
        """Drops the codes, so that weights are quantized again when they are next needed."""
        self.held: dict[str, tuple[QuantizedTensor, tuple]] = {}

    def __setattr__(self, name: str, value) -> None:
        if isinstance(value, nn.Parameter):
            self.forget()  # FSDP2 sets other tensors when it gathers weights, and when it frees them
        super().__setattr__(name, value)

    def _apply(self, fn, recurse=True):
        self.forget()  # the version counter misses the writes of `.to()`
        return super()._apply(fn, recurse)


class SampledExperts(QuantExperts):
    """The forward pass of [`UnifiedExperts`], without a backward pass. It holds the codes, and not the weights."""

    def __init__(self, experts: nn.Module, *args, **kwargs):
        super().__init__(experts, *args, **kwargs)
        for leaf in self.leaves:
            setattr(experts, leaf, None)  # its memory is not needed
        self.held: dict[str, QuantizedTensor] = {}

    def load(self, leaf: str, weight: Tensor | QuantizedTensor) -> None:
        """Takes new weights (experts, out, in): codes of [`UnifiedExperts.codes`], or values that it quantizes."""
        self.held.pop(leaf, None)  # frees the old codes first
        if isinstance(weight, Tensor):
            with torch.autocast(weight.device.type, enabled=False):
                weight = quantize_weight(weight, self.format)
        self.held[leaf] = weight

    def codes(self, leaf: str) -> QuantizedTensor:
        return self.held[leaf]


class Sorting(NamedTuple):
    """
    The pairs of a token and one of its k experts, sorted by expert.

    Attributes:
        tokens (`torch.Tensor`): (T k,), the token of each row, where rows are sorted by expert, then by token.
        places (`torch.Tensor`): (T, k), the row of each pair.
        ends (`torch.Tensor`): (E,), int32, the end of each expert's rows.
    """

    tokens: Tensor
    places: Tensor
    ends: Tensor

    @classmethod
    def by_expert(cls, chosen: Tensor, experts: int) -> "Sorting":
        """Sorts the pairs of `chosen` experts (T, k)."""
        of_rows, order = chosen.flatten().sort(stable=True)
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device=order.device)
        numbers = torch.arange(experts, dtype=of_rows.dtype, device=of_rows.device)
        ends = torch.searchsorted(of_rows, numbers, right=True, out_int32=True)
        return cls(order // chosen.shape[1], places.view_as(chosen), ends)

    def by_token(self, rows: Tensor) -> Tensor:
        """Returns rows (T k, n) as (T, k, n)."""
        return rows.index_select(0, self.places.flatten()).view(*self.places.shape, -1)


class _Constants(NamedTuple):
    """
    The arguments of a product that are not tensors. `parts` is the number of matrices that each expert's joins, and
    `gathers` says whether the inputs are tokens, and not rows that are sorted already.
    """

    dtype: torch.dtype
    format: str
    weight: Callable[[], QuantizedTensor]
    parts: int
    trains: bool
    gathers: bool


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, constants, *sorting):
        tokens, _, ends = sorting
        q, for_backward = eager.quantized(x, constants.dtype, constants.format, both=constants.trains)
        rows = _gathered(q, tokens) if constants.gathers else q
        # Y_e (T_e, out) = Q(X_e) (T_e, in) @ Q(W_e)^T (in, out)
        y = grouped_product(rows, constants.weight(), ends, constants.dtype)
        kept = (for_backward.values, for_backward.scale) if constants.trains else ()
        ctx.constants, ctx.shape = constants, x.shape
        ctx.weight_dtype = None if weight is None else weight.dtype
        ctx.save_for_backward(*sorting, *kept)
        return y.chunk(constants.parts, 1)

    @staticmethod
    def backward(ctx, *dys):
        constants, (tokens, places, ends, *kept) = ctx.constants, ctx.saved_tensors
        dy, dx, dw = eager.side_by_side(list(dys)).contiguous(), None, None
        if ctx.needs_input_grad[0]:
            # dX_e (T_e, in) = dY_e (T_e, out) @ Q(W_e) (out, in)
            dx = grouped_input_gradient(dy, constants.weight(), ends)
            if constants.gathers:  # the sum over the experts of each token
                dx = Sorting(tokens, places, ends).by_token(dx).sum(1)
            dx = dx.view(ctx.shape)
        if kept:
            codes, scale = kept
            x = eager.dequantize(QuantizedTensor(constants.format, codes, scale, codes.shape, dy.dtype))
            x = x.index_select(0, tokens) if constants.gathers else x
            # dW_e (out, in) = dY_e^T (out, T_e) @ Q(X_e) (T_e, in)
            dw = grouped_weight_gradient(dy, x, ends).to(ctx.weight_dtype)
        return dx, dw, None, None, None, None


class _WeightedSum(torch.autograd.Function):
    """
    The sum of each token's rows (T k, H), times weights (T, k), both of which get gradients. torch's own gradient of
    the rows would add them up one by one, though each has a place of its own.
    """

    @staticmethod
    def forward(ctx, rows, weights, *sorting):
        ctx.save_for_backward(rows, weights, *sorting)
        with torch.autocast(rows.device.type, enabled=False):  # which would copy the rows to FP32
            return (Sorting(*sorting).by_token(rows) * weights.unsqueeze(-1)).sum(1)

    @staticmethod
    def backward(ctx, dy):
        rows, weights, tokens, places, _ = ctx.saved_tensors
        dy = dy.index_select(0, tokens)  # (T k, H)
        of_rows = torch.empty_like(weights.flatten()).scatter_(0, places.flatten(), weights.flatten())
        d_rows = (dy * of_rows.unsqueeze(-1)).to(rows.dtype)
        d_weights = (dy * rows).sum(1)[places].to(weights.dtype)
        return d_rows, d_weights, None, None, None


def _gathered(q: QuantizedTensor, tokens: Tensor) -> QuantizedTensor:
    """Returns the codes and scales of rows, each those of a token."""
    values = q.values.view(torch.uint8).index_select(0, tokens).view(q.values.dtype)  # not of FP8 everywhere
    return replace(q, values=values, scale=q.scale[tokens], shape=values.shape)
