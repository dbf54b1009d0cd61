"""Storage of one layer's keys and values with the same number of entries for every KV head."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvsieve.cache.base import MIN_ROOM, Store, grown, last_tokens
from kvsieve.core.selection import entries_at
from kvsieve.types import Selection


class DenseStore(Store):
    """Preallocated, growing buffers of one layer.

    Reading gives views of the buffers, of which the first `size` entries are in use and appended to in place. `keep`
    moves the entries that stay into new, smaller buffers, so that the memory of the others is really returned.

    Attributes:
        keys: [B, H, size, D].
        values: [B, H, size, Dv].
        index: int32 [B, H, size], token index of each entry in its row as fed (padding counted), -1 for filler.
        valid: bool [B, H or 1, size] once anything stored is padding or filler, else None.
        lengths: real entries of each row, the same for all its heads.
        kept: slots in use after the last change other than appending and taking back.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kept = 0

    @property
    def heads(self) -> int:
        """KV heads stored; more than the model has after a per-query-head selection."""
        return self.buffers()[0].shape[1]

    def padded(self) -> DenseStore:
        """Return it as a store of equally many entries per head, which it is."""
        return self

    @property
    def keys(self) -> Tensor:
        """[B, H, size, D], a view."""
        return self.buffers()[0][:, :, : self.size]

    @property
    def values(self) -> Tensor:
        """[B, H, size, D], a view."""
        return self.buffers()[1][:, :, : self.size]

    @property
    def index(self) -> Tensor:
        """int32 [B, H, size], a view."""
        return self.buffers()[2][:, :, : self.size]

    @property
    def valid(self) -> Tensor | None:
        """bool [B, H or 1, size], a view, or None when every stored entry is real."""
        return None if self.valid_buffer is None else self.valid_buffer[:, :, : self.size]

    def append(
        self,
        keys: Tensor,
        values: Tensor,
        token_index: Tensor,
        valid: Tensor | None = None,
        counts: tuple[int, ...] | None = None,
        reserve: int = 0,
    ) -> None:
        """Store new entries at the end.

        Args:
            keys: [B, H, L, D].
            values: [B, H, L, Dv].
            token_index: int [1 or B, L], index of each token in its row as fed, padding counted.
            valid: bool [B, L], False for padding; None when all are real.
            counts: real tokens per row, if `valid` is given and they are known; None counts them.
            reserve: tokens to leave room for when the buffers must grow.
        """
        batch, heads, new, _ = keys.shape
        if self._keys is None:
            self._allocate(keys, values, new + max(reserve, 0))
            self.lengths = (0,) * batch
        elif self.heads != heads:
            keys, values = (part.repeat_interleave(self.heads // heads, 1) for part in (keys, values))
        buffers = self.buffers()
        end = self.size + new
        if end > buffers[0].shape[2] or self.size < self.shared:
            self._resize(end + (reserve or max(MIN_ROOM, end // 8)))
            buffers = self.buffers()
        if valid is not None:
            self.derived = {}
        buffers[0][:, :, self.size : end] = keys
        buffers[1][:, :, self.size : end] = values
        buffers[2][:, :, self.size : end] = token_index[:, None]
        if valid is not None and self.valid_buffer is None:
            self.valid_buffer = torch.ones(batch, 1, buffers[0].shape[2], dtype=torch.bool, device=keys.device)
        if self.valid_buffer is not None:
            self.valid_buffer[:, :, self.size : end] = True if valid is None else valid[:, None]
        if counts is None:
            counts = (new,) * batch if valid is None else tuple(valid.sum(-1).tolist())
        self.lengths = tuple(old + count for old, count in zip(self.lengths, counts, strict=True))
        self.size = end

    def make_room(self, tokens: int) -> None:
        if self.size + tokens > self.capacity or self.size < self.shared:
            self._resize(self.size + tokens)

    def prepare_slots(self, token_index: int) -> None:
        keys, values, index = (part[:, :, self.size :] for part in self.buffers())
        # Masked, but read: what was never written could be no number.
        keys.zero_()
        values.zero_()
        index.copy_(torch.arange(token_index, token_index + index.shape[2], device=index.device))
        if self.valid_buffer is not None:
            self.valid_buffer[:, :, self.size :] = True

    def put(self, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        for to, part in zip(self.buffers()[:2], (keys, values), strict=True):
            if part.shape[1] != to.shape[1]:
                part = part.repeat_interleave(to.shape[1] // part.shape[1], 1)
            to.index_copy_(2, slots, part)

    def keep(self, selection: Selection, reserve: int = 0, *, reuse: bool = True) -> None:
        """Keep only the selected slots and free the rest.

        Args:
            selection: indices [B, H', K], H' a multiple of the stored heads: each head's slots, or, where H' is larger,
                a copy per query head.
            reserve: tokens to leave room for.
            reuse: buffers that are hardly larger than needed serve on.
        """
        indices = selection.indices
        copies = indices.shape[1] // self.heads
        kept = indices.shape[2]
        capacity = self.buffers()[0].shape[2]
        # Eviction while decoding drops few entries at a time: then the buffers serve on.
        fits = kept + reserve <= capacity <= (kept + reserve) * 5 // 4
        in_place = reuse and fits and copies == 1 and not self.shared

        def gather(buffer: Tensor) -> Tensor:
            source = buffer[:, :, : self.size]
            if copies > 1:
                source = source.repeat_interleave(copies, 1)
            to = buffer if in_place else buffer.new_empty((*indices.shape[:2], kept + reserve, *buffer.shape[3:]))
            to[:, :, :kept] = entries_at(source, indices)
            return to

        self._keys, self._values, self._index = (gather(buffer) for buffer in self.buffers())
        self.shared, self.derived = 0, {}
        self.size = self.kept = kept
        capacity = self._keys.shape[2]
        real = selection.real()
        if real is None:
            self.valid_buffer = None
            self.lengths = (kept,) * indices.shape[0]
        else:
            shape = (real.shape[0], 1, capacity)
            if not in_place or self.valid_buffer is None or self.valid_buffer.shape != shape:
                self.valid_buffer = torch.ones(shape, dtype=torch.bool, device=indices.device)
            self.valid_buffer[:, :, :kept] = real[:, None]
            self._index[:, :, :kept].masked_fill_(~real[:, None], -1)
            self.lengths = selection.lengths or ()

    def drop_first(self, count: int, reserve: int = 0) -> None:
        """Drop the first `count` slots, and free their memory. reserve: tokens to leave room for."""
        if count <= 0:
            return
        kept = self.size - count

        def tail(buffer: Tensor) -> Tensor:
            fresh = buffer.new_zeros((*buffer.shape[:2], kept + reserve, *buffer.shape[3:]))
            fresh[:, :, :kept] = buffer[:, :, count : self.size]
            return fresh

        if self.valid_buffer is None:
            self.lengths = tuple(length - count for length in self.lengths)
        self._apply(tail)
        self.shared, self.derived = 0, {}
        self.size = self.kept = kept
        if self.valid_buffer is not None:
            valid = self.valid_buffer[:, :, :kept]
            self.lengths = tuple(valid.sum(-1).amax(-1).tolist())
            if bool(valid.all()):
                self.valid_buffer = None

    @property
    def droppable(self) -> int:
        return self.size - self.kept

    def _take_back(self, counts: Sequence[int], least: int, most: int) -> tuple[int, ...]:
        start, end = self.size - most, self.size - least
        valid, dropped = self.valid_buffer, tuple(counts)
        goes = last_tokens(counts, self.buffers()[0].device) if least < most else None
        if valid is not None:
            real = valid[:, 0, start : self.size]
            dropped = tuple((real if goes is None else real & goes).sum(-1).tolist())
        if goes is not None:
            if valid is None:
                valid = torch.ones(len(goes), 1, self.capacity, dtype=torch.bool, device=goes.device)
            elif start < self.shared:
                valid = valid.clone()
            valid[:, :, start:end].masked_fill_(goes[:, None, : end - start], False)
        elif valid is not None and sum(dropped) < most * len(counts) and bool(valid[:, :, :end].all()):
            valid = None
        self.valid_buffer, self.size = valid, end
        return dropped

    def remask(self, mask: Tensor) -> None:
        """Apply a changed attention mask to the stored entries; mask: bool [B, tokens fed]."""
        self.derived = {}
        index = self.index.long()
        rows = torch.arange(index.shape[0], device=index.device)[:, None, None]
        valid = mask[rows, index.clamp_min(0)] & (index >= 0)
        capacity = self.buffers()[0].shape[2]
        self.valid_buffer = torch.ones(*valid.shape[:2], capacity, dtype=torch.bool, device=valid.device)
        self.valid_buffer[:, :, : self.size] = valid
        # Heads may have kept different tokens; budgets speak of a row, so count its fullest head.
        self.lengths = tuple(valid.sum(-1).amax(-1).tolist())

    @classmethod
    def stack(cls, stores: Sequence[DenseStore], reserve: int = 0) -> DenseStore:
        """Build one store whose rows are those of `stores`, which stay as they are.

        Shorter ones get filler on the left.

        Args:
            stores: stores with equally many heads.
            reserve: tokens to leave room for.
        """
        size, rows = max(store.size for store in stores), sum(len(store.lengths) for store in stores)
        out = cls()
        keys, values = stores[0].keys, stores[0].values
        out._keys, out._values = (
            part.new_zeros(rows, part.shape[1], size + reserve, part.shape[3]) for part in (keys, values)
        )
        out._index = stores[0].index.new_full((rows, keys.shape[1], size + reserve), -1)
        heads = max(1 if store.valid is None else store.valid.shape[1] for store in stores)
        if any(store.valid is not None or store.size < size for store in stores):
            out.valid_buffer = torch.zeros(rows, heads, size + reserve, dtype=torch.bool, device=keys.device)
        row = 0
        for store in stores:
            to, left = slice(row, row + len(store.lengths)), slice(size - store.size, size)
            out._keys[to, :, left], out._values[to, :, left] = store.keys, store.values
            out._index[to, :, left] = store.index
            if out.valid_buffer is not None:
                out.valid_buffer[to, :, left] = True if store.valid is None else store.valid
            row = to.stop
        out.size = size
        out.kept = size - min(store.droppable for store in stores)
        out.lengths = tuple(length for store in stores for length in store.lengths)
        return out

    def _allocate(self, keys: Tensor, values: Tensor, capacity: int) -> None:
        batch, heads = keys.shape[:2]
        self._keys = keys.new_empty(batch, heads, capacity, keys.shape[3])
        self._values = values.new_empty(batch, heads, capacity, values.shape[3])
        self._index = torch.empty(batch, heads, capacity, dtype=torch.int32, device=keys.device)

    def _resize(self, capacity: int) -> None:
        self._apply(lambda buffer: grown(buffer, 2, self.size, capacity))
        self.shared = 0
