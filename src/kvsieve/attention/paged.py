"""Sparse reading by one compiled call per layer: entries are chosen by pages, gathered and attended to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvsieve import kernels
from kvsieve.cache import LayerMemory, RowGroups
from kvsieve.core.page_recipe import PageRecipe, page_table, value_mean
from kvsieve.kernels.cpu import reading as native
from kvsieve.types import AttentionQueries

if TYPE_CHECKING:
    from kvsieve.attention.shared import Correspondence, Entries


def why_not_compiled(query: Tensor, store: LayerMemory, recipes: Sequence[PageRecipe | None]) -> str | None:
    """Reason why KV rows of a store are read by torch's operations; None where the compiled call reads them.

    Args:
        query: of the tokens.
        store: holds them.
        recipes: of each group of KV rows that is not read whole; None for a choice that is not described as data.
    """
    if store.is_encoded:
        return "entries are encoded"
    if store.weight_rows() is not None:
        return "entries have weights"
    keys, values, _ = store.buffers()
    if kernels.why_not(query, keys, values) is None:
        return "Triton's kernels read"
    if keys.device.type != "cpu":
        return f"on {keys.device.type}"
    if keys.dtype not in native.DTYPES or values.dtype != keys.dtype:
        return f"in {keys.dtype}"
    if query.dtype != keys.dtype:
        return f"queries are in {query.dtype}, keys in {keys.dtype}"
    if any(recipe is None for recipe in recipes):
        return "the reader chooses in a way that is not compiled"
    return native.built().reason


def compile_seconds() -> float:
    """Seconds that compiling took in this process; 0 if the compiled file was there."""
    built = native.built()
    return built.seconds if built.compiled and built.seconds is not None else 0.0


class CompiledReading:
    """A layer's KV rows as the compiled call reads them, group by group as they were grouped.

    Args:
        store: holds them; its buffers are looked up at every reading, since they may be replaced.
        grouped: the KV rows.
        recipes: of each group, None where all of it is read.
        query_heads: of the layer.
        shared: how an anchor's choices apply, which are read in place of own ones; None to choose.
    """

    def __init__(
        self,
        store: LayerMemory,
        grouped: RowGroups,
        recipes: Sequence[PageRecipe | None],
        query_heads: int,
        shared: Correspondence | None = None,
    ) -> None:
        keys = store.buffers()[0]
        self.grouped = grouped
        self.recipes = tuple(recipes)
        self._groups = query_heads // grouped.heads
        total = sum(len(group.row) for group in grouped.groups)
        newest = any(recipe is not None and recipe.newest for recipe in recipes)
        self._job = native.RowJob(total, self._groups, *store.dims, newest=newest, dtype=keys.dtype)
        self._where: tuple[int, int, int] | None = None
        # Of each group: its first KV row here, and where its table and its sums lie.
        self._starts = [sum(len(group.row) for group in grouped.groups[:at]) for at in range(len(grouped.groups))]
        self._tables: list[tuple[int, int, int] | None] = [None] * len(grouped.groups)
        # Entries of each KV row that an anchor has chosen.
        self._given = -1
        self._shared = shared
        self._fill()

    def room_for_choices(self, new: int) -> Tensor:
        """Return an empty int64 [X, L, k] for the entries that all KV rows choose for L tokens."""
        most = max((recipe.count for recipe in self.recipes if recipe is not None), default=0)
        return torch.empty(len(self._job.rows), new, most, dtype=torch.int64)

    def choices(self, noted: Tensor, store: LayerMemory) -> list[Entries]:
        """Return the chosen entries of each token and group, of those that `attend` has noted."""
        new = noted.shape[1]
        found: list[Entries] = []
        for at in range(new):
            parts: Entries = []
            for start, group, recipe in zip(self._starts, self.grouped.groups, self.recipes, strict=True):
                if recipe is None:
                    parts.append(None)
                    continue
                count = min(recipe.count, self.grouped.entries(store, group) - new + 1 + at)
                parts.append(noted[start : start + len(group.row), at, :count])
            found.append(parts)
        return found

    def attend(
        self,
        asked: AttentionQueries,
        store: LayerMemory,
        given: Tensor | None = None,
        noted: Tensor | None = None,
    ) -> Tensor:
        """Attend with the last L stored tokens, each after the one before: queries [B, Hq, L, D] -> [B, Hq, L, Dv].

        Args:
            asked: the queries.
            store: holds the entries.
            given: int64 [X', L, k], entries that the anchor's KV rows chose; needed with `shared`.
            noted: int64 [X, L, k], gets the entries that are chosen.
        """
        batch, query_heads, new = asked.query.shape[:3]
        self._follow(store)
        for at, recipe in enumerate(self.recipes):
            if recipe is not None:
                self._take_in(at, recipe, store, new)
        sinks = asked.sinks
        if sinks is not None:
            sinks = sinks.view(self.grouped.heads, -1).repeat(batch, 1).float().contiguous()
        more = (store.size - self.grouped.stored) // self.grouped.stride
        if given is not None:
            self._read_given(given.shape[-1])
        out = self._job.run(asked.query.contiguous(), more, asked.scale, asked.softcap, sinks, given, noted)
        return out.view(batch, query_heads, new, -1)

    def _fill(self) -> None:
        """Fill in the facts that stay fixed during an answer."""
        for start, group, recipe in zip(self._starts, self.grouped.groups, self.recipes, strict=True):
            numbers = range(len(group.row)) if group.kv_rows is None else group.kv_rows.tolist()
            body = group.body
            if body is not None and not body.is_contiguous():
                body = group.body = body.contiguous()
            for at, (number, tail) in enumerate(zip(numbers, group.tail.tolist(), strict=True)):
                row = self._job.rows[start + at]
                row.number = number
                row.tail = tail
                row.stride = self.grouped.stride
                row.size = group.size
                if body is not None:
                    row.kept, row.body = body.shape[1], body[at].data_ptr()
                row.place = start + at if recipe is not None else -1
                if recipe is not None:
                    row.page = recipe.page
                    row.channels = recipe.channels
                    row.count = recipe.count

    def _read_given(self, count: int) -> None:
        """Tell the KV rows where they find what an anchor has chosen for them, `count` entries each."""
        shared = self._shared
        if count == self._given or shared is None:
            return
        self._given = count
        parts = zip(self._starts, self.grouped.groups, shared.places, shared.rows, shared.entries, strict=True)
        for (start, group, first, rows, entries), whole in zip(parts, shared.source.whole, strict=True):
            if whole:
                continue
            places = range(len(group.row)) if rows is None else rows.tolist()
            for at, place in enumerate(places):
                row = self._job.rows[start + at]
                row.place = first + place
                row.count = count
                if entries is not None:
                    row.map, row.mapped = entries[at].data_ptr(), entries.shape[1]

    def _follow(self, store: LayerMemory) -> None:
        """Update the addresses of keys and values if they have changed."""
        keys, values, _ = store.buffers()
        where = keys.data_ptr(), values.data_ptr(), store.capacity
        if where == self._where:
            return
        self._where = where
        for start, group in zip(self._starts, self.grouped.groups, strict=True):
            for at, row in enumerate(group.row.tolist()):
                row_fields = self._job.rows[start + at]
                for name, buffer in (("keys", keys), ("values", values)):
                    step = store.capacity * buffer.shape[-1] * buffer.element_size()
                    setattr(row_fields, name, buffer.data_ptr() + row * step)

    def _take_in(self, at: int, recipe: PageRecipe, store: LayerMemory, new: int) -> None:
        """Bring a group's metadata up to the `new` newest entries, which the kernel takes in, and make room."""
        group = self.grouped.groups[at]
        size = self.grouped.entries(store, group)
        table = page_table(group.state, recipe.page)
        mean = value_mean(group.state) if recipe.blend else None
        parts = (table,) if mean is None else (table, mean)
        if new > 1 and max(part.size for part in parts) > size - new:
            # Others of these tokens are not to be seen yet.
            group.keep_first(size - new)
        take = size - table.size
        behind = mean is not None and mean.size != table.size
        if behind or not table.size or take > new + recipe.page:
            kv_rows = self.grouped.kv_rows(store, group, later=new if new > 1 else 0)
            table.update(kv_rows)
            if mean is not None:
                mean.update(kv_rows, torch.float32)
            take = size - kv_rows.size
        if take:
            table.make_room(size)
            if mean is not None and new > 1:
                mean.remember()
            for part in parts:
                part.count_in(take)
        fields = table.buffer.data_ptr(), 0 if mean is None else mean.sum.data_ptr(), take
        if fields != self._tables[at]:
            self._tables[at] = fields
            self._address(at, table.buffer, None if mean is None else mean.sum, take)

    def _address(self, at: int, table: Tensor, total: Tensor | None, take: int) -> None:
        step = table.stride(0) * table.element_size()
        for number in range(len(self.grouped.groups[at].row)):
            row = self._job.rows[self._starts[at] + number]
            row.table = table.data_ptr() + number * step
            row.capacity = table.shape[-1]
            row.take = take
            if total is not None:
                row.sum = total.data_ptr() + number * total.stride(0) * total.element_size()
