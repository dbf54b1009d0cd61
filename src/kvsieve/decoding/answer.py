"""An answer in progress: its tokens, and text up to a stop."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import replace

from torch import Tensor

from kvsieve.decoding.asked import AnswerPart, ChosenToken
from kvsieve.decoding.sampling import Sampler
from kvsieve.detokenize import Detokenizer


class Answer:
    """Tokens of one answer, a row of the passes that decode.

    Attributes:
        sampler: chooses its tokens.
        ends: tokens that end it.
        limit: most tokens.
        tokens: chosen so far.
        times: when each was chosen, in seconds.
        text: sent so far; empty without a `tell`.
        finish: "stop", "length", or None while the answer is in progress.
    """

    def __init__(self, sampler: Sampler, ends: Collection[int], limit: int) -> None:
        self.sampler = sampler
        self.ends = ends
        self.limit = limit
        self.text = ""
        self.tokens: list[int] = []
        self.times: list[float] = []
        self.finish: str | None = None

    def add(self, logits: Tensor) -> ChosenToken:
        """Choose the next token by logits [V] on the CPU, and return it."""
        chosen = self.sampler.choose(logits)
        self.tokens.append(chosen.own.id)
        self.times.append(time.perf_counter())
        if chosen.own.id in self.ends:
            self.finish = "stop"
        elif len(self.tokens) >= self.limit:
            self.finish = "length"
        return chosen


class TextAnswer(Answer):
    """An answer that sends its text piece by piece."""

    def __init__(
        self,
        sampler: Sampler,
        ends: Collection[int],
        limit: int,
        words: Detokenizer,
        tell: Callable[[AnswerPart], None],
        stops: tuple[str, ...] = (),
        number: int = 0,
    ) -> None:
        """Begin an answer.

        Args:
            sampler: see `Answer`.
            ends: see `Answer`; their text is left out.
            limit: see `Answer`.
            words: turns tokens into text.
            tell: callback for each piece.
            stops: texts that end the answer and are left out of it.
            number: of the answer, for its pieces.
        """
        super().__init__(sampler, ends, limit)
        self._words = words
        self._tell = tell
        self._number = number
        self._held = StopText(stops)
        self._unsent: list[ChosenToken] = []

    def add(self, logits: Tensor) -> ChosenToken:
        """Choose the next token by logits [V] on the CPU, and send the text that it completes."""
        offset = len(self._words.text)
        chosen = super().add(logits)
        if self.finish != "stop":
            self._unsent.append(replace(chosen, offset=offset))
            self._held.add(self._words.add([chosen.own.id]))
        self._send()
        return chosen

    def cut(self) -> None:
        """End it at its current length."""
        self.finish = "length"
        self._send()

    def _send(self) -> None:
        if self.finish is not None:
            self._held.add(self._words.end())
        if self._held.stopped:
            self.finish = "stop"
        text = self._held.take(last=self.finish is not None)
        self.text += text
        if self._held.stopped:
            # The answer does not include tokens of the stop.
            self._unsent = [token for token in self._unsent if token.offset < len(self.text)]
        if text or self.finish is not None:
            tokens = () if self.sampler.rules.logprobs is None else tuple(self._unsent)
            self._tell(AnswerPart(self._number, text, tokens, self.finish))
            self._unsent.clear()


class StopText:
    """Text up to the first of some stops; a possible beginning of a stop is buffered."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.stops, self.stopped, self._held = stops, False, ""

    def add(self, text: str) -> None:
        """Append text; ignored after a stop."""
        if self.stopped:
            return
        self._held += text
        found = [at for stop in self.stops if (at := self._held.find(stop)) >= 0]
        if found:
            self._held, self.stopped = self._held[: min(found)], True

    def take(self, *, last: bool) -> str:
        """Return the text that is final. last: the answer has ended."""
        keep = 0
        if not (last or self.stopped):
            longest = max(map(len, self.stops), default=1) - 1
            ends = range(min(longest, len(self._held)), 0, -1)
            keep = next((n for n in ends if any(stop.startswith(self._held[-n:]) for stop in self.stops)), 0)
        cut = len(self._held) - keep
        out, self._held = self._held[:cut], self._held[cut:]
        return out
