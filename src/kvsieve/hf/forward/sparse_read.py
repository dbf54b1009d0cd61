"""Sparse attention of new tokens by the plan's reader, with counts of their reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

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
from kvsieve.cache import PackedStore, RaggedStore, RowGroups, group_rows
from kvsieve.core.kv_rows import ReadFacts
from kvsieve.hf.forward.parallel import request_over
from kvsieve.types import AttentionQueries

if TYPE_CHECKING:
    from kvsieve.cache import LayerMemory
    from kvsieve.hf.cache.cache import SieveCache
    from kvsieve.hf.cache.counts import Reads
    from kvsieve.hf.cache.layer import SieveLayer
    from kvsieve.hf.cache.records import ParallelDocuments
    from kvsieve.planning.roles import Reader


def read_token(
    reader: Reader | None,
    cache: SieveCache,
    layer: SieveLayer,
    index: int,
    num_layers: int,
    reads: Reads,
    asked: AttentionQueries,
    sharing: Sharing | None = None,
) -> Tensor:
    """Attend with a token that is already stored: queries [B, Hq, 1, D] -> [B, Hq, 1, Dv]. reads: counts it."""
    reading = reading_of(reader, cache, layer, index, num_layers)
    return attend_read(reading, layer.store, index, asked, reads, [reads], sharing, cache.conversation.parallel)


def attend_read(
    reading: Reading | None,
    store: LayerMemory,
    index: int,
    asked: AttentionQueries,
    noted: Reads,
    reads: Sequence[Reads],
    sharing: Sharing | None = None,
    documents: ParallelDocuments | None = None,
) -> Tensor:
    """Attend with the last L stored tokens, each to the entries up to its own: [B, Hq, L, D] -> [B, Hq, L, Dv].

    Args:
        reading: of all of these tokens; None for dense attention.
        store: of the layer.
        index: of the layer.
        asked: the queries.
        noted: gets the executor.
        reads: counts of each token.
        sharing: the layer's part in sharing choices.
        documents: in parallel; None for none.
    """
    request: AttentionRequest[Any, Any] = AttentionRequest(
        asked, stored_entries(store) if reading is None else ReadRows(reading, store, sharing=sharing)
    )
    if documents is not None:
        request = request_over(documents, asked, store)
    out = attend_noted(noted, index, request)
    for ahead, counts in enumerate(reads, 1 - len(reads)):
        if reading is None:
            count_all(store, counts, -ahead)
        else:
            counts.not_compiled = reading.not_compiled
            count(reading, store, counts, -ahead)
    return out


def attend_noted(reads: Reads, index: int, request: AttentionRequest[Any, Any]) -> Tensor:
    """Attend, and record the executor, once per layer."""
    if index not in reads.executors:
        reads.executors[index] = explain(request)
    return attend(request)


def stored_entries(store: LayerMemory) -> DenseEntries | FlatEntries | EncodedEntries:
    """Return all entries of a store, in the form for new tokens' attention."""
    if store.is_encoded:
        return EncodedEntries(cast(PackedStore, store))
    if store.is_ragged:
        ragged = cast(RaggedStore, store)
        return FlatEntries(*ragged.flat, used=store.size, padded=ragged.hides_newest, log_weight=ragged.flat_log_weight)
    return DenseEntries(store.keys, store.values, store.valid, log_weight=store.log_weight)


def count(reading: Reading, store: LayerMemory, reads: Reads, later: int = 0) -> None:
    """Count a token's reads of the current entries: the number of chosen ones is constant, estimates grow.

    All entries are already part of the KV rows' metadata, including those stored before it was built.

    later: newest entries, which are those of later tokens.
    """
    entry = store.entry_size(later)
    for group, all_of_it in zip(reading.grouped.groups, reading.whole, strict=True):
        size = reading.grouped.entries(store, group) - later
        if all_of_it:
            reads.read(len(group.row) * size, entry)
            continue
        assert group.cost is not None
        entries, metadata_bytes, before = group.cost
        if before != size:
            assert reading.reader is not None
            page = reading.reader.granularity(group.setting)
            metadata_bytes = metadata_bytes // -(-before // page) * -(-size // page)
        reads.estimate(metadata_bytes, sum(part.update_bytes(group.known, size) for part in group.incremental))
        group.known = size
        stored = len(group.row) * size
        reads.read(stored if entries is None else entries, entry, stored)


def reading_of(
    reader: Reader | None, cache: SieveCache, layer: SieveLayer, index: int, num_layers: int, coming: int = 0
) -> Reading | None:
    """Return the reading of the stored entries and `coming` more tokens; None for dense attention."""
    groups = _cached_groups(reader, cache, layer, index, num_layers)
    if groups is None:
        return None
    grouped = groups.grouped
    sizes = [grouped.entries(layer.store, group) + coming for group in grouped.groups]
    whole = tuple(
        reader is None or group.setting is None or reader.reads_all(group.setting, size)
        for group, size in zip(grouped.groups, sizes, strict=True)
    )
    # Without a view, KV rows are all stored entries.
    if layer.view is None and all(whole):
        return None
    if groups.reading is None or groups.reading.whole != whole:
        groups.reading = Reading(reader, grouped, whole)
    return groups.reading


def count_all(store: LayerMemory, reads: Reads, later: int = 0) -> None:
    """Count a token with dense attention to the current entries, without those of `later` tokens."""
    slots = len(store.lengths) * (store.size - later * store.stride)
    reads.read(slots * (1 if store.is_ragged else store.heads), store.entry_size(later))


def _cached_groups(
    reader: Reader | None, cache: SieveCache, layer: SieveLayer, index: int, num_layers: int
) -> _CachedGroups | None:
    """Return the layer's KV rows, grouped when this turn's answer began; None without reader and view."""
    store = layer.store
    if reader is None and layer.view is None:
        return None
    lengths = cache.conversation.prompt_lengths
    turn = cache.turn
    key = (reader, turn.number, lengths, turn.new_tokens)
    own = cache.owner.plan.read
    # Drafts may be read by another reader than the plan's; each keeps its pages.
    name = "kv_rows" if reader is own or reader == own else "drafts_rows"
    before = store.derived.get(name)
    if isinstance(before, _CachedGroups) and before.key == key and before.view is layer.view:
        return before
    settings: list[Any] = [None] * len(lengths)
    if reader is not None:
        dim = store.dims[0]
        facts = [ReadFacts(index, num_layers, length, turn.new_tokens, dim) for length in lengths]
        settings = [reader.setting(fact) for fact in facts]
    if layer.view is None and all(setting is None for setting in settings):
        return None
    grouped = group_rows(store, layer.view, settings)
    if reader is not None and reader.shares and not store.is_ragged:
        for group in grouped.groups:
            group.note_tokens(store)
    groups = store.derived[name] = _CachedGroups(key, layer.view, grouped)
    return groups


class _CachedGroups:
    """Grouped KV rows, their grouping key, and their last reading."""

    def __init__(self, key: tuple[object, ...], view: object, grouped: RowGroups) -> None:
        self.key = key
        self.view = view
        self.grouped = grouped
        self.reading: Reading | None = None

    def drop_last(self, store: LayerMemory) -> bool:
        return self.grouped.drop_last(store)

    def all_tensors(self) -> Iterator[Tensor]:
        return self.grouped.all_tensors()
