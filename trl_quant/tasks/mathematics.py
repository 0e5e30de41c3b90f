r"""Mathematics whose answers are more than numbers: $\frac{\pi}{2}$, $(3, 4)$, $x^2 + 1$, compared by math-verify.

A completion declares its answer as in [`trl_quant.tasks.answers`]; only the last marker counts, and without one the
text must be a single number or equation. Expressions are compared as they are, so `6 \cdot 7` is as right as 42: fit
for evaluating a model, while a reward of training would teach it to box the question. math-verify is stopped by a
signal after five seconds, so scores are to be taken on the main thread.
"""

import re

from .answers import extract_answer, final_answer, message_text, without_echo


MAX_CHARACTERS = 512  # of an answer
_SCIENTIFIC = re.compile(r"([-+]?\d*\.?\d+)[eE]([-+]?\d+)")


def math_reward(completions, answer, prompts=None, **kwargs) -> list[float | None]:
    r"""1.0 where the completion's last answer equals `answer` as mathematics, else 0.0.

    Args:
        completions (`list[str]` or `list[list[dict]]`): plain or conversational, one per row.
        answer (`list[str]`): the ground truth: LaTeX, with or without `$` and `\boxed{}`, or a number. A list of texts
            has several parts, all of which are asked for.
        prompts (`list`, *optional*): the prompts; a repeated prompt is ignored.

    Returns:
        `list[float | None]`: `None` where a row has no ground truth.
    """
    return [_score(*row) for row in zip(completions, answer, prompts or [None] * len(completions), strict=True)]


def _score(completion, gold, prompt) -> float | None:
    gold = ", ".join(map(str, gold)) if isinstance(gold, list) else "" if gold is None else str(gold)
    if not (gold := gold.strip()):
        return None
    found = final_answer(completion, prompt)
    if found is None:
        found = extract_answer(without_echo(message_text(completion), prompt), last_number=False)
    return float(found is not None and same_mathematics(final_answer(gold) or gold, found))


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
