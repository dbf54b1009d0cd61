"""CORM: Cache Optimization with Recent Message for Large Language Model Inference (arXiv 2404.15949).

A key is important to the query of step t if its attention weight is at least 1/t. An entry is evicted once none of the
last `queries` queries found its key important; the `recent` newest entries stay. Heads keep as many entries as that
gives: there is no budget, unless `budget` sets a limit, by which the entries go that were important longest ago.

Differences from the reference: t counts the row's tokens, evicted ones included; a key is important to a group if it is
to one of its query heads; evicts at the end of prompts by the same rule, and after every token; the limit.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvsieve.lazy import Tensor, torch
from kvsieve.methods.base import ScoredEvictor, check_int, last_real, positions, skips
from kvsieve.methods.decoding import carried, limited, weights_by_block
from kvsieve.methods.h2o import moved
from kvsieve.planning.registry import register_method
from kvsieve.types import LayerContext, Selection


@register_method("corm", title="CORM", paper="arXiv 2404.15949", phase="end of prompt, decode", budget="100%")
@dataclass(frozen=True, kw_only=True)
class CORM(ScoredEvictor, heads="own", ragged=True, query_aware=True):
    """Evict entries that no recent query gave an average weight, as many as that gives.

    budget: the most entries per KV head; "100%" for no limit. queries: last queries that count. recent: newest entries,
    always kept.
    """

    stays = ("recent",)

    every: int | None = 1
    queries: int = 256
    recent: int = 256

    def __post_init__(self) -> None:
        check_int(self, "queries", self.queries, 1)
        check_int(self, "recent", self.recent, 1)
        super().__post_init__()

    def select(self, ctx: LayerContext, counts: tuple[int, ...]) -> Selection | None:
        if skips(self.skip_layers, ctx):
            return None
        if "asked" not in ctx.state:
            self.observe(ctx)
        now = torch.tensor(ctx.step.lengths).to(ctx.keys.device, non_blocking=True)[:, None, None]
        # Rows that do not act keep entries, and their records, that are chosen to go here.
        asked = moved(ctx.state["asked"], ctx.state["index"], _index(ctx))
        recent = last_real(ctx, self.recent)
        stays = (asked > now - self.queries) | recent
        # From the newest step on; weights of entries that stay are below.
        age = (asked - now).float().masked_fill(recent, float("inf"))
        return limited(self, ctx, age, stays, counts)

    def observe(self, ctx: LayerContext) -> None:
        """Record, for each entry, the step of the last query to which it was important."""
        if skips(self.skip_layers, ctx):
            return
        index = _index(ctx)
        asked = self._important(ctx)
        known = ctx.state.get("index")
        if known is not None:
            asked = torch.maximum(asked, carried(ctx.state["asked"], known, index))
        ctx.state["asked"], ctx.state["index"] = asked, index.clone()

    def _important(self, ctx: LayerContext) -> Tensor:
        """Return the step of this pass's last query to which each entry is important, int64 [B, H, N]; 0 for none."""
        new = ctx.query.shape[2]
        steps = positions(ctx)[:, :1, -new:] + 1
        found = torch.zeros(ctx.keys.shape[:3], dtype=torch.int64, device=ctx.keys.device)
        for queries, part, weights in weights_by_block(ctx, max(new - self.queries, 0)):
            step = steps[:, :, queries, None]
            important = weights.amax(2) * step >= 1
            found[..., part] = torch.maximum(found[..., part], (important * step).amax(2))
        return found


def _index(ctx: LayerContext) -> Tensor:
    return ctx.index if ctx.valid is None else ctx.index.masked_fill(~ctx.valid, -1)
