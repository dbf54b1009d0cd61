"""Stores from the named tensors and numbers of files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from kvsieve.cache.columns import Columns
from kvsieve.cache.contract import LayerMemory
from kvsieve.cache.lanes import whole
from kvsieve.cache.latent import LatentStore
from kvsieve.cache.packed import PackedStore
from kvsieve.cache.ragged import RaggedStore
from kvsieve.cache.store import DenseStore
from kvsieve.cache.tensors import grown

if TYPE_CHECKING:
    from kvsieve.planning.roles import Codec


def from_parts(parts: dict[str, Any], codec: Codec | None = None, rest: Codec | None = None) -> LayerMemory:
    """Return the store of this `LayerMemory.parts`, on the same tensors.

    codec, rest: those of the plan that encoded the entries.
    """
    if "bodies" in parts:
        packed = PackedStore(codec, _dense(parts["exact"]))
        packed.lengths = parts["lengths"]
        packed.first = parts["first"]
        if rest is not None and len(parts["bodies"]) > len(packed.bodies):
            packed.bodies.insert(0, packed.new_body(rest))
        for body, stored in zip(packed.bodies, parts["bodies"], strict=True):
            body.fill(stored)
        return packed
    return _ragged(parts) if "counts" in parts else _dense(parts)


def _dense(parts: dict[str, Any]) -> DenseStore:
    if "keys" not in parts:
        return LatentStore() if "rank" in parts else DenseStore()
    keys, index, valid, lengths = (parts[name] for name in ("keys", "index", "valid", "lengths"))
    if "rank" not in parts:
        return DenseStore.of(keys, parts["values"], index, valid, lengths, parts.get("log_weight"), parts.get("scores"))
    store = LatentStore.of(keys, keys[..., :0], index, valid, lengths)
    store.rank = parts["rank"]
    return store


def _ragged(parts: dict[str, Any]) -> RaggedStore:
    size = parts["keys"].shape[1]
    dtype = parts["keys"].dtype
    columns = Columns(**{name: parts[name] for name in ("keys", "values", "index", "log_weight") if name in parts})
    # Attention reads flat buffers up to a whole number of lanes.
    capacity = whole(size)
    columns = columns if capacity == size else columns.grown(size, capacity)
    visible = grown(parts["visible"], 2, size, capacity)
    bias = visible.new_zeros(visible.shape, dtype=dtype).masked_fill_(~visible, torch.finfo(dtype).min)
    facts = {name: parts[name] for name in ("lengths", "counts", "body", "hides_newest")}
    return RaggedStore(columns.including(valid=bias), size=size, **facts)
