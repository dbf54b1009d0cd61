"""One layer of a recorded pass: slots of its new entries, its reads, and a check that it is unchanged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from kvsieve.attention import (
    AttentionRequest,
    DenseEntries,
    EncodedEntries,
    FlatEntries,
    Reading,
    ReadRows,
    Sharing,
    attend,
    explain,
)
from kvsieve.attention.choice import foresee
from kvsieve.cache import FixedEntries, LayerMemory
from kvsieve.cache.row_groups import Group
from kvsieve.core.kv_rows import DeviceLength, IncrementalMetadata
from kvsieve.hf.cache.counts import Reads
from kvsieve.hf.cache.layer import SieveLayer
from kvsieve.hf.forward.sparse_read import count, count_all
from kvsieve.types import AttentionQueries


class CounterValues(Protocol):
    """The numbers of a pass on the device: slots of entries, and lengths."""

    values: Tensor

    def length(self, at: slice) -> DeviceLength: ...

    def sharing(self, index: int) -> Sharing | None: ...


class DeviceCounters:
    """Numbers on the device that grow by a fixed amount with every pass; equal ones are shared."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._known: dict[tuple[int, int, int, object], int] = {}
        self.starts: list[int] = []
        self.steps: list[int] = []

    def run(self, start: int, count: int, step: int, owner: object = None) -> slice:
        """Return the place of start, start + 1 ..., `count` numbers that grow by `step`.

        owner: their only user, even if others' are equal now; None if equal ones stay equal.
        """
        at = self._known.setdefault((start, count, step, owner), len(self.starts))
        if at == len(self.starts):
            self.starts += range(start, start + count)
            self.steps += [step] * count
        return slice(at, at + count)


