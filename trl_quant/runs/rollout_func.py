"""Checks that the results of a `rollout_func` have the form that TRL needs."""

import math
from collections.abc import Callable

import torch

from ..rollout.answers import fault_of_ids, fault_of_logps


IDS = ("prompt_ids", "completion_ids")
REQUIRED = (*IDS, "logprobs")


class CheckedRollout:
    """
    Wraps a `rollout_func` and checks its results.

    TRL takes a dict of lists with one entry for each prompt: token ids of the model, at least one in a completion, and
    log-probabilities and masks that are as long as their completions. Anything else raises `ValueError`.
    """

    def __init__(self, rollout_func: Callable):
        self.rollout_func = rollout_func

    def __call__(self, prompts: list, trainer) -> dict:
        output = self.rollout_func(prompts, trainer)
        needs_logprobs = trainer.use_vllm and trainer.vllm_importance_sampling_correction
        _check_output(output, len(prompts), needs_logprobs, trainer.model.config.get_text_config().vocab_size)
        return output


def _check_output(output, count: int, needs_logprobs: bool, vocabulary: int) -> None:
    """Raises `ValueError` unless `output` has the form that TRL takes, for `count` prompts."""
    if not isinstance(output, dict):
        raise ValueError(f"`rollout_func` returned a {type(output).__name__}. It must return a dict with {REQUIRED}.")
    missing = [name for name in REQUIRED if name not in output]
    if missing:
        raise ValueError(f"`rollout_func` returned {[*output]}, without {missing}. It must return {REQUIRED}.")
    if output["logprobs"] is None and needs_logprobs:
        raise ValueError(
            "`rollout_func` returned 'logprobs'=None, but the run compares its sampler with the trainer. Return the "
            "log-probability with which each token was sampled, or set `vllm_importance_sampling_correction=False` "
            "(with `is_correction='trl'`)."
        )
    given = {name: output[name] for name in (*REQUIRED, "env_mask") if name in IDS or output.get(name) is not None}
    for name, rows in given.items():
        if not hasattr(rows, "__len__") or len(rows) != count:
            found = f"{len(rows)} entries" if hasattr(rows, "__len__") else f"a {type(rows).__name__}"
            raise ValueError(
                f"`rollout_func` returned {found} in {name!r} for {count} prompts. It must return one entry for each "
                "prompt."
            )
    for name in IDS:
        for index, row in enumerate(given[name]):
            _check_ids(f"`rollout_func`: row {index} of {name!r}", row)
    for index, row in enumerate(given["completion_ids"]):
        if len(row) == 0:
            raise ValueError(f"`rollout_func`: row {index} of 'completion_ids' is empty. It must hold a token or more.")
    for name in given.keys() - {*IDS}:
        for index, (row, ids) in enumerate(zip(given[name], given["completion_ids"], strict=True)):
            _check_row(name, index, row, len(ids))
    plain = {name: [torch.as_tensor(row).tolist() for row in rows] for name, rows in given.items()}
    faults = [fault_of_ids(name, plain[name], vocabulary) for name in IDS]
    if "logprobs" in plain:
        masks = plain.get("env_mask") or [[1] * len(row) for row in plain["logprobs"]]
        scored = [  # a token that an environment wrote may be impossible for the policy
            [0.0 if not sampled and logp == -math.inf else logp for logp, sampled in zip(*pair, strict=True)]
            for pair in zip(plain["logprobs"], masks, strict=True)
        ]
        faults.append(fault_of_logps(scored, [*map(len, scored)]))
    for fault in filter(None, faults):
        raise ValueError(f"`rollout_func`: {fault}.")


def _check_ids(called: str, row) -> None:
    """Raises `ValueError` unless a row is flat and holds integers."""
    try:
        ids = torch.as_tensor(row)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{called} does not hold integers: {error}") from error
    if ids.ndim != 1:
        raise ValueError(f"{called} has the shape {tuple(ids.shape)}. It must hold one integer for each token.")
    if len(ids) and (ids.is_floating_point() or ids.dtype == torch.bool):
        raise ValueError(f"{called} holds {ids[0].item()!r}. It must hold integers.")


def _check_row(name: str, index: int, row, tokens: int) -> None:
    """
    Raises `ValueError` unless a row is flat and has one number for each token: a log-probability, or 0 or 1 in a mask.
    The engine's `generate` returns nested rows, which a function must flatten.
    """
    try:
        values = torch.as_tensor(row, dtype=torch.float32)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"`rollout_func`: row {index} of {name!r} does not hold numbers: {error}") from error
    if values.shape != (tokens,):
        raise ValueError(
            f"`rollout_func`: row {index} of {name!r} has the shape {tuple(values.shape)}, but its completion has "
            f"{tokens} tokens. It must hold one number for each token."
        )
    if values.isnan().any():
        raise ValueError(f"`rollout_func`: row {index} of {name!r} holds NaN.")
    if name == "env_mask" and not torch.isin(values, torch.tensor([0.0, 1.0])).all():
        raise ValueError(
            f"`rollout_func`: row {index} of 'env_mask' holds {values[(values != 0) & (values != 1)][0]:g}. It must "
            "hold 1 for each token that was sampled, and 0 for the others."
        )
