r"""Finds the one number that a completion commits to, and compares two numbers.

The order is fixed. The first kind of marker present decides, and only its last occurrence counts:

1. `<answer> ... </answer>`, from the last `<answer>` before the end, as a text may mention the tag
2. `\boxed{ ... }`
3. `#### ...` up to the end of the line, GSM8K's own format
4. the last number of the text, only if the caller allows it

A marker must hold one written-out number, alone or with words and units: `$12.50`, `1,234 clips`, `5 m/s^2`,
`x = 5`, `\frac{3}{4}` and `50%`. Anything else is not an answer, and weaker markers are not tried:

| in the marker | why it is not an answer |
|---|---|
| `5 or 6`, `3,3`, `3 (or 4)` | a hedge |
| `71 = 72`, `a = 4 = 3` | an equation with different numbers on its sides |
| `3 + 4`, `72!`, `72x`, `\sqrt{72}`, `2 \cdot 36` | an expression, which may be the question's own |
| `not 72`, `> 72`, `72?` | a denial, a bound, a doubt |

Two numbers are compared exactly, as they are written. A fraction must be reduced, so an unevaluated quotient of two
numbers of the question is wrong, and 72 is neither `144/2` nor `72%`. Numbers have at most 64 characters and are read
by regular expressions, so the comparison is fast, bounded, and works on any thread.
"""

import math
import re
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction


TAIL_CHARACTERS = 4096  # only the end of a completion is searched, so cost does not grow with length
NUMBER_CHARACTERS = 64  # longer than any number worth comparing
MAX_EXPONENT = 30  # 1e999999999 must not be expanded
TOOLS = ("tool", "function")  # roles of messages that the policy did not write
INSTRUCTING = ("system", "developer")
ASKING_WORDS = 4  # a user's message with fewer words and no question mark may be an answer: 12 square metres
# Units that may follow a number without a space, or that are a single letter
_UNITS = "mm|cm|km|m|kg|mg|g|ml|mL|l|L|oz|lb|lbs|ft|in|yd|mi|mph|kph|h|hr|hrs|min|s|sec|am|pm|AM|PM|st|nd|rd|th"

