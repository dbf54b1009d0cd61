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
class _Junction(Generic[Entry]):
    """A node of the radix tree.

    Attributes:
        edge: int64 [N], tokens from the parent to this one.
        entries: entries that end here.
        below: children by their first token.
    """

    edge: Tokens
    entries: list[Entry] = field(default_factory=list)
    below: dict[int, _Junction[Entry]] = field(default_factory=dict)

    def everything(self) -> Iterator[Entry]:
        """Yield the entries here and below."""
        waiting = [self]
        while waiting:
            junction = waiting.pop()
            yield from junction.entries
            waiting.extend(junction.below.values())


class RadixTree(Generic[Entry]):
    """Entries by sequences of tokens; several may share a sequence."""

    def __init__(self) -> None:
        self._root: _Junction[Entry] = _Junction(np.zeros(0, dtype=np.int64))

    def __iter__(self) -> Iterator[Entry]:
        return self._root.everything()

    @property
    def is_empty(self) -> bool:
        return not (self._root.entries or self._root.below)

    def add(self, tokens: Tokens, entry: Entry) -> None:
        """Insert an entry at the end of int64 [N] tokens."""
        junction = self._root
        at = 0
        while at < len(tokens):
            below = junction.below.get(int(tokens[at]))
            if below is None:
                below = _Junction(tokens[at:].copy())
                junction.below[int(tokens[at])] = below
                junction = below
                at = len(tokens)
                continue
            same = common(below.edge, tokens[at:])
            if same < len(below.edge):
                upper: _Junction[Entry] = _Junction(below.edge[:same].copy())
                upper.below[int(below.edge[same])] = below
                junction.below[int(tokens[at])] = upper
                below.edge = below.edge[same:].copy()
                below = upper
            junction = below
            at = at + same
        junction.entries.append(entry)

    def remove(self, tokens: Tokens, entry: Entry) -> None:
        """Remove an entry at the end of int64 [N] tokens."""
        above: list[_Junction[Entry]] = []
        junction = self._root
        at = 0
        while at < len(tokens):
            above.append(junction)
            junction = junction.below[int(tokens[at])]
            at += len(junction.edge)
        junction.entries.remove(entry)
        while above and not junction.entries:
            upper = above.pop()
            if len(junction.below) > 1:
                return
            first = int(junction.edge[0])
            if junction.below:
                (only,) = junction.below.values()
                only.edge = np.concatenate([junction.edge, only.edge])
                upper.below[first] = only
                return
            del upper.below[first]
            junction = upper

    def along(self, tokens: Tokens) -> Iterator[tuple[Entry, int]]:
        """Yield entries with the length of their common prefix with int64 [N] `tokens`, longest first.

        Entries without a common prefix are skipped.
        """
        path = self._path(tokens)
        seen: _Junction[Entry] | None = None
        for junction, depth in reversed(path):
            yield from ((entry, depth) for entry in junction.entries)
            for below in junction.below.values():
                if below is not seen:
                    yield from ((entry, depth) for entry in below.everything())
            seen = junction

    def prefixes(self, tokens: Tokens) -> Iterator[tuple[Entry, int]]:
        """Yield entries that are prefixes of int64 [N] `tokens`, with their lengths, longest first."""
        path = self._path(tokens)
        start = 0
        ends = []
        for junction, depth in path:
            if depth - start == len(junction.edge):
                ends.append((junction, depth))
            start = depth
        for junction, depth in reversed(ends):
            yield from ((entry, depth) for entry in junction.entries)

    def _path(self, tokens: Tokens) -> list[tuple[_Junction[Entry], int]]:
        """Return the junctions on the path of int64 [N] tokens, each with the tokens matched so far."""
        path: list[tuple[_Junction[Entry], int]] = []
        junction = self._root
        at = 0
        while at < len(tokens) and (below := junction.below.get(int(tokens[at]))) is not None:
            same = common(below.edge, tokens[at:])
            at += same
            path.append((below, at))
            junction = below
            if same < len(below.edge):
                break
        return path


def common(one: Tokens, other: Tokens) -> int:
    """Return the length of the common prefix."""
    size = min(len(one), len(other))
    differ = one[:size] != other[:size]
    return int(differ.argmax()) if differ.any() else size
