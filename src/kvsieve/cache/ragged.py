"""Store of one layer with different numbers of entries per KV head."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from kvsieve.cache.buffered import BufferedMemory, last_tokens
from kvsieve.cache.columns import Columns
from kvsieve.cache.contract import MIN_ROOM, LayerMemory
from kvsieve.cache.lanes import bias_of_a_token, bias_of_turns, turns, whole
from kvsieve.cache.store import DenseStore
from kvsieve.cache.written import parts_of
from kvsieve.core.selection import slots_of
from kvsieve.types import Selection


class RaggedStore(BufferedMemory):
    """Entries of all heads in one flat buffer: kept ones head by head, then a slot per head for each new token.

    Columns [B, capacity, ...]; rows that kept fewer have filler before the new tokens. "valid" is [B, H, capacity] in
    the keys' dtype, a bias on a head's logits: 0 for a real entry of the head, else the dtype's minimum.

    Nothing is padded to the fullest head: attention needs the flat buffers and `valid_buffer` only. `keys`, `values`,
    `index` and `valid` are padded copies [B, H, N, ...], right-aligned, made on access, for evictors and later turns.

    Attributes:
        body: slots of kept entries.
        counts: int64 [B, H], entries of each head among them.
        hides_newest: True if the newest token is padding in some row.
    """

    is_ragged = True

    def __init__(
        self,
        columns: Columns,
        lengths: tuple[int, ...],
        counts: Tensor,
        *,
        size: int,
        body: int,
        hides_newest: bool = False,
        totals: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__(columns, size, lengths)
        self.body = body
        self.counts = counts
        self.hides_newest = hides_newest
        # Real entries of each row, of all its heads, and the largest of `counts`; None where they must be looked up.
        self._totals = totals
        self._most = None if totals is None else max(lengths)
        # [H, H], the bias that `put` writes for a new token's slots.
        self._own = torch.zeros(0, 0)

    @classmethod
    def build(cls, store: LayerMemory, selection: Selection, reserve: int = 0) -> Self:
        """Return a store of a store's selected entries, with the keys, values and weights of the selection, if any.

        Args:
            store: of H heads.
            selection: indices [B, H', K], H' a multiple of H; a larger one stores a copy per query head.
            reserve: tokens to leave room for.
        """
        stored = {"keys": store.keys, "values": store.values, "index": store.index}
        if store.log_weight is not None:
            stored["log_weight"] = store.log_weight
        own = parts_of(selection)
        slots = selection.indices
        real = selection.real_of_heads()
        batch, heads, size = slots.shape
        keys = stored["keys"]
        copies = heads // keys.shape[1]
        if real is None:
            real = torch.ones(1, 1, 1, dtype=torch.bool, device=slots.device)
        real = real.expand(batch, heads, size)
        counts = real.sum(-1)
        head_lengths = selection.head_lengths or tuple(
            (count,) * heads for count in selection.lengths or (size,) * batch
        )
        totals = tuple(map(sum, head_lengths))
        used = max(totals)
        capacity = whole(used + max(reserve, 1) * heads)
        flat = {
            name: part.new_full((batch, capacity, *part.shape[3:]), -1 if name == "index" else 0)
            for name, part in stored.items()
        }
        if "log_weight" in own:
            flat["log_weight"] = torch.zeros_like(flat["index"], dtype=torch.float32)
        bias = keys.new_full((batch, heads, capacity), torch.finfo(keys.dtype).min)
        for row, total in enumerate(totals):
            at = slots_of(real[row].flatten(), total)
            head = at // size
            slot = slots[row].flatten()[at]
            for name, to in flat.items():
                # Written parts have the selection's places, stored ones the store's slots.
                part = own[name][row, head, at % size] if name in own else stored[name][row, head // copies, slot]
                to[row, :total] = part
            bias[row, head, torch.arange(total, device=at.device)] = 0
        lengths = tuple(map(max, head_lengths))
        return cls(Columns(**flat, valid=bias), lengths, counts, size=used, body=used, totals=totals)

    @property
    def heads(self) -> int:
        return self._bias().shape[1]

    @property
    def entries(self) -> int:
        if self._totals is None:
            self._totals = tuple(self.visible().sum((1, 2)).tolist())
        return -(-max(self._totals) // self.heads)

    @property
    def flat(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return keys [B, T, D], values [B, T, Dv] and the bias of each head's logits, [B, H, T]; LANES divides T.

        Every head sees its newest entry, even padding.
        """
        keys, values, _ = self.buffers()
        end = whole(self.size)
        bias = self._bias()[:, :, :end]
        if self.hides_newest:
            bias = bias.clone()
            newest = slice(self.size - self.heads, self.size)
            bias[:, :, newest].diagonal(dim1=1, dim2=2).fill_(0)
        return keys[:, :end], values[:, :end], bias

    @property
    def flat_log_weight(self) -> Tensor | None:
        """Logarithms of the weights of the slots of `flat`, float32 [B, T]; None while all entries weigh 1."""
        return None if self.weight_buffer is None else self.weight_buffer[:, : whole(self.size)]

    @property
    def keys(self) -> Tensor:
        return self._padded(self.buffers()[0])

    @property
    def values(self) -> Tensor:
        return self._padded(self.buffers()[1])

    @property
    def index(self) -> Tensor:
        padded = self._padded(self.buffers()[2][..., None])[..., 0]
        return padded.masked_fill_(self._filler(padded), -1)

    @property
    def valid(self) -> Tensor:
        padded = self._padded(self.visible().any(1)[..., None])[..., 0]
        return padded.masked_fill_(self._filler(padded), False)

    @property
    def log_weight(self) -> Tensor | None:
        if self.weight_buffer is None:
            return None
        padded = self._padded(self.weight_buffer[..., None])[..., 0]
        return padded.masked_fill_(self._filler(padded), 0)

    def padded(self) -> DenseStore:
        return DenseStore.of(self.keys, self.values, self.index, self.valid, self.lengths, self.log_weight)

    def append(
        self,
        keys: Tensor,
        values: Tensor,
        token_index: Tensor,
        valid: Tensor | None = None,
        counts: tuple[int, ...] | None = None,
        reserve: int = 0,
    ) -> None:
        batch, _, new, _ = keys.shape
        heads = self.heads
        if keys.shape[1] != heads:
            keys, values = (part.repeat_interleave(heads // part.shape[1], 1) for part in (keys, values))
        end = self.size + new * heads
        if not self._has_room(end):
            self._resize(end + (reserve or max(MIN_ROOM, end // heads // 8)) * heads)
        # Token by token, the heads of each side by side.
        slots = slice(self.size, end)
        buffers = self.buffers()
        for to, part in zip(buffers[:2], (keys, values), strict=True):
            to[:, slots] = part[:, :, 0] if new == 1 else part.transpose(1, 2).flatten(1, 2)
        buffers[2][:, slots] = token_index if new == 1 else token_index.repeat_interleave(heads, 1)
        # Slots after the end are read too, but belong to no head, even if another user of the buffers wrote there.
        after = whole(end) - end
        own = bias_of_turns(heads, new * heads, after, keys.dtype, keys.device)
        if valid is not None:
            padding = torch.nn.functional.pad(~valid.repeat_interleave(heads, 1), (0, after))[:, None]
            own = own.masked_fill(padding, torch.finfo(keys.dtype).min)
        self._bias()[:, :, self.size : end + after] = own
        if self.weight_buffer is not None:
            self.weight_buffer[:, self.size : end + after] = 0
        self.hides_newest = valid is not None
        self._add(self._count_new(batch, new, valid, counts))
        self.size = end

    @property
    def stride(self) -> int:
        return self.heads

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return (*super().tensors, self._own)

    def all_tensors(self) -> Iterator[Tensor]:
        yield from super().all_tensors()
        yield from (self.counts, self._own)

    def prepare_slots(self, token_index: int) -> None:
        index = self.buffers()[2][:, self.size :]
        heads = self.heads
        index.copy_(token_index + torch.arange(index.shape[1], device=index.device) // heads)
        self._own = bias_of_a_token(heads, self._bias().dtype, index.device)
        # They belong to no head until they are written: the whole buffer is read.
        self._bias()[:, :, self.size :] = torch.finfo(self._bias().dtype).min
        if self.weight_buffer is not None:
            self.weight_buffer[:, self.size :] = 0

    def put(self, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        heads = self.heads
        for to, part in zip(self.buffers()[:2], (keys, values), strict=True):
            if part.shape[1] != heads:
                part = part.repeat_interleave(heads // part.shape[1], 1)
            to.index_copy_(1, slots, part[:, :, 0])
        self._bias().index_copy_(2, slots, self._own.expand(len(keys), -1, -1))

    def advance_host_length(self, tokens: int = 1) -> None:
        super().advance_host_length(tokens)
        self._add((tokens,) * len(self.lengths))
        self.hides_newest = False

    def remask(self, mask: Tensor) -> None:
        self.derived = {}
        index = self.buffers()[2][:, : self.size].long()
        real = mask.gather(1, index.clamp_min(0)) & (index >= 0)
        visible = self._owned() & real[:, None]
        bias = torch.full_like(self._bias(), torch.finfo(self._bias().dtype).min)
        bias[:, :, : self.size].masked_fill_(visible, 0)
        self.columns = self.columns.including(valid=bias)
        self._totals = None
        self.lengths = tuple(visible.sum(-1).amax(-1).tolist())

    @property
    def droppable(self) -> int:
        return (self.size - self.body) // self.heads

    def _take_back(self, counts: Sequence[int], least: int, most: int) -> tuple[int, ...]:
        heads = self.heads
        bias = self._bias()
        start = self.size - most * heads
        if start < self.shared:
            bias = bias.clone()
        goes = last_tokens(counts, bias.device)
        # The first head's slots show the real tokens.
        dropped = tuple(((bias[:, 0, start : self.size : heads] == 0) & goes).sum(-1).tolist())
        slots = goes.repeat_interleave(heads, 1)[:, None]
        bias[:, :, start : self.size].masked_fill_(slots, torch.finfo(bias.dtype).min)
        self.columns = self.columns.including(valid=bias)
        self.size -= least * heads
        newest = bias[:, 0, self.size - heads]
        self.hides_newest = self.droppable > 0 and bool((newest != 0).any())
        self._add(tuple(-count for count in dropped))
        return dropped

    def _add(self, counts: Sequence[int]) -> None:
        """Count new tokens of each row."""
        if self._totals is not None:
            pairs = zip(self._totals, counts, strict=True)
            self._totals = tuple(total + count * self.heads for total, count in pairs)

    def _bias(self) -> Tensor:
        return self.columns["valid"]

    def visible(self) -> Tensor:
        """Return the mask of real entries of each head, bool [B, H, size]."""
        return self._bias()[:, :, : self.size] == 0

    def _owned(self) -> Tensor:
        """Return the mask of the slots of each head, real or not, bool [B, H, size]."""
        ends = self.counts.cumsum(-1)[..., None]
        slots = torch.arange(self.body, device=ends.device)
        body = (slots >= ends - self.counts[..., None]) & (slots < ends)
        own = turns(ends.shape[1], self.size - self.body, ends.device)
        return torch.cat([body, own.expand(len(body), -1, -1)], -1)

    def _filler(self, padded: Tensor) -> Tensor:
        """Return the mask of unused slots of a padded copy [B, H, N]."""
        return torch.arange(padded.shape[-1], device=padded.device) < self.counts.amax() - self.counts[..., None]

    def _padded(self, buffer: Tensor) -> Tensor:
        """Turn [B, capacity, X] into [B, H, N, X], each head's entries right-aligned, in order."""
        batch, heads = self.counts.shape
        if self._most is None:
            self._most = int(self.counts.max())
        most = self._most
        width = buffer.shape[-1]
        slots = self.counts.cumsum(-1)[..., None] - most + torch.arange(most, device=buffer.device)
        rows = slots.clamp_min(0).view(batch, heads * most, 1).expand(-1, -1, width)
        body = buffer.gather(1, rows).view(batch, heads, most, width)
        tail = buffer[:, self.body : self.size].unflatten(1, (-1, heads)).transpose(1, 2)
        return torch.cat([body, tail], 2)

    def parts(self) -> dict[str, Any]:
        parts = {"lengths": self.lengths, **self.columns.without("valid").used(self.size), "visible": self.visible()}
        return parts | {"body": self.body, "counts": self.counts, "hides_newest": self.hides_newest}

    def _resize(self, capacity: int) -> None:
        super()._resize(whole(capacity))

    def apply(self, change: Callable[[Tensor], Tensor]) -> None:
        super().apply(change)
        self.counts = change(self.counts)
        self._totals = None
        self._most = None
