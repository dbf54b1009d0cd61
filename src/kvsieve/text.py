"""Escaping of foreign text for display: answers, names of files, headers of files."""

from __future__ import annotations

import re

# Characters that move a terminal's cursor, change its state or text order, or cannot be written as UTF-8.
_ORDERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
# Characters with a meaning in Markdown; an underscore within a word has none.
_MARKS = re.compile(r"[\\`*\[\]<>|~#&$]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
_LONGEST = 1200
_HEAD = 800
_TAIL = 300


def printable(text: str) -> str:
    r"""Escape a text's control characters (``\x1b``), so that they do not control a terminal.

    Carriage returns are removed; newlines and tabs stay.
    """
    return _ORDERS.sub(_written, text)


def _written(match: re.Match[str]) -> str:
    code = ord(match[0])
    return "" if code == 13 else f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def shortened(text: str) -> str:
    """Shorten a message to about 1200 characters, its beginning and its end."""
    if len(text) <= _LONGEST:
        return text
    left_out = len(text) - _HEAD - _TAIL
    return f"{text[:_HEAD]} ... ({left_out} characters left out) ... {text[-_TAIL:]}"


def first_few(items: list[str]) -> str:
    """Join the first three items, and say how many more there are."""
    return ", ".join(items[:3]) + (f" and {len(items) - 3} more" if len(items) > 3 else "")


class Markdown(str):
    """Text in Markdown; see `markdown_text`."""


def markdown_text(text: str) -> str:
    """Escape a text as one line of Markdown, also for a table's cell."""
    if isinstance(text, Markdown):
        return text
    return _MARKS.sub(r"\\\g<0>", " ".join(printable(text).split("\n")).replace("\t", " "))
