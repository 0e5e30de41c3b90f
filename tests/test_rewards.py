"""Rewards under attack, and on GSM8K's gold solutions."""

import json
import math
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_quant.tasks import REWARDS, arithmetic_reward, format_reward, gsm8k_reward
from trl_quant.tasks.answers import extract_answer, numbers, same_number, single_number


EXCERPT = Path(__file__).parent / "data" / "word_problems.jsonl"
GSM8K = next(
    (p / "shared/data/gsm8k" for p in Path(__file__).resolve().parents if (p / "shared/data/gsm8k").is_dir()), None
)


def gsm8k(completion, answer, **kwargs):
    return gsm8k_reward(completions=[completion], answer=[answer], **kwargs)[0]


def arithmetic(completion, answer, **kwargs):
    return arithmetic_reward(completions=[completion], answer=[answer], **kwargs)[0]


# Numbers


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("72", "72"),
        ("1,234", "1234"),
        ("1,234,567.89", "1234567.89"),
        ("$12.50", "12.50"),
        ("-$5", "-5"),
        ("$-5", "-5"),
        ("US$12", "12"),
        (r"\$1{,}234", "1234"),
        ("3/4", "3/4"),
        (r"\frac{3}{4}", "3/4"),
        (r"\dfrac{-3}{4}", "-3/4"),
        ("50%", "50%"),
        (r"50\%", "50%"),
        ("-7", "-7"),
        ("\u22127", "-7"),
        ("+7", "7"),
        ("1e3", "1000"),
        ("2.5E-2", "0.025"),
        (".5", "0.5"),
        ("72.", "72"),
        ("72 clips", "72"),
        ("**72**", "72"),
        ("$72$", "72"),
        ("...72", "72"),
        ("x = 5", "5"),
        ("347+588=935", "935"),
        ("12/60 = 0.2", "0.2"),
        # no number, or more than one
        ("", None),
        ("none", None),
        ("H2O", None),
        ("5 or 6", None),
        ("5,6", None),
        ("1,2345", None),
        ("3+4", None),
        ("10-7", None),
        ("1 1/2", None),
        ("1/2/3", None),
        ("1.2.3", "1.2"),
        # readable, but not a usable number
        ("3/0", None),
        ("1e999999999", None),
        ("9" * 65, None),
    ],
)
def test_single_number(text, number):
    assert single_number(text) == number


def test_a_minus_between_two_terms_is_not_a_sign():
    assert numbers("10-7") == ["10", "7"]
    assert numbers("10 -7") == ["10", "-7"]


@settings(deadline=None)
@given(st.integers(-(10**12), 10**12))
def test_every_way_to_write_an_integer_is_read(n):
    for text in (f"{n}", f"{n:,}", f"${n}", f"{n}.0", f"{n}.", f"\\text{{{n}}} ", f"{n:,} dollars"):
        assert same_number(str(n), single_number(text)), text
        assert not same_number(str(n + 1), single_number(text)), text


@pytest.mark.parametrize(
    ("gold", "answer", "equal"),
    [
        ("1/2", "0.50", True),
        ("3/4", "6/8", True),
        ("50", "50%", True),
        ("0.5", "50%", True),
        ("12.50", "12.5", True),
        ("1000", "1000.0", True),
        ("7", "-7", False),
        ("50", "0.5", False),
        ("100", "1", False),
        ("1/3", "0.33", False),
        ("100000000000000000001", "100000000000000000000", False),
        ("1000000", "1000001", False),
    ],
)
def test_same_number(gold, answer, equal):
    assert same_number(gold, answer) is equal


@pytest.mark.parametrize(("gold", "answer"), [("7", "7"), ("7", "-7"), ("-0", "0"), ("12", "1200"), ("007", "7")])
def test_integers_are_compared_as_math_verify_would(gold, answer):
    from math_verify import ExprExtractionConfig, parse, verify

    config = [ExprExtractionConfig()]
    assert same_number(gold, answer) is verify(parse(gold, config), parse(answer, config))


# Where the answer is looked for


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer>4</answer> \\boxed{5} #### 6\n7", "4"),
        ("7 #### 6\n \\boxed{5}, so 7", "5"),
        ("#### 6\nso 7", "6"),
        ("so 7", "7"),
        ("<answer>\n  4\n</answer>", "4"),
        ("<answer>\\boxed{4}</answer>", "4"),
        (r"\boxed{\frac{3}{4}}", "3/4"),
        (r"\boxed{\text{72 clips}}", "72"),
        (r"\boxed{\boxed{3}}", "3"),
        # the last of several of one kind
        ("<answer>4</answer> no, <answer>5</answer>", "5"),
        (r"\boxed{4} or \boxed{5}", "5"),
        ("#### 4\n#### 5", "5"),
        ("#### 4 #### 5", "5"),
        # the strongest kind decides even without a number
        ("<answer>unknown</answer> 5", None),
        ("<answer></answer> #### 5", None),
        (r"\boxed{x} #### 5", None),
        ("####\n5", None),
        # an unclosed marker does not count
        ("<answer>4 #### 5", "5"),
        (r"\boxed{4 #### 5", "5"),
    ],
)
def test_order_of_extraction(text, answer):
    assert extract_answer(text) == answer


