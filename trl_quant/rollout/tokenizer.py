"""Does a tokenizer fit the model? Its padding must be a token of the model's, and it must have tokens at all."""

import logging

from transformers import PreTrainedTokenizerBase


logger = logging.getLogger(__name__)


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, embeddings: int) -> None:
    """
    Raises `ValueError` for a tokenizer that a model cannot be sampled with, and warns of tokens that the model lacks.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The tokenizer. TRL has it pad with its EOS if it has no padding.
        embeddings (`int`): The number of tokens that the model has embeddings of.
    """
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        raise ValueError(
            f"The tokenizer {type(tokenizer).__name__} has no tokens but {tokenizer.all_special_tokens}, as where a "
            "model's directory has no tokenizer files. Save the tokenizer there, or pass a `processing_class`."
        )
    if tokenizer.pad_token is None and tokenizer.eos_token is None:
        raise ValueError(
            "The tokenizer has neither a padding token nor an EOS, which TRL would pad with. Set "
            "`tokenizer.pad_token` to a token that the model knows."
        )
    for name in ("pad_token", "eos_token"):
        token, index = getattr(tokenizer, name), getattr(tokenizer, f"{name}_id")
        if index is not None and index >= embeddings:
            raise ValueError(
                f"The tokenizer's `{name}` {token!r} is token {index}, and the model has embeddings of {embeddings} "
                "tokens. Choose one that the model knows, or call `model.resize_token_embeddings(len(tokenizer))` and "
                "save both."
            )
    if len(tokenizer) > embeddings:
        logger.warning(
            "The tokenizer has %d tokens, and the model embeddings of %d: a prompt with one of the others would fail.",
            len(tokenizer),
            embeddings,
        )
