"""SAGE-KV: LLMs Know What to Drop: Self-Attention Guided KV Cache Eviction (arXiv 2503.08879).

The prompt consists of sinks, an evictable middle, and a recent window that ends with the last token. The last token's
query ranks the middle once, by softmax mass per KV head, group mean. Sinks, window and the best of the middle stay.
With `every` the window rolls during decode: sinks and chosen entries stay, the window's oldest are evicted, memory is
constant.

Differences from the reference: its split between window and middle is not known to us, `recent` takes half of the
budget; the last token is part of the window; ties to the lower position; padded batches.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvsieve.core.scoring import group_mean, mass_of
from kvsieve.lazy import Tensor, torch
from kvsieve.methods.base import ScoredEvictor, check_int, check_share, first_real, keep_best, last_real, skips
from kvsieve.planning.registry import register_method
from kvsieve.types import LayerContext, Selection


@register_method("sagekv", title="SAGE-KV", paper="arXiv 2503.08879", phase="end of prompt", budget="20%")
@dataclass(frozen=True, kw_only=True)
class SageKV(ScoredEvictor, heads="own", query_aware=True):
    """Keep sinks, recent tokens and those the last token attends to; `every` rolls the window while decoding.

    sinks: first tokens, always kept, at least 0. recent: share of the budget for the most recent entries, in [0, 1];
    the last token stays in any case. every: roll the window each time this many tokens have been generated.
    """

    sinks: int = 4
    recent: float = 0.5

    def __post_init__(self) -> None:
        check_int(self, "sinks", self.sinks, 0)
        check_share(self, "recent", self.recent)
        super().__post_init__()

    @property
    def window(self) -> int:
        return 1

    @property
    def minimum(self) -> int:
        return self.sinks + 2

    @property
    def why_minimum(self) -> str:
        return f"{self.sinks} sinks, one entry and the last token"

    def select(self, ctx: LayerContext, counts: tuple[int, ...]) -> Selection | None:
        if self.every is not None and ctx.step.ends_prompt and not skips(self.skip_layers, ctx):
            outside = ~self._window(ctx, counts)
            # Columns of the window's first entries, [B, H]: entries before them are kept permanently.
            columns = ctx.index.long().masked_fill(outside, torch.iinfo(torch.int64).max)
            ctx.state["window_start"] = columns.amin(-1)
        return keep_best(self, ctx, counts)

    def ranks(self, ctx: LayerContext, kept: tuple[int, ...]) -> Tensor:
        length = ctx.keys.shape[2]
        heads = ctx.keys.shape[1]
        # From 2, increasing with position: above any mass.
        age = 2 + torch.arange(length, device=ctx.keys.device, dtype=torch.float32) / length
        start = None if ctx.step.ends_prompt else ctx.state.get("window_start")
        if start is not None:
            scores = age.masked_fill(ctx.index < start[..., None], float("inf"))
        else:
            mass = mass_of(ctx, -1)
            scores = group_mean(mass, heads)
            scores = torch.where(self._window(ctx, kept), age.to(scores.dtype), scores)
        return scores.masked_fill(first_real(ctx, self.sinks), float("inf"))

    def _window(self, ctx: LayerContext, counts: tuple[int, ...]) -> Tensor:
        return last_real(ctx, tuple(max(1, min(int(count * self.recent), count - self.sinks)) for count in counts))
