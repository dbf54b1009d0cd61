"""ZeroMerge, later ZSMerge: Zero-Shot KV Cache Compression for Memory-Efficient Long-Context LLMs (2503.10714).

A KV head's budget has three parts: the most recent entries (`tail`), those with the highest scores, and a few merged
slots (`residual`). A score is the attention received, each query's part times `decay` per later token.

At the end of a prompt the remaining entries, in order, form as many groups as there are slots, equally large; each slot
is its group's mean, and weighs as many entries as it has. Later, a dropped entry joins the slot with the largest
product of keys; keys and values are means by weights. The logarithm of a slot's weight is added to its logits.

The defaults of `tail`, `residual` and `decay` are those that the paper's ablation recommends; the public code has 0.1,
one slot, and 0.98.

Differences from the reference: entries dropped together (`every` above 1, later prompts) choose among the slots as they
are before; the entry that leaves the tail can be the one that merges at once; sinks and protected entries are not
merged; a slot has the place of its best entry.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvsieve.core.merging import Parted, best_of_groups, collect, nearest
from kvsieve.core.scoring import group_mean, window_weights
from kvsieve.core.selection import top_mask
from kvsieve.errors import PlanError
from kvsieve.lazy import Tensor, torch
from kvsieve.methods.base import ScoredEvictor, check_int, last_real, positions, skips
from kvsieve.methods.h2o import add_mass, mass_now
from kvsieve.methods.merged import Merge, Merged, averaged, merge_rule
from kvsieve.planning.budget import Budget
from kvsieve.planning.plans import Plan
from kvsieve.planning.registry import Parameters, register_method
from kvsieve.types import LayerContext

_BLOCK = 256
# Queries with a smaller factor than this count for nothing.
_NOTHING = 1e-8
# Tokens of the slots [B, H, R], -1 for none.
_SLOTS = "slots"
# Groups [B, H, N] of the eviction that makes slots.
_GROUPS = "groups"


def decayed_mass(ctx: LayerContext, decay: float) -> tuple[Tensor, Tensor]:
    """Return the attention that entries receive from this pass, decayed, and the factor of earlier passes.

    Returns:
        [B, H, N], the group's mean, and [B, 1, 1].
    """
    new = ctx.query.shape[2]
    first = 0 if decay == 1 else max(0, new - (1 if decay == 0 else math.ceil(math.log(_NOTHING) / math.log(decay))))
    real = torch.ones(ctx.query.shape[0], new, dtype=torch.bool, device=ctx.query.device)
    if ctx.valid is not None:
        real = ctx.valid[:, 0, -new:].expand_as(real)
    later = real.flip(-1).cumsum(-1).flip(-1) - real.long()
    size = ctx.keys.shape[2]
    total: Tensor | None = None
    for start in range(first, new, _BLOCK):
        stop = min(start + _BLOCK, new)
        seen = size - new + stop
        valid, log_weight = (None if part is None else part[:, :, :seen] for part in (ctx.valid, ctx.log_weight))
        asked = ctx.asks(ctx.query[:, :, start:stop])
        done = 0
        for weights in window_weights(asked, ctx.keys[:, :, :seen], valid=valid, log_weight=log_weight):
            factor = torch.pow(decay, later[:, start:stop].to(weights.dtype))
            if total is None:
                total = weights.new_zeros(*weights.shape[:2], size)
            total[..., done : done + weights.shape[-1]] += torch.einsum("bhwn,bw->bhn", weights, factor)
            done += weights.shape[-1]
    assert total is not None
    return group_mean(total, ctx.keys.shape[1]), torch.pow(decay, real.sum(-1).to(total.dtype))[:, None, None]


@dataclass(frozen=True, kw_only=True)
class ThreeParts(ScoredEvictor, heads="own", query_aware=True):
    """Keep the most recent entries, those with the highest decayed attention, and slots for all others.

    tail: share of the budget for the most recent entries, in [0, 1). residual: share of the rest for the slots, in
    [0, 1), at least one. decay: factor of a score per later token, in [0, 1]. sinks: first tokens that are no slots.
    """

    tail: float = 0.5
    residual: float = 0.02
    decay: float = 0.98
    sinks: int = 4

    def __post_init__(self) -> None:
        for name, value in (("tail", self.tail), ("residual", self.residual)):
            if not 0 <= value < 1:
                raise PlanError(f"{type(self).__name__}: {name} must be a share in [0, 1), got {value!r}")
        if not 0 <= self.decay <= 1:
            raise PlanError(f"{type(self).__name__}: decay must be a factor in [0, 1], got {self.decay!r}")
        check_int(self, "sinks", self.sinks, 0)
        super().__post_init__()

    @property
    def minimum(self) -> int:
        return 3

    @property
    def why_minimum(self) -> str:
        return "a recent entry, one with a high score and a slot"

    def observe(self, ctx: LayerContext) -> None:
        if not skips(self.skip_layers, ctx):
            mass, factor = decayed_mass(ctx, self.decay)
            add_mass(ctx, mass, decay=factor)

    def scores(self, ctx: LayerContext) -> Tensor:
        """Return the decayed attention received so far."""
        if "mass" not in ctx.state:
            self.observe(ctx)
        return mass_now(ctx)

    def ranks(self, ctx: LayerContext, kept: tuple[int, ...]) -> Tensor:
        mass = self.scores(ctx)
        tails = tuple(max(1, int(self.tail * count)) for count in kept)
        slots = tuple(max(1, int(self.residual * (count - tail))) for count, tail in zip(kept, tails, strict=True))
        tops = tuple(max(count - tail - own, 0) for count, tail, own in zip(kept, tails, slots, strict=True))
        recent = last_real(ctx, tails).expand_as(mass)
        apart = positions(ctx) < self.sinks
        scores = mass.masked_fill(recent if ctx.valid is None else recent | ~ctx.valid, -1)
        if ctx.protected is not None:
            apart = apart | ctx.protected
            scores = scores.masked_fill(ctx.protected & ~recent, float("inf"))
        top = top_mask(scores, tops)
        merged = is_slot(ctx)
        makes = torch.tensor([count < stored for count, stored in zip(kept, ctx.stored, strict=True)])
        makes = makes.to(mass.device, non_blocking=True)[:, None, None] & ~merged.any(-1, keepdim=True)
        rest = (scores >= 0) & ~top & ~apart & makes
        group = _groups(rest, torch.tensor(slots).to(mass.device, non_blocking=True)[:, None, None])
        best = best_of_groups(mass, group, max(slots))
        self._remember(ctx, best, group, max(slots), makes)
        return mass.masked_fill(rest, -1).masked_fill(recent | merged | best, float("inf"))

    @staticmethod
    def _remember(ctx: LayerContext, best: Tensor, group: Tensor, count: int, makes: Tensor) -> None:
        ctx.state[_GROUPS] = group
        tokens = torch.full((*group.shape[:2], count + 1), -1, dtype=ctx.index.dtype, device=group.device)
        tokens = tokens.scatter_(2, group.masked_fill(~best, count), ctx.index)[..., :count]
        before = ctx.state.get(_SLOTS)
        if before is not None:
            size = max(count, before.shape[2])
            tokens = _widened(tokens, size).where(makes, _widened(before.to(tokens.device), size))
        ctx.state[_SLOTS] = tokens


def _widened(tokens: Tensor, size: int) -> Tensor:
    return torch.nn.functional.pad(tokens, (0, size - tokens.shape[2]), value=-1)


def is_slot(ctx: LayerContext) -> Tensor:
    """Mark the entries that are slots, bool [B, H, N]."""
    slots = ctx.state.get(_SLOTS)
    out = torch.zeros_like(ctx.index, dtype=torch.bool)
    for slot in range(0 if slots is None else slots.shape[2]):
        out |= ctx.index == slots[..., slot : slot + 1]  # type: ignore[index]
    return out & (ctx.index >= 0)


def _groups(rest: Tensor, count: Tensor) -> Tensor:
    """Divide entries in order into groups, the first ones larger by one: int64 [B, H, N], -1 for others."""
    number = rest.sum(-1, keepdim=True)
    size = number // count
    more = number % count
    order = rest.cumsum(-1) - 1
    large = more * (size + 1)
    group = (order // (size + 1)).where(order < large, more + (order - large) // size.clamp_min(1))
    return group.masked_fill(~rest, -1)


@merge_rule("zeromerge")
@dataclass(frozen=True, kw_only=True)
class ZeroMerge(Merged, heads="own", query_aware=False):
    """Merge dropped entries by weights into slots, or, with a base without slots, into the nearest kept entries."""

    def merge(self, ctx: LayerContext, parted: Parted) -> Merge:
        keys = parted.keys(ctx)
        targets = parted.open
        if _SLOTS in ctx.state:
            targets = targets & is_slot(ctx).gather(2, parted.kept)
        alike, place = nearest(keys[1], keys[0], targets, "dot")
        joins = parted.merging & ~alike.isneginf()
        if _GROUPS in ctx.state:
            group = ctx.state.pop(_GROUPS).gather(2, parted.dropped)
            own = self._places(ctx, parted).gather(2, group.clamp_min(0))
            place = own.clamp_min(0).where(group >= 0, place)
            joins = joins & ((group < 0) | (own >= 0))
        weights = parted.weights(ctx)
        weights = weights[0], weights[1] * joins
        total = weights[0] + collect(weights[1], place, parted.kept.shape[2])
        return Merge(averaged(keys, weights, place), averaged(parted.values(ctx), weights, place), total.log())

    @staticmethod
    def _places(ctx: LayerContext, parted: Parted) -> Tensor:
        """Return the place of each slot among the kept entries, int64 [B, H, R], -1 for none."""
        tokens = ctx.index.gather(2, parted.kept).masked_fill(~parted.open, -2)
        same = ctx.state[_SLOTS][..., None] == tokens[:, :, None]
        place = same.to(torch.uint8).argmax(-1)
        return place.masked_fill(~same.any(-1), -1)


@register_method("zeromerge", title="ZeroMerge", paper="arXiv 2503.10714", phase="end of prompt, decode")
@dataclass(frozen=True, kw_only=True)
class ZeroMergeParameters(Parameters):
    """Keep recent and attended entries, and merge all others into a few slots that count as many."""

    budget: Budget | str | int | float = "20%"
    tail: float = 0.5
    residual: float = 0.02
    decay: float = 0.98
    sinks: int = 4
    skip_layers: int | tuple[int, ...] | str = 0
    every: int | None = 1

    def plan(self) -> Plan:
        return Plan(evict=self.role(ZeroMerge, base=self.role(ThreeParts)))
