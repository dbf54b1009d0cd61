"""Record of the edits and joins of a conversation: columns with approximate entries, and counts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class EditRecord:
    """Effect of the edits and joins of one conversation so far.

    Attributes:
        spans: half-open columns with approximate entries, in ascending order.
        reused: tokens that kept their entries in the last edit or join.
        reread: tokens prefilled by it, and by edits since the answer before.
        seen: columns after it; 0 before the first.
        alone: True if the plan has acted on joined documents before their question.
    """

    spans: tuple[tuple[int, int], ...] = ()
    reused: int = 0
    reread: int = 0
    seen: int = 0
    alone: bool = False

    def edited(self, source: Tensor, before: int, first: int, again: Iterable[tuple[int, int]]) -> EditRecord:
        """Return the record after an edit.

        Args:
            source: int64 [N], the column that each token had before, -1 for new tokens.
            before: columns before the edit.
            first: first column that the edit changed.
            again: half-open columns that were prefilled.
        """
        size = len(source)
        known = torch.zeros(before, dtype=torch.bool)
        for start, end in self.spans:
            known[start:end] = True
        marked = known[source.clamp_min(0)] | (torch.arange(size) >= first)
        prefilled = 0
        for start, end in again:
            marked[start:end] = False
            prefilled += end - start
        earlier = self.reread if self.seen == before else 0
        return EditRecord(spans_of(marked), size - prefilled, earlier + prefilled, size, self.alone)

    @classmethod
    def joined(cls, first: int, seen: int, again: Iterable[tuple[int, int]], alone: bool) -> EditRecord:
        """Return the record of a join.

        Args:
            first: columns with exact entries, up to the end of the first document.
            seen: columns of the join.
            again: half-open columns that were prefilled.
            alone: see the class.
        """
        return cls(alone=alone).edited(torch.arange(seen), seen, first, again)

    def without_counts(self) -> EditRecord:
        """Return the columns of approximate entries; those of an exact conversation have no record."""
        return EditRecord(self.spans, alone=self.alone and bool(self.spans))

    def up_to(self, seen: int) -> EditRecord:
        """Return the record of the first `seen` columns."""
        spans = tuple((start, min(end, seen)) for start, end in self.spans if start < seen)
        return dataclasses.replace(self, spans=spans, seen=min(self.seen, seen))

    def share(self, tokens: int) -> float:
        """Return the share of the first `tokens` columns with approximate entries."""
        return sum(end - start for start, end in self.up_to(tokens).spans) / max(tokens, 1)


def spans_of(marked: Tensor) -> tuple[tuple[int, int], ...]:
    """Return the half-open spans of marked columns."""
    edges = torch.nn.functional.pad(marked.int(), (1, 1)).diff()
    starts, ends = ((edges == sign).nonzero()[:, 0].tolist() for sign in (1, -1))
    return tuple(zip(starts, ends, strict=True))
