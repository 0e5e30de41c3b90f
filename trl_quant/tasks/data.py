"""Loads prompts from the hub or a local file into TRL's `prompt` column. The ground truth stays in `answer`."""

import os
from functools import partial
from itertools import chain
from pathlib import Path

from datasets import Dataset, IterableDataset, load_dataset
from datasets.exceptions import DatasetGenerationError
from transformers import PreTrainedTokenizerBase

from ..reading import reading
from .named_data import NAMED_DATA, load_named


PROMPT_COLUMNS = ("prompt", "question", "problem")
SCANNED_ROWS = 1000  # rows that `check_prompts` reads at once
BUILDERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}  # suffix -> builder of `datasets`
_PROMPT = "A prompt is a text, or a list of messages {'role': ..., 'content': ...} that asks something."
DEFAULT_CONFIGS = {"openai/gsm8k": "main"}  # hub datasets that load only with a configuration


def load_prompts(
    name_or_path: str | os.PathLike,
    split: str = "train",
    config: str | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    instruction: str | None = None,
) -> Dataset:
    """Loads a dataset with the policy's prompts in the `prompt` column; rewards may use the other columns.

    Args:
        name_or_path (`str` or `os.PathLike`): a dataset id on the hub, a directory that `datasets` loads, a
            `.json(l)`, `.parquet` or `.csv` file, or one of the names in [`trl_quant.tasks.named_data`].
        split (`str`): the split, in `datasets` syntax (`"train[:1000]"`); a file holds one split, under any name. Of a
            mixture it is the split of each source.
        config (`str`, *optional*): the dataset's configuration on the hub (`openai/gsm8k` defaults to `main`).
        tokenizer (*optional*): the policy's tokenizer. If it has a chat template, plain prompts become conversations
        with one
            user message, so that TRL applies the template.
        instruction (`str`, *optional*): text after each prompt, a blank line below it.

    Returns:
        `Dataset`: with `prompt` (a string or a list of messages) first, and all other columns unchanged. A named
        dataset has `prompt`, `answer` and `source`.

    Raises:
        ValueError: when a local file is missing, empty or of another kind, when no column holds prompts, when a named
            dataset lacks one of its columns, or for an `instruction` after conversations.
    """
    name_or_path = os.fspath(name_or_path)
    if name_or_path in NAMED_DATA:
        dataset = load_named(name_or_path, config, partial(_load, split=split))
    else:
        dataset = _with_prompts(name_or_path, _load(name_or_path, config, split))
    if instruction:
        dataset = with_instruction(dataset, instruction)
    return dataset if tokenizer is None else as_conversations(dataset, tokenizer)


def reads_same_rows(name: str, split: str, other_name: str, other_split: str) -> bool:
    """Whether two sources are the same rows of a file, which holds one split under any name."""
    slices = [part.partition("[")[2] for part in (split, other_split)]
    return name == other_name and name.endswith(tuple(BUILDERS)) and slices[0] == slices[1]


def _load(name_or_path: str, config: str | None, split: str) -> Dataset:
    """Loads a dataset as it is stored."""
    path = Path(name_or_path)
    if path.suffix in BUILDERS and not path.is_dir():
        if not path.is_file():
            raise ValueError(f"dataset {name_or_path!r}: there is no such file.")
        if not path.stat().st_size:
            raise ValueError(f"dataset {name_or_path!r}: the file is empty.")
        source, config, options = BUILDERS[path.suffix], None, {"data_files": {split.partition("[")[0]: name_or_path}}
    elif path.is_file():
        raise ValueError(f"dataset {name_or_path!r}: a file must end in {', '.join(BUILDERS)}.")
    else:
        source, config, options = name_or_path, config or DEFAULT_CONFIGS.get(name_or_path), {}
    with reading(name_or_path):
        try:
            dataset = load_dataset(source, config, split=split, **options)
            if options:
                dataset.data.validate(full=True)  # finds text that is not UTF-8, which would fail later
            return dataset
        except (DatasetGenerationError, ValueError) as error:  # also a split or configuration that does not exist
            raise ValueError(f"dataset {name_or_path!r} cannot be read: {error.__cause__ or error}") from error


def _with_prompts(name: str, dataset: Dataset) -> Dataset:
    """Returns the dataset with its prompts in the column `prompt`."""
    column = next((name for name in PROMPT_COLUMNS if name in dataset.column_names), None)
    if column is None:
        raise ValueError(
            f"dataset {name!r} has no prompts: its columns are {dataset.column_names}, and one of them must "
            f"be {' or '.join(map(repr, PROMPT_COLUMNS))}."
        )
    return dataset if column == "prompt" else dataset.rename_column(column, "prompt")


