"""Which node goes first: the one that saves the fewest seconds per byte, and has not been asked for lately.

A node's worth is what reading its tokens again would take, from the nearest node below it that stays, times how often
it was found, per byte. What it is worth counts from the worth of the last node that went, so that what is not asked for
any more goes in time (the rule known as GreedyDual-Size-Frequency).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

from kvsieve.store.node import Node


class Replacement:
    """Chooses the nodes that go. One per tier."""

    def __init__(self) -> None:
        self._level = 0.0
        self._since: weakref.WeakKeyDictionary[Node, float] = weakref.WeakKeyDictionary()

    def touch(self, node: Node) -> None:
        """Note that a node is new, or was found."""
        self._since[node] = self._level

    def next(self, nodes: Iterable[Node], saves: Callable[[Node], float], size: Callable[[Node], int]) -> Node | None:
        """Choose the node that goes; None where none would free anything.

        Args:
            nodes: those that may go.
            saves: seconds that a node saves.
            size: bytes that would be free without it.
        """
        worth = {}
        for node in nodes:
            taken = size(node)
            if taken:
                worth[node] = self._since.get(node, 0.0) + (1 + node.hits) * saves(node) / taken
        if not worth:
            return None
        chosen = min(worth, key=lambda node: worth[node])
        self._level = worth[chosen]
        return chosen
