"""The strict reward for mathematics: right answers in all ways to write them, and what only evaluates to them."""

import threading
from fractions import Fraction

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st
from mathematical_answers import CASES

from trl_quant.tasks import REWARDS, lenient_math_reward, math_reward, strict_math_reward
from trl_quant.tasks.expressions import MAX_CHARACTERS, same_answer


def strict(answer, gold, **kwargs) -> float | None:
    return strict_math_reward([rf"so \boxed{{{answer}}}."], [gold], **kwargs)[0]


@pytest.mark.parametrize(("gold", "right", "wrong"), CASES, ids=[gold for gold, _, _ in CASES])
def test_answers(gold, right, wrong):
    for truth in (gold, f"${gold}$", rf"\boxed{{{gold}}}", rf"A proof. So it is $\boxed{{{gold}}}$."):
        assert [text for text in right if strict(text, truth) != 1.0] == []
        assert [text for text in wrong if strict(text, truth) != 0.0] == []
    for text in right:
        assert strict_math_reward([f"<answer>{text}</answer>", rf"\boxed{{{text}}} no, \boxed{{-17}}"], [gold] * 2) == [
            1,
            0,
        ]


BOXED_QUESTIONS = [  # each evaluates to its answer, and a computer algebra system takes it for right
    (r"6 \cdot 7", "42"),
    (r"\frac{84}{2}", "42"),
    (r"\sum_{k=1}^{10} k^2", "385"),
    (r"\binom{10}{3}", "120"),
    (r"\int_0^3 x^2dx", "9"),
    ("10!", "3628800"),
    (r"\sqrt{1764}", "42"),
    ("2^{10}", "1024"),
    (r"\frac{1}{2}+\frac{1}{4}", r"\frac{3}{4}"),
    (r"\frac{6}{8}", r"\frac{3}{4}"),
    (r"(6 \cdot 7, 5)", "(42, 5)"),
    (r"\{6 \cdot 7, 5\}", r"\{5, 42\}"),
]


@pytest.mark.parametrize(("question", "gold"), BOXED_QUESTIONS)
def test_boxing_the_question_is_right_for_the_lenient_reward_alone(question, gold):
    assert strict(question, gold) == 0.0 and strict(gold, gold) == 1.0
    assert lenient_math_reward([rf"\boxed{{{question}}}"], [gold]) == [1.0]


@pytest.mark.parametrize(
    "text", [r"\boxed{\boxed{72}}", r"\boxed{٧٢}", "#### 72 dollars", r"\boxed{€72}", r"\boxed{72 \text{ cm}^2}"]
)
def test_the_lenient_reward_accepts_a_number_that_the_strict_one_accepts(text):
    for reward in (strict_math_reward, lenient_math_reward):
        assert reward([text] * 2, answer=["72", "71"]) == [1.0, 0.0]


@pytest.mark.parametrize(("gold", "right", "wrong"), CASES, ids=[gold for gold, _, _ in CASES])
def test_the_lenient_reward_accepts_all_that_the_strict_one_accepts(gold, right, wrong):
    assert lenient_math_reward([rf"\boxed{{{text}}}" for text in right], [gold] * len(right)) == [1.0] * len(right)


def test_the_rewards_by_their_names():
    assert REWARDS["strict_math"] is strict_math_reward
    assert math_reward is lenient_math_reward and lenient_math_reward not in REWARDS.values()


# By sympy, as an independent reference

SYMBOLS = sympy.symbols("x y")
atoms = st.one_of(
    st.sampled_from(SYMBOLS),
    st.integers(-9, 9).map(sympy.Integer),
    st.sampled_from([2, 3, 5]).map(sympy.sqrt),
    st.just(sympy.pi),
)
sums = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda two: two[0] + two[1]),
        st.tuples(inner, inner).map(lambda two: two[0] * two[1]),
    ),
    max_leaves=6,
)
expressions = st.one_of(sums, st.tuples(sums, st.integers(2, 3)).map(lambda two: two[0] ** two[1]))


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(expressions, expressions)
def test_expressions_are_compared_as_sympy_does(one, other):
    """Where the ground truth is a number, only that number is right; otherwise every equal expression."""
    number = isinstance(one, sympy.Integer)
    for expression in (other, sympy.expand(one), one + 1, -one, one + other - other):
        equal = one == expression if number else sympy.expand(one - expression) == 0
        text = sympy.latex(expression)
        assert strict(text, sympy.latex(one)) == float(equal and len(text) <= MAX_CHARACTERS), text


@settings(max_examples=200, deadline=None)
@given(st.fractions(-1000, 1000, max_denominator=30), st.integers(2, 9))
def test_numbers_are_literal(number, factor):
    top, bottom = number.numerator, number.denominator
    gold = str(number)
    right = [f"{top}/{bottom}", rf"\frac{{{top}}}{{{bottom}}}"] if bottom > 1 else [f"{top}", f"{top:,}", f"{top}.00"]
    if 10**6 * number % 1 == 0:
        right.append(f"{float(number):.6f}")
    assert all(strict(text, gold) == 1.0 for text in right)
    wrong = [
        rf"{factor} \cdot {number / factor}",
        rf"\frac{{{top * factor}}}{{{bottom * factor}}}",
        f"{top * factor}/{bottom * factor}",
        f"{number - factor} + {factor}",
        f"{number}, {number}",
        rf"\pm {number}",
        f"{number * 100}\\%",
        str(number + Fraction(1, 1000)),
    ]
    assert [text for text in wrong if strict(text, gold) != 0.0 and number] == []


