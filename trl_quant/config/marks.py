"""The checks of [`before_loading`] on marks such as `<think>`: whether completions can have those that a reward needs.

A reward reads the text that TRL decodes from a completion. Two things keep a mark out of it. A chat template may open
the mark at the end of the prompt, so that the completion only closes it. And decoding drops special tokens.
"""

from trl.chat_template_utils import parse_response

from ..tasks.answers import message_text
from ..tasks.rewards import MARKS, REWARDS


END = 30  # characters of a prompt's end that a message shows


def check_marks(rewards: list, tokenizer, prompts: list, template: dict) -> None:
    """
    Raises `ValueError` if one of our rewards can be above 0 for none of the completions of a run.

    Args:
        rewards (`list`): The run's rewards. Those of others are not checked: their marks are not known.
        tokenizer (`PreTrainedTokenizerBase`): The policy's tokenizer.
        prompts (`list`): Some of the prompts, all plain or all conversations.
        template (`dict`): The arguments of the chat template.
    """
    for name, reward in REWARDS.items():
        groups = MARKS[name]
        if reward not in rewards or () in groups:
            continue
        faults = [_fault(group, tokenizer, prompts, template) for group in groups]
        if all(faults):
            raise ValueError(
                f"`reward_funcs`: {reward.__name__} can never be above 0 in this run. It needs {'; or '.join(faults)}. "
                "Change the chat template or its `chat_template_kwargs`, the prompts, or the reward."
            )


def _fault(marks: tuple[str, ...], tokenizer, prompts: list, template: dict) -> str | None:
    """Returns why no completion can have all of the marks, or `None`."""
    ends = [_end(prompt, tokenizer, template) for prompt in prompts]
    for mark in marks:
        if all(_opens(mark, end) for end in ends):
            return f"{mark!r} in the completion, which the prompt opens itself, with {ends[0][-END:]!r} at its end"
    ids = tokenizer("".join(f"{mark}1" for mark in marks), add_special_tokens=False)["input_ids"]
    read = _read(ids, tokenizer, prompts[0], template)
    missing = [mark for mark in marks if mark not in read]
    if not missing:
        return None
    if missing[0] in tokenizer.decode(ids):
        return f"{missing[0]!r}, which decoding drops from a completion: it is a special token, or part of a format"
    return f"{missing[0]!r}, which the tokenizer cannot write"


def _end(prompt: str | list, tokenizer, template: dict) -> str:
    """Returns what a chat template adds after the last message, or the end of a plain prompt."""
    if isinstance(prompt, str):
        return prompt.rstrip()[-END:]
    asked, told = (
        tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=adds, **template)
        for adds in (True, False)
    )
    same = next((i for i, (one, other) in enumerate(zip(asked, told, strict=False)) if one != other), len(told))
    return asked[same:].rstrip() or asked.rstrip()[-END:]


def _opens(mark: str, end: str) -> bool:
    """Whether the end of a prompt opens a mark and does not close it. A plain prompt may mention marks."""
    if mark.startswith("</"):
        return False
    if not mark.startswith("<"):
        return end.endswith(mark)
    _, opened, after = end.rpartition(mark)
    return bool(opened) and mark.replace("<", "</") not in after


def _read(ids: list[int], tokenizer, prompt: str | list, template: dict) -> str:
    """Returns the text of a completion as TRL gives it to a reward."""
    if isinstance(prompt, str) or getattr(tokenizer, "response_template", None) is None:
        return tokenizer.decode(ids, skip_special_tokens=True)
    prefix = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False, **template)
    return message_text([parse_response(tokenizer, ids, prefix=prefix)])
