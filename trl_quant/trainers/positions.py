"""
Fixes the positions of a trainer's models where these depend on the longest row of a forward pass
([`policy.positions`]): policy, reference, teacher and critic choose once, as the engine does.
"""

import logging
from collections.abc import Iterable, Iterator
from copy import deepcopy
from itertools import islice

from datasets import Dataset
from torch.nn import Module
from transformers import ProcessorMixin

from ..config.data import evaluated
from ..models.positions import switching
from ..policy.positions import fix_positions, fixed_context
from ..rollout import RolloutEngine


logger = logging.getLogger(__name__)

ROWS_AT_ONCE = 1024  # prompts that are tokenized together
CHECKED = 64  # prompts of the data that a check of the engine takes


def models_of(trainer) -> list[Module]:
    """Returns a trainer's policy, and its reference or teacher, without what accelerate has put around them."""
    models = [getattr(trainer, name, None) for name in ("model", "ref_model", "teacher_model")]
    return [trainer.accelerator.unwrap_model(model) for model in models if model is not None]


def fix_choice(trainer, engine: RolloutEngine, models: Iterable[Module]) -> None:
    """Fixes the positions of a trainer's models for its engine's context, or else for the longest row of its data."""
    models = [model for model in models if switching(model.config) is not None]
    if not models:
        return
    context = engine.context or own_context(trainer)
    for model in models:
        fix_positions(model, context)
        found = switching(model.config)
        logger.warning(
            "The %s has %s. For this run's sequences of up to %d tokens it computes every row as one that is %s.",
            type(model).__name__,
            found,
            context,
            "longer" if context > found.limit else "not",
        )


def check_same_choice(trainer, checkpoint: str, before: int | None) -> None:
    """
    Compares the choice of positions of a checkpoint's run with this run's.

    Args:
        trainer: The trainer, whose positions are fixed.
        checkpoint (`str`): The checkpoint, for the message.
        before (`int` or `None`): The context for which the checkpoint's run fixed its positions, if it did.

    Raises:
        `ValueError`: They differ, without `resume_with_changes`, which logs it instead.
    """
    found, now = switching(trainer.model.config), fixed_context(trainer.model)
    if found is None or before is None or now is None or found.are_same(before, now):
        return
    change = (
        f"The run of {checkpoint} chose positions for rows of up to {before} tokens, and this run for up to {now}, "
        f"which changes the positions of every row: the policy has {found}."
    )
    if not trainer.args.resume_with_changes:
        raise ValueError(f"{change} Resume with rows as long as before, or set `resume_with_changes=True`.")
    logger.warning(change)


def own_context(trainer) -> int:
    """
    Returns the number of tokens in the longest prompt and completion of a run whose engine does not limit them. Prompts
    of streams and environments are not known before they are drawn and count as 0 tokens; see [`check_rows`].
    """
    length = trainer.args.max_completion_length
    if length is None:  # as the engine and TRL generate then
        return trainer.model.generation_config.max_length
    return length + max((len(ids) for ids in known_prompts(trainer, ROWS_AT_ONCE)), default=0)


def known_prompts(trainer, rows_at_once: int) -> Iterator[list[int]]:
    """Yields the token ids of the prompts in a trainer's data, as TRL tokenizes them. Computed rows are not read."""
    if isinstance(trainer.processing_class, ProcessorMixin) or getattr(trainer, "environment_factories", None):
        return
    for dataset in (trainer.train_dataset, *evaluated(trainer.eval_dataset).values()):
        if isinstance(dataset, Dataset) and dataset.format["type"] != "custom":
            prompts = dataset.select_columns("prompt").with_format(None)
            for start in range(0, len(prompts), rows_at_once):
                yield from trainer._tokenize_prompts(prompts[start : start + rows_at_once]["prompt"])[0]


def own_prompts(trainer, prompts: list) -> list[list[int]]:
    """
    Returns token ids of a run's own prompts, for a check of its engine: those of a generation, and some of the data.

    Args:
        trainer: The trainer.
        prompts (`list`): The prompts of a generation, as TRL has them; may be empty.
    """
    tokenizer = trainer.processing_class
    if isinstance(tokenizer, ProcessorMixin):  # without their images, they are no prompts
        return []
    if tokenizer.chat_template is None and not all(isinstance(prompt, str) for prompt in prompts):
        return []  # a `rollout_func` makes texts of them in its own way
    given = trainer._tokenize_prompts(deepcopy(prompts))[0] if prompts else []
    return [*given, *islice(known_prompts(trainer, CHECKED), CHECKED)]


def check_rows(trainer, prompts: list[list[int]], completions: list[list[int]]) -> None:
    """
    Raises `ValueError` for a generation with a row that is longer than the choice of positions allows.

    Args:
        trainer: The trainer.
        prompts, completions (`list[list[int]]`): Token ids of each row.
    """
    for model in models_of(trainer):
        context = fixed_context(model)
        if context is None:
            continue
        found = switching(model.config)
        longest = max(len(prompt) + len(ids) for prompt, ids in zip(prompts, completions, strict=True))
        if context <= found.limit < longest:
            raise ValueError(
                f"A prompt and its completion have {longest} tokens, but the {type(model).__name__} has {found}, and "
                f"this run has chosen for at most {context}. Prompts that a stream, an environment or a `rollout_func` "
                f"makes are not known before. Sample with `use_vllm=True` and a `vllm_max_model_length` above "
                f"{found.limit}, pass a `datasets.Dataset`, or shorten the prompts."
            )
