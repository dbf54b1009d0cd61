"""Prefill of chosen tokens in one pass, over the stored entries of all columns up to their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvsieve.cache import DenseStore
from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.cache.records import PropagatedTokens, Turn
from kvsieve.hf.forward.request import PassRequest
from kvsieve.hf.hooks import propagation_hooks
from kvsieve.hf.runtime import AttachedModel
from kvsieve.planning.plans import Plan
from kvsieve.planning.roles.drafting import BEFORE
from kvsieve.planning.roles.propagator import Propagator
from kvsieve.types import LayerContext, Selection


@dataclass(frozen=True, eq=False)
class Scattered(Propagator, heads="all", query_aware=False):
    """Lets chosen tokens pass the layers after `source`; their entries there replace stored ones.

    stored: by layer, entries of one row, of the same columns in every head, ascending.
    """

    stored: Mapping[int, DenseStore]

    def place(self, ctx: LayerContext) -> DenseStore | None:
        """Return the stored entries with the pass's own at its columns; None: all are the pass's.

        Called before a layer's attention; the columns are in ``ctx.shared["columns"]`` then.
        """
        if ctx.layer_idx <= self.source(ctx.num_layers):
            return None
        new = ctx.query.shape[2]
        columns = ctx.index[0, 0, -new:]
        ctx.shared["columns"] = columns.long()
        stored = self.stored[ctx.layer_idx]
        index = stored.index[0, 0]
        stays = torch.isin(index, columns, invert=True)
        index, order = torch.cat([index[stays], columns]).sort()
        keys, values = (
            torch.cat([old[:, :, stays], given[:, :, -new:]], 2).index_select(2, order)
            for old, given in ((stored.keys, ctx.keys), (stored.values, ctx.values))
        )
        return DenseStore.of(keys, values, index.expand(1, keys.shape[1], -1), None, (len(index),))


@dataclass(frozen=True, eq=False)
class _Given(Scattered, heads="all", query_aware=False):
    """Lets the tokens of given columns pass all layers. columns: int64 [L], counted from the pass's first one."""

    columns: Tensor

    def source(self, num_layers: int) -> int:
        return BEFORE

    def first_layer(self, num_layers: int, layers: tuple[int, ...] = ()) -> int:
        return BEFORE

    def select(self, ctx: LayerContext) -> Selection | None:
        """See Propagator.select; layers have nothing more to choose."""
        return Selection(self.columns[None].to(ctx.index.device)) if ctx.layer_idx == BEFORE else None


@contextmanager
def beside(cache: SieveCache, turn: Turn) -> Iterator[None]:
    """Let passes run in a turn of their own; the conversation's record is then as before, without that of the passes.

    The number of columns that the cache has seen stays as the passes leave it. After a pass that fails, the cache is
    unusable anyway, so nothing is restored.
    """
    conversation = cache.conversation
    before = conversation.copy()
    own = conversation.turn
    conversation.turn = turn
    conversation.protected = None
    yield
    conversation.turn = own
    conversation.protected = before.protected
    conversation.propagated = before.propagated
    conversation.acted = before.acted
    conversation.prompt_lengths = before.prompt_lengths


def feed_scattered(
    model: AttachedModel, cache: SieveCache, ids: Tensor, chosen: Scattered, chunk: int | None = None
) -> Sequence[PropagatedTokens]:
    """Feed the columns that a cache has not seen, of which chosen ones pass the layers; return those that passed.

    Every layer then has an entry for each of its columns; nothing else of the conversation's record changes.

    Args:
        model: the attached model.
        cache: has the entries of the columns before.
        ids: int64 [1, N], tokens of all columns.
        chosen: the propagator.
        chunk: tokens per forward pass, None for all at once.
    """
    start = cache.num_seen
    end = ids.shape[1]
    source = chosen.source(model.num_layers)
    turn = Turn(number=cache.turn.number, start=start, prompt_end=end, length=end)
    if source == BEFORE:
        # Turns without scores make no choice before the first layer.
        turn.drafted = torch.zeros(1, end - start)
    plan = Plan(propagate=chosen, name=model.plan.name)
    handles: list[Any] = [] if model.any_plan else propagation_hooks(model, source)
    try:
        known = len(cache.conversation.propagated)
        with beside(cache, turn):
            for first in range(start, end, chunk or end):
                last = min(first + (chunk or end), end)
                request = PassRequest(plan, "prefill", last == end, before_attention=chosen.place)
                model.feed(cache, ids[:, first:last], None, request)
            return cache.conversation.propagated[known:]
    finally:
        for handle in handles:
            handle.remove()


def feed_spans(
    model: AttachedModel,
    cache: SieveCache,
    ids: Tensor,
    spans: Sequence[tuple[int, int]],
    stored: Mapping[int, DenseStore],
) -> None:
    """Prefill spans of columns in one pass; each token sees all columns before its own.

    Args:
        model: the attached model.
        cache: has seen the columns before the first span.
        ids: int64 [N], of all columns.
        spans: ascending and half-open.
        stored: by layer, entries of columns before the end of the last span; see `Scattered`.
    """
    start = spans[0][0]
    columns = torch.cat([torch.arange(first, last) for first, last in spans]) - start
    feed_scattered(model, cache, ids[None, : spans[-1][1]], _Given(stored, columns))
