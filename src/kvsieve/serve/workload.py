"""Requests in prefill and decode, run one step at a time; an error of one request does not end others."""

from __future__ import annotations

import collections
import functools
import logging
from collections.abc import Callable
from typing import Any

from kvsieve.decoding.loop import Rows, step
from kvsieve.errors import KvsieveError
from kvsieve.hf.forward.pieces import rows_are_alone
from kvsieve.hf.join.join import Joined
from kvsieve.hf.prompt.options import Progress
from kvsieve.hf.reuse import FoundPrompt
from kvsieve.hf.sieve import Sieve
from kvsieve.serve.edits import SessionEdit
from kvsieve.serve.limits import ServerLimits
from kvsieve.serve.memory import KVBytes
from kvsieve.serve.pace import pace_on
from kvsieve.serve.plan_sieves import PlanSieves
from kvsieve.serve.prefixes import Prefixes
from kvsieve.serve.queue import PrefillQueue
from kvsieve.serve.reading import PromptReader, ReadingCalls
from kvsieve.serve.running import Running
from kvsieve.serve.ticket import BusyError, Event, Order, Ticket

_log = logging.getLogger(__name__)


class Workload:
    """Requests in prefill and decode. All but `state` and `needs` is for the scheduler's thread.

    Attributes:
        counts: totals so far.
        bytes: KV bytes by tokens.
        seconds: of the last requests, from each to its end.
    """

    def __init__(
        self,
        under: PlanSieves,
        sieve: Sieve,
        tokenizer: Any,
        limits: ServerLimits,
        prefixes: Prefixes,
        called: Callable[[], bool] = lambda: False,
    ) -> None:
        """Start idle. called: returns True once something has come or was cancelled since the last step began."""
        self.under = under
        self.sieve = sieve
        self.tokenizer = tokenizer
        self.limits = limits
        self.prefixes = prefixes
        self._called = called
        self.counts: collections.Counter[str] = collections.Counter()
        self.bytes = KVBytes(sieve.model)
        self.pace = pace_on(sieve.model.device, limits.gap)
        self.seconds: collections.deque[float] = collections.deque(maxlen=32)
        self._reading = PrefillQueue()
        self._running = list[Running]()
        self._held: dict[Ticket, int] = {}
        self._rows_alone: bool | None = None

    def __bool__(self) -> bool:
        return bool(self._reading or self._running)

    def state(self) -> dict[str, int]:
        return {
            "reading": len(self._reading),
            "running": sum(job.going for job in list(self._running)),
            "kv_bytes": sum(list(self._held.values())),
        }

    def needs(self, order: Order) -> int:
        """Return the most bytes that a request takes."""
        documents = 0 if order.documents is None else order.documents.copied
        return self.bytes.of_request(len(order.ids), order.max_tokens, order.answers, documents)

    def has_room(self, order: Order) -> bool:
        rows = sum(job.going for job in self._running) + sum(job.ticket.order.answers for job in self._reading)
        if rows and rows + order.answers > self.limits.running:
            return False
        most = self.limits.kv_bytes
        return most is None or sum(self._held.values()) + self.needs(order) <= most

    def begin(self, ticket: Ticket) -> None:
        """Queue the prefill of a request."""
        order = ticket.order
        self._held[ticket] = self.needs(order)
        try:
            sieve = self.under.of(order.plan)
            calls = ReadingCalls(
                find=functools.partial(self._found, sieve, order),
                edit=self._edit,
                join=functools.partial(self._join, sieve, order),
                border=self._at_border,
                joins=self._joins,
            )
            reader = PromptReader(ticket, sieve, self.limits.chunk, self.pace, calls)
            if (reason := self.prefixes.why_not(sieve, order)) is not None:
                reader.notes.append(f"the prefix store was left out: {reason}")
            reader.shift = self.prefixes.shift_after(order)
            reader.expect(self._covered(reader))
            reader.report()
            self._reading.add(reader)
        except Exception as error:
            self.fail(ticket, error)

    def step(self) -> None:
        """Decode a token of every answer, and continue the prefill that is next."""
        if self._running:
            with self.pace.decoding():
                self._decode()
        if self._reading:
            self._read()

    def let_go(self, over: Callable[[Ticket], bool], refusal: Callable[[str], BusyError]) -> None:
        """End cancelled requests, and those that `over` finds out of time, with the error of `refusal`."""
        for reading in [job for job in self._reading if job.ticket.cancelled or over(job.ticket)]:
            self._reading.remove(reading)
            self._stop(reading)
            self.end(reading.ticket, refusal("the prompt was not read"))
        for running in list(self._running):
            if running.ticket.cancelled:
                self._leave(running)
                self.end(running.ticket, None)
            elif over(running.ticket):
                try:
                    running.cut()
                except Exception as error:
                    self._drop(running, error)
                else:
                    self._finish(running)

    def fail_all(self, error: Exception) -> int:
        """End all current requests with an error; return their number."""
        reading = list(self._reading)
        running = list(self._running)
        self._running.clear()
        for job in reading:
            self._reading.remove(job)
            self._stop(job)
        for answering in running:
            answering.close()
        for ticket in [*(job.ticket for job in reading), *(job.ticket for job in running)]:
            self.fail(ticket, error)
        self._held.clear()
        return len(reading) + len(running)

    def fail(self, ticket: Ticket, error: Exception) -> None:
        if not isinstance(error, KvsieveError):
            _log.error("a request failed: %s", type(error).__name__, exc_info=error)
        self.end(ticket, error)

    def end(self, ticket: Ticket, event: Event | None) -> None:
        """Free a ticket's memory, count its end once, and send its last event."""
        self._held.pop(ticket, None)
        if event is None or ticket.cancelled:
            self.counts["cancelled"] += 1
        else:
            self.counts["failed" if isinstance(event, Exception) else "answered"] += 1
        if event is None:
            return
        try:
            ticket.tell(event)
        except Exception as error:
            _log.error("nobody took the end of a request: %s", type(error).__name__, exc_info=error)

    def _read(self) -> None:
        """Continue the prefill that is next, for as long as running answers can wait."""
        reading = self._reading.first()
        self.pace.begin(waits=bool(self._running), prompts=len(self._reading), called=self._called)
        before = reading.read
        try:
            complete = reading.step()
            self.counts["late_tokens"] += self.pace.late
            self._reading.spend(reading, reading.read - before)
            if complete:
                self._reading.remove(reading)
                self._answer(reading)
        except Exception as error:
            if reading in self._reading:
                self._reading.remove(reading)
            self.fail(reading.ticket, error)

    def _joins(self) -> bool:
        """Return whether a pass over several chunks computes the same as one per chunk; tested once."""
        if self._rows_alone is None:
            self._rows_alone = rows_are_alone(self.sieve.decoder, self.limits.chunk)
        return self._rows_alone

    def _answer(self, reading: PromptReader) -> None:
        ticket = reading.ticket
        logits = reading.logits
        assert logits is not None
        order = ticket.order
        self.counts["prompt_tokens"] += len(order.ids)
        self.counts["cached_tokens"] += reading.cached
        if reading.edited is not None:
            self.counts.update(edited=1, edited_tokens=reading.edited.reused, reread_tokens=reading.edited.reread)
        self._store(self.prefixes.add, reading)
        for other in self._reading:
            if other.waits:
                other.expect(self._covered(other))
        running = Running(ticket, reading, logits, self.tokenizer)
        self.counts["new_tokens"] += sum(len(answer.tokens) for answer in running.answers)
        read = sum(rows.cache.nbytes() for rows in running.rows)
        self._held[ticket] = min(self._held[ticket], read + order.answers * self.bytes.of(order.max_tokens))
        self._running.append(running)
        if not running.going:
            self._finish(running)

    def _decode(self) -> None:
        going = [rows for running in self._running for rows in running.rows if rows.going]
        found = step(self.sieve, going, self._failed)
        self.counts.update(
            decode_passes=found.passes,
            new_tokens=found.tokens,
            drafted_passes=found.drafted_passes,
            drafted_tokens=found.drafted,
            accepted_tokens=found.accepted,
        )
        for running in list(self._running):
            if not running.going:
                self._finish(running)

    def _failed(self, rows: Rows, error: Exception) -> None:
        for running in [job for job in self._running if rows in job.rows]:
            self._drop(running, error)

    def _leave(self, running: Running) -> None:
        self._running.remove(running)
        running.close()

    def _drop(self, running: Running, error: Exception) -> None:
        self._leave(running)
        for rows in running.rows:
            rows.dropped = True
        self.fail(running.ticket, error)

    def _finish(self, running: Running) -> None:
        self._leave(running)
        self._store(self.prefixes.add_answer, running.reading, running.answers[0])
        try:
            summary = running.summary()
        except Exception as error:
            self.fail(running.ticket, error)
            return
        self.seconds.append(summary.seconds)
        self.end(running.ticket, summary)

    def _stop(self, reading: PromptReader) -> None:
        try:
            reading.stop()
        except Exception as error:
            _log.error("a prompt was not left in order: %s", type(error).__name__, exc_info=error)

    def _found(self, sieve: Sieve, order: Order) -> FoundPrompt | None:
        try:
            return self.prefixes.find(sieve, order, self.limits.chunk)
        except Exception as error:
            self._not_stored(error)
            return None

    def _join(self, sieve: Sieve, order: Order, progress: Progress) -> Joined:
        try:
            return self.prefixes.join(sieve, order, self.limits.chunk, progress)
        except Exception as error:
            self._not_stored(error)
            return Prefixes().join(sieve, order, self.limits.chunk, progress)

    def _covered(self, reading: PromptReader) -> int:
        """Return the number of a prompt's tokens that need no prefill, and choose the edit that it begins with."""
        order = reading.ticket.order
        try:
            exact = self.prefixes.covered(reading.sieve, order, reading.chunk)
            reading.edit = self.prefixes.edit(reading.sieve, order, reading.chunk, exact, reading.edit)
        except Exception as error:
            self._not_stored(error)
            return 0
        edit = reading.edit
        return exact if edit is None or edit.why_not is not None else edit.reused

    def _edit(self, reading: PromptReader) -> SessionEdit | None:
        """Return the edit that a prompt begins with, with memory reserved for entries that move, or None."""
        self._covered(reading)
        edit = reading.edit
        if edit is None:
            return None
        needed = self.bytes.of(edit.size)
        most = self.limits.kv_bytes
        reason = edit.why_not
        if reason is None and most is not None and sum(self._held.values()) + needed > most:
            reason = f"its entries need {needed:,} bytes more while they move, and the server has {most:,} for all"
        if reason is not None:
            reading.notes.append(f"the session was not edited: {reason}")
            return None
        self._held[reading.ticket] += needed
        return edit

    def _at_border(self, reading: PromptReader, left: int) -> None:
        self._store(self.prefixes.at_border, reading, left)

    def _store(self, put: Callable[..., None], *what: Any) -> None:
        """Store a prefix. The answer does not depend on it, so errors of the store do not end it."""
        try:
            put(*what)
        except Exception as error:
            self._not_stored(error)

    def _not_stored(self, error: Exception) -> None:
        self.counts["store_failed"] += 1
        _log.error("the store failed at a request: %s", type(error).__name__, exc_info=error)
