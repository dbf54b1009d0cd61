"""Text from elsewhere made fit to be shown: answers, names of files, what a file's header says."""

from __future__ import annotations

import re

# All that moves a terminal's cursor, changes its state or the order of what it shows, or cannot be written as UTF-8.
_ORDERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
# What Markdown reads as more than a sign; an underscore within a word is only that.
_MARKS = re.compile(r"[\\`*\[\]<>|~#&$]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")
_LONGEST, _HEAD, _TAIL = 1200, 800, 300


def printable(text: str) -> str:
    """The text without orders to a terminal: control characters are written out (``\\x1b``), carriage returns left
    out; newlines and tabs stay."""
    return _ORDERS.sub(_written, text)


def _written(match: re.Match[str]) -> str:
    code = ord(match[0])
    return "" if code == 13 else f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def shortened(text: str) -> str:
    """A message of at most about 1200 characters: of a longer one, such as one that quotes a whole document, the
    beginning and the end."""
    if len(text) <= _LONGEST:
        return text
    left_out = len(text) - _HEAD - _TAIL
    return f"{text[:_HEAD]} ... ({left_out} characters left out) ... {text[-_TAIL:]}"


class Markdown(str):
    """A text that is Markdown already; see `markdown_text`."""


def markdown_text(text: str) -> str:
    """The text as one line of Markdown, in a table's cell too: what it is made of stays as it is written."""
    if isinstance(text, Markdown):
        return text
    return _MARKS.sub(r"\\\g<0>", " ".join(printable(text).split("\n")).replace("\t", " "))
