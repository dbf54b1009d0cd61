"""MInference (arXiv 2407.02490): a prompt attends along vertical and slash lines, which its last queries show.

The attention of the `last` queries of a pass is computed exactly. Its sums over columns tell which keys all queries
look at, its sums over diagonals at which distances they look. Every head gets the best of both.

Differences from the paper: lines are blocks wide; all heads are vertical-slash, where the paper searches a pattern and
a size for each head beforehand; both sizes are shares of the lines there are, the same for all heads.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvsieve.core.blocks import BlockLines, PromptContext, topmost
from kvsieve.lazy import Tensor
from kvsieve.methods.base import check_int
from kvsieve.methods.block_prefill import BlockPrefill, check_share
from kvsieve.registry import register_method


@register_method(
    "minference",
    title="MInference",
    paper="arXiv 2407.02490",
    phase="prefill",
    query_aware=True,
    summary="Prefill attends along vertical and slash lines, found from the last queries.",
)
@dataclass(frozen=True, kw_only=True)
class MInference(BlockPrefill, heads="own"):
    """Attend along the lines that the last queries attend to.

    vertical: share of the blocks of keys that all queries attend to. slash: share of the distances at which they do.
    last: queries at the end of a pass whose attention is computed to find them.
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
        lines, blocks = BlockLines.of(ctx, self.last), ctx.grid.key_blocks
        vertical = topmost(lines.vertical, max(1, round(self.vertical * blocks)))
        slash = topmost(lines.slash, max(1, round(self.slash * blocks)))
        return lines.choose(vertical, slash, ctx.grid) | self.always(ctx)
