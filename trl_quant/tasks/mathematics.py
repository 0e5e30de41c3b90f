r"""Rewards for mathematics whose answers are more than numbers: $\frac{\pi}{2}$, $(3, 4)$, $x^2 + 1$. One is for
training, the other for evaluation.

A completion declares its answer as in [`trl_quant.tasks.answers`]; only the last marker counts, and without one the
text must be a single number or equation. The rewards differ in what they accept as equal to the ground truth:

| answer | ground truth | strict | lenient |
|---|---|---|---|
| `42`, `42.0`, `x = 42`, `42 \text{ cm}` | `42` | 1 | 1 |
| `6 \cdot 7`, `\frac{84}{2}`, `\sum_{k=1}^{6} 2k` | `42` | 0 | 1 |
| `\sqrt{12}`, `\sqrt{3} \cdot 2` | `2\sqrt{3}` | 1 | 1 |
| `3.464102` | `2\sqrt{3}` | 0 | 1 |

[`strict_math_reward`] is for training: a policy that is rewarded for `6 \cdot 7` learns to box the question.
[`trl_quant.tasks.expressions`] has its rules. If the ground truth is itself an expression, equal expressions count, so
repeating the expression still earns the reward where the question asks to expand, factor or simplify it.

[`lenient_math_reward`] is for evaluation. It accepts what the strict reward accepts, and compares other expressions
with math-verify. A signal stops math-verify after five seconds, so it must run on the main thread.
"""

import re
from collections.abc import Callable

from .answers import extract_answer, final_answer, message_text, same_number, truth_text, without_echo, without_percent
from .expressions import literal, same_answer


MAX_CHARACTERS = 512  # of an answer
_SCIENTIFIC = re.compile(r"([-+]?\d*\.?\d+)[eE]([-+]?\d+)")


def strict_math_reward(completions, answer=None, solution=None, prompts=None, **kwargs) -> list[float | None]:
    r"""1.0 where the completion's last answer is `answer`, written out, else 0.0: a reward to train with.

    Args:
        completions (`list[str]` or `list[list[dict]]`): plain or conversational, one per row.
        answer (`list[str]`, *optional*): the ground truth: LaTeX, with or without `$` and `\boxed{}`, or a number. A
            list of texts has several parts, all of which are required.
        solution (`list[str]`, *optional*): the ground truth of a dataset without `answer`.
        prompts (`list`, *optional*): the prompts, as TRL passes them; a repeated question is ignored, and a percent
            sign is right if they mention percentages.

    Returns:
        `list[float | None]`: `None` where a row has no ground truth, or one of more than 512 characters.

    Raises:
        ValueError: if the dataset has neither `answer` nor `solution`.

    Example:

    ```python
    >>> strict_math_reward([r"\boxed{42}", r"\boxed{6 \cdot 7}", r"\boxed{\sqrt{12}}"], ["42", "42", r"2\sqrt{3}"])
    [1.0, 0.0, 1.0]
    ```
    """
    if answer is None and solution is None:
        raise ValueError("`strict_math_reward` compares with a column 'answer' or 'solution'; the dataset has neither.")
    truths = map(_truth, solution if answer is None else answer)
    return _scores(_is_answer, completions, [t if len(t) <= MAX_CHARACTERS else "" for t in truths], prompts)


def lenient_math_reward(completions, answer, prompts=None, **kwargs) -> list[float | None]:
    r"""1.0 where the completion's last answer equals `answer` as mathematics, else 0.0: a score to evaluate with.

    Args:
        completions (`list[str]` or `list[list[dict]]`): plain or conversational, one per row.
        answer (`list[str]`): the ground truth: LaTeX, with or without `$` and `\boxed{}`, or a number. A list of texts
            has several parts, all of which are required.
        prompts (`list`, *optional*): the prompts; a repeated question is ignored.

    Returns:
        `list[float | None]`: `None` where a row has no ground truth.
    """
    return _scores(_is_equal, completions, answer, prompts)


math_reward = lenient_math_reward  # the older name of this reward


def _truth(answer) -> str:
    """Returns a row's ground truth as one text, empty if it has none."""
    text = ", ".join(map(truth_text, answer)) if isinstance(answer, list) else truth_text(answer)
    return (final_answer(text) or text).strip()


def _scores(is_right: Callable[..., bool], completions, answer, prompts) -> list[float | None]:
    scores = []
    prompts = prompts or [None] * len(completions)
    for completion, gold, prompt in zip(completions, map(_truth, answer), prompts, strict=True):
        found = final_answer(completion, prompt)
        if found is None:
            found = extract_answer(without_echo(message_text(completion), prompt), last_number=False)
        scores.append(float(found is not None and is_right(gold, found, prompt)) if gold else None)
    return scores


def _is_answer(gold: str, found: str, prompt) -> bool:
    number = literal(gold)
    if number is None:
        return same_answer(gold, found)
    found = literal(found)
    return found is not None and same_number(number, without_percent(found, prompt))


def _is_equal(gold: str, found: str, prompt) -> bool:
    written_out = len(gold) <= MAX_CHARACTERS and _is_answer(gold, found, prompt)
    return written_out or same_mathematics(gold, found)


def same_mathematics(gold: str, answer: str) -> bool:
    """Whether two answers are the same text, or equal by math-verify."""
    gold, answer = _latex(gold), _latex(answer)
    if gold == answer:
        return True
    if not 0 < len(answer) <= MAX_CHARACTERS or "boxed" in answer or not _is_balanced(answer):
        return False  # two boxes would be two answers
    from math_verify import LatexExtractionConfig, parse, verify  # with sympy, which takes a second to load

    values = (parse(rf"\boxed{{{text}}}", [LatexExtractionConfig()]) for text in (gold, answer))
    return verify(*values)


def _latex(text: str) -> str:
    text = text.replace("$", "").strip()
    found = _SCIENTIFIC.fullmatch(text)  # which LaTeX would read as a product with Euler's number
    return rf"{found[1]} \times 10^{{{found[2]}}}" if found else text


def _is_balanced(text: str) -> bool:
    depth = 0
    for character in text:
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth < 0:
            return False
    return depth == 0
