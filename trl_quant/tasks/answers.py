r"""Find the one number a completion commits to, and compare two numbers.

The order is fixed. The first kind of marker present decides, and only its last occurrence counts:

1. `<answer> ... </answer>`
2. `\boxed{ ... }`
3. `#### ...` up to the end of the line, GSM8K's own format
4. the last number of the text, only if the caller allows it

A marker must hold exactly one number: `$12.50`, `1,234 clips`, `x = 5`, `\frac{3}{4}` and `50%` do; `5 or 6`, `3 + 4`
and `unknown` do not, and then there is no answer: weaker markers are not tried. So neither listing candidates nor
boxing the question's own expression (which a computer algebra system would happily evaluate) counts as right.

A regular expression reads the number before math-verify gets it, as at most 64 plain characters. The comparison is
therefore fast and bounded, needs no signal-based timeout, and works off the main thread.
"""

import logging
import re
from collections.abc import Sequence
from decimal import Decimal
from functools import lru_cache


TAIL_CHARACTERS = 4096  # only the end of a completion is searched, so cost does not grow with length
NUMBER_CHARACTERS = 64  # longer than any number worth comparing
MAX_EXPONENT = 30  # 1e999999999 must not be expanded

_INTEGER = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
_NUMBER = re.compile(
    # A sign counts only where it cannot be a minus between two terms: "10-7" holds 10 and 7, not -7.
    r"(?<![\w)])(?<!\d\.)(?P<sign>[-+]?\$[-+]?|[-+])?"
    rf"(?:(?P<numerator>{_INTEGER})\s?/\s?(?P<denominator>{_INTEGER})(?![\d/])(?!\.\d)"
    rf"|(?P<decimal>{_INTEGER}(?:\.\d+)?|(?<!\.)\.\d+)(?P<exponent>[eE][-+]?\d+)?)"
    r"(?:\s?(?P<percent>%))?"
)
_INTEGER_ONLY = re.compile(r"-?\d+")
_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_BOXED = re.compile(r"\\boxed\s*\{")
_HASHES = re.compile(r"####([^#\n]*)")
_REWRITES = (
    (re.compile(r"\\[dt]?frac\s*\{\s*(-?\d+)\s*\}\s*\{\s*(\d+)\s*\}"), r"\1/\2"),
    (re.compile(r"(?<=\d)(?:\{,\}|\\,|\\!,)(?=\d{3})"), ","),  # LaTeX's ways to write 1,234
    (re.compile(r"\\([$%])"), r"\1"),
    (re.compile("[\u2212\u2013]"), "-"),  # typographic minus and dash
)


class _DropTimeoutNotice(logging.Filter):
    """math-verify warns once when its timeouts are off; here they are off on purpose (see the module docstring)."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "Timeout is disabled" not in str(record.msg)


for _name in ("math_verify.parser", "math_verify.grader"):
    logging.getLogger(_name).addFilter(_DropTimeoutNotice())


def message_text(completion: str | Sequence[dict] | None) -> str:
    """The text of a plain completion, or of the last message of a conversational one, with text parts joined."""
    if completion is None or isinstance(completion, str):
        return completion or ""
    content = completion[-1].get("content") if completion else None
    if isinstance(content, str) or content is None:
        return content or ""
    return "".join(part.get("text") or "" for part in content)


def without_echo(text: str, prompt: str | Sequence[dict] | None) -> str:
    """A completion's text less the messages of its prompt, wherever they are repeated word for word."""
    messages = [prompt] if isinstance(prompt, str) else [message_text([message]) for message in prompt or []]
    for message in filter(None, map(str.strip, messages)):
        text = text.replace(message, " ")
    return text


def final_answer(completion: str | Sequence[dict] | None, prompt: str | Sequence[dict] | None = None) -> str | None:
    """What stands in the last marker of the strongest kind, in the completion's last `TAIL_CHARACTERS` characters."""
    marked = marked_answers(without_echo(message_text(completion), prompt)[-TAIL_CHARACTERS:])
    return marked[-1][0] if marked else None


def numbers(text: str) -> list[str | None]:
    """All numbers in a text, in canonical form (`1,234` -> `1234`, `1e3` -> `1000`); `None` for an unreadable one."""
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    return [_canonical(match) for match in _NUMBER.finditer(text)]


def _canonical(match: re.Match) -> str | None:
    if len(match.group()) > NUMBER_CHARACTERS:
        return None
    sign = "-" if "-" in (match["sign"] or "") else ""
    if match["numerator"]:
        top, bottom = (int(match[part].replace(",", "")) for part in ("numerator", "denominator"))
        return f"{sign}{top}/{bottom}" + ("%" if match["percent"] else "") if bottom else None
    exponent = (match["exponent"] or "e0").lower()
    if abs(int(exponent[1:])) > MAX_EXPONENT:
        return None
    value = Decimal(match["decimal"].replace(",", "") + exponent)
    return f"{sign}{value:f}" + ("%" if match["percent"] else "")


def single_number(text: str) -> str | None:
    """The one number of `text`, or of what follows its last `=`; `None` when there is none or more than one."""
    found = numbers(text.rpartition("=")[2])
    return found[0] if len(found) == 1 else None


def marked_answers(text: str) -> list[tuple[str, int]]:
    """Contents of the strongest kind of marker in `text`: `(content, end of the marker)`, in order."""
    return _matches(_TAG, text) or _boxed(text) or _matches(_HASHES, text)


def _matches(pattern: re.Pattern, text: str) -> list[tuple[str, int]]:
    return [(match[1], match.end()) for match in pattern.finditer(text)]


def _boxed(text: str) -> list[tuple[str, int]]:
    found, end = [], 0
    for start in _BOXED.finditer(text):
        if start.start() < end:
            continue  # nested box
        depth = 1
        for end in range(start.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                end += 1
                found.append((text[start.end() : end - 1], end))
                break
        else:
            break  # never closed, so no later box is either
    return found


def extract_answer(text: str, last_number: bool = True) -> str | None:
    """The number that `text` commits to, in the order above.

    Args:
        text (`str`): a completion of any length; only its last `TAIL_CHARACTERS` characters are read.
        last_number (`bool`): without a marker, take the last number of the text (`True`) or require that the text
            is a single number or a single equation (`False`).

    Returns:
        `str | None`: a canonical number, such as `-7`, `12.50`, `3/4` or `50%`.
    """
    cut = len(text) > TAIL_CHARACTERS
    text = text[-TAIL_CHARACTERS:]
    if marked := marked_answers(text):
        return single_number(marked[-1][0])
    if last_number:
        return (numbers(text) or [None])[-1]
    return None if cut or text.count("=") > 1 else single_number(text)


@lru_cache(maxsize=65536)
def same_number(gold: str, answer: str) -> bool:
    """Whether two canonical numbers are equal by math-verify: `1/2`, `0.50` and `50%` are; so are `50` and `50%`."""
    if _INTEGER_ONLY.fullmatch(gold) and _INTEGER_ONLY.fullmatch(answer):
        return int(gold) == int(answer)  # sympy's parsing of integers took a fifth of the demo's training step
    from math_verify import ExprExtractionConfig, parse, verify  # with sympy, which takes a second to load

    gold_value, value = (parse(number, [ExprExtractionConfig()], parsing_timeout=None) for number in (gold, answer))
    return verify(gold_value, value, timeout_seconds=None)
