"""Attention of a chunk of a prompt on a CPU as two calls of torch's fused kernel, which needs no mask for either."""

from __future__ import annotations

import torch
from torch import Tensor

from kvsieve.attention.request import AttentionRequest, DenseEntries
from kvsieve.core.softmax import sinks_of
from kvsieve.types import AttentionQueries


def is_even(query: Tensor, values: Tensor) -> bool:
    """Return whether torch's fused CPU kernel takes these tensors: it requires values as wide as keys."""
    return query.device.type == "cpu" and query.shape[-1] == values.shape[-1]


def chunk_attention(request: AttentionRequest[DenseEntries, None]) -> Tensor:
    """Attend to entries that are all real, without a cap: [B, Hq, L, Dv].

    Sinks get their part by the log-sum-exp. The earlier N - L entries are seen by every query, the last L causally; the
    two are merged by their log-sum-exp. Under a mask the kernel would also compute hidden pairs
    (benchmarks/speed/cpu_kinds.py has the times).
    """
    asked = request.asked
    keys = request.stored.keys
    values = request.stored.values
    query = asked.query
    scale = asked.scale
    batch, query_heads, new, dim = query.shape
    heads = keys.shape[1]
    before = keys.shape[2] - new
    groups = query_heads // heads
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    late_keys, late_values = (part[:, :, before:].repeat_interleave(groups, 1) for part in (keys, values))
    out, norm = attend(query, late_keys, late_values, is_causal=True, scale=scale)
    if before:
        # The query heads of a group are rows of one block, so the many earlier keys are not repeated.
        rows = query.reshape(batch, heads, groups * new, dim)
        earlier, early_norm = attend(rows, keys[:, :, :before], values[:, :, :before], scale=scale)
        early_norm = early_norm.reshape(norm.shape)
        share = torch.sigmoid(early_norm - norm)[..., None]
        out = out + share * (earlier.reshape(out.shape) - out)
        norm = norm if asked.is_plain else torch.logaddexp(norm, early_norm)
    return _beside_sinks(out, norm, sinks_of(asked, query_heads, 1)).to(query.dtype)


def token_attention(asked: AttentionQueries, keys: Tensor, values: Tensor) -> Tensor:
    """Attention of queries [B, H, G, D], the query heads of each KV head, over all entries, beside sinks."""
    query = asked.query
    out, norm = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, keys, values, scale=asked.scale)
    return _beside_sinks(out, norm, sinks_of(asked, *query.shape[1:3])).to(query.dtype)


def _beside_sinks(out: Tensor, norm: Tensor, sinks: Tensor | None) -> Tensor:
    """Scale an output [..., Dv], with the log-sum-exp `norm` [...] of its entries, by their share beside sinks."""
    return out if sinks is None else out * torch.sigmoid(norm - sinks)[..., None]
