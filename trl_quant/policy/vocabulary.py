"""
One vocabulary in two embeddings of different sizes, as distillation and PPO meet it.

Checkpoints pad their embeddings: those of Qwen2.5 have 151936 rows from 0.5B to 3B and 152064 from 7B on, for one
tokenizer with 151665 tokens. TRL compares distributions row by row and refuses such a pair. If no row beyond the
smaller embedding is a token of either model, [`cut_vocabulary`] drops these rows from the larger one. A critic has no
distribution: [`pad_vocabulary`] adds the rows that the policy has beyond its own.
"""

import logging

import torch
from accelerate.utils import is_peft_model
from torch import nn
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..reading import reading


logger = logging.getLogger(__name__)


def why_not_one_vocabulary(rows: int, tokenizers: dict[str, PreTrainedTokenizerBase]) -> str | None:
    """
    Returns why models with different embeddings do not share the tokens of their first `rows` rows, or `None`.

    Args:
        rows (`int`): Rows of the smaller embedding.
        tokenizers (`dict[str, PreTrainedTokenizerBase]`): The tokenizers of the models that have one, by the names that
            the text gives them.
    """
    if not tokenizers:
        return "there is no tokenizer that tells tokens from padding rows"
    known: dict[str, int] = {}
    for name, tokenizer in tokenizers.items():
        vocabulary = tokenizer.get_vocab()
        token, last = max(vocabulary.items(), key=lambda item: item[1])
        if last >= rows:
            return f"{token!r}, a token of the {name}'s tokenizer, has the id {last}"
        other = next((word for word, index in vocabulary.items() if known.get(word, index) != index), None)
        if other is not None:
            return f"their tokenizers give {other!r} the ids {known[other]} and {vocabulary[other]}"
        known |= vocabulary
    return None


def saved_tokenizer(config, trust_remote_code: bool) -> PreTrainedTokenizerBase | None:
    """Returns the tokenizer that was saved with a model of this config, or `None`."""
    if not config.name_or_path:
        return None
    options = {"revision": getattr(config, "_commit_hash", None), "trust_remote_code": trust_remote_code}
    try:
        with reading(config.name_or_path):
            tokenizer = AutoTokenizer.from_pretrained(config.name_or_path, **options)
    except (OSError, ValueError):
        return None
    # Without its files, transformers makes a tokenizer of special tokens alone
    return tokenizer if len(tokenizer) > len(tokenizer.all_special_tokens) else None


def pad_vocabulary(model: PreTrainedModel, rows: int) -> None:
    """Adds rows of zeros to a model's embedding, up to `rows`, in place. Does nothing if the model has as many."""
    size = model.config.get_text_config().vocab_size
    if size >= rows:
        return
    with torch.random.fork_rng(devices=[]):  # transformers draws the new rows
        embedding = model.resize_token_embeddings(rows, mean_resizing=False)
    with torch.no_grad():
        embedding.weight[size:].zero_()


def cut_vocabulary(model: PreTrainedModel, rows: int, name: str) -> None:
    """
    Drops the rows of a model's embedding and output head from `rows` on, in place. Its config then says so, and a saved
    model loads with it. Does nothing if the model has no more rows.

    Args:
        model ([`~transformers.PreTrainedModel`]): A causal language model, with or without an adapter of PEFT.
        rows (`int`): The rows that stay.
        name (`str`): What messages call the model.

    Raises:
        `ValueError`: An adapter trains the embedding or the head.
    """
    model = model.get_base_model() if is_peft_model(model) else model
    size = model.config.get_text_config().vocab_size
    if size <= rows:
        return
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    if any(not isinstance(end, nn.Embedding | nn.Linear) for end in ends):
        raise ValueError(
            f"The {name}'s embedding has {size} rows, of which {rows} are shared, and an adapter trains it. Leave the "
            "embedding and the head out of the adapter."
        )
    logger.warning(
        "The %s's embedding has %d rows. Those from %d on are padding that the other model lacks, and are cut.",
        name,
        size,
        rows,
    )
    model.resize_token_embeddings(rows)
