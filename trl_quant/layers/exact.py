r"""
Computes the operators between a policy's linear layers with its engine's kernels, so that trainer and sampler get the
same bits. The engine's kernels have no gradients; this file adds them:

| operator | forward | backward |
|---|---|---|
| RMSNorm | [`~layers.norm.rms_norm`], which the engine then uses too | a kernel in the same file |
| rotary embedding R(p) | the engine's, p counting a sequence's own tokens | dX = R(-p) dY, by the same kernel |
| attention | the engine's, over packed rows, a query's keys in one part | torch's, from the engine's log-sum-exp |
| log-probabilities | the logits' log-softmax as the engine computes it | [`frozen_head`]; TRL's if the head trains |

Without this file, a trainer and a sampler of the same format still differ in the last bits of these operators. Such a
bit can move a quantized activation to the next code, and the difference grows from layer to layer: half of the mismatch
remains.

| symbol | here | shape |
|---|---|---|
| B, S | sequences and their length, padded | |
| T | tokens without padding | |
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


class _FrozenHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, ids, temperature, score, entropies, rows, learns):
        ctx.set_materialize_grads(False)
        ctx.given = temperature, score, rows
        found = hidden.new_empty(len(hidden), dtype=torch.float32)
        entropy = torch.empty_like(found) if entropies else None
        gradient = torch.empty_like(hidden) if learns else None
        for part, w, logits in _logits(hidden, weight, bias, rows):
            logp, z = score(logits, ids[part], temperature)
            found[part] = logp
            if not (entropies or learns):
                continue
            entropy_of_part = slopes(z, ids[part], _log_sum_exp(z, ids[part], logp), logits if learns else None)
            if entropies:
                entropy[part] = entropy_of_part
            if learns:
                torch.mm(logits, w, out=gradient[part])
        if learns:
            ctx.save_for_backward(gradient, *((hidden, weight, bias, ids) if entropies else ()))
        return found, entropy

    @staticmethod
    def backward(ctx, dlogp, dentropy):
        gradient, *others = ctx.saved_tensors
        temperature, score, rows = ctx.given
        dx = None if dlogp is None else gradient * (dlogp / temperature).unsqueeze(1)
        if dentropy is not None:
            dx = _of_entropies(dentropy / temperature, *others, temperature, score, rows) + (0 if dx is None else dx)
        return None if dx is None else dx.to(gradient.dtype), *[None] * 8


def _logits(hidden, weight, bias, rows):
    """Yields a slice of at most `rows` tokens, the weight in the type of `hidden`, and the logits of these tokens."""
    weight, bias = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
    with torch.autocast(hidden.device.type, enabled=False):
        for start in range(0, len(hidden), rows):
            part = slice(start, start + rows)
            yield part, weight, F.linear(hidden[part], weight, bias)


def _log_sum_exp(z: Tensor, ids: Tensor, logp: Tensor) -> Tensor:
    """Returns the log-sum-exp (N,) of logits `z` (N, vocabulary) from the log-probabilities `logp` (N,) of `ids`."""
    return z.gather(1, ids.unsqueeze(1)).squeeze(1).float() - logp


def _of_entropies(dentropy, hidden, weight, bias, ids, temperature, score, rows) -> Tensor:
    """Computes dX, (N, features), from the gradient of the tempered logits' entropies: dH/dz = -p (log p + H)."""
    dx = torch.empty_like(hidden, dtype=torch.float32)
    for part, w, logits in _logits(hidden, weight, bias, rows):
        logp, z = score(logits, ids[part], temperature)
        log_p = z.float() - _log_sum_exp(z, ids[part], logp).unsqueeze(1)
        p = log_p.exp()
        log_p -= (p * log_p).sum(1, keepdim=True)
        dx[part] = p.mul_(log_p).mul_(-dentropy[part].unsqueeze(1)).to(w.dtype) @ w
    return dx


def slopes(z: Tensor, ids: Tensor, lse: Tensor, d: Tensor | None) -> Tensor:
    """
    Computes the entropies of rows of logits, and the gradients of the targets' log-probabilities with respect to them.

    Args:
        z (`torch.Tensor`): (N, vocabulary), the logits divided by the temperature.
        ids (`torch.Tensor`): (N,), the targets.
        lse (`torch.Tensor`): (N,), FP32, the rows' log-sum-exp.
        d (`torch.Tensor`, *optional*): (N, vocabulary), gets onehot(ids) - softmax(z), rounded from FP32. It
            may be `z`.

    Returns:
        `torch.Tensor`: (N,), FP32, entropies in nats.
    """
    if z.is_cuda:
        from ..kernels import head as kernels

        return kernels.slopes(z, ids, lse, d)
    log_p = z.float() - lse.unsqueeze(1)
    p = log_p.exp()
    entropies = -(p * log_p).sum(1)
    if d is not None:
        d.copy_(p.neg_().scatter_add_(1, ids.unsqueeze(1), torch.ones_like(p[:, :1])))
    return entropies


def frozen_head(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    score: Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]],
    entropies: bool = False,
    rows: int = 1024,
) -> tuple[Tensor, Tensor | None]:
    r"""
    Computes log-probabilities from logits of the whole vocabulary at once, as an engine does, by a head that does not
    train. With x (N, features), W (vocabulary, features), z = (x W^T + b) / temperature and the targets t:

        logp     = z[t] - logsumexp(z)                              (N,)
        dlogp/dx = (onehot(t) - softmax(z)) W / temperature         (N, features)
        dL/dx    = dL/dlogp * dlogp/dx                              for a loss L

    dlogp/dx does not depend on the loss, so the forward pass computes it while it holds the logits. An update thus
    needs two products with W, and a pass without gradients one. If the loss contains entropies H, the backward pass
    needs two more, for dH/dz = -p (log p + H).

    z are the logits that the engine scores: if it rounds them to 16 bits, they are rounded here too. Their softmax is
    computed in FP32. At most `rows` tokens have their logits in memory at once. The backward pass needs dlogp/dx times
    the temperature, which is kept in the type of `hidden`, and with `entropies` also `hidden`.

    Args:
        hidden (`torch.Tensor`): (N, features), the input of the head, in the type that the engine computes in. It alone
            gets a gradient.
        weight, bias (`torch.Tensor`): The head's, (vocabulary, features) and (vocabulary,) or `None`.
        targets (`torch.Tensor`): (N,), ids of the tokens.
        temperature (`float`): Divisor of the logits.
        score (`Callable`): As in [`Kernels`].
        entropies (`bool`, *optional*): Whether to compute entropies.
        rows (`int`, *optional*): The number of tokens whose logits are held at once.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: (N,), FP32, in nats: log-probabilities, and entropies or `None`.
    """
    learns = torch.is_grad_enabled() and hidden.requires_grad
    return _FrozenHead.apply(hidden, weight, bias, targets, temperature, score, entropies, rows, learns)


@torch.no_grad()
def log_probs(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, *how, **options) -> Tensor:
    """Computes the log-probabilities (N,) of [`frozen_head`], without gradients."""
    return frozen_head(hidden, weight, bias, targets, *how, **options)[0]


def log_softmax(logits: Tensor, ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Scores `logits` (N, vocabulary) as a `score` of [`Kernels`], in FP32 from the division by the temperature on."""
    # To divide by a Python number, torch would multiply by its reciprocal
    tempered = logits.float() / torch.full((1,), temperature, device=logits.device)
    return tempered.log_softmax(-1).gather(1, ids.unsqueeze(1)).squeeze(1), tempered
