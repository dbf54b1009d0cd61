"""Attention of many new tokens by the C kernel of prompts, where the processor has one."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsieve.attention.prompt import why_not_compiled
from kvsieve.attention.request import AttentionRequest, DenseEntries, why_not_learned, why_not_padded
from kvsieve.core.blocks import BlockGrid
from kvsieve.kernels.cpu import prompt as compiled
from kvsieve.types import AttentionQueries

# Queries and keys of a block.
_BLOCK = 128
# New tokens from which on laying out all keys and values for the kernel pays.
_LEAST = 64


def has_kernel(dtype: torch.dtype, dim: int) -> bool:
    """Return whether the C kernel attends to many tokens of this dtype, with so many channels, on this machine."""
    like = torch.empty(1, 1, _LEAST, dim, dtype=dtype)
    return why_not_kernel(AttentionRequest(AttentionQueries(like, 1.0), DenseEntries(like, like))) is None


def why_not_kernel(request: AttentionRequest[DenseEntries, None]) -> str | None:
    asked = request.asked
    stored = request.stored
    if asked.query.shape[2] < _LEAST:
        return f"fewer than {_LEAST} tokens"
    return why_not_padded(request) or why_not_learned(request) or why_not_compiled(asked, stored, _grid(request))


def kernel_attention(request: AttentionRequest[DenseEntries, None]) -> Tensor:
    asked = request.asked
    grid = _grid(request)
    rows = asked.query.shape[0], 1, grid.query_blocks
    # Each block of queries is given all blocks of keys before its own.
    lists = torch.arange(grid.key_blocks, dtype=torch.int32).expand(*rows, -1).contiguous()
    counts = (torch.arange(grid.query_blocks, dtype=torch.int32) + grid.first).expand(rows).contiguous()
    return compiled.block_attention(asked, request.stored.keys, request.stored.values, lists, counts, grid)


def _grid(request: AttentionRequest[DenseEntries, None]) -> BlockGrid:
    return BlockGrid(request.asked.query.shape[2], request.stored.keys.shape[2], _BLOCK, _BLOCK)
