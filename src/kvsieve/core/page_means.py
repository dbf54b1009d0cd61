"""Mean keys of pages of consecutive entries, updated entry by entry."""

from __future__ import annotations

from kvsieve import kernels
from kvsieve.core.kv_rows import DeviceLength, KVRows
from kvsieve.core.pages import PageTable
from kvsieve.core.scoring import score_dtype
from kvsieve.lazy import Tensor, torch


class PageMeans(PageTable):
    """Sums of the keys of each page, in float32 at least, added in the entries' order."""

    def __init__(self, page: int) -> None:
        super().__init__(page)
        # Bytes of a number of the keys.
        self._item = 0

    @property
    def halves(self) -> int:
        return 1

    def update(self, kv_rows: KVRows) -> None:
        self._item = kv_rows.keys.element_size()
        super().update(kv_rows)

    def bound(self, query: Tensor, kv_rows: KVRows) -> tuple[Tensor, int]:
        """Return the logits of every page's mean key and the bytes read for them; see PageTable.bound."""
        sums = self.bounds(kv_rows.size)
        metadata_bytes = sums.numel() * sums.element_size()
        if kernels.usable(sums, query):
            scores = kernels.page_scores(sums, query / self.page, None, self._count(kv_rows), self.page)
        else:
            scores = query / self.page @ sums[:, 0].to(query.dtype)
        if kv_rows.length is not None:
            part = kv_rows.length.occupancy(self.page, scores.shape[-1]).part
            scores /= part.clamp_min(1 / self.page).to(scores.dtype)
        elif kv_rows.size % self.page:
            scores[..., -1] *= self.page / (kv_rows.size % self.page)
        return scores, metadata_bytes

    def accumulators(self) -> tuple[Tensor, ...]:
        return self.tensors()

    def update_bytes(self, before: int, after: int) -> int:
        if self._table is None:
            return 0
        kv_rows, _, dim, _ = self._table.shape
        begun = self._table.element_size() if before % self.page and after > before else 0
        return kv_rows * dim * ((after - before) * self._item + begun)

    def _take(self, kv_rows: KVRows, length: DeviceLength) -> None:
        table = self.buffer
        occupancy = length.occupancy(self.page, self._pages(kv_rows.size))
        new = kv_rows.keys_at(kv_rows.newest()).transpose(1, 2)[:, None].to(table.dtype)
        begun = torch.where(occupancy.first, 0, table.index_select(3, occupancy.newest))
        table.index_copy_(3, occupancy.newest, begun + new)

    def _add(self, keys: Tensor) -> None:
        keys = keys.to(score_dtype(keys.dtype))
        first = min(keys.shape[1], -self.size % self.page)
        needed = self._pages(self.size + keys.shape[1])
        if self._table is None or needed > self._table.shape[-1]:
            self._table = self._grow(keys, needed)
        # One by one, so that the sum does not depend on how many are added at once.
        for key in keys[:, :first].unbind(1):
            self._table[:, 0, :, self.pages - 1] += key
        start = self.pages
        rest = keys[:, first:]
        self.size += keys.shape[1]
        if rest.shape[1]:
            rest = torch.nn.functional.pad(rest, (0, 0, 0, -rest.shape[1] % self.page))
            begun, *more = rest.unflatten(1, (-1, self.page)).unbind(2)
            sums = begun.clone()
            for key in more:
                sums += key
            self._table[:, 0, :, start:needed] = sums.transpose(1, 2)
