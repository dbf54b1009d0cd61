"""Attention of a prompt that skips blocks of keys: the executors for all methods that choose blocks.

The result equals attention under a mask of these blocks, to the precision of the dtype; other blocks are not computed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvsieve import kernels
from kvsieve.attention.request import (
    AttentionRequest,
    ChosenBlocks,
    DenseEntries,
    Executor,
    each_of,
    why_not_learned,
    why_not_weighted,
)
from kvsieve.core.blocks import BlockGrid
from kvsieve.core.softmax import cap, sinks_of
from kvsieve.devices import AVX512_BF16, cpu_kind
from kvsieve.kernels.cpu import prompt as compiled
from kvsieve.types import AttentionQueries

# Logits held at a time, so that they stay near the processor.
_ELEMENTS = 1 << 21

_Request = AttentionRequest[DenseEntries, ChosenBlocks]


def why_not_compiled(asked: AttentionQueries, stored: DenseEntries, grid: BlockGrid) -> str | None:
    """Reason why the C kernel does not compute attention of these; None where it does."""
    if asked.query.device.type != "cpu":
        return "it is for CPUs"
    if not compiled.takes(asked.query, stored.values, grid, asked.scale):
        return "it takes bfloat16, in sizes that fill vectors"
    return why_torch()


def why_torch() -> str | None:
    """Return why torch's operations compute all prompts on this CPU; None where the C kernel computes bfloat16."""
    if cpu_kind() != AVX512_BF16:
        return f"it is for {AVX512_BF16}"
    return compiled.reason()


def _why_not_triton(request: _Request) -> str | None:
    return kernels.why_not(request.asked.query, request.stored.keys, request.stored.values)


def _why_not_c(request: _Request) -> str | None:
    return why_not_compiled(request.asked, request.stored, request.sees.grid)


def _by_lists(attend: Callable[..., Tensor], request: _Request) -> Tensor:
    """Call a kernel with the numbers of the chosen blocks."""
    return attend(request.asked, request.stored.keys, request.stored.values, *_listed(request.sees), request.sees.grid)


def _products(request: _Request) -> Tensor:
    asked = request.asked
    grid = request.sees.grid
    query = asked.query
    keys = request.stored.keys
    values = request.stored.values
    lists, counts = _listed(request.sees)
    batch, query_heads, new, dim = query.shape
    sets = counts.shape[1]
    blocks = grid.query_blocks
    groups = query_heads // sets
    shape = (batch, sets, groups, blocks, grid.queries)
    rows = grid.padded_queries(query).reshape(*shape, dim).transpose(2, 3).reshape(-1, groups * grid.queries, dim)
    sinks = sinks_of(asked, sets, 1, groups, 1)
    if sinks is not None:
        sinks = (
            sinks.expand(batch, sets, blocks, groups, grid.queries).reshape(-1, groups * grid.queries).to(query.dtype)
        )
    items = _Items(rows, *_blocks_of(grid, keys, values), _with_own(grid, lists, keys.shape[1]), grid, asked, sinks)
    out = query.new_empty(*rows.shape[:2], values.shape[-1])
    order = counts.flatten().argsort(descending=True)
    listed = counts.flatten()[order].tolist()
    for first, last in _batches(listed, rows.shape[1] * grid.block, grid.own):
        which = order[first:last]
        out[which] = items.attend(which, listed[first:last])
    out = (
        out.view(batch, sets, blocks, groups, grid.queries, -1)
        .permute(0, 2, 4, 1, 3, 5)
        .reshape(batch, blocks * grid.queries, query_heads, -1)
    )
    return out[:, :new].transpose(1, 2)


@dataclass(frozen=True)
class _Items:
    """Blocks of queries, each an item with the blocks of keys that it attends to.

    Attributes:
        query: [items, rows, D], the queries of all heads that share a set, one head after another.
        keys: [KV rows * blocks of one, block, D].
        values: [KV rows * blocks of one, block, Dv].
        lists: int64 [items, own + key blocks], which of these: those of the diagonal, the chosen ones, the others.
        grid: the blocks.
        asked: the queries that they are part of, for scale and cap.
        sinks: [items, rows], each query's; None for none.
    """

    query: Tensor
    keys: Tensor
    values: Tensor
    lists: Tensor
    grid: BlockGrid
    asked: AttentionQueries
    sinks: Tensor | None

    def attend(self, which: Tensor, counts: list[int]) -> Tensor:
        """Attention [T, rows, Dv] of T items with so many chosen blocks each, the first of them with the most."""
        grid = self.grid
        query = self.query[which]
        rows = query.shape[1]
        width = (grid.own + counts[0]) * grid.block
        lists = self.lists[which, : grid.own + counts[0]]
        keys, values = (part[lists.flatten()].view(len(which), width, -1) for part in (self.keys, self.values))
        more = 0 if self.sinks is None else 1
        padded = query.new_empty(len(which), rows, width + more)
        logits = padded[..., :width]
        torch.baddbmm(logits, query, keys.transpose(1, 2), beta=0, alpha=self.asked.scale, out=logits)
        cap(logits, self.asked)
        later = torch.ones(grid.queries, grid.queries, dtype=torch.bool, device=query.device).triu(1)
        logits[..., : grid.queries].unflatten(1, (-1, grid.queries)).masked_fill_(later, float("-inf"))
        if grid.pad:
            self._hide_before_first(logits, lists)
        for item, count in enumerate(counts):
            if count < counts[0]:
                logits[item, :, (grid.own + count) * grid.block :] = float("-inf")
        if self.sinks is not None:
            padded[..., width] = self.sinks[which]
        return padded.softmax(-1)[..., :width] @ values

    def _hide_before_first(self, logits: Tensor, lists: Tensor) -> None:
        """Mask the places before the first entry in the first block of a KV row."""
        items, places = (lists % self._blocks == 0).nonzero(as_tuple=True)
        for item, place in zip(items.tolist(), places.tolist(), strict=True):
            start = place * self.grid.block
            logits[item, :, start : start + self.grid.pad] = float("-inf")

    @property
    def _blocks(self) -> int:
        """Blocks of a KV row, those of the last diagonal that are not full among them."""
        return self.grid.first + self.grid.query_blocks * self.grid.own


