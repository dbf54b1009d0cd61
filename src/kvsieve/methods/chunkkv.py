"""ChunkKV: Semantic-Preserving KV Cache Compression for Efficient Long-Context LLM Inference (arXiv 2502.00299).

Tokens are kept in chunks of neighbours. Any method's scores per token are summed over the KV heads; a chunk of
`chunk_length` tokens scores their mean; the best chunks stay, the same ones for all heads of a layer. With `share`,
the first of every so many layers chooses for all of them (layer-wise index reuse).

Differences from the reference: the budget is met to the entry, so only the first tokens of the last chunk stay; entries
that `base` protects, such as SnapKV's window, stay separately and do not count in their chunk's mean; chunks start at
each row's first token.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvsieve.lazy import Tensor, torch
from kvsieve.lazy import functional as F
from kvsieve.methods.base import Wrapper, check_int, hide_padding, same_in_layers, scored_by_name
from kvsieve.planning.budget import Budget
from kvsieve.planning.plans import Plan
from kvsieve.planning.registry import register_method
from kvsieve.types import LayerContext


@dataclass(frozen=True)
class Chunks:
    """A layer's scores in chunks of S consecutive real entries of each row.

    Attributes:
        scores: [B, X, C, S], of all heads; 0 for places that are not judged.
        judged: bool [B, C, S], real entries that the base does not protect.
        protected: bool [B, N], entries that the base protects.
        slots: int64 [B, N], the slot of each place: real entries first, in order.
    """

    scores: Tensor
    judged: Tensor
    protected: Tensor
    slots: Tensor

    @classmethod
    def of(cls, ctx: LayerContext, scores: Tensor, length: int) -> Chunks:
        """Fold scores [B, X, N] into chunks of `length` entries. Chunks count real entries; padding changes nothing."""
        scores = ctx.ranks.gather(hide_padding(ctx, scores))
        protected = scores.isposinf().any(1)
        real = torch.ones_like(protected) if ctx.valid is None else ctx.valid.any(1).expand_as(protected)
        judged = real & ~protected
        slots = (~real).to(torch.uint8).argsort(dim=-1, stable=True)
        size = min(length, slots.shape[1])

        def fold(part: Tensor) -> Tensor:
            places = part.gather(-1, slots[:, None].expand_as(part))
            return F.pad(places, (0, -places.shape[-1] % size)).unflatten(-1, (-1, size))

        return cls(fold(scores.masked_fill(~judged[:, None], 0)), fold(judged[:, None])[:, 0], protected, slots)

    @property
    def sizes(self) -> Tensor:
        """Return the judged entries of each chunk, [B, C], in the scores' dtype."""
        return self.judged.sum(-1).to(self.scores.dtype)

    def means(self) -> Tensor:
        """Return the mean of each chunk's scores, summed over heads, [B, C]; -inf for a chunk without judged ones."""
        return (self.scores.sum(1).sum(-1) / self.sizes).masked_fill(self.sizes == 0, float("-inf"))

    def ranks(self, places: Tensor) -> Tensor:
        """Return the values [B, C, S] of places as ranks [B, 1, N] of entries, +inf for protected ones."""
        length = self.slots.shape[1]
        moved = torch.empty_like(places.flatten(1)[:, :length]).scatter_(1, self.slots, places.flatten(1)[:, :length])
        return moved.masked_fill(self.protected, float("inf"))[:, None]


def best_first(scores: Tensor) -> Tensor:
    """Return each score's place along the last dimension, 0 for the best, in the scores' dtype; NaN stays NaN."""
    order = scores.argsort(dim=-1, descending=True, stable=True).argsort(-1)
    return order.to(scores.dtype).masked_fill(scores.isnan(), float("nan"))


@dataclass(frozen=True, kw_only=True)
class ChunkKV(Wrapper, heads="all", query_aware=False):
    """Keep whole chunks of consecutive tokens, by the mean of `base`'s scores: ``ChunkKV(base=SnapKV(budget=0.2))``.

    chunk_length: tokens per chunk, counted over a row's stored entries. share: layers that keep the same tokens, chosen
    by the first of them; 1 for a choice per layer.
    """

    chunk_length: int = 10
    share: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int(self, "chunk_length", self.chunk_length, 1)
        check_int(self, "share", self.share, 1)

    def ranks(self, ctx: LayerContext, kept: tuple[int, ...]) -> Tensor:
        def make() -> Tensor:
            return self.chunk_ranks(Chunks.of(ctx, self.base.scores(ctx), self.chunk_length))

        return same_in_layers(ctx, self.skip_layers, self.share, make).expand(-1, ctx.keys.shape[1], -1)

    def chunk_ranks(self, chunks: Chunks) -> Tensor:
        """Return the ranks of a layer's entries, [B, 1, N]."""
        # The rank of each chunk, so that its tokens stay together.
        return chunks.ranks(-best_first(chunks.means())[..., None].expand_as(chunks.judged))


@register_method("chunkkv", title="ChunkKV", paper="arXiv 2502.00299", phase="end of prompt")
def chunkkv(
    budget: Budget | str | int | float = "20%",
    base: str = "snapkv",
    chunk_length: int = 10,
    share: int = 1,
    skip_layers: int | tuple[int, ...] | str = 0,
    every: int | None = None,
) -> Plan:
    """Keep whole chunks of adjacent entries, ranked by the mean score of another method, `base`."""
    scorer = scored_by_name("chunkkv", base, budget, skip_layers, every)
    return Plan(evict=ChunkKV(base=scorer, chunk_length=chunk_length, share=share))
