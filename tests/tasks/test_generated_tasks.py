"""Countdown and sudoku: solvable problems, splits that never meet, and verifiers that nothing but a solution passes."""

import re
import warnings
from collections import Counter
from fractions import Fraction
from itertools import islice, permutations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_quant.tasks import REWARDS, countdown, countdown_reward, sudoku, sudoku_reward
from trl_quant.tasks.benchmarks import BENCHMARKS, generate


def take(module, n: int, seed: int = 0, **kwargs) -> list:
    return list(islice(module.problems(seed, **kwargs), n))


# Both


@pytest.mark.parametrize("task", ["countdown", "sudoku", "arithmetic"])
def test_splits_never_meet(task):
    """Not for one seed, and not for two; problems come again from the same seed, and no problem comes twice."""
    train, evaluation, other = (generate(task, 300, seed, h) for seed, h in ((0, False), (0, True), (1, True)))
    texts = [data["prompt"] for data in (train, evaluation, other)]
    assert all(len({*prompts}) == 300 for prompts in texts)
    assert not {*texts[0]} & {*texts[1], *texts[2]} and texts[1] != texts[2]
    assert generate(task, 300, 0, True).to_list() == evaluation.to_list()
    assert BENCHMARKS[task].reward is REWARDS[task]


def test_what_identifies_a_problem():
    """Countdown: numbers in any order. Sudoku: the solution, whatever is left blank."""
    one, other = (countdown.Problem(nums, 46) for nums in ((3, 25, 7), (7, 3, 25)))
    assert one.held_out == other.held_out and one.prompt != other.prompt
    assert one == other and hash(one) == hash(other)
    assert len({one, countdown.Problem(one.nums, 47), countdown.Problem(one.nums, 46, use_all=False)}) == 3
    rows = generate("countdown", 300, min_numbers=2, max_numbers=2)
    assert len({(*sorted(row["nums"]), row["target"]) for row in rows}) == 300
    solved = [{problem.solution for problem in take(sudoku, 400, held_out=held_out)} for held_out in (False, True)]
    assert solved[0] and solved[1] and not solved[0] & solved[1]


def test_few_problems_are_told():
    with pytest.raises(ValueError, match=r"countdown: there are hardly more than \d+ problems like that, not 500"):
        generate("countdown", 500, max_numbers=2, min_numbers=2, max_number=6)


def test_a_difficulty_without_problems_is_told(monkeypatch):
    """Numbers up to 5 make 10 in two ways, and neither is held out: the generator does not search for ever."""
    monkeypatch.setattr(countdown, "DRAWS", 10_000)
    narrowest = {"min_numbers": 2, "max_numbers": 2, "max_number": 5, "max_target": 10}
    assert len(generate("countdown", 2, **narrowest)) == 2
    with pytest.raises(ValueError, match=r"10000 draws with `max_number`=5, `max_target`=10 gave no problem for eval"):
        generate("countdown", 1, held_out=True, **narrowest)


@pytest.mark.parametrize(
    ("task", "difficulty", "says"),
    [
        ("countdown", {"blanks": 3}, "countdown takes no blanks=3. Allowed: min_numbers=3, max_numbers=4"),
        ("countdown", {"use_all": 1}, "countdown takes no use_all=1"),
        ("countdown", {"max_target": "99"}, "countdown takes no max_target='99'"),
        ("sudoku", {"held_out": False}, "sudoku takes no held_out=False"),
        ("gsm8k", {"max_target": 9}, "gsm8k takes no max_target=9. Allowed: none"),
        ("countdown", {"min_numbers": 5}, "`min_numbers`=5, `max_numbers`=4"),
        ("countdown", {"max_numbers": 9}, "must be from 2 to 8"),
        ("countdown", {"max_number": 4}, "`max_number`=4 is out of range"),
        ("countdown", {"max_target": 9}, "`max_target`=9 is out of range"),
        ("sudoku", {"max_blanks": 13}, "`max_blanks`=13: they must be from 1 to 12"),
        ("sudoku", {"min_blanks": 0}, "`min_blanks`=0"),
    ],
)
def test_difficulties_that_do_not_exist(task, difficulty, says):
    from trl_quant.tasks.benchmarks import load_questions

    with pytest.raises(ValueError) as error:
        load_questions(task, difficulty=difficulty)
    assert says in str(error.value)


