"""Prefill of chosen tokens of joined documents, over stored entries of all of them.

All tokens pass the first layers. After those the join chooses, and only chosen tokens continue: in deeper layers their
keys and values replace the stored ones, and they attend to all entries of columns up to their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvsieve.core.selection import select_top
from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.cache.edits import spans_of
from kvsieve.hf.edit.entries import LayerEntries
from kvsieve.hf.edit.scattered import Scattered, feed_scattered
from kvsieve.hf.runtime import AttachedModel
from kvsieve.planning.joins import SelectiveJoin, Span
from kvsieve.types import LayerContext, Selection


def why_not_blended(model: AttachedModel) -> str | None:
    """Return a clause why chosen tokens cannot be prefilled over stored entries of others, or None."""
    plan = model.plan
    if model.new_cache().producers:
        return "the model has layers that share the entries of another one"
    if plan.evict is not None and (plan.evict.when.chunks or not (plan.query_aware or plan.is_view)):
        return f"{plan.name} evicts entries of each document alone, and the join compares those of all tokens"
    return None


def prefill_chosen(
    model: AttachedModel,
    cache: SieveCache,
    ids: Tensor,
    entries: Mapping[int, LayerEntries],
    join: SelectiveJoin,
    chunk: int | None = None,
) -> list[Span]:
    """Prefill columns again: all in the first layers, those that the join chooses in the others.

    Every layer then stores an entry of each column; nothing else of the conversation's record changes. Returns the
    columns that reached the last layer.

    Args:
        model: the attached model, under a plan without a propagator.
        cache: has the entries of the columns before the first one that is prefilled again.
        ids: int64 [1, N], tokens of all columns; those that the cache has not seen are prefilled.
        entries: by layer, of all columns in every head.
        join: chooses.
        chunk: tokens per forward pass, None for all at once.
    """
    start = cache.num_seen
    end = ids.shape[1]
    stored = {index: part.below(end) for index, part in entries.items()}
    passed = feed_scattered(model, cache, ids, _Chosen(stored, join), chunk)
    if not passed:
        return [(start, end)]
    marked = torch.zeros(end, dtype=torch.bool)
    marked[passed[-1].columns[0].long().cpu()] = True
    return list(spans_of(marked))


@dataclass(frozen=True, eq=False)
class _Chosen(Scattered, heads="all", query_aware=False):
    """Lets the tokens pass that a join chooses by the change of their entries."""

    join: SelectiveJoin

    def source(self, num_layers: int) -> int:
        return self.join.source(num_layers)

    def select(self, ctx: LayerContext) -> Selection | None:
        """See Propagator.select; a token's score is the distance of its new entries from those stored before."""
        source = self.source(ctx.num_layers)
        layer = ctx.layer_idx
        if not source <= layer < ctx.num_layers - 1:
            return None
        count = self.join.tokens(layer, ctx.num_layers, ctx.step.turn_lengths[0])
        if count >= ctx.offered:
            return None
        columns = ctx.index[0, 0, -ctx.offered :].long() if layer == source else ctx.shared["columns"]
        stored = self.stored[layer]
        squares = torch.zeros(columns.shape[0], device=columns.device)
        for new, old in ((ctx.keys, stored.keys), (ctx.values, stored.values)):
            slots = slice(new.shape[2] - ctx.offered, None) if layer == source else columns
            change = new[0, :, slots].float() - old[0].index_select(1, columns).float()
            squares = squares + change.square().sum(-1).mean(0)
        return select_top(ctx.ranks.mean(squares)[None], (count,))
