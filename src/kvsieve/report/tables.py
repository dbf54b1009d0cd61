"""Tables as data, and as Markdown; `report.html` writes the same as HTML."""

from __future__ import annotations

from dataclasses import dataclass

from kvsieve.text import markdown_text


@dataclass(frozen=True)
class Entry:
    """One value of a table; `best` ones are bold."""

    text: str
    best: bool = False


@dataclass(frozen=True)
class Table:
    """A table. names: how many of the first columns are names, not numbers."""

    title: str
    headers: list[str]
    rows: list[list[Entry]]
    names: int
    note: str = ""


def markdown_table(headers: list[str], rows: list[list[str]]) -> str:
    """Write a table as Markdown. Cells are text, unless they are `Markdown` already."""
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join("| " + " | ".join(map(markdown_text, line)) + " |" for line in lines)
