"""Tokens of a text as another tokenizer splits it, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvsieve.hf.prompt.draft import decoded

# Tokens before others that are decoded with them, because some tokenizers write a text's first token differently.
_BEFORE = 6
# Newest tokens that are split anew with those that follow, at least.
_OPEN = 16
# The end of a text that stops inside a character.
_PARTIAL = "\ufffd"


class Translation:
    """A growing conversation in the tokens of a draft's tokenizer.

    Text is split once it is older than the newest tokens; the newest are split again with what follows them.

    Args:
        own: the model's tokenizer.
        other: the draft's.
        end: the model's token for the end of an answer, None if it has none.
    """

    def __init__(self, own: Any, other: Any, end: int | None) -> None:
        self._own = own
        self._other = other
        self._end = end
        # Tokens of the model that are split anew, and those before them.
        self._open: list[int] = []
        self._before: list[int] = []
        self._split: list[int] = []
        self._tokens: list[int] = []

    def extend(self, tokens: Sequence[int]) -> list[int]:
        """Append the model's tokens, and return the whole conversation in the draft's."""
        self._open += tokens
        if len(self._open) > 2 * _OPEN:
            self._settle()
        self._tokens = self._split + self._ids(self._text(self._before, self._open).rstrip(_PARTIAL))
        return self._tokens

    def back(self, drafted: Sequence[int], *, ended: bool) -> list[int]:
        """Return the model's tokens for drafted ones, without the last if it may go on.

        Args:
            drafted: tokens of the draft after the conversation.
            ended: the answer ends after them.
        """
        context = self._tokens[-_BEFORE:]
        text = decoded(self._other, [*context, *drafted])[len(decoded(self._other, context)) :]
        text, partial, _ = text.partition(_PARTIAL)
        open_text = self._text(self._before, self._open)
        if open_text.endswith(_PARTIAL):
            return []
        tokens = self._after(open_text, text)
        if not ended or partial:
            return tokens[:-1]
        return tokens if self._end is None else [*tokens, self._end]

    def _settle(self) -> None:
        """Split all but the newest tokens for good."""
        for count in range(len(self._open) - _OPEN, 0, -1):
            text = self._text(self._before, self._open[:count])
            if not text.endswith(_PARTIAL):
                self._split += self._ids(text)
                self._before = (self._before + self._open[:count])[-_BEFORE:]
                self._open = self._open[count:]
                return

    def _after(self, before: str, text: str) -> list[int]:
        """Split a text that follows another one, which stays as it was split."""
        if self._own.is_fast:
            found = self._own(before + text, add_special_tokens=False, return_offsets_mapping=True)
            spans = found["offset_mapping"]
            if all(not start < len(before) < end for start, end in spans):
                return [token for token, span in zip(found["input_ids"], spans, strict=True) if span[0] >= len(before)]
        ids: list[int] = self._own(text, add_special_tokens=False)["input_ids"]
        return ids

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._other(text, add_special_tokens=False)["input_ids"] if text else []
        return ids

    def _text(self, before: Sequence[int], tokens: Sequence[int]) -> str:
        """Return the text of the model's tokens that follow others."""
        return decoded(self._own, [*before, *tokens])[len(decoded(self._own, [*before])) :]
