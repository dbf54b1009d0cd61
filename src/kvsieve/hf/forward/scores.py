"""Scores of stored entries, for readers that choose by what they have observed; records of evictors."""

from __future__ import annotations

from kvsieve.errors import CacheStateError
from kvsieve.hf.cache.cache import SieveCache
from kvsieve.hf.cache.layer import SieveLayer
from kvsieve.planning.plans import Plan
from kvsieve.planning.roles import Reader
from kvsieve.types import LayerContext


def forget_scores(cache: SieveCache, plan: Plan) -> None:
    """Let a cache that goes to another plan forget the scores of its own, unless both have the same reader."""
    own = cache.owner.plan
    if own.scores_entries and own.read != plan.read:
        for layer in cache.sieve_layers.values():
            layer.store.forget_scores()


def forget_records(cache: SieveCache, plan: Plan) -> None:
    """Let a cache that goes to another plan forget the records of its own evictor, unless both have the same.

    Records of a cache without an evictor are for the plan that it goes to; see `shared`.
    """
    own = cache.owner.plan.evict
    if own is None or own == plan.evict:
        return
    for layer in cache.sieve_layers.values():
        layer.state = {}
    if not cache.turn.reading:
        cache.turn.rearranged = True


def add_scores(reader: Reader, ctx: LayerContext, layer: SieveLayer) -> None:
    """Add what a reader observes in a pass to the scores of stored entries.

    Raises CacheStateError if entries were stored without.
    """
    store = layer.store
    before = store.size - ctx.query.shape[2]
    if store.score_rows() is None and before > 0:
        raise CacheStateError(
            f"{type(reader).__name__} chooses by what it has observed, and {before} entries were stored under another "
            "plan: prefill the conversation under this one"
        )
    store.add_scores(*reader.observe(ctx))
