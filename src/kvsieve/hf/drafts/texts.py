"""Texts of single tokens, and tokens of texts."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

from kvsieve.hf.prompt.draft import decoded


class TokenTexts:
    """Texts of tokens as they are in the middle of a text, and tokens of texts.

    Args:
        tokenizer: the model's, of transformers.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._of: dict[int, str] = {}

    def of(self, token: int) -> str:
        """Return the text of a token."""
        if token not in self._of:
            self._of[token] = decoded(self._tokenizer, [*self._first, token])[
                len(decoded(self._tokenizer, self._first)) :
            ]
        return self._of[token]

    def join(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens, one by one."""
        return "".join(map(self.of, tokens))

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of many tokens."""
        return decoded(self._tokenizer, list(tokens))

    def split(self, text: str) -> list[int]:
        """Return the tokens of a text by itself."""
        tokens: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
        return tokens

    @functools.cached_property
    def _first(self) -> list[int]:
        """A token before others, because some tokenizers write a text's first one differently."""
        return self.split("a")[-1:]
