"""FlexPrefill (arXiv 2502.20766): each head chooses its pattern, and as many blocks as its attention needs.

The attention of the last query block is computed exactly, as weights of key blocks. If means of queries and keys
estimate it well, by the root of the Jensen-Shannon divergence, a head is query-aware: it takes the best blocks of the
whole head by these estimates until they have `gamma` of the weight. Other heads take vertical and slash lines, each
kind until it has `gamma` of the last queries' weight.

Differences from the paper: lines are blocks wide, and distances of slash lines are in blocks; the least budget is the
first block, the one before the diagonal, and the diagonal.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvsieve.core.blocks import BlockLines, PromptContext, covering
from kvsieve.lazy import Tensor, torch
from kvsieve.methods.block_prefill import BlockPrefill, check_share
from kvsieve.planning.registry import register_method


@register_method("flexprefill", title="FlexPrefill", paper="arXiv 2502.20766", phase="prefill")
@dataclass(frozen=True, kw_only=True)
class FlexPrefill(BlockPrefill, heads="own"):
    """Prefill attends, per head, to estimated blocks or along lines, up to a share of the weight.

    gamma: share of the weight to compute. divergence: largest distance at which estimates of blocks are used.
    """

    gamma: float = 0.9
    divergence: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share(self, "gamma", self.gamma)
        check_share(self, "divergence", self.divergence)

    def select(self, ctx: PromptContext) -> Tensor:
        grid = ctx.grid
        always = self.always(ctx)
        lines = BlockLines.of(ctx, self.queries)
        estimate = self.estimate(ctx)
        nothing = torch.zeros(1, dtype=torch.bool, device=always.device)
        along = lines.choose(
            covering(lines.vertical, self.gamma, nothing), covering(lines.slash, self.gamma, nothing), grid
        )
        flat = covering(estimate.flatten(2), self.gamma, always.flatten()).view(estimate.shape)
        true = lines.vertical / lines.vertical.sum(-1, keepdim=True)
        aware = _divergence(estimate[:, :, -1], true).sqrt() < self.divergence
        return torch.where(aware[..., None, None], flat, along) | always

    def estimate(self, ctx: PromptContext) -> Tensor:
        """Return weights of key blocks by means of queries and keys, float32 [B, Hq, query blocks, key blocks]."""
        grid, (batch, heads) = ctx.grid, ctx.keys.shape[:2]
        queries = grid.padded_queries(ctx.query).unflatten(2, (-1, self.queries)).sum(3, dtype=torch.float32)
        sizes = torch.full((grid.query_blocks,), float(self.queries), device=queries.device)
        sizes[-1] = grid.new - (grid.query_blocks - 1) * self.queries
        queries = (queries / sizes[:, None]).reshape(batch, heads, -1, queries.shape[-1])
        logits = ctx.logits(queries @ grid.means(ctx.keys).transpose(2, 3))
        logits = logits.view(batch, ctx.query.shape[1], grid.query_blocks, grid.key_blocks)
        return logits.masked_fill_(~grid.visible(logits.device), float("-inf")).softmax(-1)


def _divergence(p: Tensor, q: Tensor) -> Tensor:
    middle = ((p + q) / 2).clamp_min(1e-30).log()
    first, second = (part * (part.clamp_min(1e-30).log() - middle) for part in (p, q))
    return ((first + second) / 2).sum(-1).clamp_min(0)
