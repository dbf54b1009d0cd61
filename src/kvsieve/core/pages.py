"""Channel-wise bounds of the keys of pages of consecutive entries, updated entry by entry."""

from __future__ import annotations

from kvsieve import kernels
from kvsieve.core.kv_rows import DeviceLength, KVRows
from kvsieve.lazy import Tensor, torch


class PageTable:
    """Largest and smallest value of every key channel over each page of consecutive entries (Quest, HSA).

    Channel-major, [X, halves, D, capacity], so that a few channels of all pages are contiguous reads. Half 0 has the
    largest values, half 1 the smallest; pages of one entry need one half only.

    Attributes:
        page: entries per page.
        size: entries added.
    """

    def __init__(self, page: int) -> None:
        self.page = page
        self.size = 0
        self._table: Tensor | None = None
        self._starts: Tensor | None = None

    @property
    def pages(self) -> int:
        return self._pages(self.size)

    @property
    def halves(self) -> int:
        return 1 if self.page == 1 else 2

    def update(self, kv_rows: KVRows) -> None:
        """Add the entries stored since the last call; full pages never change.

        If the length of the KV rows is on the device, only the newest entry is added; all others must have been.
        """
        if kv_rows.length is not None:
            self._take(kv_rows, kv_rows.length)
        elif self.size < kv_rows.size:
            self._add(kv_rows.keys_at(kv_rows.span(self.size, kv_rows.size)))

    def bounds(self, size: int | None = None) -> Tensor:
        """Return the bounds of the pages of the first `size` entries (None: all), a view [X, halves, D, pages]."""
        assert self._table is not None
        return self._table[..., : self._pages(self.size if size is None else size)]

    def rows(self, at: Tensor, size: int | None = None) -> Tensor:
        """Copy the bounds of chosen channels for all pages.

        Args:
            at: int64 [X, k], half * D + channel.
            size: entries with pages to copy; None for all.

        Returns:
            [X, k, pages].
        """
        assert self._table is not None
        pages = self._pages(self.size if size is None else size)
        kv_rows, _, dim, capacity = self._table.shape
        if self._starts is None or len(self._starts) != kv_rows:
            self._starts = torch.arange(kv_rows, device=at.device)[:, None] * (self.halves * dim)
        at = at + self._starts
        # Rows are cut before they are copied, because they have room for further pages.
        return self._table.view(-1, capacity)[:, :pages].index_select(0, at.view(-1)).view(*at.shape, pages)

    def scores(self, weights: Tensor, at: Tensor, kv_rows: KVRows) -> tuple[Tensor, int]:
        """Return weighted sums over chosen channels, for every page.

        Args:
            weights: [X, G, k].
            at: int64 [X, k]; see `rows`.
            kv_rows: entries of the table.

        Returns:
            Scores [X, G, pages], undefined for pages beyond a length on the device, and the bytes of metadata read.
        """
        assert self._table is not None
        pages = self._pages(kv_rows.size)
        metadata_bytes = at.numel() * pages * self._table.element_size()
        if kernels.usable(self._table, weights):
            table = self._table[..., :pages]
            return kernels.page_scores(table, weights, at, self._count(kv_rows), self.page), metadata_bytes
        return weights @ self.rows(at, kv_rows.size).to(weights.dtype), metadata_bytes

    def bound(self, query: Tensor, kv_rows: KVRows) -> tuple[Tensor, int]:
        """Return an upper bound of a query's logits in each page.

        Args:
            query: [X, G, D].
            kv_rows: entries of the table.

        Returns:
            Bounds [X, G, pages] in the query's dtype, undefined for pages beyond a length on the device, and the bytes
            of metadata read.
        """
        bounds = self.bounds(kv_rows.size)
        metadata_bytes = bounds.numel() * bounds.element_size()
        if kernels.usable(bounds, query):
            return kernels.page_bounds(bounds, query, self._count(kv_rows), self.page), metadata_bytes
        bounds = bounds.to(query.dtype)
        if self.halves == 1:
            return query @ bounds[:, 0], metadata_bytes
        return query.clamp(min=0) @ bounds[:, 0] + query.clamp(max=0) @ bounds[:, 1], metadata_bytes

    @property
    def buffer(self) -> Tensor:
        """The table including spare room, [X, halves, D, capacity]."""
        assert self._table is not None
        return self._table

    def count_in(self, entries: int) -> None:
        """Count entries that are added to the buffer in place."""
        self.size += entries

    @staticmethod
    def _count(kv_rows: KVRows) -> Tensor | None:
        """Return the number of entries if the length is on the device, else None."""
        return None if kv_rows.length is None else kv_rows.length.count

    def keep_first(self, entries: int) -> None:
        """Forget all but the first `entries` entries; a page that then is no longer full is taken in again."""
        if entries < self.size:
            self.size = entries // self.page * self.page

    def make_room(self, entries: int) -> None:
        needed = self._pages(entries)
        if self._table is not None and needed > self._table.shape[-1]:
            self._grow(self._table, needed)

    def tensors(self) -> tuple[Tensor, ...]:
        return () if self._table is None else (self._table,)

    def accumulators(self) -> tuple[Tensor, ...]:
        return ()

    def all_tensors(self) -> tuple[Tensor, ...]:
        return self.tensors() if self._starts is None else (*self.tensors(), self._starts)

    def update_bytes(self, before: int, after: int) -> int:
        """Count the new keys and the bounds of the page in progress; see IncrementalMetadata."""
        if self._table is None:
            return 0
        kv_rows, _, dim, _ = self._table.shape
        begun = self.halves if before % self.page and after > before else 0
        return kv_rows * dim * (after - before + begun) * self._table.element_size()

    def _pages(self, entries: int) -> int:
        return -(-entries // self.page)

    def _grow(self, like: Tensor, needed: int) -> Tensor:
        """Allocate a table of more than `needed` pages that starts with this one's; like: [X, ...] of its dtype."""
        dim = like.shape[2]
        # A multiple of 16, for wide reads.
        capacity = -(-(needed + max(32, needed // 8)) // 16) * 16
        table = like.new_zeros(len(like), self.halves, dim, capacity)
        if self._table is not None:
            table[..., : self._table.shape[-1]] = self._table
        self._table = table
        return table

    def _take(self, kv_rows: KVRows, length: DeviceLength) -> None:
        """Add the newest key of every KV row: start a page with it, or widen the page's bounds."""
        assert self._table is not None
        if kv_rows.in_buffers and kernels.usable(self._table):
            kernels.update_pages(self._table, kv_rows, self.page)
            return
        occupancy = length.occupancy(self.page, self._pages(kv_rows.size))
        new = kv_rows.keys_at(kv_rows.newest()).transpose(1, 2)[:, None].expand(-1, self.halves, -1, -1)
        if self.page > 1:
            old = self._table.index_select(3, occupancy.newest)
            wider = torch.stack([torch.maximum(old[:, 0], new[:, 0]), torch.minimum(old[:, 1], new[:, 1])], 1)
            new = torch.where(occupancy.first, new, wider)
        self._table.index_copy_(3, occupancy.newest, new)

    def _add(self, keys: Tensor) -> None:
        new = keys.shape[1]
        # Entries that complete the newest page, then whole pages; the last may be short.
        first = min(new, -self.size % self.page)
        needed = -(-(self.size + new) // self.page)
        if self._table is None or needed > self._table.shape[-1]:
            self._table = self._grow(keys, needed)
        if new == 1 and not first:
            # The first entry of a page is both its bounds.
            self._table[..., needed - 1] = keys
            self.size += 1
            return
        if first:
            newest = self._table[..., self.pages - 1]
            part = keys[:, :first]
            torch.maximum(newest[:, 0], part.amax(1), out=newest[:, 0])
            if self.halves == 2:
                torch.minimum(newest[:, 1], part.amin(1), out=newest[:, 1])
        start = self.pages
        self.size += new
        if new == first:
            return
        rest = keys[:, first:]
        short = -rest.shape[1] % self.page
        if short:
            rest = torch.cat([rest, rest[:, -1:].expand(-1, short, -1)], 1)
        paged = rest.unflatten(1, (-1, self.page))
        self._table[:, 0, :, start:needed] = paged.amax(2).transpose(1, 2)
        if self.halves == 2:
            self._table[:, 1, :, start:needed] = paged.amin(2).transpose(1, 2)
