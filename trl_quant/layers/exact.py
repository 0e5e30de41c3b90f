r"""
Computes what lies between a policy's linear layers with the kernels of its engine, so that trainer and sampler get the
same bits. The engine's kernels have no gradients; this file adds them:

| operator | forward | backward |
|---|---|---|
| RMSNorm | [`~layers.norm.rms_norm`], which the engine is given too | a kernel beside it |
| rotary embedding R(p) | the engine's, p counting a sequence's own tokens | dX = R(-p) dY, by the same kernel |
| attention | the engine's, over packed sequences, each row's keys in one part | of torch's flash attention |
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


@dataclass(frozen=True)
class Kernels:
    """
    The kernels of one engine's model, without gradients.

    Attributes:
        rotate (`Callable`): (positions (T,), q (T, H D), k (T, G D), inverse) turns q and k in place, or back.
        attend (`Callable`): (q (T, H, D), k and v (T, G, D), packed, scale, window) to (T, H, D), causal.
        score (`Callable`): (logits (N, vocabulary), ids (N,), temperature) to log-probabilities (N,), FP32, in nats.
        rotated (`int`): Features of a head that are rotated.
        dtype (`torch.dtype`): Type in which the engine computes.
    """

    rotate: Callable[[Tensor, Tensor, Tensor, bool], None]
    attend: Callable[..., Tensor]
    score: Callable[[Tensor, Tensor, float], Tensor]
    rotated: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Packed:
    """
    Sequences without their padding, one after the other.

    Attributes:
        rows (`torch.Tensor` or `None`): (T,), the places of the tokens among B S; `None` if all are tokens.
        positions (`torch.Tensor`): (T,), the position of each token in its sequence.
        starts (`torch.Tensor`): (B + 1,), INT32, where sequences start among T.
        longest (`int`): Tokens of the longest.
    """

    rows: Tensor | None
    positions: Tensor
    starts: Tensor
    longest: int

    @classmethod
    def of(cls, mask: Tensor | None, batch: int, length: int, device: torch.device) -> "Packed":
        """Packs by a mask (B, S), which is true on tokens; `None` where there is no padding."""
        if mask is None:
            positions = torch.arange(length, device=device).repeat(batch)
            starts = torch.arange(batch + 1, device=device, dtype=torch.int32) * length
            return cls(None, positions, starts, length)
        mask = mask.bool()
        lengths = mask.sum(1)
        starts = F.pad(lengths.cumsum(0), (1, 0)).int()
        rows = mask.flatten().nonzero().squeeze(1)
        return cls(rows, (mask.cumsum(1) - 1).flatten()[rows], starts, int(lengths.max()))

    @classmethod
    def between(cls, starts: Tensor, longest: int, length: int) -> "Packed":
        """Takes sequences that are packed already: `starts` and `longest` as above, and the number of all tokens."""
        counts = starts.diff()
        first = starts[:-1].repeat_interleave(counts, output_size=length)
        return cls(None, torch.arange(length, device=starts.device) - first, starts, longest)


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
        ctx.save_for_backward(q, k, v)
        ctx.given = packed, scale, window
        return kernel(q, k, v, packed, scale, window)

    @staticmethod
    def backward(ctx, dy):
        return *_gradients(ctx, lambda *qkv: flash_attention(*qkv, *ctx.given), dy), None, None, None, None


def _gradients(ctx, function: Callable, dy: Tensor) -> list[Tensor | None]:
    """The gradients of torch's own operator for the same function, with respect to the saved tensors."""
    saved = ctx.saved_tensors
    needed = ctx.needs_input_grad[: len(saved)]
    with torch.enable_grad():
        inputs = [x.detach().requires_grad_(needs) for x, needs in zip(saved, needed, strict=True)]
        found = iter(torch.autograd.grad(function(*inputs), [x for x in inputs if x.requires_grad], dy))
    return [next(found) if needs else None for needs in needed]


def _rotated(q: Tensor, k: Tensor, positions: Tensor, kernel: Callable, inverse: bool) -> tuple[Tensor, Tensor]:
    turned = q.flatten(1).clone(), k.flatten(1).clone()
    kernel(positions, *turned, inverse)
    return turned[0].view(q.shape), turned[1].view(k.shape)


def flash_attention(q: Tensor, k: Tensor, v: Tensor, packed: Packed, scale: float, window: int | None) -> Tensor:
    """
    Computes torch's causal attention over packed sequences, with gradients: flash attention on a GPU, elsewhere one
    sequence after the other.

    Args:
        q, k, v (`torch.Tensor`): (T, H, D), (T, G, D), (T, G, D).
        packed ([`Packed`]): Which tokens belong to which sequence.
        scale (`float`): Factor of the products of queries and keys.
        window (`int`, *optional*): Tokens that a token attends to, itself included; `None` for all before it.

    Returns:
        `torch.Tensor`: (T, H, D).
    """
    if q.is_cuda and q.dtype != torch.float32:  # flash attention has no FP32
        sides = {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}
        starts, longest = packed.starts, packed.longest
        return torch.ops.aten._flash_attention_forward(
            q, k, v, starts, starts, longest, longest, 0.0, True, False, scale=scale, **sides
        )[0]
    parts = []
    for first, last in zip(packed.starts[:-1].tolist(), packed.starts[1:].tolist(), strict=True):
        one = [x[first:last].transpose(0, 1).unsqueeze(0) for x in (q, k, v)]
        seen = torch.ones(last - first, last - first, dtype=torch.bool, device=q.device).tril()
        seen = seen if window is None else seen.triu(1 - window)
        y = F.scaled_dot_product_attention(*one, attn_mask=seen, scale=scale, enable_gqa=True)
        parts.append(y.squeeze(0).transpose(0, 1))
    return torch.cat(parts)


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
        self._last: tuple | None = None  # one mask, or one tensor of borders, serves all layers of a forward pass

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        *how,
        starts: Tensor | None = None,
        longest: int | None = None,
    ) -> Tensor:
        """
        Args:
            q, k, v (`torch.Tensor`): (B, H, S, D), (B, G, S, D), (B, G, S, D), not rotated.
            mask (`torch.Tensor`, *optional*): (B, S), true on tokens; `None` where there is no padding.
            how: `scale` and `window` of [`flash_attention`].
            starts, longest: As in [`Packed`], where the one row (B = 1) is packed; `mask` is then ignored.

        Returns:
            `torch.Tensor`: (B, S, H, D), zeros on padding.
        """
        batch, heads, length, size = q.shape
        if starts is None:
            packed = self._packed(mask, Packed.of, batch, length, q.device)
        else:
            packed = self._packed(starts, Packed.between, longest, length)
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
        if packed.rows is not None:
            q, k, v = (x[packed.rows] for x in (q, k, v))
        q, k = _Rotate.apply(q, k, packed.positions, self.kernels.rotate)
        y = _Attend.apply(q, k, v.contiguous(), packed, *how, self.kernels.attend)
        if packed.rows is not None:
            y = y.new_zeros(batch * length, heads, size).index_copy(0, packed.rows, y)
        return y.view(batch, length, heads, size)

    def _packed(self, told: Tensor | None, make: Callable[..., Packed], *shape) -> Packed:
        if self._last is None or self._last[0] is not told or self._last[1] != shape:
            self._last = told, shape, make(told, *shape)
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
