"""README and the pages of `docs`: their links, what they quote, and the site that `make docs` builds of them."""

import ast
import dataclasses
import html
import importlib
import importlib.util
import json
import posixpath
import re
import runpy
import shutil
import subprocess
import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from pages import DOCS, ROOT, TEXTS, blocks
from places import TESTS

from trl_quant.config.fields import QuantFields


PUBLIC = ("corrections", "formats", "layers", "noise", "rollout", "scaling", "tasks")  # rooms of public names
FENCE = re.compile(r"^(```+).*?^\1", re.DOTALL | re.MULTILINE)


# Links


def links(markdown: str) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", markdown))


def headings(markdown: str) -> list[str]:
    return re.findall(r"^#{1,6} (.+?) *$", FENCE.sub("", markdown), re.MULTILINE)


def on_github(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def in_the_site(heading: str) -> str:
    """The anchor that mkdocs gives it."""
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip())


def wrong_links(texts: dict[str, str], exists) -> list[str]:
    """
    Links of pages, by their paths, that lead nowhere, in the repository or in the site.

    Args:
        texts (`dict[str, str]`): Path -> text of each page.
        exists: Whether a path of the repository exists.
    """
    found = []
    for name, text in texts.items():
        for link in links(text):
            parts = urlsplit(link)
            if parts.scheme:
                continue
            folder = posixpath.dirname(name)
            target = posixpath.normpath(posixpath.join(folder, unquote(parts.path))) if parts.path else name
            if not exists(target):
                found.append(f"{name}: {link}")
            elif parts.fragment and target.endswith(".md"):
                known = headings(texts[target])
                if not any(on_github(h) == in_the_site(h) == parts.fragment for h in known):
                    found.append(f"{name}: {link}")
    return found


def test_links_lead_somewhere():
    assert sum(map(len, map(links, TEXTS.values()))) > 100
    assert not wrong_links(TEXTS, lambda path: (ROOT / path).exists())


def test_a_broken_link_is_found():
    pages = {
        "README.md": "[a](docs/a.md) [b](docs/b.md) [there](docs/a.md#two-words) [not](docs/a.md#two-word) [x](https://x)",
        "docs/a.md": "# A\n\n## Two words\n\n## One -- dash\n\n```\n# no heading\n[none](none.md)\n```\n"
        "[up](../README.md) [out](../../README.md) [self](#a) [no](#no-heading) [unlike](#one-dash)",
    }
    assert wrong_links(pages, pages.__contains__) == [
        "README.md: docs/b.md",
        "README.md: docs/a.md#two-word",
        "docs/a.md: ../../README.md",
        "docs/a.md: #no-heading",
        "docs/a.md: #one-dash",  # which GitHub calls #one----dash
    ]


def test_every_page_is_linked_from_readme_and_listed_in_the_site():
    pages = {path.relative_to(ROOT).as_posix() for path in DOCS.glob("*.md")} - {"docs/api.md"}
    linked = {link.partition("#")[0] for link in links(TEXTS["README.md"])}
    assert pages and pages <= linked
    listed = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    assert not [path.name for path in DOCS.glob("*.md") if path.name not in listed]


def test_the_description_on_pypi_has_no_links_to_files():
    """README's relative links work on GitHub. On PyPI, where no file stands beside it, they would lead nowhere."""
    description = runpy.run_path(str(ROOT / "setup.py"), run_name="setup")["description"]
    address = "https://example.org/trl_quant"
    readme = "[Memory](docs/memory.md#a-b), [b.md](b.md), [c](https://c), [d](#d), `e`"
    assert description(readme, "") == "Memory (`docs/memory.md#a-b`), b.md, [c](https://c), [d](#d), `e`"
    assert description("a ![b c](docs/b.png).", "") == "a ."
    assert description("![b c](docs/b.png)", address) == f"![b c]({address}/raw/main/docs/b.png)"
    absolute = f"[Memory]({address}/blob/main/docs/memory.md#a-b), [b.md]({address}/blob/main/b.md)"
    assert description(readme, address) == f"{absolute}, [c](https://c), [d](#d), `e`"
    assert not [link for link in links(description(TEXTS["README.md"], "")) if "://" not in link]


# What pages quote


@cache
def messages() -> tuple[str, ...]:
    """The texts in the package's sources, with `…` for what an f-string or `%` fills in."""
    found = []
    for path in (ROOT / "trl_quant").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%[.\d]*[a-z]", "…", node.value).replace("%%", "%"))
    return tuple(found)


