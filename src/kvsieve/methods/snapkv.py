"""SnapKV: LLM Knows What You Are Looking For Before Generation (arXiv 2404.14469).

The last W queries of the prompt (the observation window) vote for the entries to keep: their softmax mass, summed over
the window, is pooled along the sequence so that neighbours are kept together, then shared by the query heads of a
group. The best entries and the window itself are kept, once, after the layer's own attention, so that prefill is exact.

``paper=True`` is the setting of the paper's LongBench runs: window 32, kernel 7, max pooling; the default is average
pooling, which kept more answers of the calibrated models.

Differences from the reference: one index set per KV head, also with ``paper=True`` (`per_query_head=True` restores one
per query head, which stores G copies); scores stay float32; kept entries in ascending order, ties to the lower
position.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvsieve.core.scoring import Kernel, Pool, Width, pooled_mass, width
from kvsieve.lazy import Tensor, torch
from kvsieve.methods.base import ScoredEvictor, check_int, check_kernel, last_real
from kvsieve.planning import defaults
from kvsieve.planning.registry import register_method
from kvsieve.types import LayerContext


@register_method(
    "snapkv", title="SnapKV", paper="arXiv 2404.14469", phase="end of prompt", derive=defaults.pooling, budget="20%"
)
@dataclass(frozen=True, kw_only=True)
class SnapKV(ScoredEvictor, heads="own", query_aware=True, fixed_counts=True):
    """Keep the entries that the end of the prompt attends to.

    window: W, the observing queries at the prompt's end, always kept, at least 1.
    kernel: odd width of the pooling; a wider one keeps fewer, longer passages. "auto": a sixth of the kept entries, 7
    to 95.
    pooling: "avg" or "max", before the group is shared.
    per_query_head: one set per query head, stored G times; for fidelity to the original code only.
    """

    stays = ("window",)

    window: int = 32
    kernel: Kernel = 7
    pooling: Pool = "avg"
    per_query_head: bool = False

    def __post_init__(self) -> None:
        check_int(self, "window", self.window, 1)
        check_kernel(self, self.kernel)
        super().__post_init__()

    def stored_heads(self, kv_heads: int, query_heads: int) -> int:
        return query_heads if self.per_query_head else kv_heads

    def context_scores(self, ctx: LayerContext) -> Tensor:
        """Return the scores of the entries before the observing queries' own, [B, H or Hq, M]."""
        heads = None if self.per_query_head else ctx.keys.shape[1]
        return pooled_mass(ctx, self.window, self.width(ctx), self.pooling, heads)

    def width(self, ctx: LayerContext) -> Width:
        return width(self.kernel, map(self.budget.entries, ctx.stored))

    def scores(self, ctx: LayerContext) -> Tensor:
        scores = self.context_scores(ctx)
        unseen = ctx.keys.shape[2] - scores.shape[-1]
        if ctx.valid is None and unseen == self.window:
            return torch.nn.functional.pad(scores, (0, unseen), value=float("inf"))
        recent = last_real(ctx, self.window)
        if recent.shape[1] > 1:
            recent = recent.repeat_interleave(scores.shape[1] // recent.shape[1], 1)
        scores = torch.nn.functional.pad(scores, (0, unseen))
        return scores.masked_fill(recent, float("inf"))
