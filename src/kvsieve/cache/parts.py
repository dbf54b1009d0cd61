"""A store as named tensors and numbers, for files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from kvsieve.cache.base import grown
from kvsieve.cache.body import Body
from kvsieve.cache.keep import LayerStore
from kvsieve.cache.latent import LatentStore
from kvsieve.cache.packed import PackedStore
from kvsieve.cache.ragged import RaggedStore, whole
from kvsieve.cache.store import DenseStore
from kvsieve.core.codes import Codes

if TYPE_CHECKING:
    from kvsieve.roles import Codec


def store_parts(store: LayerStore) -> dict[str, Any]:
    """Return what a store holds, without room to spare; what is derived from it is made again."""
    if isinstance(store, PackedStore):
        bodies = [_body_parts(body) for body in store.bodies]
        return {"lengths": store.lengths, "exact": store_parts(store.exact), "first": store.first, "bodies": bodies}
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


def _body_parts(body: Body) -> dict[str, Any]:
    """Return encoded entries as they are, of the pool the blocks that are in use."""
    parts: dict[str, Any] = {"table": body.table, "fills": body.fills}
    if body.index is None:
        return parts
    parts["index"] = body.index[: body.used]
    for what, part in (("keys", body.keys), ("values", body.values)):
        assert part.codes is not None
        parts[what] = {"mean": part.mean, "root": part.root, **vars(part.codes.apply(lambda each: each[: body.used]))}
    return parts


def store_of(parts: dict[str, Any], codec: Codec | None = None, rest: Codec | None = None) -> LayerStore:
    """Return the inverse of `store_parts`. codec, rest: those of the plan, which encoded what is encoded."""
    if "bodies" in parts:
        exact = store_of(parts["exact"])
        assert isinstance(exact, DenseStore)
        packed = PackedStore(codec, exact)
        packed.lengths, packed.first = parts["lengths"], parts["first"]
        if rest is not None and len(parts["bodies"]) > len(packed.bodies):
            packed.bodies.insert(0, packed._body(rest))
        for body, given in zip(packed.bodies, parts["bodies"], strict=True):
            _fill(body, given)
        return packed
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


def _fill(body: Body, parts: dict[str, Any]) -> None:
    """Fill an empty body with the parts listed by `_body_parts`."""
    if "index" in parts:
        body.index, body.used = parts["index"], len(parts["index"])
        for what, part in (("keys", body.keys), ("values", body.values)):
            given = dict(parts[what])
            part.mean, part.root = given.pop("mean"), given.pop("root")
            part.codes = Codes(**given)
    body.table, body.fills = parts["table"], parts["fills"]
    body.note_counts()
