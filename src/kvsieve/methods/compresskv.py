"""CompressKV: Semantic Retrieval Heads Know What Tokens are Not Important Before Generation (arXiv 2508.02401).

SnapKV with the votes of few heads: in every layer only the query heads that retrieve best score the entries. Their mass
over the last `window` queries is pooled along the sequence and averaged, and all KV heads of the layer keep the same
entries.

Differences from the reference: a profile (`kvsieve calibrate`) has scores per KV head, of attention on copies of the
answer's tokens; the reference's are per query head, of attention on the whole span that has the answer (`heads` takes
such scores, too). With scores per KV head, whole groups vote, as few as have `voters` query heads. Budgets do not
differ between layers; PerLayer takes the layer shares that the reference finds from eviction errors.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from kvsieve.core.scoring import Kernel, Pool, pool, score_dtype, window_mass
from kvsieve.errors import PlanError
from kvsieve.lazy import Tensor, torch
from kvsieve.methods.arrays import check_heads, set_numbers
from kvsieve.methods.base import check_int
from kvsieve.methods.snapkv import SnapKV
from kvsieve.planning.budget import Budget
from kvsieve.planning.plans import Plan
from kvsieve.planning.profiles import Heads, Profile, array_of
from kvsieve.planning.registry import Parameters, register_method
from kvsieve.types import LayerContext


@dataclass(frozen=True, kw_only=True)
class CompressKV(SnapKV, heads="all", query_aware=True):
    """Keep the entries that the best retrieval heads of a layer attend to, the same in all its heads.

    heads: a score per layer and KV head, or per layer and query head, higher for retrieval heads. voters: query heads
    per layer that score entries, at least 1. The rest as in SnapKV.
    """

    heads: Heads = field(repr=False)
    voters: int = 4
    window: int = 8
    kernel: Kernel = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int(self, "voters", self.voters, 1)
        set_numbers(self, "heads", "[layers][heads]")
        if self.per_query_head:
            raise PlanError("CompressKV: all heads of a layer keep the same entries; leave per_query_head out")

    def check_layer(self, index: int, num_layers: int, heads: int, query_heads: int, dim: int) -> None:
        check_heads(self, "scores", self.heads, num_layers, heads, query_heads)

    def voting(self, layer: int, query_heads: int, kv_heads: int) -> list[int]:
        """Return the query heads that score the entries of a layer, ascending."""
        scores = self.heads[layer]
        best = sorted(range(len(scores)), key=lambda head: (-scores[head], head))
        if len(scores) == query_heads:
            return sorted(best[: self.voters])
        group = query_heads // kv_heads
        chosen = best[: -(-self.voters // group)]
        return sorted(head * group + member for head in chosen for member in range(group))

    def context_scores(self, ctx: LayerContext) -> Tensor:
        heads = ctx.keys.shape[1]
        size = ctx.ranks.size
        query_heads = ctx.query.shape[1] * size
        check_heads(self, "scores", self.heads, ctx.num_layers, heads * size, query_heads)
        voters = self.voting(ctx.layer_idx, query_heads, heads * size)
        own = range(query_heads)[ctx.ranks.own(query_heads)]
        local = [head - own.start for head in voters if head in own]
        window = min(self.window, ctx.query.shape[2])
        total = ctx.keys.new_zeros(len(ctx.keys), 1, ctx.keys.shape[2] - window, dtype=score_dtype(ctx.keys.dtype))
        if local:
            pooled = pool(self._mass(ctx, local, window), self.width(ctx), self.pooling, self._valid(ctx))
            total = pooled.sum(1, keepdim=True)
        return (ctx.ranks.mean(total) * (size / len(voters))).expand(-1, heads, -1)

    def _mass(self, ctx: LayerContext, voters: list[int], window: int) -> Tensor:
        """Return the mass [B, voters, M] that query heads give to the entries before the window."""
        group = ctx.query.shape[1] // ctx.keys.shape[1]
        kv = sorted({head // group for head in voters})
        queries = [head * group + member for head in kv for member in range(group)]
        own, rows, chosen = (
            torch.tensor(heads).to(ctx.keys.device, non_blocking=True)
            for heads in (queries, kv, [queries.index(head) for head in voters])
        )
        asked = ctx.asks(ctx.query[:, :, -window:]).heads(own)
        mass = window_mass(asked, ctx.keys.index_select(1, rows), valid=self._valid(ctx))
        return mass[..., :-window].index_select(1, chosen)

    @staticmethod
    def _valid(ctx: LayerContext) -> Tensor | None:
        # All heads store the same tokens.
        return None if ctx.valid is None else ctx.valid[:, :1]


@register_method("compresskv", title="CompressKV", paper="arXiv 2508.02401", phase="end of prompt", part="heads")
@dataclass(frozen=True, kw_only=True)
class CompressKVParameters(Parameters):
    """Keep the entries that a layer's retrieval heads attend to, the same in all heads; needs a model's profile."""

    budget: Budget | str | int | float = "20%"
    profile: Profile | str | os.PathLike[str] | None = None
    voters: int = 4
    window: int = 8
    kernel: Kernel = 5
    pooling: Pool = "avg"
    skip_layers: int | tuple[int, ...] | str = 0
    every: int | None = None

    def plan(self) -> Plan:
        heads, model = array_of("heads", "compresskv", self.profile)
        return Plan(evict=self.role(CompressKV, heads=heads), profile=model)