def with_instruction(dataset: Dataset, instruction: str) -> Dataset:
    """
    Puts a text after each prompt. Raises `ValueError` for prompts that are conversations. A missing or empty prompt is
    left unchanged, and `check_prompts` refuses it.
    """

    def instructed(prompt):
        if isinstance(prompt, list):
            raise ValueError("`instruction` cannot follow prompts that are conversations. Put it into them.")
        return {"prompt": f"{prompt}\n\n{instruction}" if prompt and isinstance(prompt, str) else prompt}

    return dataset.map(instructed, input_columns="prompt")


def as_conversations(dataset: Dataset, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """Turns plain prompts into conversations of one user message, if the tokenizer has a chat template."""
    if tokenizer.chat_template is not None and len(dataset) and isinstance(dataset[0]["prompt"], str):
        dataset = dataset.map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]})
    return dataset


def token_ids(prompts: list, tokenizer: PreTrainedTokenizerBase, **template) -> list[list[int]]:
    """Tokenizes prompts that are all plain, or all conversations, as the trainer does with `template`'s arguments."""
    if isinstance(prompts[0], str):
        return tokenizer(prompts)["input_ids"]
    texts = tokenizer.apply_chat_template(prompts, tokenize=False, add_generation_prompt=True, **template)
    return tokenizer(texts, add_special_tokens=False)["input_ids"]


def check_prompts(name: str, dataset: Dataset | IterableDataset) -> None:
    """Raises `ValueError` for a dataset without prompts or with a malformed one. A stream is not read.

    Args:
        name (`str`): the dataset's name in the message.
        dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`]): with a column `prompt`.
    """
    if getattr(dataset, "format", {}).get("type") == "custom":  # rows are computed when they are read
        return
    columns = dataset.column_names
    if columns is not None and "prompt" not in columns:
        raise ValueError(f"`{name}` has the columns {columns}; a column 'prompt' is needed.")
    if isinstance(dataset, IterableDataset):
        return
    if not len(dataset):
        raise ValueError(f"`{name}` is empty: it must have at least one row.")
    prompts = dataset.select_columns("prompt").with_format(None)
    table = prompts.data
    # A shuffled dataset is read much faster in stored order, which may include rows that were filtered out
    if len(prompts) <= table.num_rows <= 2 * len(prompts) and _bad_prompt(Dataset(table, info=prompts.info)) is None:
        return
    found = _bad_prompt(prompts)
    if found is not None:
        row, fault = found
        raise ValueError(f"`{name}`: the prompt of row {row} {fault}. {_PROMPT}")


def check_row(where: str, row: dict, first: dict) -> None:
    """Raises `ValueError` for a row that was drawn and has no prompt, or a malformed one.

    Args:
        where (`str`): what the message calls the place of the row.
        row (`dict`): the row.
        first (`dict`): the first row of its batch.
    """
    if "prompt" not in row:
        raise ValueError(f"{where}: a row has the columns {[*row]}; a column 'prompt' is needed.")
    fault = _fault(row["prompt"]) or _other_type(row["prompt"], first["prompt"])
    if fault is not None:
        raise ValueError(f"{where}: the prompt {row['prompt']!r:.80} {fault}. {_PROMPT}")


def check_conversation(where: str, row: dict) -> None:
    """Raises `ValueError` for a row of a run with tools whose prompt is plain text. `where` names its place."""
    if isinstance(row.get("prompt"), str):
        raise ValueError(
            f"{where} has texts as prompts. With `tools` or an `environment_factory` they must be conversations, "
            "because the chat template tells the model what it may call."
        )


def _other_type(prompt, first) -> str | None:
    if type(prompt) is type(first):
        return None
    return f"is a {type(prompt).__name__}, and the first is a {type(first).__name__}"  # TRL takes all for the first's


def _bad_prompt(dataset: Dataset) -> tuple[int, str] | None:
    """Returns the index of the first malformed prompt, and its fault."""
    rows = chain.from_iterable(batch["prompt"] for batch in dataset.iter(SCANNED_ROWS))
    first = None
    for index, prompt in enumerate(rows):
        first = prompt if index == 0 else first
        fault = _fault(prompt) or _other_type(prompt, first)
        if fault is not None:
            return index, fault
    return None


def _fault(prompt) -> str | None:
    if prompt is None:
        return "is missing"
    if not isinstance(prompt, str | list):
        return f"is a {type(prompt).__name__}"
    if not prompt:
        return "is empty"
    if isinstance(prompt, str):
        return None
    if not all(isinstance(message, dict) and message.get("role") for message in prompt):
        return "has a message without a role"
    # Messages of other roles may be empty: a system prompt, a call of a tool, the result of a tool
    asked = [message for message in prompt if message["role"] == "user"] or prompt
    silent = [not _has_content(message.get("content")) for message in asked]
    is_silent = all(silent) if asked is prompt else any(silent)
    return "has a message without content" if is_silent else None


def _has_content(content: str | list[dict] | None) -> bool:
    if isinstance(content, list):  # a list of parts: texts, images
        return any(part.get("type") not in (None, "text") or part.get("text") for part in content)
    return bool(content)
