"""MInference (arXiv 2407.02490): attention of a prompt along vertical and slash lines, found by its last queries.

The attention of the `last` queries of a pass is computed exactly. Sums over its columns rank keys, sums over its
diagonals rank distances. Every head gets the best of both.

Differences from the paper: lines are blocks wide; all heads are vertical-slash, where the paper searches a pattern and
a size for each head in advance; both sizes are shares of the existing lines, the same for all heads.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvsieve.core.blocks import BlockLines, PromptContext, topmost
from kvsieve.lazy import Tensor
from kvsieve.methods.base import check_int
from kvsieve.methods.block_prefill import BlockPrefill, check_share
from kvsieve.planning.registry import register_method


@register_method("minference", title="MInference", paper="arXiv 2407.02490", phase="prefill")
@dataclass(frozen=True, kw_only=True)
class MInference(BlockPrefill, heads="own"):
    """Prefill attends along vertical and slash lines, found from the last queries.

    vertical: share of key blocks that all queries attend to. slash: share of distances that they attend to. last:
    queries at the end of a pass that find the lines.
    """

    vertical: float = 0.2
    slash: float = 0.2
    last: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share(self, "vertical", self.vertical)
        check_share(self, "slash", self.slash)
        check_int(self, "last", self.last, 1)

    def select(self, ctx: PromptContext) -> Tensor:
        lines = BlockLines.of(ctx, self.last)
        blocks = ctx.grid.key_blocks
        vertical = topmost(lines.vertical, max(1, round(self.vertical * blocks)))
        slash = topmost(lines.slash, max(1, round(self.slash * blocks)))
        return lines.choose(vertical, slash, ctx.grid) | self.always(ctx)
