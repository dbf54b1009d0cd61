"""Attention of many new tokens as products of matrices: in C where the processor's kernel takes them, else by torch."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsieve.attention.blocked import blocked_attention
from kvsieve.attention.prompt import is_compiled
from kvsieve.core.blocks import BlockGrid
from kvsieve.kernels.cpu import prompt as compiled
from kvsieve.types import AttentionTerms

# Queries and keys of a block.
_BLOCK = 128
# New tokens from which on laying out all keys and values for the kernel pays.
_LEAST = 64


def has_kernel(dtype: torch.dtype, dim: int) -> bool:
    """Tell whether the C kernel attends to many tokens of this dtype, with so many channels, on this machine."""
    like = torch.empty(1, 1, _LEAST, dim, dtype=dtype)
    return is_compiled(like, like, BlockGrid(_LEAST, _LEAST, _BLOCK, _BLOCK), 1.0)


def causal_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scale: float,
    valid: Tensor | None = None,
    terms: AttentionTerms | None = None,
) -> Tensor:
    """Causal attention of the last L of N entries over all N; arguments and result as in `dense_attention`."""
    new, length = query.shape[2], keys.shape[2]
    grid = BlockGrid(new, length, _BLOCK, _BLOCK)
    # Torch's operations refuse a gradient aloud.
    learns = torch.is_grad_enabled() and any(each.requires_grad for each in (query, keys, values))
    if valid is not None or new < _LEAST or learns or not is_compiled(query, values, grid, scale):
        return blocked_attention(query, keys, values, scale=scale, valid=valid, terms=terms)
    rows = query.shape[0], 1, grid.query_blocks
    # Each block of queries is given all blocks of keys before its own.
    lists = torch.arange(grid.key_blocks, dtype=torch.int32).expand(*rows, -1).contiguous()
    counts = (torch.arange(grid.query_blocks, dtype=torch.int32) + grid.first).expand(rows).contiguous()
    return compiled.block_attention(query, keys, values, lists, counts, grid, scale=scale, terms=terms)
