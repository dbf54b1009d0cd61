"""Look-up of nodes by identity, owner and tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from kvsieve.store.node import Node, Place
from kvsieve.store.radix import RadixTree, Tokens
from kvsieve.store.rules import Request

# Nodes compared at most to find entries to share.
_LOOKED_AT = 64
# Nodes re-evaluated at most when another one is added or removed.
_NEAR = 8


class _Tree:
    """The nodes of one owner under one identity, approximate by the same rules.

    Attributes:
        ends: each node at the end of its tokens.
        cuts: nodes with a reusable beginning, at the end of the longest one.
    """

    def __init__(self) -> None:
        self.ends: RadixTree[Node] = RadixTree()
        self.cuts: RadixTree[Node] = RadixTree()


class Forest:
    """A tree for each identity, owner and rules that have nodes."""

    def __init__(self) -> None:
        self._trees: dict[Place, _Tree] = {}

    def __len__(self) -> int:
        return len(self._trees)

    def add(self, node: Node) -> None:
        """Add a node."""
        tree = self._trees.setdefault(node.tree, _Tree())
        tree.ends.add(node.ids, node)
        if node.reuse.cut:
            tree.cuts.add(node.ids[: node.reuse.cut], node)

    def remove(self, node: Node) -> None:
        """Remove a node, and its tree if empty."""
        tree = self._trees[node.tree]
        tree.ends.remove(node.ids, node)
        if node.reuse.cut:
            tree.cuts.remove(node.ids[: node.reuse.cut], node)
        if tree.ends.is_empty:
            del self._trees[node.tree]

    def best(self, key: str, owners: tuple[str, ...], ids: Tokens, request: Request) -> tuple[Node | None, int]:
        """Return the node with most tokens that a request may reuse, and their number; (None, 0) for none.

        An exact node takes precedence over an approximate one with as many tokens.
        """
        best: tuple[Node | None, int] = (None, 0)
        for rules, owner in itertools.product(dict.fromkeys([(), request.approximate]), dict.fromkeys(owners)):
            tree = self._trees.get((key, owner, rules))
            if tree is None:
                continue
            whole = tree.ends.prefixes(ids)
            # All ties are equivalent: check the first.
            for node, common in itertools.chain(whole, itertools.islice(tree.cuts.along(ids), 1)):
                takes = node.reuse.takes(common, len(ids), request)
                if takes > best[1]:
                    best = node, takes
        return best

    def along(self, node: Node) -> Iterator[tuple[Node, int]]:
        """Yield other nodes of a node's tree with the length of their common prefix, longest first, up to a limit."""
        tree = self._trees.get(node.tree)
        if tree is not None:
            near = itertools.islice(tree.ends.along(node.ids), _LOOKED_AT)
            yield from ((other, common) for other, common in near if other is not node)

    def near(self, node: Node) -> list[Node]:
        """Return the nodes with a worth that may depend on this one."""
        return [other for other, _ in itertools.islice(self.along(node), _NEAR)]

    def replaced_by(self, node: Node) -> list[Node]:
        """Return the nodes that a new one makes redundant."""
        found = []
        for other, common in self._trees[node.tree].ends.prefixes(node.ids):
            within = other is not node and common == other.reuse.cut <= node.reuse.cut
            # A cut is the beginning of a first prompt; a plan that acts would take its end for a prompt's end.
            same = not other.reuse.acts or (other.reuse.half_read and other.reuse.turns == ())
            if within and same and not other.pinned:
                found.append(other)
        return found

    def saves(self, node: Node) -> float:
        """Return the seconds that a node saves in addition to the other nodes."""
        seconds = 0.0
        tokens = 0
        for other, common in self.along(node):
            takes = common if common == other.reuse.tokens else min(common, other.reuse.cut)
            if tokens < takes < node.reuse.tokens:
                seconds = other.seconds * takes / other.reuse.tokens
                tokens = takes
        # Without a measured time, the number of tokens is used.
        return max(node.seconds - seconds, 0.0) + 1e-6 * (node.reuse.tokens - tokens)