class RecordedLayer(SieveLayer):
    """One layer in a recorded pass. reading: as in `read_token`; None for dense attention.

    slots, lengths: places in the pass's numbers of the new entries' slots, and of the lengths of each group of KV rows,
    or of the store. All tensors are those of the store when the pass was recorded. encoded: reads of partly encoded
    entries. new: tokens of the pass.
    """

    def __init__(
        self, layer: SieveLayer, index: int, reading: Reading | None, counters: DeviceCounters, new: int
    ) -> None:
        super().__init__()
        self.new = new
        self.store = layer.store
        self.view = layer.view
        self.index = index
        self.reading = reading
        self.tensors = layer.store.tensors
        self.encoded = FixedEntries.of(layer.store)
        # Asked once, not at every token.
        self.foreseen = foresee(self.tensors[0])
        self.executor: str | None = None
        # Token index of the first slot when the unused ones were prepared.
        self._prepared: int | None = None
        self.remembered = self._remembered()
        self.places = self.count(layer, counters)
        self.slots, *self.lengths = self.places

    def count(self, layer: SieveLayer, counters: DeviceCounters) -> tuple[slice, ...]:
        """Return the places of numbers for the layer's current slots and lengths."""
        store = layer.store
        step = layer.store.stride * self.new
        # Layers do not encode at the same time.
        owner = None if self.encoded is None else self.index
        slots = counters.run(store.next_slot, step, step, owner)
        if self.reading is not None:
            grouped = self.reading.grouped
            sizes = [grouped.entries(store, group) for group in grouped.groups]
        else:
            sizes = [] if store.is_ragged else [store.next_slot]
        return slots, *(counters.run(size + self.new, 1, self.new, owner) for size in sizes)

    def fits(self, layer: SieveLayer, reading: Reading | None) -> bool:
        """Return True if the layer still has the same buffers, with room for the entries, and the same reading."""
        store = layer.store
        if not _same(self.tensors, store.tensors) or layer.view is not self.view or not store.has_room(self.new):
            return False
        if self.encoded is not None and not self.encoded.fits(store):
            return False
        if reading is None or self.reading is None:
            return reading is self.reading
        if reading.grouped is not self.reading.grouped or reading.whole != self.reading.whole or not self.knows(store):
            return False
        return _same(self.remembered, self._remembered())

    def is_current(self, store: LayerMemory) -> bool:
        """Return True if nothing was encoded since `follow`."""
        return self.encoded is None or self.encoded.is_current(store)

    def follow(self, store: LayerMemory, token_index: int) -> None:
        """Continue with the store's current entries, in the same buffers; token_index: of the next token in its row."""
        self.store = store
        start = token_index - store.next_slot // store.stride
        # Slots of tokens that were taken back stay prepared, but for marks of padding.
        if start != self._prepared or self.tensors[3] is not None:
            store.prepare_slots(token_index)
            self._prepared = start
        if self.encoded is not None and not self.encoded.is_current(store):
            self.encoded.update(store)

    def knows(self, store: LayerMemory) -> bool:
        """Return True if a reader's metadata covers all entries of its KV rows, with known costs."""
        if self.reading is None:
            return True
        grouped = self.reading.grouped
        return all(
            group.cost is not None and all(part.size == grouped.entries(store, group) for part in group.state.values())
            for group in self._chosen_from()
        )

    def make_room(self) -> None:
        """Reserve room in a reader's metadata for as many entries as the store has."""
        if self.reading is not None:
            grouped = self.reading.grouped
            for group in grouped.groups:
                group.flat(self.store.capacity)
            for group in self._chosen_from():
                for state in group.state.values():
                    state.make_room(grouped.most(self.store, group))
        self.remembered = self._remembered()

    def metadata(self) -> list[IncrementalMetadata]:
        """Return a reader's metadata of its KV rows."""
        return [state for group in self._chosen_from() for state in group.state.values()]

    def _chosen_from(self) -> list[Group]:
        if self.reading is None:
            return []
        pairs = zip(self.reading.grouped.groups, self.reading.whole, strict=True)
        return [group for group, whole in pairs if not whole]

    def _remembered(self) -> list[Tensor]:
        return [part for metadata in self.metadata() for part in metadata.tensors()]

    def attend(self, asked: AttentionQueries, key: Tensor, value: Tensor, numbers: CounterValues) -> Tensor:
        """Store the tokens' entries, and attend: queries [B, Hq, L, D] -> [B, Hq, L, Dv]."""
        self.store.put(key, value, numbers.values[self.slots])
        request: AttentionRequest[Any, None] = AttentionRequest(
            asked, self._stored([numbers.length(at) for at in self.lengths], numbers.sharing(self.index))
        )
        if self.executor is None:
            self.executor = explain(request)
        return attend(request)

    def _stored(
        self, lengths: list[DeviceLength], sharing: Sharing | None
    ) -> DenseEntries | FlatEntries | EncodedEntries | ReadRows:
        """Return the first of all slots, as many as the lengths on the device."""
        if self.encoded is not None:
            return EncodedEntries(self.encoded.store, lengths[0])
        if self.reading is not None:
            return ReadRows(self.reading, self.store, lengths, sharing)
        keys, values, _, valid, weights = self.tensors[:5]
        assert keys is not None and values is not None
        if not self.store.is_ragged:
            return DenseEntries(keys, values, valid, lengths[0], self.foreseen, weights)
        assert valid is not None
        return FlatEntries(keys, values, valid, self.foreseen, log_weight=weights)

    def advance_host_lengths(self, layer: SieveLayer, reads: Reads) -> None:
        """Count the effects of a token of the pass on `layer`, and its reads."""
        layer.store.advance_host_length()
        if self.executor is not None and self.index not in reads.executors:
            reads.executors[self.index] = self.executor
        if self.reading is None:
            count_all(layer.store, reads)
            return
        count(self.reading, layer.store, reads)
        for metadata in self.metadata():
            metadata.size += 1


def _same(ours: Sequence[object], theirs: Sequence[object]) -> bool:
    """Return True if these are the same objects."""
    return len(ours) == len(theirs) and all(item is other for item, other in zip(ours, theirs, strict=True))
