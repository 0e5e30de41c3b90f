"""Prompts to train on, from the hub or a local file, in TRL's `prompt` column; the ground truth stays in `answer`."""

from pathlib import Path

from datasets import Dataset, load_dataset
from transformers import PreTrainedTokenizerBase


PROMPT_COLUMNS = ("prompt", "question")
DEFAULT_CONFIGS = {"openai/gsm8k": "main"}  # hub datasets that cannot be loaded without naming a configuration


def load_prompts(
    name_or_path: str,
    split: str = "train",
    config: str | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Dataset:
    """A dataset whose `prompt` column is what the policy is asked and whose other columns are what rewards may need.

    Args:
        name_or_path (`str`): a dataset id on the hub, a directory that `datasets` loads, or a `.json(l)` file.
        split (`str`): the split, as `datasets` takes it (`"train[:1000]"`); a file holds one split, by any name.
        config (`str`, *optional*): the dataset's configuration on the hub (`openai/gsm8k` gets `main` by itself).
        tokenizer (*optional*): the policy's. If it has a chat template, plain prompts become conversations of one user
            message, so that TRL applies the template.

    Returns:
        `Dataset`: with `prompt` (a string or a list of messages) first, and all other columns as they were.

    Raises:
        ValueError: when a local file is missing or empty, or when no column holds prompts.
    """
    if name_or_path.endswith((".json", ".jsonl")):
        if not Path(name_or_path).is_file():
            raise ValueError(f"dataset {name_or_path!r}: there is no such file.")
        if not Path(name_or_path).stat().st_size:
            raise ValueError(f"dataset {name_or_path!r}: the file is empty.")
        dataset = load_dataset("json", data_files={split.partition("[")[0]: name_or_path}, split=split)
    else:
        dataset = load_dataset(name_or_path, config or DEFAULT_CONFIGS.get(name_or_path), split=split)

    column = next((name for name in PROMPT_COLUMNS if name in dataset.column_names), None)
    if column is None:
        raise ValueError(
            f"dataset {name_or_path!r} has no prompts: its columns are {dataset.column_names}, and one of them must "
            f"be {' or '.join(map(repr, PROMPT_COLUMNS))}."
        )
    if column != "prompt":
        dataset = dataset.rename_column(column, "prompt")
    conversational = tokenizer is not None and tokenizer.chat_template is not None
    if conversational and len(dataset) and isinstance(dataset[0]["prompt"], str):
        dataset = dataset.map(lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]})
    return dataset
