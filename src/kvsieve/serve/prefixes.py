"""Prefix cache of the server, as the scheduler uses it."""

from __future__ import annotations

import logging
import os
from typing import Any, Protocol

from kvsieve.errors import KvsieveError
from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.prompt.constraints import PromptConstraints
from kvsieve.hf.reuse import STATES
from kvsieve.hf.sieve import Sieve
from kvsieve.serve.answer import Answer
from kvsieve.serve.reading import PromptReader
from kvsieve.serve.ticket import Order
from kvsieve.store import PrefixStore
from kvsieve.store.rules import acts_at_end, reuse_of

_log = logging.getLogger(__name__)
# Tokens below which prefill is faster than a lookup, and most nodes listed.
_LEAST = 32
_SHOWN = 200


class Prefixes(Protocol):
    """Interface of a prefix cache."""

    def find(self, sieve: Sieve, order: Order, chunk: int) -> SieveCache | None:
        """Return a cache with a prefix of the prompt, or None.

        chunk: tokens per pass of the prompt's prefill.
        """

    def at_border(self, reading: PromptReader, left: int) -> None:
        """Store the beginning of a prompt with `left` tokens not prefilled."""

    def add(self, reading: PromptReader) -> None:
        """Store a prefilled prompt."""

    def add_answer(self, reading: PromptReader, answer: Answer) -> None:
        """Store an answer to it."""

    def to_dict(self) -> dict[str, int]:
        """Count entries and hits."""

    def nodes(self, owner: str) -> list[dict[str, Any]]:
        """List the entries of an owner."""

    def close(self) -> None:
        """Write pending entries."""


class NoPrefixes:
    """Stores nothing."""

    def find(self, sieve: Sieve, order: Order, chunk: int) -> SieveCache | None:
        return None

    def at_border(self, reading: PromptReader, left: int) -> None:
        """Nothing to do."""

    def add(self, reading: PromptReader) -> None:
        """Nothing to do."""

    def add_answer(self, reading: PromptReader, answer: Answer) -> None:
        """Nothing to do."""

    def to_dict(self) -> dict[str, int]:
        return {}

    def nodes(self, owner: str) -> list[dict[str, Any]]:
        return []

    def close(self) -> None:
        """Nothing to do."""


class StoredPrefixes:
    """Prefix cache backed by a PrefixStore.

    A request without a session is a single prompt: a prefix hit was prefilled in the same way, so the answer is the
    same as without the cache. A request with a session continues the conversation of that name, on the entries that the
    plan left of earlier turns, as a chat does.

    Args:
        store: the entries.
        share: let all owners reuse the prefixes of others.
    """

    def __init__(self, store: PrefixStore, share: bool) -> None:
        self.store, self.share = store, share

    def find(self, sieve: Sieve, order: Order, chunk: int) -> SieveCache | None:
        if not _findable(order):
            return None
        turns = None if order.session is not None else (len(order.ids),)
        found = self.store.find(sieve, order.ids, self._owner(order), turns=turns, chunk=chunk)
        return None if found is None else found.cache

    def at_border(self, reading: PromptReader, left: int) -> None:
        order, cache, chunk = reading.ticket.order, reading.cache, reading.chunk
        if order.session is not None or not _findable(order) or cache.num_seen < _LEAST:
            return
        # Without recurrent states, the last border serves all shorter prefixes.
        often = cache.has_state and cache.num_seen // chunk % STATES == 0
        if often or (left <= chunk and (cache.forgets or acts_at_end(reading.sieve.plan))):
            self._add(reading, order.ids)

    def add(self, reading: PromptReader) -> None:
        if reading.cache.num_seen >= _LEAST:
            self._add(reading, reading.ticket.order.ids)

    def add_answer(self, reading: PromptReader, answer: Answer) -> None:
        self._add(reading, (*reading.ticket.order.ids, *answer.tokens))

    def _add(self, reading: PromptReader, ids: tuple[int, ...]) -> None:
        order, sieve, cache = reading.ticket.order, reading.sieve, reading.cache
        if not _findable(order):
            return
        try:
            reuse = reuse_of(sieve, cache, length=len(ids), chunk=reading.chunk)
            if order.session is not None or reuse.serves_anew:
                self.store.add(sieve, ids, cache, reading.seconds, self._owner(order), chunk=reading.chunk)
        except (KvsieveError, OSError) as error:
            # The answer does not depend on it.
            _log.warning("not stored: %s", error)

    def _owner(self, order: Order) -> str:
        owner = "" if self.share else order.owner
        return owner if order.session is None else f"{owner}/{order.session}"

    def to_dict(self) -> dict[str, int]:
        return self.store.stats().to_dict()

    def nodes(self, owner: str) -> list[dict[str, Any]]:
        mine = "" if self.share else owner
        listed = [node for node in self.store.nodes() if node.owner == mine or node.owner.startswith(f"{mine}/")]
        rows = [node.to_dict() for node in listed[:_SHOWN]]
        return [{**each, "owner": None, "session": each["owner"].partition("/")[2] or None} for each in rows]

    def close(self) -> None:
        self.store.close()


def _findable(order: Order) -> bool:
    """Return whether a prompt may be stored and reused: it has no constraints that others do not share."""
    return order.constraints == PromptConstraints()


def open_prefixes(path: str | None, memory: str, disk: str, share: bool) -> Prefixes | None:
    """Open the server's prefix store, or return None if disabled. Raises InputError for an unusable directory."""
    if memory.strip() in ("0", "none") and path is None:
        return None
    return StoredPrefixes(PrefixStore(None if path is None else os.path.expanduser(path), memory, disk), share)
