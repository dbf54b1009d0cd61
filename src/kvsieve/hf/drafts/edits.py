"""Replaced parts of a copied text, expected again where the same word is copied."""

from __future__ import annotations

from collections.abc import Sequence

from kvsieve.hf.drafts.texts import TokenTexts

# Tokens of a part that may be replaced again, and half of those instead.
_MOST = 2
_BEFORE_WORDS = " ([{.,:;=*&!<>\"'`"


class Edits:
    """Changes that an answer made to a text it copies, such as a name or the ends of lines.

    Args:
        texts: of the model's tokens.
    """

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        # By the first word of the part: its other tokens, and the text instead.
        self._known: dict[str, tuple[list[int], str]] = {}

    def learn(self, old: list[int], new: Sequence[int]) -> None:
        """Note that tokens took the place of others."""
        texts = self._texts
        text = texts.join(new)
        for size in range(1, len(old)):
            same = texts.join(old[size:])
            if text.endswith(same):
                old = old[:size]
                text = text[: len(text) - len(same)]
                break
        if len(old) > _MOST or len(new) > 2 * _MOST:
            return
        first = texts.of(old[0])
        word = _word(first)
        before = first[: len(first) - len(word)]
        if text.startswith(before):
            first = word
            text = text[len(before) :]
        self._known[first] = old[1:], text

    def forget(self, token: int) -> None:
        """Do not expect an edit of a token again."""
        first = self._texts.of(token)
        self._known.pop(first, None)
        self._known.pop(_word(first), None)

    def at(self, tokens: Sequence[int], place: int) -> tuple[list[int] | None, int]:
        """Return tokens to expect instead of those at a place, and the place after them; None and the next place."""
        first = self._texts.of(tokens[place]) if self._known else ""
        word = first if first in self._known else _word(first)
        known = self._known.get(word)
        if known is None:
            return None, place + 1
        rest, new = known
        end = place + 1 + len(rest)
        if tokens[place + 1 : end] != rest or end >= len(tokens):
            return None, place + 1
        text = first[: len(first) - len(word)] + new
        if text[-1:].isalnum():
            return self._texts.split(text), end
        # Spaces belong to the word after them.
        return self._texts.split(text + self._texts.of(tokens[end])), end + 1


def _word(text: str) -> str:
    """Return a token's text without the characters in front of its word; all of it if it has none."""
    return text.lstrip(_BEFORE_WORDS) or text
