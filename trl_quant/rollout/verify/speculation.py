r"""
Checks that an engine with speculative decoding returns the log-probabilities of what it samples.

A drafted token is accepted, or another is drawn in its place, by a sampler that is not the one of ordinary decoding. If
it is wrong, corrections and metrics are wrong too. The self-check does not see that, because its tokens are greedy:
vLLM 0.31 on a CPU was right for those, but returned NaN or values that were 10 nats away at temperature 1.

So the engine draws completions here as the run does, with its temperature T, `top_k` and `top_p`. The prompts repeat
themselves, so that n-grams draft tokens. Each drawn token t is scored by the self-check's reference, whose logits are z
and whose probabilities are p:

    log p(t) = z_t / T - log sum_s exp(z_s / T),   s among t and the tokens that `top_k` and `top_p` leave

| compared, in nats | bound, with the jittered reference of the self-check |
|---|---|
| mean absolute difference between the engine's log-probabilities and log p(t) | SLACK * mean jitter + FLOOR |
| the largest of these differences | SLACK * largest jitter + FLOOR |
| mean of log p(t) - E log p over N tokens | the first bound + UNLIKELY * sqrt(mean Var log p / N) |

The second row finds a fault of a few tokens. The third finds samples of another distribution, since the mean is about 0
for samples of p. Random states are as before when the check ends.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ..engine import Samples, requests_for
from ..settings import SamplingSettings
from .rows import rows_to_check
from .self_check import FLOOR, SLACK, Reference, raise_everywhere


DRAWN_ROWS = 8
PIECE = 24  # tokens that a prompt repeats
REPEATED = 3  # how often
DRAWN_TOKENS = 64  # of each row
UNLIKELY = 6.0  # standard deviations that samples of the policy never reach


def check_speculation(engine) -> dict[str, float]:
    """
    Compares the log-probabilities of samples with the policy's. All ranks must call it, and all of them raise if one
    does.

    Args:
        engine ([`~rollout.vllm.engine.VLLMEngine`]): The engine, which has passed the self-check and has no noise.

    Returns:
        `dict[str, float]`: `sync_check/speculation_difference` and `sync_check/speculation_bound`, in nats.

    Raises:
        `RuntimeError`: The engine's log-probabilities are missing or wrong, its samples are not the policy's, or it
            drafted no token.
    """
    longest = engine.limits()[1]
    new = min(DRAWN_TOKENS, longest // 2)
    settings = replace(drawn_as(engine.settings), max_completion_length=new)
    prompts = repeating_rows(rows_to_check(engine, longest, DRAWN_ROWS * PIECE), min(REPEATED * PIECE, longest - new))

    fault = None
    try:
        samples, drafted = _drawn(engine, prompts, settings)
        if not drafted:
            fault = f"vLLM drafted no token in {len(prompts)} prompts that repeat themselves, so nothing is known"
    except Exception as error:  # a wrong temperature or `top_k` may break vLLM's sampler
        fault = f"vLLM failed while it sampled ({type(error).__name__}: {error})"
    _refuse(engine, fault)

    sequences = [prompt + ids for prompt, ids in zip(prompts, samples.token_ids, strict=True)]
    reference, score = Reference(engine), partial(drawn_scores, settings=settings)
    expected, jittered = (
        torch.stack([row[-new:] for row in reference.logps(sequences, jitter=jitter, score=score)])
        for jitter in (False, True)
    )
    returned = torch.tensor([[float("nan") if logp is None else logp for logp in row] for row in samples.logps])
    fault, metrics = compared(returned, expected, (jittered - expected)[..., 0].abs())
    _refuse(engine, None if fault is None else f"At temperature {settings.temperature:g}, {fault}")
    return metrics


def _refuse(engine, fault: str | None) -> None:
    """Raises `RuntimeError`, on all ranks, if a rank found a fault. All ranks must call it."""
    message = (
        f"`vllm_engine_kwargs` has 'speculative_config'={engine.engine_kwargs['speculative_config']!r}, and what vLLM "
        f"samples with it cannot be used here. {fault}. Leave 'speculative_config' out."
    )
    raise_everywhere(None if fault is None else message)


def drawn_as(settings: SamplingSettings) -> SamplingSettings:
    """
    Returns the settings with which the check draws: the run's temperature, `top_p` and `top_k`. Completions do not end
    by themselves. A run at temperature 0 is checked at 1, because greedy tokens do not show the fault.
    """
    given = settings.generation_kwargs
    temperature, top_p, top_k = (given.get(name, getattr(settings, name)) for name in ("temperature", "top_p", "top_k"))
    return SamplingSettings(temperature or 1.0, top_p, top_k, generation_kwargs={"ignore_eos": True})


def repeating_rows(rows: list[list[int]], length: int) -> list[list[int]]:
    """Returns [`DRAWN_ROWS`] rows of `length` token ids. Each repeats another piece of the given rows."""
    stream = [token for row in rows for token in row]
    pieces = [[stream[(row * PIECE + i) % len(stream)] for i in range(PIECE)] for row in range(DRAWN_ROWS)]
    return [(piece * (length // PIECE + 1))[:length] for piece in pieces]


def _drawn(engine, prompts: list[list[int]], settings: SamplingSettings) -> tuple[Samples, int]:
    """Returns the engine's samples of `prompts`, and the number of tokens that it drafted for them."""
    before, drafts = engine.settings, replace(engine.drafts)
    engine.settings = settings
    try:
        samples = engine.sample(requests_for(prompts))
        return samples, engine.drafts.drafted - drafts.drafted
    finally:
        engine.settings, engine.drafts = before, drafts
        engine.llm.reset_prefix_cache()  # the run's prompts may begin as these do