_INTEGER = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
_NUMBER = re.compile(
    # A sign counts only where it cannot be a minus between two terms: "10-7" holds 10 and 7, not -7.
    r"(?<![\w)])(?<!\d\.)(?P<sign>[-+]?\$[-+]?|[-+])?"
    rf"(?:(?P<numerator>{_INTEGER})\s?/\s?(?P<denominator>{_INTEGER})(?![\d/])(?!\.\d)"
    rf"|(?P<decimal>{_INTEGER}(?:\.\d+)?|(?<!\.)\.\d+)(?P<exponent>[eE][-+]?\d+)?)"
    r"(?:\s?(?P<percent>%))?"
)
_POWER = rf"(?:{_UNITS})(?![A-Za-z])(?:\^(?:\d|\{{\d\}})(?!\.?\d)|[²³⁴-⁹])?"  # of a unit
_UNIT = re.compile(rf"\s*{_POWER}(?:\s*/\s*{_POWER})*")  # cm^2, km/h
_LETTER = "[A-Za-z\u0370-\u03ff]"
# After a number, these turn it into another number or an expression: 72!, 72x, 72^2, 72_8, 72/x, 72½, 72⁴
_CONTINUED = re.compile(
    rf"\s?[!^_\\|}}²³¹⁰⁴-⁹₀-₉¼-¾⅐-⅞]|{_LETTER}|\s(?![aAI]){_LETTER}(?!{_LETTER})|\s?/\s?{_LETTER}(?!{_LETTER})"
)
_OPERATOR_AFTER = re.compile(r"\s?[+×·÷]")
# Before a number, these turn it into part of an expression or one of several candidates: 6*7, f(7), 5,6, 3 (or 4)
_OPERATOR_BEFORE = re.compile(
    r"(?:[+/^×·÷<>≠≤≥±|{√]|[\d)]\s*[-*]|\*\*|\\[A-Za-z]+|[A-Za-z*/^-]\(|\d,|\d\s*\(?\s*or\b)\s*$"
)
_NEGATIVE = re.compile(r"\b(?:negative|minus)\s*$", re.IGNORECASE)  # before a number: a sign that is not read
DENIAL = re.compile(r"\b(?:not|never|no|neither|nor)\b|n['’]t\b|\b(?:or|either)\b", re.IGNORECASE)
_OPERATION = re.compile(
    r"\b(?:plus|minus|twice|double|half|squared|cubed|factorial|sqrt|log|ln|exp|sin|cos|tan)\b", re.IGNORECASE
)
# These turn an equation's side into a relation, or the end of another equation: x \neq 5, a = 4, b
_SEVERAL = re.compile(r",(?!\d{3}(?!\d))|;|\band\b|[!?<>≠≤≥≈~±]|\\(?:ne|neq|not|approx|sim|pm|leq?|geq?|lt|gt)\b")
_VARIABLE = re.compile(rf"(?<!{_LETTER})(?![aAIghlLms]){_LETTER}(?!{_LETTER})")  # no article, pronoun or unit
# A side of an equation that contains unknowns, so that the last side is not its value: x + y = 5
_UNKNOWN = re.compile(rf"(?<!{_LETTER}){_LETTER}(?!{_LETTER}|\s+{_LETTER}{{2}})")
_OPERATED = re.compile(r"[-+*/^]|\\(?:frac|cdot|times|div|sqrt)")
# Words and the characters between them; operators, commands and brackets of expressions are excluded
_WORDS = re.compile(r"""(?:[^\W\d_]|[\s.,:;'"’()$€£¥₹¢&]|(?<=[^\W\d_])-(?=[^\W\d_]{2})|/(?=[^\W\d_]{2}))*""")
# A word of a question, but not of LaTeX or of a tag. In Chinese and Japanese each character counts as a word
_ASKING_WORD = re.compile(r"[\u3040-\u30ff\u4e00-\u9fff]|(?<![\\<\w])(?<!</)[^\W\d_]{2,}")
# A position inside a word, or inside a number with its sign, its separators and suffixes that change its value
_INSIDE = re.compile(r"(?<=\w)(?=\w)|(?<=\d[.,/])(?=\d)|(?<=\d)(?=[.,/]\d|[%^!])|(?<=[-−$.])(?=\d)")
_TAG = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_BOXED = re.compile(r"\\boxed\s*\{")
_HASHES = re.compile(r"####([^#\n]*)")
_FRACTION = r"\\[dtc]?frac\s*"
_TEXT = r"\\(?:text|mathrm|mathbf|textbf|textit|mbox)"
_REWRITES = (
    (re.compile("<<[^<>]*>>"), " "),  # GSM8K's notes for a calculator
    (re.compile(r"\\\\|\\(?:begin|end)\s*\{[^{}]*\}|\\q?quad\b"), " "),
    (re.compile(rf"(?<=\d)\s*(?={_FRACTION})"), " "),  # 3\frac12 holds two numbers
    (re.compile(rf"{_FRACTION}\{{\s*(-?\d+)\s*\}}\s*\{{\s*(\d+)\s*\}}(?!\s*\d)"), r"\1/\2"),
    (re.compile(rf"{_FRACTION}(\d)\s*(\d)(?!\s*\d)"), r"\1/\2"),
    (re.compile(rf"{_FRACTION}(\d)\s*\{{\s*(\d+)\s*\}}(?!\s*\d)"), r"\1/\2"),
    (re.compile(rf"{_FRACTION}\{{\s*(-?\d+)\s*\}}\s*(\d)(?!\s*\d)"), r"\1/\2"),
    # LaTeX's ways to write 1,234, and the spaces that are no end of a word
    (re.compile(r"(?<=\d)(?:\{,\}|\\,|,?\\!,?|[\u00a0\u2009\u202f])(?=\d{3})"), ","),
    (re.compile(rf"{_TEXT}\s*\{{([^{{}}\d]*)\}}\s*\^\s*(?:\d|\{{\d\}})"), r" \1 "),  # square metres
    (re.compile(rf"{_TEXT}\s*\{{([^{{}}]*)\}}"), r" \1 "),
    (re.compile(r"\\boxed\s*\{([^{}]*)\}"), r" \1 "),
    (re.compile(r"\s?\^\s*(?:\\circ|\{\s*\\circ\s*\})|°"), " degrees "),
    (re.compile(r"\\left|\\right|\\displaystyle|\\[()\[\]]"), ""),
    (re.compile(r"\\[,;:! ]|~"), " "),
    (re.compile(r"\\([$%])"), r"\1"),
    (re.compile(r"(?<=\d)\s?x\s?(?=[\d$])"), "*"),
    (re.compile("[\u2212\u2013]"), "-"),  # typographic minus and dash
    (re.compile(r"(?<!\d)\*\*|\*\*(?!\d)|`"), " "),  # Markdown
    (re.compile(r"\b([AaPp])\.\s?[Mm]\."), r"\1m"),
)


