"""Prefix cache of the server, as the scheduler uses it."""

from __future__ import annotations

import logging
import os
from typing import Any

from kvsieve.decoding.answer import Answer
from kvsieve.errors import KvsieveError
from kvsieve.hf.reuse import LEAST, FoundPrompt, StoredPrefixes, acts_at_end, unserved
from kvsieve.hf.sieve import Sieve
from kvsieve.serve.reading import PromptReader
from kvsieve.serve.ticket import Order
from kvsieve.store import PrefixStore

_log = logging.getLogger(__name__)
# Most nodes listed.
_SHOWN = 200


class Prefixes:
    """Interface of a prefix cache; this one stores nothing."""

    def why_not(self, sieve: Sieve, order: Order) -> str | None:
        """Return why the cache is left out of a request, one clause, or None."""
        return None

    def find(self, sieve: Sieve, order: Order, chunk: int) -> FoundPrompt | None:
        """Return the longest stored prefix of the prompt, or None. chunk: tokens per pass of its prefill."""
        return None

    def covered(self, sieve: Sieve, order: Order, chunk: int) -> int:
        """Return the number of tokens that `find` would return."""
        return 0

    def at_border(self, reading: PromptReader, left: int) -> None:
        """Store the beginning of a prompt with `left` tokens not prefilled, if it is a border."""

    def add(self, reading: PromptReader) -> None:
        """Store a prefilled prompt."""

    def add_answer(self, reading: PromptReader, answer: Answer) -> None:
        """Store an answer to it."""

    def to_dict(self) -> dict[str, int]:
        """Count entries and hits."""
        return {}

    def nodes(self, owner: str) -> list[dict[str, Any]]:
        """List the entries of an owner."""
        return []

    def close(self) -> None:
        """Write pending entries."""


class ServerPrefixes(Prefixes):
    """Prefix cache backed by a PrefixStore, under the policy of `hf.reuse`.

    A request without a session is a single prompt. A request with a session continues the conversation of that name,
    as a chat does.

    Args:
        store: the entries.
        share: let all owners reuse the prefixes of others.
    """

    def __init__(self, store: PrefixStore, share: bool) -> None:
        self.store = store
        self.share = share

    def why_not(self, sieve: Sieve, order: Order) -> str | None:
        return unserved(sieve, vars(order.constraints))

    def find(self, sieve: Sieve, order: Order, chunk: int) -> FoundPrompt | None:
        if self.why_not(sieve, order) is not None:
            return None
        return self._of(order).find(sieve, order.ids, chunk)

    def covered(self, sieve: Sieve, order: Order, chunk: int) -> int:
        return 0 if self.why_not(sieve, order) is not None else self._of(order).covered(sieve, order.ids, chunk)

    def at_border(self, reading: PromptReader, left: int) -> None:
        plan = reading.sieve.plan
        cache = reading.cache
        chunk = reading.chunk
        # The whole prompt is stored before it is answered, and serves shorter ones where nothing has been dropped.
        last = left <= chunk and (cache.forgets or acts_at_end(plan))
        if self._of(reading.ticket.order).is_border(plan, cache, chunk, last):
            self._put(reading, reading.ticket.order.ids)

    def add(self, reading: PromptReader) -> None:
        if reading.cache.num_seen >= LEAST:
            self._put(reading, reading.ticket.order.ids)

    def add_answer(self, reading: PromptReader, answer: Answer) -> None:
        self._put(reading, (*reading.ticket.order.ids, *answer.tokens))

    def _put(self, reading: PromptReader, ids: tuple[int, ...]) -> None:
        order = reading.ticket.order
        sieve = reading.sieve
        if self.why_not(sieve, order) is not None:
            return
        try:
            self._of(order).add(sieve, ids, reading.cache, reading.seconds, reading.chunk)
        except (KvsieveError, OSError) as error:
            # The answer does not depend on it.
            _log.warning("not stored: %s", error)

    def _of(self, order: Order) -> StoredPrefixes:
        owner = "" if self.share else order.owner
        if order.session is None:
            return StoredPrefixes(self.store, owner)
        return StoredPrefixes(self.store, f"{owner}/{order.session}", session=True)

    def to_dict(self) -> dict[str, int]:
        return self.store.stats().to_dict()

    def nodes(self, owner: str) -> list[dict[str, Any]]:
        known = "" if self.share else owner
        listed = [node for node in self.store.nodes() if node.owner == known or node.owner.startswith(f"{known}/")]
        rows = [node.to_dict() for node in listed[:_SHOWN]]
        return [{**row, "owner": None, "session": row["owner"].partition("/")[2] or None} for row in rows]

    def close(self) -> None:
        self.store.close()


def open_prefixes(path: str | None, memory: str, disk: str, share: bool) -> Prefixes:
    """Open the server's prefix store. Raises InputError for an unusable directory."""
    if memory.strip() in ("0", "none") and path is None:
        return Prefixes()
    return ServerPrefixes(PrefixStore(None if path is None else os.path.expanduser(path), memory, disk), share)
