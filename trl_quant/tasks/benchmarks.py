r"""Benchmarks to evaluate models on: questions from the hub, from a file or generated, and the rewards that score them.

| task | on the hub | split | questions |
|---|---|---|---|
| gsm8k | openai/gsm8k | test | 1319 |
| math500 | HuggingFaceH4/MATH-500 | test | 500 |
| aime24 | HuggingFaceH4/aime_2024 | train | 30 |
| aime25 | math-ai/aime25 | test | 30 |
| amc23 | math-ai/amc23 | test | 40 |
| minerva | math-ai/minervamath | test | 272 |
| olympiad | math-ai/olympiadbench | test | 674 |

`arithmetic`, `countdown` and `sudoku` are generated, with problems that are held out from training. `jsonl` is your own
file, whose column `answer` is compared as mathematics.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from datasets import Dataset

from . import arithmetic, countdown, sudoku
from .data import check_prompts, load_prompts, with_instruction
from .mathematics import lenient_math_reward
from .rewards import GIVEN, REWARDS


BOXED = r"Please reason step by step, and put your final answer within \boxed{}."
GENERATED = 500  # questions by default
ATTEMPTS = 1000  # draws without a new problem, after which no more are assumed to exist


@dataclass(frozen=True)
class Benchmark:
    """
    A task to evaluate on.

    Attributes:
        reward (`Callable`): A reward in TRL's signature, 1 for a right answer.
        source (`str` or `None`): The dataset on the hub.
        split (`str`): The dataset's split.
        answer (`str`): The dataset's column that is passed to the reward as `answer`.
        instruction (`str`): Text after each question.
        problems (`Callable` or `None`): Generates questions from a seed and from keywords for their difficulty.
        config (`str` or `None`): The dataset's configuration.
    """

    reward: Callable[..., list[float | None]] = lenient_math_reward
    source: str | None = None
    split: str = "test"
    answer: str = "answer"
    instruction: str = ""
    problems: Callable[..., Iterator] | None = None
    config: str | None = None

    @property
    def has_data(self) -> bool:
        return self.source is not None or self.problems is not None

    @property
    def reads(self) -> dict[str, bool]:
        """The columns of a row that the reward reads by name -> whether it needs them."""
        parameters = inspect.signature(self.reward).parameters.values()
        named = [p for p in parameters if p.kind is not p.VAR_KEYWORD and p.name not in GIVEN]
        return {p.name: p.default is p.empty for p in named}

    @property
    def columns(self) -> list[str]:
        """The columns of a row that the reward needs in addition to the completion."""
        return [name for name, needed in self.reads.items() if needed]

    @property
    def difficulty(self) -> dict:
        """Keywords of the generator with their defaults."""
        if self.problems is None:
            return {}
        parameters = inspect.signature(self.problems).parameters
        return {name: p.default for name, p in parameters.items() if name not in ("seed", "held_out")}


BENCHMARKS = {
    "gsm8k": Benchmark(REWARDS["gsm8k"], "openai/gsm8k", instruction=BOXED),
    "math500": Benchmark(source="HuggingFaceH4/MATH-500", instruction=BOXED),
    "aime24": Benchmark(source="HuggingFaceH4/aime_2024", split="train", instruction=BOXED),
    "aime25": Benchmark(source="math-ai/aime25", instruction=BOXED),
    "amc23": Benchmark(source="math-ai/amc23", instruction=BOXED),
    "minerva": Benchmark(source="math-ai/minervamath", instruction=BOXED),
    "olympiad": Benchmark(source="math-ai/olympiadbench", answer="final_answer", instruction=BOXED),
    "countdown": Benchmark(REWARDS["countdown"], problems=countdown.problems),
    "sudoku": Benchmark(REWARDS["sudoku"], problems=sudoku.problems),
    "arithmetic": Benchmark(REWARDS["arithmetic"], problems=arithmetic.problems),
    "jsonl": Benchmark(),
}


def generate(task: str, count: int, seed: int = 0, held_out: bool = False, **difficulty) -> Dataset:
    """
    Generates distinct problems of a task, as a dataset to train or to evaluate on.

    Args:
        task (`str`): `"arithmetic"`, `"countdown"` or `"sudoku"`.
        count (`int`): Number of problems.
        seed (`int`): Seed of the generator.
        held_out (`bool`): Whether to generate problems for evaluation, which are never generated for training.
        difficulty: Keywords of the task's `problems`.

    Raises:
        ValueError: for other keywords, or if there are fewer distinct problems.

    Example:

    ```python
    >>> generate("countdown", 10_000, min_numbers=3, max_numbers=3).to_json("countdown.jsonl")
    ```
    """
    check_difficulty(task, difficulty)
    stream, found = BENCHMARKS[task].problems(seed, held_out=held_out, **difficulty), {}
    while len(found) < count:
        fresh = next((p for p in islice(stream, ATTEMPTS) if p not in found), None)
        if fresh is None:
            raise ValueError(f"{task}: there are hardly more than {len(found)} problems like that, not {count}.")
        found[fresh] = None
    return Dataset.from_list([problem.row for problem in found])


def check_difficulty(task: str, difficulty: dict, benchmark: Benchmark | None = None) -> None:
    """Raises `ValueError` for keywords that a task's generator lacks, or of the wrong type."""
    known = (BENCHMARKS[task] if benchmark is None else benchmark).difficulty
    wrong = [name for name, value in difficulty.items() if name not in known or not _is_like(value, known[name])]
    if wrong:
        allowed = ", ".join(f"{name}={default!r}" for name, default in known.items()) or "none"
        raise ValueError(f"`task_kwargs`: {task} takes no {wrong[0]}={difficulty[wrong[0]]!r}. Allowed: {allowed}.")


