"""Entries of a layer at other columns: moved, dropped, joined, and prefilled again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvsieve.cache import DenseStore, LayerMemory
from kvsieve.core.selection import entries_at

# Rotate keys [R, H, N, D] by distances int64 [R, N].
Rotate = Callable[[Tensor, Tensor], Tensor]


@dataclass
class LayerEntries:
    """Entries of one layer by the columns that they have after an edit or a join.

    Attributes:
        keys: [1, H, N, D].
        values: [1, H, N, Dv].
        column: int64 [1, H, N], -1 for dropped entries and filler.
        stored: bool [1, H, columns], tokens with an entry in a head; new tokens have one everywhere.
        is_sorted: every head has the same columns, ascending, without filler.
    """

    keys: Tensor
    values: Tensor
    column: Tensor
    stored: Tensor
    is_sorted: bool = False

    @classmethod
    def moved(cls, parts: Sequence[tuple[LayerMemory, Tensor]], fresh: Tensor, rotate: Rotate) -> LayerEntries:
        """Return the entries of stores of this layer at their new columns, with keys rotated to them.

        Args:
            parts: stores, which do not change, each with its target: int64 [columns before], the new column of each, -1
                for removed tokens. No two have a new column in common.
            fresh: bool [columns after], new tokens.
            rotate: rotates keys of this layer.
        """
        placed = [_placed(store, target) for store, target in parts]
        heads = max(part[0].shape[1] for part in placed)
        keys, values, column, distance = (
            tensors[0] if len(tensors) == 1 else torch.cat([_with_heads(tensor, heads) for tensor in tensors], 2)
            for tensors in zip(*placed, strict=True)
        )
        moves = distance.flatten(0, 1).any(0).nonzero()
        if len(moves):
            first = int(moves[0, 0])
            keys = torch.cat([keys[:, :, :first], _rotated(keys[:, :, first:], distance[0, :, first:], rotate)], 2)
        # Removed entries and filler go to a column of their own.
        stored = torch.zeros(*column.shape[:2], len(fresh) + 1, dtype=torch.bool, device=column.device)
        stored.scatter_(2, column.masked_fill(column < 0, len(fresh)), True)
        stored = stored[..., :-1] | fresh.to(column.device)
        return cls(keys, values, column, stored)._ordered()

    def _ordered(self) -> LayerEntries:
        """Return them in memory of their own, sorted if every head has the same columns."""
        first = self.column[:, :1]
        if not bool((self.column == first).all()):
            return dataclasses.replace(self, keys=self.keys.clone(), values=self.values.clone())
        order = first[0, 0].argsort(stable=True)[int((first < 0).sum()) :]
        parts = {name: vars(self)[name][:, :, order] for name in ("keys", "values", "column")}
        return dataclasses.replace(self, **parts, is_sorted=True)

    def _slot(self, column: int) -> int:
        """Return the number of slots of earlier columns, if they are sorted."""
        return int((self.column[0, 0] < column).sum())

    def below(self, end: int) -> DenseStore:
        """Return a store of the entries of columns before `end`, in order; it may be on the memory of these."""
        if self.is_sorted:
            size = self._slot(end)
            index = self.column[..., :size].to(torch.int32)
            return DenseStore.of(self.keys[:, :, :size], self.values[:, :, :size], index, None, (size,))
        real = (self.column >= 0) & (self.column < end)
        counts = real.sum(-1)
        size = int(counts.max()) if counts.numel() else 0
        order = self.column.masked_fill(~real, -1).argsort(dim=-1, stable=True)[..., self.column.shape[-1] - size :]
        index = self.column.gather(2, order)
        filler = torch.arange(size, device=order.device) < size - counts[..., None]
        return DenseStore.of(
            entries_at(self.keys, order),
            entries_at(self.values, order),
            index.masked_fill(filler, -1).to(torch.int32),
            ~filler if bool(filler.any()) else None,
            (size,),
        )

    def replace(self, spans: Sequence[tuple[int, int]], store: LayerMemory) -> None:
        """Take the entries of spans of columns from a store in place of earlier ones.

        Tokens without an entry in a head get none.

        Args:
            spans: half-open, ascending; of unsorted entries one.
            store: has an entry of each column in every head; of unsorted entries the last ones.
        """
        dense = store.padded()
        columns = torch.cat([torch.arange(first, last, device=self.column.device) for first, last in spans])
        if self.is_sorted:
            self._replace_sorted(columns, dense)
            return
        ((start, end),) = spans
        new = end - start
        column = columns.expand(1, self.column.shape[1], -1).masked_fill(~self.stored[..., start:end], -1)
        old = self.column.masked_fill((self.column >= start) & (self.column < end), -1)
        self.keys = torch.cat([self.keys, dense.keys[:, :, -new:]], 2)
        self.values = torch.cat([self.values, dense.values[:, :, -new:]], 2)
        self.column = torch.cat([old, column], 2)

    def _replace_sorted(self, columns: Tensor, dense: LayerMemory) -> None:
        """Take entries of columns, ascending, from a store with the same columns in every head, ascending."""
        new = columns[self.stored[0, 0, columns]]
        slots = torch.searchsorted(dense.index[0, 0].long(), new)
        old = self.column[0, 0]
        replaced = torch.isin(old, columns)
        if torch.equal(old[replaced], new):
            self.keys[:, :, replaced] = dense.keys[:, :, slots]
            self.values[:, :, replaced] = dense.values[:, :, slots]
            return
        stays = ~replaced
        order = torch.cat([old[stays], new]).argsort()
        for name, given in (("keys", dense.keys), ("values", dense.values)):
            part: Tensor = vars(self)[name]
            vars(self)[name] = torch.cat([part[:, :, stays], given[:, :, slots]], 2)[:, :, order]
        self.column = torch.cat([old[stays], new])[order].expand(1, self.column.shape[1], -1)


def _placed(store: LayerMemory, target: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return keys, values, new columns and distances of a store's entries, without those that no head keeps."""
    dense = store.padded()
    index = dense.index.long()
    column = target.to(index.device)[index.clamp_min(0)].masked_fill(index < 0, -1)
    if dense.valid is not None:
        column = column.masked_fill(~dense.valid, -1)
    distance = (column - index).masked_fill(column < 0, 0)
    kept = (column >= 0).any(1)[0]
    if bool(kept.all()):
        return dense.keys, dense.values, column, distance
    return dense.keys[:, :, kept], dense.values[:, :, kept], column[:, :, kept], distance[:, :, kept]


def _rotated(keys: Tensor, distance: Tensor, rotate: Rotate) -> Tensor:
    """Rotate keys [1, H, N, D] by distances int64 [H, N]; those that stay are as they were to the bit."""
    # One row of distances for all heads, if these have the same.
    rows = 1 if bool((distance == distance[:1]).all()) else len(distance)
    alone = keys.reshape(rows, -1, *keys.shape[2:])
    turned = rotate(alone, distance[:rows]).reshape(keys.shape).to(keys.dtype)
    return torch.where((distance == 0)[..., None], keys, turned)


def _with_heads(part: Tensor, heads: int) -> Tensor:
    """Return a copy per query head, if another cache stores `heads` of these."""
    copies = heads // part.shape[1]
    return part if copies == 1 else part.repeat_interleave(copies, 1)
