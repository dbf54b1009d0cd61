"""Prefill in small steps, so that other requests can run in between."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import torch
from greenlet import GreenletExit
from torch import Tensor

from kvsieve.decoding.asked import AnswerPart, PromptProgress
from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.forward.passes import closing
from kvsieve.hf.prompt.options import ReadOptions
from kvsieve.hf.prompt.read import read_prompt
from kvsieve.hf.sieve import Sieve
from kvsieve.serve.pace import Coroutine, ReadingPace
from kvsieve.serve.ticket import Ticket


class PromptReader:
    """A prefill in progress, by the driver of ``generate``, in a coroutine.

    Attributes:
        ticket: of the request.
        sieve: the model under the request's plan.
        cache: filled by the prefill.
        cached: tokens that the cache had before.
        logits: [V] of the prompt's last token on the CPU; None until the end.
        done: tokens prefilled.
        seconds: time that prefilling what the cache holds takes.
        notes: sent with the answer.
        chunk: tokens per pass.
        together: returns how many chunks the next pass may take; None for one.
    """

    def __init__(
        self,
        ticket: Ticket,
        sieve: Sieve,
        cache: SieveCache,
        chunk: int,
        pace: ReadingPace,
        border: Callable[[PromptReader, int], None] = lambda reading, left: None,
    ) -> None:
        """Prefill the prompt of a ticket.

        Args:
            ticket: of the request.
            sieve: the model under its plan.
            cache: with a prefix of the prompt, or empty.
            chunk: tokens per pass.
            pace: decides when to pause.
            border: called between two passes with the number of tokens left.
        """
        self.ticket = ticket
        self.sieve = sieve
        self.cache = cache
        self.cached = self.done = cache.conversation.caller_length_and_mask()[0]
        self.logits: Tensor | None = None
        self.seconds = 0.0
        self.notes: list[str] = []
        self._began = 0.0
        self.chunk = chunk
        self._border = border
        self.together: Callable[[], int] | None = None
        self._run = Coroutine(self._read, pace)

    def step(self) -> bool:
        """Continue until the next pause; return True at the end. Raises the errors of the prefill."""
        began = time.perf_counter()
        self._run.switch()
        self.seconds += time.perf_counter() - began
        return self._run.dead

    def stop(self) -> None:
        """Abandon it; must be called in its own thread."""
        if self._run:
            with contextlib.suppress(GreenletExit):
                self._run.throw(GreenletExit)

    def _read(self) -> None:
        order = self.ticket.order
        sieve = self.sieve
        cache = self.cache
        self._began = time.perf_counter()
        self._report()
        ids = torch.tensor([order.ids], device=sieve.model.device)
        options = ReadOptions(
            chunk=self.chunk,
            new_tokens=order.max_tokens,
            progress=self._pause,
            constraints=order.constraints,
            together=self.together,
        )
        with closing():
            # All are tokens of the prompt, even those equal to the pad token.
            left, mask = read_prompt(sieve, ids, torch.ones_like(ids), cache, options)
            result = sieve.feed(cache, left[:, cache.num_seen :], mask, logits=1)
        assert result.logits is not None
        self.logits = result.logits[0, -1].cpu()
        self.done = len(order.ids)

    def _pause(self, done: int, total: int) -> None:
        self.done = self.cached + done
        self._report()
        if done < total:
            self._border(self, total - done)
        self._run.rest(ends_pass=True)

    def _report(self) -> None:
        order = self.ticket.order
        if order.progress:
            seconds = time.perf_counter() - self._began
            progress = PromptProgress(self.done, self.cached, len(order.ids), seconds)
            self.ticket.tell(AnswerPart(0, "", progress=progress))
