"""
Packed rows: sequences in one row, one after the other, without padding between them and with each prompt once.

A row consists of segments. Without shared prompts each sequence is one segment, and a token attends to itself and to
the tokens before it in its segment. Sequences with the same prompt share it:

    [prompt without its last token] [last token, completion 1] [last token, completion 2] ...

The last token of a prompt predicts another token in each completion, so each completion has its own. A completion's
tokens attend to the prompt's segment too: its keys and values are copied in front of the completion's own.

| symbol | here |
|---|---|
| B, S | sequences and their length, padded |
| T | tokens of the row |
| C | segments |
| K | keys of all segments, one segment's after the other; K = T where no prompt is shared |
"""

from collections import Counter
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


PACKED = "packed_row"  # the keyword that takes a `Packed` through transformers' layers to their attention


@dataclass(frozen=True)
class Packed:
    """
    The places of tokens in a packed row, and the keys that each segment attends to.

    Attributes:
        rows (`torch.Tensor` or `None`): (T,), the indices of the tokens in the flattened (B, S); `None` if there is no
            padding.
        positions (`torch.Tensor`): (T,), the position of each token in its sequence.
        starts (`torch.Tensor`): (C + 1,), INT32, where segments start in T.
        longest (`int`): Tokens of the longest segment.
        key_rows (`torch.Tensor` or `None`): (K,), the indices of the keys in T; `None` if segments share no keys.
        key_starts (`torch.Tensor`): (C + 1,), INT32, where the keys of a segment start in K.
        longest_keys (`int`): The largest number of keys of a segment.
        shape (`tuple[int, int]`): (B, S).
        filled (`int`): Tokens at the end of the row that belong to no sequence, see [`filled_up`].
    """

    rows: Tensor | None
    positions: Tensor
    starts: Tensor
    longest: int
    key_rows: Tensor | None
    key_starts: Tensor
    longest_keys: int
    shape: tuple[int, int]
    filled: int = 0

    @classmethod
    def of(cls, mask: Tensor | None, batch: int, length: int, device: torch.device) -> "Packed":
        """Packs by a mask (B, S), which is true on tokens; `None` if there is no padding."""
        if mask is None:
            positions = torch.arange(length, device=device).repeat(batch)
            starts = torch.arange(batch + 1, device=device, dtype=torch.int32) * length
            return cls(None, positions, starts, length, None, starts, length, (batch, length))
        mask = mask.bool()
        lengths = mask.sum(1)
        starts = F.pad(lengths.cumsum(0), (1, 0)).int()
        longest = int(lengths.max())
        return cls(*_places(mask, mask), starts, longest, None, starts, longest, (batch, length))

    @classmethod
    def sharing(cls, mask: Tensor, ids: Tensor, prompt: int) -> "Packed":
        """
        Packs by a mask, so that a prompt of several sequences is computed once.

        Args:
            mask (`torch.Tensor`): (B, S), true on tokens.
            ids (`torch.Tensor`): (B, S).
            prompt (`int`): Columns of the prompts, which are padded on the left.
        """
        mask = mask.bool()
        if prompt < 2:
            return cls.of(mask, *mask.shape, mask.device)
        prompts = ids[:, :prompt].masked_fill(~mask[:, :prompt], -1)
        names = torch.unique(prompts, dim=0, return_inverse=True)[1].tolist()  # equal numbers for equal prompts
        shareable = (mask[:, : prompt - 1].sum(1) * mask[:, prompt - 1]).tolist()  # tokens before the prompt's last one
        lengths = mask.sum(1).tolist()
        sequences = Counter(names)  # prompt -> number of its sequences

        segments: list[int] = []  # their lengths
        keys: list[list[tuple[int, int]]] = []  # of each segment, as (first token, number of tokens)
        shared: dict[int, tuple[int, int]] = {}  # the segment of each shared prompt
        again: list[int] = []  # sequences whose prompt belongs to an earlier sequence too
        place = 0  # tokens of the row so far
        for sequence, (name, before, length) in enumerate(zip(names, shareable, lengths, strict=True)):
            if before == 0 or sequences[name] == 1:
                before, path = 0, []
            elif name in shared:
                path = [shared[name]]
                again.append(sequence)
            else:
                shared[name] = (place, before)
                path = [shared[name]]
                segments.append(before)
                keys.append(path)
                place += before
            segments.append(length - before)
            keys.append([*path, (place, length - before)])
            place += length - before
        if not shared:
            return cls.of(mask, *mask.shape, mask.device)

        computed = mask.clone()
        computed[again, : prompt - 1] = False
        counts = [sum(length for _, length in path) for path in keys]
        starts, key_starts = (F.pad(torch.tensor(sizes).cumsum(0), (1, 0)).int() for sizes in (segments, counts))
        key_rows = torch.cat([torch.arange(first, first + length) for path in keys for first, length in path])
        starts, key_starts, key_rows = (x.to(mask.device) for x in (starts, key_starts, key_rows))
        places, longest, shape = _places(mask, computed), max(segments), tuple(mask.shape)
        return cls(*places, starts, longest, key_rows, key_starts, max(counts), shape)

    def filled_up(self, multiple: int) -> "Packed":
        """Adds a segment of fewer than `multiple` copies of the first token, so that `multiple` divides T."""
        tokens = len(self.positions)
        missing = -tokens % multiple
        if not missing:
            return self
        new = torch.arange(missing, device=self.positions.device)
        return Packed(
            rows=torch.cat([self.rows, self.rows[:1].expand(missing)]),
            positions=torch.cat([self.positions, new]),
            starts=torch.cat([self.starts, self.starts[-1:] + missing]),
            longest=max(self.longest, missing),
            key_rows=None if self.key_rows is None else torch.cat([self.key_rows, tokens + new]),
            key_starts=torch.cat([self.key_starts, self.key_starts[-1:] + missing]),
            longest_keys=max(self.longest_keys, missing),
            shape=self.shape,
            filled=missing,
        )

    def copies(self) -> Tensor:
        """Returns in how many sequences each token of the row occurs, (T,): several for a shared prompt's."""
        count = torch.ones_like(self.positions)
        if self.key_rows is not None:  # keys of a shared prompt stand in its own segment, and in each completion's
            count = (torch.bincount(self.key_rows, minlength=len(count)) - 1).clamp(min=1)
        count[len(count) - self.filled :] = 0
        return count

    def padded(self, x: Tensor) -> Tensor:
        """Scatters values of the row's tokens (T, ...) to their positions in (B, S, ...), with zeros elsewhere."""
        tokens, (batch, length) = len(x) - self.filled, self.shape
        padded = x.new_zeros(batch * length, *x.shape[1:]).index_copy(0, self.rows[:tokens], x[:tokens])
        return padded.view(batch, length, *x.shape[1:])

    def with_shared(self, x: Tensor) -> Tensor:
        """Gathers the keys or values (K, G, D) of all segments from those of the row's tokens (T, G, D)."""
        return x if self.key_rows is None else _Gather.apply(x, self.key_rows)


