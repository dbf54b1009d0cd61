"""Counts of a store's content and history."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class StoreStats:
    """Counts of a store: its entries, and its hits and evictions since it was opened.

    Attributes:
        nodes: number of nodes, in memory or on disk.
        memory_nodes: nodes in memory.
        disk_nodes: nodes on disk.
        memory_bytes: bytes of memory; shared memory counts once.
        disk_bytes: bytes of the files.
        hits: searches with a hit.
        misses: searches without a hit.
        disk_hits: hits loaded from disk.
        approximate_hits: hits with approximate entries.
        tokens_asked: tokens of all searches.
        tokens_reused: tokens of the hits.
        added: nodes added.
        refused: additions without anything to reuse; see `PrefixStore.add`.
        evictions: nodes evicted from memory.
        disk_evictions: files evicted from disk.
        replaced: nodes made redundant by a longer one.
        damaged: files moved to ``damaged/``.
        written: files written.
        write_errors: failed writes; the node stays in memory.
        waiting: nodes not yet on disk.
    """

    nodes: int = 0
    memory_nodes: int = 0
    disk_nodes: int = 0
    memory_bytes: int = 0
    disk_bytes: int = 0
    hits: int = 0
    misses: int = 0
    disk_hits: int = 0
    approximate_hits: int = 0
    tokens_asked: int = 0
    tokens_reused: int = 0
    added: int = 0
    refused: int = 0
    evictions: int = 0
    disk_evictions: int = 0
    replaced: int = 0
    damaged: int = 0
    written: int = 0
    write_errors: int = 0
    waiting: int = 0

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return dataclasses.asdict(self)


class Ledger:
    """Bytes of memory of the nodes; shared places count once."""

    def __init__(self) -> None:
        self.bytes = 0
        self._users: Counter[int] = Counter()

    def add(self, places: Iterable[tuple[int, int]]) -> None:
        """Count the memory of one node: places, each with its bytes, without duplicates."""
        for place, size in places:
            self._users[place] += 1
            if self._users[place] == 1:
                self.bytes += size

    def remove(self, places: Iterable[tuple[int, int]]) -> None:
        """Undo `add`."""
        for place, size in places:
            self._users[place] -= 1
            if not self._users[place]:
                del self._users[place]
                self.bytes -= size

    def own(self, places: Iterable[tuple[int, int]]) -> int:
        """Return the bytes freed by removing one node."""
        return sum(size for place, size in places if self._users[place] == 1)
