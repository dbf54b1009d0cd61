"""A prompt's queries, keys and values, blocks chosen at random, and attention under their mask."""

from __future__ import annotations

import torch

from attend import AttentionTerms, masked_attention
from kvsieve.core.blocks import BlockGrid

# Rows, query heads, KV heads, new, stored, queries and keys of a block, sets.
SHAPES = [
    (1, 4, 2, 100, 100, 16, 8, 2),
    (2, 4, 2, 75, 131, 16, 8, 4),
    (1, 6, 3, 33, 200, 32, 8, 3),
    (1, 2, 2, 40, 45, 16, 16, 2),
    (2, 3, 1, 64, 64, 16, 4, 1),
]


def problem(shape, dtype=torch.float64, dim=8, wide=12):
    """Tensors as models hand them over: heads of a token side by side in queries, room behind stored entries."""
    batch, query_heads, heads, new, length, queries, block, sets = shape
    made = torch.Generator().manual_seed(sum(shape))
    parts = ((new, query_heads, dim), (heads, length + 7, dim), (heads, length + 7, wide))
    query, keys, values = (torch.randn(batch, *part, generator=made, dtype=torch.float64).to(dtype) for part in parts)
    grid = BlockGrid(new, length, queries, block)
    chosen = torch.rand(batch, sets, grid.query_blocks, grid.key_blocks, generator=made) < 0.4
    return query.transpose(1, 2), keys[:, :, :length], values[:, :, :length], chosen, grid


def mask_of(chosen, grid, query_heads):
    """The same choice, by entries."""
    full = (chosen & grid.visible(chosen.device)) | grid.diagonal(chosen.device)
    full = full.repeat_interleave(query_heads // chosen.shape[1], 1)
    full = full.repeat_interleave(grid.queries, 2).repeat_interleave(grid.block, 3)
    full = full[:, :, : grid.new, grid.pad : grid.pad + grid.length]
    own = torch.arange(grid.length - grid.new, grid.length)[:, None]
    return full & (torch.arange(grid.length) <= own)


def exact(query, keys, values, chosen, grid, scale, terms=None):
    """Attention under the mask, in float64."""
    if terms is not None and terms.sinks is not None:
        terms = AttentionTerms(terms.softcap, terms.sinks.double())
    parts = (part.double() for part in (query, keys, values))
    return masked_attention(*parts, mask_of(chosen, grid, query.shape[1]), scale=scale, terms=terms)
