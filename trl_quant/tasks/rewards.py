"""Rewards in TRL's signature: `reward(completions, answer, **kwargs) -> list[float | None]`.

Every reward of a number guarantees these scores, whatever the policy writes:

| completion | score | why |
|---|---|---|
| empty, `None`, a message without text | 0 | nothing was answered |
| a conversation whose last message is a tool's | 0 | the policy wrote no answer |
| very long | as its last 4096 characters | bounded cost; the answer belongs at the end |
| two different answers in markers of one kind | the last one counts | only one is final: see below |
| several numbers in one marker (`5 or 6`, `3 + 4`) | 0 | a hedge, or the question itself |
| a quotient, an expression (`144/2`, `72!`, `72x`), `not 72`, `71 = 72` | 0 | not 72 written out |
| `72%` | 0 | unless the ground truth has the sign, or the prompt mentions percentages |
| the prompt's question, repeated word for word | as if it were absent | copying the question earns nothing |
| a row without a single number as ground truth | `None` | TRL leaves the row out of this reward |

Since only the last of several answers counts, listing candidates gains nothing over naming one. A score of 0 for such
completions would punish a valid self-correction as much as a hedge. [`trl_quant.tasks.answers`] has the extraction
order. [`trl_quant.tasks.mathematics`] has the rewards for answers that are more than numbers. Only the strict one is in
`REWARDS`; the lenient one is for evaluation.
"""

import inspect
import re
from collections.abc import Callable, Sequence

from datasets import Dataset

from .answers import (
    TAIL_CHARACTERS,
    extract_answer,
    marked_answers,
    message_text,
    same_number,
    single_number,
    truth_text,
    without_echo,
    without_percent,
)
from .countdown import countdown_reward
from .data import SCANNED_ROWS
from .mathematics import strict_math_reward
from .sudoku import sudoku_reward


_THINKING_TAG = "</?(?:think|answer)>"
_TAGGED = rf"\s*(?!{_THINKING_TAG})\S(?:(?!{_THINKING_TAG}).)*"  # text, without another tag in it
_THINK_ANSWER = re.compile(rf"<think>{_TAGGED}</think>\s*<answer>{_TAGGED}</answer>", re.DOTALL)


def _number_reward(completions, answer, prompts, last_number: bool) -> list[float | None]:
    prompts = [None] * len(completions) if prompts is None else prompts
    rewards = []
    for completion, gold, prompt in zip(completions, answer, prompts, strict=True):
        gold = single_number(truth_text(gold).rpartition("####")[2])
        found = extract_answer(without_echo(message_text(completion), prompt), last_number)
        found = found and without_percent(found, prompt)
        rewards.append(None if gold is None else float(found is not None and same_number(gold, found)))
    return rewards


def arithmetic_reward(completions, answer, prompts=None, **kwargs) -> list[float | None]:
    r"""1.0 where the completion's declared answer equals `answer`, else 0.0.

    The answer must be declared: in a marker (`<answer>`, `\boxed{}` or `####`), or by a completion that is just one
    number or one equation. Numbers in the written-out steps never count, so a truncated trace cannot be right by
    accident.

    Args:
        completions (`list[str]` or `list[list[dict]]`): plain or conversational, one per row.
        answer (`list[str | int | float]`): the ground truth.
        prompts (`list`, *optional*): the prompts, as TRL passes them; a repeated question is ignored.

    Returns:
        `list[float | None]`: `None` where `answer` holds no single number.

    Example:

    ```python
    >>> arithmetic_reward(["7+8=15 2+1=3 #### 35", "7+8=15 2+1=3", "35"], [35, 15, 35])
    [1.0, 0.0, 1.0]
    ```
    """
    return _number_reward(completions, answer, prompts, last_number=False)


