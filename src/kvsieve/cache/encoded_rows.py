"""Entries of a packed store as rows of a virtual buffer: single ones are decoded on access."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsieve.cache.packed_parts import SPAN, PackedParts


class EncodedRows:
    """Keys or values of all KV rows as rows of one buffer: entry n of KV row r is row r * SPAN + n."""

    # Kernels cannot read it.
    dtype = torch.uint8

    def __init__(self, store: PackedParts, what: str) -> None:
        self.store = store
        self.what = what

    def element_size(self) -> int:
        """Return the bytes of a number, including scales, rounded up."""
        return -(-self.store.entry_size() // sum(self.store.dims))

    def index_select(self, dim: int, index: Tensor) -> Tensor:
        rows = index // SPAN
        return entries_at(self.store, self.what, rows, index - rows * SPAN)


def entries_at(store: PackedParts, what: str, rows: Tensor, entries: Tensor) -> Tensor:
    """Decode single entries.

    Args:
        store: of the entries.
        what: "keys" or "values".
        rows: int64 [N], KV rows b * H + h.
        entries: int64 [N], numbers of real entries of each KV row.

    Returns:
        [N, D].
    """
    exact = (store.exact.keys if what == "keys" else store.exact.values).flatten(0, 1)
    valid = store.exact.valid
    encoded = torch.stack([body.counts for body in store.bodies]).sum(0)
    if valid is None:
        first = torch.full_like(encoded, store.first)
    else:
        real = valid.expand(-1, store.heads, -1).flatten(0, 1)
        first = real[:, : store.first].sum(-1)
    start = first[rows]
    # Numbers among the exact entries.
    number = torch.where(entries < start, entries, (entries - encoded[rows]).clamp_min(0))
    if valid is not None:
        number = (~real).to(torch.uint8).argsort(dim=-1, stable=True)[rows, number]
    # With nothing exact, all are encoded.
    out = exact[rows, number] if exact.shape[1] else exact.new_empty(len(rows), exact.shape[2])
    for body in store.bodies:
        own = ((entries >= start) & (entries < start + body.counts[rows])).nonzero()[:, 0]
        if len(own):
            out[own] = body.read(what, rows[own], (entries - start)[own])
        start = start + body.counts[rows]
    return out
