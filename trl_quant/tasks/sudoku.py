r"""Sudoku of 4 x 4 cells: each row, column and 2 x 2 box holds 1, 2, 3 and 4.

    1 _ | _ 4          1 2 | 3 4
    _ 4 | 1 _          3 4 | 1 2
    ----+----    ->    ----+----
    _ 1 | 4 _          2 1 | 4 3
    4 _ | _ 1          4 3 | 2 1

There are 288 filled grids. A puzzle is one of them with some cells blank, and has only one solution. Whole grids are
held out: no puzzle for evaluation has the solution of a puzzle for training.
"""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import permutations, product

from .answers import final_answer
from .splits import is_held_out


DIGITS = "1234"
BLANK = "_"
MAX_BLANKS = 12  # a puzzle needs at least four given cells to have only one solution
_ROWS = [range(4 * i, 4 * i + 4) for i in range(4)]
_COLUMNS = [range(i, 16, 4) for i in range(4)]
_BOXES = [(i, i + 1, i + 4, i + 5) for i in (0, 2, 8, 10)]


@dataclass(frozen=True)
class Problem:
    """A puzzle and its solution: 16 characters, row by row."""

    cells: str
    solution: str

    @property
    def puzzle(self) -> str:
        """Four lines of four cells."""
        return _lines(self.cells)

    @property
    def prompt(self) -> str:
        return (
            "Fill in this 4 x 4 sudoku: each row, each column and each of the four 2 x 2 boxes holds the digits 1, 2, "
            f"3 and 4. Blank cells are {BLANK}.\n\n{self.puzzle}\n\nGive the filled grid alone, four lines of four "
            "digits, at the end, between <answer> and </answer>."
        )

    @property
    def held_out(self) -> bool:
        """Whether the solution is for evaluation."""
        return is_held_out(self.solution)

    @property
    def row(self) -> dict:
        """The row of a dataset: the prompt, and the puzzle that the reward checks."""
        return {"prompt": self.prompt, "puzzle": self.puzzle, "solution": _lines(self.solution)}


def _lines(cells: str) -> str:
    return "\n".join(" ".join(cells[i] for i in row) for row in _ROWS)


def is_solved(grid: str) -> bool:
    """Whether 16 characters, row by row, have all four digits in each row, column and box."""
    return len(grid) == 16 and all({grid[i] for i in unit} == set(DIGITS) for unit in (*_ROWS, *_COLUMNS, *_BOXES))


@cache
def grids() -> tuple[str, ...]:
    """Returns all filled grids."""
    rows = ["".join(row) for row in permutations(DIGITS)]
    halves = [a + b for a, b in product(rows, rows) if len({*a[:2], *b[:2]}) == 4]
    return tuple(filter(is_solved, map("".join, product(halves, halves))))


@cache
def _differences(solution: str) -> list[int]:
    """Returns, for each other grid, the cells that differ, as bits. A given cell among them excludes that grid."""
    others = (grid for grid in grids() if grid != solution)
    return [sum(1 << i for i in range(16) if grid[i] != solution[i]) for grid in others]


def problems(seed: int, min_blanks: int = 4, max_blanks: int = 8, held_out: bool = False) -> Iterator[Problem]:
    """Yields puzzles with one solution each without end, the same ones for the same seed, all held out or none.

    Args:
        seed (`int`): seed of the stream.
        min_blanks, max_blanks (`int`): range of the number of blank cells, from 1 to 12, all equally frequent.
        held_out (`bool`): whether to yield puzzles for evaluation instead of training.

    Raises:
        ValueError: for numbers of blanks that are out of range or not in order.
    """
    if not 1 <= min_blanks <= max_blanks <= MAX_BLANKS:
        raise ValueError(
            f"`min_blanks`={min_blanks}, `max_blanks`={max_blanks}: they must be from 1 to {MAX_BLANKS}, in order."
        )
    rng = random.Random(seed)
    own = [grid for grid in grids() if is_held_out(grid) == held_out]
    while True:
        blanks = rng.randint(min_blanks, max_blanks)
        problem = None
        while problem is None:
            problem = _blanked(rng, rng.choice(own), blanks)
        yield problem


def _blanked(rng: random.Random, solution: str, blanks: int) -> Problem | None:
    """Blanks cells one after the other, in a random order; returns `None` if that does not reach `blanks` cells."""
    given = 2**16 - 1
    for i in rng.sample(range(16), 16):
        if all(given & ~(1 << i) & differing for differing in _differences(solution)):
            given &= ~(1 << i)
        if given.bit_count() == 16 - blanks:
            return Problem("".join(c if given >> i & 1 else BLANK for i, c in enumerate(solution)), solution)
    return None


def sudoku_reward(completions, puzzle, prompts=None, **kwargs) -> list[float | None]:
    r"""1.0 where the completion's last answer is the puzzle, filled in by the rules, else 0.0.

    Args:
        completions (`list[str]` or `list[list[dict]]`): plain or conversational, one per row; the answer is in
            `<answer>` or `\boxed{}`, in four lines (`####` marks a single line, so it cannot hold a grid).
        puzzle (`list[str]`): 16 cells, row by row, with `_`, `.` or 0 for a blank one; or rows, as lists or as texts,
            where `None` is blank too. Each of its solutions counts.
        prompts (`list`, *optional*): the prompts, as TRL passes them; a repeated question is ignored.

    Returns:
        `list[float | None]`: `None` where a row has no such puzzle.
    """
    prompts = prompts or [None] * len(completions)
    return [_score(*row) for row in zip(completions, puzzle, prompts, strict=True)]


def _score(completion, puzzle, prompt) -> float | None:
    cells = re.sub(r"\s", "", _as_text(puzzle)).translate(str.maketrans("0.", 2 * BLANK))
    if len(cells) != 16 or not set(cells) <= set(DIGITS + BLANK):
        return None
    grid = _filled(final_answer(completion, prompt))
    kept = grid is not None and all(given in (BLANK, cell) for given, cell in zip(cells, grid, strict=True))
    return float(kept and is_solved(grid))


def _as_text(puzzle) -> str:
    if isinstance(puzzle, list | tuple):
        return "".join(map(_as_text, puzzle))
    return BLANK if puzzle is None else str(puzzle)


def _filled(text: str | None) -> str | None:
    """Returns the 16 digits of four lines without spaces; `None` for anything else."""
    rows = [line.replace(" ", "") for line in (text or "").strip().splitlines()]
    fine = len(rows) == 4 and all(len(row) == 4 and set(row) <= set(DIGITS) for row in rows)
    return "".join(rows) if fine else None
