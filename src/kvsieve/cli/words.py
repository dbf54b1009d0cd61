"""Line breaking between words for streamed text."""

from __future__ import annotations

import re

from rich.cells import cell_len


class Words:
    """Breaks streamed text into lines for a terminal of `width` columns; None breaks no line.

    A word is buffered until white space follows, since the next piece may continue it.
    """

    def __init__(self, width: int | None) -> None:
        self.width = width
        self._column = 0
        self._held = ""

    def add(self, piece: str) -> str:
        if self.width is None:
            return piece
        *words, self._held = re.findall(r"\s*\S+|\s+$", self._held + piece) or [""]
        out = "".join(map(self._placed, words))
        # A piece that fills a line is broken in any case.
        return out + self.rest() if cell_len(self._held.strip()) >= self.width else out

    def rest(self) -> str:
        word = self._held
        self._held = ""
        return self._placed(word)

    def _placed(self, word: str) -> str:
        """Return a word with the white space before it, or with a line break if it would not fit the line."""
        if self.width is None:
            return word
        bare = word.lstrip()
        space = word[: len(word) - len(bare)]
        *lines, last = space.split("\n")
        start = len(last) + (0 if lines else self._column)
        size = cell_len(bare)
        if space and bare and start and start + size > self.width >= size:
            space = space.rstrip(" \t") + "\n"
            start = 0
        end = start + size
        self._column = end if end <= self.width else end % self.width
        return space + bare
