"""StreamingLLM: Efficient Streaming Language Models with Attention Sinks (arXiv 2309.17453).

Keeps the first `sinks` tokens and the most recent ones. By default as in KV-compression benchmarks: once at the end of
the prompt, with new tokens appended. `every=1` is the paper's rolling window.

Differences from the reference: absolute positions, none relative to the cache.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvsieve.lazy import Tensor, torch
from kvsieve.methods.base import ScoredEvictor, check_int, first_real
from kvsieve.planning.registry import register_method
from kvsieve.types import LayerContext


@register_method("streamingllm", title="StreamingLLM", paper="arXiv 2309.17453", phase="end of prompt", budget="20%")
@dataclass(frozen=True, kw_only=True)
class StreamingLLM(ScoredEvictor, heads="own", query_aware=False, fixed_counts=True):
    """Keep attention sinks and the most recent tokens; `every` rolls the window while decoding.

    sinks: tokens kept at the start of the row, at least 0.
    """

    stays = ("sinks",)

    sinks: int = 4

    def __post_init__(self) -> None:
        check_int(self, "sinks", self.sinks, 0)
        super().__post_init__()

    @property
    def why_minimum(self) -> str:
        return f"{self.sinks} sinks and one recent token"

    def scores(self, ctx: LayerContext) -> Tensor:
        batch, heads, length = ctx.keys.shape[:3]
        recency = torch.arange(length, dtype=torch.float32, device=ctx.keys.device)
        if ctx.valid is not None:
            # Wrappers weigh these scores: padding must not count.
            recency = ctx.valid.cumsum(-1, dtype=torch.float32) - 1
        scores = recency.expand(batch, heads, length)
        return scores.masked_fill(first_real(ctx, self.sinks), float("inf"))
