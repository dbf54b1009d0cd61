"""Counts of what a store holds and has done."""

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
        nodes: nodes there are, in memory or on the disk.
        memory_nodes: of these, in memory.
        disk_nodes: of these, on the disk.
        memory_bytes: bytes of memory taken; what several nodes share counts once.
        disk_bytes: bytes of the files.
        hits: searches that found something.
        misses: searches that found nothing.
        disk_hits: hits that were read back from the disk.
        tokens_asked: tokens of all searches.
        tokens_reused: of these, found.
        added: nodes added.
        refused: additions of which nothing can be reused; see `PrefixStore.add`.
        evictions: nodes that had to leave memory for others.
        disk_evictions: files that had to leave the disk for others.
        replaced: nodes whose tokens a longer one has.
        damaged: files that were set aside.
        written: files written.
        write_errors: writes that failed; the node stays in memory.
        waiting: nodes that are not on the disk yet.
    """

    nodes: int = 0
    memory_nodes: int = 0
    disk_nodes: int = 0
    memory_bytes: int = 0
    disk_bytes: int = 0
    hits: int = 0
    misses: int = 0
    disk_hits: int = 0
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
    """Bytes of memory that nodes take, each place counted once."""

    def __init__(self) -> None:
        self.bytes = 0
        self._users: Counter[int] = Counter()

    def add(self, places: Iterable[tuple[int, int]]) -> None:
        """Count the memory of one node: places, each with its bytes and named once."""
        for place, size in places:
            self._users[place] += 1
            if self._users[place] == 1:
                self.bytes += size

    def remove(self, places: Iterable[tuple[int, int]]) -> None:
        """Take back what `add` counted."""
        for place, size in places:
            self._users[place] -= 1
            if not self._users[place]:
                del self._users[place]
                self.bytes -= size

    def own(self, places: Iterable[tuple[int, int]]) -> int:
        """Return the bytes that would be free if one node went."""
        return sum(size for place, size in places if self._users[place] == 1)
