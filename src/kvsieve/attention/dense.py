"""Attention over uniformly stored entries through torch's scaled_dot_product_attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kvsieve.attention.blocked import blocked_attention, pays

# Elements of one boolean mask block; a prompt of any length needs no N x N mask.
_MASK_ELEMENTS = 1 << 25


def dense_attention(
    query: Tensor, keys: Tensor, values: Tensor, *, scale: float, valid: Tensor | None = None
) -> Tensor:
    """Causal attention of the last L of N stored entries over all N.

    query: [B, Hq, L, D]; keys: [B, H, N, D]; values: [B, H, N, Dv]; valid: bool [B, H or 1, N], None when all real.
    Entry j is visible to query i when j <= N - L + i and j is valid; every query sees itself (padding stays finite).
    Returns [B, Hq, L, Dv]. Keys and values are never repeated in memory while decoding.
    """
    batch, query_heads, new, dim = query.shape
    heads, length = keys.shape[1], keys.shape[2]
    groups = query_heads // heads
    if new == 1:
        # The query heads of a group become the rows of one query block: keys are read once per KV head.
        packed = query.reshape(batch, heads, groups, dim)
        mask = None
        if valid is not None:
            mask = valid[:, :, None, :].clone()
            mask[..., -1] = True
        out = F.scaled_dot_product_attention(packed, keys, values, attn_mask=mask, scale=scale)
        return out.reshape(batch, query_heads, 1, values.shape[-1])
    if pays(query):
        return blocked_attention(query, keys, values, scale=scale, valid=valid)
    if new == length and valid is None:
        return F.scaled_dot_product_attention(query, keys, values, is_causal=True, scale=scale, enable_gqa=groups > 1)
    mask_heads = 1 if valid is None or valid.shape[1] == 1 else query_heads
    rows = 1 if valid is None else batch
    block = max(16, min(1024, _MASK_ELEMENTS // (rows * mask_heads * length)))
    parts = []
    for first in range(0, new, block):
        last = min(first + block, new)
        seen = length - new + last
        own = torch.arange(length - new + first, seen, device=query.device)[:, None]
        slots = torch.arange(seen, device=query.device)
        mask = (slots <= own)[None, None]
        if valid is not None:
            real = valid[:, :, None, :seen]
            if mask_heads > 1:
                real = real.repeat_interleave(groups, 1)
            mask = (mask & real) | (slots == own)
        parts.append(
            F.scaled_dot_product_attention(
                query[:, :, first:last],
                keys[:, :, :seen],
                values[:, :, :seen],
                attn_mask=mask,
                scale=scale,
                enable_gqa=groups > 1,
            )
        )
    return torch.cat(parts, 2)
