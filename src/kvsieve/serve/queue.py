"""Queue of waiting requests: round-robin over owners, in order of arrival for each."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from kvsieve.serve.ticket import Ticket


class FairQueue:
    """Queue with turns of owners, so that one with many requests does not delay all others."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[Ticket]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def __iter__(self) -> Iterator[Ticket]:
        for tickets in self._waiting.values():
            yield from tickets

    def put(self, ticket: Ticket) -> None:
        self._waiting.setdefault(ticket.order.owner, deque()).append(ticket)

    def first(self) -> Ticket | None:
        """Return the next ticket without removing it, or None."""
        return next((tickets[0] for tickets in self._waiting.values()), None)

    def take(self) -> Ticket:
        """Remove and return the next ticket; its owner moves to the end."""
        owner, tickets = next(iter(self._waiting.items()))
        ticket = tickets.popleft()
        del self._waiting[owner]
        if tickets:
            self._waiting[owner] = tickets
        return ticket

    def drop(self, gone: Callable[[Ticket], bool]) -> list[Ticket]:
        out = [ticket for ticket in self if gone(ticket)]
        for owner in list(self._waiting):
            left = deque(ticket for ticket in self._waiting[owner] if ticket not in out)
            if left:
                self._waiting[owner] = left
            else:
                del self._waiting[owner]
        return out
