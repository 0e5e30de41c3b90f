"""README and the other pages, and what stands in them: blocks of code, names in backticks, commands."""

import re
import shlex

from places import ROOT


DOCS = ROOT / "docs"
TEXTS = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in (
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "benchmarks/README.md",
        *sorted(DOCS.glob("*.md")),
    )
}
README = TEXTS["README.md"]
# What tells how to use the package: README and the pages of the docs
MANUAL = "\n\n".join(text for name, text in TEXTS.items() if name == "README.md" or name.startswith("docs/"))


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def inline(text: str) -> list[str]:
    """What stands between single backticks."""
    return re.findall(r"`([^`\n]+(?:\n[^`\n]+)?)`", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))


def commands(text: str) -> list[list[str]]:
    """Every command line as words, without comments and without the variables that are set for it."""
    lines = [line for block in blocks(text, "bash") for line in block.replace("\\\n", " ").splitlines()]
    lines += re.findall(r"^    (python .*)$", text, re.MULTILINE) + inline(text)
    found = []
    for line in lines:
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # prose
            continue
        while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
            words = words[1:]
        if words:
            found.append(words)
    return found


def called(program: str, *first: str, text: str = MANUAL) -> list[list[str]]:
    """The arguments of the commands that begin so."""
    start = [program, *first]
    return [words[len(start) :] for words in commands(text) if words[: len(start)] == start]