# Countdown


def reachable(nums: tuple[int, ...], use_all: bool) -> dict[Fraction, str]:
    """Every value of expressions of `nums` by brute force, with one expression: two become one, until one is left."""
    found = {}

    def search(left: list[tuple[Fraction, str]]) -> None:
        for value, text in left:
            if not use_all or len(left) == 1:
                found.setdefault(value, text)
        for i, j in permutations(range(len(left)), 2):
            rest = [left[k] for k in range(len(left)) if k not in (i, j)]
            (a, x), (b, y) = left[i], left[j]
            results = [(a + b, "+"), (a - b, "-"), (a * b, "*")] + ([(a / b, "/")] if b else [])
            for value, op in results:
                search([*rest, (value, f"({x} {op} {y})")])

    search([(Fraction(n), str(n)) for n in nums])
    return found


@pytest.mark.parametrize("use_all", [True, False])
def test_countdown_problems_have_solutions(use_all):
    for problem in take(countdown, 60, max_numbers=3, min_numbers=2, use_all=use_all):
        found = reachable(problem.nums, use_all)
        assert problem.target in found and 10 <= problem.target <= 99 and problem.target not in problem.nums
        row = problem.row
        answers = [f"<answer>{found[problem.target]}</answer>", f"<answer>{found[min(found)]}</answer>"]
        prompts = [row.pop("prompt")] * 2
        assert countdown_reward(answers, prompts=prompts, **{k: [v] * 2 for k, v in row.items()}) == [1.0, 0.0]
        assert ("exactly once" in problem.prompt) == use_all and str(problem.target) in problem.prompt


def test_countdown_difficulties():
    counts = Counter(len(problem.nums) for problem in take(countdown, 600, min_numbers=2, max_numbers=4))
    assert counts.keys() == {2, 3, 4} and min(counts.values()) > 100
    hard = take(countdown, 50, min_numbers=6, max_numbers=6, max_number=9, max_target=500)
    assert max(problem.target for problem in hard) > 99 >= min(problem.target for problem in hard)
    assert max(n for problem in hard for n in problem.nums) == 9


def score(text, nums=(3, 25, 7), target=46, **kwargs) -> float | None:
    (found,) = countdown_reward([text], [list(nums)], [target], **kwargs)
    return found


@pytest.mark.parametrize(
    "text",
    [
        "<answer>25 + 3 * 7</answer>",
        "<answer> (7*3)+25 </answer>",
        r"so \boxed{25+3*7}",
        "#### 25+(3*7)",
        "<answer>3*7</answer> no, <answer>25 + 3 * 7</answer>",
        [{"role": "assistant", "content": "<answer>25 + 3 * 7</answer>"}],
    ],
)
def test_right_expressions(text):
    assert score(text) == 1.0


