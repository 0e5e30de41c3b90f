"""Writes the report as one HTML file, light and dark, also for phones and screen readers. It loads no other file."""

import html
import io
import re
from collections.abc import Sequence

import matplotlib
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from .. import __version__
from .findings import findings, short, verdict
from .panels import COLORS, Panel, color_of, draw, logged, marker_of
from .runs import ENDS, Group, Run, differences, grouped
from .speed import HEADER as SPEED_HEADER
from .speed import speed_rows
from .table import HEADER, row
from .terminal import printable


STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --card: #f6f8fa; LIGHT }
@media (prefers-color-scheme: dark) { :root { --paper: #14181d; --card: #1c2229; DARK } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 1rem/1.5 system-ui, sans-serif; }
main { max-width: 100rem; margin: 0 auto; padding: 1rem clamp(0.75rem, 3vw, 2.5rem) 3rem; }
h1, h2, h3 { line-height: 1.25; margin: 0; font-weight: 600; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin: 2rem 0 0.75rem; } h3 { font-size: 1rem; }
p, ul { margin: 0.25rem 0; } ul { padding-left: 1.25rem; }
.muted, figcaption p { color: var(--muted); font-size: 0.875rem; }
.cards { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fill, minmax(min(100%, 21rem), 1fr)); }
.cards > * { background: var(--card); border: 1px solid var(--grid); border-radius: 0.5rem; padding: 0.75rem 1rem;
  margin: 0; min-width: 0; overflow-wrap: anywhere; }
figure { display: flex; flex-direction: column; justify-content: space-between; }
figure svg { width: 100%; height: auto; display: block; }
.key { display: inline-block; width: 2rem; height: 0.75rem; vertical-align: baseline; margin-right: 0.4rem; }
.legend { display: flex; flex-wrap: wrap; gap: 0.25rem 1.5rem; list-style: none; margin: 2rem 0 0; padding: 0.5rem 0;
  position: sticky; top: 0; z-index: 1; background: var(--paper); border-bottom: 1px solid var(--grid); }
.wide { overflow-x: auto; }
.wide:focus-visible { outline: 2px solid var(--s0); }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; white-space: nowrap; }
caption { text-align: left; color: var(--muted); font-size: 0.875rem; }
th, td { padding: 0.3rem 0.9rem 0.3rem 0; text-align: right; border-bottom: 1px solid var(--grid); }
th:first-child, th:last-child, td:last-child { text-align: left; }
@media (max-width: 40rem) { .legend { position: static; } }
@media print { .legend { position: static; } .cards > * { break-inside: avoid; } }
"""
BANDS = "Lines are moving averages, over the runs that came so far; a band is the range of a setting's runs."
RAW = "Lines are moving averages; faint lines are the logged values."
SPEED_CAPTION = (
    "Means over all logged steps but the first. A ratio above 1 means faster than the first run that logged it."
)
SIZE = (4.4, 2.8)  # inches of a panel; the page scales it to the width of its card


def page(runs: Sequence[Run]) -> str:
    """Returns the whole file."""
    groups = grouped(runs)
    topics = logged(groups)
    seeds = f" of {_count(len(groups), 'setting')}" if len(groups) < len(runs) else ""
    parts = [
        f"<header><h1>Training report</h1><p class=muted>{_count(len(runs), 'run')}{seeds}, by trl_quant "
        f"{escape(__version__)}</p></header>",
        "<section aria-labelledby=speed><h2 id=speed>Speed</h2>",
        _table(SPEED_CAPTION, SPEED_HEADER, speed_rows(runs)),
        "</section>",
        "<section aria-labelledby=findings><h2 id=findings>Findings</h2><div class=cards>",
        *(_findings(i, group) for i, group in enumerate(groups)),
        "</div></section>",
        "<section aria-labelledby=runs><h2 id=runs>Runs</h2>",
        _table(
            f"Rewards and the last KL are means over {ENDS} logged steps; over a quarter of fewer than {4 * ENDS}.",
            HEADER,
            [row(run) for run in runs],
        ),
        "</section>",
    ]
    differing = differences(groups)
    if differing:
        values = [[name, *map(_setting, row)] for name, row in differing.items()]
        table = _table("Recorded settings that are not the same everywhere.", ["setting", *_names(groups)], values)
        parts += ["<section aria-labelledby=settings><h2 id=settings>What differs</h2>", table, "</section>"]
    if topics:
        keys = "".join(f"<li>{_called(i, group, 'legend')}{_seeds(group)}</li>" for i, group in enumerate(groups))
        note = BANDS if seeds else RAW
        parts += [f"<ul class=legend aria-label='Lines of all charts'>{keys}</ul><p class=muted>{note}</p>"]
    for topic, panels in topics.items():
        figures = "".join(_figure(panel, groups, f"p-{_slug(topic)}-{i}") for i, panel in enumerate(panels))
        parts.append(
            f"<section aria-labelledby=t-{_slug(topic)}><h2 id=t-{_slug(topic)}>{escape(topic)}</h2>"
            f"<div class=cards>{figures}</div></section>"
        )
    light, dark = (" ".join(f"{name}: {pair[i]};" for name, pair in COLORS.items()) for i in (0, 1))
    title = "Training report: " + ", ".join(_names(groups))
    return (
        "<!DOCTYPE html>\n<html lang=en><head><meta charset=utf-8><meta name=viewport "
        f"content='width=device-width, initial-scale=1'><title>{escape(title)}</title>"
        f"<style>{STYLE.replace('LIGHT', light).replace('DARK', dark)}</style></head>\n<body><main>\n"
        + "\n".join(parts)
        + "\n</main></body></html>\n"
    )


def _findings(i: int, group: Group) -> str:
    found = findings(group)
    text = (
        f"<ul>{''.join(f'<li>{_prose(x)}</li>' for x in found)}</ul>" if found else f"<p>{_prose(verdict(group))}</p>"
    )
    status = ", ".join(dict.fromkeys(run.status for run in group.runs))
    head = f"<h3>{_called(i, group, 'finding')}</h3><p class=muted>{escape(status)}{_seeds(group)}</p>"
    return f"<article>{head}{text}</article>"


def _prose(text: str) -> str:
    """Turns names in backticks into HTML code elements."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def _table(caption: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th scope=col>{escape(name)}</th>" for name in header)
    body = "".join(
        f"<tr><th scope=row>{escape(name)}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"
        for name, *cells in rows
    )
    # Scrolls on its own on a narrow screen, also with the keyboard
    return (
        f"<div class=wide tabindex=0 role=region aria-label='{escape(caption)}'><table>"
        f"<caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _figure(panel: Panel, groups: Sequence[Group], name: str) -> str:
    figure = Figure(figsize=SIZE, layout="constrained")
    axis = figure.subplots()
    draw(axis, panel, groups)
    label = (
        f"<title id={name}>{escape(panel.title)}</title><desc id={name}-d>{escape(_described(panel, groups))}</desc>"
    )
    svg = themed_svg(figure, name).replace(">", f" role=img aria-labelledby='{name} {name}-d'>{label}", 1)
    note = f"<p>{_prose(panel.note)}</p>"
    return f"<figure><figcaption><h3>{escape(panel.title)}</h3>{note}</figcaption>{svg}</figure>"


def _described(panel: Panel, groups: Sequence[Group]) -> str:
    """Describes a picture in words: where each line starts and ends."""
    parts = []
    for label, metric in panel.metrics([run for group in groups for run in group.runs]).items():
        for group in groups:
            _, mean, _, _ = group.band(metric, panel.smooth)
            if mean:
                first, last = (short(panel.scale * value) for value in (mean[0], mean[-1]))
                parts.append(f"{group.name}, {label}: {first} to {last}.")
    return f"In {panel.unit}. " + " ".join(parts)


def themed_svg(figure: Figure, salt: str) -> str:
    """Returns a figure as inline SVG. Text stays text, colours are the page's variables, and every id is unique."""
    file = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt}):
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    svg = file.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r"<[^>]*>", lambda tag: _themed_tag(tag[0]), svg)  # text between tags stays unchanged
    return re.sub(r"\s+", " ", svg).strip()


