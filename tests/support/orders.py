"""Orders to a scheduler, and what they come to."""

from __future__ import annotations

import queue
from collections.abc import Callable

import torch

from kvsieve.decoding.asked import AnswerPart, Sampling
from kvsieve.serve.ticket import Order, Summary, Ticket

TIMEOUT = 120


def prompt(seed: int, length: int) -> tuple[int, ...]:
    made = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, 120, (length,), generator=made).tolist())


class Heard:
    """Events of a request, and what they come to."""

    def __init__(self) -> None:
        self.events: queue.SimpleQueue = queue.SimpleQueue()

    def all(self) -> list:
        found = []
        while not found or isinstance(found[-1], AnswerPart):
            found.append(self.events.get(timeout=TIMEOUT))
        return found

    def ids(self, answer: int = 0) -> list[int]:
        """Of an answer with likelihoods."""
        events = self.all()
        assert isinstance(events[-1], Summary), events[-1]
        return [t.own.id for e in events[:-1] if e.answer == answer for t in e.tokens]


class Noted(Heard):
    """Events of a request. Its name is added to `begun` with its first token; `then` is called with each event."""

    def __init__(self, begun: list, name: object, then: Callable[[object], None] = lambda event: None) -> None:
        super().__init__()
        self.begun = begun
        self.name = name
        self.then = then

    def put(self, event: object) -> None:
        if isinstance(event, AnswerPart) and event.progress is None and self.name not in self.begun:
            self.begun.append(self.name)
        self.then(event)
        self.events.put(event)


def ask(scheduler, ids, plan, tokens=8, **more) -> tuple[Heard, Ticket]:
    heard = Heard()
    sampling = more.pop("sampling", Sampling(logprobs=0))
    order = Order(ids, plan, tokens, sampling=sampling, **more)
    return heard, scheduler.submit(order, heard.events.put)