def is_said(quoted: str, texts) -> bool:
    """Whether a text has the parts of what is quoted, in their order; `…` stands for anything."""
    pattern = re.compile(".*".join(map(re.escape, quoted.split("…"))), re.DOTALL)
    return any(pattern.search(text) for text in texts)


def test_errors_are_quoted_as_they_are():
    text = TEXTS["docs/troubleshooting.md"].partition("\n## From other libraries")[0]
    quoted = [heading.strip("`") for heading in headings(text) if heading.startswith("`")]
    assert len(quoted) > 20
    assert not [words for words in quoted if not is_said(words, messages())]


def test_a_made_up_error_is_not_found():
    texts = ("`x`=… drops … of this batch's tokens", "other")
    assert is_said("drops … of this batch's tokens", texts) and is_said("drops … of", texts)
    assert not is_said("drops … of that batch's tokens", texts) and not is_said("other`x`", texts)


def names_of_rooms() -> dict[str, str]:
    """Public name -> its room. Those that lie about are found by their room's `__all__`."""
    import trl_quant

    names = dict.fromkeys(set(trl_quant.__all__) - {"__version__"}, "trl_quant")
    for room in PUBLIC:
        names |= dict.fromkeys(importlib.import_module(f"trl_quant.{room}").__all__, f"trl_quant.{room}")
    return names | {"PRECISIONS": "trl_quant.precisions"}


def test_the_api_page_asks_for_every_room():
    asked = re.findall(r"^::: (\S+)$", TEXTS["docs/api.md"], re.MULTILINE)
    for name, room in names_of_rooms().items():
        assert {f"{room}.*", f"{room}.{name}"} & set(asked), f"docs/api.md lacks {room}.{name}"
    statements = ast.parse((ROOT / "trl_quant/__init__.py").read_text()).body
    tables = (s.value for s in statements if isinstance(s, ast.Assign) and ast.unparse(s.targets[0]) == "_PUBLIC")
    lazy = ast.literal_eval(next(tables))
    for path in asked:
        module, _, name = path.removesuffix(".*").rpartition(".")
        place = importlib.import_module(f"trl_quant{lazy[name]}" if name in lazy else module)
        # The site is made by reading, which finds nothing that a module's `__getattr__` returns
        assert name in vars(place), f"docs/api.md asks for {path}, which does not exist"


# The site


class Page(HTMLParser):
    """Of a page of the site: the ids on it, its links, and what it loads."""

    def __init__(self, path: Path):
        super().__init__()
        self.ids, self.links, self.loaded = set(), [], []
        self.feed(path.read_text())

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.ids |= {given[name] for name in ("id", "name") if given.get(name)}
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        elif tag in ("link", "script", "img", "iframe"):
            self.loaded += [given[name] for name in ("href", "src") if given.get(name)]


