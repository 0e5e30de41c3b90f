r"""
Log-probabilities as an engine computes them: the log-softmax of the logits by its own kernel, with gradients.

| symbol | here | shape |
|---|---|---|
| N | tokens that are scored | |
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


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
        from ...kernels import head as kernels

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
        score (`Callable`): As in [`~attention.Kernels`].
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
    """A `score` of [`~attention.Kernels`], in FP32 from the division by the temperature on. Logits: (N, vocabulary)."""
    # To divide by a Python number, torch would multiply by its reciprocal
    tempered = logits.float() / torch.full((1,), temperature, device=logits.device)
    return tempered.log_softmax(-1).gather(1, ids.unsqueeze(1)).squeeze(1), tempered