@given(st.integers(1, 99), st.integers(1, 30), st.integers(2, 31))
def test_mixed_numbers(whole, top, bottom):
    value = whole + Fraction(top, bottom)
    proper = top < bottom and Fraction(top, bottom).denominator == bottom
    assert (
        strict(rf"{whole}\frac{{{top}}}{{{bottom}}}", str(value))
        == strict(f"{whole} {top}/{bottom}", str(value))
        == proper
    )
    assert strict(rf"{whole}\frac{{{top}}}{{{bottom}}}", str(whole * Fraction(top, bottom))) == 0.0


# Bounds

BOMBS = [
    "9^{9^{9^{9}}}",
    "9^9^9^9",
    "(" * 6 + "9^{99}" + ")^{99}" * 6,
    r"\sin(((2^{99})^{9})^{3})",
    r"\exp(\exp(\exp(9)))",
    "e^{e^{e^{e^{9}}}}",
    "10" + "!" * 12,
    "1e999999999",
    "9" * 500,
    "(" * 200 + "x" + ")" * 200,
    "{" * 200 + "x" + "}" * 200,
    r"\sqrt{" * 80 + "x" + "}" * 80,
    "((x,1)," * 60,
    "(x," * 40 + "x" + ")" * 40,
    "1," * 250 + "1",
    r"\pm" * 150,
    "x=" * 250,
    r"\cup" * 120,
    "(x+1)^{100}" * 40,
    "~" * 512,
    "-" * 500 + "1",
    r"\begin{pmatrix}" + "1&" * 200 + r"\end{pmatrix}",
    r"\text{" * 100,
    r"\sqrt[0]{2}",
    "0^{-1}",
    r"\frac{1}{0}",
]


@pytest.mark.parametrize(
    "gold", ["42", "x^2+1", r"\sin x + e^x", "(1, 2)", "1, 2, 3", r"\begin{pmatrix}1&2\end{pmatrix}"]
)
def test_no_answer_hangs_or_fails(gold):
    """Off the main thread, where no timeout by a signal could help."""
    scores, texts = [], [form.format(bomb) for bomb in BOMBS for form in (r"\boxed{{{}}}", "<answer>{}</answer>", "{}")]
    texts += ["\\boxed{" * 10**5, "x" * 10**6 + " 1", "<answer>" * 10**5, "<<" * 10**5, " " * 10**6 + "#### x"]
    worker = threading.Thread(target=lambda: scores.extend(strict_math_reward(texts, [gold] * len(texts))))
    worker.start()
    worker.join()
    assert scores == [0.0] * len(texts)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [
                *"0123x+-*/^_{}()[],.=|!%$ ",
                "\\frac",
                "\\sqrt",
                "\\sin",
                "\\pm",
                "\\cup",
                "\\text{ or }",
                "\\{",
                "\\}",
                "12",
            ]
        ),
        max_size=25,
    ).map("".join)
)
def test_any_text_scores_zero_or_one(text):
    for gold in ("12", r"\sin x", "(1, 2)", r"1 \pm \sqrt{2}"):
        assert strict(text, gold) in (0.0, 1.0)
        assert same_answer(text, gold) in (True, False)


def test_near_is_not_equal():
    assert strict("1." + "4142135623730950488016887242"[1:], r"\sqrt{2}") == 0.0
    assert strict(r"\sqrt{10^{30}+1}", r"\sqrt{10^{30}+2}") == 0.0
    assert strict(r"\sqrt{x^2}", "x+0") == 0.0 and strict(r"\sqrt{x}^2", "x+0") == 1.0


# Rows


def test_a_percent_sign_is_right_where_the_prompt_speaks_of_percentages():
    assert strict(r"50\%", "50") == 0.0
    assert strict(r"50\%", "50", prompts=["What percentage is red?"]) == 1.0
    assert strict(r"5000\%", "50", prompts=["What percentage is red?"]) == 0.0


def test_where_the_ground_truth_is():
    boxed = [r"\boxed{3/4}"] * 3
    assert strict_math_reward(boxed, answer=["3/4", "1", None]) == [1.0, 0.0, None]
    assert strict_math_reward(boxed, solution=[r"$\frac{3}{4}$", r"So $\boxed{0.75}$.", "x"]) == [1.0, 1.0, 0.0]
    assert strict_math_reward(boxed[:1], answer=["3/4"], solution=["1"]) == [1.0]
    assert strict_math_reward(["1"] * 4, answer=["", [], " ", "x" * 513]) == [None] * 4
    assert strict_math_reward([r"\boxed{3, 1}", r"\boxed{3}"], answer=[["$1$", "$3$"]] * 2) == [1.0, 0.0]
    with pytest.raises(ValueError, match="'answer' or 'solution'; the dataset has neither"):
        strict_math_reward(boxed)
    with pytest.raises(ValueError):
        strict_math_reward(boxed, answer=["1"])


def test_a_brace_without_counterpart():
    gold = r"f(x) = \left\{\begin{array}{ll} x & x > 0 \\ 0 & x \leq 0 \end{array}\right."
    assert strict(gold.replace(" ", ""), gold) == 1.0 and strict(gold.replace("0 &", "1 &"), gold) == 0.0


def test_an_answer_must_be_declared():
    assert strict_math_reward(["35", "x = 35", "so 35 of 36", "36 or 35"], ["35"] * 4) == [1.0, 1.0, 0.0, 0.0]
    prompt = r"Is it \boxed{5}?"
    assert strict_math_reward([prompt], ["5"]) == [1.0] and strict_math_reward([prompt], ["5"], prompts=[prompt]) == [
        0.0
    ]
    message = [{"role": "assistant", "content": r"\boxed{x+1}"}]
    assert strict_math_reward([message], ["1+x"]) == [1.0]
