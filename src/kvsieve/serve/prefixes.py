"""Prefix cache of the server, as the scheduler uses it."""

from __future__ import annotations

import collections
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
# Most prompts with images whose positions are remembered.
_SHIFTS = 1024


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

    def shift_after(self, order: Order) -> int | None:
        """Return the shift of positions after a prompt's images that an earlier reading found, or None."""
        return None

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
        self._shifts: collections.OrderedDict[bytes, int] = collections.OrderedDict()

    def why_not(self, sieve: Sieve, order: Order) -> str | None:
        return unserved(sieve, vars(order.constraints))

    def find(self, sieve: Sieve, order: Order, chunk: int) -> FoundPrompt | None:
        if self.why_not(sieve, order) is not None:
            return None
        return self._of(order).find(sieve, order.known_ids, chunk)

    def shift_after(self, order: Order) -> int | None:
        return None if order.images is None else self._shifts.get(order.images.key)

    def covered(self, sieve: Sieve, order: Order, chunk: int) -> int:
        return 0 if self.why_not(sieve, order) is not None else self._of(order).covered(sieve, order.known_ids, chunk)

    def at_border(self, reading: PromptReader, left: int) -> None:
        plan = reading.sieve.plan
        cache = reading.cache
        chunk = reading.chunk
        # The whole prompt is stored before it is answered, and serves shorter ones where nothing has been dropped.
        last = left <= chunk and (cache.forgets or acts_at_end(plan))
        if self._of(reading.ticket.order).is_border(plan, cache, chunk, last):
            self._put(reading, reading.ticket.order.known_ids)

    def add(self, reading: PromptReader) -> None:
        images = reading.ticket.order.images
        if images is not None and reading.shift is not None:
            self._shifts[images.key] = reading.shift
            if len(self._shifts) > _SHIFTS:
                self._shifts.popitem(last=False)
        if reading.cache.num_seen >= LEAST:
            self._put(reading, reading.ticket.order.known_ids)

    def add_answer(self, reading: PromptReader, answer: Answer) -> None:
        self._put(reading, (*reading.ticket.order.known_ids, *answer.tokens))

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
