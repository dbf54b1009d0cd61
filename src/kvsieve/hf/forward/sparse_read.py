"""One new token reads what the plan's reader chooses of a layer, and what was read is counted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor

from kvsieve import kernels
from kvsieve.attention import dense_attention, ragged_attention, sparse_attention
from kvsieve.cache import Grouped, group_lines
from kvsieve.core.lines import Choice, Follower, Length, Lines, ReadFacts

if TYPE_CHECKING:
    from kvsieve.cache import DenseStore, RaggedStore
    from kvsieve.hf.cache.cache import Reads, SieveCache, SieveLayer
    from kvsieve.roles import Reader


def read_token(
    reader: Reader | None,
    cache: SieveCache,
    layer: SieveLayer,
    index: int,
    num_layers: int,
    query: Tensor,
    scale: float,
) -> Tensor:
    """Attention of a token whose entry is stored already: query [B, Hq, 1, D] -> [B, Hq, 1, Dv]."""
    reading = reading_of(reader, cache, layer, index, num_layers)
    store, reads = layer.store, cache.record.reads
    if reading is not None:
        out, choices = reading.attend(store, query, scale)
        for group, choice in zip(reading.grouped.groups, choices, strict=True):
            if choice is not None:
                size = reading.grouped.entries(store, group)
                group.cost = choice.entries.numel(), choice.looked_at, size
        reading.count(store, reads)
        return out
    count_all(store, reads)
    if store.is_ragged:
        keys, values, bias = store.flat  # type: ignore[union-attr]
        return ragged_attention(query, keys, values, bias, scale=scale)
    return dense_attention(query, store.keys, store.values, scale=scale, valid=store.valid)


@dataclass
class Reading:
    """How a token reads a layer's lines, group by group. whole: which groups it reads all of."""

    reader: Reader | None
    grouped: Grouped
    whole: tuple[bool, ...]

    def attend(
        self,
        store: DenseStore | RaggedStore,
        query: Tensor,
        scale: float,
        lengths: Sequence[Length] | None = None,
    ) -> tuple[Tensor, list[Choice | None]]:
        """[B, Hq, 1, Dv], and what was chosen of each group, None where all of it is read.

        lengths: of each group's lines, where the device knows.
        """
        grouped = self.grouped
        batch, query_heads, _, dim = query.shape
        packed = query.reshape(batch * grouped.heads, query_heads // grouped.heads, dim)
        out: Tensor | None = None
        choices: list[Choice | None] = []
        for at, (group, all_of_it) in enumerate(zip(grouped.groups, self.whole, strict=True)):
            lines = grouped.lines(store, group, None if lengths is None else lengths[at])
            asked = packed if group.lines is None else packed[group.lines]
            if self.reader is None or all_of_it:
                choices.append(None)
                found = _read_whole(asked, lines, scale)
            else:
                choice = self.reader.choose(asked, lines, group.state, scale, group.setting)
                choices.append(choice)
                found = sparse_attention(asked, lines, choice, scale=scale)
            if group.lines is None:
                out = found
            else:
                out = packed.new_empty(*packed.shape[:2], found.shape[-1]) if out is None else out
                out[group.lines] = found
        assert out is not None
        return out.reshape(batch, query_heads, 1, -1), choices

    def count(self, store: DenseStore | RaggedStore, reads: Reads) -> None:
        """Count what a token has read, the entries stored now: chosen ones are as many as ever, estimates cost more.

        What is remembered of the lines has taken in all of them by now, those too that were stored before it was made.
        """
        entry = _entry_bytes(store)
        for group, all_of_it in zip(self.grouped.groups, self.whole, strict=True):
            size = self.grouped.entries(store, group)
            if all_of_it:
                reads.read(len(group.row) * size, entry)
                continue
            assert group.cost is not None
            entries, looked_at, before = group.cost
            if before != size:
                page = getattr(group.setting, "page", 1)
                looked_at = looked_at // -(-before // page) * -(-size // page)
            followers = [each for each in group.state.values() if isinstance(each, Follower)]
            reads.looked(looked_at, sum(each.taking_in(group.known, size) for each in followers))
            group.known = size
            reads.read(entries, entry, len(group.row) * size)


def reading_of(
    reader: Reader | None, cache: SieveCache, layer: SieveLayer, index: int, num_layers: int, coming: int = 0
) -> Reading | None:
    """How a token will read what is stored and `coming` tokens more; None where that is simply everything."""
    grouped = _grouped(reader, cache, layer, index, num_layers)
    if grouped is None:
        return None
    sizes = [grouped.entries(layer.store, group) + coming for group in grouped.groups]
    whole = tuple(
        reader is None or group.setting is None or reader.reads_all(group.setting, size)
        for group, size in zip(grouped.groups, sizes, strict=True)
    )
    # Where there is no view, lines are all that is stored.
    return None if layer.view is None and all(whole) else Reading(reader, grouped, whole)


def count_all(store: DenseStore | RaggedStore, reads: Reads) -> None:
    """Count a token that has read everything that is stored now."""
    rows = len(store.lengths)
    reads.read(rows * store.size * (1 if store.is_ragged else store.heads), _entry_bytes(store))


def _read_whole(query: Tensor, lines: Lines, scale: float) -> Tensor:
    """query [X, G, D] -> [X, G, Dv], over all entries of each line."""
    length = lines.length
    everything = lines.span(0, lines.size)
    if length is None:
        return sparse_attention(query, lines, Choice(everything), scale=scale)
    if kernels.usable(query, lines.keys):
        slots = {"body": lines.body, "tail": lines.tail, "stride": lines.stride}
        return kernels.line_attention(
            query, lines.keys, lines.values, scale=scale, length=length.count, capacity=lines.size, **slots
        )
    keys, values = lines.read(everything)
    return F.scaled_dot_product_attention(
        query[:, None], keys[:, None], values[:, None], attn_mask=length.real(lines.size)[None], scale=scale
    )[:, 0]


def _entry_bytes(store: DenseStore | RaggedStore) -> int:
    keys, values = store._buffers()[:2]
    return (keys.shape[-1] + values.shape[-1]) * keys.element_size()


def _grouped(
    reader: Reader | None, cache: SieveCache, layer: SieveLayer, index: int, num_layers: int
) -> Grouped | None:
    """The layer's lines, as they were grouped when this turn's answer began; None without reader and view."""
    store = layer.store
    if reader is None and layer.view is None:
        return None
    told = (reader, cache.turn, cache.prompt_lengths, cache.new_tokens)
    before = store.derived.get("lines")
    if before is not None and before.told == told and before.view is layer.view:
        return before.grouped
    settings: list[Any] = [None] * len(cache.prompt_lengths)
    if reader is not None:
        dim = store._buffers()[0].shape[-1]
        facts = [ReadFacts(index, num_layers, length, cache.new_tokens, dim) for length in cache.prompt_lengths]
        settings = [reader.setting(each) for each in facts]
    if layer.view is None and all(setting is None for setting in settings):
        return None
    grouped = group_lines(store, layer.view, settings)
    store.derived["lines"] = _Known(told, layer.view, grouped)
    return grouped


class _Known:
    """Grouped lines, and what they were grouped by."""

    def __init__(self, told: tuple[object, ...], view: object, grouped: Grouped) -> None:
        self.told, self.view, self.grouped = told, view, grouped

    def held(self) -> Iterator[Tensor]:
        return self.grouped.held()