def _places(mask: Tensor, computed: Tensor) -> tuple[Tensor, Tensor]:
    """
    Returns `rows` and `positions` of the tokens that are `computed`. Positions count all tokens of a sequence, computed
    or not. Both masks are (B, S).
    """
    rows = computed.flatten().nonzero().squeeze(1)
    return rows, (mask.cumsum(1) - 1).flatten()[rows]


class _Gather(torch.autograd.Function):
    """Takes rows by their indices. The backward pass sums the gradients of a repeated row in FP32."""

    @staticmethod
    def forward(ctx, x, rows):
        ctx.save_for_backward(rows)
        ctx.length = len(x)
        return x[rows]

    @staticmethod
    def backward(ctx, dy):
        (rows,) = ctx.saved_tensors
        exact = torch.promote_types(dy.dtype, torch.float32)
        dx = dy.new_zeros(ctx.length, *dy.shape[1:], dtype=exact)
        return dx.index_add_(0, rows, dy.to(exact)).to(dy.dtype), None


def flash_attention(q: Tensor, k: Tensor, v: Tensor, packed: Packed, scale: float, window: int | None) -> Tensor:
    """
    Computes torch's causal attention within each segment of a packed row, with gradients: flash attention on a GPU,
    elsewhere and in FP32 one segment after the other. Autocast acts on it as on torch's SDPA.

    Args:
        q (`torch.Tensor`): (T, H, D).
        k, v (`torch.Tensor`): (K, G, D), of [`Packed.with_shared`].
        packed ([`Packed`]): The segments.
        scale (`float`): Factor of the products of queries and keys.
        window (`int`, *optional*): Tokens that a token attends to, itself included; `None` for all before it.

    Returns:
        `torch.Tensor`: (T, H, D).
    """
    if torch.is_autocast_enabled(q.device.type):
        q, k, v = (x.to(torch.get_autocast_dtype(q.device.type)) for x in (q, k, v))
    if q.is_cuda and q.dtype != torch.float32:  # flash attention has no FP32
        borders, options = _for_torch(packed, scale, window)
        return torch.ops.aten._flash_attention_forward(q, k, v, *borders, 0.0, True, False, **options)[0]
    parts = []
    queries, keys = packed.starts.diff().tolist(), packed.key_starts.diff().tolist()
    for one_q, one_k, one_v in zip(q.split(queries), k.split(keys), v.split(keys), strict=True):
        before = len(one_k) - len(one_q)  # keys of the shared prompt
        seen = None
        if before or window is not None:
            seen = torch.ones(len(one_q), len(one_k), dtype=torch.bool, device=q.device).tril(before)
            seen = seen if window is None else seen.triu(before + 1 - window)
        one = [x.transpose(0, 1).unsqueeze(0) for x in (one_q, one_k, one_v)]
        y = F.scaled_dot_product_attention(*one, attn_mask=seen, is_causal=seen is None, scale=scale, enable_gqa=True)
        parts.append(y.squeeze(0).transpose(0, 1))
    return torch.cat(parts)


def flash_attention_gradients(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    lse: Tensor,
    packed: Packed,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """
    Computes the gradients of [`flash_attention`] on a GPU from another kernel's results, without a forward pass.

    Args:
        dy (`torch.Tensor`): (T, H, D), the gradient of `y`.
        q, k, v, packed, scale, window: As in [`flash_attention`], in BF16 or FP16.
        y (`torch.Tensor`): (T, H, D), the result of the forward pass.
        lse (`torch.Tensor`): (H, T), FP32, its log-sum-exp of the scaled products, natural.

    Returns:
        `tuple[torch.Tensor, torch.Tensor, torch.Tensor]`: The gradients of q, k and v, of their shapes.
    """
    borders, options = _for_torch(packed, scale, window)
    random = torch.empty(2, dtype=torch.uint64, device=q.device), torch.empty(0, dtype=torch.uint64, device=q.device)
    return torch.ops.aten._flash_attention_backward(dy, q, k, v, y, lse, *borders, 0.0, True, *random, **options)


def _for_torch(packed: Packed, scale: float, window: int | None) -> tuple[tuple, dict]:
    """Returns arguments of torch's flash attention: the segments' borders, then scale and window."""
    sides = {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}
    return (packed.starts, packed.key_starts, packed.longest, packed.longest_keys), {"scale": scale} | sides
