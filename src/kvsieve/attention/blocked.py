"""Attention of many new tokens as two matrix products per block of queries, for processors that are fast at those."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsieve.attention.request import AttentionRequest, DenseEntries
from kvsieve.core.softmax import cap, sinks_of, softmax
from kvsieve.types import AttentionQueries

# Logits held at a time, and the most queries of a head in a block.
_ELEMENTS = 1 << 24
_QUERIES = 128
# Widths of blocks that a prompt has, about: oneDNN compiles a product of its own for each shape, and keeps it.
_WIDTHS = 32


def blocked_attention(request: AttentionRequest[DenseEntries, None]) -> Tensor:
    """Attend block of queries by block: [B, Hq, L, Dv].

    A block's queries of all heads of a group are the rows of one product with the keys they may see, so keys are not
    repeated and later keys are not computed. Weights overwrite their logits: those of one block are in memory at a
    time. A block is as wide as the next of `_WIDTHS` marks; keys after it are masked.
    """
    asked = request.asked
    weights = request.stored.log_weight
    query = asked.query
    keys = request.stored.keys
    values = request.stored.values
    batch, query_heads, new, dim = query.shape
    heads = keys.shape[1]
    length = keys.shape[2]
    groups = query_heads // heads
    most = _QUERIES
    while most > 16 and most * batch * query_heads * length > _ELEMENTS:
        most //= 2
    step = -(-length // (_WIDTHS * most)) * most
    keys = keys.flatten(0, 1).transpose(1, 2)
    values = values.flatten(0, 1)
    later = torch.ones(most, most + step, dtype=torch.bool, device=query.device).triu(1)
    # As the layer's output projection wants it: heads of a token side by side.
    out = query.new_empty(batch, new, query_heads, values.shape[-1]).transpose(1, 2)
    # Sinks are one more column of the logits.
    sinks = sinks_of(asked, heads, groups, 1)
    more = 0 if sinks is None else 1
    scratch = query.new_empty(min(most, new) * batch * query_heads * (length + more))
    for first in range(0, new, most):
        last = min(first + most, new)
        rows = last - first
        seen = length - new + last
        width = min(-(-seen // step) * step, length)
        shape = batch * heads, groups * rows, width + more
        padded = scratch[: shape[0] * shape[1] * shape[2]].view(shape)
        part = query[:, :, first:last].reshape(-1, groups * rows, dim)
        logits = padded[..., :width]
        torch.baddbmm(logits, part, keys[..., :width], beta=0, alpha=asked.scale, out=logits)
        cap(logits, asked)
        view = padded.view(batch, heads, groups, rows, -1)
        if weights is not None:
            view[..., :width] += weights[:, :, None, None, :width].to(query.dtype)
        _hide(view[..., :width], seen - rows, later, request.stored.valid)
        if sinks is not None:
            view[..., width] = sinks
        torch.softmax(padded, -1, out=padded)
        out[:, :, first:last] = (logits @ values[:, :width]).view(batch, query_heads, rows, -1)
    return out


def single_query_attention(
    asked: AttentionQueries, keys: Tensor, values: Tensor, mask: Tensor | None, log_weight: Tensor | None = None
) -> Tensor:
    """Attention of one new token per row.

    The product with the keys is taken keys first, because a matrix of G rows is read badly.

    Args:
        asked: queries [B, H, G, D], those of each KV head, or of each KV row with B or H of 1.
        keys: [B, H, N, D].
        values: [B, H, N, Dv].
        mask: bool, broadcastable to [B, H, G, N], False for entries that are hidden; None for none.
        log_weight: broadcastable to [B, H, G, N], added to the logits; None for nothing.

    Returns:
        [B, H, G, Dv].
    """
    query = asked.query
    logits = cap((keys @ query.transpose(2, 3)).transpose(2, 3) * asked.scale, asked)
    if log_weight is not None:
        logits = logits + log_weight.to(logits.dtype)
    if mask is not None:
        logits = logits.masked_fill(~mask, float("-inf"))
    return softmax(logits, sinks_of(asked, -1, *query.shape[1:3], 1)) @ values


def _hide(logits: Tensor, before: int, later: Tensor, valid: Tensor | None) -> None:
    """Mask logits [B, H, G, rows, width] of later and of unreal entries, in place; each query sees itself.

    before: entries before the block's first query.
    """
    rows, width = logits.shape[-2:]
    own = logits[..., before:]
    own.masked_fill_(later[:rows, : width - before], float("-inf"))
    if valid is not None:
        itself = own.diagonal(dim1=-2, dim2=-1).clone()
        logits.masked_fill_(~valid[:, :, None, None, :width], float("-inf"))
        own.diagonal(dim1=-2, dim2=-1).copy_(itself)
