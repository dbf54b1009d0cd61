"""What a query reads from: the entries of single KV heads of single rows, in order, all of them real."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Lines:
    """Entries of X lines, `size` each; a line is one KV head of one row (one query head, where each has its own set).

    keys: [S, capacity, D] and values: [S, capacity, Dv], the buffers they lie in. row: int64 [X], the buffer of each
    line. body: int64 [X, K], slots of its first K entries, or None where K is 0. tail: int64 [X], the slot of entry K;
    every further one lies `stride` slots behind.
    """

    keys: Tensor
    values: Tensor
    row: Tensor
    body: Tensor | None
    tail: Tensor
    stride: int
    size: int

    def keys_at(self, entries: Tensor) -> Tensor:
        """Keys [X, ..., D] of entries int64 [X, ...]."""
        return self._gather(self.keys, entries)

    def values_at(self, entries: Tensor) -> Tensor:
        """Values [X, ..., Dv] of entries int64 [X, ...]."""
        return self._gather(self.values, entries)

    def span(self, start: int, end: int) -> Tensor:
        """Entries start ... end - 1 of every line, int64 [X, end - start]."""
        return torch.arange(start, end, device=self.row.device).expand(len(self.row), -1)

    def _gather(self, buffers: Tensor, entries: Tensor) -> Tensor:
        # Whole rows of a flat buffer are copied, which is faster than gather along an expanded index.
        flat = self._addresses(entries, buffers.shape[1])
        return buffers.view(-1, buffers.shape[-1]).index_select(0, flat.view(-1)).view(*entries.shape, -1)

    def _addresses(self, entries: Tensor, capacity: int) -> Tensor:
        ones = (1,) * (entries.ndim - 1)
        if self.body is None:
            return entries * self.stride + (self.row * capacity + self.tail).view(-1, *ones)
        kept = self.body.shape[1]
        before = self.body.gather(1, entries.clamp(max=kept - 1).flatten(1)).view(entries.shape)
        after = (entries - kept) * self.stride + self.tail.view(-1, *ones)
        return torch.where(entries < kept, before, after) + (self.row * capacity).view(-1, *ones)


@dataclass(frozen=True)
class ReadFacts:
    """What a reader may derive its parameters from, for the lines of one row in one layer.

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
    """What a reader wants read of each line.

    entries: int64 [X, k], the same for all query heads of a line, or [X, G, k]. blend: (weight [X, G], vector [X, Dv]):
    the output becomes ``weight * output + (1 - weight) * vector``. looked_at: bytes read to find this out.
    """

    entries: Tensor
    blend: tuple[Tensor, Tensor] | None = None
    looked_at: int = 0
