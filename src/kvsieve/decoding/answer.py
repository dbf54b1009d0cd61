"""An answer in progress: its tokens, and text up to a stop."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import replace

from torch import Tensor

from kvsieve.decoding.asked import AnswerPart, ChosenToken
from kvsieve.decoding.sampling import Sampler
from kvsieve.detokenize import Detokenizer
from kvsieve.hf.drafts.drafter import DraftCounts
from kvsieve.hf.generate.grammar import Matcher


class Answer:
    """An answer, a row of the decode passes.

    Attributes:
        tokens: chosen so far.
        times: when each was chosen, in seconds.
        text: sent so far.
        finish: "stop", "length", or None while the answer is in progress.
        drafts: counts of its drafts.
        matcher: of its grammar; None for none.
    """

    def __init__(
        self,
        sampler: Sampler,
        ends: Collection[int],
        limit: int,
        *,
        words: Detokenizer | None = None,
        tell: Callable[[AnswerPart], None] | None = None,
        stops: tuple[str, ...] = (),
        number: int = 0,
        matcher: Matcher | None = None,
    ) -> None:
        """Begin an answer.

        Args:
            sampler: chooses its tokens.
            ends: tokens that end it, without text.
            limit: most tokens.
            words: turns tokens into text; None for no text.
            tell: callback for each piece of text; None for no text.
            stops: texts that end the answer and are not part of it.
            number: of the answer, for its pieces.
            matcher: of its grammar, which restricts the sampler; the answer ends where the grammar does.
        """
        self.sampler = sampler
        self.ends = ends
        self.limit = limit
        self.text = ""
        self.tokens: list[int] = []
        self.times: list[float] = []
        self.finish: str | None = None
        self.drafts = DraftCounts()
        self.matcher = matcher
        self._words = words
        self._tell = tell
        self._number = number
        self._held = StopText(stops)
        self._unsent: list[ChosenToken] = []

    def add(self, logits: Tensor) -> None:
        """Choose the next token by logits [V] on the CPU, and send the text that it completes."""
        chosen = self.sampler.choose(logits)
        self.tokens.append(chosen.own.id)
        self.times.append(time.perf_counter())
        if self.matcher is not None:
            self.matcher.take(chosen.own.id)
        is_end = chosen.own.id in self.ends
        if is_end or (self.matcher is not None and self.matcher.complete):
            self.finish = "stop"
        elif len(self.tokens) >= self.limit:
            self.finish = "length"
        if self._words is not None and not is_end:
            self._unsent.append(replace(chosen, offset=len(self._words.text)))
            self._held.add(self._words.add([chosen.own.id]))
        self._send()

    def cut(self) -> None:
        """End it at its current length."""
        self.finish = "length"
        self._send()

    def _send(self) -> None:
        if self.finish is not None and self._words is not None:
            self._held.add(self._words.end())
        if self._held.stop is not None:
            self.finish = "stop"
        text = self._held.take(last=self.finish is not None)
        self.text += text
        if self._held.stop is not None:
            # The answer does not include tokens of the stop.
            self._unsent = [token for token in self._unsent if token.offset < len(self.text)]
        if self._tell is not None and (text or self.finish is not None):
            tokens = () if self.sampler.rules.logprobs is None else tuple(self._unsent)
            self._tell(AnswerPart(self._number, text, tokens, self.finish, stop=self._held.stop))
            self._unsent.clear()


class StopText:
    """Text up to the first of some stops; a possible beginning of a stop is buffered.

    Attributes:
        stop: the one that was found; None before.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.stops = stops
        self.stop: str | None = None
        self._held = ""

    def add(self, text: str) -> None:
        """Append text; ignored after a stop."""
        if self.stop is not None:
            return
        self._held += text
        found = [(at, stop) for stop in self.stops if (at := self._held.find(stop)) >= 0]
        if found:
            at, self.stop = min(found)
            self._held = self._held[:at]

    def take(self, *, last: bool) -> str:
        """Return the text that is final. last: the answer has ended."""
        keep = 0
        if not last and self.stop is None:
            longest = max(map(len, self.stops), default=1) - 1
            ends = range(min(longest, len(self._held)), 0, -1)
            keep = next((n for n in ends if any(stop.startswith(self._held[-n:]) for stop in self.stops)), 0)
        cut = len(self._held) - keep
        out = self._held[:cut]
        self._held = self._held[cut:]
        return out
