"""Pieces of HTML: the page with its style, tables, pictures. All inputs are escaped."""

from __future__ import annotations

import base64
import html
import itertools
from collections.abc import Iterable, Sequence

from kvsieve.report.pictures import Picture
from kvsieve.report.tables import Table

_CSS = """
:root { color-scheme: light dark; --ink: #1d2127; --quiet: #5b6470; --paper: #ffffff; --shade: #f4f5f7;
  --line: #d9dde3; --mark: #0b5cad; --warn: #fff4d6; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --quiet: #a3abb6; --paper: #16191d; --shade: #21262c;
  --line: #39414a; --mark: #7fb8f0; --warn: #41370f; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, -apple-system, "Segoe UI",
  Roboto, "DejaVu Sans", sans-serif; }
header, main, footer { max-width: 1160px; margin: 0 auto; padding: 0 1.25rem; }
header { padding-top: 1.5rem; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 .5rem; overflow-wrap: anywhere; }
h2 { font-size: 1.3rem; margin: 2.5rem 0 .5rem; padding-top: .75rem; border-top: 1px solid var(--line); }
h3 { font-size: 1.05rem; margin: 1.5rem 0 .4rem; }
p, ul, dl { margin: .5rem 0; max-width: 75ch; }
nav ul { display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; list-style: none; padding: 0; max-width: none; }
a { color: var(--mark); }
.quiet { color: var(--quiet); font-size: .9rem; }
.warn { background: var(--warn); padding: .6rem .9rem; border-radius: 6px; max-width: none; }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; margin: .6rem 0; }
table { border-collapse: collapse; font-size: .875rem; width: 100%; }
caption { text-align: left; padding: .5rem .7rem; font-weight: 600; }
th, td { padding: .35rem .7rem; text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap;
  border-top: 1px solid var(--line); }
thead th { background: var(--shade); vertical-align: bottom; white-space: normal; min-width: 5.2rem; }
.name, tbody th { text-align: left; font-weight: 400; white-space: normal; overflow-wrap: anywhere; }
tbody > tr > * { vertical-align: baseline; }
.label { min-width: 11rem; }
.fact { min-width: 8rem; }
td.text { text-align: left; white-space: pre-wrap; overflow-wrap: anywhere; }
td.long { min-width: 20rem; }
tbody tr:hover > :not(.label) { background: var(--shade); }
strong { font-weight: 700; }
figure { margin: 1rem 0; background: #ffffff; color: #1d2127; border: 1px solid var(--line); border-radius: 6px;
  padding: .75rem; overflow-x: auto; }
figure img { display: block; height: auto; max-width: 100%; min-width: min(100%, 320px); margin: 0 auto; }
figcaption { font-weight: 600; font-size: .95rem; margin-bottom: .5rem; }
details { margin: .6rem 0; }
summary { cursor: pointer; color: var(--mark); }
dt { font-weight: 600; margin-top: .5rem; }
dd { margin: 0 0 0 1.2rem; }
footer { padding: 2rem 1.25rem; }
@media (max-width: 700px) { figure img { min-width: 760px; } .label { min-width: 8rem; } }
@media print { .scroll, figure { overflow: visible; break-inside: avoid; } }
"""

# Characters not allowed in HTML, and their replacement, Unicode's "not a character".
_UNPRINTABLE = dict.fromkeys([*range(9), 11, *range(14, 32), 127], "\ufffd")


def text(value: object) -> str:
    return html.escape(str(value).translate(_UNPRINTABLE))


