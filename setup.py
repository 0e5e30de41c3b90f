"""Builds the package. All but the description on PyPI stands in setup.cfg."""

import re
from configparser import ConfigParser
from pathlib import Path

from setuptools import setup


ROOT = Path(__file__).parent


def description(readme: str, url: str) -> str:
    """
    README as PyPI shows it, where no file stands beside it: links to files lead to the repository at `url`, and
    pictures are shown from there. Without an address links become the files' names, and pictures are left out.
    """

    def replaced(link: re.Match) -> str:
        picture, words, target = link.groups()
        if picture:
            return f"![{words}]({url}/raw/main/{target})" if url else ""
        if url:
            return f"[{words}]({url}/blob/main/{target})"
        return words if words == target else f"{words} (`{target}`)"

    return re.sub(r"(!?)\[([^\]]+)\]\((?!\w+:|#)([^)\s]+)\)", replaced, readme)


if __name__ == "__main__":
    config = ConfigParser()
    config.read(ROOT / "setup.cfg")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    setup(long_description=description(readme, config["metadata"].get("url", "")))
