"""ChunkKV: Semantic-Preserving KV Cache Compression for Efficient Long-Context LLM Inference (arXiv 2502.00299).

Tokens are kept in chunks of neighbours. Any method's scores per token are summed over the KV heads; a chunk of
`chunk_length` tokens scores their mean; the best chunks stay, the same ones for all heads of a layer.

Differences from the reference: the budget is met to the entry, so only the first tokens of the last chunk stay; entries
that `base` protects, such as SnapKV's window, stay separately and do not count in their chunk's mean; chunks start at
each row's first token; no indices are shared between layers.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvsieve.lazy import Tensor, torch
from kvsieve.lazy import functional as F
from kvsieve.methods.base import Wrapper, check_int, hide_padding, scored_by_name
from kvsieve.planning.budget import Budget
from kvsieve.planning.plans import Plan
from kvsieve.planning.registry import register_method
from kvsieve.types import LayerContext


@dataclass(frozen=True, kw_only=True)
class ChunkKV(Wrapper, heads="all", query_aware=False):
    """Keep whole chunks of consecutive tokens, by the mean of `base`'s scores: ``ChunkKV(base=SnapKV(budget=0.2))``.

    chunk_length: tokens per chunk, counted over a row's stored entries.
    """

    chunk_length: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int(self, "chunk_length", self.chunk_length, 1)

    def ranks(self, ctx: LayerContext, kept: tuple[int, ...]) -> Tensor:
        heads, length = ctx.keys.shape[1:3]
        scores = ctx.ranks.gather(hide_padding(ctx, self.base.scores(ctx)))
        protected = scores.isposinf().any(1)
        real = torch.ones_like(protected) if ctx.valid is None else ctx.valid.any(1).expand_as(protected)
        judged = real & ~protected
        total = scores.sum(1).masked_fill(~judged, 0)
        chunk = min(self.chunk_length, length)
        # Chunks count real entries, so that padding does not change them.
        place = (real.cumsum(-1) - 1).clamp_min(0) // chunk
        real_first = (~real).to(torch.uint8).argsort(dim=-1, stable=True)
        room = -length % chunk
        sums, sizes = (
            F.pad(part.gather(1, real_first), (0, room)).unflatten(1, (-1, chunk)).sum(-1)
            for part in (total, judged.to(total.dtype))
        )
        means = (sums / sizes).masked_fill(sizes == 0, float("-inf"))
        # The rank of each chunk, so that its tokens stay together; NaN must show.
        order = means.argsort(dim=-1, descending=True, stable=True).argsort(-1)
        order = -order.to(total.dtype).masked_fill(means.isnan(), float("nan"))
        return order.gather(1, place).masked_fill(protected, float("inf"))[:, None].expand(-1, heads, -1)


@register_method("chunkkv", title="ChunkKV", paper="arXiv 2502.00299", phase="end of prompt", query_aware=True)
def chunkkv(
    budget: Budget | str | int | float = "20%",
    base: str = "snapkv",
    chunk_length: int = 10,
    skip_layers: int | tuple[int, ...] | str = 0,
    every: int | None = None,
) -> Plan:
    """Keep whole chunks of adjacent entries, ranked by the mean score of another method, `base`."""
    return Plan(
        evict=ChunkKV(base=scored_by_name("chunkkv", base, budget, skip_layers, every), chunk_length=chunk_length)
    )