def page(
    title: str,
    sections: Sequence[tuple[str, str, str]],
    intro: str,
    *,
    style: str = "",
    end: str = "",
    made_by: str = "kvsieve report",
) -> str:
    """Return a complete page, which needs no network.

    Args:
        title: the page's heading.
        sections: (id, heading, HTML) of each.
        intro: HTML above the sections.
        style: additional CSS.
        end: HTML at the end of the page.
        made_by: the command that made it.
    """
    links = "".join(f'<li><a href="#{name}">{text(heading)}</a></li>' for name, heading, _ in sections)
    body = "\n".join(
        f'<section id="{name}" aria-labelledby="{name}-heading">\n'
        f'<h2 id="{name}-heading">{text(heading)}</h2>\n{content}\n</section>'
        for name, heading, content in sections
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<link rel="icon" href="data:,">\n<title>{text(title)}</title>\n<style>{_CSS}{style}</style>\n</head>\n'
        "<body>\n"
        f'<header>\n<h1>{text(title)}</h1>\n{intro}\n<nav aria-label="Sections"><ul>{links}</ul></nav>\n</header>\n'
        f'<main>\n{body}\n</main>\n<footer class="quiet">Made by <code>{text(made_by)}</code>.</footer>\n'
        f"{end}</body>\n</html>\n"
    )


def paragraph(content: str, kind: str = "") -> str:
    return f'<p class="{kind}">{text(content)}</p>' if kind else f"<p>{text(content)}</p>"


def table(data: Table, name: str = "") -> str:
    """Return a table as HTML. name: the element's id."""
    heads = "".join(
        f'<th scope="col" class="{"name" if index < data.names else "number"}">{text(header)}</th>'
        for index, header in enumerate(data.headers)
    )
    rows = "\n".join(f"<tr>{_row(data, index)}</tr>" for index in range(len(data.rows)))
    note = paragraph(data.note, "quiet") if data.note else ""
    identity = f' id="{name}"' if name else ""
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{text(data.title)}"><table{identity}>'
        f"<caption>{text(data.title)}</caption>\n<thead><tr>{heads}</tr></thead>\n<tbody>{rows}</tbody></table></div>\n{note}"
    )


def _row(data: Table, number: int) -> str:
    """Return a row of the table; a method's name spans all its budgets."""
    row = data.rows[number]
    parts = []
    for index, entry in enumerate(row):
        content = f"<strong>{text(entry.text)}</strong>" if entry.best else text(entry.text)
        if index >= data.names:
            parts.append(f"<td>{content}</td>")
        elif index:
            parts.append(f'<th scope="row">{content}</th>')
        elif number == 0 or data.rows[number - 1][0] != entry:
            names = (cells[0] for cells in data.rows[number:])
            below = len(list(itertools.takewhile(entry.__eq__, names)))
            scope = "rowgroup" if below > 1 else "row"
            parts.append(f'<th scope="{scope}" rowspan="{below}" class="label">{content}</th>')
    return "".join(parts)


def text_table(title: str, headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    heads = "".join(f'<th scope="col" class="name">{text(header)}</th>' for header in headers)
    lines = "\n".join(f"<tr>{_text_row(row)}</tr>" for row in rows)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{text(title)}"><table>'
        f"<caption>{text(title)}</caption>\n<thead><tr>{heads}</tr></thead>\n<tbody>{lines}</tbody></table></div>"
    )


def _text_row(row: Sequence[str]) -> str:
    kinds = ["text long" if len(cell) > 40 else "text" for cell in row]
    rest = (f'<td class="{kind}">{text(cell)}</td>' for kind, cell in zip(kinds[1:], row[1:], strict=True))
    return f'<th scope="row" class="fact">{text(row[0])}</th>{"".join(rest)}'


def figure(picture: Picture) -> str:
    kind, content = picture.inline
    data = base64.b64encode(content).decode("ascii")
    return (
        f"<figure><figcaption>{text(picture.title)}</figcaption>"
        f'<img src="data:{kind};base64,{data}" width="{picture.width}" alt="{text(picture.alt)}"></figure>'
    )


def figures(pictures: Sequence[Picture]) -> str:
    if not pictures:
        return ""
    rest = "\n".join(
        f"<details><summary>{text(picture.title)}</summary>{figure(picture)}</details>" for picture in pictures[1:]
    )
    return f"{figure(pictures[0])}\n{rest}"


def details(title: str, content: str) -> str:
    return f"<details><summary>{text(title)}</summary>{content}</details>"


def definitions(pairs: Iterable[tuple[str, str]]) -> str:
    return "<dl>" + "".join(f"<dt>{text(name)}</dt><dd>{text(meaning)}</dd>" for name, meaning in pairs) + "</dl>"
