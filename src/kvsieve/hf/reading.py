"""One new token reads what the plan's reader chooses of a layer, and what was read is counted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from kvsieve.attention import dense_attention, ragged_attention, sparse_attention
from kvsieve.cache import Grouped, group_lines
from kvsieve.core.lines import Choice, ReadFacts

if TYPE_CHECKING:
    from kvsieve.hf.cache import SieveCache, SieveLayer
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
    grouped = _grouped(reader, cache, layer, index, num_layers)
    out = None if grouped is None else _read(reader, cache, layer, grouped, query, scale)
    return _read_all(cache, layer, query, scale) if out is None else out


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
    settings = [None] * len(cache.prompt_lengths)
    if reader is not None:
        dim = store.keys.shape[-1] if not store.is_ragged else store.flat[0].shape[-1]
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

    def nbytes(self) -> int:
        return self.grouped.nbytes()


def _read(
    reader: Reader | None, cache: SieveCache, layer: SieveLayer, grouped: Grouped, query: Tensor, scale: float
) -> Tensor | None:
    """None where every line is read whole, and lines are all that is stored."""
    store, reads = layer.store, cache.record.reads
    batch, query_heads, _, dim = query.shape
    packed = query.reshape(batch * grouped.heads, query_heads // grouped.heads, dim)
    whole = []
    for group in grouped.groups:
        size = group.size + (store.size - grouped.stored) // grouped.stride
        whole.append(reader is None or group.setting is None or reader.reads_all(group.setting, size))
    if layer.view is None and all(whole):
        return None
    out = None
    for group, all_of_it in zip(grouped.groups, whole, strict=True):
        lines = grouped.lines(store, group)
        asked = packed if group.lines is None else packed[group.lines]
        if reader is None or all_of_it:
            choice = Choice(lines.span(0, lines.size))
        else:
            choice = reader.choose(asked, lines, group.state, scale, group.setting)
            reads.looked(choice.looked_at)
        found = sparse_attention(asked, lines, choice, scale=scale)
        entry = (dim + lines.values.shape[-1]) * lines.keys.element_size()
        reads.read(choice.entries.numel(), entry)
        if group.lines is None:
            out = found
        else:
            out = packed.new_empty(*packed.shape[:2], found.shape[-1]) if out is None else out
            out[group.lines] = found
    assert out is not None
    return out.reshape(batch, query_heads, 1, -1)


def _read_all(cache: SieveCache, layer: SieveLayer, query: Tensor, scale: float) -> Tensor:
    store = layer.store
    if store.is_ragged:
        keys, values, bias = store.flat  # type: ignore[union-attr]
        slots = len(keys) * store.size
        out = ragged_attention(query, keys, values, bias, scale=scale)
    else:
        keys, values = store.keys, store.values
        slots = keys.shape[:3].numel()
        out = dense_attention(query, keys, values, scale=scale, valid=store.valid)  # type: ignore[arg-type]
    cache.record.reads.read(slots, (keys.shape[-1] + values.shape[-1]) * keys.element_size())
    return out