def message_text(completion: str | Sequence[dict] | None) -> str:
    """
    Returns the text of a plain completion, or of the last message of a conversational one, with text parts joined. If
    the last message is a tool's, as when the turns ran out, the policy gave no answer: returns an empty text.
    """
    if completion is None or isinstance(completion, str):
        return completion or ""
    return "" if not completion or completion[-1].get("role") in TOOLS else _content(completion[-1])


def _content(message: dict) -> str:
    content = message.get("content")
    if isinstance(content, str) or content is None:
        return content or ""
    return "".join(part if isinstance(part, str) else part.get("text") or "" for part in content)


def truth_text(answer) -> str:
    """Returns a ground truth as text: a number as written, the item of a list of one; empty for `None` and NaN."""
    if isinstance(answer, list) and len(answer) == 1:
        return truth_text(answer[0])
    return "" if answer is None or (isinstance(answer, float) and math.isnan(answer)) else str(answer)


def _messages(prompt: str | Sequence[dict] | None) -> list[dict]:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt or [])


def without_echo(text: str, prompt: str | Sequence[dict] | None) -> str:
    """
    Returns a completion's text without the parts that repeat a question of its prompt word for word. Copying a
    question, or an instruction that shows a marker, is not an answer.

    A message counts as an echo only if it cannot be the answer itself. Few-shot examples can be: the right answer may
    equal what the assistant said in an example (`#### 4`) or what a user sent (`4`, `3 + 4`, a grid). So the message
    must ask something, and must be repeated in full; nothing is removed inside a number or a word.
    """
    for question in sorted(filter(None, map(_question, _messages(prompt))), key=len, reverse=True):
        if question in text:
            text = re.sub(f"(?:{re.escape(question)})+", _unless_glued, text)
    return text


def _question(message: dict) -> str | None:
    """Returns the question in a message, stripped; `None` if it may be an answer: it is short or has another role."""
    text, role = _content(message).strip(), message.get("role")
    words = len(_ASKING_WORD.findall(text))
    asks = role == "user" and (words >= ASKING_WORDS or (words > 0 and text.endswith(("?", "？"))))
    return text if asks or (role in INSTRUCTING and words > 0) else None


def _unless_glued(echo: re.Match) -> str:
    glued = any(_INSIDE.match(echo.string, edge) for edge in echo.span())
    return echo.group() if glued else " "


def without_percent(number: str, prompt: str | Sequence[dict] | None) -> str:
    """Drops a canonical number's percent sign if the prompt speaks of percentages and so may ask for one."""
    asked = any("%" in text or "percent" in text.lower() for text in map(_content, _messages(prompt)))
    return number.removesuffix("%") if asked else number


def final_answer(completion: str | Sequence[dict] | None, prompt: str | Sequence[dict] | None = None) -> str | None:
    """Returns the content of the last marker of the strongest kind in the last `TAIL_CHARACTERS` characters."""
    marked = marked_answers(without_echo(message_text(completion), prompt)[-TAIL_CHARACTERS:])
    return marked[-1][0] if marked else None


def plain(text: str) -> str:
    """Removes LaTeX and Markdown around numbers and words: `\\text{72 clips}` -> `72 clips`."""
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    return text


def numbers(text: str) -> list[str | None]:
    """Lists the numbers of a text in canonical form (`1,234` -> `1234`, `1e3` -> `1000`), `None` if unreadable."""
    return [number for number, _, _ in _numbers(plain(text))]


def _numbers(text: str) -> list[tuple[str | None, str, str]]:
    """Lists the numbers of a plain text in canonical form, each with the text before it and the text after its unit."""
    found, end = [], 0
    while match := _NUMBER.search(text, end):
        unit = _UNIT.match(text, match.end())
        end = match.end() if unit is None else unit.end()
        number = None if _CONTINUED.match(text, end) else _canonical(match)
        found.append((number, text[: match.start()], text[end:]))
    return found


