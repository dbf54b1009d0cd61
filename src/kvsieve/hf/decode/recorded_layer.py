"""One layer of a recorded pass: where its new entry goes, what is read of it, and that it is still the same."""

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


class Numbers(Protocol):
    """The numbers of a pass on the device: where entries go, and how many there are."""

    values: Tensor

    def length(self, at: slice) -> DeviceLength: ...


class DeviceCounters:
    """Numbers on the device that grow by a fixed amount with every pass, side by side; equal ones are one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._known: dict[tuple[int, int, int, object], int] = {}
        self.starts: list[int] = []
        self.steps: list[int] = []

    def run(self, start: int, count: int, step: int, owner: object = None) -> slice:
        """Where start, start + 1 ... lie, `count` of them that grow by `step`.

        owner: whose they are alone, though others' are equal now; None where equal ones stay so.
        """
        at = self._known.setdefault((start, count, step, owner), len(self.starts))
        if at == len(self.starts):
            self.starts += range(start, start + count)
            self.steps += [step] * count
        return slice(at, at + count)


class RecordedLayer(SieveLayer):
    """One layer, as a recorded pass knows it. reading: as in `read_token`; None where everything is read.

    slots, lengths: where in the pass's numbers the new entry's slots lie, and the lengths of what is read: of each
    group of KV rows, or of the store. All tensors are those the store had when the pass was made. encoded: what is
    read where some entries are encoded.
    """

    def __init__(self, layer: SieveLayer, index: int, reading: Reading | None, counters: DeviceCounters) -> None:
        super().__init__()
        self.store = layer.store
        self.view = layer.view
        self.index = index
        self.reading = reading
        self.tensors = layer.store.tensors
        self.encoded = FixedEntries.of(layer.store)
        # Asked once, not at every token.
        self.foreseen = foresee(self.tensors[0])
        self.executor: str | None = None
        self.remembered = self._remembered()
        self.places = self.count(layer, counters)
        self.slots, *self.lengths = self.places

    def count(self, layer: SieveLayer, counters: DeviceCounters) -> tuple[slice, ...]:
        """Where numbers for what `layer` stores now are put: its slots' and its lengths'."""
        store = layer.store
        stride = layer.store.stride
        # Layers do not encode at the same time.
        owner = None if self.encoded is None else self.index
        slots = counters.run(store.next_slot, stride, stride, owner)
        if self.reading is not None:
            grouped = self.reading.grouped
            sizes = [grouped.entries(store, group) for group in grouped.groups]
        else:
            sizes = [] if store.is_ragged else [store.next_slot]
        return slots, *(counters.run(size + 1, 1, 1, owner) for size in sizes)

    def fits(self, layer: SieveLayer, reading: Reading | None) -> bool:
        """Tell that the layer still has the same buffers, with room for an entry, and is read in the same way."""
        store = layer.store
        if not _same(self.tensors, store.tensors) or layer.view is not self.view or not store.has_room:
            return False
        if self.encoded is not None and not self.encoded.fits(store):
            return False
        if reading is None or self.reading is None:
            return reading is self.reading
        if reading.grouped is not self.reading.grouped or reading.whole != self.reading.whole or not self.knows(store):
            return False
        return _same(self.remembered, self._remembered())

    def is_current(self, store: LayerMemory) -> bool:
        """Tell that nothing was encoded since `follow`."""
        return self.encoded is None or self.encoded.is_current(store)

    def follow(self, store: LayerMemory, token_index: int) -> None:
        """Go on with what `store` holds now, in the same buffers; token_index: of the next token in its row."""
        self.store = store
        store.prepare_slots(token_index)
        if self.encoded is not None:
            self.encoded.update(store)

    def knows(self, store: LayerMemory) -> bool:
        """Tell that a reader knows all entries of the KV rows that it chooses from, and what choosing costs."""
        if self.reading is None:
            return True
        grouped = self.reading.grouped
        return all(
            group.cost is not None and all(each.size == grouped.entries(store, group) for each in group.state.values())
            for group in self._chosen_from()
        )

    def make_room(self) -> None:
        """Have room, in what a reader remembers, for as many entries as the store has."""
        if self.reading is not None:
            grouped = self.reading.grouped
            for group in grouped.groups:
                group.flat(self.store.capacity)
            for group in self._chosen_from():
                for each in group.state.values():
                    each.make_room(grouped.most(self.store, group))
        self.remembered = self._remembered()

    def metadata(self) -> list[IncrementalMetadata]:
        """Return what a reader remembers of the KV rows that it chooses from."""
        return [each for group in self._chosen_from() for each in group.state.values()]

    def _chosen_from(self) -> list[Group]:
        if self.reading is None:
            return []
        pairs = zip(self.reading.grouped.groups, self.reading.whole, strict=True)
        return [group for group, whole in pairs if not whole]

    def _remembered(self) -> list[Tensor]:
        return [part for each in self.metadata() for part in each.tensors()]

    def attend(self, asked: AttentionQueries, key: Tensor, value: Tensor, numbers: Numbers) -> Tensor:
        """Store a token's entry, and attend: queries [B, Hq, 1, D] -> [B, Hq, 1, Dv]."""
        self.store.put(key, value, numbers.values[self.slots])
        request: AttentionRequest[Any, None] = AttentionRequest(
            asked, self._stored([numbers.length(at) for at in self.lengths])
        )
        if self.executor is None:
            self.executor = explain(request)
        return attend(request)

    def _stored(self, lengths: list[DeviceLength]) -> DenseEntries | FlatEntries | EncodedEntries | ReadRows:
        """Return the first of all slots, as many as the lengths tell."""
        if self.encoded is not None:
            return EncodedEntries(self.encoded.store, lengths[0])
        if self.reading is not None:
            return ReadRows(self.reading, self.store, lengths)
        keys, values, _, valid = self.tensors[:4]
        assert keys is not None and values is not None
        if not self.store.is_ragged:
            return DenseEntries(keys, values, valid, lengths[0], self.foreseen)
        assert valid is not None
        return FlatEntries(keys, values, valid, self.foreseen)

    def advance_host_lengths(self, layer: SieveLayer, reads: Reads) -> None:
        """Count what a pass has done to `layer` and what it has read."""
        layer.store.advance_host_length()
        if self.executor is not None and self.index not in reads.executors:
            reads.executors[self.index] = self.executor
        if self.reading is None:
            count_all(layer.store, reads)
            return
        count(self.reading, layer.store, reads)
        for each in self.metadata():
            each.size += 1


def _same(ours: Sequence[object], theirs: Sequence[object]) -> bool:
    """Tell that these are the very same objects."""
    return len(ours) == len(theirs) and all(mine is other for mine, other in zip(ours, theirs, strict=True))
