r"""
Rotary embeddings and attention with an engine's kernels, with the gradients that those kernels lack:

| operator | forward | backward |
|---|---|---|
| rotary embedding R(p) | the engine's, p counting a sequence's own tokens | dX = R(-p) dY, by the same kernel |
| attention | the engine's, over packed rows, a query's keys in one part | torch's, from the engine's log-sum-exp |

| symbol | here | shape |
|---|---|---|
| B, S | sequences and their length, padded | |
| T | tokens without padding | |
| H, G, D | heads of queries, of keys and values, and their size | |
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...layers.packed import Packed, flash_attention, flash_attention_gradients


@dataclass(frozen=True)
class Kernels:
    """
    The kernels of one engine's model, without gradients.

    Attributes:
        rotate (`Callable`): (positions (T,), q (T, H D), k (T, G D), inverse) rotates q and k in place, by the inverse
            rotation if `inverse`.
        attend (`Callable`): Maps (q (T, H, D), k and v (K, G, D), packed, scale, window) to the causal attention (T, H,
            D) and the natural log-sum-exp of the scaled products (H, T). The log-sum-exp is `None` from a kernel that
            does not return it; the backward pass then computes torch's attention first.
        score (`Callable`): Maps (logits (N, vocabulary), ids (N,), temperature) to log-probabilities (N,), FP32, in
            nats, and to the tempered logits (N, vocabulary) whose log-softmax they are. It may overwrite the logits.
        rotated (`int`): Features of a head that are rotated.
        dtype (`torch.dtype`): Type in which the engine computes.
    """

    rotate: Callable[[Tensor, Tensor, Tensor, bool], None]
    attend: Callable[..., tuple[Tensor, Tensor | None]]
    score: Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]]
    rotated: int
    dtype: torch.dtype


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, positions, kernel):
        ctx.positions, ctx.kernel = positions, kernel
        return _rotated(q, k, positions, kernel, inverse=False)

    @staticmethod
    def backward(ctx, dq, dk):
        return *_rotated(dq, dk, ctx.positions, ctx.kernel, inverse=True), None, None


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, packed, scale, window, kernel):
        y, lse = kernel(q, k, v, packed, scale, window)
        ctx.save_for_backward(q, k, v, *(() if lse is None else (y, lse)))
        ctx.given = packed, scale, window
        return y

    @staticmethod
    def backward(ctx, dy):
        q, k, v, *results = ctx.saved_tensors
        if results:
            gradients = flash_attention_gradients(dy, q, k, v, *results, *ctx.given)
        else:
            with torch.enable_grad():
                inputs = [x.detach().requires_grad_() for x in (q, k, v)]
                gradients = torch.autograd.grad(flash_attention(*inputs, *ctx.given), inputs, dy)
        return *gradients, None, None, None, None


def attention(
    q: Tensor, k: Tensor, v: Tensor, packed: Packed, scale: float, window: int | None, kernel: Callable
) -> Tensor:
    """Computes [`flash_attention`], (T, H, D), with `kernel`, an `attend` of [`Kernels`], in the forward pass."""
    return _Attend.apply(q, k, v, packed, scale, window, kernel)


def _rotated(q: Tensor, k: Tensor, positions: Tensor, kernel: Callable, inverse: bool) -> tuple[Tensor, Tensor]:
    turned = q.flatten(1).clone(), k.flatten(1).clone()
    kernel(positions, *turned, inverse)
    return turned[0].view(q.shape), turned[1].view(k.shape)


class Unrotated(nn.Module):
    """Replaces a rotary embedding. Returns cosines of 1 and sines of 0, because [`ExactAttention`] rotates."""

    def __init__(self, rotated: int):
        super().__init__()
        self.rotated = rotated

    def forward(self, x: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Returns the cosines and the sines, (1, 1, rotated) each."""
        ones = x.new_ones(1, 1, self.rotated)
        return ones, torch.zeros_like(ones)


class ExactAttention:
    """
    Rotary embedding and attention over packed sequences. Padding would shift positions and tiles, so it is left out.
    All layers of a model share one instance.

    Parameters:
        kernels ([`Kernels`]): The engine's kernels.
    """

    def __init__(self, kernels: Kernels):
        self.kernels = kernels
        self._last: tuple | None = None  # one mask serves all layers of a forward pass

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *how, packed: Packed | None = None
    ) -> Tensor:
        """
        Rotates queries and keys, and computes attention.

        Args:
            q, k, v (`torch.Tensor`): (B, H, S, D), (B, G, S, D), (B, G, S, D), not rotated.
            mask (`torch.Tensor`, *optional*): (B, S), true on tokens; `None` where there is no padding.
            how: `scale` and `window` of [`flash_attention`].
            packed ([`Packed`], *optional*): The segments, if the one row (B = 1) is packed; `mask` is then ignored.

        Returns:
            `torch.Tensor`: (B, S, H, D), zeros on padding.
        """
        batch, heads, length, size = q.shape
        rows = None
        if packed is None:
            packed = self._packed(mask, batch, length, q.device)
            rows = packed.rows
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
        if rows is not None:
            q, k, v = (x[rows] for x in (q, k, v))
        q, k = _Rotate.apply(q, k, packed.positions, self.kernels.rotate)
        k, v = packed.with_shared(k), packed.with_shared(v)
        y = attention(q, k, v.contiguous(), packed, *how, self.kernels.attend)
        if rows is not None:
            y = y.new_zeros(batch * length, heads, size).index_copy(0, rows, y)
        return y.view(batch, length, heads, size)

    def _packed(self, mask: Tensor | None, *shape) -> Packed:
        if self._last is None or self._last[0] is not mask or self._last[1] != shape:
            self._last = mask, shape, Packed.of(mask, *shape)
        return self._last[2]
