"""Eviction of nodes: the one that saves the fewest seconds per byte goes first, with ageing.

A node's worth is the prefill time from its nearest remaining ancestor, times its hits, per byte. Worths are added to
that of the last evicted node, so that unused nodes age (GreedyDual-Size-Frequency).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

from kvsieve.store.node import Node


class Replacement:
    """The evictable nodes of one tier, ordered by worth.

    Worths of changed nodes are recomputed when the next node is requested.
    """

    def __init__(self, saves: Callable[[Node], float], size: Callable[[Node], int]) -> None:
        """Start empty. saves: seconds that a node saves; size: bytes freed by removing it."""
        self._saves = saves
        self._size = size
        self._level, self._numbers = 0.0, itertools.count()
        self._since: dict[Node, float] = {}
        self._changed: dict[Node, None] = {}
        self._last: dict[Node, int] = {}
        # Nodes that wait to be written, and the others.
        self._heaps: dict[bool, list[tuple[float, int, Node]]] = {False: [], True: []}

    def touch(self, node: Node) -> None:
        """Record that a node is new or was hit."""
        self._since[node] = self._level
        self.change(node)

    def change(self, node: Node) -> None:
        """Record that the worth of a touched node may have changed, or that it was written."""
        if node in self._since:
            self._changed[node] = None

    def remove(self, node: Node) -> None:
        """Remove a node that was deleted or pinned."""
        for known in (self._since, self._changed, self._last):
            known.pop(node, None)

    def next(self, waiting: bool = False) -> Node | None:
        """Remove and return the node to evict, or None.

        waiting: choose among nodes not yet written, instead of the others.
        """
        for node in self._changed:
            # Nodes that free nothing alone go last.
            worth = self._since[node] + (1 + node.hits) * self._saves(node) / max(self._size(node), 1)
            self._last[node] = number = next(self._numbers)
            heapq.heappush(self._heaps[node.waits], (worth, number, node))
        self._changed.clear()
        heap = self._heaps[waiting]
        if len(heap) > 2 * len(self._last) + 64:
            heap[:] = [entry for entry in heap if self._last.get(entry[2]) == entry[1]]
            heapq.heapify(heap)
        while heap:
            worth, number, node = heapq.heappop(heap)
            if self._last.get(node) == number:
                self._level = max(self._level, worth)
                self.remove(node)
                return node
        return None
