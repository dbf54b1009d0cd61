"""Attention under any mask, for layers that do not see all that is stored."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kvsieve.attention.request import (
    AttentionRequest,
    DenseEntries,
    Executor,
    ScaledPart,
    Shown,
    float_mask,
    why_not_plain,
)
from kvsieve.core.scoring import score_dtype
from kvsieve.core.softmax import cap, sinks_of, softmax

# Logits held at a time.
_ELEMENTS = 1 << 24

_Request = AttentionRequest[DenseEntries, Shown]


def _torch(request: _Request) -> Tensor:
    query = request.asked.query
    keys = request.stored.keys
    values = request.stored.values
    mask = request.sees.mask
    batch, query_heads, new, dim = query.shape
    heads = keys.shape[1]
    scale = request.asked.scale
    groups = query_heads // heads
    if request.stored.log_weight is not None:
        mask = float_mask(request.stored.log_weight.repeat_interleave(groups, 1)[:, :, None], mask, query.dtype)
    elif new == 1 and mask.shape[1] == 1:
        # The query heads of a group become the rows of one query block: keys are read once per KV head.
        packed = query.reshape(batch, heads, groups, dim)
        out = F.scaled_dot_product_attention(packed, keys, values, attn_mask=mask, scale=scale)
        return out.reshape(batch, query_heads, 1, -1)
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale, enable_gqa=groups > 1)


def _products(request: AttentionRequest[DenseEntries, Shown | ScaledPart]) -> Tensor:
    """Attend by products; the output of a query that sees nothing is finite and otherwise undefined."""
    asked = request.asked
    mask = request.sees.mask
    query = asked.query
    keys = request.stored.keys
    batch, query_heads, new, dim = query.shape
    heads = keys.shape[1]
    length = keys.shape[2]
    groups = query_heads // heads
    mask = mask.unsqueeze(2) if mask.shape[1] == 1 else mask.unflatten(1, (heads, groups))
    sinks = sinks_of(asked, heads, groups, 1, 1)
    log_weight = request.stored.log_weight
    least = torch.finfo(query.dtype).min
    scaled = request.sees if isinstance(request.sees, ScaledPart) else None
    block = max(16, _ELEMENTS // (batch * query_heads * length))
    parts = []
    for first in range(0, new, block):
        some = query[:, :, first : first + block]
        logits = some.reshape(batch, heads, -1, dim) @ keys.transpose(2, 3) * asked.scale
        logits = cap(logits, asked).view(batch, heads, groups, -1, length)
        if log_weight is not None:
            logits += log_weight[:, :, None, None].to(logits.dtype)
        seen = mask if mask.shape[3] == 1 else mask[:, :, :, first : first + block]
        logits = logits.masked_fill_(~seen, least)
        if scaled is not None:
            logits = _with_scaled(logits, seen & scaled.part[:, :, None, None], scaled.factor)
        weights = softmax(logits, sinks).to(request.stored.values.dtype)
        parts.append((weights.flatten(2, 3) @ request.stored.values).view(batch, query_heads, some.shape[2], -1))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def _with_scaled(logits: Tensor, part: Tensor, factor: float) -> Tensor:
    """Return logits with which a part, bool of their shape, has its log-sum-exp times a factor."""
    own = logits.to(score_dtype(logits.dtype))
    total = own.masked_fill(~part, float("-inf")).logsumexp(-1, keepdim=True)
    # A query that sees nothing of the part has nothing to change.
    change = ((factor - 1) * total).nan_to_num(0, 0, 0)
    return torch.where(part, own + change, own)


SHOWN = (
    Executor("torch", why_not_plain, _torch),
    Executor("products", lambda request: None, _products),
)
SCALED = (Executor("products", lambda request: None, _products),)
