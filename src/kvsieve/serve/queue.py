"""Queues of requests that wait for admission, and of those that wait for their prefill."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from kvsieve.serve.reading import PromptReader
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


class PrefillQueue:
    """Admitted prompts, prefilled one after the other: short ones first, fair between owners, none delayed forever.

    An owner's next prompt is the one with the earliest deadline: the tokens that the owner had got when it came, plus
    its own. So a later prompt overtakes it only if shorter by more than the owner has got in between, and none does
    once the owner has got as many tokens as it has.

    The next owner is the one that will have got the fewest tokens at the end of its next prompt. So of two owners that
    wait, neither gets more than the other plus the other's next prompt. An owner who comes counts as having got its
    share of all tokens so far.
    """

    def __init__(self) -> None:
        # By owner, the tokens that it had got when each prompt came.
        self._waiting: dict[str, dict[PromptReader, float]] = {}
        self._tokens: dict[str, float] = {}
        # A share of all tokens.
        self._share = 0.0

    def __len__(self) -> int:
        return sum(map(len, list(self._waiting.values())))

    def __iter__(self) -> Iterator[PromptReader]:
        return iter([reading for own in self._waiting.values() for reading in own])

    def add(self, reading: PromptReader) -> None:
        owner = reading.ticket.order.owner
        if not self._waiting:
            self._tokens.clear()
            self._share = 0.0
        if owner not in self._waiting:
            self._waiting[owner] = {}
            self._tokens[owner] = max(self._tokens.get(owner, 0.0), self._share)
        self._waiting[owner][reading] = self._tokens[owner]

    def first(self) -> PromptReader:
        """Return the next prompt; of equal ones, the one that came first."""
        nexts = [_earliest(own) for own in self._waiting.values()]
        return min(nexts, key=lambda reading: self._tokens[reading.ticket.order.owner] + reading.left)

    def spend(self, reading: PromptReader, tokens: int) -> None:
        """Count tokens of a prompt here that were prefilled."""
        self._tokens[reading.ticket.order.owner] += tokens
        self._share += tokens / len(self._waiting)

    def remove(self, reading: PromptReader) -> None:
        """Remove a prompt that is prefilled or abandoned."""
        owner = reading.ticket.order.owner
        del self._waiting[owner][reading]
        if not self._waiting[owner]:
            del self._waiting[owner]


def _earliest(came: dict[PromptReader, float]) -> PromptReader:
    return min(came, key=lambda reading: came[reading] + reading.size)
