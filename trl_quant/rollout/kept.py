"""
The tokens that `top_p`, `top_k` and `min_p` left a sampler to draw from, for each token that it drew.

They are token ids, and not a threshold on logits: only the sampler's own logits would have it. Two forms bound the
memory. With a vocabulary of V tokens, W = ceil(V / 32), and K tokens left for a drawn one, its entry has

| words of 32 bits | if | they are |
|---|---|---|
| K | K < W | the ids |
| W | W <= K < V | a bit mask: token i is left if bit i mod 32 of word i div 32 is set |
| 0 | K = V | |

An entry so takes at most V / 8 bytes: 19 KB for 152k tokens. With `top_p=0.9` a taught model leaves ten or so.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..policy.kept import BITS_OF_A_WORD, words_of_mask


NOT_KNOWN = -1  # words of a token of which is not known what was left, such as one that a tool wrote


class Kept(NamedTuple):
    """
    What was left for each token of one completion.

    Parameters:
        words (`torch.Tensor`): (M,), INT32: the entries of all tokens, one after the other.
        counts (`torch.Tensor`): (T,), INT32: the words of each entry; [`NOT_KNOWN`] for a token without one.
        vocabulary (`int`): The number V of tokens that the sampler scores.
    """

    words: Tensor
    counts: Tensor
    vocabulary: int

    @classmethod
    def of(cls, left: Iterable[np.ndarray], vocabulary: int) -> "Kept":
        """Returns the entries of tokens for which the ids `left`, integers (K,), were left."""
        entries = [_entry(np.asarray(ids, dtype=np.int32), vocabulary) for ids in left]
        words = np.concatenate([np.empty(0, np.int32), *entries])
        counts = torch.tensor([len(entry) for entry in entries], dtype=torch.int32)
        return cls(torch.from_numpy(words), counts, vocabulary)

    def first(self, tokens: int) -> "Kept":
        """Returns the entries of the first `tokens`, or of all if there are fewer."""
        counts = self.counts[:tokens]
        return Kept(self.words[: counts.clamp(min=0).sum()].clone(), counts.clone(), self.vocabulary)

    def ids(self) -> list[np.ndarray]:
        """Returns the ids that were left for each token; all where it is not known."""
        words, _, starts = self._arrays()
        return [_ids(words[start:end], self.vocabulary) for start, end in pairwise(starts)]

    def holds(self, tokens: list[int]) -> np.ndarray:
        """Returns whether each of as many tokens as there are entries is among those that were left, (T,)."""
        words, counts, starts = self._arrays()
        tokens, width = np.asarray(tokens, dtype=np.int64), words_of_mask(self.vocabulary)
        has_mask, held = counts == width, counts == 0
        bits = words[starts[:-1][has_mask] + tokens[has_mask] // BITS_OF_A_WORD] >> (
            tokens[has_mask] % BITS_OF_A_WORD
        ).astype(np.int32)
        held[has_mask] = bits & 1
        entry = np.repeat(np.arange(len(tokens)), counts)
        is_found = (words == tokens[entry]) & ~has_mask[entry]
        held[entry[is_found]] = True
        return held

    def _arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the words, the words of each entry, none where there is no entry, and where each begins and ends."""
        counts = self.counts.clamp(min=0).numpy()
        return self.words.numpy(), counts, np.concatenate([[0], counts.cumsum()])


def then(before: Kept | None, after: Kept, so_far: int) -> Kept:
    """
    Returns the entries of a completion that went on.

    Args:
        before ([`Kept`] or `None`): Those of its tokens so far; `None` if they are not known.
        after ([`Kept`]): Those of the tokens after them.
        so_far (`int`): The tokens so far. Those that `before` lacks have no entry.
    """
    before = Kept.of([], after.vocabulary) if before is None else before.first(so_far)
    between = torch.full((so_far - len(before.counts),), NOT_KNOWN, dtype=torch.int32)
    counts = torch.cat([before.counts, between, after.counts])
    return Kept(torch.cat([before.words, after.words]), counts, after.vocabulary)


def _entry(ids: np.ndarray, vocabulary: int) -> np.ndarray:
    if len(ids) == vocabulary:
        return ids[:0]
    if len(ids) < words_of_mask(vocabulary):
        return ids
    mask = np.zeros(words_of_mask(vocabulary) * BITS_OF_A_WORD, dtype=bool)
    mask[ids] = True
    return np.packbits(mask, bitorder="little").view(np.int32)


def _ids(words: np.ndarray, vocabulary: int) -> np.ndarray:
    if len(words) == words_of_mask(vocabulary):
        return np.flatnonzero(np.unpackbits(words.view(np.uint8), count=vocabulary, bitorder="little"))
    return words if len(words) else np.arange(vocabulary)


def fault_of_kept(kept: Sequence[Kept | None], token_ids: list[list[int]], vocabulary: int) -> str | None:
    """
    Returns what is wrong with the tokens that an engine says were left, or `None`.

    Args:
        kept (`Sequence[Kept | None]`): Those of each completion; `None` for one that was not sampled.
        token_ids (`list[list[int]]`): The tokens that were sampled.
        vocabulary (`int`): Number of the policy's tokens.
    """
    if len(kept) != len(token_ids):
        return f"what was left for {len(kept)} completions was returned with {len(token_ids)} completions"
    for row, (found, sampled) in enumerate(zip(kept, token_ids, strict=True)):
        if found is None:
            continue
        if len(found.counts) != len(sampled):
            return f"completion {row} has {len(sampled)} tokens, and what was left is known for {len(found.counts)}"
        if found.vocabulary > vocabulary or max(sampled, default=0) >= found.vocabulary:
            return (
                f"what was left for completion {row} is of {found.vocabulary} tokens, and the policy has {vocabulary}"
            )
        held = found.holds(sampled)
        if not held.all():
            place = int(held.argmin())
            return f"token {place} of completion {row}, {sampled[place]}, is not among those that were left"
    return None
