"""A packed store with fixed addresses, for passes recorded once and replayed for every token."""

from __future__ import annotations

import copy

from torch import Tensor

from kvsieve.cache.body import Body
from kvsieve.cache.contract import LayerMemory
from kvsieve.cache.packed import PackedStore


class FixedEntries:
    """The entries of a PackedStore for a recorded pass.

    Exact entries and blocks are in the store's own buffers. Block lists are copies with places for as many blocks as
    the pool has room for; an unused place is a block of 0 entries. So encoding between two passes requires no new
    recording, only another copy of the lists.

    Attributes:
        store: the input of attention, with all exact slots, used or not; the pass knows their number.
    """

    def __init__(self, store: PackedStore) -> None:
        self.store = copy.copy(store)
        self.store.exact = exact = copy.copy(store.exact)
        exact.size = exact.capacity
        # An object of its own: the store gets another when it encodes, and a compiled pass would notice.
        exact.columns = exact.columns.including()
        self.store.bodies = [_with_room(body) for body in _bodies(store)]
        self.update(store)

    @classmethod
    def of(cls, store: LayerMemory) -> FixedEntries | None:
        """Return the entries of a store; None if nothing is encoded, and its buffers can be read."""
        return cls(store) if isinstance(store, PackedStore) else None

    def update(self, store: LayerMemory) -> None:
        """Copy the block lists of `store`, on unchanged buffers."""
        bodies = _bodies(store)
        self._copied = [body.table for body in bodies]
        for own, body in zip(self.store.bodies, bodies, strict=True):
            for to, part in zip(_lists(own), _lists(body), strict=True):
                to[:, part.shape[1] :] = 0
                to[:, : part.shape[1]] = part

    def is_current(self, store: LayerMemory) -> bool:
        """Return True if nothing was encoded since the lists were copied."""
        tables = [body.table for body in _bodies(store)]
        return len(tables) == len(self._copied) and all(a is b for a, b in zip(tables, self._copied, strict=True))

    def fits(self, store: LayerMemory) -> bool:
        """Return True if there are places for all blocks of `store`."""
        wide = [body.table.shape[1] for body in _bodies(store)]
        room = [body.table.shape[1] for body in self.store.bodies]
        return len(wide) == len(room) and all(need <= have for need, have in zip(wide, room, strict=True))


def _bodies(store: LayerMemory) -> list[Body]:
    """Return the encoded parts of a store."""
    return [body for body in store.bodies if body.width] if isinstance(store, PackedStore) else []


def _with_room(body: Body) -> Body:
    """Return a body on the same pool, with its own lists for as many more blocks as the pool has room for."""
    assert body.index is not None
    other = body.copied(share=True)
    rows = len(body.table)
    shape = rows, body.table.shape[1] + (len(body.index) - body.used) // rows
    other.table, other.fills = body.table.new_zeros(shape), body.fills.new_zeros(shape)
    for part in (other.keys, other.values):
        part.mean, part.root = (None if moments is None else moments.clone() for moments in (part.mean, part.root))
    return other


def _lists(body: Body) -> list[Tensor]:
    """Return a body's tensors for locating and decoding entries, except the pool."""
    parts = (body.keys.mean, body.keys.root, body.values.mean, body.values.root)
    return [body.table, body.fills, *(part for part in parts if part is not None)]
