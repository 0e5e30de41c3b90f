r"""Multi-digit arithmetic with visible steps: problems, worked solutions, and which problems are held out.

A problem is `a+b=`, `a-b=` (with a >= b) or `a*d=` (with one digit d). Its solution goes from the last digit to the
first, one step per column: the digits, the incoming carry, the digit written, and the outgoing carry (`c`) or borrow
(`b`). The answer follows in GSM8K's form:

    347+588=   7+8+0=5c1 4+8+1=3c1 3+5+1=9c0 #### 935
    904-88=    4-8-0=6b1 0-8-1=1b1 9-0-1=8b0 #### 816
    47*6=      7*6+0=2c4 4*6+4=8c2 #### 282

A division subtracts the divisor until the rest is smaller than it. Its solution is a chain of differences, each of
which needs only the one before it, so that short steps make long completions:

    130%57=    130-57=0-7-0=3b1 3-5-1=7b1 1-0-1=0b0 #### 73;73-57=3-7-0=6b1 7-5-1=1b0 #### 16;

This file is pure Python. `examples/build_arithmetic_model.py` teaches the solutions to a model.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .answers import NUMBER_CHARACTERS
from .splits import is_held_out


OPERATIONS = ("+", "-", "*")
MAX_DIGITS = NUMBER_CHARACTERS - 1  # of an operand, so that the reward can read every answer


@dataclass(frozen=True)
class Problem:
    """`a op b`, with `a >= b` for a difference and a single digit `b` for a product."""

    a: int
    op: str
    b: int

    @property
    def prompt(self) -> str:
        return f"{self.a}{self.op}{self.b}="

    @property
    def answer(self) -> int:
        return {"+": self.a + self.b, "-": self.a - self.b, "*": self.a * self.b}[self.op]

    @property
    def held_out(self) -> bool:
        """Whether the problem is for evaluation."""
        return is_held_out(self.prompt)

    @property
    def row(self) -> dict:
        """The row of a dataset: the prompt, and what the reward compares with."""
        return {"prompt": self.prompt, "answer": str(self.answer)}

    @property
    def direct_solution(self) -> str:
        """`#### ` and the answer, without steps."""
        return f"#### {self.answer}"

    @property
    def solution(self) -> str:
        """The written-out steps, then `#### ` and the answer."""
        return " ".join([*self._steps(), self.direct_solution])

    def _steps(self) -> Iterator[str]:
        carry = 0
        other_digits = digits(self.b)
        for column, digit in enumerate(digits(self.a)):
            if self.op == "*":
                carry_in, other = carry, self.b
                carry, written = divmod(digit * other + carry_in, 10)
                yield f"{digit}*{other}+{carry_in}={written}c{carry}"
                continue
            carry_in, other = carry, other_digits[column] if column < len(other_digits) else 0
            if self.op == "+":
                carry, written = divmod(digit + other + carry_in, 10)
                yield f"{digit}+{other}+{carry_in}={written}c{carry}"
            else:
                written = (digit - other - carry_in) % 10
                carry = int(digit - other - carry_in < 0)
                yield f"{digit}-{other}-{carry_in}={written}b{carry}"


@dataclass(frozen=True)
class Division:
    """`a % b`, by repeated subtraction, with `a >= b`."""

    a: int
    b: int

    @property
    def problems(self) -> list[Problem]:
        """The differences, one for each unit of the quotient."""
        return [Problem(left, "-", self.b) for left in range(self.a, self.b - 1, -self.b)]

    @property
    def prompt(self) -> str:
        return f"{self.a}%{self.b}="

    @property
    def held_out(self) -> bool:
        """Whether the division is for evaluation."""
        return is_held_out(self.prompt)

    @property
    def row(self) -> dict:
        """The row of a dataset: the prompt, and what [`~tasks.division_reward`] compares with."""
        return {"prompt": self.prompt, "answer": ";".join(str(problem.answer) for problem in self.problems)}

    @property
    def direct_solution(self) -> str:
        """Each difference and its answer, without steps."""
        return "".join(f"{problem.prompt}{problem.direct_solution};" for problem in self.problems)

    @property
    def solution(self) -> str:
        """Each difference and its solution."""
        return "".join(f"{problem.prompt}{problem.solution};" for problem in self.problems)


def digits(number: int) -> list[int]:
    """Decimal digits, last first."""
    return [int(digit) for digit in reversed(str(number))]


def problems(
    seed: int, operations: Sequence[str] = OPERATIONS, min_digits: int = 2, max_digits: int = 4, held_out: bool = False
) -> Iterator[Problem]:
    """Yields problems without end, the same ones for the same seed, either only held-out or only training problems.

    The `operations` are equally frequent, and so are digit counts from `min_digits` to `max_digits`. Problems with one
    of their operands as the answer (`80-40`) are left out: copying from the question must never be right.

    Raises:
        ValueError: for unknown operations or none, or for numbers of digits that are out of range or not in order.
    """
    allowed = ", ".join(map(repr, OPERATIONS))
    if not isinstance(operations, Sequence) or not operations:
        raise ValueError(f"`operations`={operations!r} must be a list of at least one of {allowed}.")
    unknown = [op for op in operations if op not in OPERATIONS]
    if unknown:
        raise ValueError(f"`operations` has {unknown}. Allowed: {allowed}.")
    if not 1 <= min_digits <= max_digits <= MAX_DIGITS:
        raise ValueError(
            f"`min_digits`={min_digits}, `max_digits`={max_digits}: they must be from 1 to {MAX_DIGITS}, in order."
        )
    rng = random.Random(seed)
    while True:
        op = rng.choice(operations)
        a, b = (
            rng.randrange(10 ** (size - 1), 10**size)
            for size in (rng.randint(min_digits, max_digits), rng.randint(min_digits, max_digits))
        )
        a, b = (a, rng.randrange(2, 10)) if op == "*" else (max(a, b), min(a, b))
        problem = Problem(a, op, b)
        if problem.held_out == held_out and problem.answer not in (a, b):
            yield problem


def divisions(seed: int, min_quotient: int, max_quotient: int, held_out: bool = False) -> Iterator[Division]:
    """Yields divisions by two digits without end, the same ones for the same seed: held out, or for training.

    Divisors, quotients from `min_quotient` to `max_quotient`, and remainders are equally frequent. Raises `ValueError`
    for quotients that are below 1 or not in order.
    """
    if not 1 <= min_quotient <= max_quotient:
        raise ValueError(
            f"`min_quotient`={min_quotient}, `max_quotient`={max_quotient}: they must be at least 1, in order."
        )
    rng = random.Random(seed)
    while True:
        b = rng.randrange(10, 100)
        division = Division(b * rng.randint(min_quotient, max_quotient) + rng.randrange(b), b)
        if division.held_out == held_out:
            yield division
