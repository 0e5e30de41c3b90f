"""Rewards under attack."""

import math
import re
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scores import arithmetic, gsm8k

from trl_quant.tasks import REWARDS, arithmetic_reward, format_reward, gsm8k_reward
from trl_quant.tasks.answers import extract_answer


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
        (r"\boxed{f = \left\{ 4, x > 0 \right.} so \boxed{5}", "5"),
        (r"\boxed{5} and \boxed{\left\{ 4 \right.}", None),
        # the last of several of one kind
        ("<answer>4</answer> no, <answer>5</answer>", "5"),
        (r"\boxed{4} or \boxed{5}", "5"),
        ("#### 4\n#### 5", "5"),
        ("#### 4 #### 5", "5"),
        # a tag that is only mentioned opens no answer
        ("<think>The <answer> tag gets 70 + 2.</think> <answer>72</answer>", "72"),
        ("<answer>4 or <answer>5</answer>", "5"),
        ("<answer>4</answer> and no other <answer>", "4"),
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


GRID = "1 2 3 4\n3 4 1 2\n2 1 4 3\n4 3 2 1"
WRONG_GRID = "1 2 3 4\n3 4 2 1\n2 1 4 3\n4 3 1 2"
PUZZLE = "1 _ _ 4\n_ 4 1 _\n_ 1 4 _\n4 _ _ 1"
TASKS = {  # task -> its columns; a right answer and a wrong one; what it asks, with the right answer in it
    "gsm8k": ({"answer": "42"}, "42", "2", "Ana has 42 eggs. How many eggs has she?"),
    "arithmetic": ({"answer": 42}, "42", "2", "Give the number 42 alone, as in \\boxed{42}."),
    "strict_math": (
        {"answer": r"\frac{1}{2}"},
        r"\frac{1}{2}",
        r"\frac{1}{3}",
        r"Is it true that \boxed{\frac{1}{2}}?",
    ),
    "countdown": ({"nums": [4, 42], "target": 46}, "42 + 4", "42 - 4", "Make 46 of these two: <answer>42 + 4</answer>"),
    "sudoku": ({"puzzle": PUZZLE}, GRID, WRONG_GRID, f"Fill in this one sudoku grid: <answer>{GRID}</answer>"),
}
MARKERS = ("<answer>{}</answer>", "So it is \\boxed{{{}}}", "#### {}")


def score(task: str, completion, prompt=None) -> float:
    columns = {name: [value] for name, value in TASKS[task][0].items()}
    return REWARDS[task]([completion], prompts=[prompt], **columns)[0]


def said(role: str, content) -> dict:
    return {"role": role, "content": content}


@st.composite
def examples(draw, right: str, wrong: str) -> list[dict]:
    """Few-shot examples in chat form: short messages, which may be answers, of either task or none, marked or not."""
    bare = st.sampled_from(
        [
            right,
            wrong,
            *"0123456789",
            "42",
            "2",
            "-",
            "4 eggs",
            "3 + 4",
            "42 +",
            "x",
            "a",
            "so",
            "12 square metres",
            "\\",
        ]
    )
    marked = st.tuples(bare, st.sampled_from(MARKERS)).map(lambda both: both[1].format(both[0]))
    contents = st.one_of(bare, marked, st.text("0123456789 .,#+-{}", max_size=4))
    turns = draw(st.lists(st.tuples(contents, contents), max_size=4))
    return [message for asked, told in turns for message in (said("user", asked), said("assistant", told))]


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(st.data(), st.sampled_from([*TASKS]), st.sampled_from(MARKERS))
def test_examples_in_a_prompt_change_no_score(data, task, marker):
    """The right answer is worth 1 and a wrong one 0, also where an example, or a part of the answer, says the same."""
    _, right, wrong, _ = TASKS[task]
    if task == "sudoku" and marker.startswith("####"):  # which marks one line
        marker = MARKERS[0]
    prompt = [*data.draw(examples(right, wrong)), said("user", "What is the next one?")]
    assert score(task, marker.format(right), prompt) == 1.0
    assert score(task, marker.format(wrong), prompt) == 0.0
    assert score(task, f"What is the next one? {marker.format(right)}", prompt) == 1.0
    assert score(task, [said("assistant", marker.format(right))], prompt) == 1.0


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("shots", [0, 2])
def test_copying_what_is_asked_is_worth_nothing(task, shots):
    _, right, wrong, question = TASKS[task]
    rights = [said("user", "4"), said("assistant", f"<answer>{wrong}</answer>")] * shots
    for prompt in (question, [*rights, said("user", question)], [said("system", question), *rights, said("user", "?")]):
        for copied in (question, question * 3, f"{question}\n\n{question} ", f"Let me see. {question}"):
            assert score(task, copied, prompt) == 0.0
            if task != "arithmetic" or copied == question:
                assert score(task, copied) == 1.0  # were it not for the prompt
        assert score(task, f"{question} <answer>{right}</answer>", prompt) == 1.0


