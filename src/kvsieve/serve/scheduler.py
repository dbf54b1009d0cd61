"""The scheduler: one thread that owns the model, reads prompts in chunks and decodes all answers together."""

from __future__ import annotations

import collections
import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from kvsieve.cache.base import MIN_ROOM
from kvsieve.errors import InputError, KvsieveError
from kvsieve.hf.attach import under
from kvsieve.hf.forward.rows import joins
from kvsieve.hf.sieve import Sieve
from kvsieve.plans import Plan
from kvsieve.serve.limits import ServerLimits
from kvsieve.serve.memory import KVBytes
from kvsieve.serve.pace import pace_on, pause_within
from kvsieve.serve.prefixes import NoPrefixes, Prefixes
from kvsieve.serve.queue import FairQueue
from kvsieve.serve.reading import PromptReader
from kvsieve.serve.running import Running, next_logits
from kvsieve.serve.ticket import BusyError, Event, Order, Ticket, TooLargeError

_log = logging.getLogger(__name__)


class Scheduler:
    """Runs requests on one model. `submit` is for any thread, all else happens in the scheduler's own.

    Args:
        sieve: attached for any plan (hf.attach.attached).
        tokenizer: of the model.
        limits: of requests.
        prefixes: what was read before, to go on with.
    """

    def __init__(self, sieve: Sieve, tokenizer: Any, limits: ServerLimits, prefixes: Prefixes | None = None) -> None:
        self.sieve, self.tokenizer, self.limits = sieve, tokenizer, limits
        self.prefixes: Prefixes = NoPrefixes() if prefixes is None else prefixes
        self.counts: collections.Counter[str] = collections.Counter()
        self.bytes = KVBytes(sieve.model)
        self.pace = pace_on(sieve.model.device, limits.gap)
        if sieve.new_cache().has_state:
            # Found by passes of its own, which none of the readers may be in the middle of.
            _ = sieve.continues
        self._under: dict[str, Sieve] = {}
        self._queue, self._reading, self._running = FairQueue(), collections.deque[PromptReader](), list[Running]()
        self._held: dict[Ticket, int] = {}
        self._spent: collections.deque[float] = collections.deque(maxlen=32)
        self._changed = threading.Condition()
        self._closing: float | None = None
        self._thread = threading.Thread(target=self._work, name="kvsieve-scheduler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, seconds: float = 0.0) -> None:
        """Take no more requests, let those that run go on for so long, and write the store."""
        with self._changed:
            self._closing = time.perf_counter() + seconds
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def alive(self) -> bool:
        """True while requests are taken."""
        return self._thread.is_alive() and self._closing is None

    def submit(self, order: Order, tell: Callable[[Event], None]) -> Ticket:
        """Let a request wait for its turn; `tell` gets its events, in the scheduler's thread.

        Raises:
            InputError: it is longer than the model's context.
            TooLargeError: it needs more memory than there is for all.
            BusyError: too many wait already, or the server is closing.
        """
        context = self.context
        if context is not None and len(order.ids) + 1 > context:
            raise InputError(
                f"the prompt has {len(order.ids)} tokens: with one token of an answer that is more than the model's "
                f"context of {context}; send less"
            )
        if context is not None and len(order.ids) + order.max_tokens > context:
            order = replace(order, max_tokens=context - len(order.ids))
        ticket = Ticket(order, tell, self._wake)
        needed, most = self.needs(order), self.limits.kv_bytes
        if most is not None and needed > most:
            raise TooLargeError(
                f"{len(order.ids)} tokens and {order.answers} answers of up to {order.max_tokens} need {needed:,} "
                f"bytes of KV while they are read, and the server has {most:,}; send less or lower max_tokens"
            )
        with self._changed:
            if self._closing is not None:
                raise BusyError("the server is closing", 30)
            if len(self._queue) >= self.limits.queue:
                self.counts["refused"] += 1
                raise BusyError(f"{len(self._queue)} requests wait already; try again later", self._patience())
            self._queue.put(ticket)
            self.counts["requests"] += 1
            self._changed.notify()
        return ticket

    @property
    def context(self) -> int | None:
        """Tokens of the model's context, None where it has no end."""
        found: int | None = getattr(self.sieve.config, "max_position_embeddings", None)
        return found

    def state(self) -> dict[str, int]:
        """Count what is going on now, and bytes reserved."""
        return {
            "queued": len(self._queue),
            "reading": len(self._reading),
            "running": sum(each.going for each in list(self._running)),
            "kv_bytes": sum(list(self._held.values())),
            "kv_limit": self.limits.kv_bytes or 0,
        }

    def check_plan(self, plan: Plan) -> Plan:
        """Return a plan with nothing left open. Raises PlanError or UnsupportedModelError where it cannot run."""
        return self._sieve(plan).plan

    def needs(self, order: Order) -> int:
        """Most bytes that a request takes: its prompt in full, until the plan has acted, its answers, and room."""
        room = max(MIN_ROOM, len(order.ids) // 8)
        return self.bytes.of(len(order.ids)) + order.answers * self.bytes.of(order.max_tokens + room)

    def _patience(self) -> int:
        mean = sum(self._spent) / len(self._spent) if self._spent else 5.0
        return max(1, round(mean * len(self._queue) / self.limits.running))

    def _sieve(self, plan: Plan) -> Sieve:
        key = repr(plan)
        if key not in self._under:
            self._under[key] = under(self.sieve, plan)
        return self._under[key]

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify()

    def _work(self) -> None:
        torch.set_grad_enabled(False)
        hooks = pause_within(self.sieve.layers)
        while True:
            with self._changed:
                while not (self._reading or self._running or self._closing is not None or len(self._queue)):
                    self._changed.wait()
            self._let_go()
            if self._closing is not None and not (self._reading or self._running):
                break
            self._admit()
            if self._running:
                with self.pace.decoding():
                    self._decode()
            if self._reading:
                self._read()
        for hook in hooks:
            hook.remove()
        self.prefixes.close()

    def _let_go(self) -> None:
        """Drop what nobody waits for, and what takes too long."""
        now, closing = time.perf_counter(), self._closing
        late = closing is not None and now > closing

        def over(ticket: Ticket) -> bool:
            return now - ticket.came > self.limits.seconds

        with self._changed:
            gone = self._queue.drop(lambda ticket: ticket.cancelled or over(ticket) or closing is not None)
        for ticket in gone:
            why = "the server is closing" if closing is not None else f"it waited for {self.limits.seconds:.0f} s"
            self._end(ticket, BusyError(f"the request was not begun: {why}", self._patience()))
        for reading in [each for each in self._reading if each.ticket.cancelled or over(each.ticket) or late]:
            self._reading.remove(reading)
            reading.stop()
            self._end(reading.ticket, BusyError("the prompt was not read in the time there is", self._patience()))
        for running in list(self._running):
            if running.ticket.cancelled:
                self._running.remove(running)
                self._end(running.ticket, None)
            elif over(running.ticket) or late:
                running.cut()
                self._finish(running)

    def _admit(self) -> None:
        """Begin to read what there is room for, in turn."""
        most = self.limits.kv_bytes
        while True:
            with self._changed:
                ticket = self._queue.first()
                if ticket is None:
                    return
                rows = sum(each.going for each in self._running) + sum(
                    each.ticket.order.answers for each in self._reading
                )
                if rows and rows + ticket.order.answers > self.limits.running:
                    return
                needed = self.needs(ticket.order)
                if most is not None and sum(self._held.values()) + needed > most:
                    return
                self._queue.take()
            self._held[ticket] = needed
            try:
                sieve = self._sieve(ticket.order.plan)
                cache = self.prefixes.find(sieve, ticket.order) or sieve.new_cache()
                border = self.prefixes.at_border
                self._reading.append(PromptReader(ticket, sieve, cache, self.limits.chunk, self.pace, border))
            except Exception as error:
                self._fail(ticket, error)

    def _read(self) -> None:
        """Read the prompt whose turn it is, for as long as running answers can wait."""
        reading = self._reading.popleft()
        self.pace.begin(waits=bool(self._running))
        try:
            read = reading.step()
            self.counts["late_tokens"] += self.pace.late
            if not read:
                self._reading.append(reading)
                return
            self._begin(reading)
        except Exception as error:
            self._fail(reading.ticket, error)

    def _begin(self, reading: PromptReader) -> None:
        """Choose the first tokens behind a prompt that is read."""
        ticket, logits = reading.ticket, reading.logits
        assert logits is not None
        order = ticket.order
        self.counts["prompt_tokens"] += len(order.ids)
        self.counts["cached_tokens"] += reading.cached
        self.prefixes.add(reading)
        running = Running(ticket, reading, logits, self.tokenizer)
        read = sum(answer.cache.nbytes() for answer in running.answers)
        self._held[ticket] = min(self._held[ticket], read + order.answers * self.bytes.of(order.max_tokens))
        self._running.append(running)
        self._finish_ended(running)

    def _decode(self) -> None:
        """Run one pass over the next token of every answer."""
        going = [(running, answer) for running in self._running for answer in running.answers if not answer.finish]
        together = [each for each in going if joins(each[1].cache)]
        parts = [together] if together else []
        parts += [[each] for each in going if not joins(each[1].cache)]
        for part in parts:
            try:
                logits = next_logits(self.sieve, part)
            except Exception as error:
                self._drop({id(running): running for running, _ in part}.values(), error)
                continue
            self.counts["decode_passes"] += 1
            self.counts["new_tokens"] += len(part)
            for row, (running, answer) in zip(logits, part, strict=True):
                try:
                    answer.add(row)
                except Exception as error:
                    self._drop([running], error)
        for running in list(self._running):
            self._finish_ended(running)

    def _drop(self, failed: Iterable[Running], error: Exception) -> None:
        for running in failed:
            if running in self._running:
                self._running.remove(running)
                self._fail(running.ticket, error)

    def _finish_ended(self, running: Running) -> None:
        if not running.going:
            self._finish(running)

    def _finish(self, running: Running) -> None:
        self._running.remove(running)
        self.prefixes.add_answer(running.reading, running.answers[0])
        summary = running.summary()
        self._spent.append(summary.seconds)
        self.counts["answered"] += 1
        self._end(running.ticket, summary)

    def _fail(self, ticket: Ticket, error: Exception) -> None:
        self.counts["failed"] += 1
        if not isinstance(error, KvsieveError):
            _log.error("a request failed: %s", type(error).__name__, exc_info=error)
        self._end(ticket, error)

    def _end(self, ticket: Ticket, event: Event | None) -> None:
        """Free what a ticket holds, and tell its last event."""
        self._held.pop(ticket, None)
        if event is None or ticket.cancelled:
            self.counts["cancelled"] += 1
        if event is not None:
            ticket.tell(event)
