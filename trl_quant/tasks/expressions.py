r"""Decides whether two answers are mathematically equal, for training, where an expression that merely evaluates to the
answer must not be rewarded.

1. Where the ground truth is a number, the answer must be that number, written out ([`trl_quant.tasks.answers`]): a
   whole number, a decimal, a reduced fraction or a mixed number, but not `6 \cdot 7`, `10!` or `\binom{10}{3}`.
2. Tuples, intervals, sets, lists and matrices are compared part by part, each part by these rules.
3. Anything else counts as equal if both texts are the same after normalization, or if both values are equal, as in
   DeepScaleR's graders: `2\sqrt{3}` is `\sqrt{12}`, and `x^2+1` is `1+x^2`. Roots, powers and the four operations are
   evaluated, and so are functions (`\sin`, `\ln`) that the ground truth contains. Sums, integrals, factorials,
   binomials and words are not.

Values are computed with 50 digits and, if there are variables, at three points. Every text, exponent and value is
bounded, so that nothing hangs. This needs no timeout and works on any thread.
"""

import random
import re
from collections.abc import Iterator
from functools import cache
from math import gcd

from .answers import DENIAL, same_number, single_number


MAX_CHARACTERS = 512  # of an answer
MAX_PARTS = 32  # of a list
MAX_DEPTH = 20  # of brackets
MAX_DIGITS = 30  # of a number in an expression
MAX_POWER = 100  # of an exponent
MAX_BITS = 4000  # of a value before its point, and of zeros after it
DIGITS = 50  # that are computed
EQUAL_DIGITS = 40  # that agree in equal values
EVALUATION_POINTS = 3

