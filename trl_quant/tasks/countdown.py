r"""Countdown: make a target from given numbers with + - * / and parentheses.

    Use the numbers 3, 25 and 7, each exactly once, with + - * / and parentheses to make 46.   ->   25 + 3 * 7

A problem is built from its solution, so it has one: two numbers at a time are replaced by their sum, difference,
product or quotient, always a positive whole number, until one is left. Problems with the same target and the same
numbers, in any order, are the same problem.

The verifier parses the last answer with Python's grammar (`ast`), evaluates only the four operations on whole numbers,
and computes in exact fractions. Joined digits, signs before numbers, powers, floor division and near misses score 0.

[`Search`] poses the same problem in few characters, and its worked solution lists trials until one makes the target.
`examples/build_arithmetic_model.py` teaches it to a model:

    3,4,7>19=   4+3=7 7+7=14;4+3=7 7*7=49;4+3=7 7/7=1;4*3=12 12+7=19;#### (4*3)+7
"""

import ast
import itertools
import operator
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from .answers import final_answer, single_number, truth_text
from .splits import is_held_out


DRAWS = 1_000_000  # without a problem, after which none is assumed to exist
TRIALS = 8  # largest number of trials in a worked solution
MAX_CHARACTERS = 256  # largest length of an expression; six numbers of three digits with all parentheses take 50
_ALLOWED = re.compile(rf"[0-9+\-*/() ]{{1,{MAX_CHARACTERS}}}")
_OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


@dataclass(frozen=True, eq=False)
class Problem:
    """Numbers that make a target. Each must be used exactly once, or at most once with `use_all=False`."""

    nums: tuple[int, ...]
    target: int
    use_all: bool = True

    def __eq__(self, other):
        return type(self) is type(other) and self._identity == other._identity

    def __hash__(self):
        return hash(self._identity)

    @property
    def _identity(self) -> tuple:
        """What makes it the same problem: the order of the numbers does not count."""
        return tuple(sorted(self.nums)), self.target, self.use_all

    @property
    def prompt(self) -> str:
        nums = f"{', '.join(map(str, self.nums[:-1]))} and {self.nums[-1]}"
        return (
            f"Use the numbers {nums}, each {'exactly' if self.use_all else 'at most'} once, with + - * / and "
            f"parentheses to make {self.target}. Give the expression alone, without an equals sign, at the end, "
            "between <answer> and </answer>."
        )

    @property
    def held_out(self) -> bool:
        """Whether the problem is for evaluation."""
        return is_held_out(f"{sorted(self.nums)} {self.target}")

    @property
    def row(self) -> dict:
        """The row of a dataset: the prompt, and what the reward compares with."""
        return {"prompt": self.prompt, "nums": list(self.nums), "target": self.target, "use_all": self.use_all}


def problems(
    seed: int,
    min_numbers: int = 3,
    max_numbers: int = 4,
    max_number: int = 99,
    max_target: int = 99,
    use_all: bool = True,
    held_out: bool = False,
) -> Iterator[Problem]:
    """Yields problems without end, the same ones for the same seed, either only held-out or only training problems.

    Args:
        seed (`int`): seed of the stream.
        min_numbers, max_numbers (`int`): range of the count of numbers, from 2 to 8, all equally frequent.
        max_number (`int`): numbers are drawn from 1 to this.
        max_target (`int`): targets lie between 10 and this, and differ from all numbers.
        use_all (`bool`): whether an answer must use all numbers.
        held_out (`bool`): whether to yield problems for evaluation instead of training.

    Raises:
        ValueError: for a number outside its range, or if `DRAWS` draws in a row give no problem.
    """
    if not 2 <= min_numbers <= max_numbers <= 8:
        raise ValueError(
            f"`min_numbers`={min_numbers}, `max_numbers`={max_numbers}: they must be from 2 to 8, in order."
        )
    for name, value, least in (("max_number", max_number, 5), ("max_target", max_target, 10)):
        if value < least:
            raise ValueError(f"`{name}`={value} is out of range. It must be >= {least}.")
    rng, drawn = random.Random(seed), 0
    while drawn < DRAWS:
        drawn += 1
        nums = tuple(rng.randint(1, max_number) for _ in range(rng.randint(min_numbers, max_numbers)))
        target = _reachable(rng, nums)
        problem = Problem(nums, target, use_all)
        if 10 <= target <= max_target and target not in nums and problem.held_out == held_out:
            yield problem
            drawn = 0
    raise ValueError(
        f"countdown: {DRAWS} draws with `max_number`={max_number}, `max_target`={max_target} gave no problem for "
        f"{'evaluation' if held_out else 'training'}. Raise `max_numbers` or change these two."
    )


def _reachable(rng: random.Random, nums: Sequence[int]) -> int:
    """Returns the value of a random expression of all `nums` whose steps are all positive whole numbers."""
    left = list(nums)
    while len(left) > 1:
        b, a = sorted(left.pop(rng.randrange(len(left))) for _ in range(2))
        left.append(rng.choice([result for _, result in _results(a, b)]))
    return left[0]


