"""Attention under any mask, for layers that do not see all that is stored."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kvsieve.core.softmax import cap, sinks_of, softmax
from kvsieve.types import AttentionTerms

# Logits held at a time.
_ELEMENTS = 1 << 24


def masked_attention(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, *, scale: float, terms: AttentionTerms | None = None
) -> Tensor:
    """Attention of L new tokens over the entries that a mask shows them.

    The output of a query that sees nothing is finite and otherwise undefined.

    Args:
        query: [B, Hq, L, D].
        keys: [B, H, N, D].
        values: [B, H, N, Dv].
        mask: bool, broadcastable to [B, Hq, L, N], four dimensions, True where an entry is visible.
        scale: factor of the query-key products.
        terms: cap and sinks; None for neither.

    Returns:
        [B, Hq, L, Dv].
    """
    batch, query_heads, new, dim = query.shape
    heads, length = keys.shape[1], keys.shape[2]
    groups = query_heads // heads
    if terms is None:
        if new == 1 and mask.shape[1] == 1:
            # The query heads of a group become the rows of one query block: keys are read once per KV head.
            packed = query.reshape(batch, heads, groups, dim)
            out = F.scaled_dot_product_attention(packed, keys, values, attn_mask=mask, scale=scale)
            return out.reshape(batch, query_heads, 1, -1)
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale, enable_gqa=groups > 1)
    mask = mask.unsqueeze(2) if mask.shape[1] == 1 else mask.unflatten(1, (heads, groups))
    sinks, least = sinks_of(terms, heads, groups, 1, 1), torch.finfo(query.dtype).min
    block = max(16, _ELEMENTS // (batch * query_heads * length))
    parts = []
    for first in range(0, new, block):
        asked = query[:, :, first : first + block]
        logits = asked.reshape(batch, heads, -1, dim) @ keys.transpose(2, 3) * scale
        logits = cap(logits, terms).view(batch, heads, groups, -1, length)
        seen = mask if mask.shape[3] == 1 else mask[:, :, :, first : first + block]
        weights = softmax(logits.masked_fill_(~seen, least), sinks)
        parts.append((weights.flatten(2, 3) @ values).view(batch, query_heads, asked.shape[2], -1))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)
