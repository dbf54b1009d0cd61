"""Tokens of a layer's entries, by which entries of two layers correspond."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvsieve.cache.contract import LayerMemory
from kvsieve.cache.packed import PackedStore
from kvsieve.cache.tensors import tensors_in
from kvsieve.core.kv_rows import KVRows


@dataclass
class EntryTokens:
    """Token indices of the entries of X KV rows, ascending in each.

    Attributes:
        start: int64 [X, 1], of the first entry.
        rest: int64 [X, N], of all; None if consecutive.
        size: N.
    """

    start: Tensor
    rest: Tensor | None
    size: int

    def rows(self, which: Tensor | None) -> EntryTokens:
        """Return those of some KV rows, int64 [X']; None for all."""
        if which is None:
            return self
        return EntryTokens(self.start[which], None if self.rest is None else self.rest[which], self.size)

    def first(self, size: int) -> Tensor:
        """Return the token indices of the first `size` entries, int64 [X, size]."""
        if self.rest is not None:
            return self.rest[:, :size]
        return self.start + torch.arange(size, device=self.start.device)

    def all_tensors(self) -> Iterator[Tensor]:
        yield from tensors_in((self.start, self.rest))


def entry_tokens(store: LayerMemory, row: Tensor, body: Tensor | None, tail: Tensor, size: int) -> EntryTokens:
    """Return the tokens of KV rows in a store whose heads have as many entries; other arguments as in `Group`."""
    index = store.index
    rows = index.flatten(0, 1)
    if isinstance(store, PackedStore):
        # Slots are numbers of real entries.
        valid = store.valid
        real = torch.ones_like(index, dtype=torch.bool) if valid is None else valid.expand_as(index)
        order = real.flatten(0, 1).to(torch.uint8).argsort(dim=1, descending=True, stable=True)
        rows = rows.gather(1, order)
    kv_rows = KVRows(rows, rows, body, tail, 1, size)
    tokens = rows[row].gather(1, kv_rows.slots(kv_rows.span(0, size))).long()
    start = tokens[:, :1].clone()
    if torch.equal(tokens, start + torch.arange(size, device=tokens.device)):
        return EntryTokens(start, None, size)
    return EntryTokens(start, tokens, size)


def entries_of_tokens(ours: EntryTokens, theirs: EntryTokens) -> Tensor | None:
    """Return for each of our entries the corresponding one of theirs, int64 [X, N]; None if all are the same.

    Entries of the same token correspond. Our other entries correspond to their other ones in order, so that each is hit
    once. N: entries that both have.
    """
    size = min(ours.size, theirs.size)
    own = ours.first(size)
    other = theirs.first(size)
    if torch.equal(own, other):
        return None
    place = torch.searchsorted(other.contiguous(), own.contiguous()).clamp_(max=size - 1)
    found = other.gather(1, place) == own
    taken = place.new_zeros(len(place), size + 1).scatter_(1, torch.where(found, place, size), 1)[:, :size]
    order = taken.argsort(dim=1, stable=True)
    number = ((~found).cumsum(1) - 1).clamp_min_(0)
    return torch.where(found, place, order.gather(1, number))
