"""What a `rollout_func` returns, checked before TRL computes with it, and whether it asked the engine to sample.

A function that samples by itself leaves the engine, with its precision and its noise, unused; nothing else would tell.
"""

import logging
from collections.abc import Callable

import torch

from .trl_adapter import RolloutEngine


logger = logging.getLogger(__name__)

REQUIRED = ("prompt_ids", "completion_ids", "logprobs")


class CheckedRollout:
    """
    A `rollout_func` whose results are checked.

    Raises `ValueError` where they are not what TRL takes: a dict of lists, of one entry for each prompt, in which
    log-probabilities and masks are as long as their completions. Warns once where the engine was not asked.
    """

    def __init__(self, rollout_func: Callable):
        self.rollout_func = rollout_func
        self.has_warned = False

    def __call__(self, prompts: list, trainer) -> dict:
        engine = getattr(trainer, "vllm_generation", None)
        asked = engine.requests() if isinstance(engine, RolloutEngine) else None
        output = self.rollout_func(prompts, trainer)
        compared = trainer.use_vllm and trainer.vllm_importance_sampling_correction
        _check_output(output, len(prompts), compared)
        if asked is not None and engine.requests() == asked and not self.has_warned:
            self.has_warned = True
            logger.warning(
                "`rollout_func` did not ask the rollout engine (`trainer.vllm_generation`) for these samples, so "
                "`rollout_precision`=%r has no part in them; the correction compares the trainer with the `logprobs` "
                "that were returned. Call `trainer.vllm_generation.generate`, or unset `rollout_precision`.",
                engine.precision,
            )
        return output


def _check_output(output, count: int, compared: bool) -> None:
    if not isinstance(output, dict):
        raise ValueError(f"`rollout_func` returned a {type(output).__name__}. It must return a dict with {REQUIRED}.")
    if missing := [name for name in REQUIRED if name not in output]:
        raise ValueError(f"`rollout_func` returned {[*output]}, without {missing}. It must return {REQUIRED}.")
    if output["logprobs"] is None and compared:
        raise ValueError(
            "`rollout_func` returned 'logprobs'=None, but the run compares its sampler with the trainer. Return the "
            "log-probability that each token was drawn with, or set `vllm_importance_sampling_correction=False` (with "
            "`is_correction='trl'`)."
        )
    given = {name: output[name] for name in (*REQUIRED, "env_mask") if output.get(name) is not None}
    for name, rows in given.items():
        if not hasattr(rows, "__len__") or len(rows) != count:
            found = f"{len(rows)} entries" if hasattr(rows, "__len__") else f"a {type(rows).__name__}"
            raise ValueError(f"`rollout_func` returned {found} of {name!r} for {count} prompts: one each is needed.")
    for name in given.keys() - {"prompt_ids", "completion_ids"}:
        for index, (row, ids) in enumerate(zip(given[name], given["completion_ids"], strict=True)):
            _check_row(name, index, row, len(ids))


def _check_row(name: str, index: int, row, tokens: int) -> None:
    """A row has a number for each token; nested ones, as `generate` returns them, count for none."""
    try:
        values = torch.as_tensor(row, dtype=torch.float32)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"`rollout_func`: row {index} of {name!r} holds what is no number: {error}") from error
    if values.shape != (tokens,):
        raise ValueError(
            f"`rollout_func`: row {index} of {name!r} has the shape {tuple(values.shape)}, and its completion has "
            f"{tokens} tokens. One number for each is needed."
        )
    if values.isnan().any():
        raise ValueError(f"`rollout_func`: row {index} of {name!r} holds NaN.")
