"""Store of one layer with older entries encoded in few bits."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from kvsieve.cache.body import Body
from kvsieve.cache.contract import LayerMemory, View
from kvsieve.cache.encoded_rows import EncodedRows
from kvsieve.cache.packed_parts import PackedParts
from kvsieve.cache.quantize import quantize_tail
from kvsieve.cache.reduce import quantize_evicted, reduce, selected
from kvsieve.cache.store import DenseStore
from kvsieve.cache.tensors import storage_bytes
from kvsieve.core.kv_rows import SlotRows
from kvsieve.errors import UnsupportedOptionError
from kvsieve.types import Selection

if TYPE_CHECKING:
    from kvsieve.planning.roles import Codec


class PackedStore(PackedParts):
    """Entries, the older ones encoded, and the newest and, depending on the codec, the first ones exact.

    Entries are `first` exact ones, each body's and the newest exact ones, in this order; KV heads may have encoded
    different numbers, with filler before them. Slots are the same or, with evicted entries kept, in token order.
    `keys`, `values`, `index` and `valid` decode everything on access: for prompts, evictors and later turns. A new
    token attends by `attention.packed_attention`, which decodes block by block.
    """

    is_encoded = True

    @classmethod
    def build(cls, store: LayerMemory, codec: Codec, *, ends_prompt: bool = False) -> PackedStore:
        """Encode a store's entries; the store becomes unusable. ends_prompt: as in `quantize_tail`."""
        out = cls(codec, store)
        out.quantize_tail(ends_prompt=ends_prompt)
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
        """Append new entries, exact until `quantize_tail`."""
        if valid is not None:
            self.derived = {}
        before = self.exact.lengths
        # Room beyond the next full block would waste the savings.
        self.exact.append(keys, values, token_index, valid, counts, self.room(reserve))
        added = (now - then for now, then in zip(self.exact.lengths, before, strict=True))
        self.lengths = tuple(old + new for old, new in zip(self.lengths, added, strict=True))

    def quantize_tail(self, *, ends_prompt: bool = False) -> None:
        """Encode the oldest exact entries of each KV head in whole blocks, keeping enough of the newest.

        ends_prompt: the last blocks may be partly filled.
        """
        if self.codec is not None:
            quantize_tail(self, self.codec, ends_prompt=ends_prompt)

    def may_quantize(self, tokens: int) -> bool:
        stored = self.exact.size + tokens
        return self.codec is not None and stored - self.first > self.codec.block and stored >= self.due

    def keep(self, selection: Selection, reserve: int = 0, *, reuse: bool = True) -> None:
        """Keep only the selected slots; encoded ones move, and blocks that lose entries are encoded again."""
        reduce(self, selected(self, selection), reserve)
        self._count_changed()

    def quantize_evicted(
        self, selection: Selection, codec: Codec, reserve: int = 0, asked: Tensor | None = None
    ) -> None:
        """Encode the slots that are not selected by `codec`, the same in all calls; earlier ones stay.

        asked: as in `BlockPool.encode`.
        """
        if self.evicted is None:
            self.bodies.insert(0, self.new_body(codec))
        quantize_evicted(self, selection, reserve, asked)
        self._count_changed()

    def _count_changed(self) -> None:
        """Recount entries after a change."""
        self.derived = {}
        self.due = 0
        self.lengths = tuple(self.totals().view(self.batch, self.heads).amax(1).tolist())

    def remask(self, mask: Tensor) -> None:
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
        self._count_changed()

    @property
    def droppable(self) -> int:
        return self.exact.droppable

    def _take_back(self, counts: Sequence[int], least: int, most: int) -> tuple[int, ...]:
        before = self.exact.lengths
        self.due = 0
        self.exact.drop_last(counts)
        return tuple(then - now for then, now in zip(before, self.exact.lengths, strict=True))

    def slot_rows(self) -> tuple[SlotRows, SlotRows]:
        return EncodedRows(self, "keys"), EncodedRows(self, "values")

    def view(self, slots: Tensor, real: Tensor | None) -> View:
        return self.numbered(View(slots, real, self.size), self)

    @staticmethod
    def numbered(view: View, store: LayerMemory) -> View:
        """Convert a new view of a store's slots to numbers of real entries."""
        valid = store.valid
        number = view.slots
        if valid is not None:
            copies = number.shape[1] // store.heads
            numbers = (valid.expand(-1, store.heads, -1).cumsum(-1) - 1).repeat_interleave(copies, 1)
            number = numbers.gather(2, number).clamp_min(0)
        return View(number, view.real, max(store.lengths))

    def make_room(self, tokens: int) -> None:
        if self.codec is None:
            self.exact.make_room(tokens)
            return
        # They pass through the same exact slots, block by block.
        left = self.most_exact(self.codec) - self.exact.size
        self.exact.make_room(min(tokens, max(left, self.codec.block)))
        self.bodies[-1].make_room(tokens)
        if not self.bodies[-1].is_even:
            # KV rows that encode at different times get filler among the newest.
            self.exact.columns = self.exact.columns.with_valid(self.heads)

    @property
    def next_slot(self) -> int:
        return self.exact.size

    def has_room(self, tokens: int) -> bool:
        return self.exact.has_room(tokens)

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        pools = [part.codes for body in self.bodies for part in (body.keys, body.values)]
        return (*self.exact.tensors, *(part for codes in pools if codes is not None for part in codes.tensors()))

    def prepare_slots(self, token_index: int) -> None:
        self.exact.prepare_slots(token_index)

    def put(self, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        self.exact.put(keys, values, slots)

    def advance_host_length(self, tokens: int = 1) -> None:
        self.exact.advance_host_length(tokens)
        super().advance_host_length(tokens)

    def reorder(self, rows: Tensor) -> None:
        rows = rows.to(self.device)
        self.exact.reorder(rows)
        for body in self.bodies:
            body.reorder((rows[:, None] * self.heads + torch.arange(self.heads, device=self.device)).flatten())
        self.derived = {}
        self.due = 0
        self.lengths = tuple(self.lengths[row] for row in rows.tolist())

    def share(self) -> Self:
        return self._on(self.exact.share(), [body.copied(share=True) for body in self.bodies])

    def clone(self) -> Self:
        return self._on(self.exact.clone(), [body.copied(share=False) for body in self.bodies])

    def _on(self, exact: DenseStore, bodies: list[Body]) -> Self:
        """Return a copy of the store with these parts."""
        other = copy.copy(self)
        other.exact = exact
        other.bodies = bodies
        other.derived = {}
        return other

    def padded(self) -> DenseStore:
        valid = self.valid
        valid = None if valid is None else valid.clone()
        return DenseStore.of(self.keys, self.values, self.index, valid, self.lengths)

    def parts(self) -> dict[str, Any]:
        bodies = [body.parts() for body in self.bodies]
        return {"lengths": self.lengths, "exact": self.exact.parts(), "first": self.first, "bodies": bodies}

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
