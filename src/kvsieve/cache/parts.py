"""A store as named tensors and numbers, for files."""

from __future__ import annotations

from typing import Any

import torch

from kvsieve.cache.base import grown
from kvsieve.cache.latent import LatentStore
from kvsieve.cache.ragged import RaggedStore, whole
from kvsieve.cache.store import DenseStore


def store_parts(store: DenseStore | RaggedStore) -> dict[str, Any]:
    """Return what a store holds, without room to spare; what is derived from it is made again."""
    if store.is_empty:
        return {"rank": 0} if isinstance(store, LatentStore) else {}
    parts: dict[str, Any] = {"lengths": store.lengths}
    if isinstance(store, LatentStore):
        return parts | {"keys": store.keys, "rank": store.rank, "index": store.index, "valid": store.valid}
    if isinstance(store, DenseStore):
        return parts | {"keys": store.keys, "values": store.values, "index": store.index, "valid": store.valid}
    keys, values, index = (part[:, : store.size] for part in store.buffers())
    parts |= {"keys": keys, "values": values, "index": index, "visible": store._visible()}
    return parts | {"body": store._body, "counts": store._counts, "hides_newest": store.hides_newest}


def store_of(parts: dict[str, Any]) -> DenseStore | RaggedStore:
    """Return the inverse of `store_parts`."""
    if "keys" not in parts:
        return LatentStore() if "rank" in parts else DenseStore()
    store: DenseStore | RaggedStore
    values = parts["keys"][..., :0] if "rank" in parts else parts["values"]
    buffers = [parts["keys"], values, parts["index"]]
    if "rank" in parts:
        store = LatentStore()
        store.rank = parts["rank"]
        store.size, store.valid_buffer = parts["keys"].shape[2], parts["valid"]
    elif "counts" not in parts:
        store = DenseStore()
        store.size, store.valid_buffer = parts["keys"].shape[2], parts["valid"]
    else:
        store = RaggedStore()
        store.size, store._body = parts["keys"].shape[1], parts["body"]
        store._counts, store.hides_newest = parts["counts"], parts["hides_newest"]
        # Attention reads flat buffers up to a whole number of lanes.
        capacity = whole(store.size)
        visible = grown(parts["visible"], 2, store.size, capacity)
        bias = buffers[0].new_zeros(visible.shape)
        store.valid_buffer = bias.masked_fill_(~visible, torch.finfo(bias.dtype).min)
        if capacity > store.size:
            buffers = [grown(part, 1, store.size, capacity) for part in buffers]
    store._keys, store._values, store._index = buffers
    store.lengths = parts["lengths"]
    return store
