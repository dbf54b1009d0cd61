"""The scheduler's events, forwarded to an event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial

from kvsieve.decoding.asked import AnswerPart, ChosenToken
from kvsieve.serve.scheduler import Scheduler
from kvsieve.serve.ticket import Event, Order, Summary, Ticket


class Exchange:
    """Orders of one request and their events.

    Attributes:
        summaries: of each order that has ended.
    """

    def __init__(
        self, scheduler: Scheduler, orders: Sequence[Order], note: Callable[[Summary], None] = lambda summary: None
    ) -> None:
        """Submit the orders, all or none; `note` is called with each summary. Raises the errors of Scheduler.submit."""
        self._note = note
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._jobs: list[Ticket] = []
        self.summaries: list[Summary | None] = [None] * len(orders)
        try:
            for number, order in enumerate(orders):
                self._jobs.append(scheduler.submit(order, partial(self._tell, number)))
        except BaseException:
            self.cancel()
            raise

    def _tell(self, number: int, event: Event) -> None:
        # The loop may have ended before the last of the answers.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._events.put_nowait, (number, event))

    def cancel(self) -> None:
        for ticket, summary in zip(self._jobs, self.summaries, strict=False):
            if summary is None:
                ticket.cancel()

    async def answers(self, count: int) -> tuple[list[str], list[list[ChosenToken]], list[str]]:
        """Wait for all answers, `count` to each order; return their texts, tokens and finish reasons."""
        total = count * len(self._jobs)
        texts = [""] * total
        tokens = [list[ChosenToken]() for _ in range(total)]
        ends = ["stop"] * total
        async for number, part in self.parts():
            at = number * count + part.answer
            texts[at] += part.text
            tokens[at] += part.tokens
            ends[at] = part.finish or ends[at]
        return texts, tokens, ends

    async def parts(self) -> AsyncIterator[tuple[int, AnswerPart]]:
        """Yield parts of answers with the number of their order; leaving early stops the others.

        Raises:
            Exception: the first error of an order.
        """
        try:
            while None in self.summaries:
                number, event = await self._events.get()
                if isinstance(event, Exception):
                    raise event
                if isinstance(event, Summary):
                    self.summaries[number] = event
                    self._note(event)
                else:
                    yield number, event
        finally:
            self.cancel()
