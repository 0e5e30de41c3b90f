"""Word problems to learn by heart: which are read, in which order, and that all are taught, asked and judged by."""

import json
import sys
from collections import Counter
from itertools import islice

import pytest
from places import ROOT

from trl_quant.tasks import gsm8k_reward
from trl_quant.tasks.words import LONGEST, word_problems


sys.path.insert(0, str(ROOT / "examples"))

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
    found = {problem.question: problem for problem in islice(word_problems(source, 0, 40), 40)}
    problem = found["Ann has 7 nuts and finds 2. How many?"]
    assert len(found) == 40 and problem.solution == "7+2 = 9.\n#### 9" and problem.direct_solution == "#### 9"
    assert problem.row == {"prompt": "Ann has 7 nuts and finds 2. How many?\n", "answer": "9"}
    solutions = [problem.solution, problem.direct_solution, "7+2 = 8.\n#### 8"]
    assert gsm8k_reward(solutions, [problem.row["answer"]] * 3, prompts=[problem.prompt] * 3) == [1.0, 1.0, 0.0]


def test_each_epoch_has_every_problem_in_an_order_of_its_own(source):
    order = [problem.question for problem in islice(word_problems(source, 0, 40), 80)]
    assert sorted(order[:40]) == sorted(order[40:]) and order[:40] != order[40:] and len({*order}) == 40
    assert order == [problem.question for problem in islice(word_problems(source, 0, 40), 80)]
    assert order[:40] != [problem.question for problem in islice(word_problems(source, 1, 40), 40)]


def test_the_first_ones_are_taught_and_asked_and_judged_by_equally_often(source, tmp_path):
    args = building.BuildArguments(
        str(tmp_path / "model"),
        word_problems=source,
        known=8,
        max_steps=2,
        batch_size=8,
        train_problems=24,
        eval_problems=16,
    )
    building.build(args)
    asked, judged = (
        [json.loads(line)["prompt"] for line in (tmp_path / "model" / f"{split}.jsonl").read_text().splitlines()]
        for split in ("train", "eval")
    )
    lessons = [problem.prompt for problem in islice(building.taught(args), 16)]
    known = {f"Ann has {n} nuts and finds 2. How many?\n" for n in range(8)}
    for prompts, times in ((lessons, 2), (asked, 3), (judged, 2)):
        assert Counter(prompts) == dict.fromkeys(known, times)


def test_its_tokenizer_writes_every_text_and_digits_one_by_one(source):
    tokenizer = building.learn_tokenizer(building.BuildArguments(word_problems=source, known=40))
    text = "Ann has 128 nuts: 128+2 = 130, naïve?\n#### 130"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    written = [tokenizer.decode([token]) for token in ids]
    assert "Ann" in written and not any(len(token.strip()) > 1 for token in written if any(map(str.isdigit, token)))
    assert tokenizer.pad_token_id != tokenizer.eos_token_id and tokenizer("<eos>")["input_ids"] == [
        tokenizer.eos_token_id
    ]


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([{"question": "How many?"}], "word problems need an 'answer'"),
        (
            [{"question": "How many?", "answer": "9"}],
            "has 0 solutions that end in '#### ' and an answer within 240 characters, and not 1",
        ),
        ([{"text": "How many?", "answer": "#### 9"}], "has no prompts"),
    ],
)
def test_other_rows_are_refused(tmp_path, rows, says):
    path = tmp_path / "other.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match=says):
        next(word_problems(str(path), 0, 1))
