"""Word problems to learn by heart: what is read of them, in which order, and which RL never sees."""

import json
import sys
from itertools import islice
from pathlib import Path

import pytest

from trl_quant.tasks import gsm8k_reward
from trl_quant.tasks.splits import is_held_out
from trl_quant.tasks.words import LONGEST, WordProblem, word_problems


sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import build_arithmetic_model as building


@pytest.fixture
def source(tmp_path) -> str:
    """40 problems, one that is too long, and one without a marked answer."""
    rows = [
        {
            "question": f"Ann has {n} nuts and finds 2. How many?",
            "answer": f"{n}+2 = <<{n}+2={n + 2}>>{n + 2}.\n#### {n + 2}",
        }
        for n in range(40)
    ]
    rows += [{"question": "Too long?", "answer": "x" * LONGEST + "#### 1"}, {"question": "Open?", "answer": "Yes."}]
    path = tmp_path / "words.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_problem_is_a_question_with_its_solution_and_no_calculator(source):
    found = {problem.question: problem for problem in islice(word_problems(source, 0), 40)}
    problem = found["Ann has 7 nuts and finds 2. How many?"]
    assert len(found) == 40 and problem.solution == "7+2 = 9.\n#### 9" and problem.direct_solution == "#### 9"
    assert problem.row == {"prompt": "Ann has 7 nuts and finds 2. How many?\n", "answer": "9"}
    solutions = [problem.solution, problem.direct_solution, "7+2 = 8.\n#### 8"]
    assert gsm8k_reward(solutions, [problem.row["answer"]] * 3, prompts=[problem.prompt] * 3) == [1.0, 1.0, 0.0]


def test_each_epoch_has_every_problem_in_an_order_of_its_own(source):
    order = [problem.question for problem in islice(word_problems(source, 0), 80)]
    assert sorted(order[:40]) == sorted(order[40:]) and order[:40] != order[40:] and len({*order}) == 40
    assert order == [problem.question for problem in islice(word_problems(source, 0), 80)]
    assert order[:40] != [problem.question for problem in islice(word_problems(source, 1), 40)]


def test_all_are_taught_and_rl_sees_none_of_those_it_is_judged_by(source, tmp_path):
    args = building.BuildArguments(
        str(tmp_path / "model"), word_problems=source, max_steps=2, batch_size=32, eval_problems=4
    )
    building.build(args)
    train, held_out = (
        {json.loads(line)["prompt"] for line in (tmp_path / "model" / f"{split}.jsonl").read_text().splitlines()}
        for split in ("train", "eval")
    )
    lessons = {problem.prompt for problem in islice(building.taught(args), 40)}
    assert len(held_out) == 4 and held_out < lessons and train < lessons and not train & held_out
    assert all(is_held_out(prompt.strip()) for prompt in held_out)


def test_its_tokenizer_writes_every_text_and_digits_one_by_one(source):
    tokenizer = building.learn_tokenizer(building.BuildArguments(word_problems=source))
    text = "Ann has 128 nuts: 128+2 = 130, naïve?\n#### 130"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    written = [tokenizer.decode([token]) for token in ids]
    assert "Ann" in written and not any(len(token.strip()) > 1 for token in written if any(map(str.isdigit, token)))
    assert tokenizer.pad_token_id != tokenizer.eos_token_id and tokenizer("<eos>")["input_ids"] == [
        tokenizer.eos_token_id
    ]


def test_the_first_ones_alone_may_be_asked(source, tmp_path):
    few, every = ({p.question for p in islice(word_problems(source, 0, count=count), 80)} for count in (10, None))
    assert len(few) == 10 < len(every) == 40 and all(f"Ann has {n} nuts" in " ".join(few) for n in range(10))
    args = building.BuildArguments(word_problems=source, known=10)
    assert {problem.question for problem in islice(building.taught(args), 40)} == few


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([{"question": "How many?"}], "word problems need an 'answer'"),
        ([{"question": "How many?", "answer": "9"}], "has no solutions that end in '#### ' and an answer within 400"),
        ([{"text": "How many?", "answer": "#### 9"}], "has no prompts"),
    ],
)
def test_other_rows_are_refused(tmp_path, rows, says):
    path = tmp_path / "other.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match=says):
        next(word_problems(str(path), 0))


def test_what_identifies_a_problem_is_its_question():
    assert WordProblem("How many?", "#### 1").held_out == WordProblem("How many?", "#### 2").held_out