def test_the_search_is_bounded_and_fast():
    """Only the tail counts, and no text repeated a million times makes the search explode."""
    assert extract_answer("#### 5\n" + "so " * 10**6) is None
    assert extract_answer("so " * 10**6 + "#### 5") == "5"
    for unit in ("1", "1,", "\\boxed{", "<answer>", "#### ", "\\frac{1}{", "$", "-", "1/", "1e", ".1", "% ", "{", "="):
        extract_answer(unit * (10**6 // len(unit)))  # quadratic behaviour would hang here


# Contracts


@pytest.mark.parametrize("reward", ["arithmetic", "gsm8k"])
@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("#### 42", 1.0),
        ("<answer>42</answer>", 1.0),
        ([{"role": "assistant", "content": "#### 42"}], 1.0),
        ([{"role": "assistant", "content": [{"type": "text", "text": "####"}, {"type": "text", "text": " 42"}]}], 1.0),
        ([{"role": "assistant", "content": "#### 41"}, {"role": "assistant", "content": "#### 42"}], 1.0),
        ("#### 41", 0.0),
        ("#### -42", 0.0),
        ("", 0.0),
        (" \n", 0.0),
        (None, 0.0),
        ([], 0.0),
        ([{"role": "assistant", "content": None}], 0.0),
        ([{"role": "assistant", "tool_calls": []}], 0.0),
        ([{"role": "assistant", "content": [{"type": "image"}]}], 0.0),
        ("I do not know.", 0.0),
        # guesses: one marker with many numbers, many markers with the right one before the last
        ("#### " + " ".join(map(str, range(100))), 0.0),
        ("<answer>41 42 43</answer>", 0.0),
        (r"\boxed{41 \text{ or } 42}", 0.0),
        ("".join(f"<answer>{n}</answer>" for n in range(100)), 0.0),
        # the expression instead of its value; math-verify alone would evaluate it
        (r"\boxed{40+2}", 0.0),
        (r"\boxed{6*7}", 0.0),
        (r"\boxed{\sqrt{1764}}", 0.0),
        # far from the end
        ("#### 42\n" + "blah " * 10**5, 0.0),
    ],
)
def test_contract(reward, completion, score):
    assert REWARDS[reward](completions=[completion], answer=["42"]) == [score]


def test_math_verify_alone_would_be_fooled():
    """Why the number is extracted before math-verify sees it."""
    from math_verify import parse, verify

    assert verify(parse("42"), parse(r"\boxed{40+2}"))


def test_several_guesses_never_beat_one():
    """Over all answers, listing ten candidates is right exactly as often as naming one."""
    answers = [str(n) for n in range(10)]
    one = "#### 3"
    for many in (" ".join(answers), "\n".join(f"#### {n}" for n in answers), "#### " + " or ".join(answers)):
        scores = [sum(REWARDS[name]([text] * 10, answers)) for name in ("arithmetic", "gsm8k") for text in (one, many)]
        assert scores[0] == scores[2] == 1
        assert scores[1] <= 1 and scores[3] <= 1


def test_steps_without_an_answer_count_for_gsm8k_only():
    steps = "7+8+0=5c1 2+1+1=4"
    assert gsm8k(steps, "4") == 1.0
    assert arithmetic(steps, "4") == 0.0
    assert arithmetic("4", "4") == arithmetic("2+2=4", "4") == 1.0
    assert arithmetic("so " * 10**4 + "\n" + "4", "4") == arithmetic("3 and " * 10**4 + "4", "4") == 0.0


QUESTION = "Tom has 12 apples and eats one a day. After how many days are there none left of the 12?"


@pytest.mark.parametrize(
    "prompt", [QUESTION, [{"role": "system", "content": "Use \\boxed{12}."}, {"role": "user", "content": QUESTION}]]
)
def test_echoing_the_prompt_is_worth_nothing(prompt):
    echo = prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)
    for completion in (echo, echo * 3, f"{echo}\n\n{echo} "):
        assert gsm8k(completion, "12") == 1.0  # it would be right ...
        assert gsm8k(completion, "12", prompts=[prompt]) == 0.0  # ... were it not for the prompt
    assert gsm8k(f"{echo} After 12 days.", "12", prompts=[prompt]) == 1.0
    assert gsm8k(f"After 12 days: {echo}", "12", prompts=[prompt]) == 1.0