def _themed_tag(tag: str) -> str:
    tag = re.sub(r'<svg[^>]*(viewBox="[^"]*")[^>]*>', r"<svg \1>", tag)
    tag = re.sub(r'<g id="[^"]*"', "<g", tag)
    # Rounds paths of thousands of points to a tenth of a point
    tag = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(?<=\.\d)\d+", "", path[0]), tag)
    tag = re.sub(r"'DejaVu Sans'[^;\"]*", "system-ui, sans-serif", tag)
    for variable, (light, _) in COLORS.items():
        tag = tag.replace(light, f"var({variable})")
    return tag


def escape(text: str) -> str:
    """Escapes text as HTML. All text from a run passes through here."""
    return html.escape(printable(text))


def _called(i: int, group: Group, place: str) -> str:
    """Returns a setting's name after a sample of its line, for one place in the page."""
    figure = Figure(figsize=(0.44, 0.17))
    look = {"color": color_of(i), "marker": marker_of(i), "markevery": [1], "markersize": 5}
    figure.add_artist(Line2D([0.05, 0.5, 0.95], [0.5] * 3, **look))
    key = themed_svg(figure, f"{place}-{i}").replace("<svg", "<svg class=key aria-hidden=true", 1)
    return f"{key}{escape(group.name)}"


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'s' * (n != 1)}"


def _seeds(group: Group) -> str:
    return f" ({_count(len(group.runs), 'run')})" if len(group.runs) > 1 else ""


def _names(groups: Sequence[Group]) -> list[str]:
    return [group.name for group in groups]


def _setting(value) -> str:
    return "–" if value is None else str(value)


def _slug(text: str) -> str:
    return re.sub(r"\W+", "-", text.lower())
