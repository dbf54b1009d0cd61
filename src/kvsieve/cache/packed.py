"""Storage of one layer whose older entries are encoded in few bits."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from kvsieve.cache.base import Store, View, storage_bytes
from kvsieve.cache.body import Body
from kvsieve.cache.encoded_rows import SPAN, EncodedRows
from kvsieve.cache.ragged import RaggedStore
from kvsieve.cache.reduce import reduce, selected, set_aside
from kvsieve.cache.settle import settle
from kvsieve.cache.store import DenseStore
from kvsieve.core.kv_rows import SlotRows
from kvsieve.errors import UnsupportedOptionError
from kvsieve.types import Selection

if TYPE_CHECKING:
    from kvsieve.roles import Codec


class PackedStore(Store):
    """Entries of which the older ones are encoded, and the newest and, if the codec says so, the first are exact.

    Entries are `first` exact ones, each body's and the newest exact ones, in this order; KV heads may have encoded
    different numbers, and have filler before them. Slots are the same, or, with entries set aside, in the order of
    their tokens. `keys`, `values`, `index` and `valid` are made on every reading, all of it decoded: for prompts,
    evictors and later turns. A new token is read by
    `attention.packed_attention`, which decodes block by block.

    Attributes:
        codec: encodes what leaves the newest entries; None where nothing does.
        exact: the entries that are not encoded; the first `first` slots are of the first ones.
        first: slots of first entries that stay exact.
        bodies: encoded entries: those of `set_aside`, if any, then those that the codec adds to, if there is one.
    """

    def __init__(self, codec: Codec | None, exact: DenseStore) -> None:
        super().__init__()
        self.codec, self.exact, self.first = codec, exact, 0
        self.lengths = exact.lengths
        self.bodies = [] if codec is None else [self._body(codec)]

    def _body(self, codec: Codec) -> Body:
        keys, values, _ = self.exact.buffers()
        rows = keys.shape[0] * keys.shape[1]
        return Body(codec, rows, (keys.shape[-1], values.shape[-1]), keys.dtype, keys.device)

    @classmethod
    def build(cls, store: DenseStore | RaggedStore, codec: Codec) -> PackedStore:
        """Encode what a store holds, which is used up."""
        out = cls(codec, store.padded())
        out.settle()
        return out

    @property
    def size(self) -> int:
        """Slots in use."""
        return self.exact.size + sum(body.width for body in self.bodies)

    @size.setter
    def size(self, value: int) -> None:
        """Leave out the newest entries, which are exact."""
        if value:
            self.exact.size -= self.size - value

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
        """Of keys and values that are decoded."""
        return self.exact.buffers()[0].dtype

    @property
    def entries(self) -> int:
        return -(-int(self.totals().view(self.batch, self.heads).sum(1).max()) // self.heads)

    @property
    def capacity(self) -> int:
        """Numbers of entries that belong to a KV row, in `slot_rows`."""
        return SPAN

    @property
    def keys(self) -> Tensor:
        """[B, H, size, D], decoded."""
        return self._together(self.exact.keys, [body.padded("keys") for body in self.bodies if body.width])

    @property
    def values(self) -> Tensor:
        """[B, H, size, Dv], decoded."""
        return self._together(self.exact.values, [body.padded("values") for body in self.bodies if body.width])

    @property
    def index(self) -> Tensor:
        """int32 [B, H, size], -1 for filler."""
        return self._together(self.exact.index, [body.padded_index() for body in self.bodies if body.width])

    @property
    def valid(self) -> Tensor | None:
        """bool [B, H or 1, size]: False for filler and padding; None when every entry is real."""
        mine = self.exact.valid
        real = [body.real() for body in self.bodies if body.width]
        if mine is None and all(part is None for part in real):
            return None
        shape = self.batch, self.heads
        if mine is None or mine.shape[1] == 1:
            ones = torch.ones(1, 1, 1, dtype=torch.bool, device=self.device)
            mine = (ones if mine is None else mine).expand(*shape, self.exact.size)
        rows = shape[0] * shape[1]
        filled = [
            torch.ones(rows, body.width, dtype=torch.bool, device=self.device) if part is None else part
            for body, part in zip([body for body in self.bodies if body.width], real, strict=True)
        ]
        return self._together(mine, filled)

    @property
    def aside(self) -> Body | None:
        """Entries set aside, once there have been any."""
        return self.bodies[0] if len(self.bodies) > (self.codec is not None) else None

    @property
    def is_sorted(self) -> bool:
        """True where slots are in the order of their tokens, and not in that of what holds them."""
        return self.aside is not None and self.aside.width > 0

    def order(self) -> Tensor:
        """Place of each slot's entry, int64 [B, H, size], where slots are in the order of their tokens."""
        encoded = [body.padded_index() for body in self.bodies if body.width]
        return self._joined(self.exact.index, encoded).argsort(dim=-1, stable=True)

    def _together(self, exact: Tensor, encoded: Sequence[Tensor]) -> Tensor:
        """Slots [B, H, size, ...] of exact ones [B, H, slots, ...] and parts [R, width, ...]."""
        joined = self._joined(exact, encoded)
        if not self.is_sorted:
            return joined
        order = self.order()
        return joined.gather(2, order if joined.ndim == 3 else order[..., None].expand_as(joined))

    def _joined(self, exact: Tensor, encoded: Sequence[Tensor]) -> Tensor:
        """Parts [R, width, ...] between the first and the newest slots of [B, H, slots, ...]."""
        if not encoded:
            return exact
        shape = exact.shape[:2]
        middle = [part.unflatten(0, shape) for part in encoded]
        return torch.cat([exact[:, :, : self.first], *middle, exact[:, :, self.first :]], 2)

    def append(
        self,
        keys: Tensor,
        values: Tensor,
        token_index: Tensor,
        valid: Tensor | None = None,
        counts: tuple[int, ...] | None = None,
        reserve: int = 0,
    ) -> None:
        """Store new entries at the end, exact until `settle`; see DenseStore.append."""
        if valid is not None:
            self.derived = {}
        before = self.exact.lengths
        # More room than until the next block is full would hold what encoding saves.
        self.exact.append(keys, values, token_index, valid, counts, self.room(reserve))
        added = (now - then for now, then in zip(self.exact.lengths, before, strict=True))
        self.lengths = tuple(old + new for old, new in zip(self.lengths, added, strict=True))

    def settle(self) -> None:
        """Encode the oldest exact entries of each KV head, as many whole blocks as leave enough of the newest."""
        if self.codec is not None:
            settle(self, self.codec)

    def room(self, tokens: int) -> int:
        """Exact entries to leave room for where `tokens` are to come."""
        return tokens if self.codec is None else min(tokens, self.codec.block)

    def keep(self, selection: Selection, reserve: int = 0, *, reuse: bool = True) -> None:
        """Keep only the selected slots; encoded ones move, and those of a block that loses some are encoded again."""
        reduce(self, selected(self, selection), reserve)
        self._settle_changed()

    def set_aside(self, selection: Selection, codec: Codec, reserve: int = 0) -> None:
        """Encode the slots that are not selected by `codec`, the same in all calls; what it encoded before stays."""
        if self.aside is None:
            self.bodies.insert(0, self._body(codec))
        set_aside(self, selection, reserve)
        self._settle_changed()

    def _settle_changed(self) -> None:
        """Count what is stored after a change, and encode what has left the newest entries."""
        self.derived = {}
        self.lengths = tuple(self.totals().view(self.batch, self.heads).amax(1).tolist())
        self.settle()

    def remask(self, mask: Tensor) -> None:
        """Apply a changed attention mask to the stored entries; mask: bool [B, tokens fed]."""
        for body in self.bodies:
            if not body.width:
                continue
            index = body.padded_index().view(self.batch, -1).long()
            if not bool((mask.gather(1, index.clamp_min(0)) | (index < 0)).all()):
                raise UnsupportedOptionError(
                    "the attention mask hides tokens whose entries are encoded already; leave codec= out, or begin "
                    "with a new cache"
                )
        self.exact.remask(mask)
        self.lengths = tuple(self.totals().view(self.batch, self.heads).amax(1).tolist())
        self.derived = {}

    def slot_rows(self) -> tuple[SlotRows, SlotRows]:
        return EncodedRows(self, "keys"), EncodedRows(self, "values")

    def totals(self) -> Tensor:
        """Number of real entries of each KV row, int64 [B * H]."""
        counts = torch.stack([body.counts for body in self.bodies]).sum(0)
        valid = self.exact.valid
        exact = self.exact.size if valid is None else valid.expand(-1, self.heads, -1).flatten(0, 1).sum(-1)
        return counts + exact

    def view(self, slots: Tensor, real: Tensor | None) -> View:
        return self.numbered(View(slots, real, self.size), self)

    @staticmethod
    def numbered(view: View, store: DenseStore | PackedStore) -> View:
        """Turn a view of a store's slots, chosen just now, into one of numbers of real entries."""
        valid, number = store.valid, view.slots
        if valid is not None:
            copies = number.shape[1] // store.heads
            numbers = (valid.expand(-1, store.heads, -1).cumsum(-1) - 1).repeat_interleave(copies, 1)
            number = numbers.gather(2, number).clamp_min(0)
        return View(number, view.real, max(store.lengths))

    @property
    def dims(self) -> tuple[int, int]:
        return self.exact.dims

    def entry_size(self) -> int:
        encoded = storage_bytes(
            tensor for body in self.bodies for part in (body.keys, body.values) for tensor in part.tensors()
        )
        rows = self.batch * self.heads
        return (encoded + rows * self.exact.size * self.exact.entry_size()) // (rows * self.size)

    def make_room(self, tokens: int) -> None:
        self.exact.make_room(self.room(tokens))

    def reorder(self, rows: Tensor) -> None:
        rows = rows.to(self.device)
        self.exact.reorder(rows)
        for body in self.bodies:
            body.reorder((rows[:, None] * self.heads + torch.arange(self.heads, device=self.device)).flatten())
        self.derived = {}
        self.lengths = tuple(self.lengths[row] for row in rows.tolist())

    def share(self) -> Self:
        return self._copied(share=True)

    def clone(self) -> Self:
        return self._copied(share=False)

    def _copied(self, *, share: bool) -> Self:
        other = copy.copy(self)
        other.derived = {}
        other.exact = self.exact.share() if share else self.exact.clone()
        other.bodies = [body.copied(share=share) for body in self.bodies]
        return other

    def entry_bytes(self) -> int:
        keys, values, _ = self.exact.buffers()
        encoded = [part.tensors() for body in self.bodies for part in (body.keys, body.values)]
        return storage_bytes([keys, values, *(tensor for part in encoded for tensor in part)])

    def all_tensors(self) -> Iterator[Tensor]:
        yield from self.exact.all_tensors()
        for body in self.bodies:
            yield from body.tensors()
        for part in self.derived.values():
            yield from part.all_tensors()

    def buffers(self) -> tuple[Tensor, Tensor, Tensor]:
        raise RuntimeError("entries that are encoded lie in no buffers: read keys and values, or `at`")

    def _apply(self, change: Callable[[Tensor], Tensor]) -> None:
        raise RuntimeError("encoded entries are changed by their parts")