def _canonical(match: re.Match) -> str | None:
    if len(match.group()) > NUMBER_CHARACTERS:
        return None
    sign = "-" if "-" in (match["sign"] or "") else ""
    if match["numerator"]:
        top, bottom = (int(match[part].replace(",", "")) for part in ("numerator", "denominator"))
        percent = "%" if match["percent"] else ""
        return f"{sign}{top}/{bottom}{percent}" if bottom else None
    exponent = (match["exponent"] or "e0").lower()
    if abs(int(exponent[1:])) > MAX_EXPONENT:
        return None
    value = Decimal(match["decimal"].replace(",", "") + exponent)
    return f"{sign}{value:f}" + ("%" if match["percent"] else "")


def single_number(text: str) -> str | None:
    """Returns the number if `text`, or the last side of an equation, is one number and nothing else; else `None`."""
    *sides, last = plain(text).split("=")
    found = _numbers(re.sub(r"^\s*-\s+(?=[\d.$])", "-", last).strip(" *"))
    if len(found) != 1:
        return None
    number, *around = found[0]
    said = " ".join(around)
    expression = not all(map(_WORDS.fullmatch, around)) or re.search(r"[A-Za-z]\($", around[0])
    if expression or _VARIABLE.search(said) or _OPERATION.search(said) or DENIAL.search(said):
        return None
    if _NEGATIVE.search(around[0]) or _differ(sides, number) or any(map(_says_more, sides)):
        return None
    return number


def _says_more(side: str) -> bool:
    """Whether an equation's side is more than a name or a calculation: a relation, or an expression with unknowns."""
    in_unknowns = _UNKNOWN.search(side) and _OPERATED.search(side)
    return bool(in_unknowns or _SEVERAL.search(side) or DENIAL.search(side) or None in numbers(side))


def _differ(sides: list[str], number: str | None) -> bool:
    """Whether a side of an equation is itself a number other than `number`, as in `71 = 72`."""
    found = [_numbers(side.strip(" \n*$")) for side in sides]
    alone = [numbers_of[0][0] for numbers_of in found if len(numbers_of) == 1 and numbers_of[0][1:] == ("", "")]
    return any(None in (one, number) or _value(one) != _value(number) for one in alone)


def _last_number(text: str) -> str | None:
    """Returns the last number of a text, unless it is part of an expression, denied, or one of several candidates."""
    found = _numbers(plain(text))
    if not found:
        return None
    number, before, after = found[-1]
    *sides, last = before.rpartition("\n")[2].split("=")
    last_word = before.rstrip().rpartition(" ")[2]
    if DENIAL.fullmatch(last_word) or last_word.endswith(("n't", "n’t")):
        return None
    if _OPERATOR_BEFORE.search(before) or _NEGATIVE.search(before) or _OPERATOR_AFTER.match(after):
        return None
    return None if not last.strip() and _differ(sides[-2:], number) else number


def marked_answers(text: str) -> list[tuple[str, int]]:
    """Lists the contents of the strongest kind of marker in `text`: `(content, end of the marker)`, in order."""
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
            if text[end - 1] != "\\":  # \left\{ may have no counterpart
                depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                end += 1
                found.append((text[start.end() : end - 1], end))
                break
        else:
            break  # never closed, so no later box is either
    return found


def extract_answer(text: str, last_number: bool = True) -> str | None:
    """Returns the number that `text` commits to, in the order above.

    Args:
        text (`str`): a completion of any length; only its last `TAIL_CHARACTERS` characters are read.
        last_number (`bool`):
            if there is no marker, whether to take the last number of the text, or to require that the text is a single
            number or a single equation.

    Returns:
        `str | None`: a canonical number, such as `-7`, `12.50`, `3/4` or `50%`.
    """
    cut = len(text) > TAIL_CHARACTERS
    text = text[-TAIL_CHARACTERS:]
    marked = marked_answers(text)
    if marked:
        return single_number(marked[-1][0])
    if last_number:
        return _last_number(text)
    return None if cut or text.count("=") > 1 else single_number(text)


def same_number(gold: str, answer: str) -> bool:
    """Whether `answer` is the number `gold`, written as a whole number, a decimal or a reduced fraction.

    Both must be canonical. `50%` does not equal `50`, but if `gold` is `50%`, both are right.
    """
    if answer.endswith("%") and not gold.endswith("%"):
        return False
    top, _, bottom = answer.strip("-%").partition("/")
    reduced = not bottom or (int(bottom) > 1 and math.gcd(int(top), int(bottom)) == 1)
    return reduced and _value(gold) == _value(answer)


def _value(number: str) -> Fraction:
    """Returns the value of a canonical number without its percent sign."""
    return Fraction(number.removesuffix("%"))
