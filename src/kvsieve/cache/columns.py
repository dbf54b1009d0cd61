"""Columns of a store: keys, values and facts of its entries, in buffers with equal numbers of slots."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Self

import torch
from torch import Tensor

from kvsieve.cache.tensors import grown
from kvsieve.core.selection import entries_at

VECTORS = ("keys", "values")


def slot_dim(name: str) -> int:
    """Return the slot dimension of a column."""
    return -2 if name in VECTORS else -1


class Columns:
    """Buffers by name: vectors "keys" and "values" are [..., slots, D], facts of entries are [..., slots].

    Facts are "index", the token index, "valid", True for real entries, "log_weight" (`types.Selection`) and "scores",
    [..., Hq, slots] (`roles.Reader.observes`). Absent ones are the same for all entries. A new fact needs only a new
    name: operations on entries are written here once.
    """

    def __init__(self, **parts: Tensor) -> None:
        self.parts = parts

    def __getitem__(self, name: str) -> Tensor:
        return self.parts[name]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.parts.values())

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Return columns with `change` applied to each."""
        return type(self)(**{name: change(part) for name, part in self.parts.items()})

    def used(self, size: int) -> dict[str, Tensor]:
        """Return views of the first `size` slots, by name."""
        return {name: part.narrow(slot_dim(name), 0, size) for name, part in self.parts.items()}

    def grown(self, size: int, capacity: int, start: int = 0) -> Self:
        """Return a copy of the first `size` slots with room for `capacity`."""
        used = size - start
        parts = {}
        for name, part in self.parts.items():
            dim = slot_dim(name)
            parts[name] = grown(part.narrow(dim, start, used), dim, used, capacity)
        return type(self)(**parts)

    def including(self, **parts: Tensor) -> Self:
        """Return columns with these added or replaced."""
        return type(self)(**{**self.parts, **parts})

    def without(self, name: str) -> Self:
        """Return columns without one."""
        return type(self)(**{other: part for other, part in self.parts.items() if other != name})

    def taken(self, size: int, slots: Tensor, capacity: int, *, in_place: bool) -> Self:
        """Return slots [B, H', K] of the first `size`, H' a multiple of H, at the front of `capacity` slots.

        in_place: in the same buffers, which have as many.
        """
        kept = slots.shape[2]
        parts = {}
        for name, part in self.used(size).items():
            copies = slots.shape[1] // part.shape[1]
            source = part if copies == 1 else part.repeat_interleave(copies, 1)
            to = self.parts[name] if in_place else part.new_empty((*slots.shape[:2], capacity, *part.shape[3:]))
            to[:, :, :kept] = entries_at(source, slots)
            parts[name] = to
        return type(self)(**parts)

    @staticmethod
    def stacked(several: Sequence[Columns], sizes: Sequence[int], room: int) -> Columns:
        """Concatenate rows of several [B, H, slots, ...]: filler, the used slots of each, then `room`.

        sizes: used slots of each.
        """
        size = max(sizes)
        rows = sum(len(columns["keys"]) for columns in several)
        if min(sizes) < size or any("valid" in columns.parts for columns in several):
            several = [columns.with_valid() for columns in several]
        if any("log_weight" in columns.parts for columns in several):
            several = [columns.with_log_weight() for columns in several]
        out = {}
        for name in several[0].parts:
            parts = [columns[name] for columns in several]
            shape = rows, max(part.shape[1] for part in parts), size + room, *parts[0].shape[3:]
            joined = parts[0].new_full(shape, -1 if name == "index" else 0)
            row = 0
            for part, used in zip(parts, sizes, strict=True):
                joined[row : row + len(part), :, size - used : size] = part[:, :, :used]
                row += len(part)
            out[name] = joined
        return Columns(**out)

    def with_valid(self, heads: int = 1) -> Self:
        """Return columns of [B, H, slots, ...] with "valid": existing, or all True for `heads` heads."""
        if "valid" in self.parts:
            return self
        return self.including(valid=torch.ones_like(self.parts["index"][:, :heads], dtype=torch.bool))

    def with_log_weight(self) -> Self:
        """Return columns with "log_weight": existing, or 0 for all entries."""
        if "log_weight" in self.parts:
            return self
        return self.including(log_weight=torch.zeros_like(self.parts["index"], dtype=torch.float32))
