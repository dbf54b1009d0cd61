"""Kept tokens that show themselves: in a terminal, in a notebook, on a page."""

from __future__ import annotations

from dataclasses import dataclass

from kvsieve.display import html_table
from kvsieve.kept.page import html_page, short_html
from kvsieve.kept.terminal import map_text
from kvsieve.kept.tokens import KeptTokens


@dataclass(frozen=True, eq=False, repr=False)
class Kept(KeptTokens):
    """Tokens of a conversation and the layers and heads that still store each: copies that keep no cache alive.

    Printed, it is a map of layers and positions; in a notebook the text, coloured by the share that holds it. `share`
    has a number per token, `of` tells of a string, `layers` have the details.
    """

    def to_text(self, width: int = 80) -> str:
        """Draw the map of layers and positions in lines of at most `width` signs."""
        return map_text(self, width)

    def to_html(self, find: str = "") -> str:
        """Make one page that needs no network: the coloured text, the map, entries per layer, a search box.

        Args:
            find: looked for when the page is opened.

        Raises:
            InputError: no tokenizer is known.
        """
        return html_page(self, find)

    def __str__(self) -> str:
        return self.to_text()

    def _repr_html_(self) -> str:
        table = html_table(f"Kept under {self.method}", self.describe())
        return table if self.tokenizer is None else table + short_html(self)
