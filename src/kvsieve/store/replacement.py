"""Which node goes first: the one that saves the fewest seconds per byte, and has not been asked for lately.

A node's worth is what reading its tokens again would take, from the nearest node below it that stays, times how often
it was found, per byte. What it is worth counts from the worth of the last node that went, so that what is not asked for
any more goes in time (the rule known as GreedyDual-Size-Frequency).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

from kvsieve.store.node import Node


class Replacement:
    """The nodes of one tier that may go, the least worth first.

    A worth is worked out when the next node is asked for, of the nodes that were named since.
    """

    def __init__(self, saves: Callable[[Node], float], size: Callable[[Node], int]) -> None:
        """Begin without nodes.

        Args:
            saves: seconds that a node saves.
            size: bytes that would be free without it.
        """
        self._saves, self._size = saves, size
        self._level, self._numbers = 0.0, itertools.count()
        self._since: dict[Node, float] = {}
        self._changed: dict[Node, None] = {}
        self._last: dict[Node, int] = {}
        # Nodes that wait to be written, and the others.
        self._heaps: dict[bool, list[tuple[float, int, Node]]] = {False: [], True: []}

    def touch(self, node: Node) -> None:
        """Note that a node is new, or was found."""
        self._since[node] = self._level
        self.change(node)

    def change(self, node: Node) -> None:
        """Note that a node's worth may be another one now, or that it has been written; no other than those touched."""
        if node in self._since:
            self._changed[node] = None

    def remove(self, node: Node) -> None:
        """Forget a node, which has gone or is to stay."""
        for known in (self._since, self._changed, self._last):
            known.pop(node, None)

    def next(self, waiting: bool = False) -> Node | None:
        """Return the node that goes, which is forgotten; None for none.

        waiting: among those that wait to be written, in place of all others.
        """
        for node in self._changed:
            # What frees nothing by itself goes last.
            worth = self._since[node] + (1 + node.hits) * self._saves(node) / max(self._size(node), 1)
            self._last[node] = number = next(self._numbers)
            heapq.heappush(self._heaps[node.waits], (worth, number, node))
        self._changed.clear()
        heap = self._heaps[waiting]
        if len(heap) > 2 * len(self._last) + 64:
            heap[:] = [each for each in heap if self._last.get(each[2]) == each[1]]
            heapq.heapify(heap)
        while heap:
            worth, number, node = heapq.heappop(heap)
            if self._last.get(node) == number:
                self._level = max(self._level, worth)
                self.remove(node)
                return node
        return None
