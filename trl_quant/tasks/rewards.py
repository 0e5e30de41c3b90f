"""Rewards in TRL's signature: `reward(completions, answer, **kwargs) -> list[float | None]`.

What every reward here promises, whatever the policy writes (columns: `completion` -> score):

| completion | score | why |
|---|---|---|
| empty, `None`, a message without text | 0 | nothing was answered |
| very long | as its last 4096 characters | bounded cost; an answer that is not at the end is no answer |
| two different answers in markers of one kind | the last one counts | only one is committed to: see below |
| several numbers in one marker (`5 or 6`, `3 + 4`) | 0 | a hedge, or the question itself |
| the prompt repeated word for word | as if it were not there | copying the question is no work |
| a row whose ground truth holds no single number | `None` | TRL leaves the row out of this reward |

With the last of several answers counting, listing candidates gains nothing over naming one, so there is nothing to
hack; scoring such completions 0 would punish a sound self-correction as much as a hedge. The extraction order is
that of [`trl_quant.tasks.answers`].
"""

from collections.abc import Sequence

from .answers import TAIL_CHARACTERS, extract_answer, marked_answers, same_number, single_number


def _text(completion: str | Sequence[dict] | None) -> str:
    """The text of a plain completion, or of the last message of a conversational one, parts of text joined."""
    if completion is None or isinstance(completion, str):
        return completion or ""
    content = completion[-1].get("content") if completion else None
    if isinstance(content, str) or content is None:
        return content or ""
    return "".join(part.get("text") or "" for part in content)


def _without_echo(text: str, prompt: str | Sequence[dict] | None) -> str:
    messages = [prompt] if isinstance(prompt, str) else [_text([message]) for message in prompt or []]
    for message in filter(None, map(str.strip, messages)):
        text = text.replace(message, " ")
    return text


def _number_reward(completions, answer, prompts, last_number: bool) -> list[float | None]:
    prompts = [None] * len(completions) if prompts is None else prompts
    rewards = []
    for completion, gold, prompt in zip(completions, answer, prompts, strict=True):
        gold = None if gold is None else single_number(str(gold).rpartition("####")[2])
        found = extract_answer(_without_echo(_text(completion), prompt), last_number)
        rewards.append(None if gold is None else float(found is not None and same_number(gold, found)))
    return rewards


def arithmetic_reward(completions, answer, prompts=None, **kwargs) -> list[float | None]:
    r"""1.0 where the completion's declared answer equals `answer`, else 0.0.

    The answer must be declared: in a marker (`<answer>`, `\boxed{}` or `####`), or by a completion that is nothing but
    one number or one equation. Numbers of the written-out steps never count, so a trace that is cut short cannot be
    right by accident.

    Args:
        completions (`list[str]` or `list[list[dict]]`): plain or conversational, one per row.
        answer (`list[str | int | float]`): the ground truth.
        prompts (`list`, *optional*): the prompts, as TRL passes them; a repeated prompt is ignored.

    Returns:
        `list[float | None]`: `None` where `answer` holds no single number.

    Example:

    ```python
    >>> arithmetic_reward(["7+8=15 2+1=3 #### 35", "7+8=15 2+1=3", "35"], [35, 15, 35])
    [1.0, 0.0, 1.0]
    ```
    """
    return _number_reward(completions, answer, prompts, last_number=False)


def gsm8k_reward(completions, answer, prompts=None, **kwargs) -> list[float | None]:
    r"""1.0 where the completion's final answer equals `answer`, else 0.0.

    Without a marker (`<answer>`, `\boxed{}`, `####`) the last number of the text is the answer, so that a model that
    never saw the format has a signal. Copying the question word for word scores 0; copying only its end would be right
    for 1.3% of GSM8K's training questions, whose last number happens to be the answer. Where that matters, add
    [`format_reward`].

    Args:
        completions (`list[str]` or `list[list[dict]]`): plain or conversational, one per row.
        answer (`list[str]`): the ground truth, a GSM8K solution that ends in `#### 72`, or a bare number.
        prompts (`list`, *optional*): the prompts, as TRL passes them; a repeated prompt is ignored.

    Returns:
        `list[float | None]`: `None` where `answer` holds no single number.
    """
    return _number_reward(completions, answer, prompts, last_number=True)


def format_reward(completions, **kwargs) -> list[float]:
    r"""1.0 where the completion ends with its only answer marker and that holds exactly one number, else 0.0.

    It says nothing about the number being right: use it beside a reward that does, with a small weight.

    Args:
        completions (`list[str]` or `list[list[dict]]`): plain or conversational, one per row.
    """
    rewards = []
    for completion in completions:
        text = _text(completion)[-TAIL_CHARACTERS:]
        marked = marked_answers(text)
        alone_at_end = len(marked) == 1 and not text[marked[0][1] :].strip(" \n.$")
        rewards.append(float(alone_at_end and single_number(marked[0][0]) is not None))
    return rewards


REWARDS = {"arithmetic": arithmetic_reward, "gsm8k": gsm8k_reward, "format": format_reward}