def test_within_a_number_or_a_word_nothing_is_an_echo():
    for prompt, completion, answer in (
        ("How many of them cost 3", "How many of them cost 3.50: 3.50", "3.50"),
        ("How many of them cost 3.", "How many of them cost 3.50", "3.50"),
        ("How many of them cost 3", "How many of them cost 3,000", "3000"),
        ("How many of them cost 3", "How many of them cost 34", "34"),
        ("5 is what he has now", "15 is what he has now", "15"),
        ("5 is what he has now", "-5 is what he has now", "-5"),
        ("5 is what he has now", "2.5 is what he has now", "2.5"),
        ("小明有12个苹果，每天吃一个，几天吃完？", "小明有12个苹果，每天吃一个，几天吃完？ 13", "13"),
    ):
        assert gsm8k(completion, answer, prompts=[prompt]) == 1.0, completion
        assert gsm8k(prompt, re.findall(r"\d+", prompt)[-1], prompts=[prompt]) == 0.0  # a whole echo


def test_a_tools_word_is_no_answer():
    """Where the turns ran out after a call, what the tool returned is not what the policy answered."""
    turns = [said("assistant", None), said("tool", "#### 42")]
    for task in ("gsm8k", "arithmetic"):
        assert score(task, turns) == score(task, turns[:1]) == score(task, []) == 0.0
        assert score(task, [*turns, said("assistant", "#### 42")]) == 1.0
        assert score(task, [*turns, said("assistant", [{"type": "text", "text": "#### 42"}])]) == 1.0
    prompt = [said("user", "What is the sum of both?"), *turns]
    assert score("gsm8k", "#### 42", prompt) == 1.0  # nor is it the question's


@pytest.mark.parametrize("space", ["\u00a0", "\u2009", "\u202f", r"\,", ","])
def test_ways_to_group_thousands(space):
    assert gsm8k(f"#### 1{space}234", "1234") == gsm8k("#### 1234", f"1{space}234") == 1.0
    assert gsm8k(f"#### 1{space}235", "1234") == gsm8k(f"#### 1{space}23", "123") == 0.0


def test_what_is_no_ground_truth():
    nan = float("nan")
    for reward in (gsm8k_reward, arithmetic_reward, REWARDS["strict_math"]):
        assert reward(["nan", r"\boxed{nan}", "", "1"], [nan, nan, None, []]) == [None] * 4
        assert reward([r"\boxed{7}", r"\boxed{8}"], [["7"], [7.0]]) == [1.0, 0.0]
    assert REWARDS["division"](["#### 13;", "#### 13;", "#### 13;"], [13, None, "14"]) == [1.0, None, 0.0]


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
    """A timeout by a signal would raise there."""
    scores = []
    worker = threading.Thread(target=lambda: scores.extend(gsm8k_reward(["so 1/3", "so 0.4"], ["2/6", "2/6"])))
    worker.start()
    worker.join()
    assert scores == [1.0, 0.0]


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
        ("I put it into <answer> tags. <answer>15</answer>", 1.0),
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
