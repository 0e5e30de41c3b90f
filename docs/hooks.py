"""Brings what stands outside of `docs` into the site: README as its first page, and every file that a page links to.

Links are written as they work in the repository, relative to the page's own file. In the site each leads to another
page, or to a copy of the file: text is shown on a page of its own, and everything else is copied as it is.
"""

import ast
import json
import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File


ROOT = Path(__file__).parents[1]
# Pages of the site that lie elsewhere in the repository -> their place in the site
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "benchmarks/README.md": "benchmarks/README.md",
}
LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".cff": "yaml", ".cfg": "ini", ".toml": "toml"}
TEXT = {*LANGUAGES, ".txt", ""}  # a license has no suffix
FIELDS = "<!-- the fields that this package adds -->"  # a line of a page, in the place of which they are described
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")


def source_of(place: str) -> str:
    """The file in the repository of a page of the site."""
    return next((source for source, page in PAGES.items() if page == place), f"docs/{place}")


def place_of(source: str) -> str:
    """Where a file of the repository stands in the site."""
    if source in PAGES:
        return PAGES[source]
    if source.startswith("docs/"):
        return source.removeprefix("docs/")
    return f"source/{source}.md" if Path(source).suffix in TEXT else f"source/{source}"


def linked(markdown: str, source: str) -> list[str]:
    """The files of the repository that a page links to."""
    folder = posixpath.dirname(source)
    return [posixpath.normpath(posixpath.join(folder, link[1])) for link in LINK.finditer(markdown)]


def in_the_site(markdown: str, source: str) -> str:
    """A page's text with its links as they work in the site; of a folder, which has no page, the words alone stay."""
    here = posixpath.dirname(place_of(source))

    def rewritten(match: re.Match) -> str:
        (target,) = linked(f"]({match[1]})", source)
        return posixpath.relpath(place_of(target), here or ".") + (match[2] or "")

    def without_folders(match: re.Match) -> str:
        targets = linked(match[0], source)
        return match[1] if targets and (ROOT / targets[0]).is_dir() else match[0]

    markdown = re.sub(r"\[([^\]]*)\]\([^)\s]+\)", without_folders, markdown)
    return LINK.sub(rewritten, markdown)


def assigned(package: str, name: str) -> ast.expr | None:
    """What a package's `__init__.py` assigns to a name."""
    path = ROOT.joinpath(*package.split("."), "__init__.py")
    statements = ast.parse(path.read_text()).body if path.is_file() else []
    values = [s.value for s in statements if isinstance(s, ast.Assign) and ast.unparse(s.targets[0]) == name]
    return values[0] if values else None


def lazy_names(package: str) -> dict[str, str]:
    """Name -> module of what a package loads when it is asked for, from its table `_PUBLIC`."""
    table = assigned(package, "_PUBLIC")
    return {} if table is None else {name: package + module for name, module in ast.literal_eval(table).items()}


def public_names(package: str) -> list[str]:
    """The names in a package's `__all__`, where `*_PUBLIC` stands for those of that table."""
    names = []
    for element in assigned(package, "__all__").elts:
        names += lazy_names(package) if isinstance(element, ast.Starred) else [ast.literal_eval(element)]
    return names


def every_public_name(match: re.Match) -> str:
    """One block of mkdocstrings for each public name of `::: package.*`, with the options below it."""
    package, options = match[1], match[2] or ""
    return "\n\n".join(f"::: {package}.{name}\n{options}" for name in public_names(package))


def where_it_is_defined(match: re.Match) -> str:
    """`::: package.Name`, with the module in place of a package that loads the name lazily: mkdocstrings only reads."""
    package, _, name = match[1].rpartition(".")
    module = lazy_names(package).get(name)
    return f"::: {match[1] if module is None else f'{module}.{name}'}"


def field_types() -> dict[str, str]:
    """Type of each field of the configurations, read from their sources. Ranges (`Annotated`) are left out."""
    types, names = {}, {}
    for file in ("fields.py", "grpo.py"):
        tree = ast.parse((ROOT / "trl_quant/config" / file).read_text())
        for statement in tree.body:
            if isinstance(statement, ast.Assign):
                names[ast.unparse(statement.targets[0])] = statement.value
        for statement in ast.walk(tree):
            if isinstance(statement, ast.AnnAssign):
                annotation = names.get(ast.unparse(statement.annotation), statement.annotation)
                if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "Annotated":
                    annotation = annotation.slice.elts[0]
                types[ast.unparse(statement.target)] = ast.unparse(annotation)
    return types


def described_fields() -> str:
    """Type, default and help of each field that this package adds to TRL's configurations, section by section."""
    types, lines = field_types(), []
    options = json.loads((ROOT / "trl_quant/cli/options.json").read_text())["train"]["grpo"]
    for title, section in options.items():
        described = {name: option for name, option in section.items() if name in types}  # others are the command's
        if described:
            lines += [f"#### Fields: {title}", ""]
        for name, option in described.items():
            lines += [f"##### {name}", "", f"`{types[name]}`, default `{option['default']!r}`", "", option["help"], ""]
    return "\n".join(lines)


def on_files(files, config):
    """Adds the pages that lie elsewhere, and what all pages link to."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    found = {
        target
        for page in files.documentation_pages()
        for target in linked(page.content_string, source_of(page.src_uri))
        if not target.startswith("docs/") and target not in PAGES and (ROOT / target).is_file()
    }
    for target in sorted(found):
        path = ROOT / target
        if path.suffix in TEXT:
            text = f"# {target}\n\n````{LANGUAGES.get(path.suffix, 'text')}\n{path.read_text()}\n````\n"
            files.append(File.generated(config, place_of(target), content=text))
        else:
            files.append(File.generated(config, place_of(target), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown, page, config, files):
    """Rewrites a page's links, but not in what is shown of a file."""
    if page.file.src_uri.startswith("source/"):
        page.meta["search"] = {"exclude": True}
        return markdown
    markdown = re.sub(r"^::: (\S+)\.\*\n( +options: .*\n)?", every_public_name, markdown, flags=re.MULTILINE)
    markdown = markdown.replace(FIELDS, described_fields())
    markdown = re.sub(r"^::: (\S+)$", where_it_is_defined, markdown, flags=re.MULTILINE)
    return in_the_site(markdown, source_of(page.file.src_uri))


def on_page_content(html, page, config, files):
    """Writes what docstrings have in transformers' manner as plain code: `[`~room.Name`]`, and types with backticks."""
    html = re.sub(r"\[<code>~?([\w.]+)</code>\]", r"<code>\1</code>", html)
    of_a_type = re.compile(r"<code>(\[?`[^<]*)</code>")
    return of_a_type.sub(lambda match: f"<code>{plain_type(match[1])}</code>", html)


def plain_type(text: str) -> str:
    """Makes `str, optional` of "`str`, *optional*, defaults to ...", and `Scheme` of "[`Scheme`]"."""
    text = re.sub(r"\[`~?([\w.]+)`\]", r"\1", text)  # brackets of a link; those of `tuple[...]` stay
    return re.sub(r", defaults to .*|[`*]", "", text)
