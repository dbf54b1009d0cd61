"""KVMerger: Model Tells You Where to Merge, Adaptive KV Cache Merging for LLMs on Long-Context Tasks (2407.08454).

Consecutive entries with similar keys form merging sets; recent entries and those with the most attention stay alone.
A set becomes one entry at the place of its pivot p, the one with the most attention: its key and value are weighted
means with ``g_i = exp(-|k_p - k_i|^2 / (2 sigma^2))``, ``w_i = g_i / sum g`` and ``g_p = 1``.

Sets follow from the budget: of the cosines between neighbours, as many are joined, from the largest, as entries have to
leave. Cosines below `threshold` join nothing: an entry that one separates from its pivot is dropped.

Differences from the reference (the paper; no public code): sets are given by the budget, there by the threshold, and
the budget follows from it; `sigma` is the mean distance of a set's other entries from its pivot, there it is defined by
the weights it determines; values are means like keys, there they are multiplied by the set's size; attention is the sum
over the queries so far, the group's mean. Keys are rotated ones.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvsieve.core.merging import Parted, collect
from kvsieve.core.runs import claimed, closed_up, links, pivots
from kvsieve.core.selection import top_mask
from kvsieve.errors import PlanError
from kvsieve.lazy import Tensor, torch
from kvsieve.methods.base import ScoredEvictor, check_int, last_real, positions, skips
from kvsieve.methods.h2o import add_mass, mass_now, received_mass
from kvsieve.methods.merged import Merge, Merged, averaged, check_cosine, merge_rule
from kvsieve.planning.budget import Budget
from kvsieve.planning.plans import Plan
from kvsieve.planning.registry import Parameters, register_method
from kvsieve.types import LayerContext

# Entries that stay alone, from the ranks to the merge of the same eviction.
_ALONE = "alone"


@dataclass(frozen=True, kw_only=True)
class MergingSets(ScoredEvictor, heads="own", query_aware=True):
    """Keep the pivots of the most similar runs: ``MergingSets(budget=0.5)``.

    recent, heavy: shares of the budget for the most recent entries, and for those with the most attention, that stay
    alone, together at most 1. sinks: first tokens that stay.
    """

    recent: float = 0.3
    heavy: float = 0.2
    sinks: int = 4

    def __post_init__(self) -> None:
        if not (self.recent >= 0 and self.heavy >= 0 and self.recent + self.heavy <= 1):
            raise PlanError(
                f"{type(self).__name__}: recent and heavy must be shares with a sum of at most 1, got "
                f"{self.recent!r} and {self.heavy!r}"
            )
        check_int(self, "sinks", self.sinks, 0)
        super().__post_init__()

    @property
    def minimum(self) -> int:
        return self.sinks + 2

    @property
    def why_minimum(self) -> str:
        return f"the {self.sinks} sinks, a recent entry and a pivot"

    def observe(self, ctx: LayerContext) -> None:
        if not skips(self.skip_layers, ctx):
            add_mass(ctx, received_mass(ctx))

    def scores(self, ctx: LayerContext) -> Tensor:
        """Return the attention received so far."""
        if "mass" not in ctx.state:
            self.observe(ctx)
        return mass_now(ctx)

    def ranks(self, ctx: LayerContext, kept: tuple[int, ...]) -> Tensor:
        mass = self.scores(ctx)
        room = [max(count - self.sinks, 1) for count in kept]
        recent = last_real(ctx, tuple(max(int(self.recent * count), 1) for count in room))
        must = recent | (positions(ctx) < self.sinks)
        must = must.expand_as(mass) if ctx.protected is None else must | ctx.protected
        free = mass.masked_fill(must, -1) if ctx.valid is None else mass.masked_fill(must | ~ctx.valid, -1)
        heavy = top_mask(free, tuple(int(self.heavy * count) for count in room)) & (free >= 0)
        alone = must | heavy
        ctx.state[_ALONE] = alone
        order = closed_up(ctx)
        link = links(ctx, order, alone)
        leaving = tuple(stored - count for stored, count in zip(ctx.stored, kept, strict=True))
        joined = top_mask(link, leaving) & ~link.isneginf()
        pivot = torch.zeros_like(joined).scatter(2, order, pivots(mass.gather(2, order), joined))
        # Pivots in front of all others.
        return mass.masked_fill(~pivot, -1).masked_fill(alone, float("inf"))


@merge_rule("kvmerger")
@dataclass(frozen=True, kw_only=True)
class KVMerger(Merged, heads="own", query_aware=False):
    """Merge dropped entries into the kept neighbour of the same run of similar keys, with Gaussian weights.

    A kept entry is its run's pivot; runs between two kept entries are cut at the weakest link. threshold: least cosine
    of neighbours in a run, in [-1, 1]; other entries are dropped.
    """

    threshold: float = 0.75

    def __post_init__(self) -> None:
        super().__post_init__()
        check_cosine(self, self.threshold)

    def merge(self, ctx: LayerContext, parted: Parted) -> Merge:
        order = closed_up(ctx)
        stays = (parted.places >= 0).gather(2, order)
        alone = ctx.state.pop(_ALONE, None)
        fixed = parted.fixed if alone is None else parted.fixed | alone
        to = claimed(links(ctx, order, fixed), stays, self.threshold)
        # From places in order to slots, then to places among the kept entries.
        slot = order.gather(2, to.clamp_min(0)).masked_fill(to < 0, -1)
        slot = torch.full_like(slot, -1).scatter_(2, order, slot).gather(2, parted.dropped)
        place = parted.places.gather(2, slot.clamp_min(0)).clamp_min(0)
        joins = parted.merging & (slot >= 0)
        keys, others = parted.keys(ctx)
        apart = others - keys.gather(2, place[..., None].expand_as(others))
        distance = apart.norm(dim=-1).masked_fill(~joins, 0)
        size = keys.shape[2]
        sigma = collect(distance, place, size) / collect(joins.to(distance.dtype), place, size).clamp_min(1)
        share = (-0.5 * (distance / sigma.gather(2, place).clamp_min(1e-12)) ** 2).exp() * joins
        weights = torch.ones_like(sigma), share
        return Merge(averaged((keys, others), weights, place), averaged(parted.values(ctx), weights, place))


@register_method("kvmerger", title="KVMerger", paper="arXiv 2407.08454", phase="end of prompt")
@dataclass(frozen=True, kw_only=True)
class KVMergerParameters(Parameters):
    """Merge runs of consecutive similar entries into the one with the most attention."""

    budget: Budget | str | int | float = "50%"
    recent: float = 0.3
    heavy: float = 0.2
    sinks: int = 4
    threshold: float = 0.75
    skip_layers: int | tuple[int, ...] | str = 0
    every: int | None = None

    def plan(self) -> Plan:
        return Plan(evict=self.role(KVMerger, base=self.role(MergingSets)))
