"""Where nodes are found: by what they were read with, their owner, and their tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from kvsieve.store.node import Node
from kvsieve.store.radix import RadixTree, Tokens
from kvsieve.store.rules import Request

# Nodes that are compared to find what another one shares with them.
_LOOKED_AT = 64
# Nodes whose worth may change when another one comes or goes.
_NEAR = 8


class _Tree:
    """The nodes of one owner under one identity.

    Attributes:
        ends: each node at the end of its tokens.
        cuts: nodes of which a beginning may be taken, at the end of the longest one.
    """

    def __init__(self) -> None:
        self.ends: RadixTree[Node] = RadixTree()
        self.cuts: RadixTree[Node] = RadixTree()


class Forest:
    """A tree for each owner and identity that has nodes."""

    def __init__(self) -> None:
        self._trees: dict[tuple[str, str], _Tree] = {}

    def __len__(self) -> int:
        return len(self._trees)

    def add(self, node: Node) -> None:
        """Take in a node."""
        tree = self._trees.setdefault(node.tree, _Tree())
        tree.ends.add(node.ids, node)
        if node.reuse.cut:
            tree.cuts.add(node.ids[: node.reuse.cut], node)

    def remove(self, node: Node) -> None:
        """Take a node out, and its tree with the last one."""
        tree = self._trees[node.tree]
        tree.ends.remove(node.ids, node)
        if node.reuse.cut:
            tree.cuts.remove(node.ids[: node.reuse.cut], node)
        if tree.ends.is_empty:
            del self._trees[node.tree]

    def best(self, key: str, owners: tuple[str, ...], ids: Tokens, request: Request) -> tuple[Node | None, int]:
        """Return the node that a request may take most tokens of, and how many; None and 0 for none."""
        best: tuple[Node | None, int] = (None, 0)
        for owner in dict.fromkeys(owners):
            tree = self._trees.get((key, owner))
            if tree is None:
                continue
            whole = tree.ends.prefixes(ids)
            # Of equals any will do, so the first one tells.
            for node, common in itertools.chain(whole, itertools.islice(tree.cuts.along(ids), 1)):
                takes = node.reuse.takes(common, len(ids), request)
                if takes > best[1]:
                    best = node, takes
        return best

    def along(self, node: Node) -> Iterator[tuple[Node, int]]:
        """Yield other nodes of a node's tree and how many tokens the two have in common, the most first; not all."""
        tree = self._trees.get(node.tree)
        if tree is not None:
            near = itertools.islice(tree.ends.along(node.ids), _LOOKED_AT)
            yield from ((other, common) for other, common in near if other is not node)

    def near(self, node: Node) -> list[Node]:
        """Return the nodes that most depends on whether this one is there."""
        return [other for other, _ in itertools.islice(self.along(node), _NEAR)]

    def replaced_by(self, node: Node) -> list[Node]:
        """Return the nodes all of whose tokens may be taken from a new one as well."""
        found = []
        for other, common in self._trees[node.tree].ends.prefixes(node.ids):
            within = other is not node and common == other.reuse.cut <= node.reuse.cut
            # What is cut off is the beginning of a first prompt; a plan that acts takes the end of one for another.
            same = not other.reuse.acts or (other.reuse.half_read and other.reuse.turns == ())
            if within and same and not other.pinned:
                found.append(other)
        return found

    def saves(self, node: Node) -> float:
        """Return the seconds that a node saves beside the others."""
        seconds, tokens = 0.0, 0
        for other, common in self.along(node):
            takes = common if common == other.reuse.tokens else min(common, other.reuse.cut)
            if tokens < takes < node.reuse.tokens:
                seconds, tokens = other.seconds * takes / other.reuse.tokens, takes
        # Where nobody has measured, tokens tell.
        return max(node.seconds - seconds, 0.0) + 1e-6 * (node.reuse.tokens - tokens)
