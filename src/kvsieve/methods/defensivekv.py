"""DefensiveKV: Taming the Fragility of KV Cache Eviction in LLM Inference (arXiv 2510.13334).

The importance of an entry is its largest attention in the observation window, not its mean. A query's attention to the
entries before the window is pooled along the sequence and scaled to its former sum. An entry's risk is its maximum over
the W queries and the query heads of a group, and no less than the mean risk of the head's entries. The score is the
risk times w, the L1 norm of the value after the output projection, averaged over the group and divided by its sum over
the layer's KV heads (CriticalKV, arXiv 2502.03805).

Entries of a first stage get the layer's largest score: a head's best by mean attention, while their part of it stays
below 0.9 minus the attention to the W entries before the window, averaged over heads. They are at most ``c (n - W) / n
- W``, for a budget of c of n entries. The best entries of all heads of a layer stay, so that heads keep different
numbers; with `across_layers` those of all layers together (Layer-DefensiveKV), which store everything until the last
layer is prefilled.

Differences from the reference (the public code, FFY0/DefensiveKV): scores stay float32; the window's own entries always
stay, there they have the layer's largest score; ties go to the lower layer, head and slot; a layer's total is the
budget times its heads. On a later turn heads store different tokens, and w is divided by the mean over those that store
the token, times all heads; the reference evicts once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvsieve.core.scoring import Kernel, Pool, group_mean, mass_of, pool, score_dtype
from kvsieve.core.selection import best_of_layers, pack_ragged
from kvsieve.lazy import Tensor, torch
from kvsieve.methods.allocators import RaggedAllocator
from kvsieve.methods.base import (
    ScoredEvictor,
    apply_protection,
    at_entries,
    by_token,
    check_share,
    hide_padding,
    last_real,
    per_head,
    skips,
)
from kvsieve.methods.criticalkv import projected_norm
from kvsieve.methods.snapkv import SnapKV
from kvsieve.planning.budget import Budget
from kvsieve.planning.plans import Plan
from kvsieve.planning.registry import Parameters, register_method
from kvsieve.planning.roles import Traits
from kvsieve.types import LayerContext, Selection

_STATE = "defensivekv"


@dataclass(frozen=True, kw_only=True)
class DefensiveScores(SnapKV, needs=("output_weight",), query_aware=True):
    """Rank entries by their largest attention from the last `window` queries, times the norm of projected values.

    mass: part of a head's attention that the first stage may have, in [0, 1]. The rest as in SnapKV.
    """

    kernel: Kernel = 5
    mass: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share(self, "mass", self.mass)

    def context_scores(self, ctx: LayerContext) -> Tensor:
        heads = ctx.query.shape[1] if self.per_query_head else ctx.keys.shape[1]
        before = ctx.keys.shape[2] - min(self.window, ctx.query.shape[2])
        if not before:
            return ctx.keys.new_zeros(len(ctx.keys), heads, 0, dtype=score_dtype(ctx.keys.dtype))
        recent = last_real(ctx, self.window)[..., :before]
        context = ~recent if ctx.valid is None else ctx.valid[..., :before] & ~recent
        risk, mean = self._risk_and_mean(ctx, context, heads)
        context = per_head(context, heads)
        prior = risk.sum(-1, keepdim=True) / context.sum(-1, keepdim=True).clamp_min(1)
        scores = torch.maximum(risk, prior) * _relative_norm(ctx, heads)[..., :before]
        scores = scores.masked_fill(~context, 0)
        nearby = context & per_head(last_real(ctx, 2 * self.window)[..., :before], heads)
        first = self._first_stage(ctx, mean, self.mass - (mean * nearby).sum(-1).mean(1))
        return scores.where(~first, scores.amax((1, 2), keepdim=True))

    def _risk_and_mean(self, ctx: LayerContext, context: Tensor, heads: int) -> tuple[Tensor, Tensor]:
        """Return the largest pooled and the mean attention of the window's queries, [B, heads, N - w] each.

        context: bool [B or 1, 1 or H, N - w], False for padding and entries that stay in any case.
        """
        count = ctx.query.shape[2]
        window = min(self.window, count)
        width = self.width(ctx)
        shown = per_head(context, ctx.query.shape[1])
        before = shown.shape[-1]
        risk = total = None
        # Query by query, so that memory does not grow with the window.
        for at in range(count - window, count):
            mass = mass_of(ctx, at, at + 1)[..., :before] * shown
            pooled = pool(mass, width, self.pooling, ctx.valid) * shown
            least = torch.finfo(pooled.dtype).tiny
            pooled *= mass.sum(-1, keepdim=True) / pooled.sum(-1, keepdim=True).clamp_min(least)
            largest = pooled.unflatten(1, (heads, -1)).amax(2)
            risk = largest if risk is None else torch.maximum(risk, largest)
            total = mass if total is None else total + mass
        assert risk is not None and total is not None
        if ctx.valid is None:
            return risk, group_mean(total, heads) / window
        return risk, group_mean(total, heads) / ctx.valid[:, :1, -window:].sum(-1, keepdim=True).clamp_min(1)

    def _first_stage(self, ctx: LayerContext, mean: Tensor, target: Tensor) -> Tensor:
        """Mark each head's best entries with less than `target` [B] of its attention together, bool [B, heads, M]."""
        sums = mean.sum(-1, keepdim=True).clamp_min(torch.finfo(mean.dtype).tiny)
        share, order = (mean / sums).sort(dim=-1, descending=True, stable=True)
        # Before the division, a row's share of the budget without the window.
        rooms = [
            self.budget.entries(length, self.minimum) * max(length - self.window, 0) // max(length, 1) - self.window
            for length in ctx.step.lengths
        ]
        room = torch.tensor(rooms).to(mean.device, non_blocking=True)[:, None, None]
        taken = (share.cumsum(-1) < target[:, None, None]) & (share > 0)
        taken &= torch.arange(share.shape[-1], device=mean.device) < room
        return torch.zeros_like(taken).scatter(-1, order, taken)