_FUNCTIONS = {  # of LaTeX -> of mpmath
    **{name: name for name in ("sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "log", "exp")},
    **{"ln": "log", "arcsin": "asin", "arccos": "acos", "arctan": "atan"},
}
_GREEK = re.compile(
    r"\\(?:alpha|beta|[gG]amma|[dD]elta|(?:var)?epsilon|zeta|eta|(?:var)?theta|Theta|iota|kappa|[lL]ambda|mu|nu|[xX]i"
    r"|rho|[sS]igma|tau|upsilon|(?:var)?phi|Phi|chi|[pP]si|[oO]mega)"
)
_TEXT = r"\\(?:text|mathrm|mathbf|textbf|textit|textrm|mbox|operatorname)\s*"
_END = r"(?![A-Za-z])"  # of a command's name
_REWRITES = (
    # Layout
    (re.compile(r"\\\\"), r"\\newline "),
    (re.compile(rf"\\(?:left|right|displaystyle|[bB]igg?[lr]?){_END}|\\?\$|\\(?=%)|\\[()\[\]]|\*\*(?!\d)"), ""),
    (re.compile(r"\{,\}|,?\\!,?(?=\d{3})"), ","),
    (re.compile(rf"(?:\\[,;:! ]|\\q?quad{_END}|~|\s)+"), " "),
    (re.compile(rf"\s?\^\s*(?:\\circ{_END}|\{{\s*\\circ\s*\}})|\\degree{_END}|°"), ""),
    # Words
    (re.compile(rf"\s*(?:{_TEXT}\{{\s*(?:or|and)\s*\}}|(?<![\\\w])(?:or|and)\b)\s*"), ","),
    (
        re.compile(
            rf"(?<=[\d}})\]A-Za-z])\s*{_TEXT}\{{(?![^{{}}]*(?i:{DENIAL.pattern}))[^{{}}\d]*\}}"
            r"(?:\s*\^\s*(?:\d|\{\d\}))?\s*\.?$"
        ),
        "",
    ),  # a unit at the end
    (re.compile(rf"{_TEXT}\{{([^{{}}]*)\}}"), r"\1"),
    # Names of the same thing
    (re.compile("[\u2212\u2013]"), "-"),
    (re.compile("π"), r"\\pi "),
    (re.compile(r"\+?(?:∞|\\infty)"), r"\\infty "),
    (re.compile("∪"), r"\\cup "),
    (re.compile(r"√\s*(\d+|[A-Za-z])"), r"\\sqrt{\1}"),
    (re.compile("√"), r"\\sqrt"),
    (re.compile(rf"\\[dtc]frac{_END}"), r"\\frac"),
    (re.compile(rf"\\(?:cdot|times){_END}|[×·]"), "*"),
    (re.compile(rf"\\(le|ge|ne){_END}"), r"\\\1q"),
    (re.compile(r"\\varnothing"), r"\\emptyset"),
    # Arguments without braces
    (re.compile(r"(\\frac|\\sqrt)(?:\s*(?=\d)|\s+)(\w)"), r"\1{\2}"),
    (re.compile(r"(\\frac\s*\{[^{}]*\})\s*(\w)"), r"\1{\2}"),
    (re.compile(r"([\^_])\s*(\d+|[A-Za-z])"), r"\1{\2}"),
    # Spaces, except in 1 1/2, which is not 11/2, and in \pi r, which is not \pir
    (re.compile(r"(?<=\d) (?=\d)"), "\0"),
    (re.compile(r"(\\[A-Za-z]+) (?=[A-Za-z])"), "\\1\0"),
    (re.compile(r" |[.,;]\s*$"), ""),
    (re.compile("\0"), " "),
)
_MIXED = re.compile(r"(-?)(\d+)(?: (\d+)/(\d+)|\\frac\{(\d+)\}\{(\d+)\})")
_NAME = re.compile(
    r"(\([A-Za-z](?:,[A-Za-z])+\)|(?:[A-Za-z]+|\\(?!frac|sqrt)[A-Za-z]+)(?:_\{\w+\})?'*(?:\([^()=]*\))?)"
    rf"(?:=|\\in{_END} ?)(?=.)"
)
_WORD = re.compile(r"\(?([A-Za-z]+)\)?")
_MATRIX = re.compile(r"\\begin\{([pb]?matrix|array)\}(?:\{[lcr|]*\})?(.*)\\end\{\1\}")
_TOKEN = re.compile(r"(\d+(?:\.\d+)?|\.\d+|\\[A-Za-z]+|[A-Za-z]|[-+*/^_(){}\[\]])((?<=[A-Za-z]) )?")
_NOT_EVALUATED = re.compile(rf"\d\\frac\{{\d+\}}\{{\d+\}}|(?<![\\A-Za-z])[A-Za-z]{{3,}}|\d{{{MAX_DIGITS + 1}}}")


class NotEvaluated(ValueError):
    """Raised for an expression with operations that are not evaluated, or beyond the bounds."""


def same_answer(gold: str, answer: str) -> bool:
    """Whether two answers that are not numbers, in LaTeX or plain text, are the same by the rules above."""
    return len(answer) <= MAX_CHARACTERS and _same(written(gold), written(answer))


def literal(text: str) -> str | None:
    """Returns the written-out number of a text, in canonical form; mixed numbers become fractions."""
    mixed = _MIXED.fullmatch(written(text)) if len(text) <= MAX_CHARACTERS else None
    if mixed is None:
        return single_number(text)
    whole, top, bottom = (int(part) for part in mixed.groups()[1:] if part is not None)
    return f"{mixed[1]}{whole * bottom + top}/{bottom}" if 0 < top < bottom and gcd(top, bottom) == 1 else None


def written(text: str) -> str:
    """Normalizes a text to the notation in which texts are compared."""
    text = text.strip()
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    return text


def _same(gold: str, answer: str, depth: int = 0) -> bool:
    """As [`same_answer`], for normalized texts."""
    if gold == answer or _same_word(gold, answer):
        return True
    if depth > MAX_DEPTH:
        return False
    (kind, parts), (other_kind, others) = _parts(gold), _parts(answer)
    if "list" in (kind, other_kind):
        return kind == other_kind and _same_parts(kind, parts, others, depth)
    name, other_name = _NAME.match(gold), _NAME.match(answer)
    if name or other_name:
        named_alike = not (name and other_name) or name[1] == other_name[1]
        rests = (text[found.end() :] if found else text for text, found in ((gold, name), (answer, other_name)))
        return named_alike and _same(*rests, depth + 1)
    if kind or other_kind:
        return kind == other_kind and _same_parts(kind, parts, others, depth)
    number = literal(gold)
    if number is not None:
        found = literal(answer)
        return found is not None and same_number(number, found)
    return _same_value(gold, answer)


def _same_word(gold: str, answer: str) -> bool:
    words = [_WORD.fullmatch(text) for text in (gold, answer)]
    return all(words) and words[0][1].casefold() == words[1][1].casefold()


def _same_parts(kind: str, parts: list[str], others: list[str], depth: int) -> bool:
    if len(parts) != len(others) or len(parts) > MAX_PARTS:
        return False
    if kind not in ("list", "set", "union"):
        return all(_same(part, other, depth + 1) for part, other in zip(parts, others))
    left = list(others)
    for part in parts:  # in any order
        found = next((other for other in left if _same(part, other, depth + 1)), None)
        if found is None:
            return False
        left.remove(found)
    return True


def _parts(text: str) -> tuple[str, list[str]]:
    """Returns the kind of collection that a text is, and its parts; the kind is empty for any other text."""
    both = [signed for part in _split(text, ",") for signed in _signed(part)]
    if len(both) > 1:
        return "list", both
    united = _split(text, r"\\cup ?")
    if len(united) > 1:
        return "union", united
    matrix = _MATRIX.fullmatch(text)
    if matrix:
        rows = [row.split("&") for row in re.split(r"\\newline ?", matrix[2]) if row]
        return f"matrix of {[len(row) for row in rows]}", [entry for row in rows for entry in row]
    if text.startswith("\\{") and text.endswith("\\}") and _is_closed(text[2:-2]):
        return "set", _split(text[2:-2], ",")
    inner = text[1:-1]
    if text[:1] in ("(", "[") and text[-1:] in (")", "]") and _is_closed(inner) and len(_split(inner, ",")) > 1:
        return text[0] + text[-1], _split(inner, ",")
    return "", []


def _signed(text: str) -> list[str]:
    """Splits `3\\pm x` into `3+x` and `3-x`."""
    before, sign, after = text.partition("\\pm")
    if not sign:
        return [text]
    after = after.strip()
    return [f"{before}+{after}" if before else after, f"{before}-{after}"]


def _depths(text: str) -> Iterator[int]:
    """Yields the number of open brackets after each character."""
    depth = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        yield depth


def _is_closed(text: str) -> bool:
    depths = [0, *_depths(text)]
    return min(depths) == depths[-1] == 0


def _split(text: str, separator: str) -> list[str]:
    """Splits a text at the separators that are outside all brackets."""
    depths, parts, start = list(_depths(text)), [], 0
    for found in re.finditer(separator, text):
        if depths[found.start()] == 0:
            parts.append(text[start : found.start()])
            start = found.end()
    return [*parts, text[start:]]


# Values


@cache
def _mpmath():
    """An mpmath context of `DIGITS` digits, independent of the global precision."""
    from mpmath import mp  # imported here because sympy takes a while to load

    numbers = mp.clone()
    numbers.dps = DIGITS
    return numbers


def _same_value(gold: str, answer: str) -> bool:
    try:
        expected, found = _tokens(gold), _tokens(answer)
        functions = {token[1:] for token in expected if token[1:] in _FUNCTIONS}
        for point in range(EVALUATION_POINTS):
            a, b = (_Value(tokens, functions, point).read() for tokens in (expected, found))
            if not abs(a - b) <= max(abs(a), abs(b), 1) * _mpmath().mpf(10) ** -EQUAL_DIGITS:
                return False
        return True
    except (ValueError, ArithmeticError):  # `NotEvaluated`, a division by zero, or a value outside a function's domain
        return False


def _tokens(text: str) -> list[str]:
    found = list(_TOKEN.finditer(text))
    if _NOT_EVALUATED.search(text) or not text or "".join(match[0] for match in found) != text:
        raise NotEvaluated(text)
    return [match[1] for match in found]


class _Value:
    """Reads an expression's value at a point, where each variable has a value of its own.

    sum      = [sign] product, then + or - and a product, any number of times
    product  = power, then *, / or nothing and a power, any number of times
    power    = atom [^ argument]
    atom     = number, variable [_ argument], ( sum ), argument, \\frac argument argument, \\sqrt [ [sum] ] argument,
               function [_ argument] [^ argument] of an atom or of a product without functions
    argument = { sum }, or one digit, letter or command
    """

    def __init__(self, tokens: list[str], functions: set[str], point: int):
        self.tokens, self.functions, self.point = tokens, functions, point
        self.at, self.depth, self.mp = 0, 0, _mpmath()

    def read(self):
        value = self.sum()
        if self.next:
            raise NotEvaluated(self.next)
        return value

    @property
    def next(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self, *expected: str) -> str:
        token = self.next
        if not token or (expected and token not in expected):
            raise NotEvaluated(token)
        self.at += 1
        return token

    def bounded(self, value):
        if value and not abs(self.mp.mag(value)) <= MAX_BITS:
            raise NotEvaluated(value)
        return value

    def sum(self):
        sign = -1 if self.next in ("-", "+") and self.take() == "-" else 1
        total = sign * self.product()
        while self.next in ("+", "-"):
            sign = -1 if self.take() == "-" else 1
            total = self.bounded(total + sign * self.product())
        return total

    def product(self, functions: bool = True):
        total = self.power()
        while self.next in ("*", "/", "\\div") or self.starts_factor(functions):
            divides = self.next in ("/", "\\div")
            if self.next in ("*", "/", "\\div"):
                self.take()
            factor = self.power()
            total = self.bounded(total / factor if divides else total * factor)
        return total

    def starts_factor(self, functions: bool) -> bool:
        token, before = self.next, self.tokens[self.at - 1]
        if token[:1].isdigit() or token[:1] == ".":
            return not before[-1].isdigit()
        if token[1:] in _FUNCTIONS:
            return functions
        return token[:1].isalpha() or token == "(" or token[:1] == "\\"

    def power(self):
        base = self.atom()
        if self.next != "^":
            return base
        self.take()
        return self.raised(base, self.argument())

    def raised(self, base, exponent):
        if abs(exponent) > MAX_POWER:
            raise NotEvaluated(exponent)
        return self.bounded(base**exponent)

    def atom(self):
        token = self.take()
        if token[0].isdigit() or token[0] == ".":
            return self.mp.mpf(token)
        if token in ("(", "{"):
            return self.inner(")" if token == "(" else "}")
        if token == "\\frac":
            top = self.argument()
            return self.bounded(top / self.argument())
        if token == "\\sqrt":
            degree = 2
            if self.next == "[":
                self.take()
                degree = self.inner("]")
            return self.raised(self.argument(), 1 / self.mp.mpf(1) / degree)
        if token[1:] in self.functions:
            return self.function(token[1:])
        return self.variable(token)

    def inner(self, closing: str):
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise NotEvaluated(closing)
        value = self.sum()
        self.take(closing)
        self.depth -= 1
        return value

    def argument(self):
        if self.next in ("(", "{"):
            return self.inner(")" if self.take() == "(" else "}")
        token = self.next
        one_character = len(token) == 1 and token.isalnum()
        if not one_character and (token[:1] != "\\" or token in ("\\frac", "\\sqrt")):
            raise NotEvaluated(token)
        return self.atom()

    def function(self, name: str):
        base = power = None
        while self.next in ("_", "^"):
            if self.take() == "_":
                base = self.argument()
            else:
                power = self.argument()
        is_inverse = power is not None and not (self.mp.im(power) == 0 and self.mp.re(power) > 0)  # as in \sin^{-1}
        self.depth += 1
        if is_inverse or (base is not None and name != "log") or self.depth > MAX_DEPTH:
            raise NotEvaluated(name)
        value = self.atom() if self.next in ("(", "{") else self.product(functions=False)
        self.depth -= 1
        if name == "exp":
            return self.raised(self.mp.e, value)
        result = getattr(self.mp, _FUNCTIONS[name])(value) / (1 if base is None else self.mp.log(base))
        return self.bounded(result if power is None else self.raised(result, power))

    def variable(self, name: str):
        constants = {"\\pi": self.mp.pi, "e": self.mp.e, "i": self.mp.j}
        if name in constants:
            return +constants[name]
        if not name.isalpha() and not _GREEK.fullmatch(name):
            raise NotEvaluated(name)
        if self.next == "_":
            self.take()
            start = self.at
            self.argument()
            name += "_" + "".join(self.tokens[start : self.at]).strip("{}")
        drawn = random.Random(f"{name} {self.point}")
        sign = {0: 1, 1: -1}.get(self.point) or drawn.choice((1, -1))  # different at every point
        return self.mp.mpf(sign * drawn.uniform(0.5, 3))
