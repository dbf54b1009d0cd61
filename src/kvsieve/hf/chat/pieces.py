"""Tokens become text as they come."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers.generation.streamers import BaseStreamer


class Pieces(BaseStreamer):
    """Turns tokens into pieces of text, none of which ends within a character."""

    def __init__(
        self, tokenizer: Any, stops: frozenset[int], on_text: Callable[[str], None] | None, check: Callable[[], None]
    ) -> None:
        self.tokenizer, self.stops, self.on_text, self.check = tokenizer, stops, on_text, check
        self.text = ""
        self._begun = False
        self._made: list[int] = []
        # Tokens from `start` on are decoded anew, those up to `told` only to see what they add together.
        self._start = self._told = 0

    def put(self, value: Tensor) -> None:
        # What comes first is the prompt.
        if not self._begun:
            self._begun = True
            return
        self.check()
        self._made += [token for token in value.flatten().tolist() if token not in self.stops]
        self._tell(last=False)

    def end(self) -> None:
        self._tell(last=True)

    def _tell(self, last: bool) -> None:
        before = self._decode(self._made[self._start : self._told])
        piece = self._decode(self._made[self._start :])[len(before) :]
        if not piece or (piece.endswith("\ufffd") and not last):
            return
        self._start, self._told = self._told, len(self._made)
        self.text += piece
        if self.on_text is not None:
            self.on_text(piece)

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))
