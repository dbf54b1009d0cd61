"""A packed store at fixed places, for a pass that is recorded once and run again for every token."""

from __future__ import annotations

import copy

from torch import Tensor

from kvsieve.cache.body import Body
from kvsieve.cache.contract import LayerMemory
from kvsieve.cache.packed import PackedStore


class FixedEntries:
    """The entries of a PackedStore, as a recorded pass reads them.

    Exact entries and blocks lie in the store's own buffers. Lists of blocks are copies with places for as many blocks
    as the pool has room for: a place that holds none yet is one of 0 entries. So nothing is recorded anew when entries
    are encoded between two passes; the lists are copied again.

    Attributes:
        store: what attention takes, with all exact slots, used or not; how many are is the pass's to know.
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
        """Return the entries of a store; None where nothing is encoded, and its buffers can be read."""
        return cls(store) if isinstance(store, PackedStore) else None

    def update(self, store: LayerMemory) -> None:
        """Copy the lists of blocks of `store`, whose buffers are still the same."""
        held = _bodies(store)
        self._copied = [body.table for body in held]
        for ours, body in zip(self.store.bodies, held, strict=True):
            for to, part in zip(_lists(ours), _lists(body), strict=True):
                to[:, part.shape[1] :] = 0
                to[:, : part.shape[1]] = part

    def is_current(self, store: LayerMemory) -> bool:
        """Tell that no entries were encoded since the lists were copied."""
        held = [body.table for body in _bodies(store)]
        return len(held) == len(self._copied) and all(a is b for a, b in zip(held, self._copied, strict=True))

    def fits(self, store: LayerMemory) -> bool:
        """Tell that there are places for all blocks of `store`."""
        wide = [body.table.shape[1] for body in _bodies(store)]
        ours = [body.table.shape[1] for body in self.store.bodies]
        return len(wide) == len(ours) and all(need <= have for need, have in zip(wide, ours, strict=True))


def _bodies(store: LayerMemory) -> list[Body]:
    """Return what is encoded of a store."""
    return [body for body in store.bodies if body.width] if isinstance(store, PackedStore) else []


def _with_room(body: Body) -> Body:
    """A body on the same pool, with lists of its own for as many more blocks as the pool has room for."""
    assert body.index is not None
    ours = body.copied(share=True)
    rows = len(body.table)
    shape = rows, body.table.shape[1] + (len(body.index) - body.used) // rows
    ours.table, ours.fills = body.table.new_zeros(shape), body.fills.new_zeros(shape)
    for part in (ours.keys, ours.values):
        part.mean, part.root = (None if each is None else each.clone() for each in (part.mean, part.root))
    return ours


def _lists(body: Body) -> list[Tensor]:
    """Return the tensors that tell where a body's entries lie and how they are decoded, besides the pool."""
    parts = (body.keys.mean, body.keys.root, body.values.mean, body.values.root)
    return [body.table, body.fills, *(part for part in parts if part is not None)]
