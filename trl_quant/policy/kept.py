r"""
Log-probabilities in the distribution that a truncating sampler draws from.

`top_p`, `top_k` and `min_p` leave a sampler the tokens K, among which it draws with the probabilities of what is left.
A policy that scores the drawn token among all tokens differs from it even if both have the same logits. So the policy
is truncated too, to the sampler's K ([`~rollout.kept`]). With x (N, features), W (V, features), and the targets t:

    z         = (x W^T + b), scaled, capped and divided by the temperature     (N, V)
    log pi(t) = z[t] - logsumexp over K of z                                   (N,)
    dlog pi(t) / dz_j = [j = t] - [j in K] exp(z_j - logsumexp over K of z)    (N, V)

Its own K, which would follow from its own logits, is not taken: a token in the sampler's K alone would have
probability 0, and an infinite logarithm.

| symbol | here | shape |
|---|---|---|
| N | tokens that are scored | |
| K | [`Truncation`], one for each token | |
| mass | `exp(log pi over all tokens - log pi over K)`: the policy's probability of K | (N,) |

The head is TRL's, which computes entropies over all tokens. They stay so.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..trl_seams import add_product, renormalised_log_probs, scoring_with


KEPT = "kept_tokens"  # the keyword that takes a `Truncation` to packed rows, and the batch's column
LOGITS_AT_ONCE = 2**25  # in memory
BITS_OF_A_WORD = 32


def words_of_mask(vocabulary: int) -> int:
    """Returns the number of words in a bit mask of a vocabulary."""
    return -(-vocabulary // BITS_OF_A_WORD)


@dataclass
class Truncation:
    """
    The tokens that were left to the sampler, of one forward pass.

    Parameters:
        words (`torch.Tensor`): (M,), INT32: the entries, one after the other, as in [`~rollout.kept.Kept`].
        starts (`torch.Tensor`): (E + 1,): where each entry begins.
        places (`torch.Tensor`): Integers, for each token of the pass the number of its entry; negative without one.
        vocabulary (`int`): The number of tokens that the sampler scores.
        masses (`list[torch.Tensor]`): Once the pass has scored, (2,): the sum of the policy's probabilities of K over
            the scored tokens with an entry, and their number.
    """

    words: Tensor
    starts: Tensor
    places: Tensor
    vocabulary: int
    masses: list[Tensor] = field(default_factory=list)

    def packed(self, rows: Tensor, filled: int) -> "Truncation":
        """Returns the entries of a packed row: of the tokens at `rows`, of which the last `filled` have none."""
        places = self.places.flatten()[rows]
        places[len(rows) - filled :] = -1
        return replace(self, places=places.unsqueeze(0))

    def scoring(self, labels: Tensor) -> AbstractContextManager:
        """
        Context of a forward pass with TRL's head, which scores `labels` (B, S): those that are not -100, or all.
        """
        places = torch.where(labels == -100, -1, self.places)[:, 1:]
        places = places.flatten(), places[labels[:, 1:] != -100]

        def renormalise(full: Tensor, *head, **how) -> Tensor:
            of_all, of_scored = places
            of_each = of_all if len(full) == len(of_all) else of_scored
            logps = log_probs_over(*head, replace(self, places=of_each), **how)
            is_known = of_each >= 0
            mass = (full - logps.detach()).exp()
            self.masses.append(torch.stack([mass[is_known].sum(), is_known.sum()]).double())
            return logps

        return scoring_with(renormalised_log_probs(renormalise))

    def allowed(self, tokens: slice, size: int) -> Tensor:
        """Returns which of `size` ids were left for some tokens of the pass: (n, size)."""
        places = self.places[tokens]
        starts, ends = self.starts[places.clamp(min=0)], self.starts[places + 1]
        counts = (ends - starts).clamp(min=0)  # place -1 ends where all entries begin
        width = words_of_mask(self.vocabulary)
        allowed = (counts == 0).unsqueeze(1).repeat(1, size)
        allowed[:, self.vocabulary :] &= (places < 0).unsqueeze(1)  # rows of the head for which there is no token
        is_mask = counts == width
        listed = counts.masked_fill(is_mask, 0)
        rows = torch.arange(len(places), device=places.device).repeat_interleave(listed)
        within = torch.arange(len(rows), device=places.device) - (listed.cumsum(0) - listed)[rows]
        allowed[rows, self.words[starts[rows] + within].long()] = True
        bits = self.words[starts[is_mask].unsqueeze(1) + torch.arange(width, device=places.device)]
        bits = (bits.unsqueeze(-1) >> torch.arange(BITS_OF_A_WORD, device=places.device, dtype=torch.int32)) & 1
        allowed[is_mask, : self.vocabulary] = bits.flatten(1)[:, : self.vocabulary].bool()
        return allowed


class _LogProbsOver(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, truncation, temperature, cap, scale):
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        ctx.given = truncation, temperature, cap, scale, dtype
        logps = hidden.new_empty(len(hidden), dtype=torch.float32)
        totals = torch.empty_like(logps)
        for part, _, z in _truncated(hidden, weight, bias, *ctx.given):
            totals[part] = z.logsumexp(1)
            logps[part] = z.gather(1, targets[part].unsqueeze(1)).squeeze(1) - totals[part]
        ctx.save_for_backward(hidden, weight, bias, targets, totals)
        return logps

    @staticmethod
    def backward(ctx, dlogps):
        hidden, weight, bias, targets, totals = ctx.saved_tensors
        _, temperature, cap, scale, dtype = ctx.given
        needs_dx, needs_dw, needs_db = ctx.needs_input_grad[:3]
        dx = torch.empty_like(hidden) if needs_dx else None
        dw = torch.zeros_like(weight, dtype=torch.float32) if needs_dw else None
        db = torch.zeros_like(bias, dtype=torch.float32) if needs_db else None
        for part, w, z in _truncated(hidden, weight, bias, *ctx.given):
            slope = scale / temperature
            if cap is not None:  # of cap tanh(y / cap); where z is infinite, its probability is 0
                slope = slope * (1 - (z.nan_to_num(neginf=0.0) * temperature / cap).square())
            d = (z - totals[part].unsqueeze(1)).exp_().neg_()
            d.scatter_add_(1, targets[part].unsqueeze(1), torch.ones_like(d[:, :1]))
            d *= dlogps[part].unsqueeze(1) * slope
            if needs_db:
                db += d.sum(0)
            d = d.to(dtype)
            if needs_dx:  # dX (n, features) = dZ (n, V) @ W (V, features)
                dx[part] = (d @ w).to(dx.dtype)
            if needs_dw:  # dW (V, features) = dZ^T (V, n) @ X (n, features)
                add_product(dw, d.t(), hidden[part].to(dtype))
        dw, db = (None if x is None else x.to(like.dtype) for x, like in ((dw, weight), (db, bias)))
        return dx, dw, db, *[None] * 5


def _truncated(hidden, weight, bias, truncation, temperature, cap, scale, dtype):
    """Yields slices of the tokens, the weight in `dtype`, and their z in FP32, -inf outside of K."""
    weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
    rows = max(1, LOGITS_AT_ONCE // len(weight))
    with torch.autocast(hidden.device.type, enabled=False):
        for start in range(0, len(hidden), rows):
            part = slice(start, start + rows)
            z = torch.nn.functional.linear(hidden[part].to(dtype), weight, bias).float() * scale
            z = z if cap is None else cap * (z / cap).tanh()
            yield part, weight, (z / temperature).masked_fill_(~truncation.allowed(part, len(weight)), -torch.inf)


def log_probs_over(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    truncation: Truncation,
    temperature: float = 1.0,
    cap: float | None = None,
    scale: float = 1.0,
) -> Tensor:
    """
    Computes log pi(t) over K, as this module's docstring has it. At most [`LOGITS_AT_ONCE`] logits are in memory. It
    costs one product with the head, and three in the backward pass.

    Args:
        hidden (`torch.Tensor`): (N, features), the input of the head.
        weight, bias (`torch.Tensor`): The head's, (V, features) and (V,) or `None`.
        targets (`torch.Tensor`): (N,), ids of the tokens.
        truncation ([`Truncation`]): With the places (N,) of these tokens. One without an entry is scored among all.
        temperature (`float`, *optional*), scale (`float`, *optional*): Divisor and factor of the logits.
        cap (`float`, *optional*): Gemma 2's cap on the logits; `None` for none.

    Returns:
        `torch.Tensor`: (N,), FP32, in nats, with gradients for `hidden`, `weight` and `bias`.
    """
    return _LogProbsOver.apply(hidden, weight, bias, targets, truncation, temperature, cap, scale)
