"""A-shape: the first tokens and the nearest, as in StreamingLLM (arXiv 2309.17453), for sparse prefill.

All queries attend to the first keys and to those right before them, for every prompt: the baseline of methods that
choose. The name is from MInference (arXiv 2407.02490), which uses it for some heads.

Differences from the paper: both parts are whole blocks, and all heads have this pattern.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvsieve.core.blocks import BlockGrid, PromptContext
from kvsieve.lazy import Tensor
from kvsieve.methods.block_prefill import BlockPrefill
from kvsieve.planning.registry import register_method


@register_method("a-shape", title="A-shape", paper="arXiv 2407.02490", phase="prefill", query_aware=False)
@dataclass(frozen=True, kw_only=True)
class AShape(BlockPrefill, heads="own"):
    """Prefill attends to the first and the nearest tokens: the baseline of sparse prefill.

    sinks: first keys. local: keys before a query's own block.
    """

    sinks: int = 128
    local: int = 1024
    full: int = 0

    def density(self, tokens: int) -> float:
        if tokens < max(self.least, self.queries):
            return 1.0
        grid = BlockGrid(tokens, tokens, self.queries, self.block)
        blocks = -(-self.local // self.block)
        first = -(-self.sinks // self.block)
        seen = [min(row * grid.own + grid.own, grid.key_blocks) for row in range(grid.query_blocks)]
        near = [count - max(row * grid.own - blocks, 0) for row, count in enumerate(seen)]
        far = [min(first, max(row * grid.own - blocks, 0)) for row in range(grid.query_blocks)]
        computed = [a + b for a, b in zip(near, far, strict=True)]
        if self.full:
            computed[-self.full :] = seen[-self.full :]
        return sum(computed) / sum(seen)

    def select(self, ctx: PromptContext) -> Tensor:
        mask = self.always(ctx)
        return mask.expand(len(ctx.query), ctx.keys.shape[1], *mask.shape)