def test_echoing_an_arithmetic_prompt():
    assert arithmetic("20+22=", "42", prompts=["20+22="]) == 0.0
    assert arithmetic("20+22=42", "42", prompts=["20+22="]) == 1.0


@pytest.mark.parametrize("gold", ["42", 42, 42.0, "#### 42", "6*7=<<6*7=42>>42.\n#### 42", "$42", "42.00"])
def test_ways_to_give_the_ground_truth(gold):
    assert gsm8k("so 42", gold) == 1.0
    assert gsm8k("so 41", gold) == 0.0


@pytest.mark.parametrize("gold", [None, "", "unknown", math.nan, "4 or 5", "#### "])
def test_a_row_without_ground_truth_is_skipped(gold):
    assert gsm8k_reward(["#### 4", "#### 4"], [gold, "4"]) == [None, 1.0]
    assert arithmetic_reward(["", "#### 4"], [gold, "4"]) == [None, 1.0]


def test_unequal_lengths_are_an_error():
    with pytest.raises(ValueError):
        gsm8k_reward(["#### 4"], ["4", "5"])


def test_off_the_main_thread():
    """math-verify's own timeouts raise off the main thread; scores must not change."""
    scores = []
    worker = threading.Thread(target=lambda: scores.extend(gsm8k_reward(["so 1/3", "so 0.4"], ["2/6", "2/6"])))
    worker.start()
    worker.join()
    assert scores == [1.0, 0.0]


def test_no_timeout_notice(caplog):
    import math_verify.grader
    import math_verify.parser

    math_verify.grader.TIMEOUT_WARNING_SHOWN = math_verify.parser.TIMEOUT_WARNING_SHOWN = False
    same_number.cache_clear()
    assert same_number("3/7", "6/14")
    assert not caplog.records


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="0123456789.,-+$%/#=<>\\{}boxedanswr \n", max_size=80), st.sampled_from(["7", "-7", "0.5"]))
def test_any_text_scores_zero_or_one(text, gold):
    for reward in REWARDS.values():
        (score,) = reward(completions=[text], answer=[gold], nums=[[7, 5]], target=[35], puzzle=["____\n" * 4])
        assert score in (0.0, 1.0)


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("7+8=15 #### 15", 1.0),
        ("steps \\boxed{15}.", 1.0),
        ("steps $\\boxed{15}$\n", 1.0),
        ("steps <answer>15</answer>", 1.0),
        ("15", 0.0),
        ("", 0.0),
        ("#### 15 #### 16", 0.0),
        ("<answer>15</answer> and more", 0.0),
        ("<answer>15</answer><answer>15</answer>", 0.0),
        ("<answer>15 or 16</answer>", 0.0),
        ("\\boxed{x}", 0.0),
    ],
)
def test_format_reward(completion, score):
    assert format_reward([completion]) == [score]
    assert format_reward([[{"role": "assistant", "content": completion}]]) == [score]


# GSM8K's own solutions


@pytest.mark.parametrize("split", ["excerpt", "train", "test"])
def test_gold_solutions(split):
    """Each is right for its own question and wrong for one with another answer; so is its final number alone."""
    if split != "excerpt" and GSM8K is None:
        pytest.skip("needs GSM8K in shared/data/gsm8k")
    path = EXCERPT if split == "excerpt" else GSM8K / f"{split}.jsonl"
    golds = [json.loads(line)["answer"] for line in path.read_text().splitlines()]
    assert gsm8k_reward(golds, golds) == [1.0] * len(golds)
    bare = [gold.rpartition("#### ")[2] for gold in golds]
    assert (
        gsm8k_reward(golds, bare) == gsm8k_reward([f"It is {answer}." for answer in bare], golds) == [1.0] * len(golds)
    )

    others = golds[1:] + golds[:1]
    value = lambda gold: float(gold.rpartition("#### ")[2].replace(",", ""))  # noqa: E731
    different = [(gold, other) for gold, other in zip(golds, others) if value(gold) != value(other)]
    assert len(different) > 0.9 * len(golds)
    assert gsm8k_reward(*zip(*different)) == [0.0] * len(different)


@pytest.mark.skipif(GSM8K is None, reason="needs GSM8K in shared/data/gsm8k")
def test_what_copying_the_end_of_the_question_is_worth():
    """The figure in gsm8k_reward's docstring; copying the whole question is worth nothing."""
    rows = [json.loads(line) for line in (GSM8K / "train.jsonl").read_text().splitlines()]
    questions, answers = [row["question"] for row in rows], [row["answer"] for row in rows]
    ends = [question[len(question) // 2 :] for question in questions]
    assert sum(gsm8k_reward(ends, answers, prompts=questions)) / len(rows) == pytest.approx(0.013, abs=0.0005)
    assert sum(gsm8k_reward(questions, answers, prompts=questions)) == 0
