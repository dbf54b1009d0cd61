"""A text that comes in pieces, with its lines broken between words and not within."""

from __future__ import annotations

import re

from rich.cells import cell_len


class Words:
    """Where to put what comes next in a terminal of `width` columns; None breaks no line.

    A word is held back until white space follows it, since the next piece may go on with it.
    """

    def __init__(self, width: int | None) -> None:
        self.width = width
        self._column, self._held = 0, ""

    def add(self, piece: str) -> str:
        """Take a piece; returns what can be shown now."""
        if self.width is None:
            return piece
        *words, self._held = re.findall(r"\s*\S+|\s+$", self._held + piece) or [""]
        out = "".join(map(self._placed, words))
        # What fills a line is broken anyhow.
        return out + self.rest() if cell_len(self._held.strip()) >= self.width else out

    def rest(self) -> str:
        """Release what was held back."""
        word, self._held = self._held, ""
        return self._placed(word)

    def _placed(self, word: str) -> str:
        """A word with the white space before it, which becomes a new line where the word would not end in this one."""
        if self.width is None:
            return word
        bare = word.lstrip()
        space = word[: len(word) - len(bare)]
        *lines, last = space.split("\n")
        start, size = len(last) + (0 if lines else self._column), cell_len(bare)
        if space and bare and start and start + size > self.width >= size:
            space, start = space.rstrip(" \t") + "\n", 0
        end = start + size
        self._column = end if end <= self.width else end % self.width
        return space + bare
