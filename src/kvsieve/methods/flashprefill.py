"""FlashPrefill (arXiv 2603.06199): keep blocks with an estimated weight close to the largest one's.

Every query is multiplied with the mean key of each block; the softmax over blocks, averaged over a block's queries,
estimates the blocks' weights. A block is computed if its weight is at least `alpha` times the largest of the query
block: without sorting or summing, and without long tails of small weights.

Differences from the paper: a key block is represented by its mean alone, without its size or spread; the first block,
some before the diagonal, and all those visible to the last `full` query blocks are computed, as in the public
implementation.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvsieve.core.blocks import PromptContext
from kvsieve.lazy import Tensor, torch
from kvsieve.methods.block_prefill import BlockPrefill, check_share
from kvsieve.planning.registry import register_method

# Query blocks weighed at a time: few on a CPU, so that their weights fit into its caches.
_PART = 4
_PART_ELSEWHERE = 32


@register_method("flashprefill", title="FlashPrefill", paper="arXiv 2603.06199", phase="prefill")
@dataclass(frozen=True, kw_only=True)
class FlashPrefill(BlockPrefill, heads="own"):
    """Prefill attends to the blocks with an estimated weight near the largest.

    alpha: least estimated weight of a block that is computed, as a share of the largest.
    """

    alpha: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share(self, "alpha", self.alpha)

    def select(self, ctx: PromptContext) -> Tensor:
        weights = self.weights(ctx)
        return (weights >= self.alpha * weights.amax(-1, keepdim=True)) | self.always(ctx)

    def weights(self, ctx: PromptContext) -> Tensor:
        """Return estimated weights of blocks, float32 [B, Hq, query blocks, key blocks]."""
        grid, (batch, heads, _, dim), query_heads = ctx.grid, ctx.keys.shape, ctx.query.shape[1]
        queries = grid.padded_queries(ctx.query)
        means = grid.means(ctx.keys).to(queries.dtype).transpose(2, 3)
        hidden = ~grid.visible(queries.device)[:, None]
        # Padding queries of the last block do not count.
        rest = grid.new - (grid.query_blocks - 1) * self.queries
        out = torch.zeros(batch, query_heads, grid.query_blocks, grid.key_blocks, device=queries.device)
        some = _PART if queries.is_cpu else _PART_ELSEWHERE
        for first in range(0, grid.query_blocks, some):
            last = min(first + some, grid.query_blocks)
            seen = min(grid.first + last * grid.own, grid.key_blocks)
            part = queries[:, :, first * self.queries : last * self.queries].reshape(batch, heads, -1, dim)
            logits = ctx.logits((part @ means[..., :seen]).float())
            logits = logits.view(batch, query_heads, -1, self.queries, seen)
            weights = logits.masked_fill_(hidden[first:last, :, :seen], float("-inf")).softmax(-1)
            if last == grid.query_blocks:
                weights[:, :, -1, rest:] = 0.0
            out[:, :, first:last, :seen] = weights.sum(3)
        return out
