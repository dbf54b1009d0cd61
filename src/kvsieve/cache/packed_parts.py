"""Access to a layer's entries with older ones encoded in few bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from kvsieve.cache.body import Body
from kvsieve.cache.contract import LayerMemory
from kvsieve.cache.store import DenseStore
from kvsieve.core.selection import entries_at
from kvsieve.errors import UnsupportedOptionError

if TYPE_CHECKING:
    from kvsieve.planning.roles import Codec

# More than any KV row has entries.
SPAN = 1 << 32


class PackedParts(LayerMemory):
    """Parts of a PackedStore, with access to them as one.

    Attributes:
        codec: of entries that are no longer among the newest; None without one.
        exact: the exact entries; the first `first` slots are of the first ones.
        first: slots of first entries that stay exact.
        due: exact slots up to which no KV head has enough entries for a block; 0 if unknown.
        bodies: encoded entries: those of `quantize_evicted`, if any, then those of the codec, if there is one.
    """

    def __init__(self, codec: Codec | None, store: LayerMemory) -> None:
        super().__init__()
        if store.log_weight is not None:
            raise UnsupportedOptionError("entries have weights, which codecs do not keep: leave codec= and rest= out")
        self.codec, self.exact = codec, cast(DenseStore, store.padded())
        self.lengths = store.lengths
        self.first = 0
        self.due = 0
        self.bodies = [] if codec is None else [self.new_body(codec)]

    def new_body(self, codec: Codec) -> Body:
        """Return an empty body."""
        keys, values, _ = self.exact.buffers()
        return Body(codec, keys.shape[0] * keys.shape[1], (keys.shape[-1], values.shape[-1]), keys.dtype, keys.device)

    @property
    def size(self) -> int:
        return self.exact.size + sum(body.width for body in self.bodies)

    @property
    def is_empty(self) -> bool:
        return False

    @property
    def heads(self) -> int:
        return self.exact.heads

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def device(self) -> torch.device:
        return self.exact.buffers()[0].device

    @property
    def dtype(self) -> torch.dtype:
        return self.exact.dtype

    @property
    def entries(self) -> int:
        return -(-int(self.totals().view(self.batch, self.heads).sum(1).max()) // self.heads)

    @property
    def capacity(self) -> int:
        """Entry numbers per KV row, in `slot_rows`."""
        return SPAN

    @property
    def keys(self) -> Tensor:
        return self._together(self.exact.keys, [body.padded("keys") for body in self.bodies if body.width])

    @property
    def values(self) -> Tensor:
        return self._together(self.exact.values, [body.padded("values") for body in self.bodies if body.width])

    @property
    def index(self) -> Tensor:
        return self._together(self.exact.index, [body.padded_index() for body in self.bodies if body.width])

    @property
    def valid(self) -> Tensor | None:
        own = self.exact.valid
        real = [body.real() for body in self.bodies if body.width]
        if own is None and all(part is None for part in real):
            return None
        shape = self.batch, self.heads
        if own is None or own.shape[1] == 1:
            ones = torch.ones(1, 1, 1, dtype=torch.bool, device=self.device)
            own = (ones if own is None else own).expand(*shape, self.exact.size)
        rows = shape[0] * shape[1]
        filled = [
            torch.ones(rows, body.width, dtype=torch.bool, device=self.device) if part is None else part
            for body, part in zip([body for body in self.bodies if body.width], real, strict=True)
        ]
        return self._together(own, filled)

    @property
    def evicted(self) -> Body | None:
        """Evicted entries kept by `quantize_evicted`, if any."""
        return self.bodies[0] if len(self.bodies) > (self.codec is not None) else None

    @property
    def is_sorted(self) -> bool:
        """True if slots are in token order, not in the order of parts."""
        return self.evicted is not None and self.evicted.width > 0

    def order(self) -> Tensor:
        """Place of each slot's entry, int64 [B, H, size], for slots in token order."""
        encoded = [body.padded_index() for body in self.bodies if body.width]
        index = self.exact.index
        valid = self.exact.valid
        if valid is not None:
            # Padding stays before the next token, as in its pass, regardless of its column.
            following = index.masked_fill(~valid, torch.iinfo(index.dtype).max).flip(-1).cummin(-1).values.flip(-1)
            index = index.where(valid | (index < 0), following)
        return self._joined(index, encoded).argsort(dim=-1, stable=True)

    def _together(self, exact: Tensor, encoded: Sequence[Tensor]) -> Tensor:
        """Merge exact slots [B, H, slots, ...] and parts [R, width, ...] into [B, H, size, ...]."""
        joined = self._joined(exact, encoded)
        if not self.is_sorted:
            return joined
        return entries_at(joined, self.order())

    def _joined(self, exact: Tensor, encoded: Sequence[Tensor]) -> Tensor:
        """Insert parts [R, width, ...] between the first and the newest slots of [B, H, slots, ...]."""
        if not encoded:
            return exact
        middle = [part.unflatten(0, exact.shape[:2]) for part in encoded]
        return torch.cat([exact[:, :, : self.first], *middle, exact[:, :, self.first :]], 2)

    def room(self, tokens: int) -> int:
        """Return the exact entries to reserve for `tokens` new ones."""
        return tokens if self.codec is None else min(tokens, self.codec.block)

    def most_exact(self, codec: Codec) -> int:
        """Return the largest number of exact slots while decoding, with full blocks encoded at once."""
        return (self.first or codec.sinks) + codec.tail + codec.block

    def totals(self) -> Tensor:
        """Return the number of real entries of each KV row, int64 [B * H]."""
        counts = torch.stack([body.counts for body in self.bodies]).sum(0)
        valid = self.exact.valid
        exact = self.exact.size if valid is None else valid.expand(-1, self.heads, -1).flatten(0, 1).sum(-1)
        return counts + exact

    @property
    def dims(self) -> tuple[int, int]:
        return self.exact.dims

    def entry_size(self, without: int = 0) -> int:
        encoded = sum(body.used_bytes() for body in self.bodies)
        rows = self.batch * self.heads
        exact = rows * (self.exact.size - without) * self.exact.entry_size()
        return (encoded + exact) // (rows * (self.size - without))
