"""Attention of tokens over the KV rows of a layer, read as the plan's reader chooses for each, group by group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvsieve.attention.paged import CompiledReading, why_not_compiled
from kvsieve.attention.request import AttentionRequest, Executor
from kvsieve.cache import LayerMemory, RowGroups
from kvsieve.core.kv_rows import Choice, DeviceLength, KVRows
from kvsieve.types import AttentionQueries

if TYPE_CHECKING:
    from kvsieve.planning.roles import Reader


@dataclass
class Reading:
    """A way of reading a layer's KV rows, group by group.

    Attributes:
        reader: the plan's.
        grouped: the KV rows.
        whole: the groups that are read whole.
        compiled: reads them in one compiled call; None until the first token.
        not_compiled: why torch's operations read last; None if the compiled call did.
    """

    reader: Reader | None
    grouped: RowGroups
    whole: tuple[bool, ...]
    compiled: CompiledReading | None = None
    not_compiled: str | None = None

    def compile(self, asked: AttentionQueries, store: LayerMemory) -> str | None:
        """Make `compiled`, or return why that cannot be."""
        groups = self.grouped.groups
        reader = self.reader
        recipes = [
            None if all_of_it or reader is None else reader.recipe(group.setting)
            for group, all_of_it in zip(groups, self.whole, strict=True)
        ]
        sparse = [recipe for recipe, all_of_it in zip(recipes, self.whole, strict=True) if not all_of_it]
        reason = why_not_compiled(asked.query, store, sparse)
        if reason is not None:
            return reason
        self.compiled = CompiledReading(store, self.grouped, recipes, asked.query.shape[1])
        keys = store.buffers()[0]
        for group, recipe in zip(groups, recipes, strict=True):
            if recipe is not None:
                size = self.grouped.entries(store, group)
                rows = len(group.row)
                looked_at = recipe.metadata_bytes(rows, size, store.dims[0], keys.element_size())
                group.cost = rows * min(recipe.count, size), looked_at, size
        return None


@dataclass
class ReadRows:
    """A layer's KV rows, and how they are read.

    Attributes:
        reading: how.
        store: of the layer, the tokens' own entries included.
        lengths: of each group's KV rows, if only the device knows them; None: those of the store.
    """

    reading: Reading
    store: LayerMemory
    lengths: Sequence[DeviceLength] | None = None


_Request = AttentionRequest[ReadRows, None]


def _why_not_c(request: _Request) -> str | None:
    asked = request.asked
    reading = request.stored.reading
    if request.stored.lengths is not None:
        return "the device alone knows the lengths"
    if torch.is_grad_enabled() and asked.query.requires_grad:
        reading.not_compiled = "gradients are on"
    else:
        reading.not_compiled = None if reading.compiled is not None else reading.compile(asked, request.stored.store)
    return reading.not_compiled


def _c(request: _Request) -> Tensor:
    compiled = request.stored.reading.compiled
    assert compiled is not None
    return compiled.attend(request.asked, request.stored.store)


def _by_groups(request: _Request, attend: Callable[[AttentionRequest[KVRows, Choice | None]], Tensor]) -> Tensor:
    """Attend by torch's operations, one token after another."""
    asked = request.asked
    new = asked.query.shape[2]
    if new == 1:
        return _token_by_groups(asked, request.stored, 0, attend)
    for group in request.stored.reading.grouped.groups:
        before = request.stored.reading.grouped.entries(request.stored.store, group) - new
        # Others of these tokens are not to be seen yet.
        if group.known > before and not group.keep_first(before):
            group.state = {}
    tokens = [asked.part(slice(at, at + 1)) for at in range(new)]
    return torch.cat([_token_by_groups(one, request.stored, new - 1 - at, attend) for at, one in enumerate(tokens)], 2)


def _token_by_groups(
    asked: AttentionQueries,
    stored: ReadRows,
    later: int,
    attend: Callable[[AttentionRequest[KVRows, Choice | None]], Tensor],
) -> Tensor:
    """Attend with one token, and note the cost of choosing where the host knows the lengths.

    later: newest entries, which it does not see.
    """
    reading = stored.reading
    store = stored.store
    lengths = stored.lengths
    grouped = reading.grouped
    reader = reading.reader
    queries = asked.per_kv_row(grouped.heads)
    out: Tensor | None = None
    for at, (group, all_of_it) in enumerate(zip(grouped.groups, reading.whole, strict=True)):
        kv_rows = grouped.kv_rows(store, group, None if lengths is None else lengths[at], later)
        own = queries if group.kv_rows is None else queries.at(group.kv_rows)
        choice = None
        if reader is not None and not all_of_it:
            choice = reader.choose(own, kv_rows, group.state, group.setting)
            if lengths is None:
                group.cost = choice.entries.numel(), choice.metadata_bytes, kv_rows.size
        elif lengths is None:
            choice = Choice(kv_rows.span(0, kv_rows.size))
        found = attend(AttentionRequest(own, kv_rows, choice))
        if group.kv_rows is None:
            out = found
        else:
            out = queries.query.new_empty(*queries.query.shape[:2], found.shape[-1]) if out is None else out
            out[group.kv_rows] = found
    assert out is not None
    return out.reshape(*asked.query.shape[:2], 1, -1)


def read_rows(attend: Callable[[AttentionRequest[Any, Any]], Tensor]) -> tuple[Executor, ...]:
    """Return the executors for KV rows under a reader; attend: computes a group."""
    return (
        Executor("C, in one call", _why_not_c, _c),
        Executor("group by group", lambda request: None, lambda request: _by_groups(request, attend)),
    )
