"""The training data of two papers, which [`load_prompts`] knows by name.

| name | paper | on the hub | columns that are read | questions in `train` |
|---|---|---|---|---|
| `bigmath` | QeRL | open-r1/Big-Math-RL-Verified-Processed | `prompt`, `solution` | those of levels 3 to 5 |
| `gsm8k_math` | Jet-RL | openai/gsm8k | `question`, `answer` | 7473 |
| | | DigitalLearningGmbH/MATH-lighteval | `problem`, `solution` | 7500 |

The levels of BigMath are those of its processed copy, the one that QeRL's release reads: five equal parts by how often
Llama 3.1 8B solved a question. Level 5 is the hardest. The copy has a configuration for each level and for several:
`level_3_4_5` is the default here, and `level_4_5` is what the paper trains its 32B model on.

Jet-RL does not say in which proportion it mixes its two sources. Here each question appears once.
"""

from collections.abc import Callable
from dataclasses import dataclass

from datasets import Dataset, concatenate_datasets


@dataclass(frozen=True)
class Source:
    """
    A dataset on the hub, with the names of the two columns that are read.

    Attributes:
        name (`str`): Its id.
        config (`str` or `None`): Its configuration.
        prompt (`str`): Column of the questions.
        answer (`str`): Column of the ground truth: the answer alone, or a solution that ends with it.
        most_characters (`int` or `None`): Longer questions are dropped.
    """

    name: str
    config: str | None
    prompt: str
    answer: str
    most_characters: int | None = None

    def rows(self, dataset: Dataset) -> Dataset:
        """Returns the rows to ask, with the columns `prompt`, `answer` and `source` (the id of this source).

        Raises:
            ValueError: when a column is missing.
        """
        missing = [name for name in (self.prompt, self.answer) if name not in dataset.column_names]
        if missing:
            raise ValueError(
                f"dataset {self.name!r} has the columns {dataset.column_names}; it must have "
                f"{' and '.join(map(repr, missing))} too."
            )
        dataset = dataset.select_columns([self.prompt, self.answer])
        dataset = dataset.rename_columns({self.prompt: "prompt", self.answer: "answer"})
        if self.most_characters is not None:
            dataset = dataset.filter(lambda prompt: len(prompt) <= self.most_characters, input_columns="prompt")
        return dataset.add_column("source", [self.name] * len(dataset))


NAMED_DATA = {
    "bigmath": (
        # The limit on the length is that of QeRL's release
        Source("open-r1/Big-Math-RL-Verified-Processed", "level_3_4_5", "prompt", "solution", most_characters=1024),
    ),
    "gsm8k_math": (
        Source("openai/gsm8k", "main", "question", "answer"),
        Source("DigitalLearningGmbH/MATH-lighteval", None, "problem", "solution"),
    ),
}


def load_named(name: str, config: str | None, load: Callable[[str, str | None], Dataset]) -> Dataset:
    """Loads a key of `NAMED_DATA`, its sources one after the other.

    Args:
        name (`str`): the key.
        config (`str` or `None`): a configuration of its source, in place of the one in the table.
        load (`Callable`): loads a dataset by its id and its configuration.

    Raises:
        ValueError: when a source lacks a column, or for a configuration of several sources.
    """
    sources = NAMED_DATA[name]
    if config is not None and len(sources) > 1:
        raise ValueError(
            f"dataset {name!r} mixes {len(sources)} datasets and takes no configuration, such as {config!r}."
        )
    return concatenate_datasets([source.rows(load(source.name, config or source.config)) for source in sources])
