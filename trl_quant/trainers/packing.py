"""
Packed rows: a trainer's forward and backward passes skip padding and compute each prompt once per micro-batch.

TRL pads every row of a generation to the longest one and keeps that width in every micro-batch. All its forward passes
go through `_get_per_token_logps_and_entropies`, which calls the model with padded rows and gets back log-probabilities
of the same shape. [`PackedRows`] replaces the model in these calls, so the rest of TRL still sees padded rows.

TRL shuffles the rows of a generation before it splits them into micro-batches. [`packed_batches`] then rearranges the
rows of each optimizer step: completions of one prompt share a micro-batch, and all micro-batches get about the same
number of tokens. Each micro-batch keeps its number of rows, so the loss of the step stays the same wherever a row's
term does not depend on the other rows of its micro-batch.
"""

import logging
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from accelerate.utils import is_peft_model
from torch import Tensor
from torch.nn import Module

from ..config.packed import why_not_packed
from ..policy.packed import PackedRows, accept_packed_rows, shares_prompts
from ..trl_seams import shuffled_by


logger = logging.getLogger(__name__)


def packed_rows(trainer) -> Callable[..., PackedRows] | None:
    """
    Decides whether a built trainer computes packed rows, and prepares its policy and reference or teacher for them.

    Returns:
        `Callable` or `None`: A function of a model and the number of its prompt columns that returns [`PackedRows`];
        `None` if the trainer computes padded rows.

    Raises:
        `ValueError`: if `pack_sequences=True`, and the trainer cannot compute packed rows.
    """
    if trainer.spec.packs is False:
        return None
    named = {
        "policy": trainer.model,
        "reference": getattr(trainer, "ref_model", None),
        "teacher": getattr(trainer, "teacher_model", None),
    }
    named = {name: trainer.accelerator.unwrap_model(model) for name, model in named.items() if model is not None}
    named = {name: model.get_base_model() if is_peft_model(model) else model for name, model in named.items()}
    if not accepted(trainer, named):
        return None
    return partial(PackedRows, shares=all(map(shares_prompts, named.values())))


def accepted(trainer, named: dict[str, Module]) -> bool:
    """
    Prepares models for packed rows. If one of them computes only padded rows, the function warns and returns `False`.

    Args:
        trainer: The trainer, with `args` and `processing_class`.
        named (`dict[str, Module]`): The models, by the names that messages give them.

    Raises:
        `ValueError`: if `pack_sequences=True`, and one of them computes only padded rows.
    """
    args, tokenizer = trainer.args, trainer.processing_class
    faults = [why_not_packed(args, model.config, tokenizer, name) for name, model in named.items()]
    why_not = next(filter(None, faults), None)
    if why_not is None:
        try:
            for name, model in named.items():
                accept_packed_rows(model, name)
        except ValueError as error:
            why_not = str(error)
    if why_not is None:
        return True
    if trainer.args.pack_sequences:
        raise ValueError(f"`pack_sequences`=True cannot act: {why_not}.")
    logger.warning("The trainer computes padding too, since `pack_sequences` cannot act: %s.", why_not)
    return False


# Micro-batches


def packed_batches(trainer) -> AbstractContextManager:
    """Context of TRL's `_prepare_inputs`, in which rows may move to another micro-batch if the loss allows it."""
    accumulated, parts = trainer.args.gradient_accumulation_steps, trainer.args.steps_per_generation
    together = min(accumulated, parts)  # micro-batches of one generation that one optimizer step adds up
    if together == 1 or max(accumulated, parts) % together or not terms_are_independent(trainer):
        return nullcontext()
    return shuffled_by(type(trainer), partial(_arranged, parts=parts, together=together))


def terms_are_independent(trainer) -> bool:
    """Whether a row's term of the loss is independent of the other rows in its micro-batch."""
    args = trainer.args
    if getattr(trainer, "aux_loss_enabled", False):  # a mixture's load is balanced within a micro-batch
        return False
    # `bnpo` divides by the tokens of a micro-batch. The entropy quantile and bonus are computed per micro-batch
    neutral = {"top_entropy_quantile": 1.0, "entropy_coef": 0.0, "use_adaptive_entropy": False}
    has_entropy_term = any(getattr(args, name, value) != value for name, value in neutral.items())
    return getattr(args, "loss_type", None) != "bnpo" and not has_entropy_term


def _arranged(batch: dict[str, Any], parts: int, together: int) -> dict[str, Any]:
    """Reorders the rows of a shuffled generation, which TRL then splits into `parts` micro-batches."""
    ids = batch["prompt_ids"].masked_fill(batch["prompt_mask"] == 0, -1)
    prompts = torch.unique(ids, dim=0, return_inverse=True)[1].tolist()  # equal numbers for equal prompts
    shared, own = batch["prompt_mask"].sum(1).tolist(), batch["completion_mask"].sum(1).tolist()
    size = len(prompts) // parts * together  # rows of an optimizer step
    order = []
    for first in range(0, len(prompts), size):
        step = slice(first, first + size)
        batches = balanced(prompts[step], shared[step], own[step], together)
        order += [first + row for rows in batches for row in rows]
    return {name: _rows(values, order) for name, values in batch.items()}


def _rows(values: Any, order: list[int]) -> Any:
    if values is None or (isinstance(values, Tensor) and values.ndim == 0):
        return values
    return values[order] if isinstance(values, Tensor) else [values[row] for row in order]


def balanced(prompts: list[int], shared: list[int], own: list[int], parts: int) -> list[list[int]]:
    """
    Splits rows into batches with the same number of rows and about the same number of tokens, and keeps rows of one
    prompt together as far as possible. On each rank the largest batch comes first, so that ranks, which wait for each
    other, compute large batches at the same time.

    Args:
        prompts (`list[int]`): The prompt of each row, as a number.
        shared (`list[int]`): Tokens of each row's prompt.
        own (`list[int]`): Tokens of each row's completion.
        parts (`int`): The number of batches, which divides the number of rows.

    Returns:
        `list[list[int]]`: The rows of each batch.
    """
    size = len(prompts) // parts

    def tokens(rows: list[int]) -> int:
        return sum(own[row] for row in rows) + sum({prompts[row]: shared[row] for row in rows}.values())

    groups: dict[int, list[list[int]]] = {}
    for row in range(len(prompts)):
        groups.setdefault(prompts[row], []).append([row])
    pieces = []  # rows of one prompt that fit into one batch
    for rows in groups.values():
        pieces += _spread(rows, math.ceil(len(rows) / size), size, tokens)
    return sorted(_spread(pieces, parts, size, tokens), key=tokens, reverse=True)


def _spread(pieces: list[list[int]], parts: int, size: int, tokens: Callable[[list[int]], int]) -> list[list[int]]:
    """Assigns pieces, the largest first, to the batch with the fewest tokens; splits a piece that fits into none."""
    batches: list[list[int]] = [[] for _ in range(parts)]
    for piece in sorted(pieces, key=tokens, reverse=True):
        fits = any(len(batch) + len(piece) <= size for batch in batches)
        for rows in [piece] if fits else [[row] for row in piece]:
            roomy = [batch for batch in batches if len(batch) + len(rows) <= size]
            min(roomy, key=tokens).extend(rows)
    return batches
