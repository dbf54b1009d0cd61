"""One new token reads what the plan's reader chooses of a layer, and what was read is counted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvsieve import kernels
from kvsieve.attention import (
    CompiledReading,
    dense_attention,
    packed_attention,
    ragged_attention,
    sparse_attention,
    why_not_compiled,
)
from kvsieve.attention.blocked import single_query_attention
from kvsieve.cache import PackedStore, RaggedStore, RowGroups, group_rows
from kvsieve.core.kv_rows import Choice, DeviceLength, KVRows, ReadFacts
from kvsieve.hf.forward.request import Asked
from kvsieve.types import AttentionTerms

if TYPE_CHECKING:
    from kvsieve.cache import LayerStore
    from kvsieve.hf.cache.cache import SieveCache
    from kvsieve.hf.cache.counts import Reads
    from kvsieve.hf.cache.layer import SieveLayer
    from kvsieve.roles import Reader


def read_token(
    reader: Reader | None,
    cache: SieveCache,
    layer: SieveLayer,
    index: int,
    num_layers: int,
    asked: Asked,
) -> Tensor:
    """Attention of a token whose entry is stored already: queries [B, Hq, 1, D] -> [B, Hq, 1, Dv]."""
    reading = reading_of(reader, cache, layer, index, num_layers)
    store, reads = layer.store, cache.turn.record.reads
    if reading is not None:
        compiled = reading.compiled(asked, store)
        if compiled is not None:
            out = compiled.attend(asked.query, store, asked.scale, asked.terms)
        else:
            out = reading.attend_and_cost(store, asked)
        reads.not_compiled = reading.why_not_compiled
        reading.count(store, reads)
        return out
    count_all(store, reads)
    if isinstance(store, PackedStore):
        return packed_attention(asked.query, store, scale=asked.scale, terms=asked.terms)
    if isinstance(store, RaggedStore):
        keys, values, bias = store.flat
        return ragged_attention(asked.query, keys, values, bias, scale=asked.scale, terms=asked.terms)
    keys, values, scale, terms = store.keys, store.values, asked.scale, asked.terms
    return dense_attention(asked.query, keys, values, scale=scale, valid=store.valid, terms=terms)


@dataclass
class Reading:
    """A way of reading a layer's KV rows, group by group.

    Attributes:
        reader: the plan's.
        grouped: the KV rows.
        whole: which groups it reads all of.
        why_not_compiled: why torch's operations read; None where one compiled call does.
    """

    reader: Reader | None
    grouped: RowGroups
    whole: tuple[bool, ...]
    why_not_compiled: str | None = "nothing was read"
    _compiled: CompiledReading | None = None

    def compiled(self, asked: Asked, store: LayerStore) -> CompiledReading | None:
        """Return what reads the KV rows by one compiled call; None where it cannot, or gradients are wanted."""
        if torch.is_grad_enabled() and asked.query.requires_grad:
            self.why_not_compiled = "gradients are on"
            return None
        if self._compiled is None and self.why_not_compiled is not None:
            groups, reader = self.grouped.groups, self.reader
            recipes = [
                None if all_of_it or reader is None else reader.recipe(group.setting)
                for group, all_of_it in zip(groups, self.whole, strict=True)
            ]
            sparse = [each for each, all_of_it in zip(recipes, self.whole, strict=True) if not all_of_it]
            self.why_not_compiled = why_not_compiled(asked.query, store, sparse)
            if self.why_not_compiled is not None:
                return None
            self._compiled = CompiledReading(store, self.grouped, recipes, asked.query.shape[1])
            keys = store.buffers()[0]
            for group, recipe in zip(groups, recipes, strict=True):
                if recipe is not None:
                    size, rows = self.grouped.entries(store, group), len(group.row)
                    looked_at = recipe.metadata_bytes(rows, size, store.dims[0], keys.element_size())
                    group.cost = rows * min(recipe.count, size), looked_at, size
        return self._compiled

    def attend_and_cost(self, store: LayerStore, asked: Asked) -> Tensor:
        """Attend by torch's operations, and note what reading the groups has cost: [B, Hq, 1, Dv]."""
        out, choices = self.attend(store, asked)
        for group, choice in zip(self.grouped.groups, choices, strict=True):
            if choice is not None:
                size = self.grouped.entries(store, group)
                group.cost = choice.entries.numel(), choice.metadata_bytes, size
        return out

    def attend(
        self,
        store: LayerStore,
        asked: Asked,
        lengths: Sequence[DeviceLength] | None = None,
    ) -> tuple[Tensor, list[Choice | None]]:
        """[B, Hq, 1, Dv], and what was chosen of each group, None where all of it is read.

        lengths: of each group's KV rows, where the device knows.
        """
        grouped, scale = self.grouped, asked.scale
        batch, query_heads, _, dim = asked.query.shape
        packed = asked.query.reshape(batch * grouped.heads, query_heads // grouped.heads, dim)
        out: Tensor | None = None
        terms = None if asked.terms is None else asked.terms.per_kv_row(batch, grouped.heads)
        choices: list[Choice | None] = []
        for at, (group, all_of_it) in enumerate(zip(grouped.groups, self.whole, strict=True)):
            kv_rows = grouped.kv_rows(store, group, None if lengths is None else lengths[at])
            query, theirs = packed, terms
            if group.kv_rows is not None:
                query, theirs = packed[group.kv_rows], None if terms is None else terms.at(group.kv_rows)
            if self.reader is None or all_of_it:
                choices.append(None)
                found = _read_whole(query, kv_rows, scale, theirs)
            else:
                choice = self.reader.choose(query, kv_rows, group.state, scale, group.setting, theirs)
                choices.append(choice)
                found = sparse_attention(query, kv_rows, choice, scale=scale, terms=theirs)
            if group.kv_rows is None:
                out = found
            else:
                out = packed.new_empty(*packed.shape[:2], found.shape[-1]) if out is None else out
                out[group.kv_rows] = found
        assert out is not None
        return out.reshape(batch, query_heads, 1, -1), choices

    def count(self, store: LayerStore, reads: Reads) -> None:
        """Count what a token has read, the entries stored now: chosen ones are as many as ever, estimates cost more.

        What is remembered of the KV rows has taken in all entries by now, also those stored before it was made.
        """
        entry = store.entry_size()
        for group, all_of_it in zip(self.grouped.groups, self.whole, strict=True):
            size = self.grouped.entries(store, group)
            if all_of_it:
                reads.read(len(group.row) * size, entry)
                continue
            assert group.cost is not None
            entries, metadata_bytes, before = group.cost
            if before != size:
                assert self.reader is not None
                page = self.reader.granularity(group.setting)
                metadata_bytes = metadata_bytes // -(-before // page) * -(-size // page)
            reads.estimate(metadata_bytes, sum(each.update_bytes(group.known, size) for each in group.incremental))
            group.known = size
            reads.read(entries, entry, len(group.row) * size)


def reading_of(
    reader: Reader | None, cache: SieveCache, layer: SieveLayer, index: int, num_layers: int, coming: int = 0
) -> Reading | None:
    """Return how a token will read what is stored and `coming` tokens more; None where that is simply everything."""
    known = _known(reader, cache, layer, index, num_layers)
    if known is None:
        return None
    grouped = known.grouped
    sizes = [grouped.entries(layer.store, group) + coming for group in grouped.groups]
    whole = tuple(
        reader is None or group.setting is None or reader.reads_all(group.setting, size)
        for group, size in zip(grouped.groups, sizes, strict=True)
    )
    # Where there is no view, KV rows are all that is stored.
    if layer.view is None and all(whole):
        return None
    if known.reading is None or known.reading.whole != whole:
        known.reading = Reading(reader, grouped, whole)
    return known.reading


def count_all(store: LayerStore, reads: Reads) -> None:
    """Count a token that has read everything that is stored now."""
    rows = len(store.lengths)
    reads.read(rows * store.size * (1 if store.is_ragged else store.heads), store.entry_size())


def _read_whole(query: Tensor, kv_rows: KVRows, scale: float, terms: AttentionTerms | None) -> Tensor:
    """query [X, G, D] -> [X, G, Dv], over all entries of each KV row."""
    length = kv_rows.length
    everything = kv_rows.span(0, kv_rows.size)
    if length is None:
        return sparse_attention(query, kv_rows, Choice(everything), scale=scale, terms=terms)
    if kv_rows.in_buffers and kernels.usable(query):
        return kernels.kv_row_attention(query, kv_rows, scale=scale, terms=terms)
    keys, values = (part[:, None] for part in kv_rows.read(everything))
    real = length.real(kv_rows.size)[None]
    if terms is not None:
        return single_query_attention(query[:, None], keys, values, real, scale=scale, terms=terms)[:, 0]
    return F.scaled_dot_product_attention(query[:, None], keys, values, attn_mask=real, scale=scale)[:, 0]


def _known(reader: Reader | None, cache: SieveCache, layer: SieveLayer, index: int, num_layers: int) -> _Known | None:
    """The layer's KV rows, as they were grouped when this turn's answer began; None without reader and view."""
    store = layer.store
    if reader is None and layer.view is None:
        return None
    lengths, turn = cache.conversation.prompt_lengths, cache.turn
    key = (reader, turn.number, lengths, turn.new_tokens)
    before = store.derived.get("kv_rows")
    if isinstance(before, _Known) and before.key == key and before.view is layer.view:
        return before
    settings: list[Any] = [None] * len(lengths)
    if reader is not None:
        dim = store.dims[0]
        facts = [ReadFacts(index, num_layers, length, turn.new_tokens, dim) for length in lengths]
        settings = [reader.setting(each) for each in facts]
    if layer.view is None and all(setting is None for setting in settings):
        return None
    known = store.derived["kv_rows"] = _Known(key, layer.view, group_rows(store, layer.view, settings))
    return known


class _Known:
    """Grouped KV rows, what they were grouped by, and how they were read last."""

    def __init__(self, key: tuple[object, ...], view: object, grouped: RowGroups) -> None:
        self.key, self.view, self.grouped = key, view, grouped
        self.reading: Reading | None = None

    def all_tensors(self) -> Iterator[Tensor]:
        return self.grouped.all_tensors()