def division_reward(completions, answer, **kwargs) -> list[float | None]:
    """Returns the share of a division's differences that are right: the n-th one ends with `#### ` and the n-th answer.

    Each difference ends with `;`. An error makes the differences that follow from it wrong as well. Text after the last
    difference counts as wrong differences.

    Args:
        completions (`list[str]` or `list[list[dict]]`): plain or conversational, one per row.
        answer (`list[str]`): the answers in their order, as [`~tasks.arithmetic.Division.row`] has them.

    Returns:
        `list[float | None]`: `None` where a row has no answer.

    Example:

    ```python
    >>> completion = "25-12=5-2-0=3b0 2-1-0=1b0 #### 13;13-12=3-2-0=1b0 1-1-0=0b0 #### 1;"
    >>> division_reward([completion, completion + "1-12="], ["13;1", "13;1"])
    [1.0, 0.6666666666666666]
    ```
    """
    rewards = []
    for completion, gold in zip(completions, answer, strict=True):
        gold = truth_text(gold)
        if not gold:
            rewards.append(None)
            continue
        (*written, rest), answers = message_text(completion).split(";"), gold.split(";")
        right = sum(text.rpartition("#### ")[1:] == ("#### ", one) for text, one in zip(written, answers))
        rewards.append(right / max(len(answers), len(written) + bool(rest)))
    return rewards


def gsm8k_reward(completions, answer, prompts=None, **kwargs) -> list[float | None]:
    r"""1.0 where the completion's final answer equals `answer`, else 0.0.

    Without a marker (`<answer>`, `\boxed{}`, `####`) the last number of the text is the answer, which gives a signal to
    a model that never saw the format. Copying the question word for word scores 0; copying only its end would be right
    for 1.3% of GSM8K's training questions, where the last number happens to be the answer. If that matters, add
    [`format_reward`]. The number must be written out: 3.2% of GSM8K's answers are the quotient of two numbers of the
    question, so a quotient is not an answer.

    Args:
        completions (`list[str]` or `list[list[dict]]`): plain or conversational, one per row.
        answer (`list[str]`): the ground truth, a GSM8K solution that ends in `#### 72`, or a bare number.
        prompts (`list`, *optional*): the prompts, as TRL passes them; a repeated question is ignored.

    Returns:
        `list[float | None]`: `None` where `answer` holds no single number.
    """
    return _number_reward(completions, answer, prompts, last_number=True)


def format_reward(completions, **kwargs) -> list[float]:
    r"""1.0 where the completion ends with its only answer marker, holding exactly one number, else 0.0.

    The reward ignores whether the number is right: give it a small weight beside a reward that checks the number.

    Args:
        completions (`list[str]` or `list[list[dict]]`): plain or conversational, one per row.
    """
    rewards = []
    for completion in completions:
        text = message_text(completion)[-TAIL_CHARACTERS:]
        marked = marked_answers(text)
        alone_at_end = len(marked) == 1 and not text[marked[0][1] :].strip(" \n.$")
        rewards.append(float(alone_at_end and single_number(marked[0][0]) is not None))
    return rewards


def think_answer_reward(completions, **kwargs) -> list[float]:
    """0.2 where the completion is its reasoning in `<think>` and then its answer in `<answer>`, else 0.0.

    QeRL's prompts require this format, and its release rewards it with 0.2, beside 1 (BigMath) or 2 (GSM8K) for a right
    answer. The release also rewards text outside the tags, empty tags and several pairs of tags, which score 0 here.

    Args:
        completions (`list[str]` or `list[list[dict]]`): plain or conversational, one per row.

    Example:

    ```python
    >>> think_answer_reward(["<think>1+1=2</think> <answer>2</answer>", "<answer>2</answer>"])
    [0.2, 0.0]
    ```
    """
    return [0.2 * bool(_THINK_ANSWER.fullmatch(message_text(completion).strip())) for completion in completions]


