"""A radix tree over token ids."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int64]
Entry = TypeVar("Entry")


@dataclass(eq=False)
class _Branch(Generic[Entry]):
    """A part of the tree.

    Attributes:
        edge: int64 [N], tokens between the branch above and this one.
        entries: what lies at its end.
        below: branches that go on, by their first token.
    """

    edge: Tokens
    entries: list[Entry] = field(default_factory=list)
    below: dict[int, _Branch[Entry]] = field(default_factory=dict)

    def everything(self) -> Iterator[Entry]:
        """Entries here and further down."""
        waiting = [self]
        while waiting:
            branch = waiting.pop()
            yield from branch.entries
            waiting.extend(branch.below.values())


class RadixTree(Generic[Entry]):
    """Entries by sequences of tokens, several of which may have the same."""

    def __init__(self) -> None:
        self._root: _Branch[Entry] = _Branch(np.zeros(0, dtype=np.int64))

    def __iter__(self) -> Iterator[Entry]:
        return self._root.everything()

    def add(self, tokens: Tokens, entry: Entry) -> None:
        """Put an entry at the end of int64 [N] tokens."""
        branch, at = self._root, 0
        while at < len(tokens):
            below = branch.below.get(int(tokens[at]))
            if below is None:
                below = _Branch(tokens[at:].copy())
                branch.below[int(tokens[at])] = below
                branch, at = below, len(tokens)
                continue
            same = common(below.edge, tokens[at:])
            if same < len(below.edge):
                upper: _Branch[Entry] = _Branch(below.edge[:same].copy())
                upper.below[int(below.edge[same])] = below
                branch.below[int(tokens[at])] = upper
                below.edge = below.edge[same:].copy()
                below = upper
            branch, at = below, at + same
        branch.entries.append(entry)

    def remove(self, tokens: Tokens, entry: Entry) -> None:
        """Take an entry away that lies at the end of int64 [N] tokens."""
        above: list[_Branch[Entry]] = []
        branch, at = self._root, 0
        while at < len(tokens):
            above.append(branch)
            branch = branch.below[int(tokens[at])]
            at += len(branch.edge)
        branch.entries.remove(entry)
        while above and not branch.entries:
            upper = above.pop()
            if len(branch.below) > 1:
                return
            first = int(branch.edge[0])
            if branch.below:
                (only,) = branch.below.values()
                only.edge = np.concatenate([branch.edge, only.edge])
                upper.below[first] = only
                return
            del upper.below[first]
            branch = upper

    def along(self, tokens: Tokens) -> Iterator[tuple[Entry, int]]:
        """Yield entries and how many of their first tokens int64 [N] `tokens` begins with; the most first.

        Those that have none in common are left out.
        """
        path: list[tuple[_Branch[Entry], int]] = []
        branch, at = self._root, 0
        while at < len(tokens) and (below := branch.below.get(int(tokens[at]))) is not None:
            same = common(below.edge, tokens[at:])
            at += same
            path.append((below, at))
            branch = below
            if same < len(below.edge):
                break
        seen: _Branch[Entry] | None = None
        for branch, depth in reversed(path):
            yield from ((entry, depth) for entry in branch.entries)
            for below in branch.below.values():
                if below is not seen:
                    yield from ((entry, depth) for entry in below.everything())
            seen = branch


def common(one: Tokens, other: Tokens) -> int:
    """Count the tokens that two sequences begin with alike."""
    size = min(len(one), len(other))
    differ = one[:size] != other[:size]
    return int(differ.argmax()) if differ.any() else size
