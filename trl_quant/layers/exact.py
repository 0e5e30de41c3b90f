r"""
Computes what lies between a policy's linear layers with the kernels of its engine, so that trainer and sampler get the
same bits. The engine's kernels have no gradients; this file adds them:

| operator | forward | backward |
|---|---|---|
| RMSNorm | [`~layers.norm.rms_norm`], which the engine is given too | a kernel beside it |
| rotary embedding R(p) | the engine's, p counting a sequence's own tokens | dX = R(-p) dY, by the same kernel |
| attention | the engine's, over packed rows, a query's keys in one part | torch's, from the engine's log-sum-exp |
| log-probabilities | the logits' log-softmax as the engine computes it | TRL's |

Without this file, a trainer and a sampler of the same format still differ in the last bits of these operators. Such a
bit can move a quantized activation to the next code, and the moved codes spread through the layers: half of the
mismatch remains.

| symbol | here | shape |
|---|---|---|
| B, S | sequences and their length, padded | |
| T | tokens that are no padding | |
| H, G, D | heads of queries, of keys and values, and their size | |
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .packed import Packed, flash_attention, flash_attention_gradients


@dataclass(frozen=True)
class Kernels:
    """
    The kernels of one engine's model, without gradients.

    Attributes:
        rotate (`Callable`): (positions (T,), q (T, H D), k (T, G D), inverse) turns q and k in place, or back.
        attend (`Callable`): (q (T, H, D), k and v (K, G, D), packed, scale, window) to (T, H, D), causal, and the
            log-sum-exp of the scaled products (H, T), natural. It is `None` from a kernel that keeps none; the backward
            pass then computes torch's attention first.
        score (`Callable`): (logits (N, vocabulary), ids (N,), temperature) to log-probabilities (N,), FP32, in nats.
        rotated (`int`): Features of a head that are rotated.
        dtype (`torch.dtype`): Type in which the engine computes.
    """

    rotate: Callable[[Tensor, Tensor, Tensor, bool], None]
    attend: Callable[..., tuple[Tensor, Tensor | None]]
    score: Callable[[Tensor, Tensor, float], Tensor]
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
    """[`flash_attention`] with `kernel`, an `attend` of [`Kernels`], in the forward pass."""
    return _Attend.apply(q, k, v, packed, scale, window, kernel)


def _rotated(q: Tensor, k: Tensor, positions: Tensor, kernel: Callable, inverse: bool) -> tuple[Tensor, Tensor]:
    turned = q.flatten(1).clone(), k.flatten(1).clone()
    kernel(positions, *turned, inverse)
    return turned[0].view(q.shape), turned[1].view(k.shape)


class Unrotated(nn.Module):
    """Takes the place of a rotary embedding with cosines 1 and sines 0, because [`ExactAttention`] rotates."""

    def __init__(self, rotated: int):
        super().__init__()
        self.rotated = rotated

    def forward(self, x: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """(1, 1, rotated) each."""
        ones = x.new_ones(1, 1, self.rotated)
        return ones, torch.zeros_like(ones)


class ExactAttention:
    """
    Rotary embedding and attention over packed sequences. Padding would move positions and tiles, so it is left out.
    All layers of a model share one.

    Parameters:
        kernels ([`Kernels`]): The engine's.
    """

    def __init__(self, kernels: Kernels):
        self.kernels = kernels
        self._last: tuple | None = None  # one mask serves all layers of a forward pass

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *how, packed: Packed | None = None
    ) -> Tensor:
        """
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


@torch.no_grad()
def log_probs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    score: Callable[[Tensor, Tensor, float], Tensor],
    rows: int = 1024,
) -> Tensor:
    """
    Log-probabilities from logits of the whole vocabulary at once, as an engine computes them.

    Args:
        hidden (`torch.Tensor`): (N, features), the input of the head, in the type that the engine computes in.
        weight, bias (`torch.Tensor`): The head's, (vocabulary, features) and (vocabulary,) or `None`.
        targets (`torch.Tensor`): (N,), ids of the tokens.
        temperature (`float`): Divisor of the logits.
        score (`Callable`): As in [`Kernels`].
        rows (`int`, *optional*): The number of tokens whose logits are held at once.

    Returns:
        `torch.Tensor`: (N,), FP32, in nats.
    """
    found = [hidden.new_zeros(0, dtype=torch.float32)]
    weight, bias = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
    with torch.autocast(hidden.device.type, enabled=False):
        for x, ids in zip(hidden.split(rows), targets.split(rows), strict=True):
            found.append(score(F.linear(x, weight, bias), ids, temperature))
    return torch.cat(found)


def log_softmax(logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
    """A `score` of [`Kernels`]: in FP32 from the division by the temperature on."""
    tempered = logits.float() / torch.full((1,), temperature, device=logits.device)  # by a number, torch multiplies
    return tempered.log_softmax(-1).gather(1, ids.unsqueeze(1)).squeeze(1)
