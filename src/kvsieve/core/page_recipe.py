"""Page-based choices described as data, so that compiled code can make them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvsieve.core.kv_rows import KVRows
from kvsieve.core.page_means import PageMeans
from kvsieve.core.pages import PageTable
from kvsieve.lazy import Tensor, torch


@dataclass(frozen=True)
class PageRecipe:
    """Score pages, sum their softmax over a KV row's query heads, and read the best entries in all of these heads.

    It chooses the same entries as `PageTable`, `page_softmax` and `best_entries`.

    Attributes:
        page: entries per page.
        count: entries read.
        newest: always include the newest page; see `best_entries`.
        channels: number of channels with the largest queries that are scored, at SparQ's temperature and by the bound
            that the sign of the queries' sum selects; 0: upper bounds over all channels.
        blend: give the attention estimated for unread entries to the mean of all values; for pages of one entry.
    """

    page: int
    count: int
    newest: bool
    channels: int = 0
    blend: bool = False

    def metadata_bytes(self, kv_rows: int, size: int, dim: int, itemsize: int) -> int:
        """Return the bytes of bounds read for `kv_rows` KV rows of `size` entries."""
        channels = self.channels or (1 if self.page == 1 else 2) * dim
        return kv_rows * channels * -(-size // self.page) * itemsize


def page_table(state: dict[str, Any], page: int, means: bool = False) -> PageTable:
    """Return the page table in the scratch of some KV rows, created on first use; means: of keys, not bounds."""
    table: PageTable = state.setdefault("pages", (PageMeans if means else PageTable)(page))
    return table


def value_mean(state: dict[str, Any]) -> ValueMean:
    """Return the mean of values in the scratch of some KV rows, created on first use."""
    mean: ValueMean = state.setdefault("values", ValueMean())
    return mean


class ValueMean:
    """Mean of all values so far."""

    def __init__(self) -> None:
        self.size = 0
        self.sum = torch.zeros(())
        # The sum at an earlier size, to which tokens are taken back.
        self._before: tuple[int, Tensor] | None = None
        # Bytes of a number of the values.
        self._item = 0

    def update(self, kv_rows: KVRows, dtype: torch.dtype) -> Tensor:
        """Add the values stored since the last call and return the mean [X, Dv]; see PageTable.update."""
        if kv_rows.length is not None:
            return self.sum.add_(kv_rows.values_at(kv_rows.newest())[:, 0].to(dtype)) / kv_rows.length.count
        self._item = kv_rows.values.element_size()
        if self.size < kv_rows.size:
            new = kv_rows.values_at(kv_rows.span(self.size, kv_rows.size)).to(dtype).sum(1)
            self.sum = self.sum.add_(new) if self.size else new
            self.size = kv_rows.size
        return self.sum / self.size

    def count_in(self, entries: int) -> None:
        self.size += entries

    def remember(self) -> None:
        """Keep the sum as it is, for `keep_first`."""
        self._before = self.size, self.sum.clone()

    def keep_first(self, entries: int) -> None:
        """Forget all but the first `entries` entries; those since `remember`, or all, are added again."""
        if entries < self.size:
            before = self._before
            self.size = 0
            if before is not None and before[0] <= entries:
                self.size = before[0]
                self.sum.copy_(before[1])

    def make_room(self, entries: int) -> None:
        pass

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.sum,)

    def accumulators(self) -> tuple[Tensor, ...]:
        return (self.sum,)

    def all_tensors(self) -> tuple[Tensor, ...]:
        return self.tensors() if self._before is None else (self.sum, self._before[1])

    def update_bytes(self, before: int, after: int) -> int:
        return self.sum.numel() * (after - before) * self._item