def dead_ends(site: Path) -> list[str]:
    """Links between the pages of a site, and files that they load, that are not there."""
    pages = {path.resolve(): Page(path) for path in site.rglob("*.html") if path.name != "404.html"}
    found = []
    for path, page in pages.items():
        for link in [*page.links, *page.loaded]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file() or (
                parts.fragment and unquote(parts.fragment) not in pages[target].ids | {"__skip"}
            ):
                found.append(f"{path.relative_to(site.resolve())}: {link}")
    return found


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The site as `make docs` builds it, with the mkdocs of `.venv-docs` or the one that is installed here."""
    own = ROOT / ".venv-docs/bin/python"
    if own.is_file():
        python = str(own)
    elif importlib.util.find_spec("mkdocs") and importlib.util.find_spec("mkdocstrings"):
        python = sys.executable
    else:
        pytest.skip("mkdocs is not installed: `make docs` installs it")
    target = tmp_path_factory.mktemp("site")
    command = [python, "-m", "mkdocs", "build", "--strict", "--site-dir", str(target)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return target


def test_the_site_has_no_dead_ends(site):
    assert len(list(site.rglob("*.html"))) > 20
    assert not dead_ends(site)


def test_a_dead_end_is_found(tmp_path):
    (tmp_path / "a.html").write_text(
        '<h1 id="one">One</h1><a href="#one">1</a><a href="#two">2</a><a href="b.html#x">x</a><a href="b.html#y">y</a>'
        '<a href="c.html">c</a><a href="https://example.org/none">w</a><script src="none.js"></script>'
    )
    (tmp_path / "b.html").write_text('<p id="x">x</p>')
    assert dead_ends(tmp_path) == ["a.html: #two", "a.html: b.html#y", "a.html: c.html", "a.html: none.js"]


def test_the_site_loads_nothing_from_elsewhere(site):
    """Fonts, scripts and the search are its own."""
    for path in site.rglob("*.html"):
        page = Page(path)
        assert not [link for link in page.loaded if urlsplit(link).netloc], path
    styles = "".join(path.read_text() for path in site.rglob("*.css"))
    assert not re.findall(r"(?:@import|url\()\s*[\"']?(?:https?:)?//[^\s)]+", styles)


def test_the_site_has_every_public_name(site):
    ids = Page(site / "api.html").ids
    named = {id.rpartition(".")[2] for id in ids if id.startswith("trl_quant.")}
    assert not names_of_rooms().keys() - named
    config = (site / "api.html").read_text()
    assert "rollout_precision" in config and "[<code>" not in config and "`, *optional*" not in config


def test_the_site_describes_every_field(site):
    """With its type, without the range that is annotated, its default and its help."""
    ids, text = Page(site / "api.html").ids, (site / "api.html").read_text()
    for f in dataclasses.fields(QuantFields):
        assert f.name in ids
        described = html.unescape(text.partition(f'id="{f.name}"')[2].partition("<h5")[0])
        words = re.sub(r"</?(code|p)>", "", described)
        help = f.metadata["help"].replace("`", "").partition("*")[0]
        assert f"default {f.default!r}" in words and help in words
        assert "Annotated" not in words and "Seconds |" not in words
    assert "<code>float | None</code>, default <code>1800.0</code>" in text.partition('id="reward_timeout"')[2][:400]


def test_the_search_knows_the_pages(site):
    entries = json.loads((site / "search/search_index.json").read_text())["docs"]
    text = {entry["location"].partition("#")[0]: "" for entry in entries}
    for entry in entries:
        text[entry["location"].partition("#")[0]] += f"{entry['title']} {entry['text']}"
    assert "dropped_fraction" in text["metrics.html"] and "quantized rollouts need vLLM" in text["troubleshooting.html"]
    assert not [location for location in text if location.startswith("source/")]


def searched(site: Path, *queries: str) -> dict[str, list[str]]:
    """Query -> the places that the site's own search finds, run by node as on a page that a disk has."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    command = [node, str(TESTS / "pages/search.js"), str(site), *queries]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def test_the_search_finds_names(site):
    """
    Names with underscores are words of their own, also behind the slash of a metric and between the signs of code.
    Without the separator of mkdocs.yml, those behind a slash are not found.
    """
    index = json.loads((site / "search/search_index.json").read_text())
    separator = re.compile(index["config"]["separator"])
    words = {word for entry in index["docs"] for word in separator.split(entry["title"] + " " + entry["text"])}
    names = ["rollout_precision", "kl_k3", "ess_ratio", "explained_variance", "update_cosine", "QuantGRPOTrainer"]
    names += [f.name for f in dataclasses.fields(QuantFields)]
    assert not [name for name in names if name not in words]
    assert "ess_ratio" not in re.split(r"[\s\-]+", (site / "metrics.html").read_text())
    found = searched(site, *names, "no_such_name")
    assert not [name for name in names if not found[name]] and found["no_such_name"] == []
    assert found["rollout_precision"][0] == "api.html#rollout_precision"
    assert "metrics.html#the-four-that-matter-most" in found["ess_ratio"]


def test_the_search_starts_from_a_disk(site):
    """Browsers read no JSON from a disk and start no worker there: the index is a script, and a frame is the worker."""
    index = (site / "search/search_index.json").read_text()
    assert (site / "search/search_index.js").read_text() == f"var __index = {index}"
    pages = 0
    for path in site.rglob("*.html"):
        scripts = re.findall(r'<script src="([^"]+)"', path.read_text())
        names = [posixpath.basename(script) for script in scripts]
        bundles = [number for number, name in enumerate(names) if name.startswith("bundle.")]
        if bundles:  # others are files that a page links to
            pages += 1
            assert names.index("iframe-worker.js") < bundles[0], path
    assert pages > 20


# Scripts


def test_scripts_of_the_recipes_run(tmp_path, monkeypatch):
    """Those that need neither a GPU nor the hub, as they stand."""
    scripts = [script for script in blocks(TEXTS["docs/recipes.md"], "python") if "examples/arithmetic_model" in script]
    assert len(scripts) == 2
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    for script in scripts:
        (tmp_path / "script.py").write_text(script)
        trainer = runpy.run_path(str(tmp_path / "script.py"))["trainer"]
        assert trainer.state.global_step == 2
        assert trainer.state.log_history[-1]["train_loss"] is not None


def test_other_scripts_compile():
    for name, text in TEXTS.items():
        for script in blocks(text, "python"):
            compile(script, name, "exec")