def _relative_norm(ctx: LayerContext, heads: int) -> Tensor:
    """Return the norm of each projected value over its sum in the layer's heads, [B, heads, N]."""
    norm = projected_norm(ctx)
    norm = norm if norm.shape[1] == heads else group_mean(norm, heads)
    real = torch.ones_like(norm, dtype=torch.bool)
    if ctx.valid is not None:
        real = per_head(ctx.valid, heads).expand_as(norm)
    norm = norm.masked_fill(~real, 0)
    # Heads may store different tokens.
    stored = by_token(ctx, real.to(norm.dtype)).sum(1, keepdim=True)
    total = by_token(ctx, norm).sum(1, keepdim=True) * (heads / stored.clamp_min(1))
    return norm / at_entries(ctx, total, heads).clamp_min(torch.finfo(norm.dtype).tiny)


@dataclass(frozen=True, kw_only=True)
class DefensiveKV(RaggedAllocator, query_aware=True):
    """Keep the best entries of all heads of a layer together: ``DefensiveKV(base=DefensiveScores(budget=0.2))``.

    base: ranks entries and has the budget, the mean over heads and layers. across_layers: compare the entries of all
    layers, too.
    """

    base: ScoredEvictor = DefensiveScores(budget=Budget(ratio=0.2))
    across_layers: bool = False

    @property
    def traits(self) -> Traits:
        return replace(super().traits, recuts=self.across_layers)

    def select(  # type: ignore[override]
        self, ctx: LayerContext, counts: tuple[int, ...]
    ) -> Selection | dict[int, Selection] | None:
        if skips(self.skip_layers, ctx):
            return None
        if ctx.step.phase == "decode":
            return self.select_again(ctx, counts)
        whole = [length <= count for length, count in zip(ctx.step.lengths, counts, strict=True)]
        # The unused budget of a row that keeps everything is for generated tokens, the same in every head.
        ctx.state["heads"] = torch.tensor(counts)[:, None].repeat(1, ctx.keys.shape[1])
        if all(whole):
            return None
        scores = apply_protection(ctx, hide_padding(ctx, self.base.scores(ctx)), counts)[0]
        seen = ctx.shared.setdefault(_STATE, {}) if self.across_layers else {}
        seen[ctx.layer_idx] = (ctx.ranks.gather(scores), scores.shape[2]), ctx.state
        if self.across_layers and len(seen) < len(self.acting(ctx)):
            return None
        masks = best_of_layers({index: layer for index, (layer, _) in seen.items()}, counts, ctx.ranks)
        chosen = {}
        for index, mask in masks.items():
            heads = mask.sum(-1).tolist()
            state = seen[index][1]
            state["heads"] = torch.tensor(
                [known if fits else row for known, fits, row in zip(state["heads"].tolist(), whole, heads, strict=True)]
            )
            if any(count < mask.shape[-1] for row in heads for count in row):
                chosen[index] = pack_ragged(mask, heads)
        return chosen


@register_method("defensivekv", title="DefensiveKV", paper="arXiv 2510.13334", phase="end of prompt")
@dataclass(frozen=True, kw_only=True)
class DefensiveKVParameters(Parameters):
    """Keep the entries with the largest attention of any last query, weighted by value norm; heads share a budget."""

    budget: Budget | str | int | float = "20%"
    across_layers: bool = False
    mass: float = 0.9
    window: int = 32
    kernel: Kernel = 5
    pooling: Pool = "avg"
    skip_layers: int | tuple[int, ...] | str = 0
    every: int | None = None

    def plan(self) -> Plan:
        return Plan(evict=self.role(DefensiveKV, base=self.role(DefensiveScores)))
