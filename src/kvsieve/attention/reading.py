"""Attention of tokens over the KV rows of a layer, read as the plan's reader chooses for each, group by group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvsieve.attention.paged import CompiledReading, why_not_compiled
from kvsieve.attention.request import AttentionRequest, Executor
from kvsieve.attention.shared import (
    Correspondence,
    Entries,
    MadeChoice,
    RowReading,
    Sharing,
    correspondence,
    sizes_of,
    stacked,
)
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
        anchor: reading of the layer whose choices were last offered; None for a layer that gets none.
        shared: how the anchor's choices apply; None if they do not.
        compiled_shared: as `compiled`, of entries that an anchor has chosen.
        begun: True once read.
    """

    reader: Reader | None
    grouped: RowGroups
    whole: tuple[bool, ...]
    compiled: CompiledReading | None = None
    not_compiled: str | None = None
    anchor: RowReading | None = None
    shared: Correspondence | None = None
    compiled_shared: CompiledReading | None = None
    begun: bool = False

    def is_settled(self, readings: Sequence[Reading | None]) -> bool:
        """Return True if nothing has to be found out before it is read again, with the readings of all layers."""
        if self.reader is None or not self.reader.shares:
            return True
        return self.begun and (self.anchor is None or any(self.anchor is reading for reading in readings))

    def follow(self, made: MadeChoice, heads: tuple[int, ...] | None) -> Correspondence | None:
        """Return how an anchor's choices apply, None if they do not; found once."""
        if self.anchor is not made.reading:
            self.anchor = made.reading
            self.shared = correspondence(made.reading, self, heads)
            self.compiled_shared = None
            if self.shared is not None:
                for group in self.grouped.groups:
                    group.forget()
        return self.shared

    def compile(self, asked: AttentionQueries, store: LayerMemory, given: MadeChoice | None = None) -> str | None:
        """Make `compiled`, or `compiled_shared` if entries are given; or return why that cannot be."""
        groups = self.grouped.groups
        if given is not None:
            if any(part is not None and part.ndim > 2 for part in given.tokens[0]):
                return "each query head has a choice of its own"
            reason = why_not_compiled(asked.query, store, ())
            if reason is None and self.compiled_shared is None:
                heads = asked.query.shape[1]
                self.compiled_shared = CompiledReading(store, self.grouped, [None] * len(groups), heads, self.shared)
            return reason
        recipes = [
            None if all_of_it or self.reader is None else self.reader.recipe(group.setting)
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
        sharing: the layer's part in sharing choices; None for a reader whose layers all choose.
    """

    reading: Reading
    store: LayerMemory
    lengths: Sequence[DeviceLength] | None = None
    sharing: Sharing | None = None

    def given(self, new: int) -> MadeChoice | None:
        """Return what an anchor has chosen for `new` tokens, if this layer reads that."""
        sharing = self.sharing
        if sharing is None:
            return None
        found = sharing.choices.find(sharing.block, sharing.column, new)
        if found is None or found.layer >= sharing.layer:
            return None
        sizes = None if self.lengths is not None else sizes_of(self.reading.grouped, self.store, new)
        if found.sizes != sizes or self.reading.follow(found, sharing.heads) is None:
            return None
        return found

    def note(self, tokens: list[Entries], new: int) -> None:
        """Let the layers after this one read what it has chosen."""
        self.reading.begun = True
        sharing = self.sharing
        if sharing is not None and any(part is not None for part in tokens[0]):
            sizes = None if self.lengths is not None else sizes_of(self.reading.grouped, self.store, new)
            sharing.choices.add(sharing.block, MadeChoice(sharing.layer, self.reading, sharing.column, sizes, tokens))


_Request = AttentionRequest[ReadRows, None]


def _why_not_c(request: _Request) -> str | None:
    asked = request.asked
    reading = request.stored.reading
    if request.stored.lengths is not None:
        return "the device alone knows the lengths"
    given = request.stored.given(asked.query.shape[2])
    if torch.is_grad_enabled() and asked.query.requires_grad:
        reading.not_compiled = "gradients are on"
    elif given is not None:
        reading.not_compiled = reading.compile(asked, request.stored.store, given)
    else:
        reading.not_compiled = None if reading.compiled is not None else reading.compile(asked, request.stored.store)
    return reading.not_compiled


def _c(request: _Request) -> Tensor:
    stored = request.stored
    reading = stored.reading
    new = request.asked.query.shape[2]
    given = stored.given(new)
    if given is not None:
        assert reading.compiled_shared is not None
        chosen = stacked(given.tokens)
        for group, part in zip(reading.grouped.groups, given.tokens[-1], strict=True):
            if part is not None:
                group.cost = part.numel(), 0, reading.grouped.entries(stored.store, group)
        reading.begun = True
        return reading.compiled_shared.attend(request.asked, stored.store, given=chosen)
    compiled = reading.compiled
    assert compiled is not None
    if stored.sharing is None:
        return compiled.attend(request.asked, stored.store)
    noted = compiled.room_for_choices(new)
    out = compiled.attend(request.asked, stored.store, noted=noted)
    stored.note(compiled.choices(noted, stored.store), new)
    return out


def _by_groups(request: _Request, attend: Callable[[AttentionRequest[KVRows, Choice | None]], Tensor]) -> Tensor:
    """Attend by torch's operations, one token after another."""
    asked = request.asked
    new = asked.query.shape[2]
    given = request.stored.given(new)
    chosen: list[Entries] = []
    if new == 1:
        out = _token_by_groups(asked, request.stored, 0, attend, given, chosen)
        if given is None:
            request.stored.note(chosen, new)
        return out
    for group in request.stored.reading.grouped.groups:
        before = request.stored.reading.grouped.entries(request.stored.store, group) - new
        # Others of these tokens are not to be seen yet.
        if group.known > before and not group.keep_first(before):
            group.state = {}
    tokens = [asked.part(slice(at, at + 1)) for at in range(new)]
    outs = [_token_by_groups(one, request.stored, new - 1 - at, attend, given, chosen) for at, one in enumerate(tokens)]
    if given is None:
        request.stored.note(chosen, new)
    return torch.cat(outs, 2)


def _token_by_groups(
    asked: AttentionQueries,
    stored: ReadRows,
    later: int,
    attend: Callable[[AttentionRequest[KVRows, Choice | None]], Tensor],
    given: MadeChoice | None,
    chosen: list[Entries],
) -> Tensor:
    """Attend with one token, and note the cost of choosing where the host knows the lengths.

    later: newest entries, which it does not see. given: choices of an anchor. chosen: gets the token's entries.
    """
    reading = stored.reading
    lengths = stored.lengths
    grouped = reading.grouped
    reader = reading.reader
    queries = asked.per_kv_row(grouped.heads)
    out: Tensor | None = None
    entries: Entries = []
    before = None
    if given is not None:
        assert reading.shared is not None
        reading.begun = True
        before = reading.shared.apply(given.tokens[len(chosen)])
    for at, (group, all_of_it) in enumerate(zip(grouped.groups, reading.whole, strict=True)):
        kv_rows = grouped.kv_rows(stored.store, group, None if lengths is None else lengths[at], later)
        own = queries if group.kv_rows is None else queries.at(group.kv_rows)
        choice = None
        whole = all_of_it or reader is None
        part = None if before is None else before[at]
        if part is not None:
            choice = Choice(part)
            if lengths is None:
                group.cost = part.numel(), 0, kv_rows.size
        elif reader is not None and not all_of_it:
            choice = reader.choose(own, kv_rows, group.state, group.setting)
            part = choice.entries
            whole = reader.attends_to_all(group.setting)
            if lengths is None:
                group.cost = None if whole else part.numel(), choice.metadata_bytes, kv_rows.size
        entries.append(part)
        if whole:
            choice = None if lengths is not None else Choice(kv_rows.span(0, kv_rows.size))
        found = attend(AttentionRequest(own, kv_rows, choice))
        if group.kv_rows is None:
            out = found
        else:
            out = queries.query.new_empty(*queries.query.shape[:2], found.shape[-1]) if out is None else out
            out[group.kv_rows] = found
    assert out is not None
    chosen.append(entries)
    return out.reshape(*asked.query.shape[:2], 1, -1)


def read_rows(attend: Callable[[AttentionRequest[Any, Any]], Tensor]) -> tuple[Executor, ...]:
    """Return the executors for KV rows under a reader; attend: computes a group."""
    return (
        Executor("C, in one call", _why_not_c, _c),
        Executor("group by group", lambda request: None, lambda request: _by_groups(request, attend)),
    )
