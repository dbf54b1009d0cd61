"""A store's entries as KV rows (core.kv_rows), in groups that are read together."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvsieve.cache.contract import LayerMemory, View
from kvsieve.cache.entry_tokens import EntryTokens, entry_tokens
from kvsieve.cache.packed import PackedStore
from kvsieve.cache.ragged import RaggedStore
from kvsieve.cache.tensors import tensors_in
from kvsieve.core.kv_rows import DeviceLength, IncrementalMetadata, KVRows, TruncatableMetadata


@dataclass
class Group:
    """KV rows of equal length and parameters at the time of grouping.

    Attributes:
        setting: the reader's parameters; None for dense attention.
        kv_rows: int64 [X], their numbers among all B * H' KV rows; None for all of them.
        row: int64 [X], buffer row of each.
        body: as in KVRows, within that row.
        tail: as in KVRows, within that row.
        size: entries of each.
        state: the reader's metadata.
        cost: of the last sparse read: entries read (None for all), bytes of metadata read, stored entries; None before
            the first.
        known: entries counted as part of the metadata.
        tokens: of the entries at the time of grouping; None unless layers share choices.
    """

    setting: Any
    kv_rows: Tensor | None
    row: Tensor
    body: Tensor | None
    tail: Tensor
    size: int
    state: dict[str, Any] = field(default_factory=dict)
    cost: tuple[int | None, int, int] | None = None
    known: int = 0
    tokens: EntryTokens | None = None
    _incremental: list[IncrementalMetadata] | None = None
    _flat: tuple[int, Tensor | None, Tensor] | None = None

    @property
    def incremental(self) -> list[IncrementalMetadata]:
        """Return the reader's incremental metadata; looked up once there is any."""
        if self._incremental is None and self.state:
            # Protocol checks are slow: not at every token.
            self._incremental = [part for part in self.state.values() if isinstance(part, IncrementalMetadata)]
        return self._incremental or []

    def flat(self, capacity: int) -> tuple[Tensor | None, Tensor]:
        """Return `body` and `tail` for concatenated buffer rows of `capacity` slots each."""
        if self._flat is None or self._flat[0] != capacity:
            start = self.row * capacity
            body = None if self.body is None else self.body + start[:, None]
            self._flat = capacity, body, self.tail + start
        return self._flat[1:]

    def note_tokens(self, store: LayerMemory) -> None:
        """Find the tokens of the entries, right after grouping."""
        self.tokens = entry_tokens(store, self.row, self.body, self.tail, self.size)

    def forget(self) -> None:
        """Drop the reader's metadata."""
        self.state = {}
        self._incremental = None

    def keep_first(self, entries: int) -> bool:
        """Let the reader's metadata forget all but the first `entries` entries; return False if it cannot."""
        self.known = min(self.known, entries)
        for part in self.state.values():
            if not isinstance(part, TruncatableMetadata):
                return False
            part.keep_first(entries)
        return True

    def all_tensors(self) -> Iterator[Tensor]:
        """Yield every tensor of the slot lists and of the reader's metadata."""
        yield from tensors_in((self.kv_rows, self.row, self.body, self.tail, self._flat))
        if self.tokens is not None:
            yield from self.tokens.all_tensors()
        for part in self.state.values():
            yield from (part,) if isinstance(part, Tensor) else part.all_tensors()


@dataclass
class RowGroups:
    """Groups of a store's KV rows that are read together.

    Attributes:
        groups: the groups.
        heads: H', KV rows per row of the batch.
        stride: slots per further entry.
        stored: slots in use at the time of grouping.
    """

    groups: list[Group]
    heads: int
    stride: int
    stored: int

    def entries(self, store: LayerMemory, group: Group) -> int:
        """Return the current entries of a group's KV rows; appended ones are last."""
        return group.size + (store.size - self.stored) // self.stride

    def most(self, store: LayerMemory, group: Group) -> int:
        """Return the most entries of a group's KV rows in the present buffers."""
        return group.size + (store.capacity - self.stored) // self.stride

    def drop_last(self, store: LayerMemory) -> bool:
        """Remove the entries that the store has removed; return False if the KV rows must be grouped again."""
        if store.size < self.stored:
            return False
        return all(group.keep_first(self.entries(store, group)) for group in self.groups)

    def kv_rows(self, store: LayerMemory, group: Group, length: DeviceLength | None = None, later: int = 0) -> KVRows:
        """Return the current KV rows of a group; with a length on the device, as many entries as there are slots.

        later: newest entries to leave out.
        """
        keys, values = store.slot_rows()
        body, tail = group.flat(store.capacity)
        size = self.entries(store, group) - later if length is None else self.most(store, group)
        where = body, tail, self.stride, size, length, self.heads
        return KVRows(keys, values, *where, log_weight=store.weight_rows(), scores=store.score_rows())

    def all_tensors(self) -> Iterator[Tensor]:
        """Yield every tensor of the readers' metadata and of the slot lists."""
        for group in self.groups:
            yield from group.all_tensors()


