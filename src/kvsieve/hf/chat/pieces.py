"""The streamer of an answer's text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from kvsieve.detokenize import Detokenizer


class Pieces(BaseStreamer):
    """Passes an answer to `on_text` in pieces that end between characters.

    Args:
        tokenizer: any.
        stops: end tokens of the answer, not part of the text.
        on_text: called with each piece; None for none.
        check: called at each token; raises to end the answer.
    """

    def __init__(
        self, tokenizer: Any, stops: frozenset[int], on_text: Callable[[str], None] | None, check: Callable[[], None]
    ) -> None:
        self.stops = stops
        self.on_text = on_text
        self.check = check
        self._begun = False
        self._words = Detokenizer(tokenizer)

    @property
    def text(self) -> str:
        """The answer so far."""
        return self._words.text

    def put(self, value: Tensor) -> None:
        # The prompt comes first.
        if not self._begun:
            self._begun = True
            return
        self.check()
        self._say(self._words.add(token for token in value.flatten().tolist() if token not in self.stops))

    def end(self) -> None:
        self._say(self._words.end())

    def _say(self, piece: str) -> None:
        if piece and self.on_text is not None:
            self.on_text(piece)
