"""The scheduler: one thread that owns the model and runs requests together, in fair turns."""

from __future__ import annotations

import collections
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from kvsieve.errors import InputError
from kvsieve.hf.attach import under
from kvsieve.hf.model.context import context_of
from kvsieve.hf.sieve import Sieve
from kvsieve.planning.plans import Plan
from kvsieve.serve.documents import check_joined
from kvsieve.serve.images import tower_layers
from kvsieve.serve.limits import ServerLimits
from kvsieve.serve.pace import pause_within
from kvsieve.serve.plan_sieves import PlanSieves
from kvsieve.serve.prefixes import Prefixes
from kvsieve.serve.queue import FairQueue
from kvsieve.serve.ticket import BusyError, ClosingError, Event, Order, StoppedError, Ticket, TooLargeError
from kvsieve.serve.workload import Workload

_log = logging.getLogger(__name__)
# Seconds after which a closing server may have restarted.
_RESTART = 30


class Scheduler:
    """Runs requests on one model. `submit`, `state` and `check_plan` are thread-safe, all else is its own thread's.

    An error of one request ends that request. If the thread itself ends, all waiting requests fail with the reason, and
    so do later ones.

    Args:
        sieve: attached for any plan (hf.attach.attached).
        tokenizer: of the model.
        limits: of requests.
        prefixes: the prefix cache.
    """

    def __init__(self, sieve: Sieve, tokenizer: Any, limits: ServerLimits, prefixes: Prefixes | None = None) -> None:
        self.sieve = sieve
        self.limits = limits
        self.prefixes = Prefixes() if prefixes is None else prefixes
        self._under = PlanSieves(sieve)
        self._work = Workload(self._under, sieve, tokenizer, limits, self.prefixes, lambda: self._news)
        if sieve.new_cache().has_state:
            # Found by passes of its own, which none of the readers may be in the middle of.
            _ = sieve.continues
        self._queue = FairQueue()
        self._changed = threading.Condition()
        self._closing: float | None = None
        self._closed = False
        self._ended: BaseException | None = None
        # Something has come, or was cancelled, since the last step began.
        self._news = False
        self._thread = threading.Thread(target=self._run, name="kvsieve-scheduler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, seconds: float) -> None:
        """End all requests after `seconds`; those submitted so far are answered if there is time."""
        with self._changed:
            self._closing = time.perf_counter() + seconds
            self._notify()

    def close(self) -> None:
        """Refuse new requests, end running ones, and write the store."""
        with self._changed:
            self._closed = True
        self.stop(0.0)
        if self._thread.is_alive():
            self._thread.join()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and self._closing is None and self._ended is None

    @property
    def counts(self) -> collections.Counter[str]:
        return self._work.counts

    def submit(self, order: Order, tell: Callable[[Event], None]) -> Ticket:
        """Queue a request; `tell` gets its events, in the scheduler's thread.

        Raises:
            InputError: it is longer than the model's context, or has documents that its plan cannot join.
            TooLargeError: it needs more memory than there is for all.
            BusyError: too many requests wait.
            ClosingError: the server is closing.
            StoppedError: the scheduler's thread has ended.
        """
        context = self.context
        if context is not None and len(order.ids) + 1 > context:
            raise InputError(
                f"the prompt has {len(order.ids)} tokens: with one token of an answer that is more than the model's "
                f"context of {context}; send less"
            )
        if context is not None and len(order.ids) + order.max_tokens > context:
            order = replace(order, max_tokens=context - len(order.ids))
        check_joined(under(self.sieve, order.plan), order)
        ticket = Ticket(order, tell, self._wake)
        needed = self._work.needs(order)
        most = self.limits.kv_bytes
        if most is not None and needed > most:
            raise TooLargeError(
                f"{len(order.ids)} tokens and {order.answers} answers of up to {order.max_tokens} need {needed:,} "
                f"bytes of KV while they are read, and the server has {most:,}; send less or lower max_tokens"
            )
        with self._changed:
            if self._ended is not None:
                raise _stopped(self._ended)
            if self._late():
                raise ClosingError("the server is closing", _RESTART)
            if len(self._queue) >= self.limits.queue:
                self.counts["refused"] += 1
                raise BusyError(f"{len(self._queue)} requests wait already; try again later", self._patience())
            self._queue.put(ticket)
            self.counts["requests"] += 1
            self._notify()
        return ticket

    @property
    def context(self) -> int | None:
        return context_of(self.sieve.config)

    def state(self) -> dict[str, int]:
        """Count current requests and reserved bytes."""
        with self._changed:
            queued = len(self._queue)
        return {"queued": queued, **self._work.state(), "kv_limit": self.limits.kv_bytes or 0}

    def check_plan(self, plan: Plan) -> Plan:
        """Return a fully specified plan. Raises PlanError or UnsupportedModelError if it cannot run."""
        return under(self.sieve, plan).plan

    def _patience(self) -> int:
        spent = list(self._work.seconds)
        mean = sum(spent) / len(spent) if spent else 5.0
        return max(1, round(mean * len(self._queue) / self.limits.running))

    def _wake(self) -> None:
        with self._changed:
            self._notify()

    def _notify(self) -> None:
        self._news = True
        self._changed.notify()

    def _run(self) -> None:
        torch.set_grad_enabled(False)
        hooks = pause_within([*self.sieve.layers, *tower_layers(self.sieve)])
        try:
            while self._go_on():
                pass
        except BaseException as error:
            _log.critical("the scheduler has ended: %s", type(error).__name__, exc_info=error)
            self._end(error)
        finally:
            for hook in hooks:
                hook.remove()
            try:
                self.prefixes.close()
            except Exception as error:
                _log.error("the store was not written: %s", type(error).__name__, exc_info=error)

    def _go_on(self) -> bool:
        """Wait for work and do one step of it; return False once the server is closed and idle."""
        with self._changed:
            while not (self._work or self._closed or len(self._queue)):
                self._changed.wait()
            self._news = False
        try:
            self._let_go()
            # Later cancellations are handled next time.
            if self._closed and not (self._work or len(self._queue)):
                return False
            self._admit()
            self._work.step()
        except Exception as error:
            if self._closed:
                raise
            # The request at fault is not known: it is one that runs, or else the next.
            if not self._work.fail_all(error):
                self._end_first(error)
        return True

    def _end_first(self, error: Exception) -> None:
        with self._changed:
            ticket = None if self._queue.first() is None else self._queue.take()
        if ticket is not None:
            self._work.fail(ticket, error)

    def _end(self, error: BaseException) -> None:
        """Refuse later requests, and fail all waiting ones."""
        with self._changed:
            self._ended = error
        self._work.fail_all(_stopped(error))
        while self._queue.first() is not None:
            self._work.fail(self._queue.take(), _stopped(error))

    def _late(self) -> bool:
        return self._closing is not None and time.perf_counter() >= self._closing

    def _let_go(self) -> None:
        """Drop cancelled requests, and those out of time."""
        now = time.perf_counter()
        late = self._late()

        def over(ticket: Ticket) -> bool:
            return late or now - ticket.came > self.limits.seconds

        def refusal(what: str) -> BusyError:
            if late:
                return ClosingError(f"{what}: the server is closing", _RESTART)
            return BusyError(f"{what} within {self.limits.seconds:g} s", self._patience())

        with self._changed:
            tickets = self._queue.drop(lambda ticket: ticket.cancelled or over(ticket))
        for ticket in tickets:
            self._work.end(ticket, refusal("the request was not begun"))
        self._work.let_go(over, refusal)

    def _admit(self) -> None:
        """Admit requests while there is room, owners in turn."""
        while True:
            with self._changed:
                ticket = self._queue.first()
                if ticket is None or not self._work.has_room(ticket.order):
                    return
                self._queue.take()
            self._work.begin(ticket)


def _stopped(error: BaseException) -> StoppedError:
    return StoppedError(f"the server has stopped ({type(error).__name__}); its log says more, start it again")