def group_rows(store: LayerMemory, view: View | None, settings: Sequence[Hashable]) -> RowGroups:
    """Group the KV rows of a store or its view by length and by `settings`, the parameters per batch row."""
    if isinstance(store, PackedStore):
        return _group_encoded(store, view, settings)
    keys = store.buffers()[0]
    device = keys.device
    batch = keys.shape[0]
    heads = store.heads
    now = torch.arange(store.size, device=device)
    stride = 1
    at = torch.arange(batch * heads, device=device)
    tail = torch.zeros_like(at) + store.size
    real: Tensor | None
    if isinstance(store, RaggedStore):
        stride = heads
        real = store.visible().flatten(0, 1)
        slots = now.expand(batch * heads, -1)
        tail = tail + at % heads
        at = at // heads
    elif view is None:
        real = None if store.valid is None else store.valid.expand(-1, heads, -1).flatten(0, 1)
        slots = now.expand(batch * heads, -1)
    else:
        copies = view.slots.shape[1] // heads
        heads *= copies
        slots = torch.cat([view.slots.flatten(0, 1), now[view.end :].expand(batch * heads, -1)], 1)
        later = None if store.valid is None else store.valid[..., view.end :]
        real = _joined(view, later, batch, heads, slots.shape[1] - view.slots.shape[2])
        at, tail = (part.repeat_interleave(copies) for part in (at, tail))
    counts = [slots.shape[1]] * len(slots) if real is None else real.sum(-1).tolist()
    kinds = [(settings[number // heads], count) for number, count in enumerate(counts)]
    groups = []
    for setting, count in dict.fromkeys(kinds):
        members = [number for number, kind in enumerate(kinds) if kind == (setting, count)]
        which = None if len(members) == len(kinds) else torch.tensor(members, device=device)
        if real is None and view is None:
            # The first `size` slots in order: nothing to look up.
            body = None
            first = torch.zeros_like(tail)
        else:
            body = slots if which is None else slots[which]
            first = tail
            if real is not None:
                body = body[real if which is None else real[which]].view(len(members), count)
        if which is not None:
            groups.append(Group(setting, which, at[which], body, first[which], count))
        else:
            groups.append(Group(setting, None, at, body, first, count))
    return RowGroups(groups, heads, stride, store.size)


def _group_encoded(store: PackedStore, view: View | None, settings: Sequence[Hashable]) -> RowGroups:
    """Group KV rows with slots that are numbers of their real entries."""
    totals = store.totals()
    heads = store.heads
    rows = torch.arange(len(totals), device=totals.device)
    real: Tensor | None = None
    if view is None:
        body = None
        first = torch.zeros_like(rows)
        counts = totals
    else:
        copies = view.slots.shape[1] // heads
        heads *= copies
        since = max(store.lengths) - view.end
        rows, totals = (part.repeat_interleave(copies) for part in (rows, totals))
        body = view.slots.flatten(0, 1)
        first = totals - since
        if view.real is not None:
            real = view.real.expand(-1, heads, -1).flatten(0, 1)
        counts = since + (torch.full_like(rows, body.shape[1]) if real is None else real.sum(-1))
    kinds = [(settings[number // heads], count) for number, count in enumerate(counts.tolist())]
    groups = []
    for setting, count in dict.fromkeys(kinds):
        members = torch.tensor([number for number, kind in enumerate(kinds) if kind == (setting, count)])
        members = members.to(rows.device)
        which = None if len(members) == len(kinds) else members
        chosen = None if body is None else body[members]
        if chosen is not None and real is not None:
            chosen = chosen[real[members]].view(len(members), -1)
        groups.append(Group(setting, which, rows[members], chosen, first[members], count))
    return RowGroups(groups, heads, 1, store.size)


def _joined(view: View, later: Tensor | None, batch: int, heads: int, since: int) -> Tensor | None:
    """Return the mask of real slots of a view and later entries, bool [B * H', K + since]; None for all."""
    if view.real is None and (later is None or bool(later.all())):
        return None
    shape = (batch, heads)
    before = view.slots.new_ones(1, 1, 1, dtype=torch.bool) if view.real is None else view.real
    before = before.expand(*shape, view.slots.shape[2])
    after = before.new_ones(*shape, since) if later is None else _per(later, heads)
    return torch.cat([before, after.expand(*shape, since)], 2).flatten(0, 1)


def _per(part: Tensor, heads: int) -> Tensor:
    return part if part.shape[1] == 1 else part.repeat_interleave(heads // part.shape[1], 1)
