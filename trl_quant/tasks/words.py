"""Word problems with worked solutions, such as GSM8K's, to learn by heart.

A model of some million parameters cannot solve them, but it can learn their solutions. What it samples is then real
text, unsure of itself at every word, and how often it is right can be raised by RL. All problems are taught; those that
are held out are held out from RL alone.

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
from .splits import is_held_out


LONGEST = 400  # characters of a solution; those of 7 in 8 of GSM8K's training questions are shorter
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
    def held_out(self) -> bool:
        """Whether the problem is for evaluation."""
        return is_held_out(self.question)

    @property
    def row(self) -> dict:
        """Of a dataset: the prompt, and what the reward compares with."""
        return {"prompt": self.prompt, "answer": self.solution.rpartition("#### ")[2]}

    @property
    def direct_solution(self) -> str:
        """`#### ` and the answer, without steps."""
        return f"#### {self.row['answer']}"


def word_problems(
    source: str, seed: int, held_out: bool | None = None, count: int | None = None
) -> Iterator[WordProblem]:
    """An endless stream of problems, the same for the same seed: all of them in random order, then all in another.

    Args:
        source (`str`): as [`load_prompts`] takes it, with the columns `question` and `answer` (`openai/gsm8k`, say).
        seed (`int`): of the stream.
        held_out (`bool`, *optional*): problems for evaluation, or for training; by default both.
        count (`int`, *optional*): of the problems that are read, the first ones; by default all.

    Raises:
        ValueError: no such problems.
    """
    rows = load_prompts(source)
    if "answer" not in rows.column_names:
        raise ValueError(f"{source!r} has the columns {rows.column_names}; word problems need an 'answer'.")
    solutions = [_CALCULATION.sub("", answer) for answer in rows["answer"]]
    found = [
        WordProblem(question, solution)
        for question, solution in zip(rows["prompt"], solutions, strict=True)
        if len(solution) <= LONGEST and "#### " in solution
    ]
    found = [problem for problem in found[:count] if held_out in (None, problem.held_out)]
    if not found:
        raise ValueError(f"{source!r} has no solutions that end in '#### ' and an answer within {LONGEST} characters.")
    rng = random.Random(seed)
    while True:
        yield from rng.sample(found, len(found))
