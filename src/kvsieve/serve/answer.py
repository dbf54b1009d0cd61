"""An answer in progress: its cache, tokens, and text up to a stop."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from kvsieve.detokenize import Detokenizer
from kvsieve.hf.cache.cache import SieveCache
from kvsieve.serve.sampling import Sampler
from kvsieve.serve.ticket import AnswerPart, ChosenToken, Order


class Answer:
    """An answer to a request, a row of the decode passes.

    Attributes:
        number: among the answers to the request.
        cache: of its conversation.
        tokens: chosen so far.
        times: when each was chosen.
        finish: why it has ended; None while it is in progress.
    """

    def __init__(
        self,
        number: int,
        order: Order,
        cache: SieveCache,
        sampler: Sampler,
        words: Detokenizer,
        tell: Callable[[AnswerPart], None],
    ) -> None:
        self.number, self.order, self.cache, self.tell = number, order, cache, tell
        self.tokens: list[int] = []
        self.times: list[float] = []
        self.finish: str | None = None
        self._sampler, self._words, self._text = sampler, words, StopText(order.stops)
        self._ends = frozenset[int]() if order.ignore_eos else order.stop_ids
        self._untold: list[ChosenToken] = []
        # Characters that were sent.
        self._length = 0

    def add(self, logits: Tensor) -> None:
        """Choose the next token by logits [V] on the CPU, and send the text that it completes."""
        chosen = self._sampler.choose(logits)
        token = chosen.own.id
        self.tokens.append(token)
        self.times.append(time.perf_counter())
        ended = token in self._ends
        if not ended:
            self._untold.append(replace(chosen, offset=len(self._words.text)))
            self._text.add(self._words.add([token]))
        if ended or self._text.stopped:
            self.finish = "stop"
        elif len(self.tokens) >= self.order.max_tokens:
            self.finish = "length"
        self._tell()

    def cut(self) -> None:
        """End it at its current length."""
        self.finish = "length"
        self._tell()

    def _tell(self) -> None:
        if self.finish is not None:
            self._text.add(self._words.end())
            if self._text.stopped:
                self.finish = "stop"
        text = self._text.take(last=self.finish is not None)
        self._length += len(text)
        if self._text.stopped:
            # The answer does not include tokens of the stop.
            self._untold = [token for token in self._untold if token.offset < self._length]
        wanted = self.order.sampling.logprobs is not None
        if text or self.finish is not None:
            self.tell(AnswerPart(self.number, text, tuple(self._untold) if wanted else (), self.finish))
            self._untold.clear()


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
