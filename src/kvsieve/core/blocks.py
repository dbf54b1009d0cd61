"""Blocks of queries and of keys, for attention over a prompt that skips blocks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvsieve.core.softmax import cap
from kvsieve.lazy import Tensor, torch
from kvsieve.lazy import functional as F
from kvsieve.types import AttentionQueries


@dataclass(frozen=True)
class BlockGrid:
    """Division of N stored entries (keys), the last L of them queries, into blocks.

    Key blocks are aligned to the queries: the first one begins `pad` places before the first entry. A query block sees
    the key blocks before it and those on its diagonal, which are always computed.

    Attributes:
        new: L, queries.
        length: N, stored entries, including the queries' own.
        queries: queries per block, a multiple of `block`.
        block: keys per block.
    """

    new: int
    length: int
    queries: int
    block: int

    @property
    def pad(self) -> int:
        """Places of the first key block before the first entry."""
        return (self.new - self.length) % self.block

    @property
    def first(self) -> int:
        return (self.pad + self.length - self.new) // self.block

    @property
    def own(self) -> int:
        """Key blocks on the diagonal of each query block."""
        return self.queries // self.block

    @property
    def query_blocks(self) -> int:
        return -(-self.new // self.queries)

    @property
    def key_blocks(self) -> int:
        return self.first + -(-self.new // self.block)

    @property
    def pairs(self) -> int:
        """Number of visible pairs of a query block and a key block."""
        ends = (self.first + (number + 1) * self.own for number in range(self.query_blocks))
        return sum(min(end, self.key_blocks) for end in ends)

    def visible(self, device: torch.device) -> Tensor:
        """Return which key blocks each query block sees, bool [query_blocks, key_blocks]; so do its variants below."""
        return self.behind(device) < self.own

    def diagonal(self, device: torch.device) -> Tensor:
        behind = self.behind(device)
        return (behind >= 0) & (behind < self.own)

    def near(self, blocks: int, device: torch.device) -> Tensor:
        """Return the diagonal and `blocks` key blocks before it."""
        behind = self.behind(device)
        return (behind >= -blocks) & (behind < self.own)

    def behind(self, device: torch.device) -> Tensor:
        """Return the distance of each key block to the first diagonal one, negative before it."""
        rows = torch.arange(self.query_blocks, device=device)[:, None] * self.own + self.first
        return torch.arange(self.key_blocks, device=device)[None] - rows

    def padded_keys(self, x: Tensor, extra: int = 0) -> Tensor:
        """Pad [B, H, N, D] with zeros on both sides so that all blocks, and `extra` more, are full."""
        out = x.new_zeros(*x.shape[:2], (self.key_blocks + extra) * self.block, x.shape[3])
        out[:, :, self.pad : self.pad + self.length] = x
        return out

    def padded_queries(self, x: Tensor) -> Tensor:
        """Pad [B, Hq, L, D] with zeros at the end, if needed, so that all blocks are full."""
        size = self.query_blocks * self.queries
        if size == self.new:
            return x
        out = x.new_zeros(*x.shape[:2], size, x.shape[3])
        out[:, :, : self.new] = x
        return out

    def means(self, x: Tensor) -> Tensor:
        """Return the mean key of each block of [B, H, N, D], float32 [B, H, key_blocks, D], without padding."""
        sums = self.padded_keys(x).unflatten(2, (-1, self.block)).sum(3, dtype=torch.float32)
        places = torch.arange(self.key_blocks * self.block, device=x.device)
        real = (places >= self.pad) & (places < self.pad + self.length)
        return sums / real.view(-1, self.block).sum(-1)[:, None]


@dataclass(frozen=True)
class PromptContext:
    """Queries of (part of) a prompt in one layer and all keys that they may attend to, without padding.

    Attributes:
        layer_idx: index of the layer.
        num_layers: layers of the model.
        asked: queries [B, Hq, L, D], of the last L entries.
        keys: [B, H, N, D].
        grid: the blocks to choose among.
        ends: the last of these queries are the end of the prompt.
        shared: scratch of this pass for these rows and heads, the same for all layers.
    """

    layer_idx: int
    num_layers: int
    asked: AttentionQueries
    keys: Tensor
    grid: BlockGrid
    ends: bool = True
    shared: dict[Any, Any] = field(default_factory=dict)

    @property
    def query(self) -> Tensor:
        return self.asked.query

    @property
    def scale(self) -> float:
        return self.asked.scale

    def logits(self, products: Tensor, shrink: float = 1) -> Tensor:
        """Scale products of queries and keys, and cap them where the model does; shrink: a divisor of the scale."""
        return cap(products * (self.scale / shrink), self.asked)

    @property
    def groups(self) -> int:
        return self.query.shape[1] // self.keys.shape[1]


def covering(mass: Tensor, share: float, always: Tensor) -> Tensor:
    """Choose the fewest blocks that hold the share `share` of each row's mass.

    Args:
        mass: [..., key blocks], not negative; 0 for invisible blocks.
        share: of the row's sum.
        always: bool, broadcastable to `mass`, blocks that are chosen first, regardless of their mass.

    Returns:
        bool, the shape of `mass`. Blocks without mass are not chosen, except those of `always`.
    """
    part = mass / mass.sum(-1, keepdim=True).clamp_min(1e-30)
    rank, order = (part + 2 * always).sort(-1, descending=True)
    sorted_mass = part.gather(-1, order)
    before = sorted_mass.cumsum(-1) - sorted_mass
    keep = (rank >= 2) | ((before < share) & (sorted_mass > 0))
    return torch.zeros_like(mass, dtype=torch.bool).scatter_(-1, order, keep)


@dataclass(frozen=True)
class BlockLines:
    """Attention weight of the last queries of a pass, summed along vertical and diagonal lines of blocks.

    Attributes:
        vertical: float32 [B, Hq, key blocks], by key block.
        slash: float32 [B, Hq, key blocks], by diagonal: its distance in blocks before a query block; 0 is the query
            block's own diagonal.
    """

    vertical: Tensor
    slash: Tensor

    @classmethod
    def of(cls, ctx: PromptContext, queries: int) -> BlockLines:
        grid = ctx.grid
        new = min(queries, ctx.grid.new)
        rows = ctx.query[:, :, -new:].reshape(len(ctx.query), ctx.keys.shape[1], -1, ctx.keys.shape[3])
        logits = ctx.logits((rows @ ctx.keys.transpose(2, 3)).float()).view(*ctx.query.shape[:2], new, grid.length)
        logits[..., grid.length - new :].masked_fill_(
            torch.ones(new, new, dtype=torch.bool, device=logits.device).triu(1), float("-inf")
        )
        weights = logits.softmax(-1)
        columns = F.pad(weights.sum(2), (grid.pad, grid.key_blocks * grid.block - grid.length - grid.pad))
        # Row r of the queries, shifted so that places are distances: each row is one longer than the last.
        shifted = F.pad(weights.flip(-1), (0, new)).flatten(2)[..., : new * (grid.length + new - 1)]
        apart = shifted.view(*weights.shape[:2], new, grid.length + new - 1).sum(2)[..., new - 1 :]
        return cls(columns.unflatten(-1, (grid.key_blocks, grid.block)).sum(-1), _by_distance(apart, grid))

    def choose(self, vertical: Tensor, slash: Tensor, grid: BlockGrid) -> Tensor:
        """Convert chosen lines, bool of their shapes, to blocks: bool [B, Hq, query blocks, key blocks]."""
        behind = (-grid.behind(vertical.device)).clamp(0, grid.key_blocks - 1)
        return vertical[:, :, None] | slash[:, :, behind]


def _by_distance(apart: Tensor, grid: BlockGrid) -> Tensor:
    """Sum weights [B, Hq, N], by the distance of a query and a key, over diagonals of blocks."""
    total = F.pad(apart.cumsum(-1), (1, 0))
    blocks = torch.arange(grid.key_blocks, device=apart.device) * grid.block
    # A query of the block is up to this much further from a key than the block's first query.
    low = (blocks - grid.block + 1).clamp(0, grid.length)
    high = (blocks + grid.queries).clamp(0, grid.length)
    return total[..., high] - total[..., low]


def topmost(scores: Tensor, count: int) -> Tensor:
    """Mark the `count` highest of each row of [..., N]: bool."""
    best = scores.topk(min(count, scores.shape[-1]), dim=-1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True)
