"""How transformers' `generate` draws for the embedded engine: its logits processors, and where completions end."""

import numpy as np
import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    StoppingCriteria,
    StopStringCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ..engine import Enough
from ..kept import Kept


class SampledLogps(LogitsProcessor):
    """
    The last logits processor. Collects at each step the log-probability of the token that is sampled, and with `keeps`
    the tokens that the others left to draw it from.
    """

    def __init__(self, keeps: bool):
        self.keeps = keeps
        self.logps: list[Tensor] = []
        self.left: list[list[np.ndarray]] = []  # step -> row -> ids
        self._scores = None

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        self.take(input_ids[:, -1])
        self._scores = scores
        return scores

    def take(self, token_ids: torch.LongTensor) -> None:
        """Takes the tokens (B,) that were sampled from the last scores."""
        if self._scores is not None:
            chosen = self._scores.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
            self.logps.append((chosen - self._scores.logsumexp(-1)).float())
            if self.keeps:
                rows, ids = (self._scores > -torch.inf).nonzero(as_tuple=True)
                counts = torch.bincount(rows, minlength=len(chosen)).cumsum(0)[:-1]
                self.left.append(np.split(ids.int().cpu().numpy(), counts.cpu().numpy()))

    def kept(self, lengths: list[int]) -> list[Kept]:
        """Returns the tokens that were left for the first tokens of each row, as many as its length."""
        size = self._scores.shape[-1]
        return [Kept.of([step[row] for step in self.left[:n]], size) for row, n in enumerate(lengths)]


class Likeliest(LogitsProcessor):
    """Keeps only the likeliest token (of equals, the first), for a temperature of 0. Raises for NaN and infinity."""

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        if not scores.amax(-1).isfinite().all():  # `amax` is NaN if any score is
            raise ValueError("The model computes scores that are not finite, so no token is the likeliest.")
        return torch.full_like(scores, -torch.inf).scatter(-1, scores.argmax(-1, keepdim=True), 0.0)


class Least(LogitsProcessor):
    """Forbids the `end_ids` to each row until it has sampled the `least` number of tokens, (B,)."""

    def __init__(self, least: Tensor, end_ids: list[int]):
        self.least, self.end_ids, self.tokens = least, torch.tensor(end_ids, device=least.device), 0

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        is_end = torch.isin(torch.arange(scores.shape[-1], device=scores.device), self.end_ids)
        is_forbidden = is_end & (self.least > self.tokens)[:, None]  # (B, vocabulary)
        self.tokens += 1
        return scores.masked_fill(is_forbidden, -torch.inf)


class Ends(StoppingCriteria):
    """
    Says where each row ends: with one of `end_ids`, with one of the `strings`, after the `rest` of its tokens, (B,), or
    with all others once `enough` says so.

    Attributes:
        columns (`list[torch.Tensor]`): For each sampled token, whether each row may end with it, (B,).
        ended (`torch.Tensor`): Whether each row has ended by itself, (B,).
        is_early (`bool`): Whether `enough` has ended the others.
    """

    def __init__(self, rest: Tensor, end_ids: list[int], strings, tokenizer, enough: Enough | None):
        self.rest, self.end_ids, self.enough = rest, torch.tensor(end_ids, device=rest.device), enough
        self.strings = StopStringCriteria(tokenizer, strings) if strings else None
        self.columns: list[Tensor] = []
        self.ended = torch.zeros_like(rest, dtype=torch.bool)
        self.is_early = False

    def __call__(self, input_ids: torch.LongTensor, scores, **kwargs) -> Tensor:
        is_end = torch.isin(input_ids[:, -1], self.end_ids) | (self.rest <= len(self.columns) + 1)
        if self.strings is not None:
            is_end |= self.strings(input_ids, scores)
        self.columns.append(is_end)
        self.ended |= is_end
        self.is_early = self.enough is not None and not self.ended.all() and self.enough(self.ended.tolist())
        return self.ended | self.is_early


def lengths_to_end(is_end: Tensor) -> list[int]:
    """
    Returns the length of each completion, up to and including its first end, or in full if it has none.

    Args:
        is_end (`torch.Tensor` of shape `(B, T)`): Booleans, true where a completion may end.
    """
    return torch.where(is_end.any(1), is_end.int().argmax(1) + 1, is_end.shape[1]).tolist()


def warpers(options: dict, device: torch.device) -> LogitsProcessorList:
    """Moves temperature, top-k, top-p and min-p from `options` to processors, in transformers' order."""
    temperature, top_k = options.pop("temperature"), options.pop("top_k")
    top_p, min_p = options.pop("top_p"), options.pop("min_p")
    processors = LogitsProcessorList()
    if temperature == 0:
        processors.append(Likeliest())
    elif temperature != 1.0:
        processors.append(TemperatureLogitsWarper(temperature))
    if top_k and top_k != -1:  # -1 means none in vLLM
        processors.append(TopKLogitsWarper(top_k))
    if top_p < 1.0:
        processors.append(TopPLogitsWarper(top_p))
    if min_p:
        processors.append(MinPLogitsWarper(min_p))
    return processors
