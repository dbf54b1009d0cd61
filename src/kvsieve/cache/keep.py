"""Eviction and encoding of a layer's entries, possibly into another kind of store."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvsieve.cache.contract import LayerMemory, View
from kvsieve.cache.latent import LatentStore
from kvsieve.cache.packed import PackedStore
from kvsieve.cache.ragged import RaggedStore
from kvsieve.cache.store import DenseStore
from kvsieve.errors import UnsupportedOptionError
from kvsieve.types import Selection

if TYPE_CHECKING:
    from torch import Tensor

    from kvsieve.planning.roles import Codec


def keep(store: LayerMemory, selection: Selection, reserve: int = 0, *, reuse: bool = True) -> LayerMemory:
    """Reduce a store to a selection: the same store, or a ragged one if heads keep different numbers of entries.

    Raises:
        UnsupportedOptionError: the selection carries keys, values or weights, and the store has no place for them.
    """
    if selection.writes and (store.is_encoded or isinstance(store, LatentStore)):
        form = "entries are encoded" if store.is_encoded else "a layer with latent attention stores latents"
        raise UnsupportedOptionError(f"the evictor writes keys, values or weights, and {form}: use another method")
    if isinstance(store, LatentStore) and selection.head_lengths is not None:
        # One head only: no differences.
        lengths = tuple(length for (length,) in selection.head_lengths)
        selection = Selection(selection.indices, lengths if min(lengths) < selection.indices.shape[-1] else None)
    if isinstance(store, PackedStore):
        store.keep(selection)
        return store
    if isinstance(store, DenseStore) and selection.head_lengths is None:
        store.keep(selection, reserve, reuse=reuse)
        return store
    return RaggedStore.build(store, selection, reserve)


def encode(
    store: LayerMemory, view: View | None, codec: Codec, *, ends_prompt: bool
) -> tuple[LayerMemory, View | None]:
    """Encode the entries that are no longer among the newest, if they suffice for a block.

    Args:
        store: of the layer.
        view: its part that this turn attends to.
        codec: of the plan.
        ends_prompt: blocks need not be full.

    Returns:
        The new store and view.
    """
    if isinstance(store, PackedStore):
        store.quantize_tail(ends_prompt=ends_prompt)
        return store, view
    stored = max(store.lengths, default=0)
    least = codec.block // (2 if ends_prompt else 1)
    if stored < codec.newest(stored) + least:
        return store, view
    view = None if view is None else PackedStore.numbered(view, store)
    return PackedStore.build(store, codec, ends_prompt=ends_prompt), view


def quantize_evicted(
    store: LayerMemory,
    selection: Selection,
    rest: Codec,
    codec: Codec | None = None,
    reserve: int = 0,
    asked: Tensor | None = None,
) -> PackedStore:
    """Encode unselected entries by `rest` instead of dropping them; `codec` encodes the selected ones.

    asked: as in `BlockPool.encode`.
    """
    packed = store if isinstance(store, PackedStore) else PackedStore(codec, store)
    packed.quantize_evicted(selection, rest, reserve, asked)
    return packed
