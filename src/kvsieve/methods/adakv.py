"""Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation (arXiv 2407.11550).

A layer's budget is divided among its heads by the best entries of all heads together: a head wins one entry for each of
its own among them. Every head gets a floor, `alpha` of the uniform budget, and a part of the rest in proportion to its
wins; then it keeps its own best. With `normalize` a head's scores are first scaled by the share of them that the
uniform budget would keep. Heads store different numbers of entries. `pyramid=True` is Ada-PyramidKV: PyramidKV's
budgets for layers.

`rule="kvpress"`: no scaling; each head keeps its best ``alpha * budget``, including the window, then the best of all
heads.

Differences from the reference: one set per KV head, with the group's mean taken before pooling; a layer's total is met
to the entry by largest remainders (the original rounds every head and its floor separately, and loses entries); evicted
entries are removed, not masked; a base other than SnapKV may be given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from kvsieve.core.allocation import allocate, winners
from kvsieve.core.checks import refuse
from kvsieve.core.scoring import Kernel, Pool, group_mean, pool, pooled_mass
from kvsieve.core.selection import pack_ragged, top_mask
from kvsieve.errors import PlanError
from kvsieve.lazy import Tensor, torch
from kvsieve.methods.allocators import LayerAllocator
from kvsieve.methods.base import (
    ScoredEvictor,
    apply_protection,
    check_int,
    check_share,
    hide_padding,
    refuse_unused,
    skips,
)
from kvsieve.methods.criticalkv import critical_ranks
from kvsieve.methods.pyramidkv import pyramid_shares
from kvsieve.methods.snapkv import SnapKV
from kvsieve.planning import defaults
from kvsieve.planning.budget import Budget
from kvsieve.planning.plans import Plan
from kvsieve.planning.registry import Parameters, register_method
from kvsieve.planning.roles import Traits
from kvsieve.types import LayerContext, Selection

Rule = Literal["paper", "kvpress"]

# Per row and head: numbers of entries stored, of those that must stay, and of those with score +inf.
_Facts = list[list[list[int]]]


@dataclass(frozen=True, kw_only=True)
class GroupedSnapKV(SnapKV, heads="own", query_aware=True, fixed_counts=True):
    """SnapKV that averages the scores of query heads before pooling; `max` pooling by default."""

    pooling: Pool = "max"

    def context_scores(self, ctx: LayerContext) -> Tensor:
        mass = pooled_mass(ctx, self.window, 1, self.pooling)
        mass = mass if self.per_query_head else group_mean(mass, ctx.keys.shape[1])
        return pool(mass, self.width(ctx), self.pooling, ctx.valid)


@dataclass(frozen=True, kw_only=True)
class AdaKV(LayerAllocator, heads="all", ragged=True, query_aware=False):
    """Divide each layer's budget among its heads by their scores: ``AdaKV(base=SnapKV(budget=0.2))``.

    base: ranks entries and has the budget, the mean over heads; its scores should be comparable between heads, as
    attention is. alpha: part of the budget that every head gets, in [0, 1]; 1 is uniform. normalize: scale scores by
    the share of them within a head's budget. rule: "paper" or "kvpress". pyramid, beta: budgets per layer as in
    PyramidKV. critical: choose within a head's budget as CriticalKV, by scores and norms of projected values.
    """

    base: ScoredEvictor = GroupedSnapKV(budget=Budget(ratio=0.2))
    alpha: float = 0.2
    normalize: bool = True
    rule: Rule = "paper"
    pyramid: bool = False
    beta: int = 20
    critical: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share(self, "alpha", self.alpha)
        check_int(self, "beta", self.beta, 1)
        if not self.pyramid:
            refuse_unused(self, "pyramid=False", "beta")
        if self.rule == "kvpress":
            refuse_unused(self, "rule='kvpress'", "normalize")

    @property
    def traits(self) -> Traits:
        # Heads with different entries cannot be compared slot by slot, as a base that needs all heads does.
        traits = super().traits
        if self.critical:
            traits = replace(traits, needs=tuple(dict.fromkeys(("output_weight", *traits.needs))))
        return traits if self.base.traits.heads == "own" else replace(traits, heads=None)

    def divide(self, layers: Sequence[int], length: int, count: int, floor: int) -> list[int]:
        if not self.pyramid:
            return [count] * len(layers)
        return pyramid_shares(length, count, floor, self.spare, len(layers), self.beta)

    def select(self, ctx: LayerContext, counts: tuple[int, ...]) -> Selection | None:
        if skips(self.skip_layers, ctx):
            return None
        if ctx.step.phase == "decode":
            return self._select_again(ctx, counts)
        fits = [length <= count for length, count in zip(ctx.step.lengths, counts, strict=True)]
        counts = self.layer_counts(ctx, counts)
        whole = [count >= stored for count, stored in zip(counts, ctx.stored, strict=True)]
        # The unused budget of a row that keeps everything is for generated tokens, the same in every head.
        later = ctx.state.pop("allocated")[:, None].expand(-1, ctx.keys.shape[1])
        selection = None
        if not all(whole):
            scores, counts = apply_protection(ctx, hide_padding(ctx, self.base.scores(ctx)), counts)
            budgets = self.head_budgets(ctx.ranks.gather(scores), counts, ctx.shared.setdefault("adakv", []))
            budgets = budgets[:, ctx.ranks.own(budgets.shape[1])]
            even = torch.tensor([one or other for one, other in zip(fits, whole, strict=True)])
            later = _match(later, budgets.shape[1]).where(even[:, None], budgets)
            # No head gets more entries than it has.
            selection = pack_ragged(self._best(ctx, scores, budgets), budgets.tolist())
        ctx.state["heads"] = later.clone()
        return selection

    def _select_again(self, ctx: LayerContext, counts: tuple[int, ...]) -> Selection | None:
        heads = ctx.state.get("heads", torch.tensor(counts)[:, None]).to(ctx.keys.device)
        stored = ctx.valid if ctx.valid is not None else torch.ones_like(ctx.index, dtype=torch.bool)
        if bool((stored.sum(-1) <= heads).all()):
            return None
        scores, _ = apply_protection(ctx, hide_padding(ctx, self.base.scores(ctx)), counts)
        heads = torch.maximum(_match(heads, scores.shape[1]), scores.isposinf().sum(-1))
        return pack_ragged(self._best(ctx, scores, heads) & ~scores.isneginf())

    def _best(self, ctx: LayerContext, scores: Tensor, budgets: Tensor) -> Tensor:
        """Mark the entries that stay, with ``budgets[b, h]`` in a head."""
        return top_mask(critical_ranks(ctx, scores, budgets // 2) if self.critical else scores, budgets)

    def head_budgets(self, scores: Tensor, counts: tuple[int, ...], like: list[_Facts] | None = None) -> Tensor:
        """Return the entries of each head, ``counts[b]`` on average: int64 [B, H], on the host.

        Args:
            scores: [B, H, N], +inf for entries that must stay.
            counts: one number per row.
            like: facts of the previous layer, replaced by this one's. If they are equal, the host waits for the device
                only once.
        """
        facts = torch.stack([~scores.isneginf(), _is_held(scores), scores.isposinf()]).sum(-1)
        known: _Facts = like[-1] if like and scores.device.type != "cpu" else facts.tolist()
        while True:
            totals, rests = self._to_share(counts, known)
            *found, won = torch.cat([facts, self._won(scores, counts, totals, rests)[None]]).tolist()
            if found == known:
                break
            known = found
        if like is not None:
            like[:] = [known]
        if self.rule == "kvpress":
            return torch.tensor(won)
        rows = zip(totals, rests, *known, won, strict=True)
        return torch.tensor([self._divided(*row) for row in rows])

    @staticmethod
    def _to_share(counts: tuple[int, ...], facts: _Facts) -> tuple[list[int], list[int]]:
        """Return the entries of each row, and how many of them its heads win."""
        stored, held, _ = facts
        rows = zip(counts, stored, strict=True)
        totals = [min(count * len(have), sum(have)) for count, have in rows]
        return totals, [max(total - sum(entries), 0) for total, entries in zip(totals, held, strict=True)]

    def _won(self, scores: Tensor, counts: tuple[int, ...], totals: list[int], rests: list[int]) -> Tensor:
        if self.rule == "kvpress":
            safe = top_mask(scores, tuple(int(count * self.alpha) for count in counts)) & ~scores.isneginf()
            return winners(scores.masked_fill(safe, float("inf")), totals)
        free = scores.masked_fill(_is_held(scores), float("-inf"))
        if self.normalize:
            free = self._normalized(free, [rest // scores.shape[1] for rest in rests])
        return winners(free, rests)

    def _divided(
        self, total: int, rest: int, stored: list[int], held: list[int], must: list[int], won: list[int]
    ) -> list[int]:
        if rest == 0:
            # Protected entries leave no room, maybe not even for those that the base always keeps.
            return allocate([1] * len(won), total, must, stored)
        floor = int(rest // len(won) * self.alpha)
        sure = [min(count + floor, most) for count, most in zip(held, stored, strict=True)]
        room = [most - count for most, count in zip(stored, sure, strict=True)]
        needed = [min(int(count == 0), most) for count, most in zip(sure, room, strict=True)]
        parts = allocate(won, total - sum(sure), needed, room)
        return [count + part for count, part in zip(sure, parts, strict=True)]

    def _normalized(self, scores: Tensor, budgets: list[int]) -> Tensor:
        """Multiply scores [B, H, N] by the share of their sum in the best ``budgets[b]`` of each head."""
        absent = scores.isneginf()
        mass = scores.masked_fill(absent, 0)
        refuse((mass < 0).any(), self._negative)
        caught = mass.masked_fill(~top_mask(scores, tuple(budgets)), 0).sum(-1, keepdim=True)
        weight = caught / mass.sum(-1, keepdim=True).clamp_min(torch.finfo(mass.dtype).tiny)
        return (mass * weight).masked_fill(absent, float("-inf"))

    def _negative(self) -> Exception:
        return PlanError(
            f"AdaKV: {type(self.base).__name__} ranks by scores that can be negative, of which no head can catch a "
            "part; set normalize=False, or choose a base that ranks by attention"
        )


def _is_held(scores: Tensor) -> Tensor:
    return scores >= torch.finfo(scores.dtype).max


def _match(per_head: Tensor, heads: int) -> Tensor:
    """Expand [B, 1 or H] to [B, heads], for a base that ranks per query head over a store of KV heads."""
    return per_head.repeat_interleave(heads // per_head.shape[1], 1)


@register_method("adakv", title="Ada-KV", paper="arXiv 2407.11550", phase="end of prompt", derive=defaults.pooling)
@dataclass(frozen=True, kw_only=True)
class AdaKVParameters(Parameters):
    """SnapKV with a budget per head: the best entries of a layer decide how its heads share the budget."""

    budget: Budget | str | int | float = "20%"
    alpha: float = 0.2
    normalize: bool = True
    rule: Rule = "paper"
    pyramid: bool = False
    beta: int = 20
    window: int = 32
    kernel: Kernel = 7
    pooling: Pool = "max"
    skip_layers: int | tuple[int, ...] | str = 0
    every: int | None = None

    def plan(self) -> Plan:
        return Plan(evict=self.role(AdaKV, base=self.role(GroupedSnapKV)))
