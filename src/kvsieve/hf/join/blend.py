"""Prefill of chosen tokens of joined documents, over stored entries of all of them.

All tokens pass the first layers. After those the join chooses, and only chosen tokens continue: in deeper layers their
keys and values replace the stored ones, and they attend to all entries of columns up to their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvsieve.cache import DenseStore
from kvsieve.core.selection import select_top
from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.cache.edits import spans_of
from kvsieve.hf.cache.records import Turn
from kvsieve.hf.edit.entries import LayerEntries
from kvsieve.hf.forward.request import PassRequest
from kvsieve.hf.hooks import propagation_hooks
from kvsieve.hf.runtime import AttachedModel
from kvsieve.planning.joins import SelectiveJoin, Span
from kvsieve.planning.plans import Plan
from kvsieve.planning.roles import Propagator
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
    conversation = cache.conversation
    turn = conversation.turn
    before = conversation.copy()
    start = cache.num_seen
    end = ids.shape[1]
    conversation.turn = Turn(number=turn.number, start=start, prompt_end=end, length=end)
    conversation.protected = None
    chosen = _Chosen({index: part.below(end) for index, part in entries.items()}, join)
    plan = Plan(propagate=chosen, name=model.plan.name)
    handles = [] if model.any_plan else propagation_hooks(model, join.source(model.num_layers))
    try:
        for first in range(start, end, chunk or end):
            last = min(first + (chunk or end), end)
            request = PassRequest(plan, "prefill", last == end, before_attention=chosen.place)
            model.feed(cache, ids[:, first:last], None, request)
    finally:
        for handle in handles:
            handle.remove()
    passed = conversation.propagated[len(before.propagated) :]
    conversation.turn = turn
    conversation.protected = before.protected
    conversation.propagated = before.propagated
    conversation.acted = before.acted
    conversation.prompt_lengths = before.prompt_lengths
    if not passed:
        return [(start, end)]
    marked = torch.zeros(end, dtype=torch.bool)
    marked[passed[-1].columns[0].long().cpu()] = True
    return list(spans_of(marked))


@dataclass(frozen=True, eq=False)
class _Chosen(Propagator, heads="all", query_aware=False):
    """Lets the tokens pass that a join chooses by the change of their entries.

    stored: by layer, entries of all columns before the pass.
    """

    stored: Mapping[int, DenseStore]
    join: SelectiveJoin

    def source(self, num_layers: int) -> int:
        return self.join.source(num_layers)

    def place(self, ctx: LayerContext) -> DenseStore | None:
        """Return the stored entries with the pass's own in place of those of their columns; None: all are the pass's.

        Called before a layer's attention.
        """
        if ctx.layer_idx <= self.source(ctx.num_layers):
            return None
        new = ctx.query.shape[2]
        columns = ctx.index[0, 0, -new:].long()
        ctx.shared["columns"] = columns
        stored = self.stored[ctx.layer_idx]
        keys = stored.keys.index_copy(2, columns, ctx.keys[:, :, -new:])
        values = stored.values.index_copy(2, columns, ctx.values[:, :, -new:])
        return DenseStore.of(keys, values, stored.index, None, stored.lengths)

    def select(self, ctx: LayerContext) -> Selection | None:
        """See Propagator.select; a token's score is the distance of its new entries from those stored before."""
        source = self.source(ctx.num_layers)
        layer = ctx.layer_idx
        if not source <= layer < ctx.num_layers - 1:
            return None
        total = ctx.step.turn_lengths[0]
        count = self.join.tokens(layer, ctx.num_layers, total)
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
