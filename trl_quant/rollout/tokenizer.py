"""Checks that a tokenizer fits a model: it must have ordinary tokens, and a padding token that the model embeds."""

import logging

from transformers import PreTrainedTokenizerBase


logger = logging.getLogger(__name__)


def id_list(token_ids: int | list[int] | None) -> list[int]:
    """Returns token ids as a list. A generation config has one id, a list of them, or none."""
    if token_ids is None:
        return []
    return [token_ids] if isinstance(token_ids, int) else list(token_ids)


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, embeddings: int) -> None:
    """
    Raises `ValueError` for a tokenizer that does not fit a model, and warns if it has tokens that the model lacks.

    Args:
        tokenizer (`PreTrainedTokenizerBase`): The tokenizer. Without a padding token, TRL pads with its EOS token.
        embeddings (`int`): Number of tokens in the model's embedding.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ValueError(
            f"`processing_class` is a {type(tokenizer).__name__}. It must be a tokenizer or a processor of "
            "transformers, such as `AutoTokenizer.from_pretrained(model)`."
        )
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        raise ValueError(
            f"The tokenizer {type(tokenizer).__name__} has no tokens but {tokenizer.all_special_tokens}. The model's "
            "directory may lack tokenizer files. Save the tokenizer there, or pass a `processing_class`."
        )
    if tokenizer.pad_token is None and tokenizer.eos_token is None:
        raise ValueError(
            "The tokenizer has neither a padding token nor an EOS token, with which TRL would pad instead. Set "
            "`tokenizer.pad_token` to a token that the model knows."
        )
    for name in ("pad_token", "eos_token"):
        token, index = getattr(tokenizer, name), getattr(tokenizer, f"{name}_id")
        if index is not None and index >= embeddings:
            raise ValueError(
                f"The tokenizer's `{name}` {token!r} has the id {index}, but the model embeds only {embeddings} "
                "tokens. Choose a token that the model knows, or call "
                "`model.resize_token_embeddings(len(tokenizer))` and save both."
            )
    if len(tokenizer) > embeddings:
        logger.warning(
            "The tokenizer has %d tokens, but the model embeds only %d: a prompt with one of the other tokens fails.",
            len(tokenizer),
            embeddings,
        )