def _results(a: int, b: int) -> list[tuple[str, int]]:
    """Returns the operations on `a >= b` whose results are positive whole numbers."""
    differences = [("-", a - b)] if a > b else []
    return [("+", a + b), ("*", a * b), *differences, *([("/", a // b)] if a % b == 0 else [])]


@dataclass(frozen=True)
class Search(Problem):
    """A problem in few characters. Its solution lists trials in a fixed order, up to the one that hits the target."""

    @property
    def prompt(self) -> str:
        return f"{','.join(map(str, self.nums))}>{self.target}="

    @property
    def direct_solution(self) -> str:
        """`#### ` and the expression, without the search."""
        return self._trials()[-1].rpartition(";")[2]

    @property
    def solution(self) -> str:
        """The trials, of which the last makes the target, then `#### ` and its expression."""
        return "".join(self._trials())

    @property
    def trials(self) -> int:
        """The number of trials in the solution."""
        return len(self._trials())

    def _trials(self) -> list[str]:
        tried = []
        for steps, expression, value in _ways([(number, str(number)) for number in self.nums]):
            tried.append(f"{' '.join(steps)};")
            if value == self.target:
                return [*tried[:-1], f"{tried[-1]}#### {expression}"]
        raise ValueError(f"{self.prompt!r} has no solution in positive whole numbers.")


def _ways(left: list[tuple[int, str]], steps: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str, int]]:
    """Yields steps, expression and value of all ways to combine the numbers in `left`, given with expressions."""
    if len(left) == 1:
        yield steps, left[0][1][1:-1], left[0][0]
    for i, j in itertools.combinations(range(len(left)), 2):
        (a, above), (b, below) = sorted((left[i], left[j]), key=lambda term: -term[0])
        rest = [term for k, term in enumerate(left) if k not in (i, j)]
        for sign, result in _results(a, b):
            step = f"{a}{sign}{b}={result}"
            yield from _ways([*rest, (result, f"({above}{sign}{below})")], (*steps, step))


def searches(seed: int, numbers: int = 3, held_out: bool = False) -> Iterator[Search]:
    """Yields problems of `numbers` numbers from 1 to 9 with few trials, without end, the same for the same seed."""
    for problem in problems(seed, numbers, numbers, max_number=9, held_out=held_out):
        search = Search(problem.nums, problem.target)
        if search.trials <= TRIALS:
            yield search


def value_of(expression: str) -> tuple[Fraction, Counter] | None:
    """Returns an expression's value and the count of each number; `None` if the text is not exactly one expression."""
    if not _ALLOWED.fullmatch(expression):
        return None
    try:
        tree = ast.parse(expression.strip(), mode="eval").body
        return _value(tree), Counter(node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    except (SyntaxError, ValueError, ZeroDivisionError, MemoryError, RecursionError):
        return None


def _value(node: ast.AST) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError(f"{ast.dump(node)} is neither a number nor one of the four operations")


def countdown_reward(completions, nums, target, use_all=None, prompts=None, **kwargs) -> list[float | None]:
    r"""1.0 where the completion's last answer is an expression of the given numbers that equals the target, else 0.0.

    Args:
        completions (`list[str]` or `list[list[dict]]`): plain or conversational, one per row; the answer is in
            `<answer>`, `\boxed{}` or after `####`.
        nums (`list[list[int]]`): the numbers of each row; a file may hold them as strings, or as one: `"[3, 25, 7]"`.
        target (`list[int]`): the number that they must make, as a number or a string.
        use_all (`list[bool]`, *optional*): whether every number must be used; by default it must.
        prompts (`list`, *optional*): the prompts, as TRL passes them; a repeated question is ignored.

    Returns:
        `list[float | None]`: `None` where a row has no target, or numbers that are not positive integers.
    """
    rows = len(completions)
    columns = (completions, nums, target, use_all or [True] * rows, prompts or [None] * rows)
    return [_score(*row) for row in zip(*columns, strict=True)]


def _score(completion, nums, target, use_all, prompt) -> float | None:
    given, target = _given(nums), _number_of(target)
    if not given or target is None:
        return None
    answer = final_answer(completion, prompt)
    found = None if answer is None else value_of(answer.strip())
    if found is None:
        return 0.0
    value, used = found
    some = str(use_all).lower() in ("false", "0", "0.0")
    return float(value == target and (used <= given if some else used == given))


def _given(nums) -> Counter | None:
    """Counts each number of a row; `None` if one of them is negative or not whole."""
    if isinstance(nums, str):
        nums = re.findall(r"[^\s,;\[\]()'\"]+", nums)
    found = [_number_of(number) for number in nums] if isinstance(nums, Iterable) else []
    fine = all(number is not None and number >= 0 and number.denominator == 1 for number in found)
    return Counter(found) if fine else None


def _number_of(value) -> Fraction | None:
    found = single_number(truth_text(value))
    return None if found is None or found.endswith("%") else Fraction(found)
