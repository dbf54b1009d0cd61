"""What a query reads from: the entries of single KV heads of single rows, in order, all of them real."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Lines:
    """Entries of X lines, `size` each; a line is one KV head of one row (one query head, where each has its own set).

    keys: [S, D] and values: [S, Dv], all slots they may lie in. body: int64 [X, K], slots of the first K entries, or
    None where K is 0. tail: int64 [X], the slot of entry K; every further one lies `stride` slots behind.
    """

    keys: Tensor
    values: Tensor
    body: Tensor | None
    tail: Tensor
    stride: int
    size: int

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
        """Entries start ... end - 1 of every line, int64 [X, end - start]."""
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
