"""Word problems with worked solutions, such as GSM8K's, to learn by heart.

A model of some million parameters cannot solve them, but it can learn their solutions. What it samples is then real
text, unsure of itself at every word, on which RL goes on. No problems are held out: what is learned by heart says
nothing of others.

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


LONGEST = 240  # characters of a solution; those of 4 in 7 of GSM8K's training questions have no more
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
        """Of a dataset: the prompt, and what the reward compares with."""
        return {"prompt": self.prompt, "answer": self.solution.rpartition("#### ")[2]}

    @property
    def direct_solution(self) -> str:
        """`#### ` and the answer, without steps."""
        return f"#### {self.row['answer']}"


def word_problems(source: str, seed: int, count: int) -> Iterator[WordProblem]:
    """An endless stream of `count` problems, the same for the same seed: in random order, then all in another.

    Args:
        source (`str`): as [`load_prompts`] takes it, with the columns `question` and `answer` (`openai/gsm8k`, say);
            the first `count` of its problems with short solutions are taken.
        seed (`int`): of the order.
        count (`int`): how many problems there are.

    Raises:
        ValueError: not so many problems.
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
