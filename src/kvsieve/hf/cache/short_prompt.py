"""The caller's prompt, for a cache with a shorter one instead."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvsieve.planning.plans import Plan
from kvsieve.planning.protection import ProtectedTokens


@dataclass(frozen=True)
class ShortPrompt:
    """The caller's prompt, for a cache with a shorter one instead.

    Attributes:
        plan: acts on passes over the cache.
        token_index: int64 [B, K], column of the given prompt of each token of the short one, -1 for filler.
        length: columns of the given prompt.
        mask: bool [B, length], None without padding.
        lengths: its true tokens per row, used by budgets.
        protected: its protected tokens.
        layers: int32 [B, H, K], `token_index` of the layers with different tokens per head; `token_index` is then one
            head's.
    """

    plan: Plan
    token_index: Tensor
    length: int
    mask: Tensor | None
    lengths: tuple[int, ...]
    protected: ProtectedTokens | None = None
    layers: dict[int, Tensor] = field(default_factory=dict)

    def caller_length_and_mask(self, num_seen: int) -> tuple[int, Tensor | None]:
        """See Conversation; num_seen: columns in the cache, the short prompt and later ones."""
        later = num_seen - self.token_index.shape[1]
        if self.mask is None:
            return self.length + later, None
        return self.length + later, torch.cat([self.mask, self.mask.new_ones(len(self.mask), max(later, 0))], 1)

    def as_given(self, index: Tensor, layer: int) -> Tensor:
        """Return a layer's columns, int [B, H, n], as columns of the caller's conversation; -1 for filler."""
        read = self.token_index.shape[1]
        columns = self.layers.get(layer, self.token_index[:, None].expand(-1, index.shape[1], -1)).to(index.device)
        numbers = columns.gather(2, index.long().clamp(0, read - 1))
        numbers = torch.where(index < read, numbers, index - read + self.length)
        return numbers.masked_fill(index < 0, -1)

    def rows(self, rows: Tensor) -> ShortPrompt:
        """Copy it with row ``rows[i]`` as row i."""
        at = rows.to(self.token_index.device)
        mask = None if self.mask is None else self.mask.index_select(0, at)
        protected = None if self.protected is None else self.protected.rows(rows)
        lengths = tuple(self.lengths[row] for row in rows.tolist())
        token_index = self.token_index.index_select(0, at)
        layers = {index: part.index_select(0, at.to(part.device)) for index, part in self.layers.items()}
        return dataclasses.replace(
            self, token_index=token_index, mask=mask, lengths=lengths, protected=protected, layers=layers
        )

    def tensors(self) -> Iterator[Tensor]:
        """Yield every tensor."""
        yield from (self.token_index, *self.layers.values())
        yield from () if self.mask is None else (self.mask,)
        yield from () if self.protected is None else self.protected.tensors()
