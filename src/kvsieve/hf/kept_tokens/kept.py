"""Kept tokens with displays for terminal, notebook and HTML page."""

from __future__ import annotations

from dataclasses import dataclass

from kvsieve.hf.kept_tokens.page import html_page, short_html
from kvsieve.hf.kept_tokens.terminal import map_text
from kvsieve.hf.kept_tokens.tokens import KeptTokens
from kvsieve.report.display import html_table


@dataclass(frozen=True, eq=False, repr=False)
class Kept(KeptTokens):
    """Tokens of a conversation and the layers and heads that still store each; does not keep the cache alive.

    Printed as a map of layers and positions; in a notebook as text coloured by share. `share` has a number per token,
    `of` looks up a string, `layers` have the details.
    """

    def to_text(self, width: int = 80) -> str:
        """Draw the map of layers and positions in lines of at most `width` characters."""
        return map_text(self, width)

    def to_html(self, find: str = "") -> str:
        """Return a self-contained page: coloured text, map, entries per layer, search box.

        Args:
            find: initial search text.

        Raises:
            InputError: no tokenizer is known.
        """
        return html_page(self, find)

    def __str__(self) -> str:
        return self.to_text()

    def _repr_html_(self) -> str:
        table = html_table(f"Kept under {self.method}", self.describe())
        return table if self.tokenizer is None else table + short_html(self)
