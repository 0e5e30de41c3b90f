"""Word problems with worked solutions, such as GSM8K's, to be memorized.

A model of a few million parameters cannot solve them, but it can memorize their solutions. Its samples are then real
text with uncertainty at every word, which RL can improve. No problems are held out, because memorized solutions do not
help with other problems.

    Weng earns $12 an hour for babysitting. [...] How much did she earn?
    Weng earns 12/60 = $0.2 per minute.
    Working 50 minutes, she earned 0.2 x 50 = $10.
    #### 10
"""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

from .data import load_prompts


LONGEST = 240  # longest solution in characters; 4 in 7 of GSM8K's training questions have one within it
_CALCULATION = re.compile("<<.*?>>")  # GSM8K's notes for a calculator


@dataclass(frozen=True)
class WordProblem:
    """A question and its worked solution, which ends in `#### ` and a number."""

    question: str
    solution: str

    @property
    def prompt(self) -> str:
        return f"{self.question}\n"

    @property
    def row(self) -> dict:
        """The row of a dataset: the prompt, and the answer that the reward compares with."""
        return {"prompt": self.prompt, "answer": self.solution.rpartition("#### ")[2]}

    @property
    def direct_solution(self) -> str:
        """`#### ` and the answer, without steps."""
        return f"#### {self.row['answer']}"


def word_problems(source: str, seed: int, count: int) -> Iterator[WordProblem]:
    """Yields `count` problems without end, the same ones for the same seed, in a new random order each time.

    Args:
        source (`str`): as [`load_prompts`] takes it, with the columns `question` and `answer` (`openai/gsm8k`, say);
            the first `count` of its problems with short solutions are taken.
        seed (`int`): seed of the order.
        count (`int`): number of problems.

    Raises:
        ValueError: the source has fewer problems.
    """
    rows = load_prompts(source)
    if "answer" not in rows.column_names:
        raise ValueError(f"{source!r} has the columns {rows.column_names}; word problems need an 'answer'.")
    found = [
        WordProblem(question, _CALCULATION.sub("", answer))
        for question, answer in zip(rows["prompt"], rows["answer"], strict=True)
    ]
    found = [problem for problem in found if len(problem.solution) <= LONGEST and "#### " in problem.solution]
    if len(found) < count:
        raise ValueError(
            f"{source!r} has {len(found)} solutions that end in '#### ' and an answer within {LONGEST} characters, and "
            f"not {count}."
        )
    rng = random.Random(seed)
    while True:
        yield from rng.sample(found[:count], count)
