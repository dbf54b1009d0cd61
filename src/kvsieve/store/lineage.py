"""The source node of each cache in use: entries shared with it need no comparison."""

from __future__ import annotations

import weakref

from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.cache.records import Conversation
from kvsieve.store.content import Stretch
from kvsieve.store.node import Node
from kvsieve.store.radix import common


class Lineage:
    """The node that each conversation was last stored as, or made of.

    A cache that is rolled back, reset or forked counts as a new conversation of unknown origin.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Conversation], weakref.ref[Node], int]] = {}

    def note(self, cache: SieveCache, node: Node, tokens: int) -> None:
        """Record that the first tokens of a cache are, bit for bit, those of a node."""
        key = id(cache.conversation)
        conversation = weakref.ref(cache.conversation, lambda _: self._known.pop(key, None))
        self._known[key] = conversation, weakref.ref(node), tokens

    def stretches(self, cache: SieveCache, new: Node) -> tuple[Stretch, ...]:
        """Return the entries in memory that a cache shares with its source node, for a new node; () if unknown.

        Nodes of different owners share nothing.
        """
        conversation, known, tokens = self._known.get(id(cache.conversation), (None, None, 0))
        node = None if known is None else known()
        if conversation is None or conversation() is not cache.conversation or node is None:
            return ()
        if node.content is None or not node.in_memory or node.tree != new.tree:
            return ()
        return node.content.begins(common(node.ids[:tokens], new.ids))
