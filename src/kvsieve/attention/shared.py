"""Choices that layers of one forward pass share: an anchor's chosen entries, read by the layers after it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kvsieve.cache import LayerMemory, RowGroups
from kvsieve.cache.entry_tokens import entries_of_tokens
from kvsieve.cache.row_groups import Group


class RowReading(Protocol):
    """A way of reading a layer's KV rows; see reading.Reading."""

    @property
    def grouped(self) -> RowGroups: ...

    @property
    def whole(self) -> tuple[bool, ...]: ...


# Entries of each group of KV rows, [X, k] or [X, G, k]; None for a group that is read whole.
Entries = list[Tensor | None]


@dataclass
class MadeChoice:
    """The choices of an anchor for consecutive tokens of a pass.

    Attributes:
        layer: index of the anchor.
        reading: the anchor's.
        column: of the first token in the pass.
        sizes: entries of each group for the first token; None if only the device knows them.
        tokens: entries for each token.
    """

    layer: int
    reading: RowReading
    column: int
    sizes: tuple[int, ...] | None
    tokens: list[Entries]


class SharedChoices:
    """The choices of one forward pass, by the block of layers that share them."""

    def __init__(self) -> None:
        self._made: dict[int, list[MadeChoice]] = {}

    def add(self, block: int, made: MadeChoice) -> None:
        """Add an anchor's choices; earlier ones for the same columns are replaced."""
        end = made.column + len(made.tokens)
        before = self._made.get(block, [])
        self._made[block] = [
            one for one in before if one.column + len(one.tokens) <= made.column or one.column >= end
        ] + [made]

    def find(self, block: int, column: int, new: int) -> MadeChoice | None:
        """Return the choices for `new` tokens from a column on, if one anchor made them with one reading."""
        found: MadeChoice | None = None
        for choice in sorted(self._made.get(block, ()), key=lambda one: one.column):
            first = max(column - choice.column, 0)
            tokens = choice.tokens[first : column + new - choice.column] if column + new > choice.column else []
            if not tokens:
                continue
            if found is None and choice.column <= column:
                sizes = None if choice.sizes is None else tuple(size + first for size in choice.sizes)
                found = MadeChoice(choice.layer, choice.reading, column, sizes, list(tokens))
            elif found is not None and choice.reading is found.reading:
                found.tokens += tokens
            else:
                return None
        return found if found is not None and len(found.tokens) == new else None


@dataclass
class Sharing:
    """One layer's part in sharing.

    Attributes:
        choices: of the pass.
        layer: its index.
        block: the anchor of the layer, by which choices are found.
        column: of the first token in the pass.
        heads: for each KV head, the anchor's head that chooses for it; None for the same.
    """

    choices: SharedChoices
    layer: int
    block: int
    column: int
    heads: tuple[int, ...] | None


@dataclass
class Correspondence:
    """The entries of a layer that correspond to those of its anchor.

    Attributes:
        source: the anchor's reading.
        rows: for each group, int64 [X], the anchor's KV row in that group for each; None for the same.
        entries: for each group, int64 [X, N], entries for each of the anchor's first N; None for the same. Later
            entries stay the same.
        places: number of KV rows of each group before it, of those that are not read whole.
    """

    source: RowReading
    rows: list[Tensor | None]
    entries: list[Tensor | None]
    places: list[int] = field(default_factory=list)

    def apply(self, chosen: Entries) -> Entries:
        """Return the chosen entries of each group in this layer."""
        return [
            None if part is None else _moved(part if rows is None else part[rows], table)
            for part, rows, table in zip(chosen, self.rows, self.entries, strict=True)
        ]


def _moved(entries: Tensor, table: Tensor | None) -> Tensor:
    if table is None:
        return entries
    size = table.shape[1]
    moved = table.gather(1, entries.clamp(max=size - 1).flatten(1)).view(entries.shape)
    return torch.where(entries < size, moved, entries)


def sizes_of(grouped: RowGroups, store: LayerMemory, new: int) -> tuple[int, ...]:
    """Return the entries of each group for the first of the last `new` tokens."""
    return tuple(grouped.entries(store, group) - new + 1 for group in grouped.groups)


def correspondence(source: RowReading, reading: RowReading, heads: tuple[int, ...] | None) -> Correspondence | None:
    """Return how another layer's choices apply, or None if its KV rows are grouped in another way."""
    anchors = source.grouped
    own = reading.grouped
    if anchors.heads != own.heads or source.whole != reading.whole or len(anchors.groups) != len(own.groups):
        return None
    pairs = list(zip(anchors.groups, own.groups, strict=True))
    if any(before.tokens is None or after.tokens is None or not _same_rows(before, after) for before, after in pairs):
        return None
    found = Correspondence(source, [], [])
    place = 0
    for (before, after), whole in zip(pairs, reading.whole, strict=True):
        rows = None if heads is None else _rows_of_heads(before, own.heads, heads)
        assert before.tokens is not None and after.tokens is not None
        found.rows.append(rows)
        found.entries.append(None if whole else entries_of_tokens(before.tokens.rows(rows), after.tokens))
        found.places.append(place)
        place += 0 if whole else len(after.row)
    return found


def _same_rows(before: Group, after: Group) -> bool:
    if before.kv_rows is None or after.kv_rows is None:
        return before.kv_rows is after.kv_rows and len(before.row) == len(after.row)
    return torch.equal(before.kv_rows, after.kv_rows)


def _rows_of_heads(group: Group, heads: int, of: tuple[int, ...]) -> Tensor:
    """Return the position in a group of the KV row that chooses for each: all heads of a batch row are in one group."""
    numbers = torch.arange(len(group.row), device=group.row.device) if group.kv_rows is None else group.kv_rows
    wanted = numbers // heads * heads + torch.tensor(of, device=numbers.device)[numbers % heads]
    return torch.searchsorted(numbers, wanted)


def stacked(tokens: list[Entries]) -> Tensor:
    """Return int64 [X, L, k], contiguous: the entries of all groups that are not read whole, for each of L tokens."""
    groups = [[part for part in one if part is not None] for one in tokens]
    if len(groups) == 1 and len(groups[0]) == 1:
        return groups[0][0][:, None].contiguous()
    width = max(part.shape[-1] for one in groups for part in one)
    return torch.stack([torch.cat([F.pad(part, (0, width - part.shape[-1])) for part in one]) for one in groups], 1)
