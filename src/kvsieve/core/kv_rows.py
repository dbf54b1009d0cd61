"""What a query reads from: the entries of single KV heads of single rows, in order, all of them real."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor


@dataclass
class PageOccupancy:
    """What of so many pages of KV rows is there: hidden: bool [pages], True beyond the end. part: float64 [pages].

    newest: int64 [1], the page of the newest entry. first: bool [1], whether that entry begins it. part: of its page
    entries, how much a page holds, 0 beyond the end. count: int64 [], pages that hold any.
    """

    hidden: Tensor
    part: Tensor
    newest: Tensor
    first: Tensor
    count: Tensor


class DeviceLength:
    """How many entries KV rows really have, on the device: shapes then stay the same from token to token.

    count: int64 [], at least 1. What follows from it is worked out once for all KV rows of that length.
    """

    def __init__(self, count: Tensor) -> None:
        self.count = count
        self._real: dict[int, Tensor] = {}
        self._occupancy: dict[tuple[int, int], PageOccupancy] = {}

    def real(self, size: int) -> Tensor:
        """bool [size]: which of so many entries there are."""
        if size not in self._real:
            self._real[size] = torch.arange(size, device=self.count.device) < self.count
        return self._real[size]

    def occupancy(self, page: int, pages: int) -> PageOccupancy:
        if (page, pages) not in self._occupancy:
            held = (self.count - torch.arange(pages, device=self.count.device) * page).clamp(0, page)
            last = self.count - 1
            self._occupancy[page, pages] = PageOccupancy(
                hidden=held == 0,
                part=held.double() / page,
                newest=(last // page).view(1),
                first=(last % page == 0).view(1),
                count=last // page + 1,
            )
        return self._occupancy[page, pages]


@runtime_checkable
class IncrementalMetadata(Protocol):
    """What a reader with ``fixed_shapes = True`` remembers of KV rows, entry by entry.

    size: entries taken in; a pass of fixed shapes takes one in on the device, and its driver counts it here.
    """

    size: int

    def make_room(self, entries: int) -> None:
        """Have room for so many entries in all, without a change of shape on the way."""
        ...

    def tensors(self) -> tuple[Tensor, ...]:
        """All that is remembered."""
        ...

    def accumulators(self) -> tuple[Tensor, ...]:
        """Those of them that taking in the same entry twice would change."""
        ...

    def all_tensors(self) -> Iterable[Tensor]:
        """Every tensor held, those that are remade at need included."""
        ...

    def update_bytes(self, before: int, after: int) -> int:
        """Bytes read to take in the entries that follow the first `before`, so that there are `after`."""
        ...


@dataclass
class KVRows:
    """Per-head KV sequences: X KV rows of `size` entries each.

    A KV row is the entries of one KV head of one batch row (of one query head, where each has its own set).

    keys: [S, D] and values: [S, Dv], all slots they may lie in. body: int64 [X, K], slots of the first K entries, or
    None where K is 0. tail: int64 [X], the slot of entry K; every further one lies `stride` slots behind. length: how
    many of the `size` are really there, None for all; the others may be looked at, and must not be chosen.
    """

    keys: Tensor
    values: Tensor
    body: Tensor | None
    tail: Tensor
    stride: int
    size: int
    length: DeviceLength | None = None

    def newest(self) -> Tensor:
        """The last entry of every KV row, int64 [X, 1]."""
        last = self.size - 1 if self.length is None else self.length.count - 1
        return (torch.zeros_like(self.tail) + last)[:, None]

    def keys_at(self, entries: Tensor) -> Tensor:
        """Keys [X, ..., D] of entries int64 [X, ...]."""
        return self._rows(self.keys, self.slots(entries))

    def values_at(self, entries: Tensor) -> Tensor:
        """Values [X, ..., Dv] of entries int64 [X, ...]."""
        return self._rows(self.values, self.slots(entries))

    def read(self, entries: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of entries int64 [X, ...]."""
        slots = self.slots(entries)
        return self._rows(self.keys, slots), self._rows(self.values, slots)

    def span(self, start: int, end: int) -> Tensor:
        """Entries start ... end - 1 of every KV row, int64 [X, end - start]."""
        return torch.arange(start, end, device=self.tail.device).expand(len(self.tail), -1)

    def slots(self, entries: Tensor) -> Tensor:
        """Where entries int64 [X, ...] lie."""
        kept = 0 if self.body is None else self.body.shape[1]
        after = entries * self.stride + (self.tail - kept * self.stride).view(-1, *(1,) * (entries.ndim - 1))
        if self.body is None:
            return after
        before = self.body.gather(1, entries.clamp(max=kept - 1).flatten(1)).view(entries.shape)
        return torch.where(entries < kept, before, after)

    @staticmethod
    def _rows(buffer: Tensor, slots: Tensor) -> Tensor:
        # Whole rows are copied, which is faster than gather along an expanded index.
        return buffer.index_select(0, slots.reshape(-1)).view(*slots.shape, -1)


@dataclass(frozen=True)
class ReadFacts:
    """What a reader may derive its parameters from, for the KV rows of one batch row in one layer.

    length: true tokens of the conversation when the turn's prompt was complete. new_tokens: how many are expected after
    it, 0 if nobody said. dim: D, the size of a key.
    """

    layer_idx: int
    num_layers: int
    length: int
    new_tokens: int
    dim: int


@dataclass
class Choice:
    """What a reader wants read of each KV row.

    entries: int64 [X, k], the same for all query heads of a KV row, or [X, G, k]. blend: (weight [X, G], vector
    [X, Dv]): the output becomes ``weight * output + (1 - weight) * vector``. metadata_bytes: bytes read to
    choose.
    """

    entries: Tensor
    blend: tuple[Tensor, Tensor] | None = None
    metadata_bytes: int = 0
