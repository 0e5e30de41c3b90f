"""What `trl-quant eval` makes of answers: which are equal to the truth, and how sure a score is."""

import math
from itertools import combinations

import pytest

from trl_quant.tasks.estimates import bootstrap, estimates, pass_at_k, wilson
from trl_quant.tasks.mathematics import lenient_math_reward


# Estimates


@pytest.mark.parametrize(("n", "k"), [(1, 1), (5, 1), (5, 2), (6, 3), (6, 6)])
def test_pass_at_k_counts_all_choices(n, k):
    """Of all ways to take k of n answers, the share with a right one; 1 - (1 - c/n)^k is biased."""
    for c in range(n + 1):
        answers = [1] * c + [0] * (n - c)
        ways = [any(chosen) for chosen in combinations(answers, k)]
        assert pass_at_k(n, c, k) == pytest.approx(sum(ways) / len(ways), abs=1e-12)
    if k > 1:
        assert pass_at_k(n, 1, k) > 1 - (1 - 1 / n) ** k + 0.01
    for bad in ((n, n + 1, k), (n, -1, k), (n, 0, n + 1), (n, 0, 0)):
        with pytest.raises(ValueError, match="pass@k"):
            pass_at_k(*bad)


def test_wilson_is_the_known_interval():
    """Newcombe (1998), table I: 81 of 263, 15 of 148, 0 of 20, 1 of 29; and it solves |p - q| = z sqrt(q(1 - q)/N)."""
    known = {(81, 263): (0.2553, 0.3662), (15, 148): (0.0624, 0.1605), (0, 20): (0, 0.1611), (1, 29): (0.0061, 0.1718)}
    for (right, n), interval in known.items():
        assert wilson(right, n) == pytest.approx(interval, abs=5e-5)
    for right, n in ((3, 10), (500, 1000)):
        for bound in wilson(right, n):
            assert abs(right / n - bound) == pytest.approx(1.959964 * math.sqrt(bound * (1 - bound) / n), rel=1e-5)
    low, high = wilson(20, 20)
    assert high == 1 and low == pytest.approx(1 - 0.1611, abs=5e-5)


def test_bootstrap_is_the_exact_distribution():
    """Of two values: means of n draws are binomial. Of many: near the normal interval."""
    values = [0.25] * 6 + [0.75] * 6
    shares = [math.comb(12, i) / 2**12 for i in range(13)]  # of i draws of 0.75
    quantile = lambda q: next(i for i in range(13) if sum(shares[: i + 1]) >= q)  # noqa: E731
    assert bootstrap(values) == pytest.approx([0.25 + 0.5 * quantile(q) / 12 for q in (0.025, 0.975)])
    many = [math.sin(i) ** 2 for i in range(400)]
    mean = sum(many) / 400
    error = math.sqrt(sum((v - mean) ** 2 for v in many)) / 400
    assert bootstrap(many) == pytest.approx((mean - 1.96 * error, mean + 1.96 * error), abs=0.15 * error)
    assert bootstrap(many, seed=1) != bootstrap(many) == bootstrap(many)


def test_estimates_are_over_questions():
    right = [0, 4, 1, 1]
    found = estimates(right, 4)
    assert list(found) == ["avg@4", "pass@2", "pass@4"]
    assert [metric["value"] for metric in found.values()] == pytest.approx([6 / 16, (0 + 1 + 0.5 + 0.5) / 4, 3 / 4])
    assert (found["pass@4"]["low"], found["pass@4"]["high"]) == wilson(3, 4)
    assert (found["avg@4"]["low"], found["avg@4"]["high"]) == bootstrap([0, 1, 0.25, 0.25])
    assert wilson(6, 16)[1] - wilson(6, 16)[0] < found["avg@4"]["high"] - found["avg@4"]["low"]
    assert list(estimates([1, 0], 6)) == ["avg@6", "pass@2", "pass@4", "pass@6"]
    assert estimates([1, 0, 0], 1) == {"accuracy": {"value": 1 / 3, **dict(zip(("low", "high"), wilson(1, 3)))}}


# Mathematics


def mathematics(text, gold) -> float | None:
    (score,) = lenient_math_reward([text], [gold])
    return score


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        (r"\frac{\pi}{2}", r"\dfrac{\pi}{2}"),
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\pi/2)"),
        ("p - q", "-q+p"),
        (r"11\sqrt2", r"11 \sqrt{2}"),
        ("27.0", "27"),
        ("$2$", "2"),
        (r"The answer is $\boxed{x^2+1}$.", "1 + x^2"),
        (r"\text{Evelyn}", "Evelyn"),
        (["$1$", "$3$"], "3, 1"),
        ("4.5e33", r"4.5 \times 10^{33}"),
        (33, "33"),
    ],
)
def test_equal_mathematics(gold, answer):
    assert mathematics(rf"so \boxed{{{answer}}}.", gold) == 1.0
    assert mathematics(rf"so \boxed{{{answer}}}, no, \boxed{{7}}", gold) == 0.0
    assert mathematics(f"<answer>{answer}</answer>", gold) == 1.0
    assert mathematics(rf"99 or {answer} it is", gold) == 0.0


@pytest.mark.parametrize(
    "text",
    [
        "",
        None,
        r"\boxed{}",
        r"\boxed{3, 5}",
        r"\boxed{3 \text{ or } 5}",
        r"\boxed{5 \text{ or } 3}",
        r"\boxed{\pm 5}",
        r"\boxed{x \in \mathbb{R}}",
        r"\boxed{x > 0}",
        r"\boxed{\{1,2,3,4,5\}}",
        "<answer>3} and \\boxed{5</answer>",
        "<answer>\\boxed{3} \\boxed{5}</answer>",
        "<answer>" + "5 + 0 " * 100 + "</answer>",
        r"\boxed{5}" + " " * 5000,
        r"\boxed{5} \boxed{6}",
    ],
)
def test_hedges_are_not_equal(text):
    assert mathematics(text, "5") == 0.0


def test_mathematics_without_marker_or_truth():
    assert mathematics("35", "35") == mathematics("x = 35", "35") == 1.0 and mathematics("so 35 of 36", "35") == 0.0
    assert lenient_math_reward(["1"] * 3, [None, " ", []]) == [None] * 3
    prompt = r"Is it \boxed{5}?"
    assert lenient_math_reward([prompt], ["5"]) == [1.0] and lenient_math_reward([prompt], ["5"], prompts=[prompt]) == [
        0.0
    ]
