"""Reducing what a layer stores."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvsieve.cache.latent import LatentStore
from kvsieve.cache.packed import PackedStore
from kvsieve.cache.ragged import RaggedStore
from kvsieve.cache.store import DenseStore
from kvsieve.types import Selection

if TYPE_CHECKING:
    from torch import Tensor

    from kvsieve.roles import Codec

# What a layer's entries lie in.
LayerStore = DenseStore | RaggedStore | PackedStore


def keep(store: LayerStore, selection: Selection, reserve: int = 0, *, reuse: bool = True) -> LayerStore:
    """Reduce a store to a selection: the same store, or a ragged one where heads keep different numbers of entries."""
    if isinstance(store, LatentStore) and selection.head_lengths is not None:
        # There is one head, so none that differ.
        lengths = tuple(length for (length,) in selection.head_lengths)
        selection = Selection(selection.indices, lengths if min(lengths) < selection.indices.shape[-1] else None)
    if isinstance(store, PackedStore):
        store.keep(selection)
        return store
    if isinstance(store, DenseStore) and selection.head_lengths is None:
        store.keep(selection, reserve, reuse=reuse)
        return store
    return RaggedStore.build(store.keys, store.values, store.index, selection, reserve)


def decoded(store: PackedStore) -> DenseStore:
    """Return a store of the same slots in which nothing is encoded."""
    out, valid = DenseStore(), store.valid
    out._keys, out._values, out._index = store.keys, store.values, store.index
    out.size = out.kept = store.size
    out.lengths = store.lengths
    out.valid_buffer = None if valid is None else valid.clone()
    return out


def set_aside(
    store: LayerStore,
    selection: Selection,
    rest: Codec,
    codec: Codec | None = None,
    reserve: int = 0,
    asked: Tensor | None = None,
) -> PackedStore:
    """Encode by `rest` what a selection leaves out, in place of dropping it; `codec` is that of what stays.

    asked: as in `BlockPool.encode`.
    """
    packed = store if isinstance(store, PackedStore) else PackedStore(codec, store.padded())
    packed.set_aside(selection, rest, reserve, asked)
    return packed
