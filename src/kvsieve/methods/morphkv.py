"""MorphKV: Dialogue Without Limits, Constant-Sized KV Caches for Extended Responses in LLMs (arXiv 2503.00979).

After every token the R newest entries stay, and the older ones that the queries of these R attend to: the softmax of
each query over the older entries alone, summed ("sum") or maximal ("max") over the queries. Logits of the query heads
that share a KV head are added before the softmax. Memory is constant.

Differences from the reference: the newest query is one of the R (the public code leaves it out); end of prompts by the
same rule; weights of earlier queries are those over the entries stored now. Merged entries, a later variant of the
public code, are not here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvsieve.core.queries import query_mass
from kvsieve.core.scoring import score_dtype
from kvsieve.lazy import Tensor
from kvsieve.methods.base import ScoredEvictor, check_int, last_real
from kvsieve.methods.decoding import before_window
from kvsieve.planning.registry import register_method
from kvsieve.types import AttentionQueries, LayerContext


@register_method("morphkv", title="MorphKV", paper="arXiv 2503.00979", phase="end of prompt, decode", budget="20%")
@dataclass(frozen=True, kw_only=True)
class MorphKV(ScoredEvictor, needs=("uncapped",), heads="own", query_aware=True):
    """Keep recent entries and the older ones that their queries attend to, after every token.

    window: R, newest entries, always kept. fusion: "sum" or "max" of the queries' weights.
    """

    stays = ("window",)

    every: int | None = 1
    window: int = 32
    fusion: Literal["sum", "max"] = "sum"

    def __post_init__(self) -> None:
        check_int(self, "window", self.window, 1)
        super().__post_init__()

    def scores(self, ctx: LayerContext) -> Tensor:
        asked, _, visible = before_window(ctx, self.window)
        query = asked.query.to(score_dtype(asked.query.dtype))
        # Products are linear: the sum of the group's logits is that of its summed queries. Learned sinks have no part.
        summed = AttentionQueries(query.unflatten(1, (ctx.keys.shape[1], -1)).sum(2), ctx.scale)
        scores = query_mass(summed, ctx.keys, visible, reduce=self.fusion)
        return scores.masked_fill(last_real(ctx, self.window), float("inf"))
