"""The rewards on GSM8K: its own solutions, other ways to write their answers, and what is worth nothing."""

import json
import re
from fractions import Fraction

import pytest
from places import TESTS, WORD_PROBLEMS

from trl_quant.tasks import gsm8k_reward


GSM8K = next((p / "shared/data/gsm8k" for p in TESTS.resolve().parents if (p / "shared/data/gsm8k").is_dir()), None)

WAYS_TO_ANSWER = (
    "It is {}.",
    "She has {:,} clips.",
    "The answer is **{}**.",
    "#### {}",
    "#### {:,}",
    "#### ${}",
    "#### {}.00",
    "#### {} dollars",
    "<answer>{:,} dollars</answer>",
    r"so \boxed{{{}}}.",
    r"so $\boxed{{{:,}}}$",
    r"\boxed{{\${}}}",
    r"\boxed{{{}.0}}",
    r"\boxed{{x = {}}}",
    r"\boxed{{{} \text{{ clips}}}}",
)


@pytest.mark.parametrize(
    "split", ["excerpt", *(pytest.param(name, marks=pytest.mark.slow) for name in ("train", "test"))]
)
def test_gold_solutions(split):
    """Each is right for its own question and wrong for one with another answer; so is its final number alone."""
    if split != "excerpt" and GSM8K is None:
        pytest.skip("needs GSM8K in shared/data/gsm8k")
    path = WORD_PROBLEMS if split == "excerpt" else GSM8K / f"{split}.jsonl"
    golds = [json.loads(line)["answer"] for line in path.read_text().splitlines()]
    assert gsm8k_reward(golds, golds) == [1.0] * len(golds)
    bare = [gold.rpartition("#### ")[2].strip() for gold in golds]
    whole = [int(answer.replace(",", "")) for answer in bare]
    assert gsm8k_reward(golds, bare) == [1.0] * len(golds)
    once = dict(zip(whole, golds))  # a question of each answer: what follows has nothing else of it
    answers = [*once.values()]
    for form in WAYS_TO_ANSWER:
        texts = [form.format(n) for n in once]
        assert gsm8k_reward(texts, answers) == [1.0] * len(once), form
    for form in ("#### {}/2", r"\boxed{{\frac{{{}}}{{2}}}}", "#### {}.0/2"):  # twice the answer, halved
        assert sum(gsm8k_reward([form.format(2 * n) for n in once], answers)) == 0, form
    for form in ("#### {}00%", "#### {}!", "#### {}x", "#### not {}", "#### {} or 1", "#### 0.5={}"):
        assert sum(gsm8k_reward([form.format(n) for n in once], answers)) == 0, form

    others = golds[1:] + golds[:1]
    value = lambda gold: float(gold.rpartition("#### ")[2].replace(",", ""))  # noqa: E731
    different = [(gold, other) for gold, other in zip(golds, others) if value(gold) != value(other)]
    assert len(different) > 0.9 * len(golds)
    assert gsm8k_reward(*zip(*different)) == [0.0] * len(different)


@pytest.mark.slow
@pytest.mark.skipif(GSM8K is None, reason="needs GSM8K in shared/data/gsm8k")
def test_what_copying_the_end_of_the_question_is_worth():
    """The figure in gsm8k_reward's docstring; copying the whole question is worth nothing."""
    rows = [json.loads(line) for line in (GSM8K / "train.jsonl").read_text().splitlines()]
    questions, answers = [row["question"] for row in rows], [row["answer"] for row in rows]
    ends = [question[len(question) // 2 :] for question in questions]
    assert sum(gsm8k_reward(ends, answers, prompts=questions)) / len(rows) == pytest.approx(0.013, abs=0.0005)
    assert sum(gsm8k_reward(questions, answers, prompts=questions)) == 0


@pytest.mark.slow
@pytest.mark.skipif(GSM8K is None, reason="needs GSM8K in shared/data/gsm8k")
def test_what_a_quotient_of_the_questions_numbers_would_be_worth():
    """The figure in gsm8k_reward's docstring. A policy that boxes the right quotient of each question gets nothing."""
    rows = [json.loads(line) for split in ("train", "test") for line in (GSM8K / f"{split}.jsonl").open()]
    quotients = {}
    for index, row in enumerate(rows):
        answer = int(row["answer"].rpartition("#### ")[2].replace(",", ""))
        found = {text.replace(",", "") for text in re.findall(r"(?<![\w.])\d[\d,]*(?:\.\d+)?", row["question"])}
        pairs = [(a, b) for a in found for b in found if Fraction(b) not in (0, 1) and Fraction(a) != Fraction(b)]
        if pair := next((pair for pair in pairs if Fraction(pair[0]) == answer * Fraction(pair[1])), None):
            quotients[index] = "/".join(pair)
    assert len(quotients) / len(rows) == pytest.approx(0.032, abs=0.0005)
    texts = [rf"\boxed{{{quotient}}}" for quotient in quotients.values()]
    assert sum(gsm8k_reward(texts, [rows[index]["answer"] for index in quotients])) == 0
