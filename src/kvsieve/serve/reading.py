"""Prefill in small steps, so that other requests can run in between."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from greenlet import GreenletExit
from torch import Tensor

from kvsieve.decoding.asked import AnswerPart, PromptProgress
from kvsieve.errors import KvsieveError
from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.edit.editor import Edited, Editor
from kvsieve.hf.forward.passes import closing
from kvsieve.hf.join.join import Joined
from kvsieve.hf.prompt.embed import embed_prompt
from kvsieve.hf.prompt.options import Progress, ReadOptions
from kvsieve.hf.prompt.read import read_prompt
from kvsieve.hf.reuse import FoundPrompt, approximately
from kvsieve.hf.sieve import Sieve
from kvsieve.serve.edits import SessionEdit
from kvsieve.serve.pace import Coroutine, ReadingPace
from kvsieve.serve.ticket import PromptImages, Ticket


@dataclass(frozen=True)
class ReadingCalls:
    """Calls of a prefill to the rest of the server.

    Attributes:
        find: returns a stored prefix of the prompt, when the prefill begins.
        edit: returns the edit of a stored conversation that the prompt begins with instead, or None.
        join: joins the prompt's documents, with the progress of their prefill.
        border: takes the number of tokens left between two passes.
        joins: returns whether a pass may take several chunks.
    """

    find: Callable[[], FoundPrompt | None]
    edit: Callable[[PromptReader], SessionEdit | None]
    join: Callable[[Progress], Joined]
    border: Callable[[PromptReader, int], None]
    joins: Callable[[], bool]


class PromptReader:
    """A prefill, waiting or in progress, by the driver of ``generate``, in a coroutine.

    Attributes:
        ticket: of the request.
        sieve: the model under the request's plan.
        chunk: tokens per pass.
        cache: filled by the prefill; empty until it begins.
        cached: tokens that the cache had when the prefill began; expected ones until then.
        done: tokens prefilled, including these.
        logits: [V] of the prompt's last token on the CPU; None until the end.
        seconds: time that prefilling what the cache holds takes.
        queued: seconds from the request until the prefill began.
        notes: sent with the answer.
        edit: of a stored conversation, which the prompt may begin with; None without one.
        edited: effect of the edit that the prompt began with; None without one.
        joined: the prompt's documents; None without any.
        shift: position of a token after the images, less its index; None if it is unknown before they are embedded.
    """

    def __init__(self, ticket: Ticket, sieve: Sieve, chunk: int, pace: ReadingPace, calls: ReadingCalls) -> None:
        """Wait to prefill the prompt of a ticket.

        Args:
            ticket: of the request.
            sieve: the model under its plan.
            chunk: tokens per pass.
            pace: decides when to pause.
            calls: to the rest of the server.
        """
        self.ticket = ticket
        self.sieve = sieve
        self.chunk = chunk
        self.cache: SieveCache = sieve.new_cache()
        self.cached = self.done = 0
        self.logits: Tensor | None = None
        self.seconds = self.queued = 0.0
        self.notes: list[str] = []
        self.edit: SessionEdit | None = None
        self.edited: Edited | None = None
        self.joined: Joined | None = None
        self.shift: int | None = None
        self._began: float | None = None
        self._calls = calls
        self._start = 0
        self._run = Coroutine(self._read, pace)
        self._together = functools.partial(self._run.begin_pass, calls.joins)

    @property
    def waits(self) -> bool:
        """True until the prefill begins."""
        return self._began is None

    @property
    def read(self) -> int:
        """Tokens that this prefill has computed."""
        return self.done - self.cached

    @property
    def size(self) -> int:
        """Tokens to compute in all."""
        return len(self.ticket.order.ids) - self.cached

    @property
    def left(self) -> int:
        """Tokens that are not prefilled yet."""
        return len(self.ticket.order.ids) - self.done

    def expect(self, cached: int) -> None:
        """Before the prefill begins: count tokens as prefilled that a stored prefix has."""
        self.cached = self.done = cached

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
        self._began = time.perf_counter()
        self.queued = self._began - self.ticket.came
        if order.documents is not None:
            self._join()
        elif (edit := self._calls.edit(self)) is None or not self._edit(edit):
            self._find()
        cache = self.cache
        self._start = self.done
        self.report()
        ids = torch.tensor([order.ids], device=sieve.model.device)
        if order.images is not None:
            self._embed(ids, order.images)
        options = ReadOptions(
            chunk=self.chunk,
            new_tokens=order.max_tokens,
            progress=self._pause,
            constraints=order.constraints,
            together=self._together,
        )
        with closing():
            # All are tokens of the prompt, even those equal to the pad token.
            left, mask = read_prompt(sieve, ids, torch.ones_like(ids), cache, options)
            result = sieve.feed(cache, left[:, cache.num_seen :], mask, logits=1)
        cache.embedded = None
        assert result.logits is not None
        self.logits = result.logits[0, -1].cpu()
        self.done = len(order.ids)

    def _find(self) -> None:
        """Continue from the longest stored prefix."""
        if (found := self._calls.find()) is not None:
            self.cache = found.cache
            self.seconds = found.seconds
        conversation = self.cache.conversation
        self.cached = self.done = conversation.caller_length_and_mask()[0]
        if conversation.approximate:
            rules = approximately(conversation.approximate)
            self.notes.append(f"{self.cached} of {len(self.ticket.order.ids)} tokens came from the store{rules}")

    def _edit(self, edit: SessionEdit) -> bool:
        """Continue from an edited conversation; return False, and note the reason, if it cannot be edited."""
        base = edit.find()
        if base is None or base.cache.num_seen < len(edit.known):
            self.notes.append("the session was not edited: the store lacks tokens of it under this plan")
            return False
        self.cached = self.done = edit.reused
        try:
            editor = Editor(self.sieve, base.cache, edit.known[None], chunk=self.chunk, progress=self._pause_before)
            edited = editor.rewrite(edit.pieces)
        except KvsieveError as error:
            self.notes.append(f"the session was not edited: {error}")
            return False
        self.edited = edited
        self.cache = base.cache
        self.seconds += base.seconds
        self.cached = edited.reused
        self.done = self.cache.num_seen
        return True

    def _join(self) -> None:
        """Join the documents that the prompt begins with."""
        documents = self.ticket.order.documents
        assert documents is not None
        least = max(documents.end - self.sieve.plan.queries(documents.end), 0)
        joined = self.joined = self._calls.join(lambda done, total: self._pause_before(done * least // total, total))
        self.cache = joined.cache
        self.done = self.cache.num_seen
        self.cached = min(joined.found, self.done)

    def _pause_before(self, done: int, total: int) -> None:
        """Pause between two passes of an edit or a join."""
        self.done = min(self.cached + done, len(self.ticket.order.ids) - 1)
        self.report()
        self._run.rest()

    def _embed(self, ids: Tensor, images: PromptImages) -> None:
        """Embed the images, or only the positions after them, if the found prefix holds them all."""
        cache = self.cache
        if self.shift is not None and self.cached >= images.end:
            cache.conversation.position_shift = self.shift
            return
        cache.embedded = embed_prompt(self.sieve, ids, images.inputs)
        self.shift = cache.embedded.shift_after(images.end)

    def _pause(self, done: int, total: int) -> None:
        self.done = self._start + done
        self.report()
        if done < total:
            self._calls.border(self, total - done)
        self._run.rest(ends_pass=True)

    def report(self) -> None:
        """Send the progress, if the request wants it."""
        order = self.ticket.order
        if order.progress:
            seconds = 0.0 if self._began is None else time.perf_counter() - self._began
            progress = PromptProgress(self.done, self.cached, len(order.ids), seconds)
            self.ticket.tell(AnswerPart(0, "", progress=progress))
