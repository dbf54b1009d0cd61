"""Attention of one new token over the entries that a reader has chosen."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from kvsieve import kernels
from kvsieve.attention.blocked import single_query_attention
from kvsieve.core.kv_rows import Choice, KVRows
from kvsieve.core.scoring import score_dtype
from kvsieve.core.softmax import cap
from kvsieve.types import AttentionTerms


def sparse_attention(
    query: Tensor, kv_rows: KVRows, choice: Choice, *, scale: float, terms: AttentionTerms | None = None
) -> Tensor:
    """Attention over the chosen entries only.

    The chosen keys and values are copied first, where no kernel reads them in place.

    Args:
        query: [X, G, D], the G query heads of each KV row.
        kv_rows: what the entries were chosen from.
        choice: the chosen entries.
        scale: factor of the query-key products.
        terms: cap and sinks, [X, G]; None for neither. Where the choice blends something in, sinks get what they would
            beside all entries: the chosen ones are `weight` of those.

    Returns:
        [X, G, Dv].
    """
    entries, blend = choice.entries, choice.blend
    if blend is not None and terms is not None and terms.sinks is not None:
        return _blended_beside_sinks(query, kv_rows, choice, scale, terms)
    if kv_rows.in_buffers and kernels.usable(query):
        out = kernels.kv_row_attention(query, kv_rows, entries, scale=scale, terms=terms)
    else:
        asked, keys, values = _read(query, kv_rows, entries)
        if terms is None:
            out = F.scaled_dot_product_attention(asked, keys, values, scale=scale)
        else:
            out = single_query_attention(asked, keys, values, None, scale=scale, terms=terms)
        out = out.reshape(*query.shape[:2], -1)
    return out if blend is None else _blended(out, blend).to(query.dtype)


def _read(query: Tensor, kv_rows: KVRows, entries: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [X, 1, G, D] and entries [X, 1, k, D], or [X, G, 1, D] and [X, G, k, D], for a set per query head."""
    keys, values = kv_rows.read(entries)
    if entries.ndim == 2:
        return query[:, None], keys[:, None], values[:, None]
    return query[:, :, None], keys, values


def _blended_beside_sinks(
    query: Tensor, kv_rows: KVRows, choice: Choice, scale: float, terms: AttentionTerms
) -> Tensor:
    """Blend what is beside the sinks, and leave them what they have of all entries' log-sum-exp."""
    assert choice.blend is not None and terms.sinks is not None
    asked, keys, values = _read(query, kv_rows, choice.entries)
    logits = cap(asked.to(score_dtype(query.dtype)) @ keys.to(score_dtype(query.dtype)).transpose(2, 3) * scale, terms)
    out = (logits.softmax(-1).to(values.dtype) @ values).reshape(*query.shape[:2], -1)
    norm = logits.logsumexp(-1).reshape(query.shape[:2]) - choice.blend[0].log()
    return (_blended(out, choice.blend) * (norm - terms.sinks).sigmoid()[..., None]).to(query.dtype)


def _blended(out: Tensor, blend: tuple[Tensor, Tensor]) -> Tensor:
    weight, vector = blend
    weight = weight[..., None]
    return weight * out + (1 - weight) * vector[:, None]
