"""Packed rows: no forward or backward pass of a trainer computes padding.

TRL pads every row of a generation to the longest one and keeps that width in every micro-batch. All its forward passes
go through `_get_per_token_logps_and_entropies`, which calls the model with padded rows and takes log-probabilities of
the same shape back. [`PackedRows`] stands in for the model there, so the rest of TRL sees padded rows as always.
"""

import logging

from transformers import ProcessorMixin

from ..policy.packed import accept_packed_rows, why_not_packed


logger = logging.getLogger(__name__)


def packs_rows(trainer) -> bool:
    """
    Decides whether a built trainer computes packed rows, and prepares its policy and reference for them.

    Raises:
        ValueError: `pack_sequences=True`, and the trainer cannot.
    """
    args = trainer.args
    wanted = args.pack_sequences
    if wanted is False or (wanted is None and args.rollout_precision is None):
        return False
    models = [trainer.accelerator.unwrap_model(model) for model in (trainer.model, _reference(trainer)) if model]
    models = [model.get_base_model() if hasattr(model, "get_base_model") else model for model in models]
    why_not = next(filter(None, [_why_not(trainer), *map(why_not_packed, models)]), None)
    if why_not and wanted:
        raise ValueError(f"`pack_sequences`=True cannot act: {why_not}.")
    if why_not:
        logger.warning("The trainer computes padding too, since packed rows cannot act: %s.", why_not)
        return False
    for model in models:
        accept_packed_rows(model)
    return True


def _reference(trainer):
    return getattr(trainer, "ref_model", None)


def _why_not(trainer) -> str | None:
    if isinstance(trainer.processing_class, ProcessorMixin):
        return "its processor makes images"
    return None