def _blocks_of(grid: BlockGrid, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values by blocks, [KV rows * blocks of one, block, D]."""
    extra = grid.first + grid.query_blocks * grid.own - grid.key_blocks
    parts = (grid.padded_keys(part, extra).view(-1, grid.block, part.shape[-1]) for part in (keys, values))
    return tuple(parts)  # type: ignore[return-value]


def _listed(sees: ChosenBlocks) -> tuple[Tensor, Tensor]:
    """Number the blocks before the diagonal that each row has chosen, in order, then the last; count them: int32."""
    grid = sees.grid
    device = sees.chosen.device
    chosen = sees.chosen & ~grid.diagonal(device) & grid.visible(device)
    blocks = chosen.shape[-1]
    place = chosen.cumsum(-1, dtype=torch.int32)
    # What is not chosen goes to a place of its own.
    at = torch.where(chosen, place - 1, blocks).long()
    numbers = torch.arange(blocks, dtype=torch.int32, device=chosen.device).expand_as(chosen)
    lists = place.new_full((*chosen.shape[:-1], blocks + 1), blocks - 1).scatter_(-1, at, numbers)
    return lists, place[..., -1].contiguous()


def _with_own(grid: BlockGrid, lists: Tensor, heads: int) -> Tensor:
    """See `_Items.lists`."""
    batch, sets, blocks, _ = lists.shape
    items = torch.arange(batch * sets * blocks, device=lists.device)
    own = grid.first + items[:, None] % blocks * grid.own + torch.arange(grid.own, device=lists.device)
    kv_rows = items // blocks // (sets // heads)
    return torch.cat([own, lists.flatten(0, 2)], 1) + (kv_rows * (grid.first + blocks * grid.own))[:, None]


def _batches(counts: list[int], rows: int, own: int) -> Iterator[tuple[int, int]]:
    """Items that go together: their numbers of blocks, in falling order, differ little, and their logits are few."""
    first = 0
    while first < len(counts):
        most = own + counts[first]
        last = first + 1
        limit = max(1, _ELEMENTS // (most * rows))
        while last < len(counts) and last - first < limit and own + counts[last] >= 0.9 * most:
            last += 1
        yield first, last
        first = last


def _why_not_table(request: _Request) -> str | None:
    if request.sees.shared < 2:
        return "query blocks have sets of their own"
    if request.sees.chosen.shape[1] != request.stored.keys.shape[1]:
        return "query heads have sets of their own"
    return None


def _by_table(request: _Request, attend: Callable[..., Tensor]) -> Tensor:
    """Attend densely to gathered blocks, for query blocks that share them."""
    asked = request.asked
    grid = request.sees.grid
    keys = request.stored.keys
    values = request.stored.values
    groups = asked.query.shape[1] // keys.shape[1]
    before = grid.behind(keys.device) < 0
    sets = request.sees.chosen & before
    within = torch.arange(grid.block, device=keys.device) - grid.pad
    own = grid.length - grid.new
    out = asked.query.new_empty(*asked.query.shape[:3], values.shape[-1])
    for first, last in _runs(sets, before, request.sees.shared):
        start = first * grid.queries
        stop = min(last * grid.queries, grid.new)
        for row, head in itertools.product(*map(range, keys.shape[:2])):
            places = (sets[row, head, first].nonzero() * grid.block + within).flatten()
            slots = torch.cat([places[places >= 0], torch.arange(own + start, own + stop, device=keys.device)])
            heads = slice(head * groups, (head + 1) * groups)
            queries = asked.heads(heads).of(asked.query[row, heads, start:stop][None])
            entries = DenseEntries(keys[row, head, slots][None, None], values[row, head, slots][None, None])
            out[row, heads, start:stop] = attend(AttentionRequest(queries, entries))[0]
    return out


def _runs(sets: Tensor, before: Tensor, shared: int) -> Iterator[tuple[int, int]]:
    """Yield the first and the last but one of query blocks that share a set.

    Args:
        sets: bool [B, H, query blocks, key blocks], chosen ones before the diagonal.
        before: bool [query blocks, key blocks], those before the diagonal.
        shared: as in `ChosenBlocks`.
    """
    differs = ((sets[:, :, 1:] != sets[:, :, :-1]) & before[:-1]).flatten(0, 1).any(0).any(-1).tolist()
    starts = [0, *(number for number, other in enumerate(differs, 1) if other or number % shared == 0)]
    yield from itertools.pairwise([*starts, sets.shape[2]])


def chosen_rows(attend: Callable[..., Tensor]) -> tuple[Executor, ...]:
    """Return the executors for chosen blocks; attend: computes attention over gathered ones."""
    return (
        Executor(
            "dense, gathered", each_of(_why_not_table, why_not_weighted), lambda request: _by_table(request, attend)
        ),
        Executor(
            "Triton",
            each_of(why_not_learned, why_not_weighted, _why_not_triton),
            lambda request: _by_lists(kernels.block_attention, request),
        ),
        Executor(
            "C",
            each_of(why_not_learned, why_not_weighted, _why_not_c),
            lambda request: _by_lists(compiled.block_attention, request),
        ),
        Executor("products", why_not_weighted, _products),
    )