HACKS = [
    "",
    None,
    "25 + 3 * 7",  # not declared
    "<answer>46</answer>",
    "<answer>25 + 3 * 7 = 46</answer>",
    "<answer>46 = 25 + 3 * 7</answer>",
    "<answer>25 + 3 * 7</answer><answer>1</answer>",  # the last one counts
    "<answer>25 + 3 * 7</answer>" + " " * 5000,
    "<answer>25 + 3 * 7, 25 * 3</answer>",
    "<answer>25 + 3 * 7 or 25 * 3</answer>",
    "<answer>25 + 3 * 7\n25 * 3</answer>",
    "<answer>25 + 21</answer>",  # numbers that are not given
    "<answer>25 + 3 * 7 + 0</answer>",
    "<answer>(25 + 3 * 7) * 1</answer>",
    "<answer>25 + 7 + 7 + 7</answer>",  # too often
    "<answer>25 + 3 * 7 + 25 - 25</answer>",
    "<answer>3 * 7 + 5 * 5</answer>",
    "<answer>3 * 7 + 2 5</answer>",
    "<answer>37 + 25 - 16</answer>",  # glued
    "<answer>3 7 + 25</answer>",
    "<answer>(3)(7) + 25</answer>",
    "<answer>3(7) + 25</answer>",
    "<answer>25 - -3 * 7</answer>",  # signs
    "<answer>-(-25) + 3 * 7</answer>",
    "<answer>+25 + 3 * 7</answer>",
    "<answer>25 + 3 * +7</answer>",
    "<answer>25 + ~-3 * 7</answer>",
    "<answer>25 + 3 ** 7</answer>",
    "<answer>25 // 7 * 3</answer>",
    "<answer>25 % 7 + 3</answer>",
    "<answer>25 ^ 3 - 7</answer>",
    "<answer>25 | 3 * 7</answer>",
    "<answer>25 + 3 × 7</answer>",
    "<answer>25 + ３ * 7</answer>",  # digits of other scripts
    "<answer>٢٥ + 3 * 7</answer>",
    "<answer>25 + 3 * 7²</answer>",
    "<answer>25.0 + 3 * 7</answer>",
    "<answer>25e0 + 3 * 7</answer>",
    "<answer>0x19 + 3 * 7</answer>",
    "<answer>025 + 3 * 7</answer>",
    "<answer>2_5 + 3 * 7</answer>",
    "<answer>25 + 3 * 7j</answer>",
    "<answer>True * 25 + 3 * 7</answer>",
    "<answer>25 + 3 * 7 if 1 else 0</answer>",
    "<answer>46 if 25 + 3 * 7 else 0</answer>",
    "<answer>(25 + 3 * 7,)</answer>",
    "<answer>[25 + 3 * 7][0]</answer>",
    "<answer>(lambda: 25 + 3 * 7)()</answer>",
    "<answer>int('46')</answer>",
    "<answer>len('3' * 25 * 7)</answer>",
    "<answer>25 + 3 * 7 # 46</answer>",
    "<answer>25 + 3 * 7;</answer>",
    "<answer>25 + 3 * 7 == 46</answer>",
    "<answer>x := 25 + 3 * 7</answer>",
    "<answer>__import__('os').system('true') + 25 + 3 * 7</answer>",
    "<answer>25 / (3 - 3) * 7</answer>",
    "<answer>25 / 0 + 3 * 7</answer>",
    "<answer>" + "(" * 150 + "25 + 3 * 7" + ")" * 150 + "</answer>",
    "<answer>" + "(" * 120 + "25 + 3 * 7" + ")" * 119 + "</answer>",
    "<answer>25 +" + " " * 300 + "3 * 7</answer>",
    "<answer>" + "9" * 250 + "</answer>",
    "<answer>" + "9*" * 120 + "9</answer>",
    "<answer>()</answer>",
    "<answer>25 + 3 * 7<answer></answer>",
    "<answer>25 + 3 * 7",
]


@pytest.mark.parametrize("text", HACKS, ids=range(len(HACKS)))
def test_nothing_else_is_right(text):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert score(text) == 0.0


def test_all_numbers_or_some():
    """What the task says decides: exactly once is the default, also where the column is missing."""
    part, both = "<answer>3 * 7 - 11</answer>", {"nums": (3, 7, 11, 5), "target": 10}
    assert score(part, **both) == score(part, **both, use_all=[True]) == 0.0
    assert score(part, **both, use_all=[False]) == 1.0
    assert score("<answer>5 + 5</answer>", **both, use_all=[False]) == 0.0
    assert score("<answer>5 + 5</answer>", nums=(5, 5, 9), target=10, use_all=[False]) == 1.0