REWARDS = {
    "arithmetic": arithmetic_reward,
    "countdown": countdown_reward,
    "division": division_reward,
    "format": format_reward,
    "gsm8k": gsm8k_reward,
    "strict_math": strict_math_reward,
    "sudoku": sudoku_reward,
    "think_answer": think_answer_reward,
}

_ANSWER_TAGS = ("<answer>", "</answer>")
_MARKED = (_ANSWER_TAGS, (r"\boxed",), ("####",))  # the markers of [`trl_quant.tasks.answers`]
# The marks that a completion must have for a reward above 0: the marks of one of these groups, each of them. A prompt
# that opens a mark itself, or a tokenizer that drops it, leaves a reward at 0 whatever the policy answers
MARKS = {
    "arithmetic": ((),),
    "countdown": _MARKED,
    "division": (("####", ";"),),
    "format": _MARKED,
    "gsm8k": ((),),
    "strict_math": ((),),
    "sudoku": (_ANSWER_TAGS, (r"\boxed",)),
    "think_answer": (("<think>", "</think>", *_ANSWER_TAGS),),
}

# The arguments that TRL passes to a reward, in addition to the dataset's columns
GIVEN = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
GIVEN_BESIDE_TRAINING = GIVEN[:3]  # by the asynchronous trainer


def check_reward(
    reward: Callable,
    columns: Sequence[str] | None = None,
    dataset: str = "train_dataset",
    is_asynchronous: bool = False,
) -> None:
    """Raises `ValueError` if TRL cannot call `reward` as a reward.

    Args:
        reward (`Callable`): in TRL's signature.
        columns (`Sequence[str]`, *optional*): the dataset's columns, which TRL passes to the reward as well, if they
            are known.
        dataset (`str`): the dataset's name in the message.
        is_asynchronous (`bool`): whether an asynchronous trainer calls it.
    """
    if not callable(reward):
        raise ValueError(
            f"`reward_funcs`={reward!r} is a {type(reward).__name__}. It must be a function, a model or a list of them."
        )
    if columns is None:
        return
    taken = {"prompts", "completions"} & {*columns}
    if taken:
        raise ValueError(
            f"`{dataset}` has a column {taken.pop()!r}. TRL passes that name to a reward itself: rename the column."
        )
    name = getattr(reward, "__name__", type(reward).__name__)
    try:
        signature = inspect.signature(reward)
    except ValueError:  # a builtin without a signature
        return
    of_trl = GIVEN_BESIDE_TRAINING if is_asynchronous else GIVEN
    given = dict.fromkeys((*of_trl, *(column for column in columns if column not in ("prompt", "completion"))))
    try:
        signature.bind(**given)
    except TypeError as error:
        raise ValueError(
            f"`reward_funcs`: {name}{signature} cannot be called as a reward: {error}. With `{dataset}` it gets "
            f"{', '.join(given)}, by name; `**kwargs` takes those that it does not use."
        ) from error


def check_truths(reward: Callable, dataset: Dataset) -> None:
    """Raises `ValueError` if one of our rewards can score none of a dataset's rows, which TRL would not notice.

    Rows without any of the reward's columns belong to another task. Only the first `SCANNED_ROWS` rows are read.
    """
    if reward not in REWARDS.values():
        return
    names = [name for name in inspect.signature(reward).parameters if name in dataset.column_names]
    rows = dataset.select_columns(names)[:SCANNED_ROWS] if names else {}
    rows = [dict(zip(rows, row, strict=True)) for row in zip(*rows.values(), strict=True)]
    rows = [row for row in rows if any(value is not None for value in row.values())]
    columns = {name: [row[name] for row in rows] for name in names}
    if rows and set(reward(completions=[""] * len(rows), **columns)) == {None}:
        found = ", ".join(f"{name}={value!r}" for name, value in rows[0].items())
        raise ValueError(
            f"`reward_funcs`: {reward.__name__} can compare with none of the first "
            f"{SCANNED_ROWS} rows of `train_dataset`. One has {found:.200}. Its docstring says what these columns hold."
        )
