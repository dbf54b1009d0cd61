"""Store of one layer with equal numbers of entries per KV head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self, cast

import torch
from torch import Tensor

from kvsieve.cache.buffered import BufferedMemory, last_tokens
from kvsieve.cache.columns import Columns
from kvsieve.cache.contract import MIN_ROOM, LayerMemory
from kvsieve.cache.written import written
from kvsieve.types import Selection


class DenseStore(BufferedMemory):
    """Preallocated, growing buffers of one layer.

    Reading returns views of the buffers; the first `size` entries are in use and appended to in place. `keep` moves
    kept entries into new, smaller buffers, so that memory is freed.

    Attributes:
        columns: [B, H, capacity, ...]; "valid" is [B, H or 1, capacity], present once an entry is not real.
        kept: slots in use after the last change other than appending and its reversal.
    """

    def __init__(self, columns: Columns | None = None, size: int = 0, lengths: tuple[int, ...] = ()) -> None:
        super().__init__(columns, size, lengths)
        self.kept = size

    @classmethod
    def of(
        cls,
        keys: Tensor,
        values: Tensor,
        index: Tensor,
        valid: Tensor | None,
        lengths: tuple[int, ...],
        log_weight: Tensor | None = None,
        scores: Tensor | None = None,
    ) -> Self:
        """Return a store on these tensors, [B, H, N, ...], all in use."""
        facts = {"valid": valid, "log_weight": log_weight, "scores": scores}
        known = {name: part for name, part in facts.items() if part is not None}
        return cls(Columns(keys=keys, values=values, index=index, **known), keys.shape[2], lengths)

    @property
    def heads(self) -> int:
        return self.buffers()[0].shape[1]

    def padded(self) -> DenseStore:
        return self

    @property
    def keys(self) -> Tensor:
        return self.buffers()[0][:, :, : self.size]

    @property
    def values(self) -> Tensor:
        return self.buffers()[1][:, :, : self.size]

    @property
    def index(self) -> Tensor:
        return self.buffers()[2][:, :, : self.size]

    @property
    def valid(self) -> Tensor | None:
        return None if self.valid_buffer is None else self.valid_buffer[:, :, : self.size]

    @property
    def log_weight(self) -> Tensor | None:
        return None if self.weight_buffer is None else self.weight_buffer[:, :, : self.size]

    def append(
        self,
        keys: Tensor,
        values: Tensor,
        token_index: Tensor,
        valid: Tensor | None = None,
        counts: tuple[int, ...] | None = None,
        reserve: int = 0,
    ) -> None:
        batch, heads, new, _ = keys.shape
        if self.is_empty:
            self._allocate(keys, values, new + max(reserve, 0))
        elif self.heads != heads:
            keys, values = (part.repeat_interleave(self.heads // heads, 1) for part in (keys, values))
        end = self.size + new
        if not self._has_room(end):
            self._resize(end + (reserve or max(MIN_ROOM, end // 8)))
        if valid is not None:
            self.columns = self.columns.with_valid()
        slots = slice(self.size, end)
        columns = self.columns.parts
        columns["keys"][:, :, slots] = keys
        columns["values"][:, :, slots] = values
        columns["index"][:, :, slots] = token_index[:, None]
        if "valid" in columns:
            columns["valid"][:, :, slots] = True if valid is None else valid[:, None]
        for name in ("log_weight", "scores"):
            if name in columns:
                columns[name][:, :, slots] = 0
        self._count_new(batch, new, valid, counts)
        self.size = end

    def add_scores(self, sums: Tensor, before: int) -> None:
        scores = self.columns.parts.get("scores")
        if scores is None:
            scores = sums.new_zeros(*sums.shape[:2], self.capacity)
        elif before < self.shared:
            scores = scores.clone()
        scores[:, :, before : self.size] += sums
        self.columns = self.columns.including(scores=scores)

    def forget_scores(self) -> None:
        super().forget_scores()
        self.columns = self.columns.without("scores")

    def prepare_slots(self, token_index: int) -> None:
        keys, values, index = (part[:, :, self.size :] for part in self.buffers())
        # Masked, but read: unwritten memory could be NaN.
        keys.zero_()
        values.zero_()
        index.copy_(torch.arange(token_index, token_index + index.shape[2], device=index.device))
        if self.valid_buffer is not None:
            self.valid_buffer[:, :, self.size :] = True
        if self.weight_buffer is not None:
            self.weight_buffer[:, :, self.size :] = 0

    def put(self, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        for to, part in zip(self.buffers()[:2], (keys, values), strict=True):
            if part.shape[1] != to.shape[1]:
                part = part.repeat_interleave(to.shape[1] // part.shape[1], 1)
            to.index_copy_(2, slots, part)

    def keep(self, selection: Selection, reserve: int = 0, *, reuse: bool = True) -> None:
        """Keep only the selected slots and free the rest, with the keys, values and weights of the selection, if any.

        Args:
            selection: indices [B, H', K], H' a multiple of the stored heads: each head's slots, or, for a larger H', a
                copy per query head.
            reserve: tokens to leave room for.
            reuse: keep buffers that are slightly larger than needed.
        """
        real = selection.real_of_heads()
        needed = selection.indices.shape[2] + reserve
        # Eviction while decoding drops few entries at a time: then the buffers are kept.
        reuse = reuse and needed <= self.capacity <= needed * 5 // 4
        lengths = None if real is None else selection.lengths
        self.take(selection.indices, real, needed, reuse=reuse, lengths=lengths)
        if selection.writes:
            self.columns = written(self.columns, selection, real)

    def take(
        self,
        slots: Tensor,
        real: Tensor | None,
        capacity: int,
        *,
        reuse: bool,
        lengths: tuple[int, ...] | None = None,
    ) -> None:
        """Keep slots, in this order.

        Args:
            slots: int64 [B, H', K].
            real: bool [B, 1 or H', K], False for slots that become filler; None if all are real.
            capacity: number of slots.
            reuse: keep these buffers, unless a copy may read them, or heads have copies.
            lengths: real entries of each row; None: K.
        """
        kept = slots.shape[2]
        reuse = reuse and slots.shape[1] == self.heads and not self.shared
        capacity = self.capacity if reuse else capacity
        valid = self.valid_buffer
        columns = self.columns.without("valid").without("scores")
        self.columns = columns.taken(self.size, slots, capacity, in_place=reuse)
        self.shared = 0
        self.derived = {}
        self.size = self.kept = kept
        self.lengths = lengths or (kept,) * len(slots)
        if real is not None:
            shape = (*real.shape[:2], capacity)
            if not reuse or valid is None or valid.shape != shape:
                valid = torch.ones(shape, dtype=torch.bool, device=slots.device)
            valid[:, :, :kept] = real
            self.columns["index"][:, :, :kept].masked_fill_(~real, -1)
            if self.weight_buffer is not None:
                self.weight_buffer[:, :, :kept].masked_fill_(~real, 0)
            self.columns = self.columns.including(valid=valid)

    def drop_first(self, count: int, reserve: int = 0) -> None:
        """Drop the first `count` slots, and free their memory. reserve: tokens to leave room for."""
        if count <= 0:
            return
        if self.valid_buffer is None:
            self.lengths = tuple(length - count for length in self.lengths)
        self.columns = self.columns.grown(self.size, self.size - count + reserve, start=count)
        self.shared = 0
        self.derived = {}
        self.size = self.kept = self.size - count
        if self.valid is not None:
            self.lengths = tuple(self.valid.sum(-1).amax(-1).tolist())
            if bool(self.valid.all()):
                self.columns = self.columns.without("valid")

    @property
    def droppable(self) -> int:
        return self.size - self.kept

    def _take_back(self, counts: Sequence[int], least: int, most: int) -> tuple[int, ...]:
        start = self.size - most
        end = self.size - least
        valid = self.valid
        dropped = tuple(counts)
        if least < most:
            goes = last_tokens(counts, self.buffers()[0].device)
            if valid is not None:
                dropped = tuple((valid[:, 0, start:] & goes).sum(-1).tolist())
                if start < self.shared:
                    self.columns = self.columns.including(valid=self.columns["valid"].clone())
            self.columns = self.columns.with_valid()
            self.columns["valid"][:, :, start:end].masked_fill_(goes[:, None, : end - start], False)
        elif valid is not None:
            dropped = tuple(valid[:, 0, start:].sum(-1).tolist())
            if sum(dropped) < most * len(counts) and bool(valid[:, :, :end].all()):
                self.columns = self.columns.without("valid")
        self.size = end
        return dropped

    def remask(self, mask: Tensor) -> None:
        self.derived = {}
        index = self.index.long()
        rows = torch.arange(index.shape[0], device=index.device)[:, None, None]
        valid = mask[rows, index.clamp_min(0)] & (index >= 0)
        buffer = torch.ones(*valid.shape[:2], self.capacity, dtype=torch.bool, device=valid.device)
        buffer[:, :, : self.size] = valid
        self.columns = self.columns.including(valid=buffer)
        # Heads may have kept different tokens; budgets are per row, so count its fullest head.
        self.lengths = tuple(valid.sum(-1).amax(-1).tolist())

    def parts(self) -> dict[str, Any]:
        if self.is_empty:
            return {}
        return {"lengths": self.lengths, **self.columns.used(self.size), "valid": self.valid}

    @classmethod
    def stack(cls, memories: Sequence[LayerMemory], reserve: int = 0) -> Self:
        """Return one store with the rows of `memories`, which do not change.

        Shorter ones get filler on the left.

        Args:
            memories: with equally many heads.
            reserve: tokens to leave room for.
        """
        stores = [cast(DenseStore, memory.padded()) for memory in memories]
        sizes = [store.size for store in stores]
        columns = Columns.stacked([store.columns for store in stores], sizes, reserve)
        out = cls(columns, max(sizes), tuple(length for store in stores for length in store.lengths))
        out.kept = out.size - min(store.droppable for store in stores)
        return out

    def _allocate(self, keys: Tensor, values: Tensor, capacity: int) -> None:
        buffers = (part.new_empty(*part.shape[:2], capacity, part.shape[3]) for part in (keys, values))
        index = torch.empty(*keys.shape[:2], capacity, dtype=torch.int32, device=keys.device)
        self.columns = Columns(**dict(zip(("keys", "values"), buffers, strict=True)), index=index)
