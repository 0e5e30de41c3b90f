"""Reads text for calibration and perplexity, from a local file or a dataset on the hub, as sequences of tokens."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from datasets import load_dataset
from transformers import PreTrainedTokenizerBase

from ..reading import reading
from ..tasks.data import BUILDERS, DEFAULT_CONFIGS


TEXT = ("text", "content")
CONVERSATION = ("messages", "conversations", "prompt")
ASKED, ANSWERED = ("question", "problem", "prompt"), ("answer", "solution", "completion")
ROLES = {"human": "user", "gpt": "assistant"}  # ShareGPT's names, which OpenThoughts uses too


def token_sequences(data: str, tokenizer: PreTrainedTokenizerBase, samples: int, length: int) -> list[list[int]]:
    """
    Cuts the first tokens of a text into sequences.

    Args:
        data (`str`): A `.txt`, `.json(l)`, `.parquet` or `.csv` file, a directory that `datasets` loads, or an id on
            the hub, of which the train split is read. Rows hold a text, a conversation, or a question and its answer.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): The model's tokenizer; its EOS token separates texts.
        samples (`int`): Largest number of sequences.
        length (`int`): Tokens of each sequence.

    Raises:
        ValueError: There is no such file, no column with text, or less text than one sequence.
    """
    tokens = _tokens(data, tokenizer)
    sequences = []
    while len(sequences) < samples:
        sequence = list(islice(tokens, length))
        if len(sequence) < length:
            break
        sequences.append(sequence)
    if not sequences:
        raise ValueError(f"{data!r} holds {len(sequence)} tokens, less than one sequence of {length}.")
    return sequences


def _tokens(data: str, tokenizer: PreTrainedTokenizerBase) -> Iterator[int]:
    for row in _rows(data):
        text = _text(row, data, tokenizer)
        yield from tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        if tokenizer.eos_token_id is not None:
            yield tokenizer.eos_token_id


def _rows(data: str) -> Iterator[dict]:
    path = Path(data)
    if path.suffix in (".txt", *BUILDERS) and not path.is_file():
        raise ValueError(f"{data!r}: there is no such file.")
    with reading(data):
        if path.suffix == ".txt":
            yield {TEXT[0]: path.read_text("utf-8")}
        elif path.suffix in BUILDERS:
            yield from load_dataset(BUILDERS[path.suffix], data_files=data, split="train", streaming=True)
        else:
            yield from load_dataset(data, DEFAULT_CONFIGS.get(data), split="train", streaming=True)


def _text(row: dict, data: str, tokenizer: PreTrainedTokenizerBase) -> str:
    """Returns the text of a row. A conversation gets the model's chat template, if there is one."""
    for column in TEXT:
        if isinstance(row.get(column), str):
            return row[column]
    for column in CONVERSATION:
        if isinstance(row.get(column), list):
            messages = [_message(message) for message in row[column]]
            if tokenizer.chat_template is None:
                return "\n".join(message["content"] for message in messages)
            return tokenizer.apply_chat_template(messages, tokenize=False)
    parts = [next((row[c] for c in columns if isinstance(row.get(c), str)), None) for columns in (ASKED, ANSWERED)]
    if parts[0] is None:
        raise ValueError(
            f"{data!r} has the columns {list(row)}; one of them must be a text ({', '.join(TEXT)}), a conversation "
            f"({', '.join(CONVERSATION)}) or a question ({', '.join(ASKED)})."
        )
    return "\n".join(part for part in parts if part)


def _message(message: dict) -> dict:
    role = message.get("role", message.get("from"))
    return {"role": ROLES.get(role, role), "content": message.get("content", message.get("value")) or ""}
