"""Shift of stored entries by the mean change of those that a join prefills again; see `Join.shifts`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvsieve.core.selection import entries_at
from kvsieve.hf.edit.entries import LayerEntries
from kvsieve.hf.edit.moved import MovedEntries
from kvsieve.hf.join.documents import JoinTexts
from kvsieve.hf.runtime import AttachedModel
from kvsieve.planning.joins import Span

# First tokens of a document, which change more than the others, and otherwise.
_BEGINNING = 16
# Tokens that the mean over all documents counts as in that of a document.
_PRIOR = 20


class Shift:
    """Measures how entries change that are prefilled again, and shifts those that stay.

    Args:
        model: the attached model.
        texts: of the join.
        first: column after the first document.
        seen: columns of the join.
        spans: of columns, about to be prefilled again.
        entries: before that.
    """

    def __init__(
        self,
        model: AttachedModel,
        texts: JoinTexts,
        first: int,
        seen: int,
        spans: Sequence[Span],
        entries: MovedEntries,
    ) -> None:
        self._model = model
        again = torch.zeros(seen, dtype=torch.bool)
        for start, end in spans:
            again[start:end] = True
        late = torch.zeros(seen, dtype=torch.bool)
        self._document = torch.zeros(seen, dtype=torch.int64)
        self._number = len(texts.places)
        for number, (place, size) in enumerate(zip(texts.places, texts.sizes, strict=True)):
            late[place + _BEGINNING : place + size] = True
            self._document[place : place + size] = number
        late[:first] = False
        self._stays = ~again
        self._stays[:first] = False
        self._columns = (again & late).nonzero()[:, 0]
        with model.facts.keeping_tables():
            self._before = {index: self._found(index, part) for index, part in entries.layers.items()}

    def apply(self, entries: MovedEntries) -> None:
        """Shift the entries that stay by the mean change, in their document, of those prefilled again."""
        with self._model.facts.keeping_tables():
            for index, part in entries.layers.items():
                keys, values, real = self._found(index, part)
                old_keys, old_values, before = self._before.pop(index)
                real = (real & before)[..., None]
                self._add(index, part, self._mean(keys - old_keys, real), self._mean(values - old_values, real))

    def _mean(self, change: Tensor, real: Tensor) -> Tensor:
        """Return the mean change by document, [1, H, documents, D]; few tokens are drawn to the mean over all.

        change: [1, H, n, D], of the columns; real: bool [1, H, n, 1], those that count.
        """
        document = self._document[self._columns].to(change.device)
        sums, counts = (
            part.new_zeros(*part.shape[:2], self._number, part.shape[-1]).index_add_(2, document, part)
            for part in (change * real, real.to(change.dtype))
        )
        mean = sums.sum(2, keepdim=True) / counts.sum(2, keepdim=True).clamp_min(1)
        return (sums + _PRIOR * mean) / (counts + _PRIOR)

    def _found(self, index: int, part: LayerEntries) -> tuple[Tensor, Tensor, Tensor]:
        """Return unrotated keys and values of the columns, [1, H, n, ...], and whether each has an entry."""
        size = len(self._stays)
        column = part.column
        slots = torch.full((*column.shape[:2], size + 1), -1, dtype=torch.int64, device=column.device)
        numbers = torch.arange(column.shape[2], device=column.device).expand_as(column)
        slots.scatter_(2, column.masked_fill(column < 0, size), numbers)
        columns = self._columns.to(column.device)
        slots = slots[..., columns]
        at = slots.clamp_min(0)
        keys = self._model.facts.rotate(index, entries_at(part.keys, at), columns[None], inverse=True)
        return keys, entries_at(part.values, at).to(keys.dtype), slots >= 0

    def _add(self, index: int, part: LayerEntries, keys: Tensor, values: Tensor) -> None:
        """Add to the entries that stay; keys, values: [1, H, documents, D]."""
        column = part.column
        at = column.clamp_min(0)
        own = (self._stays.to(column.device)[at] & (column >= 0))[..., None]
        document = self._document.to(column.device)[at]
        # Heads may have entries of other columns, so each is a row.
        wide = entries_at(keys, document)[0][:, None]
        turned = self._model.facts.rotate(index, wide, at[0])[:, 0][None]
        part.keys = torch.where(own, part.keys + turned, part.keys).to(part.keys.dtype)
        part.values = torch.where(own, part.values + entries_at(values, document), part.values).to(part.values.dtype)
