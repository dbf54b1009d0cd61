"""Attention of any queries to any entries, and second moments of queries."""

from __future__ import annotations

from typing import Literal

from kvsieve.core.scoring import score_dtype
from kvsieve.core.softmax import cap, sinks_of, softmax
from kvsieve.kernels.cpu import mass as compiled
from kvsieve.lazy import Tensor, torch
from kvsieve.types import AttentionQueries

# Logits of one block of queries, [B, Hq, T', N] in float32, stay under about 128 MiB.
_BLOCK_ELEMENTS = 1 << 25
_KEYS = 1 << 14


def query_mass(
    asked: AttentionQueries,
    keys: Tensor,
    visible: Tensor,
    *,
    weights: Tensor | None = None,
    reduce: Literal["sum", "max"] = "sum",
    entries: int | None = None,
    log_weight: Tensor | None = None,
) -> Tensor:
    """Return the softmax attention of T queries over N entries, reduced over the queries.

    Args:
        asked: queries [B, Hq, T, D], post-RoPE.
        keys: [B, H, N, D], post-RoPE.
        visible: bool, broadcastable to [B, H, T, N], entries that each query attends to; a query that sees none
            contributes nothing.
        weights: factors of the queries, broadcastable to [B, H, T]; None for 1.
        reduce: "sum" or "max" over the queries.
        entries: return only the first so many entries; None for all.
        log_weight: float32 [B, H, N], added to the logits; None: all entries weigh 1.

    Returns:
        [B, Hq, entries] in float32 (float64 for float64 inputs).
    """
    query = asked.query
    if log_weight is None and compiled.takes(query, keys, asked.scale):
        return compiled.query_mass(asked, keys, visible, weights=weights, largest=reduce == "max", entries=entries)
    batch, query_heads, count, _ = query.shape
    heads = keys.shape[1]
    length = keys.shape[2]
    groups = query_heads // heads
    dtype = score_dtype(query.dtype)
    block = max(1, _BLOCK_ELEMENTS // max(1, batch * query_heads * length))
    out = torch.zeros(batch, heads, groups, length, dtype=dtype, device=keys.device)
    grouped = query.unflatten(1, (heads, groups))
    sinks = sinks_of(asked, heads, groups, 1, 1)
    for first in range(0, count, block):
        part = (grouped[:, :, :, first : first + block].to(dtype) * asked.scale).flatten(2, 3)
        spans = (keys[:, :, start : start + _KEYS] for start in range(0, length, _KEYS))
        logits = torch.cat([part @ span.to(dtype).transpose(-1, -2) for span in spans], -1).unflatten(2, (groups, -1))
        seen = visible[:, :, None, first : first + block]
        logits = cap(logits, asked)
        if log_weight is not None:
            logits += log_weight[:, :, None, None].to(dtype)
        mass = softmax(logits.masked_fill_(~seen, float("-inf")), sinks)
        mass = mass.masked_fill_(~seen.any(-1, keepdim=True), 0)
        if weights is not None:
            mass = mass * weights[:, :, None, first : first + block, None]
        out = torch.maximum(out, mass.amax(3)) if reduce == "max" else out + mass.sum(3)
    return out.flatten(1, 2)[..., :entries]


def second_moments(query: Tensor, heads: int, valid: Tensor | None = None) -> Tensor:
    """Return the mean of q q^T over the queries that share a KV head.

    Args:
        query: [B, Hq, L, D].
        heads: H.
        valid: bool [B, H or 1, N], False for padding; the last L are these queries'. None: no padding.

    Returns:
        float32 [B * H, D, D]; 0 where all are padding.
    """
    grouped = query.float().unflatten(1, (heads, -1))
    groups, count = grouped.shape[2:4]
    if valid is not None:
        real = valid[:, :, -count:].float()
        # Weights that make the mean cover real queries only.
        weight = real * (count / real.sum(-1, keepdim=True).clamp_min(1))
        grouped = grouped * weight.sqrt()[:, :, None, :, None]
    flat = grouped.flatten(2, 3).flatten(0, 1)
    return flat.transpose(1, 2) @ flat / (groups * count)
