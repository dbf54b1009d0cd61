"""XAttention (arXiv 2503.16428): rank blocks by sums over their antidiagonals.

Every tile of `stride` queries and keys is represented by its antidiagonal: the last query with the first key, and so
on. All sums of a layer are one product of `stride` adjacent queries with as many keys in reverse order. A softmax over
these, divided by the stride, gives the weight of every tile, and the sum over its tiles that of a block. For each query
block the fewest blocks with `threshold` of the weight are computed.

Differences from the paper: the threshold is one number for all heads, not searched for each; queries are scored for a
part of the prompt at a time; the first block and the one before the diagonal are always computed.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvsieve.core.blocks import PromptContext, covering
from kvsieve.errors import PlanError
from kvsieve.lazy import Tensor, torch
from kvsieve.methods.base import check_int
from kvsieve.methods.block_prefill import BlockPrefill, check_share
from kvsieve.planning.registry import register_method

# Query blocks scored at a time, with the keys visible to them.
_PART = 16


@register_method("xattention", title="XAttention", paper="arXiv 2503.16428", phase="prefill")
@dataclass(frozen=True, kw_only=True)
class XAttention(BlockPrefill, heads="own"):
    """Prefill attends to the blocks with the largest sums over antidiagonals.

    threshold: share of the estimated weight to compute, for each query block and head.
    stride: queries and keys of a tile with one antidiagonal; it divides `block`.
    """

    threshold: float = 0.9
    stride: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share(self, "threshold", self.threshold)
        check_int(self, "stride", self.stride, 1)
        if self.block % self.stride:
            raise PlanError(f"XAttention: stride must divide block, got {self.stride} and {self.block}")

    def select(self, ctx: PromptContext) -> Tensor:
        return covering(self.weights(ctx), self.threshold, self.always(ctx))

    def weights(self, ctx: PromptContext) -> Tensor:
        """Return estimated attention weights of blocks, summed over queries, float32 [B, Hq, queries, keys]."""
        grid, stride, (batch, heads) = ctx.grid, self.stride, ctx.keys.shape[:2]
        queries = grid.padded_queries(ctx.query).unflatten(2, (-1, stride))
        keys = grid.padded_keys(ctx.keys, grid.first + grid.query_blocks * grid.own - grid.key_blocks)
        # Keys in reverse order give the same products as queries would, and are fewer.
        keys = keys.unflatten(2, (-1, stride)).flip(3).flatten(3).transpose(2, 3)
        rows = self.queries // stride
        tiles = self.block // stride
        out = torch.zeros(batch, queries.shape[1], grid.query_blocks, grid.key_blocks, device=keys.device)
        for first in range(0, grid.query_blocks, _PART):
            last = min(first + _PART, grid.query_blocks)
            seen = (grid.first + last * grid.own) * tiles
            part = queries[:, :, first * rows : last * rows]
            logits = part.reshape(batch, heads, -1, keys.shape[2]) @ keys[..., :seen]
            logits = ctx.logits(logits.float(), stride).view(*part.shape[:3], seen)
            at = torch.arange(first * rows, last * rows, device=keys.device)[:, None] + grid.first * tiles
            places = torch.arange(seen, device=keys.device)
            logits.masked_fill_((places > at) | (places < grid.pad // stride), float("-inf"))
            blocks = logits.softmax(-1).unflatten(2, (-1, rows)).unflatten(4, (-1, tiles)).sum((3, 5))
            width = min(blocks.shape[3], grid.key_blocks)
            out[:, :, first:last, :width] = blocks[..., :width]
        return out
