"""CritiPrefill (arXiv 2409.12490): estimate the blocks of keys that matter to a segment of queries.

A segment of queries is represented by the elementwise maximum and minimum of its queries, a block of keys by those of
its keys. The score of a block is the larger of two means over the segment's two vectors: of their products with the
block's maximum, and with its minimum. Scores are averaged over the query heads of a group, masked causally, and turned
into weights by a softmax over blocks. Weights of a layer are blended with those of the layer before: (1 - `fusion`) of
its own and `fusion` of the other's. The blocks with the largest weights, `critical` keys in all, are computed for each
segment; the segment's own blocks and everything for the last segment always are.

Differences from the reference: products are scaled like logits before the softmax; early segments of a long prompt are
sparse, too; the default number of keys is the smaller of the paper's; under chunked prefill the last segment is that of
the prompt, not of every chunk; a layer after one with full attention is not blended.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvsieve.core.blocks import PromptContext, topmost
from kvsieve.core.scoring import group_mean
from kvsieve.errors import PlanError
from kvsieve.lazy import Tensor, torch
from kvsieve.methods.base import check_int
from kvsieve.methods.block_prefill import BlockPrefill
from kvsieve.planning.registry import register_method
from kvsieve.planning.roles import Layers

_BEFORE = "critiprefill"


@register_method("critiprefill", title="CritiPrefill", paper="arXiv 2409.12490", phase="prefill")
@dataclass(frozen=True, kw_only=True)
class CritiPrefill(BlockPrefill, heads="own"):
    """Prefill attends to the blocks that bounds of each segment's queries and of the keys rank highest.

    critical: keys computed per segment besides its own, in whole blocks.
    fusion: share of the previous layer's weights, at least 0 and below 1.
    queries: queries of a segment.
    """

    critical: int = 1024
    fusion: float = 0.25
    block: int = 32
    queries: int = 512
    least: int = 4096
    sinks: int = 0
    local: int = 0
    skip_layers: Layers = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int(self, "critical", self.critical, self.block)
        if not 0 <= self.fusion < 1:
            raise PlanError(f"CritiPrefill: fusion must be at least 0 and below 1, got {self.fusion!r}")

    def select(self, ctx: PromptContext) -> Tensor:
        weights = self.weights(ctx)
        layer, before = ctx.shared.get(_BEFORE, (None, weights))
        if layer == ctx.layer_idx - 1 and before.shape == weights.shape:
            weights = (1 - self.fusion) * weights + self.fusion * before
        ctx.shared[_BEFORE] = ctx.layer_idx, weights
        return topmost(weights, self.critical // self.block) | self.always(ctx)

    def weights(self, ctx: PromptContext) -> Tensor:
        """Return estimated weights of the blocks before a segment, float32 [B, H, query blocks, key blocks]."""
        grid = ctx.grid
        heads = ctx.keys.shape[1]
        places = torch.arange(grid.query_blocks * grid.queries, device=ctx.keys.device)
        segments = _bounds(grid.padded_queries(ctx.query), places < grid.new, grid.queries)
        places = torch.arange(grid.key_blocks * grid.block, device=ctx.keys.device)
        real = (places >= grid.pad) & (places < grid.pad + grid.length)
        high, low = _bounds(grid.padded_keys(ctx.keys), real, grid.block)
        middle = (segments[0] + segments[1]) / 2
        products = [ctx.logits(_grouped(middle, heads) @ bound.transpose(2, 3)) for bound in (high, low)]
        scores = torch.maximum(*products).view(*middle.shape[:3], grid.key_blocks)
        scores = group_mean(scores.flatten(2), heads).view(scores.shape[0], heads, *scores.shape[2:])
        before = grid.behind(scores.device) < 0
        return scores.masked_fill(~before, float("-inf")).softmax(-1).nan_to_num(0.0)


def _bounds(x: Tensor, real: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the elementwise maximum and minimum of blocks of [B, X, places, D], float32 [B, X, blocks, D]."""
    hidden = ~real[:, None]
    high = x.float().masked_fill(hidden, float("-inf")).unflatten(2, (-1, size)).amax(3)
    low = x.float().masked_fill(hidden, float("inf")).unflatten(2, (-1, size)).amin(3)
    return high, low


def _grouped(x: Tensor, heads: int) -> Tensor:
    """Return [B, Hq, blocks, D] as [B, H, G * blocks, D]."""
    return x.reshape(x.shape[0], heads, -1, x.shape[3])