@contextmanager
def random_states_kept(device: torch.device) -> Iterator[None]:
    """
    Context after which the random states of Python, numpy and torch, on the CPU and on `device`, are as before. vLLM
    draws from torch's; its second model runner seeds each request from numpy's.
    """
    python, arrays = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(arrays)


def drawn_scores(logits: Tensor, tokens: Tensor, settings: SamplingSettings) -> Tensor:
    """
    Computes log p(t) of drawn tokens, and mean and variance of log p, in nats. A drawn token counts as left by `top_k`
    and `top_p`: where the reference leaves it out, it is at their limit, and a rounding decided.

    Args:
        logits (`torch.Tensor`): The policy's logits, shape (tokens, vocabulary).
        tokens (`torch.Tensor`): The drawn tokens, shape (tokens, 1).
        settings ([`~rollout.settings.SamplingSettings`]): The temperature, `top_p` and `top_k`.

    Returns:
        `torch.Tensor`: Shape (tokens, 3).
    """
    z = logits.float() / (settings.temperature or 1.0)
    limited = 0 < settings.top_k < z.shape[-1]
    if limited or settings.top_p < 1:
        ordered, places = z.sort(-1, descending=True)
        if limited:
            ordered[:, settings.top_k :] = -torch.inf
        p = ordered.softmax(-1)
        likelier = p.cumsum(-1) - p  # probability of all tokens before each one
        is_left = (likelier < settings.top_p) & ordered.isfinite()
        is_left = torch.zeros_like(is_left).scatter(-1, places, is_left).scatter(-1, tokens, True)
        z = z.masked_fill(~is_left, -torch.inf)
    logp = z.log_softmax(-1)
    p, finite = logp.exp(), logp.masked_fill(logp.isneginf(), 0.0)
    mean = (p * finite).sum(-1)
    variance = (p * (finite - mean[:, None]).square()).sum(-1)
    return torch.stack([logp.gather(-1, tokens)[:, 0], mean, variance], -1)


def compared(returned: Tensor, expected: Tensor, jitter: Tensor) -> tuple[str | None, dict[str, float]]:
    """
    Compares the log-probabilities of drawn tokens, in nats.

    Args:
        returned (`torch.Tensor`): The engine's, shape (rows, tokens); NaN where it has none.
        expected (`torch.Tensor`): The reference's [`drawn_scores`], shape (rows, tokens, 3).
        jitter (`torch.Tensor`): Absolute differences of the jittered reference, shape (rows, tokens).

    Returns:
        `(str | None, dict[str, float])`: What is wrong, in words; the metrics of [`check_speculation`].
    """
    logps, means, variances = expected.unbind(-1)
    count, missing = returned.numel(), returned.isnan()
    errors = (returned - logps).abs()[~missing]
    bound, token_bound = (SLACK * scale.item() + FLOOR for scale in (jitter.mean(), jitter.max()))
    off, largest = int((errors > token_bound).sum()), errors.max().item() if errors.numel() else 0.0
    difference = errors.mean().item()
    metrics = {"sync_check/speculation_difference": difference, "sync_check/speculation_bound": bound}
    if missing.any() or off or not difference <= bound:  # also where the reference has NaN
        words = f"the others differ by {difference:.3f} nats on average and by {largest:.3f} at most"
        return (
            f"of {count} sampled tokens {int(missing.sum())} have no log-probability (NaN), and {off} have one that is "
            f"more than {token_bound:.3f} nats from the policy's; {words}, and the format explains {bound:.3f} on "
            "average"
        ), metrics
    surplus = (logps - means).mean().item()
    if abs(surplus) > bound + UNLIKELY * (variances.mean().item() / count) ** 0.5:
        return (
            f"the log-probabilities of {count} sampled tokens are the policy's, but the tokens are not: samples of the "
            f"policy have {means.mean().item():.3f} nats on average, and these {logps.mean().item():.3f}"
        ), metrics
    return None, metrics