def _is_like(value, default) -> bool:
    return type(value) is type(default) or not isinstance(default, int)


def load_questions(
    task: str,
    data: str | None = None,
    count: int | None = None,
    seed: int = 0,
    instruction: str | None = None,
    difficulty: dict | None = None,
    benchmark: Benchmark | None = None,
) -> Dataset:
    """
    Loads a benchmark's questions as plain prompts, or as a file's own conversations, with the columns for its reward.

    Args:
        task (`str`): A key of `BENCHMARKS`, or the name of `benchmark`.
        data (`str`, *optional*): A file or directory to read instead, see [`load_prompts`].
        count (`int`, *optional*): Number of questions to take, from the first on.
        seed (`int`): Seed of generated questions.
        instruction (`str`, *optional*): Text after each question, in place of the benchmark's own.
        difficulty (`dict`, *optional*): Keywords of the generator.
        benchmark ([`Benchmark`], *optional*): The task, in place of the one in `BENCHMARKS`.

    Raises:
        ValueError: There are no questions, or a column is missing.
    """
    benchmark = BENCHMARKS[task] if benchmark is None else benchmark
    source = data or benchmark.source
    check_difficulty(task, difficulty or {}, benchmark)
    if source is not None and difficulty:
        raise ValueError(f"`task_kwargs` act only on generated problems, but these come from {source!r}. Leave it out.")
    if source is not None:
        dataset = load_prompts(source, benchmark.split, None if data else benchmark.config)
        if benchmark.answer in dataset.column_names and benchmark.answer != "answer":
            dataset = dataset.remove_columns({"answer"} & {*dataset.column_names})
            dataset = dataset.rename_column(benchmark.answer, "answer")
        dataset = dataset.select(range(min(count or len(dataset), len(dataset))))
    elif benchmark.problems is not None:
        dataset = generate(task, count or GENERATED, seed, held_out=True, **(difficulty or {}))
    else:
        raise ValueError(f"`--task {task}` needs `--data`: a file with the columns 'prompt' and 'answer'.")
    check_prompts(source or task, dataset)
    missing = [name for name in benchmark.columns if name not in dataset.column_names]
    if missing:
        raise ValueError(
            f"{source!r} has the columns {dataset.column_names}; `--task {task}` needs {', '.join(map(repr, missing))}."
        )
    ours = benchmark.reward in [*REWARDS.values(), lenient_math_reward]
    known = {*benchmark.reads} if ours else {*dataset.column_names} - {*GIVEN}  # a file may hold other completions
    dataset = dataset.select_columns(["prompt", *(name for name in dataset.column_names if name in known - {"prompt"})])
    unanswered = (
        benchmark.reward(completions=[""] * len(dataset), **dataset.remove_columns("prompt")[:]) if ours else []
    )
    if None in unanswered:
        raise ValueError(f"{source!r}: row {unanswered.index(None)} has no answer to compare with.")
    instruction = benchmark.instruction if instruction is None else instruction
    return with_instruction(dataset, instruction) if instruction else dataset
