"""Storage of one layer whose KV heads keep different numbers of entries."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Self

import torch
from torch import Tensor

from kvsieve.cache.base import MIN_ROOM, Store, grown, last_tokens
from kvsieve.cache.store import DenseStore
from kvsieve.core.selection import slots_of
from kvsieve.types import Selection

# Into how many equal parts attention may cut a flat buffer, one per thread; a power of two.
LANES = 8


class RaggedStore(Store):
    """Entries of all heads in one flat buffer: those kept, head by head, then a slot per head for each new token.

    Flat buffers [B, capacity, ...] of keys, values and index; rows that kept less have filler before the new tokens.
    Nothing is padded to the fullest head: attention needs the flat buffers and `valid_buffer` only. `keys`, `values`,
    `index` and `valid` are padded copies [B, H, N, ...], right-aligned, made on every reading, for evictors and later
    turns.

    Attributes:
        valid_buffer: [B, H, capacity] in the keys' dtype, what attention adds to a head's logits: 0 where a slot holds
            a real entry of the head, the dtype's least number elsewhere.
        hides_newest: True where the newest token is padding in some row.
    """

    is_ragged = True

    def __init__(self) -> None:
        super().__init__()
        # Flat slots of what was kept, and how many of them each head has: int64 [B, H].
        self._body = 0
        self.hides_newest = False
        self._counts = torch.zeros(0, 0, dtype=torch.int64)
        # Real entries of each row, of all its heads, and the largest of `_counts`; None where they must be looked up.
        self._totals: tuple[int, ...] | None = None
        self._most: int | None = None
        # [H, H], what `put` writes for a new token's slots.
        self._own = torch.zeros(0, 0)

    @classmethod
    def build(cls, keys: Tensor, values: Tensor, index: Tensor, selection: Selection, reserve: int = 0) -> Self:
        """Build a store of the entries that a selection keeps.

        Args:
            keys: [B, H, N, D].
            values: [B, H, N, Dv].
            index: int32 [B, H, N].
            selection: indices [B, H', K], H' a multiple of H; a larger one stores a copy per query head.
            reserve: tokens to leave room for.
        """
        slots, real = selection.indices, selection.real()
        batch, heads, size = slots.shape
        copies = heads // keys.shape[1]
        if real is None:
            real = torch.ones(1, 1, 1, dtype=torch.bool, device=slots.device)
        real = (real[:, None] if real.ndim == 2 else real).expand(batch, heads, size)
        counts = real.sum(-1)
        head_lengths = selection.head_lengths or tuple((each,) * heads for each in selection.lengths or (size,) * batch)
        totals = tuple(map(sum, head_lengths))
        used = max(totals)
        out = cls()
        capacity = whole(used + max(reserve, 1) * heads)
        out._keys, out._values = (part.new_zeros(batch, capacity, part.shape[-1]) for part in (keys, values))
        out._index = index.new_full((batch, capacity), -1)
        out.valid_buffer = keys.new_full((batch, heads, capacity), torch.finfo(keys.dtype).min)
        for row, total in enumerate(totals):
            at, mine = slots_of(real[row].flatten(), total), slice(0, total)
            head, slot = at // size, slots[row].flatten()[at]
            for to, part in ((out._keys, keys), (out._values, values), (out._index, index)):
                to[row, mine] = part[row, head // copies, slot]
            out.valid_buffer[row, head, torch.arange(total, device=at.device)] = 0
        out.size = out._body = used
        out._counts, out._totals, out.lengths = counts, totals, tuple(map(max, head_lengths))
        out._most = max(out.lengths)
        return out

    @property
    def heads(self) -> int:
        return self._bias().shape[1]

    @property
    def entries(self) -> int:
        if self._totals is None:
            self._totals = tuple(self._visible().sum((1, 2)).tolist())
        return -(-max(self._totals) // self.heads)

    @property
    def flat(self) -> tuple[Tensor, Tensor, Tensor]:
        """Keys [B, T, D], values [B, T, Dv] and the bias of each head's logits, [B, H, T]; T is a multiple of LANES.

        Every head sees its newest entry, padding or not.
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
    def keys(self) -> Tensor:
        """[B, H, N, D], a padded copy."""
        return self._padded(self.buffers()[0])

    @property
    def values(self) -> Tensor:
        """[B, H, N, Dv], a padded copy."""
        return self._padded(self.buffers()[1])

    @property
    def index(self) -> Tensor:
        """int32 [B, H, N], a padded copy, -1 for filler."""
        padded = self._padded(self.buffers()[2][..., None])[..., 0]
        filler = torch.arange(padded.shape[-1], device=padded.device) < self._counts.amax() - self._counts[..., None]
        return padded.masked_fill_(filler, -1)

    @property
    def valid(self) -> Tensor:
        """bool [B, H, N]: False for filler and padding."""
        real = self._visible().any(1)
        padded = self._padded(real[..., None])[..., 0]
        filler = torch.arange(padded.shape[-1], device=padded.device) < self._counts.amax() - self._counts[..., None]
        return padded.masked_fill_(filler, False)

    def padded(self) -> DenseStore:
        """Copy with the same number of slots for every head, filler on the left."""
        out = DenseStore()
        out._keys, out._values, out._index, out.valid_buffer = self.keys, self.values, self.index, self.valid
        out.size = out.kept = out._keys.shape[2]
        out.lengths = self.lengths
        return out

    def append(
        self,
        keys: Tensor,
        values: Tensor,
        token_index: Tensor,
        valid: Tensor | None = None,
        counts: tuple[int, ...] | None = None,
        reserve: int = 0,
    ) -> None:
        """Store new entries [B, H, L, D] at the end; see DenseStore.append."""
        batch, _, new, _ = keys.shape
        heads = self.heads
        if keys.shape[1] != heads:
            keys, values = (part.repeat_interleave(heads // part.shape[1], 1) for part in (keys, values))
        end = self.size + new * heads
        if end > self.capacity or self.size < self.shared:
            self._resize(whole(end + (reserve or max(MIN_ROOM, end // heads // 8)) * heads))
        # Token by token, the heads of each side by side.
        slots, buffers = slice(self.size, end), self.buffers()
        for to, part in zip(buffers[:2], (keys, values), strict=True):
            to[:, slots] = part[:, :, 0] if new == 1 else part.transpose(1, 2).flatten(1, 2)
        buffers[2][:, slots] = token_index if new == 1 else token_index.repeat_interleave(heads, 1)
        # What follows the end is read along: nobody's, whatever another user of the same buffers has put there.
        after = whole(end) - end
        own = _bias_of_turns(heads, new * heads, after, keys.dtype, keys.device)
        if valid is not None:
            padding = torch.nn.functional.pad(~valid.repeat_interleave(heads, 1), (0, after))[:, None]
            own = own.masked_fill(padding, torch.finfo(keys.dtype).min)
        self._bias()[:, :, self.size : end + after] = own
        self.hides_newest = valid is not None
        if valid is not None:
            self.derived = {}
        counts = ((new,) * batch if valid is None else tuple(valid.sum(-1).tolist())) if counts is None else counts
        self.lengths = tuple(old + count for old, count in zip(self.lengths, counts, strict=True))
        self._add(counts)
        self.size = end

    @property
    def stride(self) -> int:
        return self.heads

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return (*super().tensors, self._own)

    def all_tensors(self) -> Iterator[Tensor]:
        yield from super().all_tensors()
        yield from (self._counts, self._own)

    def make_room(self, tokens: int) -> None:
        if self.size + tokens * self.heads > self.capacity or self.size < self.shared:
            self._resize(whole(self.size + tokens * self.heads))

    def prepare_slots(self, token_index: int) -> None:
        index, heads = self.buffers()[2][:, self.size :], self.heads
        index.copy_(token_index + torch.arange(index.shape[1], device=index.device) // heads)
        self._own = _bias_of_a_token(heads, self._bias().dtype, index.device)
        # Nobody's until they are put: all of the buffer is read.
        self._bias()[:, :, self.size :] = torch.finfo(self._bias().dtype).min

    def put(self, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        heads = self.heads
        for to, part in zip(self.buffers()[:2], (keys, values), strict=True):
            if part.shape[1] != heads:
                part = part.repeat_interleave(heads // part.shape[1], 1)
            to.index_copy_(1, slots, part[:, :, 0])
        self._bias().index_copy_(2, slots, self._own.expand(len(keys), -1, -1))

    def advance_host_length(self) -> None:
        super().advance_host_length()
        self._add((1,) * len(self.lengths))
        self.hides_newest = False

    def remask(self, mask: Tensor) -> None:
        """Apply a changed attention mask to the stored entries; mask: bool [B, tokens fed]."""
        self.derived = {}
        index = self.buffers()[2][:, : self.size].long()
        real = mask.gather(1, index.clamp_min(0)) & (index >= 0)
        visible = self._owned() & real[:, None]
        bias = torch.full_like(self._bias(), torch.finfo(self._bias().dtype).min)
        bias[:, :, : self.size].masked_fill_(visible, 0)
        self.valid_buffer, self._totals = bias, None
        self.lengths = tuple(visible.sum(-1).amax(-1).tolist())

    @property
    def droppable(self) -> int:
        return (self.size - self._body) // self.heads

    def _take_back(self, counts: Sequence[int], least: int, most: int) -> tuple[int, ...]:
        heads, bias = self.heads, self._bias()
        start = self.size - most * heads
        if start < self.shared:
            bias = bias.clone()
        goes = last_tokens(counts, bias.device)
        # The first head's slots tell which tokens are real.
        dropped = tuple(((bias[:, 0, start : self.size : heads] == 0) & goes).sum(-1).tolist())
        slots = goes.repeat_interleave(heads, 1)[:, None]
        bias[:, :, start : self.size].masked_fill_(slots, torch.finfo(bias.dtype).min)
        self.valid_buffer = bias
        self.size -= least * heads
        newest = bias[:, 0, self.size - heads]
        self.hides_newest = self.droppable > 0 and bool((newest != 0).any())
        self._add(tuple(-count for count in dropped))
        return dropped

    def _add(self, counts: tuple[int, ...]) -> None:
        """Count so many new tokens of each row."""
        if self._totals is not None:
            each = zip(self._totals, counts, strict=True)
            self._totals = tuple(total + count * self.heads for total, count in each)

    def _bias(self) -> Tensor:
        if self.valid_buffer is None:
            raise RuntimeError("this layer stores nothing yet: run a forward pass with its cache first")
        return self.valid_buffer

    def _visible(self) -> Tensor:
        """Mask of the real entries of each head, bool [B, H, size]."""
        return self._bias()[:, :, : self.size] == 0

    def _owned(self) -> Tensor:
        """Mask of the slots of each head, real or not, bool [B, H, size]."""
        ends = self._counts.cumsum(-1)[..., None]
        slots = torch.arange(self._body, device=ends.device)
        body = (slots >= ends - self._counts[..., None]) & (slots < ends)
        own = _turns(ends.shape[1], self.size - self._body, ends.device)
        return torch.cat([body, own.expand(len(body), -1, -1)], -1)

    def _padded(self, buffer: Tensor) -> Tensor:
        """Turn [B, capacity, X] into [B, H, N, X], each head's entries at the right end, in order."""
        batch, heads = self._counts.shape
        if self._most is None:
            self._most = int(self._counts.max())
        most, width = self._most, buffer.shape[-1]
        slots = self._counts.cumsum(-1)[..., None] - most + torch.arange(most, device=buffer.device)
        rows = slots.clamp_min(0).view(batch, heads * most, 1).expand(-1, -1, width)
        body = buffer.gather(1, rows).view(batch, heads, most, width)
        tail = buffer[:, self._body : self.size].unflatten(1, (-1, heads)).transpose(1, 2)
        return torch.cat([body, tail], 2)

    def _resize(self, capacity: int) -> None:
        bias = grown(self._bias(), 2, self.size, capacity)
        self._keys, self._values, self._index = (grown(part, 1, self.size, capacity) for part in self.buffers())
        self.valid_buffer, self.shared = bias, 0

    def _apply(self, change: Callable[[Tensor], Tensor]) -> None:
        super()._apply(change)
        self._counts, self._totals, self._most = change(self._counts), None, None


@functools.lru_cache(maxsize=64)
def _turns(heads: int, slots: int, device: torch.device) -> Tensor:
    """Mask of one slot per head in turn, as new tokens are stored: bool [H, slots], shared, not to be written to."""
    return torch.arange(slots, device=device) % heads == torch.arange(heads, device=device)[:, None]


@functools.lru_cache(maxsize=64)
def _bias_of_turns(heads: int, slots: int, after: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Bias of new tokens' slots, and of `after` slots behind them that belong to no head: [H, slots + after]."""
    own = torch.nn.functional.pad(_turns(heads, slots, device), (0, after))
    return torch.zeros(heads, slots + after, dtype=dtype, device=device).masked_fill_(~own, torch.finfo(dtype).min)


@functools.cache  # For good: a recorded pass reads it where it lies.
def _bias_of_a_token(heads: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return _bias_of_turns(heads, heads, 0, dtype, device)


def whole(slots: int) -> int:
    """Round slots up to a multiple of LANES, as far as a flat buffer is read."""
    return -(-slots // LANES) * LANES
