"""Prefix cache of the server, as the scheduler uses it."""

from __future__ import annotations

import collections
import functools
import logging
import os
from collections.abc import Hashable
from typing import Any

from kvsieve.decoding.answer import Answer
from kvsieve.errors import KvsieveError
from kvsieve.hf.join.join import Joined
from kvsieve.hf.prompt.options import Progress
from kvsieve.hf.reuse import LEAST, FoundPrompt, StoredPrefixes, acts_at_end, unserved
from kvsieve.hf.sieve import Sieve
from kvsieve.serve.edits import RULE, LatestConversations, SessionEdit, edit_between, is_worthwhile
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
        return None if order.session is None else "this server has none, so kv.session has no effect"

    def find(self, sieve: Sieve, order: Order, chunk: int) -> FoundPrompt | None:
        """Return the longest stored prefix of the prompt, or None. chunk: tokens per pass of its prefill."""
        return None

    def covered(self, sieve: Sieve, order: Order, chunk: int) -> int:
        """Return the number of tokens that `find` would return."""
        return 0

    def edit(self, sieve: Sieve, order: Order, chunk: int, exact: int, known: SessionEdit | None) -> SessionEdit | None:
        """Return the edit of a stored conversation that the prompt may begin with, or None.

        Args:
            sieve: the model under the request's plan.
            order: the request.
            chunk: tokens per pass.
            exact: tokens that `find` would return; an edit that saves no more is left out.
            known: the edit chosen before; it holds while the stored conversation is the same.
        """
        return None

    def join(self, sieve: Sieve, order: Order, chunk: int, progress: Progress) -> Joined:
        """Join the documents of a prompt. Raises KvsieveError for those that cannot be joined."""
        return _joined(sieve, order, chunk, progress, None)

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
        self._latest = LatestConversations()
        self._shifts: collections.OrderedDict[bytes, int] = collections.OrderedDict()

    def why_not(self, sieve: Sieve, order: Order) -> str | None:
        return unserved(sieve, vars(order.constraints))

    def find(self, sieve: Sieve, order: Order, chunk: int) -> FoundPrompt | None:
        if not self._serves(sieve, order):
            return None
        return self._of(order).find(sieve, order.known_ids, chunk)

    def edit(self, sieve: Sieve, order: Order, chunk: int, exact: int, known: SessionEdit | None) -> SessionEdit | None:
        if not order.edits or not self._serves(sieve, order):
            return None
        ids = self._latest.get(_conversation(order))
        if ids is None and order.session is not None:
            # Of a session that an earlier process has stored.
            stored = self.store.longest(sieve, self._of(order).owner)
            if stored is not None:
                self._latest.put(_conversation(order), stored.tolist())
                ids = self._latest.get(_conversation(order))
        if ids is None:
            return None
        if known is None or known.known is not ids:
            alone = order.session is None and acts_at_end(sieve.plan)
            reason = f"{sieve.plan.name} leaves no conversation without kv.session" if alone else None
            reason = reason if order.images is None else "edits take text alone, and it has images"
            find = functools.partial(self._of(order).find, sieve, ids.tolist(), chunk, 0)
            known = edit_between(ids, order.known_ids, find, reason)
        return known if is_worthwhile(known, exact) else None

    def join(self, sieve: Sieve, order: Order, chunk: int, progress: Progress) -> Joined:
        store = self.store if self.why_not(sieve, order) is None else None
        return _joined(sieve, order, chunk, progress, store, "" if self.share else order.owner)

    def shift_after(self, order: Order) -> int | None:
        return None if order.images is None else self._shifts.get(order.images.key)

    def covered(self, sieve: Sieve, order: Order, chunk: int) -> int:
        return self._of(order).covered(sieve, order.known_ids, chunk) if self._serves(sieve, order) else 0

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
        if not self._serves(sieve, order):
            return
        try:
            self._of(order).add(sieve, ids, reading.cache, reading.seconds, reading.chunk)
            if order.edits and not reading.cache.conversation.half_read:
                self._latest.put(_conversation(order), ids[: reading.cache.num_seen])
        except (KvsieveError, OSError) as error:
            # The answer does not depend on it.
            _log.warning("not stored: %s", error)

    def _serves(self, sieve: Sieve, order: Order) -> bool:
        """Return True unless the prompt is left out of the store, as one that begins with joined documents is."""
        return order.documents is None and self.why_not(sieve, order) is None

    def _of(self, order: Order) -> StoredPrefixes:
        owner = "" if self.share else order.owner
        edited = order.edits and (order.session is not None or self._latest.get(_conversation(order)) is not None)
        rules = (RULE,) if edited else ()
        if order.session is None:
            return StoredPrefixes(self.store, owner, approximate=rules)
        return StoredPrefixes(self.store, f"{owner}/{order.session}", session=True, approximate=rules)

    def to_dict(self) -> dict[str, int]:
        return self.store.stats().to_dict()

    def nodes(self, owner: str) -> list[dict[str, Any]]:
        known = "" if self.share else owner
        listed = [node for node in self.store.nodes() if node.owner == known or node.owner.startswith(f"{known}/")]
        rows = [node.to_dict() for node in listed[:_SHOWN]]
        return [{**row, "owner": None, "session": row["owner"].partition("/")[2] or None} for row in rows]

    def close(self) -> None:
        self.store.close()


def _conversation(order: Order) -> Hashable:
    """Return the key of the conversation that a request continues."""
    return order.owner, order.session, None if order.session is not None else order.chain


def _joined(
    sieve: Sieve, order: Order, chunk: int, progress: Progress, store: PrefixStore | None, owner: str = ""
) -> Joined:
    documents = order.documents
    assert documents is not None
    before = documents.before or None
    return sieve.join(
        documents.texts,
        before,
        kind=documents.join,
        question=order.ids[documents.end :],
        store=store,
        owner=owner,
        chunk=chunk,
        progress=progress,
    )


def open_prefixes(path: str | None, memory: str, disk: str, share: bool) -> Prefixes:
    """Open the server's prefix store. Raises InputError for an unusable directory."""
    if memory.strip() in ("0", "none") and path is None:
        return Prefixes()
    return ServerPrefixes(PrefixStore(None if path is None else os.path.expanduser(path), memory, disk), share)