@pytest.mark.parametrize("numbers", [3, 4])
def test_worked_solutions_of_a_search(numbers):
    """Read as text: steps are right, use what is there, and only the last trial makes the target: the answer."""
    known = countdown.Search((3, 4, 7), 19)
    assert f"{known.prompt}   {known.solution}\n" in countdown.__doc__
    held_out = set(islice((problem.prompt for problem in countdown.searches(1, numbers, held_out=True)), 300))
    counts = Counter()
    for problem in islice(countdown.searches(0, numbers), 900 // numbers**2):
        nums, target = problem.prompt.rstrip("=").split(">")
        *trials, answer = problem.solution.split(";")
        for trial in trials:
            left = Counter(map(int, nums.split(",")))
            for step in trial.split(" "):
                a, sign, b, result = re.fullmatch(r"(\d+)([-+*/])(\d+)=(\d+)", step).groups()
                assert Fraction(eval(f"Fraction({a}) {sign} Fraction({b})")) == int(result) > 0
                left.subtract([int(a), int(b)])
                assert min(left.values()) >= 0
                left[int(result)] += 1
            assert left.total() == 1
            assert left[int(target)] == (trial is trials[-1])
        assert answer == problem.direct_solution and problem.prompt not in held_out
        row = {name: [value] for name, value in problem.row.items() if name != "prompt"}
        for text in (problem.solution, problem.direct_solution):
            assert countdown_reward([text], **row) == [1.0]
        assert countdown_reward([problem.solution.rpartition("#")[0]], **row) == [0.0]
        counts[len(trials)] += 1
    assert max(counts) == countdown.TRIALS and len(counts) > 3


def test_a_search_goes_one_way_until_it_hits():
    short, long = countdown.Search((3, 4, 7), 19), countdown.Search((3, 4, 7), 25)
    assert (short.trials, long.trials) == (4, 14) and long.solution.startswith(short.solution.rpartition("#### ")[0])
    assert long.solution.endswith(";7*3=21 21+4=25;#### (7*3)+4")
    with pytest.raises(ValueError, match="'3,4,7>26=' has no solution"):
        _ = countdown.Search((3, 4, 7), 26).solution


def test_fractions_are_exact():
    assert score("<answer>8 / (3 - 8 / 3)</answer>", (8, 3, 8, 3), 24) == 1.0
    assert score("<answer>7 / 3 * 3 / 7 * 5</answer>", (7, 3, 3, 7, 5), 5) == 1.0
    # 33333333 * 3 + 1 is 1e8; a comparison with a tolerance would take it for 99999999 / 1
    near = "<answer>33333333 * 3 / 99999999 + 1 / 99999999</answer>"
    assert score(near, (33333333, 3, 99999999, 1, 99999999), 1) == 0.0


def test_rows_without_a_problem_are_skipped():
    assert countdown_reward(["<answer>1+1</answer>"] * 3, [None, [], [1, 1]], [2, 2, None]) == [None] * 3
    assert sudoku_reward(["1"] * 4, [None, "", "1 2 3 4", "a b c d\n" * 4]) == [None] * 4
    with pytest.raises(ValueError):
        countdown_reward(["a", "b"], [[1]], [1])


@pytest.mark.parametrize("task", ["countdown", "sudoku"])
def test_copying_the_prompt_is_worth_nothing(task):
    rows = generate(task, 50)
    columns = rows[:]
    prompts = columns.pop("prompt")
    for copied in (prompts, [2 * prompt for prompt in prompts], [prompt[len(prompt) // 2 :] for prompt in prompts]):
        assert REWARDS[task](completions=copied, prompts=prompts, **columns) == [0.0] * 50
        assert REWARDS[task](completions=copied, **columns) == [0.0] * 50


WRITTEN = [
    (3, 4, 7),
    ("3", "4", "7"),
    (3.0, "4.0", "7.0"),
    ("3,4", "7"),
    ("[3, 4]", "7.0"),
    ("['3', '4']", 7),
    ("3 4", "7"),
]


@pytest.mark.parametrize("written", WRITTEN, ids=str)
def test_ways_to_write_a_countdown_row(written):
    """As JSON, CSV and people write numbers: what is right and what is wrong stays so."""
    *nums, target = written
    nums = nums[0] if len(nums) == 1 else list(nums)
    answers = ["#### 3+4", "#### 4-3", "#### 7", "#### 3+4+0"]
    assert countdown_reward(answers, [nums] * 4, [target] * 4) == [1.0, 0.0, 0.0, 0.0]


def test_what_a_countdown_row_may_say():
    rows = {"nums": [3, 4, 5], "target": "7"}
    said = [False, "False", "false", 0, True, "True", None]
    columns = {name: [value] * len(said) for name, value in rows.items()}
    assert countdown_reward(["#### 3+4"] * len(said), use_all=said, **columns) == [1.0] * 4 + [0.0] * 3
    # Targets that are negative or no whole number can be reached; numbers that are cannot be written
    assert countdown_reward(["#### 3-5", "#### 3/6"], [["3", "5"], ["3", "6"]], ["-2", "0.5"]) == [1.0, 1.0]
    unreadable = [
        ([-3, 5], 2),
        (["a"], 7),
        (5, 7),
        ([3.5], 7),
        ([3], "seven"),
        ([3], float("nan")),
        ([3], "7%"),
        ("", 7),
    ]
    nums, targets = zip(*unreadable, strict=True)
    assert countdown_reward(["#### 3"] * len(nums), nums, targets) == [None] * len(nums)


def test_ways_to_write_a_sudoku():
    lines = ["1 _ _ 4", "_ 4 1 _", "_ 1 4 _", "4 _ _ 1"]
    ways = [
        "\n".join(lines),
        lines,
        "".join(lines),
        "\n".join(lines).replace("_", "0"),
        "".join(lines).replace("_", "."),
    ]
    ways += [[[int(c) if c != "_" else blank for c in line.split()] for line in lines] for blank in (None, 0)]
    solved = "1 2 3 4\n3 4 1 2\n2 1 4 3\n4 3 2 1"
    for puzzle in ways:
        other = "1 3 2 4\n2 4 1 3\n3 1 4 2\n4 2 3 1"  # the rules hold, and so does every given cell
        moved = "2 1 3 4\n3 4 1 2\n1 2 4 3\n4 3 2 1"  # the rules hold, and a given cell does not
        answers = [f"<answer>{grid}</answer>" for grid in (solved, other, moved, solved.replace("\n", ""))]
        expected = [1.0, 1.0, 0.0, 0.0] if sudoku.is_solved(moved.replace(" ", "").replace("\n", "")) else None
        assert sudoku_reward(answers, [puzzle] * 4) == expected, puzzle
    assert sudoku_reward(["1"] * 3, [[1, 2], [lines], "5" * 16]) == [None, 0.0, None]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from([*"02357+-*/()", "14", " "]), min_size=1, max_size=9).map("".join))
def test_any_expression_is_worth_what_python_says(text):
    """By Python's own evaluation in fractions; `None` with signs, other operations, or what Python refuses."""
    found, numbers = countdown.value_of(text), re.findall(r"\d+", text)
    others = "**" in text or "//" in text or re.search(r"(^|[-+*/(])[-+]", text.replace(" ", ""))
    try:
        expected = None if others else eval(re.sub(r"\d+", r"F('\g<0>')", text.strip()), {"F": Fraction})
    except (SyntaxError, TypeError, ZeroDivisionError):
        expected = None
    zeros = any(number != "0" and number[0] == "0" and int(number) for number in numbers)  # 07 is no number in Python
    if isinstance(expected, Fraction) and not zeros:
        assert found[0] == expected and sorted(found[1].elements()) == sorted(map(int, numbers))
    else:
        assert found is None


# Sudoku


def by_the_rules(cells: str) -> bool:
    """The slow way: no digit twice in a row, a column or a box."""
    at = {divmod(i, 4): cell for i, cell in enumerate(cells)}
    return len(at) == 16 and not any(
        at[a] == at[b] and (a[0] == b[0] or a[1] == b[1] or (a[0] // 2, a[1] // 2) == (b[0] // 2, b[1] // 2))
        for a in at
        for b in at
        if a < b
    )


def test_the_grids():
    """All 288, found here by trying all rows one below the other."""
    rows = ["".join(row) for row in permutations("1234")]
    expected = {
        "".join(four)
        for four in product(rows, repeat=4)
        if all(len({row[i] for row in four}) == 4 for i in range(4)) and by_the_rules("".join(four))
    }
    assert {*sudoku.grids()} == expected and len(expected) == len(sudoku.grids()) == 288


def test_sudokus_have_one_solution():
    for problem in take(sudoku, 40, min_blanks=1, max_blanks=12):
        fitting = [g for g in sudoku.grids() if all(c in ("_", d) for c, d in zip(problem.cells, g, strict=True))]
        assert fitting == [problem.solution] and by_the_rules(problem.solution)
        assert problem.puzzle in problem.prompt and problem.puzzle.replace(" ", "").replace("\n", "") == problem.cells
    counts = Counter(problem.cells.count("_") for problem in take(sudoku, 300, min_blanks=10, max_blanks=12))
    assert counts.keys() == {10, 11, 12} and min(counts.values()) > 60


PUZZLE = "1 _ _ 4\n_ 4 1 _\n_ 1 4 _\n4 _ _ 1"
SOLVED = "1 2 3 4\n3 4 1 2\n2 1 4 3\n4 3 2 1"


@pytest.mark.parametrize(
    "text",
    [
        f"<answer>{SOLVED}</answer>",
        f"<answer>\n{SOLVED}\n</answer>",
        f"<answer>{SOLVED.replace(' ', '')}</answer>",
        rf"\boxed{{{SOLVED}}}",
        f"{SOLVED} <answer>1</answer> wait <answer>{SOLVED}</answer>",
        "<answer>1 3 2 4\n2 4 1 3\n3 1 4 2\n4 2 3 1</answer>",  # the other solution of this puzzle
    ],
)
def test_right_grids(text):
    assert sudoku_reward([text], [PUZZLE]) == [1.0]


SUDOKU_HACKS = [
    "",
    None,
    SOLVED,
    f"<answer>{SOLVED}</answer><answer>1 1 1 1</answer>",
    f"<answer>{SOLVED}\n{SOLVED}</answer>",
    f"<answer>{SOLVED} 1</answer>",
    f"<answer>{SOLVED[:-1]}</answer>",
    f"<answer>{PUZZLE}</answer>",
    f"<answer>{SOLVED.replace('2', '_')}</answer>",
    f"<answer>{SOLVED.replace('1', '１')}</answer>",
    f"<answer>{SOLVED.replace('1', '¹')}</answer>",
    f"<answer>{SOLVED.replace('4', '0')}</answer>",
    f"<answer>{SOLVED.replace(chr(10), ' ')}</answer>",
    f"<answer>{SOLVED}</answer>" + " " * 5000,
    f"<answer>{SOLVED}",
    f"#### {SOLVED}",  # of which `####` marks one line
    f"####\n{SOLVED}",
    f"#### {SOLVED.replace(chr(10), ' ')}",
    "<answer>2 1 4 3\n4 3 2 1\n1 2 3 4\n3 4 1 2</answer>",  # by the rules, with other given cells
    "<answer>1 2 3 4\n2 4 1 3\n3 1 4 2\n4 3 2 1</answer>",  # columns and boxes are wrong
    "<answer>1 2 3 4\n3 4 1 2\n2 1 4 3\n4 3 3 1</answer>",
    "<answer>1 1 1 4\n1 4 1 1\n1 1 4 1\n4 1 1 1</answer>",  # given cells alone
    "<answer>1 2 3 4\n3 4 1 2\n\n2 1 4 3\n4 3 2 1</answer>",
    "<answer>1,2,3,4\n3,4,1,2\n2,1,4,3\n4,3,2,1</answer>",
    "<answer>1 2 or 3 4\n3 4 1 2\n2 1 4 3\n4 3 2 1</answer>",
]


@pytest.mark.parametrize("text", SUDOKU_HACKS, ids=range(len(SUDOKU_HACKS)))
def test_no_other_grid_is_right(text):
    assert sudoku_reward([text], [PUZZLE]) == [0.0]


def test_rows_columns_boxes_and_given_cells_each_matter():
    """Of all grids, and of one with two cells exchanged, right are those by the rules that keep the given cells."""
    for grid in sudoku.grids():
        text = "<answer>" + "\n".join(grid[i : i + 4] for i in range(0, 16, 4)) + "</answer>"
        kept = all(c in ("_", d) for c, d in zip(PUZZLE.replace(" ", "").replace("\n", ""), grid, strict=True))
        assert sudoku_reward([text], [PUZZLE]) == [float(kept)]
    blank = "\n".join(["____"] * 4)
    cells = SOLVED.replace(" ", "").replace("\n", "")
    for i, j in product(range(16), repeat=2):
        swapped = list(cells)
        swapped[i], swapped[j] = swapped[j], swapped[i]
        text = "<answer>" + "\n".join("".join(swapped[k : k + 4]) for k in range(0, 16, 4)) + "</answer>"
        assert sudoku_reward([text], [blank]) == [float(by_the_rules("".join(swapped)))]
